"""Outage breaker: pauses a consumer during an outage of its handler's dependency, and probes it.

During an outage the consumer holds failed messages, unacknowledged, and handles them again as the
same attempt, so they use up no retries. Single messages are probes. `outage_circuit` decides, with
the limits of the policy.
"""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

import pulsar

from redrive.delivery.concurrency import ends_run, log_of
from redrive.delivery.middleware.chain import (
    Acknowledge,
    Failure,
    HandBack,
    Middleware,
    Ready,
    Receive,
    Redeliver,
    Settle,
    Settlement,
)
from redrive.delivery.middleware.outage_circuit import AfterFailure, Circuit, Outage
from redrive.delivery.parts import OutageReporter, Parts
from redrive.delivery.reporting import Name, Reporting
from redrive.errors import InvalidSpecError, class_name
from redrive.messages import NotSentError, message_id_text
from redrive.policy.model import OUTAGE, OutageLimits, Policy
from redrive.policy.values import check_instance, is_function, text_of
from redrive.policy.verdict import Dead, DeadLetter, DeadReason, Discard, Done, RetryLater, is_a

MAX_HELD = 1_000
"""Highest number of messages held in outages; at this number no new messages are taken."""
MAX_DEPENDENCIES = 1_000
"""Highest number of separate dependencies. Beyond it, the least recently used one is forgotten.
While that many have outages, all others share one circuit."""
OTHERS = "others"
"""Name of the shared circuit."""

_MAX_SHOWN = 256
_OF_THE_MESSAGE = {DeadReason.REQUESTED, DeadReason.CONSUMER_CRASH}

_log = log_of(__name__)


def _the_only_one(_message: pulsar.Message) -> str:
    return ""


_Argument = TypeVar("_Argument")


def _answer_of(
    name: str, rule: Callable[[_Argument], str | None], argument: _Argument
) -> str | None:
    """Return the result of a rule as text that can be sent; None if it is unusable.

    An exception of a rule would end each consumer that receives the message.
    """
    try:
        answer: object = rule(argument)
    except BaseException as error:
        if ends_run(error):
            raise
        _log.exception("the %s rule of an outage breaker raised an exception", name)
        return None
    text = text_of(answer)
    if text is None and answer is not None:
        _log.error(
            "the %s rule of an outage breaker must return a string or None; got %s; correct it",
            name, type(answer).__name__,
        )  # fmt: skip
    return text


class OutageBreaker(Middleware):
    """Pauses a consumer while a dependency of its handler is down, without using up retries.

    An outage begins when most of the latest messages fail for one cause. The consumer then holds
    messages and handles one at a time as a probe, after 1 s and then with back-off. A failed probe
    is no attempt. The first successful probe ends the outage, and so does `ignore_outages`.

    Failures that `FailureRules` dead-letter at once count too, unless the limits exclude them:
    otherwise a faulty release would dead-letter a whole backlog. In an outage of another cause they
    are dead-lettered. `DeadLetter`, and `RetryLater` without another cause, do not count. If a rule
    raises an exception or returns no string, there is no cause, or the dependency without a name;
    the error is logged.

    Args:
        limits: default to the policy's `outage_breaker`, or else to the default limits.
        cause: returns the cause of a failure; None if only the message is to blame. Defaults to the
            name of the exception's class.
        dependency: returns the dependency of a message, so that messages with other dependencies
            are handled during the outage. By default all messages have the same.

    Raises:
        InvalidSpecError: *limits* is no OutageLimits, or a rule is not a function.
    """

    def __init__(
        self,
        limits: OutageLimits | None = None,
        *,
        cause: Callable[[BaseException], str | None] = class_name,
        dependency: Callable[[pulsar.Message], str] = _the_only_one,
    ) -> None:
        check_instance(limits, OutageLimits, "limits", optional=True)
        for rule in (cause, dependency):
            if not is_function(rule):
                raise InvalidSpecError(
                    "a rule of an outage breaker must be a function, and no coroutine function",
                    got=rule,
                    remedy="pass a function of an exception or a message that returns a string",
                )
        self.limits = limits
        self.cause = cause
        self.dependency = dependency


