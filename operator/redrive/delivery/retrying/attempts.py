"""Which attempt at a message this is; called by `decisions` and `processor`."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import NamedTuple

import pulsar

from redrive.copying import reading
from redrive.copying.reading import id_text
from redrive.delivery.middleware.settlement import Failure
from redrive.delivery.parts import Clock
from redrive.delivery.receiving.origin import topic_of
from redrive.policy.cause import Cause
from redrive.policy.envelope import Attempt
from redrive.policy.model import Policy

MAX_COUNTED = 10_000
"""So many messages are counted at a time; beyond, the one that failed, or was given back, longest
ago begins again."""


class _Here(NamedTuple):
    """What a message has been through since it came to this consumer: a crash forgets it."""

    failures: int
    first_failed_at: datetime
    cause: Cause | None


class Attempts:
    """Reads the attempt from a message, and remembers what failed in this consumer alone.

    Args:
        policy: returns the policy in force.
    """

    def __init__(self, policy: Callable[[], Policy], clock: Clock) -> None:
        self._policy = policy
        self._clock = clock
        # By id: of messages that could not be sent on, or are retried in place.
        self._here: OrderedDict[str, _Here] = OrderedDict()
        # By id: how often messages were given back to a broker that doesn't count it.
        self._given_back: OrderedDict[str, int] = OrderedDict()
        self._counting = threading.Lock()

    def of(self, message: pulsar.Message) -> Attempt:
        """Return which attempt at *message* this is; on the source topic the first.

        One whose properties can't be read counts as the first, but for what happened here.
        """
        message_id = id_text(message.message_id())
        attempt = Attempt.of(
            reading.properties(message) or {},
            message_id=message_id,
            retried=self.was_retried(message),
            schema_version=reading.schema_version(message),
            sequenced=self._policy().sequenced,
        )
        here = self._here.get(message_id)
        if here is None:
            return attempt
        return replace(
            attempt,
            reconsume_times=attempt.reconsume_times + here.failures,
            first_failed_at=attempt.first_failed_at or here.first_failed_at,
            cause=here.cause or attempt.cause,
        )

    def was_retried(self, message: pulsar.Message) -> bool:
        """Return whether *message* came from the retry topic."""
        return topic_of(message) == self._policy().retry_topic

    def given_back(self, message: pulsar.Message) -> int:
        """Return how often *message* was given back to a broker that doesn't count it."""
        return self._given_back.get(id_text(message.message_id()), 0)

    def remember(self, message: pulsar.Message, failure: Failure) -> None:
        """Count a failed attempt at *message*, which stays in this consumer."""
        message_id = id_text(message.message_id())
        before = self._here.get(message_id)
        failed_at = self._clock.now() if failure.cause is None else failure.cause.failed_at
        with self._counting:
            self._here[message_id] = _Here(
                1 if before is None else before.failures + 1,
                failure.attempt.first_failed_at or failed_at,
                failure.cause,
            )
            self._here.move_to_end(message_id)
            if len(self._here) > MAX_COUNTED:  # of messages that were never settled here
                self._here.popitem(last=False)

    def give_back(self, message: pulsar.Message) -> None:
        """Count that *message* was given back to a broker that doesn't count it."""
        message_id = id_text(message.message_id())
        with self._counting:
            self._given_back[message_id] = self._given_back.pop(message_id, 0) + 1
            if len(self._given_back) > MAX_COUNTED:  # of messages that went to other consumers
                self._given_back.popitem(last=False)

    def forget(self, message: pulsar.Message) -> None:
        """Forget what is known of *message*, which is settled."""
        if self._here or self._given_back:
            message_id = id_text(message.message_id())
            with self._counting:
                self._here.pop(message_id, None)
                self._given_back.pop(message_id, None)
