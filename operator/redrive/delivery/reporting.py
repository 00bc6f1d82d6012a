"""Events of messages, and reports of outages.

Each record of the logger `redrive.delivery.events` has the fields of its `Event` as attributes
(`record.event`, `record.origin` …), for formatters of JSON. The text is for people and may change;
names and fields don't. A hook of the program gets the same events.

An outage is shown in the broker's statistics, where the operator reads it. The metadata of a
subscription can't be changed later. So a paused consumer has a producer on the retry topic that
sends nothing, and whose metadata contains the cause. It ends with the connection.
"""

from __future__ import annotations

import enum
import functools
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import pulsar

from redrive.delivery.concurrency import (
    OPEN_SECONDS,
    ends_run,
    in_background,
    log_of,
    printing_errors,
    within,
)
from redrive.delivery.decisions import Attempts
from redrive.delivery.forwarder import destination
from redrive.delivery.middleware.chain import Failure, Middleware, RetryInPlace, Settle, Settlement
from redrive.errors import InvalidSpecError
from redrive.messages import NotCopyableError, NotSentError, id_text, message_id_text
from redrive.policy.envelope import Attempt, Cause, Redaction
from redrive.policy.model import Policy
from redrive.policy.values import is_function
from redrive.policy.verdict import Dead, Discard, Retry

if TYPE_CHECKING:
    from redrive.delivery.middleware.outage_circuit import Outage

_events_log = log_of("redrive.delivery.events")  # a public name


class Name(enum.StrEnum):
    """The names of all events, each with the level of its record in the log."""

    ATTEMPT_FAILED = "redrive.attempt_failed", logging.WARNING
    RETRIED = "redrive.retried", logging.INFO
    RETRIED_IN_PLACE = "redrive.retried_in_place", logging.INFO
    NEGATIVELY_ACKNOWLEDGED = "redrive.negatively_acknowledged", logging.INFO
    DEAD_LETTERED = "redrive.dead_lettered", logging.WARNING
    DISCARDED = "redrive.discarded", logging.WARNING
    UNSENT = "redrive.unsent", logging.ERROR
    TAKING_STOPPED = "redrive.taking_stopped", logging.ERROR
    TAKING_RESUMED = "redrive.taking_resumed", logging.INFO
    LATE_SUCCESS = "redrive.late_success", logging.WARNING
    DROPPED = "redrive.dropped", logging.WARNING
    COPY_DROPPED = "redrive.copy_dropped", logging.INFO
    HELD = "redrive.held", logging.WARNING
    OUTAGE_BEGAN = "redrive.outage_began", logging.ERROR
    OUTAGE_ENDED = "redrive.outage_ended", logging.INFO
    OUTAGE_IGNORED = "redrive.outage_ignored", logging.ERROR
    LEFT_UNSETTLED = "redrive.left_unsettled", logging.WARNING
    DISCONNECTED = "redrive.disconnected", logging.ERROR
    RECONNECTED = "redrive.reconnected", logging.INFO
    RECOVERED = "redrive.recovered", logging.WARNING
    CLOCK_AHEAD = "redrive.clock_ahead", logging.ERROR

    level: int

    def __new__(cls, name: str, level: int) -> Self:  # noqa: D102 - the columns of a row
        member = str.__new__(cls, name)
        member._value_ = name
        member.level = level
        return member


@dataclass(frozen=True)
class Event:
    """One thing that happened to a message, or to a consumer.

    Attributes:
        origin: the id it was first produced with; the same in all of its events. Empty where it is
            about no single message.
        message_id: the id it had in this attempt; else empty.
        attempt: which attempt that was, from 1; else 0.
        source: the source topic of the policy, which tells consumers apart.
        subscription: the subscription of the policy; empty for a consumer that broadcasts.
        topic: where it has been sent, or whose connection or chunks the event is about; else empty.
        new_id: its id there; empty if an earlier send had stored it: the broker proves that, and
            does not repeat the id.
        reason: why it was dead-lettered, discarded or not sent, the class of the exception, or the
            cause of an outage.
        generation: of the policy in force.
        policy: its name, `namespace/name`; empty if it has none, and for a consumer that
            broadcasts.
        count: how many messages it is about.
    """

    event: Name
    origin: str
    message_id: str
    attempt: int
    generation: int
    source: str
    subscription: str
    topic: str = ""
    new_id: str = ""
    reason: str = ""
    policy: str = ""
    count: int = 1