class OutageGuard(Middleware):
    """An `OutageBreaker` at work in one consumer. May be used by several threads.

    Args:
        breaker: None to use only the limits of the policy.
        policy: returns the policy in force.

    Attributes:
        limits: limits in force; None without any.
        open: circuits with an outage, by dependency.
    """

    def __init__(
        self,
        breaker: OutageBreaker | None,
        parts: Parts,
        policy: Callable[[], Policy],
        reporting: Reporting,
    ) -> None:
        self._breaker = breaker or OutageBreaker()
        self._always = breaker is not None
        self._clock = parts.clock
        self._incoming = parts.incoming
        self._reporter: OutageReporter = parts.outage_reporter
        self._policy = policy
        self._reporting = reporting
        self._circuits: OrderedDict[str, Circuit[pulsar.Message]] = OrderedDict()
        self._followed = policy()
        self.limits = self._limits_of(self._followed)
        self.open: dict[str, Circuit[pulsar.Message]] = {}
        # By message whose hop could not be sent, and is repeated: its error, which is counted.
        self._unsent: dict[str, BaseException | None] = {}
        self._changing = threading.RLock()

    @property
    def outages(self) -> tuple[Outage, ...]:
        """Return the outages for which this consumer is paused, the longest first."""
        with self._changing:
            outages = (circuit.outage for circuit in self.open.values())
            return tuple(sorted(filter(None, outages), key=lambda outage: outage.since))

    def ignore(self) -> None:
        """Override all outages, each until a message of its dependency succeeds."""
        with self._changing:
            circuits = list(self.open.values())
        for circuit in circuits:
            self._end(circuit, Name.OUTAGE_IGNORED)

    def receive(self, receive: Receive) -> Receive:
        """Receive the next message that may be handled; hold the others."""

        def receive_guarded(timeout: float | None) -> pulsar.Message | None:
            end = None if timeout is None else self._clock.monotonic() + timeout
            while True:
                remaining = None if end is None else max(0.0, end - self._clock.monotonic())
                wait = self._wait(remaining) if self.open else remaining
                message = receive(wait)
                if message is not None:
                    message = self._admitted(message)
                    if message is not None:
                        return message
                elif wait == remaining:
                    return None

        return receive_guarded

    def ready(self, ready: Ready) -> Ready:
        """Change nothing: in an outage the processor leaves all messages to `receive`."""
        return ready

    def settle(self, settle: Settle) -> Settle:
        """Hold messages that fail in an outage; count the outcome of others."""

        def settle_guarded(settlement: Settlement) -> pulsar.MessageId | None:
            _, verdict, failure = settlement
            if failure is not None:
                self._follow(failure.policy)
            if self.limits is None or isinstance(verdict, (HandBack, Done)):
                return settle(settlement)
            return self._settle_failed(settle, settlement)

        return settle_guarded

    def acknowledge(self, acknowledge: Acknowledge) -> Acknowledge:
        """Change nothing: the processor calls `succeeded` while there are limits."""
        return acknowledge

    def _settle_failed(self, settle: Settle, settlement: Settlement) -> pulsar.MessageId | None:
        message, failure = settlement.message, settlement.failure
        key, cause = message_id_text(message), self._cause(settlement)
        error = None if failure is None else failure.error
        if error is None or self._unsent.get(key) is not error:  # otherwise it is already counted
            if cause is None:
                self._settled(message, key)
            elif failure is not None and self._holds(message, key, cause, failure):
                return None
        try:
            receipt = settle(settlement)
        except NotSentError:
            self._unsent[key] = error
            raise
        self._unsent.pop(key, None)
        return receipt

    def _cause(self, settlement: Settlement) -> str | None:
        """Return the cause of a failure; None if only the message is to blame."""
        message, verdict, failure = settlement
        if failure is None or failure.error is None or isinstance(verdict, Redeliver):
            return None
        reason = verdict.reason if isinstance(verdict, (Dead, Discard)) else None
        if reason in _OF_THE_MESSAGE or is_a(failure.error, (DeadLetter, RetryLater)):
            return None
        cause = _answer_of("cause", self._breaker.cause, failure.error)
        if reason is DeadReason.NOT_RETRYABLE:
            limits, outage = self.limits, self._outage_for(message)
            if limits is None or not limits.count_not_retryable:
                return None
            if outage is not None and outage.cause != cause:
                return None
        return cause

    def _outage_for(self, message: pulsar.Message) -> Outage | None:
        """Return the outage of the dependency of *message*; None without an outage."""
        if not self.open:
            return None
        with self._changing:
            return self._circuit(message).outage

    def succeeded(self, message: pulsar.Message) -> None:
        """Count the success of *message*, which is acknowledged now; other middleware may wait."""
        key = message_id_text(message) if self.open or self._unsent else ""
        with self._changing:
            self._unsent.pop(key, None)
            circuit = self._circuit(message)
            over = circuit.succeeded(key)
        if over:
            self._end(circuit, Name.OUTAGE_ENDED)

    def _settled(self, message: pulsar.Message, key: str) -> None:
        with self._changing:
            self._circuit(message).settled(key, self._clock.monotonic())
            self._arrange()

    def _holds(self, message: pulsar.Message, key: str, cause: str, failure: Failure) -> bool:
        with self._changing:
            circuit = self._circuit(message)
            answer = circuit.failed(
                key, message, cause, failure.attempt.first_id, self._clock.now(),
                self._clock.monotonic(), random.random(),  # noqa: S311 - spreads load
            )  # fmt: skip
            began = circuit.outage if answer is AfterFailure.BEGINS else None
            if began is not None:
                self.open[began.dependency] = circuit
            self._arrange()
        if answer is AfterFailure.COUNTED:
            return False
        self._reporting.held(message, failure, cause)
        if began is not None:
            self._reporting.outage(Name.OUTAGE_BEGAN, began)
        self._show()
        return True

    def _admitted(self, message: pulsar.Message) -> pulsar.Message | None:
        """Return the message to handle after *message* was received; None for none."""
        if not self.open:
            return message
        self._follow(self._policy())
        with self._changing:
            circuit = self._circuit(message)
            now = self._clock.monotonic()
            overdue = circuit.is_overdue(now)
            if not overdue:
                admitted = circuit.admit(message_id_text(message), message, now)
                self._arrange()
                return admitted
        self._end(circuit, Name.OUTAGE_IGNORED)
        return message

    def _wait(self, remaining: float | None) -> float | None:
        """Return the time to wait for a message, after which an unsettled probe is abandoned."""
        with self._changing:
            self._arrange()
            limits = self.limits
            if limits is None or not any(c.probing for c in self.open.values()):
                return remaining
        longest = limits.max_probe_interval.total_seconds()
        return longest if remaining is None else min(remaining, longest)

    def _follow(self, policy: Policy) -> None:
        """Use the limits of *policy*, which may have changed."""
        if policy is self._followed:
            return
        limits = self._limits_of(policy)
        self._followed = policy
        if limits == self.limits:
            return
        with self._changing:
            self.limits = limits
            if limits is not None:
                for circuit in self._circuits.values():
                    circuit.follow(limits)
                return
        self.ignore()
        with self._changing:
            self._circuits.clear()

    def _limits_of(self, policy: Policy) -> OutageLimits | None:
        if policy.ignore_outages:
            return None
        theirs = policy.outage_breaker or (OutageLimits() if self._always else None)
        return self._breaker.limits or theirs

    def _circuit(self, message: pulsar.Message) -> Circuit[pulsar.Message]:
        dependency = self._dependency(message)
        # Messages that the shared circuit holds stay with it until its outage ends.
        is_full = OTHERS in self.open or len(self.open) >= MAX_DEPENDENCIES
        if is_full and dependency not in self._circuits:
            dependency = OTHERS
        circuit = self._circuits.get(dependency)
        if circuit is None:
            circuit = Circuit(dependency, self.limits or OutageLimits())
            self._circuits[dependency] = circuit
            if len(self._circuits) > MAX_DEPENDENCIES:
                in_use = {OTHERS, *self.open}
                idle = (name for name in self._circuits if name not in in_use)
                if (oldest := next(idle, None)) is not None:
                    del self._circuits[oldest]
        elif len(self._circuits) > 1:
            self._circuits.move_to_end(dependency)
        return circuit

    def _dependency(self, message: pulsar.Message) -> str:
        return _answer_of("dependency", self._breaker.dependency, message) or ""

    def _arrange(self) -> None:
        """Schedule due probes, and take new messages while they are useful."""
        now = self._clock.monotonic()
        held, untried = 0, 0
        for circuit in self.open.values():
            if (alarm := circuit.next_alarm(now)) is not None:
                self._incoming.again(*alarm)
            held += circuit.held
            untried += circuit.untried
        # With a single dependency, one untried message is enough.
        enough = untried > 0 and self._breaker.dependency is _the_only_one
        self._incoming.hold_new(self, held=enough or held >= MAX_HELD)

    def _end(self, circuit: Circuit[pulsar.Message], name: Name) -> None:
        with self._changing:
            outage = circuit.outage
            if outage is None:  # ended by another thread
                return
            del self.open[outage.dependency]
            for message in circuit.end(ignored=name is Name.OUTAGE_IGNORED):
                self._incoming.again(message, 0)
            self._arrange()
        self._reporting.outage(name, outage)
        self._show()

    def _show(self) -> None:
        """Show the causes of the outages in the broker's statistics, for the operator."""
        causes = sorted({outage.cause for outage in self.outages})
        self._reporter.show(OUTAGE, ", ".join(causes)[:_MAX_SHOWN])
