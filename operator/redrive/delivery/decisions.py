"""From a failed message to a verdict.

`policy.verdict` decides, with the delay of `policy.ladder`; `processor` carries out. Nothing is
changed here.
"""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import NamedTuple

import pulsar

from redrive.delivery.concurrency import ends_run, log_of
from redrive.delivery.in_flight import topic_of
from redrive.delivery.middleware.chain import Decide, Failure, Redeliver, RetryInPlace, Settlement
from redrive.delivery.parts import Clock
from redrive.errors import class_name
from redrive.messages import (
    UNDECRYPTABLE,
    NotCopyableError,
    NotSentError,
    message_id_text,
    read_properties,
    schema_version,
)
from redrive.policy.envelope import Attempt, Cause
from redrive.policy.model import Policy
from redrive.policy.values import check_instance
from redrive.policy.verdict import (
    Dead,
    DeadLetter,
    DeadReason,
    Discard,
    FailureRules,
    Retry,
    RetryLater,
    after_error,
    after_expiry,
    after_failure,
    cause_of,
    end,
    is_a,
    members_of,
)

MAX_COUNTED = 10_000
"""Maximum number of messages with a count. Beyond it, the message that failed, or was given back,
longest ago loses its count."""


class _Here(NamedTuple):
    """Failures of a message since it came to this consumer: a crash forgets them."""

    failures: int
    first_failed_at: datetime
    cause: Cause | None


class Attempts:
    """Reads the attempt from a message, and remembers failures in this consumer alone.

    Args:
        policy: returns the policy in force.

    Attributes:
        failed_here: by id, failures of messages that could not be sent on or are retried in place.
        times_given_back: by id, how often messages were given back to a broker that doesn't count.
    """

    def __init__(self, policy: Callable[[], Policy], clock: Clock) -> None:
        self._policy = policy
        self._clock = clock
        self.failed_here: OrderedDict[str, _Here] = OrderedDict()
        self.times_given_back: OrderedDict[str, int] = OrderedDict()
        self._counting = threading.Lock()

    def of(self, message: pulsar.Message) -> Attempt:
        """Return which attempt at *message* this is; on the source topic the first.

        One whose properties can't be read counts as the first, except for failures here.
        """
        message_id, policy = message_id_text(message), self._policy()
        attempt = Attempt.of(
            read_properties(message) or {},
            message_id=message_id,
            retried=topic_of(message) == policy.retry_topic,
            schema_version=schema_version(message),
            sequenced=policy.sequenced,
        )
        redeliveries = self.redeliveries(message)
        if redeliveries:
            attempt = replace(attempt, redeliveries=redeliveries)
        here = self.failed_here.get(message_id)
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

    def redeliveries(self, message: pulsar.Message) -> int:
        """Return how often *message* was given back, as the broker or this consumer counts."""
        count = int(message.redelivery_count())
        if not count and not self.times_given_back:
            return 0
        return count if self.counted_by_broker(message) else self.given_back(message)

    def counted_by_broker(self, message: pulsar.Message) -> bool:
        """Return True if the broker counts how often *message* is given back.

        With one active consumer, which gets all messages again, brokers count no redeliveries. And
        they count those of an entry: a message of a batch may be redelivered for another.
        """
        shared = self._policy().subscription_type.honours_delays or self.was_retried(message)
        return shared and message.message_id().batch_index() < 0

    def given_back(self, message: pulsar.Message) -> int:
        """Return how often *message* was given back to a broker that doesn't count it."""
        if not self.times_given_back:
            return 0
        return self.times_given_back.get(message_id_text(message), 0)

    def remember(self, message: pulsar.Message, failure: Failure) -> None:
        """Count a failed attempt at *message*, which stays in this consumer."""
        message_id = message_id_text(message)
        before = self.failed_here.get(message_id)
        failed_at = self._clock.now() if failure.cause is None else failure.cause.failed_at
        with self._counting:
            self.failed_here[message_id] = _Here(
                1 if before is None else before.failures + 1,
                failure.attempt.first_failed_at or failed_at,
                failure.cause,
            )
            self.failed_here.move_to_end(message_id)
            if len(self.failed_here) > MAX_COUNTED:  # of messages that were never settled here
                self.failed_here.popitem(last=False)

    def give_back(self, message: pulsar.Message) -> None:
        """Count that *message* was given back to a broker that doesn't count it."""
        message_id = message_id_text(message)
        with self._counting:
            self.times_given_back[message_id] = self.times_given_back.pop(message_id, 0) + 1
            if len(self.times_given_back) > MAX_COUNTED:  # of messages that went to other consumers
                self.times_given_back.popitem(last=False)

    def forget(self, message: pulsar.Message) -> None:
        """Forget *message*, which is settled."""
        message_id = message_id_text(message)
        with self._counting:
            self.failed_here.pop(message_id, None)
            self.times_given_back.pop(message_id, None)