Hook = Callable[[Event], object]

DISCONNECT_TIMEOUT = timedelta(seconds=30)
"""After so long without a connection a consumer reports that."""

CONNECTION_TEXTS = {
    Name.DISCONNECTED: "no connection to the broker for %s for %.0f s, nothing is received; check "
    "that the broker answers, and that the token or certificate of this consumer is valid",
    Name.RECONNECTED: "connected to the broker again for %s, after %.0f s",
}
"""The text of these events, of all kinds of consumers."""


@dataclass(frozen=True)
class Events:
    """Reports to the log and, if there is one, to a hook.

    Attributes:
        hook: called in the thread where it happened; an exception of it is logged and changes
            nothing about the message.
    """

    hook: Hook | None = None

    def wants(self, name: Name) -> bool:
        """Return True if an event is logged or goes to a hook."""
        return self.hook is not None or _events_log.isEnabledFor(name.level)

    def report(self, event: Event, text: str, *values: object) -> None:
        """Report *event*, in the log with *text*, which is formatted with *values*."""
        level = event.event.level
        with printing_errors():
            if _events_log.isEnabledFor(level):
                # Not `log`, which looks for the caller in all frames.
                logger = _events_log.logger
                record = logger.makeRecord(
                    logger.name, level, __file__, 0, text, values, None, "report", vars(event)
                )
                logger.handle(record)
        if self.hook is None:
            return
        try:
            self.hook(event)
        except BaseException as error:  # a message must not be stuck for it
            if ends_run(error):
                raise
            _events_log.exception("the hook for events failed at %s", event.event)


def check_hooks(redaction: object, on_event: object) -> None:
    """Pass if a consumer can call these options.

    Raises:
        InvalidSpecError: *redaction* is no Redaction, or *on_event* no function.
    """
    if not isinstance(redaction, Redaction):
        raise InvalidSpecError(
            "redaction must be a Redaction",
            got=redaction,
            remedy="give a function to it as Redaction(hook=…)",
        )
    if on_event is not None and not is_function(on_event):
        raise InvalidSpecError(
            "on_event must be a function of an Event, and no coroutine function",
            got=on_event,
            remedy="give one such as prometheus.count, or leave it out",
        )


_log = log_of(__name__)


REPEAT_SECONDS = 15.0
"""Time after which a publication that failed is repeated."""


