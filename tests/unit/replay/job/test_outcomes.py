"""Messages of a run are counted where they are, however often and in whichever order one looks."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pulsar
import pytest

from redrive.admin.errors import BrokerFailedError
from redrive.kube.client import UnavailableError
from redrive.policy.envelope import CAUSE_TYPE, REPLAY, REPLAY_SOURCE
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.reading import broker, reader
from redrive.reading.positions import EntryId, TargetPartition
from redrive.reading.ranges import Acknowledged, Partition, Range, Span
from redrive.replay import ledger
from redrive.replay.evidence import LedgerKey
from redrive.replay.job import outcomes
from redrive.replay.job.outcomes import LiveMessages, MessageOutcomes, OutcomeReader
from redrive.replay.job.plan import DesiredState
from redrive.replay.records import Header, RangePlan, RangeRecord, Records
from redrive.replay.spec import ReplayJob

POLICY = Policy(TopicName("shop", "prod", "orders"), "fulfilment")
SOURCE, RETRY, DEAD = POLICY.topic, POLICY.retry_topic, POLICY.dead_letter_topic
JOB = ReplayJob("shop", "again", "uid", POLICY, "pulsar://broker", "http://broker", None)
BEGAN = {TargetPartition(topic, 0): EntryId(7, 0) for topic in (SOURCE, RETRY, DEAD)}


@dataclass
class Message:
    """The fields of a message that are read."""

    id: pulsar.MessageId
    carried: dict[str, str]

    def message_id(self) -> pulsar.MessageId:
        return self.id

    def properties(self) -> dict[str, str]:
        return self.carried


@dataclass
class Topics:
    """A broker of topics with one partition each: their messages and acknowledged entries."""

    held: dict[TopicName, list[dict[str, str]]] = field(default_factory=dict)
    acknowledged: dict[TopicName, set[int]] = field(default_factory=dict)
    away: bool = False
    breaks_at: int | None = None

    def put(self, topic: TopicName, cause: str = "", replay: str = "shop/again") -> int:
        messages = self.held.setdefault(topic, [{}])  # one was there before the run
        messages.append({REPLAY: replay, CAUSE_TYPE: cause})
        return len(messages) - 1

    def settle(self, topic: TopicName, entry: int) -> None:
        self.acknowledged.setdefault(topic, {0}).add(entry)

    def look(self, _: str, topic: TopicName, __: str = "") -> tuple[Partition, ...]:
        if self.away:
            raise BrokerFailedError("503", remedy="wait")
        done = sorted(self.acknowledged.get(topic, ()))
        ranges = ",".join(f"(7:{entry - 1}..7:{entry}]" for entry in done)
        count = len(self.held.get(topic, [{}]))
        return (Partition(0, ((7, count),), Acknowledged(ranges=ranges)),)

    def messages(
        self, readable: reader.ReadableTopic, _: int, after: EntryId, wanted: list[Span], __: int
    ) -> Any:  # noqa: ANN401 - a generator
        for entry in [number for _, first, last in wanted for number in range(first, last + 1)]:
            assert entry > after.entry
            if entry == self.breaks_at:
                self.breaks_at = None
                raise pulsar.ConnectError
            yield Message(pulsar.MessageId(0, 7, entry, -1), self.held[readable.topic][entry])


@pytest.fixture
def topics(monkeypatch: pytest.MonkeyPatch) -> Topics:
    """A broker, and the ledger of a run that has moved three messages."""
    made = Topics()
    records = Records()
    piece = Range(0, 3, 0, 9_999)
    records.headers["uid"] = Header("shop/again", 0, began=BEGAN)
    records.plans["uid"] = {piece: RangePlan(3, 0b111, {}, ())}
    records.ranges[piece] = RangeRecord(moved={"uid": 0b111})
    monkeypatch.setattr(ledger, "mounted_key", lambda: LedgerKey(b"key"))
    monkeypatch.setattr(ledger, "read", lambda *_: records)
    monkeypatch.setattr(broker, "connect", lambda _: nullcontext())
    monkeypatch.setattr(broker, "read_partitions", made.look)
    monkeypatch.setattr(reader, "read_messages", made.messages)
    return made


def looking(job: ReplayJob = JOB) -> OutcomeReader:
    client = cast("broker.ReadingClient", None)  # it is not asked
    return OutcomeReader(job, client, lambda: None)


def numbers(result: MessageOutcomes) -> tuple[int, int, int, bool]:
    return result.handled, result.waiting, result.dead, result.settled


def test_message_is_followed_through_retries_to_its_end(topics: Topics) -> None:
    look = looking()
    handled, retried, dead = (topics.put(RETRY) for _ in range(3))
    topics.put(RETRY, replay="shop/other")
    topics.put(DEAD, "ValueError", replay="shop/other")
    assert numbers(look.read()) == (0, 3, 0, False)
    topics.settle(RETRY, handled)
    again = topics.put(RETRY)
    topics.settle(RETRY, retried)
    topics.put(DEAD, "TimeoutError")
    topics.settle(RETRY, dead)
    result = look.read()
    assert numbers(result) == (1, 1, 1, False)
    assert result.causes == {"TimeoutError": 1}
    topics.settle(RETRY, again)
    assert numbers(look.read()) == (2, 0, 1, True)


def test_look_counts_messages_moved_during_it(
    topics: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends a message on, and acknowledges it, between any two questions to the broker."""
    job = replace(JOB, target=SOURCE)
    for step in range(5):
        topics.held.clear()
        topics.acknowledged.clear()
        look = looking(job)
        places = [SOURCE, RETRY, DEAD]
        entry = topics.put(SOURCE)
        for _ in range(2):
            topics.put(SOURCE)  # stay
        asked = 0

        def forwards(url: str, topic: TopicName, subscription: str = "") -> tuple[Partition, ...]:
            nonlocal asked, entry
            partitions = topics.look(url, topic, subscription)
            if step <= asked and len(places) > 1:  # noqa: B023 - within this round
                source, target = places[0], places[1]  # noqa: B023
                after = topics.put(target)
                topics.settle(source, entry)
                del places[0]  # noqa: B023
                entry = after
            asked += 1
            return partitions

        monkeypatch.setattr(broker, "read_partitions", forwards)
        result = look.read()
        assert result.waiting + result.dead == 3, step
        assert result.handled == 0


