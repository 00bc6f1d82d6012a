"""Messages of a run are counted where they are, however often and in whichever order one looks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import pulsar
import pytest

from redrive.admin.errors import BrokerFailedError
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.policy.properties import CAUSE_TYPE, REPLAY
from redrive.replay.job import aftermath
from redrive.replay.job.aftermath import Aftermath, AftermathLook, LiveMessages
from redrive.replay.job.engine import Wish
from redrive.replay.ledger import ledger
from redrive.replay.ledger.records import Header, RangePlan, RangeRecord, Records
from redrive.replay.spec import ReplayJob
from redrive.replay.topic import broker, reading, snapshot
from redrive.replay.topic.partition import Acknowledged, Partition
from redrive.replay.topic.position import EntryId, TargetPartition
from redrive.replay.topic.ranges import Range

POLICY = Policy(TopicName("shop", "prod", "orders"), "fulfilment")
SOURCE, RETRY, DEAD = POLICY.topic, POLICY.retry_topic, POLICY.dead_letter_topic
JOB = ReplayJob("shop", "again", "uid", POLICY, "pulsar://broker", "http://broker", None)
BEGAN = {TargetPartition(topic, 0): EntryId(7, 0) for topic in (SOURCE, RETRY, DEAD)}


@dataclass
class Message:
    """What is read of a message."""

    id: pulsar.MessageId
    carried: dict[str, str]

    def message_id(self) -> pulsar.MessageId:
        return self.id

    def properties(self) -> dict[str, str]:
        return self.carried


@dataclass
class Topics:
    """A broker of topics with one partition each: what they hold, and what is acknowledged."""

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
        ranges = tuple((EntryId(7, entry - 1), EntryId(7, entry)) for entry in done)
        count = len(self.held.get(topic, [{}]))
        return (Partition(0, ((7, count),), Acknowledged(ranges=ranges)),)

    def messages(
        self, of: reading.ReadableTopic, _: int, bounds: tuple[EntryId, EntryId], __: int
    ) -> Any:  # noqa: ANN401 - a generator
        for entry in range(bounds[0].entry + 1, bounds[1].entry + 1):
            if entry == self.breaks_at:
                self.breaks_at = None
                raise pulsar.ConnectError
            yield Message(pulsar.MessageId(0, 7, entry, -1), self.held[of.topic][entry])


@pytest.fixture
def topics(monkeypatch: pytest.MonkeyPatch) -> Topics:
    found = Topics()
    monkeypatch.setattr(snapshot, "look", found.look)
    monkeypatch.setattr(reading, "messages", found.messages)
    return found


def looking(job: ReplayJob = JOB, moved: int = 3) -> AftermathLook:
    return AftermathLook(job, None, moved, BEGAN)  # its client is not asked


def numbers(found: Aftermath) -> tuple[int, int, int, bool]:
    return found.handled, found.waiting, found.dead, found.settled


def test_a_message_is_followed_from_retry_to_retry_to_its_end(topics: Topics) -> None:
    look = looking()
    handled, retried, dead = (topics.put(RETRY) for _ in range(3))
    topics.put(RETRY, replay="shop/other")
    topics.put(DEAD, "ValueError", replay="shop/other")
    assert numbers(look.take()) == (0, 3, 0, False)
    topics.settle(RETRY, handled)
    again = topics.put(RETRY)
    topics.settle(RETRY, retried)
    topics.put(DEAD, "TimeoutError")
    topics.settle(RETRY, dead)
    found = look.take()
    assert numbers(found) == (1, 1, 1, False)
    assert found.causes == {"TimeoutError": 1}
    topics.settle(RETRY, again)
    assert [numbers(look.take()) for _ in range(2)] == [(2, 0, 1, False), (2, 0, 1, True)]


def test_what_goes_from_the_source_topic_to_the_retry_topic_is_in_both_looks(
    topics: Topics,
) -> None:
    look = looking(replace(JOB, target=SOURCE), moved=1)
    entry = topics.put(SOURCE)
    assert numbers(look.take()) == (0, 1, 0, False)
    again = topics.put(RETRY)
    topics.settle(SOURCE, entry)
    assert numbers(look.take()) == (0, 1, 0, False)
    topics.settle(RETRY, again)
    assert [numbers(look.take()) for _ in range(2)] == [(1, 0, 0, False), (1, 0, 0, True)]


def test_what_is_new_in_a_look_that_finds_nothing_waiting_is_not_settled(topics: Topics) -> None:
    look = looking(moved=1)
    topics.settle(RETRY, topics.put(RETRY))
    assert not look.take().settled
    topics.settle(RETRY, topics.put(RETRY))  # it was retried on its way from one look to the next
    assert not look.take().settled
    assert look.take().settled


def test_what_the_broker_has_forgotten_to_be_acknowledged_waits_again(topics: Topics) -> None:
    look = looking(moved=1)
    topics.settle(RETRY, topics.put(RETRY))
    assert numbers(look.take()) == (1, 0, 0, False)
    topics.acknowledged.clear()
    assert numbers(look.take()) == (0, 1, 0, False)


@pytest.mark.parametrize("topic", [RETRY, DEAD])
def test_a_look_that_breaks_off_is_taken_again_and_counts_nothing_twice(
    topics: Topics, topic: TopicName
) -> None:
    look = looking()
    for _ in range(3):
        topics.put(topic, "ValueError")
    topics.breaks_at = 3
    with pytest.raises(pulsar.ConnectError):
        look.take()
    found = look.take()
    assert found.waiting + found.dead == 3


def test_messages_of_a_batch_count_each_until_all_of_it_is_acknowledged() -> None:
    live = LiveMessages()
    for index in (1, 4, 4):  # the other ones are of another Replay, or none
        live.add(0, pulsar.MessageId(0, 7, 5, index))
    live.add(0, pulsar.MessageId(0, 7, 6, -1))
    live.add(1, pulsar.MessageId(1, 7, 5, -1))
    partition = Partition(0, ((7, 9),))
    assert live.waiting(partition) == 3
    batch = Acknowledged(ranges=((EntryId(7, 4), EntryId(7, 5)),))
    assert live.waiting(replace(partition, acknowledged=batch)) == 1
    assert live.waiting(replace(partition, acknowledged=Acknowledged(EntryId(8, -1)))) == 0


class Notes:
    """Takes note of what is reported."""

    def __init__(self, wish: Wish = Wish.RUN) -> None:
        self.wish = wish
        self.found: list[Aftermath] = []

    def report_aftermath(self, found: Aftermath) -> Wish:
        self.found.append(found)
        return self.wish


@pytest.fixture
def recorded(topics: Topics, monkeypatch: pytest.MonkeyPatch) -> Topics:
    """A ledger whose run has moved one message, and a broker."""
    records = Records()
    of = Range(0, 3, 0, 9_999)
    records.plans["uid"] = {of: RangePlan(1, 0b1, {}, ())}
    records.ranges[of] = RangeRecord(moved={"uid": 0b1})
    records.headers["uid"] = Header("shop/again", 0, began=BEGAN)
    monkeypatch.setattr(ledger, "read", lambda *_: records)
    monkeypatch.setattr(broker, "connect", lambda _: pytest.MonkeyPatch.context())
    monkeypatch.setattr(aftermath, "LOOK_SECONDS", 0.0)
    return topics


@pytest.mark.parametrize("wish", [Wish.END, Wish.EXPIRE])
def test_it_ends_with_its_replay(recorded: Topics, wish: Wish) -> None:
    recorded.put(RETRY)
    notes = Notes(wish)
    aftermath.follow(replace(JOB, follow_for=3_600.0), notes)
    assert [numbers(found) for found in notes.found] == [(0, 1, 0, False)]


def test_it_ends_when_its_time_is_over_after_one_more_look(recorded: Topics) -> None:
    recorded.put(RETRY)
    notes = Notes()
    aftermath.follow(replace(JOB, follow_for=0.0), notes)
    assert len(notes.found) == 1


def test_it_ends_when_all_is_settled(recorded: Topics) -> None:
    recorded.settle(RETRY, recorded.put(RETRY))
    notes = Notes()
    aftermath.follow(replace(JOB, follow_for=3_600.0), notes)
    assert notes.found[-1].settled


def test_a_broker_that_is_away_is_asked_again_and_is_an_error_in_the_end(
    recorded: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded.away = True
    with pytest.raises(BrokerFailedError):
        aftermath.follow(replace(JOB, follow_for=0.0), Notes())

    def comes_back(_: float) -> None:
        recorded.away = False

    monkeypatch.setattr(time, "sleep", comes_back)
    notes = Notes()
    aftermath.follow(replace(JOB, follow_for=3_600.0), notes)
    assert notes.found[-1].settled