class OutageProducer:
    """Producer by whose metadata one consumer publishes outages and blocked keys.

    A thread of its own opens and closes it. A publication opens its producer before it closes the
    previous one, so that the operator always reads one of them. If the broker does not accept it,
    as where the topic has as many producers as it may, the previous one is closed first. If the
    broker accepts none, or is down, the publication is repeated every `REPEAT_SECONDS`.
    """

    def __init__(self, client: pulsar.Client, policy: Policy) -> None:
        self._client = client
        self._topic = str(policy.retry_topic)
        self._wanted: dict[str, str] = {}
        self._shown: dict[str, str] = {}
        self._producer: pulsar.Producer | None = None
        self._working = False
        self._closed = False
        # Reentrant: at the end of the interpreter no thread starts, and the caller makes changes.
        self._changing = threading.RLock()
        self._changed = threading.Event()

    def show(self, name: str, value: str) -> None:
        """Publish *value* in place of the previous one of that name; nothing if it is empty."""
        with self._changing:
            if not self._closed:
                others = {other: text for other, text in self._wanted.items() if other != name}
                self._begin({**others, name: value} if value else others)

    def close(self) -> None:
        """Publish nothing any more."""
        with self._changing:
            self._closed = True
            self._begin({})

    def _begin(self, wanted: dict[str, str]) -> None:
        self._wanted = wanted
        self._changed.set()
        if wanted != self._shown and not self._working:
            self._working = True
            in_background(self._change)

    def _change(self) -> None:
        failed: dict[str, str] = {}
        while True:
            with self._changing:
                self._changed.clear()
                wanted, before, self._producer = self._wanted, self._producer, None
            level = logging.DEBUG if wanted == failed else logging.WARNING
            made = self._make(wanted, level) if wanted else None
            if before is not None:
                _leave(before)
                if wanted and made is None:
                    made = self._make(wanted, level)
            failed = {} if made else wanted
            with self._changing:
                self._producer, self._shown = made, wanted if made else {}
                if self._wanted == wanted and not failed:
                    self._working = False
                    return
            if failed:
                self._changed.wait(REPEAT_SECONDS)

    def _make(self, properties: Mapping[str, str], level: int) -> pulsar.Producer | None:
        try:
            return within(OPEN_SECONDS, functools.partial(self._open, properties), late=_leave)
        except pulsar.AlreadyClosed:  # the client, for good
            self.close()
            return None
        except (pulsar.exceptions.PulsarException, TimeoutError) as error:
            _log.log(
                level,
                "outages and blocked keys are not published to the operator: %s",
                str(error) or type(error).__name__,
            )
            return None

    def _open(self, properties: Mapping[str, str]) -> pulsar.Producer:
        # On one partition of several: that is enough to be seen.
        topic = self._client.get_topic_partitions(self._topic)[0]
        return self._client.create_producer(topic, properties=dict(properties))


def _leave(producer: pulsar.Producer) -> None:
    try:
        producer.close()
    except pulsar.exceptions.PulsarException as error:  # such as a client that was closed
        _log.debug("the producer that shows an outage was not closed: %s", error)


_OUTAGES = {
    Name.OUTAGE_BEGAN: "most messages fail with %s: this consumer pauses, and probes with single "
    "messages, since %s%s",
    Name.OUTAGE_ENDED: "a message was handled: the outage (%s) since %s is over%s",
    Name.OUTAGE_IGNORED: "the outage (%s) since %s is ignored from now on%s: failures count again",
}


_TAKING = {
    Name.TAKING_STOPPED: "%d messages wait to be sent; receiving is suspended until fewer than %d "
    "of them wait",
    Name.TAKING_RESUMED: "%d messages wait to be sent, fewer than %d; receiving resumes",
}


