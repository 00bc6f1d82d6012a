"""Replays of one process, without Spark, on the real broker: nothing is lost, nothing doubled."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pulsar
import pytest

from redrive.policy.naming import DEAD_LETTER_SUBSCRIPTION, TopicName
from redrive.reading import broker
from redrive.reading.broker import ReplayRoleRefusedError
from redrive.reading.positions import EntryId
from redrive.reading.session import ProtocolConnection
from redrive.replay import mover, sending
from redrive.replay.account import Account
from redrive.replay.job import run as runs
from redrive.replay.mover import RangeMover
from redrive.replay.outcome import RangeResult
from redrive.replay.records import RefusedEntry
from redrive.replay.task import RangeTask
from sandbox.errors import SandboxError
from tests.support.engines import Local
from tests.support.held_sends import held_at
from tests.support.key_pairs import key_pair
from tests.support.local_runs import (
    EverySecond,
    Notes,
    job_of,
    kill_at,
    numbers,
    replay,
    selecting,
    wait_until_moved,
)
from tests.support.reasons import raises
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("replay_token")

ProvisionPolicy = Callable[..., Any]
COUNT, MOVED, FIRST = 100, 20, 30
"""All but the `FIRST` are acknowledged by `consume`."""


@pytest.mark.parametrize("partitions", [0, 3])
def test_everything_is_moved_once_and_acknowledged(
    provision_policy: ProvisionPolicy, partitions: int
) -> None:
    provisioned = provision_policy(partitions=partitions, dead_partitions=partitions)
    provisioned.bury(50)
    buried = provisioned.ids(provisioned.unacknowledged())

    account = replay(provisioned)

    assert (account.scanned, account.matched, account.moved, account.left) == (50, 50, 50, 0)
    assert provisioned.ids(provisioned.replayed()) == buried
    assert provisioned.unacknowledged() == []
    assert replay(provisioned) == Account()


@pytest.mark.parametrize("name", ["a:b", "über", "50%+~*"])
def test_subscription_with_encoded_name_is_replayed(
    provision_policy: ProvisionPolicy, name: str
) -> None:
    """The broker encodes the names of cursors, and of topics in addresses."""
    provisioned = provision_policy(partitions=2, subscription=name, dead_letter_subscription=name)
    provisioned.bury(20)
    buried = provisioned.ids(provisioned.unacknowledged())

    account = replay(provisioned)

    assert (account.scanned, account.moved, account.left) == (20, 20, 0)
    assert provisioned.ids(provisioned.replayed()) == buried
    assert provisioned.unacknowledged() == []
    partitions = broker.read_partitions(
        provisioned.broker.admin_url, provisioned.policy.retry_topic, name
    )
    assert len(partitions) == 2


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("partitions", [0, 3])
def test_undisturbed_range_is_sent_by_the_protocol(
    provision_policy: ProvisionPolicy,
    monkeypatch: pytest.MonkeyPatch,
    partitions: int,
    batch: bool,  # noqa: FBT001
) -> None:
    monkeypatch.setattr(mover, "ClientTransport", None)
    count = 600
    provisioned = provision_policy(partitions=partitions)
    provisioned.bury_many(count)

    account = replay(provisioned, batch=batch)

    assert (account.matched, account.moved, account.left) == (count, count, 0)
    assert provisioned.in_target() == numbers(count)
    target = broker.read_partitions(provisioned.broker.admin_url, provisioned.policy.retry_topic)
    entries = sum(stored for partition in target for _, stored in partition.ledgers)
    assert entries < count / 10 if batch else entries == count
    assert provisioned.backlog_of_dead_letters() == 0
    provisioned.check_audit()


@pytest.mark.parametrize("batch", [False, True])
def test_range_of_an_unloaded_target_is_sent_by_the_protocol(
    provision_policy: ProvisionPolicy,
    monkeypatch: pytest.MonkeyPatch,
    batch: bool,  # noqa: FBT001
) -> None:
    monkeypatch.setattr(mover, "ClientTransport", None)
    count = 800
    provisioned = provision_policy()
    provisioned.bury_in_ranges(count)
    with held_at(count * 3 // 4) as go_on, ThreadPoolExecutor(1) as threads:
        run = threads.submit(replay, provisioned, batch=batch)
        wait_until_moved(provisioned, count // 4)
        provisioned.admin("PUT", provisioned.policy.retry_topic, "unload")
        go_on.set()
        account = run.result()

    assert (account.moved, account.left) == (count, 0)
    provisioned.check_audit()
    assert provisioned.in_target() == numbers(count)


class CountsTasks(Local):
    """Counts the tasks of a run: a range that is moved by one has one."""

    tasks = 0

    def move(self, task: RangeTask) -> RangeResult:
        self.tasks += 1
        return super().move(task)


@pytest.mark.parametrize("after", [0, 500])
def test_client_takes_over_if_the_protocol_fails(
    provision_policy: ProvisionPolicy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    after: int,
) -> None:
    """At the first message, or after some of which receipts are lost."""
    provisioned = provision_policy(partitions=3)
    provisioned.bury_many(1_000)
    buried = provisioned.ids(provisioned.unacknowledged())
    entries, store = itertools.count(), ProtocolConnection.send

    def send(connection: ProtocolConnection, entry: bytes) -> None:
        if next(entries) == after:
            connection.flush()
            connection.close()
        store(connection, entry)

    monkeypatch.setattr(ProtocolConnection, "send", send)
    engine = CountsTasks()
    account = runs.run(job_of(provisioned), engine, Notes())

    assert engine.tasks == 1
    assert "binary protocol failed" in caplog.text
    assert (account.moved, account.left) == (1_000, 0)
    assert provisioned.ids(provisioned.replayed()) == buried


def test_returned_dead_letters_are_acknowledged_not_sent(
    provision_policy: ProvisionPolicy,
) -> None:
    """As those do that a broker forgets to have been acknowledged: it keeps 10,000 holes."""
    count = 600
    provisioned = provision_policy()
    provisioned.bury_many(count)
    runs.run(selecting(job_of(provisioned)), EverySecond(), Notes())
    topic, subscription = provisioned.policy.dead_letter_topic, DEAD_LETTER_SUBSCRIPTION
    provisioned.admin("DELETE", topic, f"subscription/{subscription}?force=true")
    earliest = {"ledgerId": -1, "entryId": -1}
    provisioned.admin("PUT", topic, f"subscription/{subscription}", earliest)
    assert provisioned.backlog_of_dead_letters() == count

    account = runs.run(selecting(job_of(provisioned)), EverySecond(), Notes())

    assert (account.matched, account.moved) == (0, 0)
    assert provisioned.in_target() == numbers(count)[::2]
    assert replay(provisioned).moved == count // 2
    assert provisioned.in_target() == numbers(count)


def test_lost_acknowledgements_are_repeated_by_the_next_replay(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    provisioned = provision_policy()
    provisioned.bury(30)
    buried = provisioned.ids(provisioned.unacknowledged())
    with monkeypatch.context() as patch:
        patch.setattr(RangeMover, "_acknowledge", lambda *_: None)
        patch.setattr(runs, "_ensure_acknowledged", lambda *_: None)
        assert replay(provisioned).moved == 30
    assert len(provisioned.unacknowledged()) == 30

    account = replay(provisioned)

    assert (account.matched, account.moved) == (0, 0)
    assert provisioned.unacknowledged() == []
    assert provisioned.in_target() == buried


@pytest.mark.parametrize(
    ("moved", "next_replay", "batch"),  # each pair of values, in half of all combinations
    [(1, "same", True), (1, "other", False), (200, "same", False), (200, "other", True)],
)
def test_killed_run_is_resumed(
    provision_policy: ProvisionPolicy,
    moved: int,
    next_replay: str,
    batch: bool,  # noqa: FBT001
) -> None:
    count = 600
    provisioned = provision_policy()
    provisioned.bury_in_ranges(count)
    job = job_of(provisioned, batch=batch)
    kill_at(provisioned, job, moved, count)
    before = len(provisioned.in_target())
    assert 0 < before < count

    account = replay(provisioned, uid=job.uid if next_replay == "same" else "")

    assert provisioned.in_target() == numbers(count)
    provisioned.check_audit()
    assert account.matched == account.moved + account.skipped
    if next_replay == "same":
        assert account.moved == count
    assert provisioned.backlog_of_dead_letters() == 0


def test_subscription_held_by_others_ends_the_run_at_once(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    provisioned.bury(2)
    topic = str(provisioned.policy.dead_letter_topic)
    consumer = provisioned.client.subscribe(topic, DEAD_LETTER_SUBSCRIPTION)
    began = time.monotonic()

    with pytest.raises(ReplayRoleRefusedError, match="ConsumerBusy"):
        replay(provisioned)

    assert time.monotonic() - began < broker.WAIT_SECONDS / 2
    consumer.close()
    assert replay(provisioned).moved == 2


def test_backlog_cleared_by_hand_does_not_count_as_moved(
    provision_policy: ProvisionPolicy,
) -> None:
    count = 600
    provisioned = provision_policy()
    provisioned.bury_in_ranges(count)
    job = job_of(provisioned)
    kill_at(provisioned, job, 100, count)
    subscription = f"subscription/{DEAD_LETTER_SUBSCRIPTION}/skip_all"
    provisioned.admin("POST", provisioned.policy.dead_letter_topic, subscription)

    account = replay(provisioned, uid=job.uid)

    ids = provisioned.in_target()
    assert len(set(ids)) == len(ids) == account.moved < count
    assert (account.matched, account.left) == (count, 0)
    assert account.skipped == count - account.moved


def test_immovable_message_is_refused_with_its_cause(
    provision_policy: ProvisionPolicy, tmp_path: Path
) -> None:
    provisioned = provision_policy()
    provisioned.bury(2)
    topic = str(provisioned.policy.dead_letter_topic)
    keys = pulsar.CryptoKeyReader(*map(str, key_pair(tmp_path)))
    encrypted = provisioned.client.create_producer(
        topic, encryption_key="key", crypto_key_reader=keys
    )
    sent = encrypted.send(b"secret", properties={"id": "secret"})
    provisioned.bury(2)

    account = replay(provisioned)

    assert (account.matched, account.moved, account.refused, account.left) == (5, 4, 1, 0)
    (refusal,) = account.refusals
    assert refusal == RefusedEntry(EntryId(sent.ledger_id(), sent.entry_id()), 1, "Encrypted")
    assert len(provisioned.in_target()) == 4


def acknowledge_first(provisioned: Any) -> None:  # noqa: ANN401
    """Acknowledge the first dead letter alone, as a message of its batch."""
    policy = provisioned.policy
    consumer = provisioned.client.subscribe(
        str(policy.dead_letter_topic),
        policy.dead_letter_subscription,
        consumer_type=pulsar.ConsumerType.Shared,
        batch_index_ack_enabled=True,
    )
    try:
        consumer.acknowledge(consumer.receive(10_000))
    finally:
        consumer.close()


def test_a_batch_is_moved_as_a_whole(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    provisioned.bury_batch("A", "B", "A")
    provisioned.bury(1)
    acknowledge_first(provisioned)
    account = replay(provisioned)
    assert (account.matched, account.moved, account.batched) == (4, 4, 3)
    assert len(provisioned.in_target()) == 4
    assert provisioned.unacknowledged() == []


def test_messages_refused_in_a_batch_are_sent_one_by_one(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "STALL_SECONDS", 2.0)
    count = 500
    provisioned = provision_policy()
    provisioned.bury_many(count)
    provisioned.change_policy("POST", provisioned.policy.retry_topic, "maxMessageSize", 1_000)
    account = runs.run(job_of(provisioned, batch=True), Local(), Notes())
    assert (account.matched, account.moved, account.refused) == (count, count, 0)
    assert provisioned.in_target() == numbers(count)
    provisioned.check_audit()


def test_completely_stored_batch_is_not_sent_again(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    provisioned = provision_policy()
    provisioned.bury_batch("A", "B", "A")
    job = job_of(provisioned)
    with monkeypatch.context() as patch:
        patch.setattr(RangeMover, "_acknowledge", lambda *_: None)
        patch.setattr(RangeMover, "_result", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            runs.run(job, Local(), Notes())
    assert len(provisioned.in_target()) == 3

    account = replay(provisioned, uid=job.uid)

    assert (account.matched, account.moved, account.left) == (3, 3, 0)
    assert len(provisioned.in_target()) == 3
    assert provisioned.unacknowledged() == []


def test_target_without_deduplication_stops_the_run(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy(deduplicate=False)
    provisioned.bury(5)
    for _ in range(2):
        with raises("DeduplicationOff", match="deduplication is off"):
            replay(provisioned)
    ids = provisioned.in_target()
    assert len(ids) == len(set(ids)) < 5


@contextmanager
def held_run(
    provisioned: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
    uid: str = "",
) -> Iterator[Future[Account]]:
    """Run a Replay of `COUNT` dead letters, which moves `MOVED` before the block and others after.

    It looks for acknowledgements before each message.
    """
    monkeypatch.setattr(sending, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(sending, "POLL_SHARE", 0.0)
    provisioned.bury_many(COUNT)
    with ThreadPoolExecutor(1) as threads, held_at(MOVED):
        run = threads.submit(replay, provisioned, uid=uid)
        wait_until_moved(provisioned, MOVED)
        yield run


def skip_all(provisioned: Any) -> None:  # noqa: ANN401
    topic = provisioned.policy.dead_letter_topic
    provisioned.admin("POST", topic, f"subscription/{DEAD_LETTER_SUBSCRIPTION}/skip_all")


def expire(provisioned: Any) -> None:  # noqa: ANN401
    """Expire all, as soon as all are older than a second."""
    at = f"subscription/{DEAD_LETTER_SUBSCRIPTION}/expireMessages/1"

    def are_expired() -> bool:
        with suppress(SandboxError):  # the last request is not finished
            provisioned.admin("POST", provisioned.policy.dead_letter_topic, at)
        return bool(provisioned.backlog_of_dead_letters() == 0)

    wait_until(are_expired)


def consume(provisioned: Any) -> None:  # noqa: ANN401
    """Acknowledge all but the first ones, in the order in which they lie, as a consumer does."""
    topic = str(provisioned.policy.dead_letter_topic)
    consumer = provisioned.client.subscribe(
        topic, DEAD_LETTER_SUBSCRIPTION, pulsar.ConsumerType.Shared
    )
    number = -1
    while number < COUNT - 1:
        message = consumer.receive(60_000)
        number = int(message.properties()["id"])
        if number >= FIRST:
            consumer.acknowledge(message)
    consumer.close()
    wait_until(lambda: provisioned.backlog_of_dead_letters() <= FIRST)


@pytest.mark.parametrize(
    ("acknowledge", "moved"), [(skip_all, MOVED), (expire, MOVED), (consume, FIRST)]
)
def test_what_others_acknowledge_meanwhile_is_not_sent(
    provision_policy: ProvisionPolicy,
    monkeypatch: pytest.MonkeyPatch,
    acknowledge: Callable[[Any], None],
    moved: int,
) -> None:
    provisioned = provision_policy()
    with held_run(provisioned, monkeypatch) as run:
        acknowledge(provisioned)
    account = run.result()

    assert (account.matched, account.moved, account.skipped) == (COUNT, moved, COUNT - moved)
    assert len(provisioned.in_target()) == moved
    assert provisioned.backlog_of_dead_letters() == 0


@pytest.mark.parametrize("again", [False, True])
def test_deleted_dead_letter_topic_fails_the_replay(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch, *, again: bool
) -> None:
    provisioned, uid = provision_policy(), "uid-lost"
    topic = provisioned.policy.dead_letter_topic
    with held_run(provisioned, monkeypatch, uid) as run:
        provisioned.delete(topic)
        if again:
            recreate(provisioned, topic)
    with raises("DeadLetterTopicLost", match=topic.local):
        run.result()
    if again:
        provisioned.bury_many(1)
        with raises("DeadLetterTopicLost", match=topic.local):  # also by the next driver
            replay(provisioned, uid=uid)
        assert len(provisioned.in_target()) == MOVED


def recreate(provisioned: Any, topic: TopicName) -> None:  # noqa: ANN401
    """Create a deleted dead-letter *topic*, as the operator does."""
    provisioned.create(topic, DEAD_LETTER_SUBSCRIPTION, 0)
    provisioned.grant(topic, "consume")


class Dies(Local):
    """Is killed once a range is leased."""

    def move(self, task: RangeTask) -> RangeResult:
        raise RuntimeError(str(task.range))


def test_topic_recreated_between_drivers_fails_the_replay(
    provision_policy: ProvisionPolicy,
) -> None:
    """The second driver searches the target first, because the range is leased."""
    provisioned = provision_policy()
    topic, job = provisioned.policy.dead_letter_topic, job_of(provisioned)
    provisioned.bury_many(10)
    with pytest.raises(RuntimeError):
        runs.run(job, Dies(), Notes())
    provisioned.delete(topic)
    recreate(provisioned, topic)

    notes = Notes()
    for _ in range(2):
        with raises("DeadLetterTopicLost", match=topic.local):
            runs.run(job, Local(), notes)
    assert {account.skipped for account in notes.accounts} == {0}
    assert replay(provisioned) == Account()
