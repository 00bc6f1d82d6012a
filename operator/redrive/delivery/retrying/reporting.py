"""Reports what becomes of failed messages: the innermost middleware of all consumers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pulsar

from redrive.copying.errors import NotCopyableError, NotSentError
from redrive.copying.reading import id_text
from redrive.delivery.middleware.chain import Middleware, Settle
from redrive.delivery.middleware.outage_circuit import Outage
from redrive.delivery.middleware.settlement import (
    Failure,
    RetryInPlace,
    Settlement,
)
from redrive.delivery.retrying.attempts import Attempts
from redrive.delivery.retrying.forwarder import destination
from redrive.delivery.telemetry.events import CONNECTION_TEXTS, Event, Events, Name
from redrive.policy.cause import Cause
from redrive.policy.envelope import Attempt
from redrive.policy.model import Policy
from redrive.policy.verdict import Dead, Discard, Retry

_OUTAGES = {
    Name.OUTAGE_BEGAN: "most messages fail with %s: this consumer pauses, and probes with single "
    "messages, since %s%s",
    Name.OUTAGE_ENDED: "a message was handled: the outage (%s) since %s is over%s",
    Name.OUTAGE_IGNORED: "the outage (%s) since %s is ignored from now on%s: failures count again",
}


_TAKING = {
    Name.TAKING_STOPPED: "too many messages wait to be sent on: this consumer takes nothing new "
    "from the broker until a tenth of them are sent",
    Name.TAKING_RESUMED: "messages that waited were sent on: this consumer takes new ones again",
}


class Reporting(Middleware):
    """Reports failed attempts, hops and late successes as `Event`."""

    def __init__(self, events: Events, policy: Callable[[], Policy], attempts: Attempts) -> None:
        self._events = events
        self._policy = policy
        self._attempts = attempts

    def settle(self, settle: Settle) -> Settle:
        """Report before that an attempt failed, and after what became of its message."""

        def settle_reported(settlement: Settlement) -> pulsar.MessageId | None:
            message, verdict, failure = settlement.message, settlement.verdict, settlement.failed()
            if failure.raised and failure.cause is not None:
                self._failed(message, failure, failure.cause)
            try:
                receipt = settle(settlement)
            except NotSentError as error:
                encoded = isinstance(error, NotCopyableError) and not failure.not_copied
                if isinstance(verdict, (Retry, Dead)) and not encoded:
                    self._unsent(message, verdict, failure, error)
                raise
            self._settled(settlement, failure, receipt)
            return receipt

        return settle_reported

    def late(self, message: pulsar.Message) -> None:
        """Report that *message* was handled well, but after its time."""
        attempt = self._attempts.of(message)
        self._events.report(
            _event(Name.LATE_SUCCESS, message, attempt, self._policy()),
            "handled well, but after its time; what was done may be done again: origin %s",
            attempt.origin,
        )

    def held(self, message: pulsar.Message, failure: Failure, cause: str) -> None:
        """Report that a handler failed in an outage, which counts as no attempt."""
        self._report(
            Name.HELD, message, failure,
            "held in an outage (%s), to be handled again as attempt %d: origin %s: %s",
            cause, failure.attempt.number, failure.attempt.origin,
            "" if failure.cause is None else failure.cause.message,
            reason=cause,
        )  # fmt: skip

    def outage(self, name: Name, outage: Outage) -> None:
        """Report that an outage began, ended, or is ignored from now on."""
        event = self._of_no_message(name, reason=outage.cause)
        needed = f", for what needs {outage.dependency}" if outage.dependency else ""
        self._events.report(event, _OUTAGES[name], outage.cause, outage.since, needed)

    def negatively_acknowledged(self, message: pulsar.Message, reason: str) -> None:
        """Report that the broker delivers *message* again, after the consumer's delay for that."""
        attempt = self._attempts.of(message)
        event = _event(Name.NEGATIVELY_ACKNOWLEDGED, message, attempt, self._policy())
        text = "acknowledged negatively, to be delivered again by the broker: origin %s"
        self._events.report(replace(event, reason=reason), text, attempt.origin)

    def left_unsettled(self, count: int) -> None:
        """Report that the consumer was closed with so many messages in hand."""
        event = self._of_no_message(Name.LEFT_UNSETTLED, count=count)
        text = "closed with %d messages in hand, which the broker delivers again"
        self._events.report(event, text, count)

    def connection(self, topic: str, connected: bool, seconds: float) -> None:  # noqa: FBT001
        """Report that *topic* had no connection for so many *seconds*, or has one again."""
        name = Name.RECONNECTED if connected else Name.DISCONNECTED
        event = replace(self._of_no_message(name), topic=topic)
        self._events.report(event, CONNECTION_TEXTS[name], topic, seconds)

    def recovered(self, topic: str) -> None:
        """Report that messages of *topic* came at last whose chunks the client had dropped."""
        event = replace(self._of_no_message(Name.RECOVERED), topic=topic)
        text = "messages of %s came again that the client had dropped, as it put chunks together"
        self._events.report(event, text, topic)

    def taking(self, *, stopped: bool) -> None:
        """Report that nothing new is taken while too many messages wait to be sent on, or again."""
        name = Name.TAKING_STOPPED if stopped else Name.TAKING_RESUMED
        self._events.report(self._of_no_message(name), _TAKING[name])

    def _of_no_message(self, name: Name, *, reason: str = "", count: int = 1) -> Event:
        policy = self._policy()
        return Event(
            name, origin="", message_id="", attempt=0, generation=policy.generation,
            source=str(policy.topic), subscription=policy.subscription, policy=policy.name,
            reason=reason, count=count,
        )  # fmt: skip

    def _failed(self, message: pulsar.Message, failure: Failure, cause: Cause) -> None:
        self._report(
            Name.ATTEMPT_FAILED, message, failure,
            "attempt %d failed of %s: %s: %s\n%s",
            failure.attempt.number, failure.attempt.origin, cause.type, cause.message, cause.trace,
            reason=cause.type,
        )  # fmt: skip

    def _unsent(
        self, message: pulsar.Message, verdict: Retry | Dead, failure: Failure, error: NotSentError
    ) -> None:
        self._report(
            Name.UNSENT, message, failure,
            "%s; origin %s, id %s stays in this consumer, unacknowledged",
            error, failure.attempt.origin, id_text(message.message_id()),
            topic=str(destination(verdict, failure.policy)), reason=error.reason,
        )  # fmt: skip

    def _settled(
        self, settlement: Settlement, failure: Failure, receipt: pulsar.MessageId | None
    ) -> None:
        message, verdict, _ = settlement
        origin, previous = failure.attempt.origin, id_text(message.message_id())
        match verdict:
            case RetryInPlace(delay, failed):
                self._report(
                    Name.RETRIED_IN_PLACE, message, failure,
                    "retried in its consumer in %g s, its key waits: origin %s, failed attempts %d",
                    delay.total_seconds(), origin, failed,
                )  # fmt: skip
            case Discard(reason, failed):
                self._report(
                    Name.DISCARDED, message, failure,
                    "discarded (%s), as the policy asks: origin %s, id %s, failed attempts %d",
                    reason, origin, previous, failed,
                    reason=reason,
                )  # fmt: skip
            case Retry():
                self._moved(Name.RETRIED, message, verdict, failure, receipt)
            case Dead(reason):
                self._moved(Name.DEAD_LETTERED, message, verdict, failure, receipt, reason)

    def _moved(  # noqa: PLR0913, PLR0917 - all that the event shows
        self,
        name: Name,
        message: pulsar.Message,
        verdict: Retry | Dead,
        failure: Failure,
        receipt: pulsar.MessageId | None,
        reason: str = "",
    ) -> None:
        new_id = "" if receipt is None else id_text(receipt)
        topic = str(destination(verdict, failure.policy))
        self._report(
            name, message, failure,
            "moved to %s: origin %s, previous id %s, new id %s, failed attempts %d",
            topic, failure.attempt.origin, id_text(message.message_id()), new_id or "not repeated",
            verdict.reconsume_times,
            topic=topic, new_id=new_id, reason=reason,
        )  # fmt: skip

    def _report(  # noqa: PLR0913 - all that an event shows
        self,
        name: Name,
        message: pulsar.Message,
        failure: Failure,
        text: str,
        *values: object,
        topic: str = "",
        new_id: str = "",
        reason: str = "",
    ) -> None:
        event = replace(
            _event(name, message, failure.attempt, failure.policy),
            topic=topic, new_id=new_id, reason=reason,
        )  # fmt: skip
        self._events.report(event, text, *values)


def _event(name: Name, message: pulsar.Message, attempt: Attempt, policy: Policy) -> Event:
    return Event(
        name,
        origin=attempt.origin,
        message_id=id_text(message.message_id()),
        attempt=attempt.number,
        generation=policy.generation,
        source=str(policy.topic),
        subscription=policy.subscription,
        policy=policy.name,
    )
