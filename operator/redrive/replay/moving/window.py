"""What is on its way to the target at a time: bounded, and settled as receipts come.

A receipt settles a message; one that does not come within seconds, or says neither stored nor
refused, leaves it in doubt until it is looked for in the target.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress

import pulsar

from redrive.copying.errors import SchemaError
from redrive.replay.ledger.permit import Permit
from redrive.replay.moving.outcome import Key, RangeOutcome
from redrive.replay.moving.outlets import Receipt, StalledError
from redrive.replay.moving.pace import Pace
from redrive.replay.moving.sending import Sender
from redrive.replay.topic.rows import DeadLetterRow

MESSAGES = 2_000
BYTES = 32 * 2**20
STALL_SECONDS = 15.0
ALONE_SECONDS = 15.0
ALONE_TRIES = 2
LEASE_SECONDS = 0.5
CONFIRM_SECONDS = 1.0
"""The time between two looks at the subscriptions of the target, while messages are sent: so much
may be stored while there is none, and is acknowledged in no case."""
_OVER_QUOTA = (
    pulsar.Result.ProducerBlockedQuotaExceededError,
    pulsar.Result.ProducerBlockedQuotaExceededException,
)


class DrainedError(Exception):
    """The run wants no more to be sent."""


class UnsubscribedError(Exception):
    """The target has no subscription that keeps what is stored there."""


class Window:
    """Sends messages of one range.

    A message that is stored is settled once the target was seen, after its receipt, to have the
    subscriptions that keep it: else it is in no subscription's backlog, and no consumer gets it.

    Args:
        sender: of one try.
        outcome: takes in what becomes of each.
        check_lease: passes while sending is allowed, and returns how.
        acknowledge: called with a message of each entry once all of it is stored.
        first: the first entry of the range, which offsets count from.
        is_subscribed: tells whether the target keeps messages.

    Attributes:
        unconfirmed: what is stored, and not settled yet.
    """

    def __init__(  # noqa: PLR0913, PLR0917  one range
        self,
        sender: Sender,
        outcome: RangeOutcome,
        check_lease: Callable[[], Permit],
        acknowledge: Callable[[DeadLetterRow], None],
        first: int,
        is_subscribed: Callable[[], bool],
    ) -> None:
        self._sender = sender
        self._outcome = outcome
        self._check_lease = check_lease
        self._acknowledge = acknowledge
        self._first = first
        self._checked = -math.inf
        self._permit = Permit()
        self._pace = Pace()
        self._is_subscribed = is_subscribed
        self._confirmed = time.monotonic()
        self.unconfirmed: dict[Key, DeadLetterRow] = {}
        self._unconfirmed_bytes = 0
        self._on_the_way: set[Key] = set()
        self._bytes = 0

    def send(self, key: Key, letter: DeadLetterRow, properties: dict[str, str]) -> None:
        """Send a message, unless it is refused already.

        Args:
            key: how *letter* is called, see `key`.
            letter: what to send.
            properties: what it carries.

        Raises:
            StalledError: the broker has not answered for seconds.
            DrainedError: nothing more is to be sent.
            UnsubscribedError: as for `confirm`.
        """
        outcome = self._outcome
        if letter.size >= outcome.too_big:
            outcome.refuse(key, "TooBig")
        elif key in outcome.alone:
            self._send_alone(key, letter, properties)
        else:
            self._send(key, letter, properties)
            if len(self._on_the_way) >= MESSAGES or self._bytes >= BYTES:
                self._settle(MESSAGES // 2, BYTES // 2, STALL_SECONDS)
        if not outcome.proven:
            self.drain()
            self.confirm()
            if outcome.is_sent(key):
                self._sender.prove(letter)
                outcome.proven = True

    def drain(self) -> None:
        """Wait for all that is on its way.

        Raises:
            StalledError: as for `send`.
        """
        self._settle(0, 0, STALL_SECONDS)

    def confirm(self) -> None:
        """Settle what is stored, once the target is seen to keep it.

        Raises:
            UnsubscribedError: it does not.
        """
        if not self.unconfirmed:
            return
        if not self._is_subscribed():
            raise UnsubscribedError
        for key, letter in self.unconfirmed.items():
            if self._outcome.store(key, letter.batch_size):
                self._acknowledge(letter)
        self.unconfirmed.clear()
        self._unconfirmed_bytes, self._confirmed = 0, time.monotonic()

    def give_up(self) -> None:
        """Leave all that is on its way in doubt, once nothing more is sent."""
        with suppress(StalledError):
            self._take_in()
        self._sender.close()
        self._outcome.doubts |= self._on_the_way

    def key(self, letter: DeadLetterRow) -> Key:
        """Return how *letter* is called within its range."""
        return letter.position.entry - self._first, letter.position.batch_index

    def _send_alone(self, key: Key, letter: DeadLetterRow, properties: dict[str, str]) -> None:
        """Send what may be the message that the broker refuses; one refused twice is refused.

        A broker does not say which message it refuses, and the client sends it again for ever.
        """
        outcome = self._outcome
        self.drain()
        if outcome.alone[key] >= ALONE_TRIES:
            if letter.size > outcome.largest:
                outcome.too_big = min(outcome.too_big, letter.size)
            outcome.refuse(key, "NotAccepted")
            return
        outcome.alone[key] += 1
        self._send(key, letter, properties)
        self._settle(0, 0, ALONE_SECONDS)

    def _send(self, key: Key, letter: DeadLetterRow, properties: dict[str, str]) -> None:
        partition = self._sender.partition(letter)
        if not self._sender.holds(partition, letter.schema_version):
            # Of a producer that is closed no receipts come.
            self.drain()
            try:
                self._sender.hold(partition, letter.schema_version)
            except SchemaError as error:
                self._outcome.refuse(key, error.reason)
                return
        self._wait_for_permission()
        # Before: what can't be sent may have left in part, or whole.
        self._on_the_way.add(key)
        self._bytes += letter.size
        self._sender.send(key, letter, partition, properties)

    def _wait_for_permission(self) -> None:
        while True:
            now = time.monotonic()
            if now - self._checked > LEASE_SECONDS:
                self._permit, self._checked = self._check_lease(), now
                self._take_in()
            if now - self._confirmed > CONFIRM_SECONDS or self._unconfirmed_bytes > BYTES:
                self.confirm()
            if self._permit.drain:
                raise DrainedError
            wait = self._pace.due_in(now, self._permit.rate)
            if not wait:
                break
            time.sleep(min(wait, LEASE_SECONDS))
        self._pace.sent(now, self._permit.rate)

    def _take_in(self) -> None:
        """Take in what receipts there are: at a low rate the window is full only after minutes."""
        for receipt in self._sender.receive(0.0):
            self._receive(receipt)

    def _settle(self, messages: int, size: int, seconds: float) -> None:
        """Take in receipts until so many messages, of so many bytes, are on their way at most."""
        while len(self._on_the_way) > messages or self._bytes > size:
            receipts = self._sender.receive(seconds)
            if not receipts:
                raise StalledError
            for receipt in receipts:
                self._receive(receipt)

    def _receive(self, receipt: Receipt) -> None:
        (key, letter, partition), result, stored = receipt
        outcome = self._outcome
        self._on_the_way.discard(key)
        self._bytes -= letter.size
        if stored:
            outcome.stored_in.add(partition)
            outcome.largest = max(outcome.largest, letter.size)
            self.unconfirmed[key] = letter
            self._unconfirmed_bytes += letter.size
        elif result == pulsar.Result.MessageTooBig:
            outcome.refuse(key, "TooBig")
        else:
            outcome.doubts.add(key)
            if result in _OVER_QUOTA:  # what follows would overtake it
                raise StalledError
