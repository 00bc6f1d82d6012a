"""A failed message: retried with back-off, or dead-lettered; called by all kinds of consumers.

verdict → settle: `policy.verdict` and `policy.failure` decide, `settle` obeys.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import NamedTuple

import pulsar

from redrive.delivery.parts import Clock, Subscription
from redrive.delivery.receiving import reading
from redrive.delivery.receiving.key_ordering import KeyOrdering
from redrive.delivery.receiving.origin import topic_of
from redrive.delivery.receiving.reading import id_text
from redrive.delivery.retrying.forwarder import Forwarder
from redrive.delivery.telemetry.events import Event, Name
from redrive.policy.cause import Cause
from redrive.policy.envelope import Attempt
from redrive.policy.failure import FailureRules, after_error
from redrive.policy.model import Policy
from redrive.policy.verdict import (
    Dead,
    DeadReason,
    Discard,
    Retry,
    after_expiry,
    after_failure,
    end,
)

Claims = Callable[[pulsar.Message], bool]
"""Takes a message back from its holder; tells whether the holder may still settle it."""


class _Here(NamedTuple):
    """What a message has been through since it came to this consumer: a crash forgets it."""

    failures: int
    first_failed_at: datetime
    cause: Cause | None


@dataclass(frozen=True)
class RetryHandler:
    """What one consumer does about failed messages.

    Attributes:
        policy: returns the policy in force.
        consumer: its name.
        redact: see `policy.cause.Redaction`.
        key_ordering: where the messages of a key wait for each other, for an ordered policy.
    """

    policy: Callable[[], Policy]
    forwarder: Forwarder
    clock: Clock
    consumer: str
    redact: Callable[[str], str]
    key_ordering: KeyOrdering | None = None
    # By id: of messages that could not be sent on, or are retried in place.
    _here: dict[str, _Here] = field(default_factory=dict)
    # By id: how often messages were given back to a broker that doesn't count it.
    _given_back: Counter[str] = field(default_factory=Counter)

    def attempt_of(self, message: pulsar.Message) -> Attempt:
        """Return which attempt at *message* this is; on the source topic the first.

        One whose properties can't be read counts as the first, but for what happened here.
        """
        message_id = id_text(message.message_id())
        attempt = Attempt.of(
            reading.properties(message) or {},
            message_id=message_id,
            retried=topic_of(message) == self.policy().retry_topic,
            schema_version=reading.schema_version(message),
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

    def forget(self, message: pulsar.Message) -> None:
        """Forget what is known of *message*, which is settled."""
        if self._here or self._given_back:
            message_id = id_text(message.message_id())
            self._here.pop(message_id, None)
            self._given_back.pop(message_id, None)
        if self.key_ordering is not None:
            self.key_ordering.free(message)

    def asked(  # noqa: PLR0913 - what can be asked for
        self,
        message: pulsar.Message,
        subscription: Subscription,
        claims: Claims,
        *,
        delay: timedelta | None,
        level: int | None,
        error: BaseException | None,
    ) -> None:
        """Settle *message* as the application asks for; see `RetryConsumer.reconsume_later`."""
        policy, attempt = self.policy(), self.attempt_of(message)
        verdict = after_failure(
            policy, attempt.reconsume_times, delay=delay, level=level, luck=_luck()
        )
        cause = None if error is None else self._cause(error, attempt)
        # Only now: what can't be judged stays with its holder.
        if claims(message):
            self._settle(message, subscription, attempt, verdict, cause, policy)

    def refused(
        self,
        message: pulsar.Message,
        subscription: Subscription,
        error: BaseException | None,
        claims: Claims,
    ) -> None:
        """Have the broker redeliver *message*, or dead-letter it after `max_retries` of that."""
        policy, attempt = self.policy(), self.attempt_of(message)
        message_id = id_text(message.message_id())
        # With one active consumer, which gets all of them again, brokers count no redeliveries.
        shared = policy.subscription_type.honours_delays or topic_of(message) == policy.retry_topic
        redeliveries = message.redelivery_count() if shared else self._given_back[message_id]
        if redeliveries < policy.max_retries:
            if not claims(message):
                return
            if not shared:
                self._given_back[message_id] += 1
            subscription.negative_acknowledge(message)
            if self.key_ordering is not None:
                self.key_ordering.free(message)
            return
        failed = attempt.reconsume_times + redeliveries + 1
        verdict = end(policy, DeadReason.RETRIES_EXHAUSTED, failed)
        cause = None if error is None else self._cause(error, attempt)
        if claims(message):
            self._settle(message, subscription, attempt, verdict, cause, policy)

    def raised(
        self,
        message: pulsar.Message,
        subscription: Subscription,
        error: Exception,
        rules: FailureRules,
    ) -> None:
        """Settle *message*, whose handler raised *error*, as *rules* and the policy say."""
        policy, attempt = self.policy(), self.attempt_of(message)
        cause = self._failed(message, attempt, error)
        verdict = after_error(
            policy, rules, type(error),
            reconsume_times=attempt.reconsume_times,
            failing_for=attempt.failing_for(cause.failed_at),
            luck=_luck(),
        )  # fmt: skip
        self._settle(message, subscription, attempt, verdict, cause, policy)

    def expired(
        self, message: pulsar.Message, subscription: Subscription, error: Exception
    ) -> None:
        """Redeliver *message*, which was not settled in time, at once, or dead-letter it."""
        policy, attempt = self.policy(), self.attempt_of(message)
        cause = self._failed(message, attempt, error)
        verdict = after_expiry(policy, attempt.reconsume_times)
        self._settle(message, subscription, attempt, verdict, cause, policy)

    def crashed(
        self, message: pulsar.Message, subscription: Subscription, error: Exception
    ) -> bool:
        """Dead-letter a poison message, which kills its consumers; return whether that is done."""
        policy, attempt = self.policy(), self.attempt_of(message)
        cause = self._failed(message, attempt, error)
        verdict = end(policy, DeadReason.CONSUMER_CRASH, attempt.number)
        return self._settle(message, subscription, attempt, verdict, cause, policy)

    def late(self, message: pulsar.Message) -> None:
        """Report that *message* was handled well, but after its time."""
        attempt = self.attempt_of(message)
        self.forwarder.events.report(
            self._event(Name.LATE_SUCCESS, message, attempt),
            "handled well, but after its time; what was done may be done again: origin %s",
            attempt.origin,
        )

    def _failed(self, message: pulsar.Message, attempt: Attempt, error: Exception) -> Cause:
        """Report that an attempt has failed, and why."""
        cause = self._cause(error, attempt)
        self.forwarder.events.report(
            self._event(Name.ATTEMPT_FAILED, message, attempt, reason=cause.type),
            "attempt %d failed of %s: %s: %s\n%s",
            attempt.number, attempt.origin, cause.type, cause.message, cause.trace,
        )  # fmt: skip
        return cause

    def _event(
        self, name: Name, message: pulsar.Message, attempt: Attempt, reason: str = ""
    ) -> Event:
        policy = self.policy()
        return Event(
            name,
            origin=attempt.origin,
            message_id=id_text(message.message_id()),
            attempt=attempt.number,
            generation=policy.generation,
            source=str(policy.topic),
            subscription=policy.subscription,
            reason=reason,
            policy=policy.name,
        )

    def _settle(  # noqa: PLR0913, PLR0917 - all that a hop depends on
        self,
        message: pulsar.Message,
        subscription: Subscription,
        attempt: Attempt,
        verdict: Retry | Dead | Discard,
        cause: Cause | None,
        policy: Policy,
    ) -> bool:
        if self.key_ordering is not None and isinstance(verdict, Retry):
            self._retry_in_place(message, attempt, verdict, cause)
            return False
        settled = self.forwarder.settle(
            message, attempt, verdict, cause, policy=policy, subscription=subscription
        )
        if settled:
            self.forget(message)
        else:
            self._remember(message, attempt, cause)
        return settled

    def _retry_in_place(
        self, message: pulsar.Message, attempt: Attempt, verdict: Retry, cause: Cause | None
    ) -> None:
        seconds = verdict.delay.total_seconds()
        self._remember(message, attempt, cause)
        self.forwarder.incoming.again(message, seconds)
        self.forwarder.events.report(
            self._event(Name.RETRIED_IN_PLACE, message, attempt),
            "retried in its consumer in %g s, its key waits: origin %s, failed attempts %d",
            seconds, attempt.origin, verdict.reconsume_times,
        )  # fmt: skip

    def _remember(self, message: pulsar.Message, attempt: Attempt, cause: Cause | None) -> None:
        message_id = id_text(message.message_id())
        before = self._here.get(message_id)
        failed_at = self.clock.now() if cause is None else cause.failed_at
        self._here[message_id] = _Here(
            1 if before is None else before.failures + 1,
            attempt.first_failed_at or failed_at,
            cause,
        )

    def _cause(self, error: BaseException, attempt: Attempt) -> Cause:
        return Cause.from_error(
            error,
            failed_at=self.clock.now(),
            consumer=self.consumer,
            attempt=attempt.number,
            redact=self.redact,
        )


def _luck() -> float:
    return random.random()  # noqa: S311 - spreads load, keeps no secret
