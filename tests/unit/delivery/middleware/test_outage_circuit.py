"""Laws of an outage: each message is in one place, and none is lost or doubled."""

from __future__ import annotations

import heapq
import itertools
from datetime import UTC, datetime, timedelta

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from redrive.delivery.middleware.outage_circuit import AfterFailure, Circuit
from redrive.policy.model import OutageLimits

LIMITS = OutageLimits(min_messages=2, window=6, max_probe_interval=8, max_pause=60)
START = datetime(2026, 1, 1, tzinfo=UTC)


class Copy:
    """A message, or the copy of one that a broker has sent again: the same key, another object."""

    def __init__(self, key: str) -> None:
        self.key = key


def test_outage_counts_failures_for_another_cause() -> None:
    circuit = Circuit[Copy]("", LIMITS)

    def fail(key: str, cause: str) -> AfterFailure:
        return circuit.failed(key, Copy(key), cause, key, START, 0, 0)

    assert fail("1", "outage") is AfterFailure.COUNTED
    assert fail("2", "outage") is AfterFailure.BEGINS
    assert fail("3", "bad message") is AfterFailure.COUNTED
    assert fail("4", "outage") is AfterFailure.HELD
    assert circuit.held == 2


def test_failing_probes_wait_twice_as_long_up_to_the_limit() -> None:
    circuit, now, waits = Circuit[Copy]("", LIMITS), 0.0, list[float]()
    for key in ("1", "2"):
        circuit.failed(key, Copy(key), "outage", key, START, now, 0)
    for _ in range(6):
        alarm = circuit.next_alarm(now)
        assert alarm is not None
        copy, seconds = alarm
        waits.append(seconds)
        now += seconds
        probe = circuit.admit(copy.key, copy, now)
        assert probe is not None
        assert circuit.failed(probe.key, probe, "outage", probe.key, START, now, 0) is (
            AfterFailure.HELD
        )
    assert waits == [1, 2, 4, 8, 8, 8]


class Outages(RuleBasedStateMachine):
    """A consumer of many workers, its broker, and the circuit between them."""

    @initialize()
    def begin(self) -> None:
        self.circuit = Circuit[Copy]("", LIMITS)
        self.numbers = itertools.count()
        self.now = 0.0
        self.again: list[tuple[float, int, Copy]] = []  # of the client, in this process
        self.in_hand: dict[str, Copy] = {}
        self.inside: set[str] = set()
        self.settled: set[str] = set()
        self.probes: set[str] = set()

    def come(self, copy: Copy) -> None:
        admitted = self.circuit.admit(copy.key, copy, self.now)
        self.inside.add(copy.key)
        if admitted is not None:
            assert admitted.key not in self.in_hand
            self.inside.remove(admitted.key)
            self.in_hand[admitted.key] = admitted
            if self.circuit.outage:
                self.probes.add(admitted.key)
        self.arrange()

    def arrange(self) -> None:
        if (alarm := self.circuit.next_alarm(self.now)) is not None:
            copy, seconds = alarm
            assert 0 <= seconds <= LIMITS.max_probe_interval.total_seconds() + 1e-6
            heapq.heappush(self.again, (self.now + seconds, next(self.numbers), copy))

    def end(self, *, ignored: bool) -> None:
        pending = {copy.key for _, _, copy in self.again}
        released = self.circuit.end(ignored=ignored)
        assert {copy.key for copy in released} | pending >= self.inside
        self.probes.clear()
        self.inside.clear()  # messages with an alarm come as any other
        for copy in released:
            heapq.heappush(self.again, (self.now, next(self.numbers), copy))

    @rule()
    def a_new_message_comes(self) -> None:
        self.come(Copy(f"{next(self.numbers)}"))

    @precondition(lambda self: self.circuit.outage and self.inside)
    @rule(data=st.data())
    def the_broker_sends_a_copy_of_what_is_held(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.inside)))
        before = set(self.in_hand)
        assert self.circuit.admit(key, Copy(key), self.now) is None
        assert set(self.in_hand) == before

    @precondition(lambda self: self.again)
    @rule()
    def what_is_handed_back_comes_again(self) -> None:
        due, _, copy = heapq.heappop(self.again)
        self.now = max(self.now, due)
        self.inside.discard(copy.key)
        self.come(copy)

    @rule(seconds=st.floats(0, 10))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.in_hand)
    @rule(data=st.data(), cause=st.sampled_from("aab"), luck=st.floats(0, 1))
    def a_handler_fails(self, data: st.DataObject, cause: str, luck: float) -> None:
        copy = self.in_hand.pop(data.draw(st.sampled_from(sorted(self.in_hand))))
        was_probe = copy.key in self.probes
        self.probes.discard(copy.key)
        before = self.circuit.outage
        at = START + timedelta(seconds=self.now)
        answer = self.circuit.failed(copy.key, copy, cause, copy.key, at, self.now, luck)
        if answer is AfterFailure.COUNTED:
            assert not was_probe
            self.settled.add(copy.key)
        else:
            self.inside.add(copy.key)
        assert (answer is AfterFailure.BEGINS) == (before is None and bool(self.circuit.outage))
        self.arrange()

    @precondition(lambda self: self.in_hand)
    @rule(data=st.data())
    def a_handler_succeeds(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.in_hand)))
        del self.in_hand[key]
        self.settled.add(key)
        over = self.circuit.succeeded(key)
        assert over == (key in self.probes)
        if over:
            self.end(ignored=False)

    @precondition(lambda self: self.in_hand)
    @rule(data=st.data())
    def a_message_is_dead_lettered_for_itself(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.in_hand)))
        del self.in_hand[key]
        self.probes.discard(key)
        self.settled.add(key)
        self.circuit.settled(key, self.now)
        self.arrange()

    @precondition(lambda self: self.circuit.outage)
    @rule()
    def it_is_ignored(self) -> None:
        self.end(ignored=True)
        assert self.circuit.outage is None

    @invariant()
    def each_message_is_in_one_place(self) -> None:
        if not hasattr(self, "circuit"):
            return
        pending = [copy.key for _, _, copy in self.again]
        assert len(pending) == len(set(pending))
        assert not set(pending) & set(self.in_hand)
        assert not self.inside & set(self.in_hand)
        assert not self.settled & (self.inside | set(self.in_hand) | set(pending))
        if self.circuit.outage is not None:
            assert self.circuit.held == len(self.inside)

    @invariant()
    def what_is_held_will_be_tried(self) -> None:
        if hasattr(self, "circuit") and self.circuit.outage is not None and self.inside:
            waiting = self.again or self.circuit.probing
            assert waiting


Outages.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestOutages = Outages.TestCase
