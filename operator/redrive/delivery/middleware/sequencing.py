"""Messages of a key that has a dead letter follow it, for policies that keep sequences.

    record that it is one ─▶ send the letter ─▶ acknowledge

Whoever gets the key next reads the record before it handles a message. A crash after the record
leaves the message to be sent again, unhandled; one after the letter duplicates the letter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import pulsar

from redrive.copying import reading
from redrive.copying.errors import NotSentError
from redrive.copying.reading import id_text
from redrive.delivery.middleware.chain import (
    Forward,
    Middleware,
    Receive,
    Settle,
    receive_accepted,
)
from redrive.delivery.middleware.settlement import Hop, Settlement
from redrive.delivery.parts import Parts, SequenceLog
from redrive.delivery.retrying.attempts import Attempts
from redrive.policy import envelope
from redrive.policy.model import Policy
from redrive.policy.sequences import MAX_LETTERS, Letter, record_name
from redrive.policy.verdict import Discard, Done

AGAIN_AFTER_SECONDS = 5.0
"""When a message is looked at again of which it can't be known whether its key is dead."""
LOOK_SECONDS = 0.5
"""How often a letter that came back is looked at again while others go before it."""
STILL_SECONDS = 30.0
"""A letter that came back waits until none before it was handled for so long."""

_log = logging.getLogger(__name__)


class SequencesFullError(NotSentError):
    """A policy has as many dead letters in sequences as are remembered; it was not stored."""

    reason = "SequencesFull"


class Sequencing(Middleware):
    """Hands out no message that comes after a dead letter of its key. For several threads.

    Args:
        letters: what all consumers of the policy know of dead letters.
        follow: dead-letters a message that was not handled.
    """

    def __init__(
        self,
        parts: Parts,
        letters: SequenceLog,
        attempts: Attempts,
        policy: Callable[[], Policy],
        follow: Callable[[pulsar.Message], None],
    ) -> None:
        self._incoming = parts.incoming
        self._clock = parts.clock
        self._letters = letters
        self._attempts = attempts
        self._policy = policy
        self._follow = follow
        # By id of letters that came back: the one that goes first, and since when.
        self._waiting: dict[str, tuple[Letter | None, float]] = {}
        # By id of messages that are handled, and whose record could not be removed.
        self._ended: dict[str, Settlement] = {}
        self._settle: Settle

    def receive(self, receive: Receive) -> Receive:
        """Receive the next message that is not behind a dead letter; the others follow it."""

        def receive_in_sequence(timeout: float | None) -> pulsar.Message | None:
            return receive_accepted(receive, self._may_be_handled, self._clock.monotonic, timeout)

        return receive_in_sequence

    def settle(self, settle: Settle) -> Settle:
        """Take a letter that was replayed out of its sequence when it is done."""

        def settle_in_sequence(settlement: Settlement) -> pulsar.MessageId | None:
            message, verdict, _ = settlement
            if isinstance(verdict, (Done, Discard)) and not self._is_off_record(message):
                # Not acknowledged: the key would stay dead. Nor is it handled again.
                self._ended[id_text(message.message_id())] = settlement
                self._incoming.again(message, AGAIN_AFTER_SECONDS)
                return None
            return settle(settlement)

        self._settle = settle_in_sequence
        return settle_in_sequence

    def forward(self, forward: Forward) -> Forward:
        """Record a dead letter before it is sent."""

        def forward_in_sequence(hop: Hop) -> pulsar.MessageId | None:
            key = reading.sequence_key(hop.message)
            if key and hop.topic == self._policy().dead_letter_topic:
                self._record(key, hop.message)
            return forward(hop)

        return forward_in_sequence

    def _is_off_record(self, message: pulsar.Message) -> bool:
        key = reading.sequence_key(message)
        first_id = self._attempts.of(message).first_id if key else ""
        if self._letters.sequences.find(key, first_id) is None:
            return True
        try:
            self._letters.write(record_name(key, first_id), b"")
        except NotSentError as error:
            _log.warning("a message that was handled is acknowledged later: %s", error)
            return False
        return True

    def _may_be_handled(self, message: pulsar.Message) -> bool:
        ended = self._ended.pop(id_text(message.message_id()), None)
        if ended is not None:
            self._settle(ended)
            return False
        key = reading.sequence_key(message)
        if not key:
            return True
        try:
            # What was recorded before the broker gave this consumer the message.
            self._letters.read()
        except NotSentError as error:
            _log.warning("a message waits until it is known whether its key is dead: %s", error)
            self._incoming.again(message, AGAIN_AFTER_SECONDS)
            return False
        first_id = self._attempts.of(message).first_id
        if self._letters.sequences.may_be_handled(key, first_id, _replays(message)):
            self._waiting.pop(id_text(message.message_id()), None)
            return True
        if self._waits(key, first_id, message):
            self._incoming.again(message, LOOK_SECONDS)
        elif self._is_full(key, first_id):  # its key may live again when there is room
            _log.warning("%s", _full())
            self._incoming.again(message, AGAIN_AFTER_SECONDS)
        else:
            self._follow(message)
        return False

    def _waits(self, key: str, first_id: str, message: pulsar.Message) -> bool:
        """Whether *message* came back behind others that are being handled elsewhere."""
        own = self._letters.sequences.find(key, first_id)
        if own is None or _replays(message) <= own.replays:
            return False
        first, now = self._letters.sequences.first(key), self._clock.monotonic()
        message_id = id_text(message.message_id())
        before, since = self._waiting.get(message_id, (None, now))
        since = since if before == first else now
        if now - since < STILL_SECONDS:
            self._waiting[message_id] = first, since
            return True
        del self._waiting[message_id]
        return False

    def _record(self, key: str, message: pulsar.Message) -> None:
        sequences, first_id = self._letters.sequences, self._attempts.of(message).first_id
        letter = sequences.enter(key, first_id, _replays(message))
        if sequences.find(key, first_id) == letter:
            return
        if self._is_full(key, first_id):
            raise _full()
        self._letters.write(record_name(key, first_id), letter.encode())

    def _is_full(self, key: str, first_id: str) -> bool:
        sequences = self._letters.sequences
        return len(sequences) >= MAX_LETTERS and sequences.find(key, first_id) is None


def _full() -> SequencesFullError:
    return SequencesFullError(
        "a message can't become a dead letter, and waits in its consumer with its key",
        got=f"{MAX_LETTERS} dead letters in sequences",
        remedy="replay them",
    )


def _replays(message: pulsar.Message) -> int:
    return envelope.replays(reading.properties(message) or {})