def test_look_counts_messages_of_added_partition(
    topics: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        topics.put(RETRY)

    def added(url: str, topic: TopicName, subscription: str = "") -> tuple[Partition, ...]:
        partitions = topics.look(url, topic, subscription)
        return partitions if topic == DEAD or not subscription else ()

    monkeypatch.setattr(broker, "read_partitions", added)
    assert looking().read().waiting == 2


def test_unacknowledged_messages_wait_again(topics: Topics) -> None:
    look = looking()
    for entry in [topics.put(RETRY) for _ in range(3)]:
        topics.settle(RETRY, entry)
    assert numbers(look.read()) == (3, 0, 0, True)
    topics.acknowledged.clear()
    assert numbers(look.read()) == (0, 3, 0, False)


@pytest.mark.parametrize("topic", [RETRY, DEAD])
def test_interrupted_look_counts_nothing_twice(topics: Topics, topic: TopicName) -> None:
    look = looking()
    for _ in range(3):
        topics.put(topic, "ValueError")
    topics.breaks_at = 3
    with pytest.raises(pulsar.ConnectError):
        look.read()
    result = look.read()
    assert result.waiting + result.dead == 3


def test_cause_of_java_dead_letter_is_not_inherited(
    topics: Topics,
) -> None:
    topics.put(DEAD, "ValueError")
    topics.put(DEAD, "OldError")
    topics.held[DEAD][-1][REPLAY_SOURCE] = "uid@0:1:2:0"
    assert looking().read().causes == {"ValueError": 1, "": 1}


def test_batch_messages_wait_until_all_are_acknowledged() -> None:
    live = LiveMessages()
    for index in (1, 4, 4):  # the other ones are of another Replay, or none
        live.add(0, pulsar.MessageId(0, 7, 5, index))
    live.add(0, pulsar.MessageId(0, 7, 6, -1))
    live.add(1, pulsar.MessageId(1, 7, 5, -1))
    partition = Partition(0, ((7, 9),))
    assert live.waiting(partition) == 3
    batch = Acknowledged(ranges="[(7:4..7:5]]")
    assert live.waiting(replace(partition, acknowledged=batch)) == 1
    assert live.waiting(replace(partition, acknowledged=Acknowledged(EntryId(8, -1)))) == 0


class Notes:
    """Records the reported outcomes."""

    def __init__(self) -> None:
        self.states = [DesiredState.RUN]
        self.outcomes: list[MessageOutcomes] = []

    def report_outcomes(self, result: MessageOutcomes) -> None:
        self.outcomes.append(result)

    def desired_state(self) -> DesiredState:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "POLL_SECONDS", 0.0)


LONG = replace(JOB, follow_for=3_600.0)


@pytest.mark.parametrize("wish", [DesiredState.END, DesiredState.EXPIRE, DesiredState.CANCEL])
def test_follow_ends_with_its_replay(topics: Topics, wish: DesiredState) -> None:
    for _ in range(3):
        topics.put(RETRY)
    notes = Notes()
    notes.states = [DesiredState.RUN, DesiredState.RUN, wish]
    outcomes.follow(LONG, notes)
    assert notes.outcomes == []
    notes.states = [*[DesiredState.RUN] * 4, wish]
    outcomes.follow(LONG, notes)
    assert [numbers(result) for result in notes.outcomes] == [(0, 3, 0, False)]


def test_follow_ends_after_its_time(topics: Topics) -> None:
    topics.put(RETRY)
    notes = Notes()
    outcomes.follow(replace(JOB, follow_for=0.0), notes)
    assert len(notes.outcomes) == 1


def test_follow_ends_when_all_is_settled(topics: Topics) -> None:
    topics.settle(RETRY, topics.put(RETRY))
    notes = Notes()
    outcomes.follow(LONG, notes)
    assert notes.outcomes[-1].settled


def test_follow_retries_unavailable_servers(
    topics: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics.away = True
    notes = Notes()
    outcomes.follow(replace(JOB, follow_for=0.0), notes)
    assert notes.outcomes == []
    asked = 0

    def away_once() -> DesiredState:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise UnavailableError("503", remedy="wait")
        topics.away = asked < 3
        return DesiredState.RUN

    monkeypatch.setattr(notes, "desired_state", away_once)
    outcomes.follow(LONG, notes)
    assert notes.outcomes[-1].settled