class Reporting(Middleware):
    """Reports failed attempts, hops and late successes as `Event`."""

    def __init__(self, events: Events, policy: Callable[[], Policy], attempts: Attempts) -> None:
        self._events = events
        self._policy = policy
        self._attempts = attempts

    def settle(self, settle: Settle) -> Settle:
        """Report before that an attempt failed, and after its message is settled."""

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
            "handled well, but after its time; it may be handled again: origin %s",
            attempt.origin,
        )

    def copy_dropped(self, message: pulsar.Message) -> None:
        """Report that *message* is not handed out: it is in flight, or was settled recently."""
        attempt = self._attempts.of(message)
        self._events.report(
            _event(Name.COPY_DROPPED, message, attempt, self._policy()),
            "not handed out: delivered again while in flight, or soon after it was settled: "
            "origin %s",
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
        needed = f", for messages that need {outage.dependency}" if outage.dependency else ""
        self._events.report(event, _OUTAGES[name], outage.cause, outage.since, needed)

    def negatively_acknowledged(
        self, message: pulsar.Message, attempt: Attempt, reason: str
    ) -> None:
        """Report that the broker delivers *message* again, after the consumer's delay for that."""
        name, policy = Name.NEGATIVELY_ACKNOWLEDGED, self._policy()
        event = _event(name, message, attempt, policy, reason=reason)
        text = "acknowledged negatively, to be delivered again by the broker: origin %s"
        self._events.report(event, text, attempt.origin)

    def left_unsettled(self, count: int) -> None:
        """Report that the consumer was closed with so many in-flight messages."""
        event = self._of_no_message(Name.LEFT_UNSETTLED, count=count)
        text = "closed with %d in-flight messages, which the broker delivers again"
        self._events.report(event, text, count)

    def connection(self, topic: str, connected: bool, seconds: float) -> None:  # noqa: FBT001
        """Report that *topic* had no connection for so many *seconds*, or has one again."""
        name = Name.RECONNECTED if connected else Name.DISCONNECTED
        event = replace(self._of_no_message(name), topic=topic)
        self._events.report(event, CONNECTION_TEXTS[name], topic, seconds)

    def recovered(self, topic: str) -> None:
        """Report that messages of *topic* came that the client had dropped or held up."""
        event = replace(self._of_no_message(Name.RECOVERED), topic=topic)
        text = "messages of %s came that the client had dropped with their chunks, or not permitted"
        self._events.report(event, text, topic)

    def clock_ahead(self, topic: str, seconds: float) -> None:
        """Report that the clock of this host seems to be ahead of the broker's."""
        event = replace(self._of_no_message(Name.CLOCK_AHEAD), topic=topic)
        text = (
            "the last retries from %s all came %.0f s late, so the clock of this host seems to be "
            "ahead of the broker's. Retries that this consumer sends come late, and deadlines of "
            "failure rules end early. Synchronize the clocks of this host and of the broker. If "
            "they agree, the broker delivers late: check its dispatch rates"
        )
        self._events.report(event, text, topic, seconds)

    def taking(self, waiting: int, limit: int, *, stopped: bool) -> None:
        """Report that receiving is suspended or resumes, with *waiting* messages to be sent.

        Args:
            waiting: number of these messages.
            limit: number of them below which receiving resumes.
            stopped: True for a suspension.
        """
        name = Name.TAKING_STOPPED if stopped else Name.TAKING_RESUMED
        self._events.report(self._of_no_message(name), _TAKING[name], waiting, limit)

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
            error, failure.attempt.origin, message_id_text(message),
            topic=str(destination(verdict, failure.policy)), reason=error.reason,
        )  # fmt: skip

    def _settled(
        self, settlement: Settlement, failure: Failure, receipt: pulsar.MessageId | None
    ) -> None:
        message, verdict, _ = settlement
        origin = failure.attempt.origin
        match verdict:
            case Retry():
                self._moved(Name.RETRIED, message, verdict, failure, receipt)
            case Dead(reason):
                self._moved(Name.DEAD_LETTERED, message, verdict, failure, receipt, reason)
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
                    reason, origin, message_id_text(message), failed,
                    reason=reason,
                )  # fmt: skip

    def _moved(  # noqa: PLR0913, PLR0917 - all that the event shows
        self,
        name: Name,
        message: pulsar.Message,
        verdict: Retry | Dead,
        failure: Failure,
        receipt: pulsar.MessageId | None,
        reason: str = "",
    ) -> None:
        if not self._events.wants(name):
            return
        new_id = "" if receipt is None else id_text(receipt)
        topic = str(destination(verdict, failure.policy))
        self._report(
            name, message, failure,
            "moved to %s: origin %s, previous id %s, new id %s, failed attempts %d",
            topic, failure.attempt.origin, message_id_text(message), new_id or "not repeated",
            verdict.reconsume_times,
            topic=topic, new_id=new_id, reason=reason,
        )  # fmt: skip

    def _report(
        self,
        name: Name,
        message: pulsar.Message,
        failure: Failure,
        text: str,
        *values: object,
        **details: str,
    ) -> None:
        event = _event(name, message, failure.attempt, failure.policy, **details)
        self._events.report(event, text, *values)


def _event(
    name: Name,
    message: pulsar.Message,
    attempt: Attempt,
    policy: Policy,
    **details: Any,  # noqa: ANN401 - further fields of the event
) -> Event:
    return Event(
        name,
        origin=attempt.origin,
        message_id=message_id_text(message),
        attempt=attempt.number,
        generation=policy.generation,
        source=str(policy.topic),
        subscription=policy.subscription,
        policy=policy.name,
        **details,
    )
