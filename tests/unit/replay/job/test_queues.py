"""Replays of RocketMQ in memory; `tests/integration` has a real broker and killed drivers."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from redrive.admin.errors import BrokerFailedError, BrokerRefusedError, BrokerUnreachableError
from redrive.api.rocketmq import RocketMQMessages
from redrive.errors import RedriveError
from redrive.reading.queues import QueueCluster
from redrive.replay.account import Account
from redrive.replay.job import queues
from redrive.replay.job.dispatch import RunEndedError
from redrive.replay.job.plan import DesiredState, RunPreview
from redrive.replay.job.queues import Share
from redrive.replay.ledger import FencedError
from redrive.replay.spec import Choice, PodSize, QueueReplayJob, decode_job
from tests.support.fake_rocketmq import FakeCluster

DEAD, LEDGER, TARGET = "%DLQ%g", "redrive-ledger-g", "orders"
SOURCE = RocketMQMessages(DEAD, "g", ["rocketmq:9876"], None, [])


class KilledError(Exception):
    """The driver ends here."""


class Reporter:
    """Reporter without a status; *states* are the desired states of the next reports."""

    def __init__(self, *states: DesiredState | Exception) -> None:
        self.states = list(states)
        self.account = Account()
        self.shown: RunPreview | None = None

    def report(self, account: Account, *, pause: object = None) -> DesiredState:  # noqa: ARG002
        self.account = account
        state = self.states.pop(0) if self.states else DesiredState.RUN
        if isinstance(state, Exception):
            raise state
        return state

    def rate_limit(self, _: object) -> float | None:
        return None

    def report_scan(self, _: object) -> None:
        """Report nothing."""

    def preview(self, preview: RunPreview) -> None:
        self.shown = preview


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """Five dead letters, and a target with two queues. Pauses take no time."""
    fake = FakeCluster(**{DEAD: 1, LEDGER: 1, TARGET: 2})
    for number in range(5):
        fake.add(DEAD, KEYS=f"k{number}", UNIQ_KEY=f"id{number}", MAX_OFFSET="9", RETRY_TOPIC="x")
    monkeypatch.setattr("redrive.reading.queues.RocketMQSession", lambda _: fake)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(queues, "REPORT_SECONDS", 0)
    return fake


def job(uid: str = "one", **fields: Any) -> QueueReplayJob:  # noqa: ANN401
    return QueueReplayJob("shop", "now", uid, SOURCE, LEDGER, TARGET, **fields)


def move(
    job: QueueReplayJob, *states: DesiredState | Exception, was_planned: bool = False
) -> Account:
    """Run a job, and return its account."""
    reporter: Any = Reporter(*states)
    credentials: Any = SimpleNamespace(access=lambda: None)
    with QueueCluster(job.source, credentials) as connected:
        try:
            queues.QueueRun(job, connected, reporter).run(was_planned=was_planned)
        finally:
            account: Account = reporter.account
            settled = account.moved + account.skipped + account.refused
            assert account.matched == settled + account.left
    return account


def ids(cluster: FakeCluster, topic: str = TARGET) -> list[str]:
    copies = [m for queue in range(2) for m in cluster.read(topic, queue)]
    return sorted(message.properties["UNIQ_KEY"] for message in copies if message.properties)


ALL = [f"id{number}" for number in range(5)]


def test_job_is_parsed_as_it_was_written() -> None:
    choice = Choice(keys=("a",), limit=3)
    written = job(choice=choice, pod=PodSize(1, 2), retry_of="orders")
    assert decode_job(written.encode()) == written


def test_each_dead_letter_is_moved_once(cluster: FakeCluster) -> None:
    account = move(job())
    assert (account.scanned, account.matched, account.moved, account.left) == (5, 5, 5, 0)
    assert ids(cluster) == ALL
    assert move(job("two")).scanned == 0
    cluster.add(DEAD, UNIQ_KEY="new")
    assert move(job("three")).moved == 1
    assert ids(cluster) == [*ALL, "new"]


def test_copy_has_the_position_and_no_field_of_the_broker(cluster: FakeCluster) -> None:
    move(job(retry_of="orders"))
    copies = {m.properties["UNIQ_KEY"]: m.properties for m in cluster.read(TARGET) if m.properties}
    copy = next(iter(copies.values()))
    number = copy["UNIQ_KEY"].removeprefix("id")
    assert copy.pop("REDRIVE_REPLAY_PROOF")
    assert copy == {
        "KEYS": f"k{number}",
        "UNIQ_KEY": f"id{number}",
        "RETRY_TOPIC": "orders",
        "REDRIVE_REPLAY": "shop/now",
        "REDRIVE_REPLAY_SOURCE": f"broker-a:0:{number}",
        "REDRIVE_REPLAYS": "1",
    }


@pytest.mark.parametrize("sends", range(1, 7))
def test_killed_run_is_resumed_without_copies(cluster: FakeCluster, sends: int) -> None:
    """The first call of `send` writes the plan, the last one the record of the end."""
    cluster.failures = [*[None] * sends, KilledError("killed")]
    with pytest.raises(KilledError):
        move(job())
    cluster.failures = []
    assert move(job(), was_planned=True).moved == 5
    assert ids(cluster) == ALL


@pytest.mark.parametrize("sends", range(1, 7))
def test_next_replay_searches_the_target_of_a_killed_one(cluster: FakeCluster, sends: int) -> None:
    cluster.counts["other"] = 1
    cluster.failures = [*[None] * sends, KilledError("killed")]
    with pytest.raises(KilledError):
        move(job())
    cluster.failures = []
    other = QueueReplayJob("shop", "then", "two", SOURCE, LEDGER, "other")
    assert move(other).moved == 6 - sends
    assert sorted(ids(cluster) + ids(cluster, "other")) == ALL


def test_forged_copy_is_no_proof_of_a_move(cluster: FakeCluster) -> None:
    cluster.failures = [None, KilledError("killed")]
    with pytest.raises(KilledError):
        move(job())
    cluster.add(
        TARGET,
        UNIQ_KEY="forged",
        REDRIVE_REPLAY_SOURCE="broker-a:0:0",
        REDRIVE_REPLAY_PROOF="0" * 32,
    )
    assert move(job(), was_planned=True).moved == 5
    assert ids(cluster) == ["forged", *ALL]


def test_busy_broker_gets_the_message_again(cluster: FakeCluster) -> None:
    cluster.failures = [None, BrokerFailedError("busy", remedy="wait")] * 3
    assert move(job()).moved == 5
    assert ids(cluster) == ALL


def test_refused_message_stays(cluster: FakeCluster) -> None:
    cluster.failures = [None, None, BrokerRefusedError("too large", got="13", remedy="none")]
    account = move(job())
    assert (account.moved, account.refused) == (4, 1)
    assert account.refusals[0] == ("broker-a:0:1", 1, "NotAccepted")
    assert move(job("two")).moved == 1


def test_unanswered_send_is_searched_before_the_next(cluster: FakeCluster) -> None:
    """The broker has stored the message, and its answer was lost."""
    store: Callable[..., Any] = cluster.send
    calls = []

    async def send(*place: Any, **fields: Any) -> None:  # noqa: ANN401
        calls.append(place)
        await store(*place, **fields)
        if len(calls) == 3:
            raise BrokerUnreachableError("gone", remedy="wait")

    cluster.send = send  # type: ignore[method-assign]
    assert move(job()).moved == 5
    assert ids(cluster) == ALL


def test_stopped_driver_sends_nothing_after_a_later_one(cluster: FakeCluster) -> None:
    later = FencedError("another run", remedy="none")
    with pytest.raises(FencedError):
        move(job(), DesiredState.RUN, DesiredState.RUN, later)
    assert len(ids(cluster)) == 2
    assert move(job(), was_planned=True).moved == 5
    assert ids(cluster) == ALL


def test_suspended_run_resumes(cluster: FakeCluster) -> None:
    suspend = [DesiredState.SUSPEND] * 3
    assert move(job(), DesiredState.RUN, *suspend, DesiredState.RUN).moved == 5
    assert ids(cluster) == ALL


def test_canceled_run_leaves_the_others_to_the_next(cluster: FakeCluster) -> None:
    with pytest.raises(RunEndedError):
        move(job(), DesiredState.RUN, DesiredState.RUN, DesiredState.CANCEL)
    assert move(job("two")).moved == 3
    assert ids(cluster) == ALL


def test_deleted_dead_letters_are_skipped(cluster: FakeCluster) -> None:
    cluster.failures = [None, KilledError("killed")]
    with pytest.raises(KilledError):
        move(job())
    cluster.first[DEAD, 0] = 3
    account = move(job(), was_planned=True)
    assert (account.matched, account.moved, account.skipped) == (5, 2, 3)


@pytest.mark.parametrize(
    ("choice", "moved"),
    [
        (Choice(limit=2), ["id0", "id1"]),
        (Choice(keys=("k3",)), ["id3"]),
        (Choice(until=2_000), []),
    ],
)
def test_only_selected_messages_are_moved(
    cluster: FakeCluster, choice: Choice, moved: list[str]
) -> None:
    account = move(job(choice=choice))
    assert account.matched == len(moved)
    assert ids(cluster) == moved


def test_message_over_the_number_of_replays_is_refused(cluster: FakeCluster) -> None:
    cluster.add(DEAD, UNIQ_KEY="again", REDRIVE_REPLAYS="2")
    account = move(job(choice=Choice(max_replays=2)))
    assert (account.moved, account.refused) == (5, 1)
    assert account.refusals[0].cause == "ReplayedTooOften"


def test_plan_moves_nothing(cluster: FakeCluster) -> None:
    reporter: Any = Reporter()
    credentials: Any = SimpleNamespace(access=lambda: None)
    with QueueCluster(SOURCE, credentials) as connected:
        queues.QueueRun(job(dry_run=True), connected, reporter).run(was_planned=False)
    assert (reporter.shown.account.left, reporter.shown.samples[0]) == (5, "broker-a:0:0")
    assert not cluster.read(LEDGER)
    assert not ids(cluster)


@pytest.mark.parametrize("topic", [LEDGER, TARGET])
def test_missing_topic_fails_the_run(cluster: FakeCluster, topic: str) -> None:
    del cluster.counts[topic]
    with pytest.raises(RedriveError, match="does not have a topic"):
        move(job())


def test_run_without_its_reported_plan_fails(cluster: FakeCluster) -> None:
    with pytest.raises(RedriveError, match="has no plan of this Replay any more"):
        move(job(), was_planned=True)
    assert not ids(cluster)


PLAN = Share("orders", {0: 5}).to_json()


@pytest.mark.parametrize(
    "record",
    [
        b"no record",
        b"[" * 100_000,
        b"[1]",
        json.dumps({"uid": "other", "moved": [1]}).encode(),
        json.dumps({"uid": "other", "moved": {"0": [[0, 2**70]]}}).encode(),
        json.dumps({"uid": "other", **PLAN, "key": 5}).encode(),
        json.dumps({"uid": "other", **PLAN, "selected": {"0": [[0, 10**12]]}}).encode(),
    ],
    ids=["text", "nested", "list", "no queues", "too large", "another key", "too many"],
)
def test_invalid_record_of_the_ledger_is_ignored(cluster: FakeCluster, record: bytes) -> None:
    cluster.add(LEDGER, body=record)
    cluster.add(LEDGER, body=zlib.compress(record))
    assert move(job()).moved == 5
