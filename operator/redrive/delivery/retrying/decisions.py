"""A failed message → its verdict, as a value; called by all kinds of consumers.

`policy.verdict` and `policy.failure` decide, `processor` carries out. Nothing is changed here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import pulsar

from redrive.delivery.middleware.settlement import Failure, Redeliver, Settlement
from redrive.delivery.parts import Clock
from redrive.delivery.receiving.origin import topic_of
from redrive.delivery.retrying.attempts import Attempts
from redrive.policy.cause import Cause
from redrive.policy.envelope import Attempt
from redrive.policy.failure import DeadLetter, FailureRules, RetryLater, after_error
from redrive.policy.model import Policy
from redrive.policy.verdict import DeadReason, after_expiry, after_failure, end


@dataclass(frozen=True)
class Decisions:
    """What one consumer does about failed messages.

    Attributes:
        policy: returns the policy in force.
        consumer: its name.
        redact: see `policy.cause.Redaction`.
    """

    policy: Callable[[], Policy]
    attempts: Attempts
    clock: Clock
    consumer: str
    redact: Callable[[str], str]

    def raised(self, message: pulsar.Message, error: Exception, rules: FailureRules) -> Settlement:
        """Decide about *message*, whose handler raised *error*, as *rules* and the policy say."""
        asked = isinstance(error, (RetryLater, DeadLetter))
        cause = error.__cause__ if asked and error.__cause__ is not None else error
        failure = self._failure(message, cause, raised=True)
        failed_at = self.clock.now() if failure.cause is None else failure.cause.failed_at
        verdict = after_error(
            failure.policy, rules, error,
            reconsume_times=failure.attempt.reconsume_times,
            failing_for=failure.attempt.failing_for(failed_at),
            luck=_luck(),
        )  # fmt: skip
        return Settlement(message, verdict, failure)

    def expired(self, message: pulsar.Message, error: Exception) -> Settlement:
        """Redeliver *message*, which was not settled in time, at once, or dead-letter it."""
        failure = self._failure(message, error, raised=True)
        verdict = after_expiry(failure.policy, failure.attempt.reconsume_times)
        return Settlement(message, verdict, failure)

    def crashed(self, message: pulsar.Message, error: Exception) -> Settlement:
        """Dead-letter a poison message, which kills its consumers."""
        failure = self._failure(message, error, raised=True)
        verdict = end(failure.policy, DeadReason.CONSUMER_CRASH, failure.attempt.number)
        return Settlement(message, verdict, failure)

    def follows(self, message: pulsar.Message) -> Settlement:
        """Dead-letter *message*, which was not handled: one before it with its key is dead."""
        failure = self._failure(message, None, raised=False)
        verdict = end(failure.policy, DeadReason.FOLLOWS, failure.attempt.reconsume_times)
        return Settlement(message, verdict, failure)

    def asked(
        self,
        message: pulsar.Message,
        error: BaseException | None,
        *,
        delay: timedelta | None,
        level: int | None,
    ) -> Settlement:
        """Decide as the application asks for; see `RetryConsumer.reconsume_later`."""
        failure = self._failure(message, error, raised=False)
        verdict = after_failure(
            failure.policy, failure.attempt.reconsume_times, delay=delay, level=level, luck=_luck()
        )
        return Settlement(message, verdict, failure)

    def refused(self, message: pulsar.Message, error: BaseException | None) -> Settlement:
        """Have the broker redeliver *message*, or dead-letter it after `max_retries` of that."""
        policy = self.policy()
        # With one active consumer, which gets all of them again, brokers count no redeliveries. And
        # they count those of an entry: of a batch, a message may have been redelivered for another.
        shared = policy.subscription_type.honours_delays or topic_of(message) == policy.retry_topic
        counted = shared and message.message_id().batch_index() < 0
        redeliveries = message.redelivery_count() if counted else self.attempts.given_back(message)
        if redeliveries < policy.max_retries:
            reason = "" if error is None else type(error).__name__
            return Settlement(message, Redeliver(counted, reason))
        failure = self._failure(message, error, raised=False)
        failed = failure.attempt.reconsume_times + redeliveries + 1
        verdict = end(failure.policy, DeadReason.RETRIES_EXHAUSTED, failed)
        return Settlement(message, verdict, failure)

    def _failure(
        self, message: pulsar.Message, error: BaseException | None, *, raised: bool
    ) -> Failure:
        policy, attempt = self.policy(), self.attempts.of(message)
        cause = None if error is None else self._cause(error, attempt)
        return Failure(attempt, policy, error, cause, raised)

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