_log = log_of(__name__)


@dataclass(frozen=True)
class Decisions:
    """Decides about the failed messages of one consumer.

    Attributes:
        policy: returns the policy in force.
        consumer: its name.
        redact: see `policy.envelope.Redaction`.
    """

    policy: Callable[[], Policy]
    attempts: Attempts
    clock: Clock
    consumer: str
    redact: Callable[[str], str]

    def raised(
        self, message: pulsar.Message, error: BaseException, rules: FailureRules
    ) -> Settlement:
        """Decide about *message*, whose handler raised *error*, as *rules* and the policy say.

        Where a rule raises an exception, the policy alone decides: else the message would end each
        consumer that gets it.
        """
        asked = is_a(error, (RetryLater, DeadLetter))
        raised_from = cause_of(error) if asked else None
        cause = error if raised_from is None else raised_from
        failure, luck = self._failure(message, cause, raised=True), _luck()
        failed_at = self.clock.now() if failure.cause is None else failure.cause.failed_at

        def decide_by(policy: Policy, rules: FailureRules) -> Retry | Dead | Discard:
            return after_error(
                policy, rules, error,
                reconsume_times=failure.attempt.reconsume_times,
                failing_for=failure.attempt.failing_for(failed_at),
                luck=luck,
            )  # fmt: skip

        def decide(policy: Policy) -> Retry | Dead | Discard:
            try:
                return decide_by(policy, rules)
            except BaseException as broken:
                if ends_run(broken):
                    raise
                _log.exception("a failure rule raised an exception; no rule is applied")
                return decide_by(policy, FailureRules(deadline=rules.deadline))

        return _settlement(message, failure, decide)

    def expired(self, message: pulsar.Message, error: Exception) -> Settlement:
        """Redeliver *message*, which was not settled in time, at once, or dead-letter it."""
        failure = self._failure(message, error, raised=True)
        times = failure.attempt.reconsume_times
        return _settlement(message, failure, lambda policy: after_expiry(policy, times))

    def crashed(self, message: pulsar.Message, error: Exception) -> Settlement:
        """Dead-letter a poison message, which kills its consumers."""
        failure = self._failure(message, error, raised=True)
        return _end(message, failure, DeadReason.CONSUMER_CRASH, failure.attempt.number)

    def undecryptable(self, message: pulsar.Message, messages: int) -> Settlement:
        """Dead-letter an entry that takes the permits of so many messages each time; encoded."""
        error = NotCopyableError(
            "an entry can't be decrypted, and states more messages than clients put in a batch",
            got=messages,
            remedy="find its producer; no client writes it by default",
            reason=UNDECRYPTABLE,
        )
        failure = self._failure(message, error, raised=False)
        failure = failure._replace(not_copied=frozenset({error.reason}))
        return _end(message, failure, DeadReason.NOT_COPYABLE, failure.attempt.number)

    def follows(self, message: pulsar.Message) -> Settlement:
        """Dead-letter *message*, which was not handled: one before it with its key is dead."""
        failure = self._failure(message, None, raised=False)
        return _end(message, failure, DeadReason.FOLLOWS, failure.attempt.reconsume_times)

    def asked(
        self,
        message: pulsar.Message,
        error: BaseException | None,
        *,
        delay: timedelta | None,
        level: int | None,
    ) -> Settlement:
        """Decide as the application asks for; see `RetryConsumer.reconsume_later`."""
        _check_cause(error)
        failure, luck = self._failure(message, error, raised=False), _luck()
        times = failure.attempt.reconsume_times
        return _settlement(
            message,
            failure,
            lambda policy: after_failure(policy, times, delay=delay, level=level, luck=luck),
        )

    def refused(self, message: pulsar.Message, error: BaseException | None) -> Settlement:
        """Have the broker redeliver *message*, or dead-letter it after `max_retries` of that."""
        _check_cause(error)
        policy = self.policy()
        redeliveries = self.attempts.redeliveries(message)
        ends_now = bool(policy.dead_letter_now) and _ends_now(policy, self.attempts.of(message))
        if redeliveries < policy.max_retries and not ends_now:
            reason = "" if error is None else class_name(error)
            return Settlement(message, Redeliver(self.attempts.counted_by_broker(message), reason))
        failure = self._failure(message, error, raised=False)
        failed = failure.attempt.reconsume_times + redeliveries + 1
        dead_reason = DeadReason.REQUESTED if ends_now else DeadReason.RETRIES_EXHAUSTED
        return _end(message, failure, dead_reason, failed)

    def not_copied(self, settlement: Settlement, error: NotSentError) -> Settlement | None:
        """Decide about a message that can't be copied as it is: it is a dead letter, encoded.

        Where the policy keeps none it is retried in its consumer. None if that is no answer: the
        broker did not store the message now, or not even an encoded one.
        """
        failure, verdict = settlement.failed(), settlement.verdict
        if not isinstance(error, NotCopyableError) or error.reason in failure.not_copied:
            return None
        reasons = failure.not_copied | {error.reason}
        failure = failure._replace(raised=False, not_copied=reasons)
        if not isinstance(verdict, Retry):
            return settlement._replace(failure=failure)
        if not failure.policy.dead_letters:
            in_place = RetryInPlace(verdict.delay, verdict.reconsume_times)
            return settlement._replace(verdict=in_place, failure=failure)
        times = verdict.reconsume_times
        return _end(settlement.message, failure, DeadReason.NOT_COPYABLE, times)

    def again(self, settlement: Settlement) -> Settlement:
        """Decide once more, at the same count, where another policy is in force than was then."""
        policy, failure = self.policy(), settlement.failed()
        if failure.decide is None or policy is failure.policy:
            return settlement
        return _settlement(settlement.message, failure._replace(policy=policy), failure.decide)

    def _failure(
        self, message: pulsar.Message, error: BaseException | None, *, raised: bool
    ) -> Failure:
        policy, attempt, cause = self.policy(), self.attempts.of(message), None
        if error is not None:
            cause = Cause.from_error(
                error,
                failed_at=self.clock.now(),
                consumer=self.consumer,
                attempt=attempt.number,
                redact=self.redact,
            )
        return Failure(attempt, policy, error, cause, raised)


def _settlement(message: pulsar.Message, failure: Failure, decide: Decide) -> Settlement:
    def decide_finally(policy: Policy) -> Retry | Dead | Discard:
        verdict = decide(policy)
        if isinstance(verdict, Retry) and _ends_now(policy, failure.attempt):
            return end(policy, DeadReason.REQUESTED, verdict.reconsume_times)
        return verdict

    return Settlement(
        message, decide_finally(failure.policy), failure._replace(decide=decide_finally)
    )


def _ends_now(policy: Policy, attempt: Attempt) -> bool:
    """Return True if an operator has asked to dead-letter the message at its next failure."""
    return policy.dead_letters and attempt.origin in policy.dead_letter_now


def _end(message: pulsar.Message, failure: Failure, reason: DeadReason, failed: int) -> Settlement:
    return _settlement(message, failure, lambda policy: end(policy, reason, failed))


def _check_cause(cause: BaseException | None) -> None:
    check_instance(cause, BaseException, "cause", optional=True)


def drop_tracebacks(error: BaseException | None) -> None:
    """Drop the tracebacks of *error*, its members, causes and contexts.

    They keep the local variables of the handler alive, such as the decoded message.
    """
    attributes = vars(BaseException)  # an exception of the program may hide its own
    behind, dropped = [error], set[int]()
    while behind:
        error = behind.pop()
        if error is not None and id(error) not in dropped:
            dropped.add(id(error))
            attributes["__traceback__"].__set__(error, None)
            context: BaseException | None = attributes["__context__"].__get__(error)
            behind += [cause_of(error), context, *(members_of(error) or ())]


_luck = random.random  # spreads load, keeps no secret
