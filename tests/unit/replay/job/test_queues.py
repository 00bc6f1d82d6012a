"""Replays of RocketMQ in memory; `tests/integration` has a real broker and killed drivers."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.admin.errors import BrokerFailedError, BrokerRefusedError, BrokerUnreachableError
from redrive.api.replay_status import ReplayRun, RunCounts
from redrive.api.rocketmq import RocketMQMessages
from redrive.errors import RedriveError
from redrive.policy.envelope import CAUSE_TYPE
from redrive.reading.queues import MessageQueue, QueueCluster
from redrive.replay.account import Account
from redrive.replay.evidence import CODE, LedgerKey, SignedRecord
from redrive.replay.job import queue_plan, queues
from redrive.replay.job.plan import SHOWN, DesiredState, RunEndedError, RunPreview
from redrive.replay.job.queue_plan import Share
from redrive.replay.job.run import Review
from redrive.replay.ledger import FencedError
from redrive.replay.spec import Choice, PodSize, QueueReplayJob, decode_job
from tests.support.fake_rocketmq import MASTER, FakeCluster

DEAD, LEDGER, TARGET = "%DLQ%g", "redrive-ledger-g", "orders"
SOURCE = RocketMQMessages(DEAD, "g", ["rocketmq:9876"], None, [])
KEY = LedgerKey(b"k" * 32)


class KilledError(Exception):
    """The driver ends here."""

    @classmethod
    def throw(cls) -> RunPreview:
        """Raise the error, as a part of an expression."""
        raise cls


class Reporter:
    """Reporter without a status; *states* are the desired states of the next reports."""

    def __init__(self, *states: DesiredState | Exception) -> None:
        self.states = list(states)
        self.account = Account()
        self.shown: RunPreview | None = None
        self.awaits_admission = False
        self.scan_error: Exception | None = None
        self.rates: list[float | None] = [None]

    def report(self, account: Account, *, pause: object = None) -> DesiredState:  # noqa: ARG002
        self.account = account
        state = self.states.pop(0) if self.states else DesiredState.RUN
        if isinstance(state, Exception):
            raise state
        return state

    def rate_limit(self, _: object) -> float | None:
        return self.rates.pop(0) if len(self.rates) > 1 else self.rates[0]

    def report_scan(self, _: object) -> None:
        if self.scan_error is not None:
            raise self.scan_error

    def preview(self, preview: RunPreview) -> None:
        self.shown = preview

    def show_review(self, preview: RunPreview, review: Review) -> None:
        assert not review.ends
        self.shown = preview


@contextmanager
def in_memory() -> Iterator[FakeCluster]:
    """Yield five dead letters, and a target with two queues. Pauses take no time."""
    fake = FakeCluster(**{DEAD: 1, LEDGER: 1, TARGET: 2})
    for number in range(5):
        fake.add(DEAD, KEYS=f"k{number}", UNIQ_KEY=f"id{number}", MAX_OFFSET="9", RETRY_TOPIC="x")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("redrive.reading.queues.RocketMQSession", lambda _: fake)
        patch.setattr(time, "sleep", lambda _: None)
        patch.setattr(queues, "REPORT_SECONDS", 0)
        yield fake


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with in_memory() as fake:
        yield fake


def job(uid: str = "one", **fields: Any) -> QueueReplayJob:  # noqa: ANN401
    return QueueReplayJob("shop", "now", uid, SOURCE, LEDGER, TARGET, **fields)


def move(
    job: QueueReplayJob,
    *states: DesiredState | Exception,
    was_planned: bool = False,
    reported: int = 0,
    scan_error: Exception | None = None,
) -> Account:
    """Run a job after runs that have reported *reported* moved messages; return its account."""
    reporter: Any = Reporter(*states)
    reporter.scan_error = scan_error
    counts = RunCounts(matched=5, moved=reported) if was_planned else RunCounts()
    credentials: Any = SimpleNamespace(access=lambda: None)
    with QueueCluster(job.source, credentials) as connected:
        try:
            queues.QueueRun(job, connected, reporter, KEY, ReplayRun(counts=counts)).run(bool)
        finally:
            account: Account = reporter.account
            settled = account.moved + account.skipped + account.refused
            assert account.matched == settled + account.left
    return account


def ids(cluster: FakeCluster, topic: str = TARGET) -> list[str]:
    copies = [m for queue in range(2) for m in cluster.read(topic, queue)]
    return sorted(message.properties["UNIQ_KEY"] for message in copies if message.properties)


def add_copy(cluster: FakeCluster, source: str, proof: str) -> None:
    """Store a message in the target that seems to be a copy."""
    cluster.add(TARGET, UNIQ_KEY="copy", REDRIVE_REPLAY_SOURCE=source, REDRIVE_REPLAY_PROOF=proof)


ALL = [f"id{number}" for number in range(5)]


def test_doubts_of_a_replay_are_counted_by_each_later_one(cluster: FakeCluster) -> None:
    cluster.add(TARGET, UNIQ_KEY="other")
    cluster.failures = [None, None, KilledError("killed")]
    with pytest.raises(KilledError):
        move(job("a"))
    cluster.failures = []
    cluster.drop(TARGET)
    one = move(job("b", choice=Choice(keys=("k4",))))
    all_of_them = move(job("c"))
    assert [(one.moved, one.doubled), (all_of_them.moved, all_of_them.doubled)] == [(1, 1), (4, 4)]


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


@pytest.mark.parametrize("source", ["broker-a:0:0", "no position", ""])
def test_forged_copy_is_no_proof_of_a_move(cluster: FakeCluster, source: str) -> None:
    killed_after(cluster, 0)
    add_copy(cluster, source, "0" * 32)
    assert move(job(), was_planned=True).moved == 5
    assert ids(cluster) == ["copy", *ALL]


def killed_after(cluster: FakeCluster, moved: int, uid: str = "one") -> None:
    """Run a driver that is killed after it has moved a number of messages."""
    cluster.failures = [*[None] * (moved + 1), KilledError("killed")]
    with pytest.raises(KilledError):
        move(job(uid))
    cluster.failures = []


def test_message_that_is_stored_twice_counts_as_doubled(cluster: FakeCluster) -> None:
    """A stopped driver has sent the same message during the search of the next run."""
    killed_after(cluster, 2)
    first, *_ = cluster.read(TARGET) + cluster.read(TARGET, 1)
    copy = first.properties or {}
    add_copy(cluster, copy["REDRIVE_REPLAY_SOURCE"], copy["REDRIVE_REPLAY_PROOF"])
    account = move(job(), was_planned=True, reported=2)
    assert (account.moved, account.doubled) == (5, 1)
    assert ids(cluster) == ["copy", *ALL]


@pytest.mark.parametrize("queue", [0, 1])
def test_retry_of_a_moved_message_is_no_second_copy(cluster: FakeCluster, queue: int) -> None:
    """A master stores the retry of a message with all of its properties."""
    killed_after(cluster, 2)
    for copy in cluster.read(TARGET) + cluster.read(TARGET, 1):
        cluster.put(TARGET, copy.content, copy.properties or {}, queue, retries=1)
    account = move(job(), was_planned=True, reported=2)
    assert (account.moved, account.doubled) == (5, 0)


@pytest.mark.parametrize(
    ("lose", "reported"),
    [
        (lambda cluster: cluster.drop(TARGET), 0),
        (lambda cluster: cluster.drop(TARGET, others=9), 3),
        (lambda cluster: cluster.first.update({(TARGET, 1): 3}), 0),
        (lambda cluster: cluster.counts.update({TARGET: 1}), 0),
    ],
    ids=["created again", "created again and used", "expired", "fewer queues"],
)
def test_messages_whose_copies_are_lost_count_as_doubled(
    cluster: FakeCluster, lose: Callable[[FakeCluster], None], reported: int
) -> None:
    for queue in (0, 1):
        cluster.add(TARGET, queue, UNIQ_KEY="other")
    killed_after(cluster, 3)
    lose(cluster)
    kept = [m for queue in range(cluster.counts[TARGET]) for m in cluster.read(TARGET, queue)]
    copies = sum("KEYS" in (message.properties or {}) for message in kept)
    cluster.failures = [None, KilledError("killed")]
    with pytest.raises(KilledError):
        move(job(), was_planned=True, reported=reported)
    cluster.failures = []
    account = move(job(), was_planned=True)
    assert (account.matched, account.moved, account.doubled) == (5, 5, 5 - copies)


def test_run_without_losses_has_no_doubled_messages(cluster: FakeCluster) -> None:
    killed_after(cluster, 3)
    account = move(job(), was_planned=True, reported=3)
    assert (account.moved, account.doubled) == (5, 0)
    assert move(job("two")).doubled == 0


def test_next_replay_counts_what_a_killed_one_may_have_moved(cluster: FakeCluster) -> None:
    cluster.add(TARGET, UNIQ_KEY="other")
    killed_after(cluster, 3)
    cluster.drop(TARGET)
    cluster.add(DEAD, UNIQ_KEY="new")
    killed_after(cluster, 1, "two")
    account = move(job("two"), was_planned=True, reported=1)
    assert (account.moved, account.doubled) == (6, 5)


def test_older_plan_that_is_copied_keeps_what_a_run_has_added(cluster: FakeCluster) -> None:
    """Others may store records of the ledger again."""
    cluster.add(TARGET, UNIQ_KEY="other")
    killed_after(cluster, 3)
    (plan,) = cluster.read(LEDGER)
    cluster.drop(TARGET)
    cluster.failures = [None, KilledError("killed")]
    with pytest.raises(KilledError):
        move(job(), was_planned=True, reported=3)
    cluster.failures = []
    cluster.put(LEDGER, plan.content, plan.properties or {})
    assert move(job(), was_planned=True).doubled == 5
    assert ids(cluster) == ALL


def test_busy_broker_gets_the_message_again(cluster: FakeCluster) -> None:
    cluster.failures = [None, BrokerFailedError("busy", remedy="wait")] * 3
    assert move(job()).moved == 5
    assert ids(cluster) == ALL


def refused_without_cause() -> BrokerRefusedError:
    error = BrokerRefusedError("not stored", got="1 UNKNOWN_ERROR", remedy="wait")
    error.has_cause = False
    return error


def test_message_refused_without_a_cause_is_sent_again(cluster: FakeCluster) -> None:
    cluster.failures = [None, None, *[refused_without_cause()] * 9]
    assert move(job()).moved == 5
    assert ids(cluster) == ALL


def test_lasting_refusal_without_a_cause_leaves_the_message(cluster: FakeCluster) -> None:
    cluster.failures = [None, None, *[refused_without_cause()] * 50]
    account = move(job())
    assert (account.moved, account.refused) == (4, 1)
    assert account.refusals[0] == ("broker-a:0:1", 1, "NotAccepted")


def test_refused_message_stays(cluster: FakeCluster) -> None:
    cluster.failures = [None, None, BrokerRefusedError("too large", got="13", remedy="none")]
    account = move(job())
    assert (account.moved, account.refused) == (4, 1)
    assert account.refusals[0] == ("broker-a:0:1", 1, "NotAccepted")
    assert move(job("two")).moved == 1


def test_run_that_is_refused_too_often_records_what_it_moved(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused messages divide the moved ones into ranges, of which a record has a limited number.

    The error is not repeated like one of an unreachable broker.
    """
    monkeypatch.setattr(queues, "RECORD_PARTS", 2)
    refused = BrokerRefusedError("too large", got="13", remedy="none")
    cluster.failures = [None, refused, None, refused, None, refused]
    with pytest.raises(RunEndedError, match="than its record can contain"):
        move(job())
    assert ids(cluster) == ["id1", "id3"]
    monkeypatch.setattr(queues, "RECORD_PARTS", 9)
    monkeypatch.delattr(queues.QueueRun, "_search")
    assert move(job("two")).moved == 3
    assert ids(cluster) == ALL


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


def test_increased_rate_ends_a_long_wait(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first messages have an hour between them, until the author of the Replay is impatient."""
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        assert len(sleeps) < 20

    monkeypatch.setattr(time, "sleep", sleep)
    reporter: Any = Reporter()
    reporter.rates = [1 / 3_600] * 3 + [1e9]
    credentials: Any = SimpleNamespace(access=lambda: None)
    with QueueCluster(SOURCE, credentials) as connected:
        queues.QueueRun(job(), connected, reporter, KEY, ReplayRun()).run(bool)
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


def test_run_canceled_while_it_plans_moves_nothing(cluster: FakeCluster) -> None:
    canceled = RunEndedError("the run has ended", remedy="none", reason="Canceled")
    with pytest.raises(RunEndedError):
        move(job(), scan_error=canceled)
    assert ids(cluster) == []
    assert move(job("two")).moved == 5


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
        (Choice(ids=("broker-a:0:3", "broker-a:0:1")), ["id1", "id3"]),
        (Choice(ids=("broker-a:0:4", "broker-a:1:1", "other:0:1", "broker-a:0:5")), ["id4"]),
        (Choice(ids=("broker-a:0:4", "broker-a:0:2"), keys=("k2",)), ["id2"]),
    ],
    ids=["limit", "key", "until", "ids", "unknown ids", "ids and key"],
)
def test_only_selected_messages_are_moved(
    cluster: FakeCluster, choice: Choice, moved: list[str]
) -> None:
    account = move(job(choice=choice))
    assert account.matched == account.moved == len(moved)
    assert ids(cluster) == moved


def test_ids_are_read_alone_and_moved_once(cluster: FakeCluster) -> None:
    choice = Choice(ids=("broker-a:0:1", "broker-a:0:3"))
    assert move(job(choice=choice)).scanned == 2
    assert move(job("two", choice=choice)).scanned == 0
    assert move(job("three")).moved == 3
    assert ids(cluster) == ALL


def test_message_over_the_number_of_replays_is_refused(cluster: FakeCluster) -> None:
    cluster.add(DEAD, UNIQ_KEY="again", REDRIVE_REPLAYS="2")
    account = move(job(choice=Choice(max_replays=2)))
    assert (account.moved, account.refused) == (5, 1)
    assert account.refusals[0].cause == "ReplayedTooOften"


def test_plan_after_an_outage_counts_each_message_once(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull, failures = cluster.pull, [None, None, BrokerUnreachableError("gone", remedy="wait")]

    async def fail_once(*arguments: Any) -> tuple[bytes, int]:  # noqa: ANN401
        if arguments[1] == DEAD and failures and (failure := failures.pop(0)) is not None:
            raise failure
        return await pull(*arguments)

    monkeypatch.setattr(cluster, "pull", fail_once)
    shown = planned()
    assert not failures
    assert sum(figures.messages for figures in shown.causes.values()) == 5
    assert shown.samples == tuple(f"broker-a:0:{offset}" for offset in range(5))


def planned() -> RunPreview:
    reporter: Any = Reporter()
    credentials: Any = SimpleNamespace(access=lambda: None)
    with QueueCluster(SOURCE, credentials) as connected:
        queues.QueueRun(job(dry_run=True), connected, reporter, KEY, ReplayRun()).run(bool)
    shown: RunPreview = reporter.shown
    return shown


def test_task_waits_for_a_broker_and_reads_its_part(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull, failures = cluster.pull, [None, BrokerUnreachableError("gone", remedy="wait")]

    async def fail_once(*arguments: Any) -> tuple[bytes, int]:  # noqa: ANN401
        if failures and (failure := failures.pop(0)) is not None:
            raise failure
        return await pull(*arguments)

    monkeypatch.setattr(cluster, "pull", fail_once)
    monkeypatch.setattr(queue_plan, "PART_OFFSETS", 4)
    monkeypatch.setattr(queue_plan, "_PULLS", 1)
    monkeypatch.setattr(queue_plan, "job_credentials", lambda: SimpleNamespace(access=lambda: None))
    queue = MessageQueue(MASTER, DEAD, 0, range(5))
    parts = queue_plan.parts([queue])
    assert [part.offsets for part in parts] == [range(4), range(4, 5)]
    rows = [row for part in parts for row in queue_plan.read_part(SOURCE, part)]
    assert [row.id for row in rows] == [f"broker-a:0:{offset}" for offset in range(5)]
    assert not failures


def reviewed(*, is_confirmed: bool) -> tuple[RunPreview | None, Account]:
    """Review a Replay, of which another one moves two messages before the review ends."""
    reporter: Any = Reporter()
    reporter.awaits_admission = True

    def wait() -> bool:
        assert move(job("other", choice=Choice(limit=2))).moved == 2
        return is_confirmed

    credentials: Any = SimpleNamespace(access=lambda: None)
    with QueueCluster(SOURCE, credentials) as connected:
        run = queues.QueueRun(job(review=True), connected, reporter, KEY, ReplayRun())
        assert run.run(wait) is is_confirmed
    return reporter.shown, reporter.account


def test_confirmed_review_moves_what_it_has_shown(cluster: FakeCluster) -> None:
    cluster.failures = [None] * 6 + [KilledError("killed")]  # two plans, an end, three copies
    with pytest.raises(KilledError):
        reviewed(is_confirmed=True)
    assert ids(cluster) == ALL[:3]
    cluster.add(DEAD, UNIQ_KEY="new")
    account = move(job(), was_planned=True)
    assert (account.matched, account.moved, account.skipped, account.left) == (5, 3, 2, 0)
    assert ids(cluster) == ALL
    assert move(job("two")).moved == 1


def test_review_after_a_killed_one_shows_its_causes(cluster: FakeCluster) -> None:
    """The driver was killed after it had stored the plan, and before it showed it."""
    cluster.put(DEAD, b"", {CAUSE_TYPE: "Timeout"})
    shown = planned()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queues.QueueRun, "_preview", lambda _: KilledError.throw())
        with pytest.raises(KilledError):
            reviewed(is_confirmed=True)
    again, _ = reviewed(is_confirmed=True)
    assert again == shown
    assert sorted(figures.messages for figures in shown.causes.values()) == [1, 5]


def test_causes_of_a_plan_are_bounded(cluster: FakeCluster) -> None:
    """Any producer writes them."""
    for number in range(2 * SHOWN):
        cluster.put(DEAD, b"", {CAUSE_TYPE: f"Error{number}"})
    assert len(planned().causes) == SHOWN
    move(job())
    (plan, _) = cluster.read(LEDGER)
    assert len(json.loads(zlib.decompress(plan.content))["causes"]) == SHOWN


def test_expired_review_moves_nothing(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, _ = reviewed(is_confirmed=False)
    assert shown is not None
    assert (shown.account.left, len(shown.samples)) == (5, 5)
    assert ids(cluster) == ALL[:2]
    monkeypatch.delattr(queues.QueueRun, "_search")  # its end is recorded
    assert move(job("two")).moved == 3
    assert ids(cluster) == ALL


def test_plan_estimates_time_by_the_rate_of_rocketmq(cluster: FakeCluster) -> None:
    for number in range(1_096):
        cluster.add(DEAD, UNIQ_KEY=f"more{number}")
    assert planned().seconds == 3


def test_plan_moves_nothing(cluster: FakeCluster) -> None:
    shown = planned()
    assert (shown.account.left, shown.samples[0]) == (5, "broker-a:0:0")
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


PLAN = Share(TARGET, {0: 5, 1: 5}, scanned=5, masters=("broker-a",)).to_json()
ROOM = [[0, 5]]


def sign(cluster: FakeCluster, content: bytes, uid: str) -> None:
    """Store a message in the ledger of the cluster, with the signature of a record."""
    signed = KEY.properties(SignedRecord(uid, content, "broker-a", 0))
    cluster.put(LEDGER, content, {"KEYS": KEY.topic_key(uid), **signed})


@pytest.mark.parametrize(
    "record",
    [
        b"no record",
        b"[1]",
        json.dumps({"moved": [1]}).encode(),
        json.dumps({"moved": [[0, 2**70]]}).encode(),
        json.dumps({"moved": [[0, 10**12], [10**12, 0]]}).encode(),
        json.dumps({**PLAN, "selected": [[0, 10**12]]}).encode(),
        json.dumps({**PLAN, "causes": [["Timeout", "", 1]]}).encode(),
    ],
    ids=["text", "list", "no ranges", "too large", "negative", "too many", "no figures"],
)
def test_invalid_record_of_the_ledger_is_ignored(cluster: FakeCluster, record: bytes) -> None:
    sign(cluster, record, "other")
    sign(cluster, zlib.compress(record), "other")
    assert move(job()).moved == 5


def test_forged_end_of_rocketmq_hides_no_dead_letter() -> None:
    """Others with the right to produce repeat the records of a finished run, with a false code."""
    with in_memory() as finished:
        assert move(job()).moved == 5
        records = finished.read(LEDGER)
    with in_memory() as cluster:
        for record in records:
            cluster.put(LEDGER, record.content, {**(record.properties or {}), CODE: "0" * 64})
        assert move(job("two")).moved == 5


NUMBERS = st.sampled_from([0, 1, 4, 5, -1, 2**63, 10**30, 1.5, 1e999, True, None, "1"])
RUNS = st.one_of(st.just(ROOM), st.lists(st.lists(NUMBERS, max_size=3), max_size=3), NUMBERS)
TOPICS = st.sampled_from([TARGET, LEDGER, DEAD, "%RETRY%g", "absent", "a/../b"])
PLANS = st.fixed_dictionaries({
    "target": st.one_of(TOPICS, NUMBERS), "after": st.one_of(RUNS, st.just({"0": 1e999})),
    "scanned": NUMBERS, "selected": RUNS, "refused": RUNS,
    "masters": st.sampled_from([["broker-a"], ["gone"], [["nested"]], [], None]),
})  # fmt: skip
HIDING = st.sampled_from([
    {"moved": ROOM},
    PLAN,
    {**PLAN, "target": LEDGER, "selected": ROOM},
])  # fmt: skip
"""Valid records with which nothing would be moved to the target."""
FORGED = st.one_of(HIDING, HIDING, PLANS, st.fixed_dictionaries({"moved": RUNS}), RUNS)
CONTENTS = st.one_of(
    FORGED.map(lambda record: zlib.compress(json.dumps(record).encode())),
    FORGED.map(lambda record: json.dumps(record).encode()),
    st.binary(max_size=40),
    HIDING.map(lambda record: zlib.compress(json.dumps(record).encode())),
    st.sampled_from([b"[" * 9_000, zlib.compress(b"[" * 10**6), zlib.compress(bytes(10**6))]),
)
UIDS = st.sampled_from(["one", "two", "three", "", "\u202e"])


@st.composite
def foreign_records(draw: st.DrawFn) -> tuple[bytes, dict[str, str]]:
    """Draw a message that a role with the right to produce can write without the key."""
    content, uid = draw(CONTENTS), draw(UIDS)
    other = LedgerKey(b"o" * 32)
    match draw(st.sampled_from(["unsigned", "other key", "other master", "other content"])):
        case "unsigned":
            return content, {"KEYS": uid}
        case "other key":
            signed = other.properties(SignedRecord(uid, content, "broker-a", 0))
            return content, {"KEYS": KEY.topic_key(uid), **signed}
        case "other master":
            signed = KEY.properties(SignedRecord(uid, content, "broker-b", 0))
        case _:
            signed = KEY.properties(SignedRecord(uid, content + b" ", "broker-a", 0))
    return content, {"KEYS": KEY.topic_key(uid), **signed}


@given(
    st.lists(foreign_records(), max_size=6),
    st.lists(foreign_records(), max_size=6),
    st.integers(1, 7),
    st.lists(st.integers(0, 9), max_size=4),
)
def test_forged_records_of_rocketmq_hide_no_dead_letter(
    before: list[tuple[bytes, dict[str, str]]],
    after: list[tuple[bytes, dict[str, str]]],
    sends: int,
    copied: list[int],
) -> None:
    """Others write before and after a killed run, and copy records and moved messages."""
    with in_memory() as cluster:
        for content, properties in before:
            cluster.put(LEDGER, content, properties)
        cluster.failures = [*[None] * sends, KilledError("killed")]
        with suppress(KilledError):
            move(job())
        cluster.failures = []
        for content, properties in after:
            cluster.put(LEDGER, content, properties)
        stored = [(topic, m) for topic in (LEDGER, TARGET) for m in cluster.read(topic)]
        for number in copied:
            topic, message = stored[number % len(stored)]
            cluster.put(topic, message.content, message.properties or {})
        assert move(job(), was_planned=True).moved == 5
        assert sorted(set(ids(cluster))) == ALL
        assert move(job("two")).scanned == 0


@pytest.mark.parametrize("is_refused", [True, False])
def test_plan_has_a_size_that_a_broker_accepts(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, *, is_refused: bool
) -> None:
    """Producers choose which messages die, and which of them can't be moved."""
    monkeypatch.setattr(queues, "RECORD_PARTS", 2)
    if is_refused:
        for number in range(3):
            cluster.add(DEAD, UNIQ_KEY=f"again{number}", REDRIVE_REPLAYS="2")
        cluster.add(DEAD, UNIQ_KEY="id5")
        account = move(job(choice=Choice(max_replays=2)))
        assert (account.moved, account.refused) == (6, 2)
        return
    every_second = Choice(keys=("k0", "k2", "k4"))
    assert move(job(choice=every_second)).moved == 2
    assert move(job("two", choice=every_second)).moved == 1
    assert ids(cluster) == ["id0", "id2", "id4"]


def test_doubts_of_many_replays_fit_into_a_record(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier Replays of every second dead letter were killed, and their target was deleted."""
    cluster.add(TARGET, UNIQ_KEY="other")
    for uid, keys in (("a", ("k0",)), ("b", ("k2",)), ("c", ("k4",))):
        cluster.failures = [None, None, KilledError("killed")]
        with pytest.raises(KilledError):
            move(job(uid, choice=Choice(keys=keys)))
    cluster.failures = []
    cluster.drop(TARGET)
    monkeypatch.setattr(queue_plan, "_MAX_DOUBTS", 2)
    killed_after(cluster, 0)
    plan = json.loads(zlib.decompress(cluster.read(LEDGER)[-1].content))
    assert plan["unproven"] is None
    account = move(job(), was_planned=True)
    assert (account.moved, account.doubled) == (5, 5)  # an upper limit


def test_topic_created_again_has_other_dead_letters(cluster: FakeCluster) -> None:
    """Its offsets begin with 0 again, where earlier Replays have moved others."""
    assert move(job()).moved == 5
    cluster.drop(DEAD)
    for number in range(3):
        cluster.add(DEAD, UNIQ_KEY=f"new{number}")
    assert move(job("two")).moved == 3
    assert move(job("three")).scanned == 0
    assert ids(cluster) == [*ALL, "new0", "new1", "new2"]


@pytest.mark.parametrize("is_created", [True, False])
def test_plan_of_a_deleted_topic_moves_no_later_message(
    cluster: FakeCluster, *, is_created: bool
) -> None:
    killed_after(cluster, 2)
    cluster.drop(DEAD)
    for number in range(9):
        cluster.add(DEAD, UNIQ_KEY=f"new{number}")
    if not is_created:
        del cluster.counts[DEAD]
    account = move(job(), was_planned=True)
    assert (account.moved, account.skipped, account.left) == (2, 3, 0)
    assert ids(cluster) == ALL[:2]
    cluster.counts[DEAD] = 1
    assert move(job("two")).moved == 9


def test_copy_stored_at_another_master_hides_nothing(cluster: FakeCluster) -> None:
    """A consumer of the target can store a copy at each master."""
    cluster.failures = [None, None, KilledError("killed")]
    with pytest.raises(KilledError):
        move(job())
    position = "broker-b:0:1"
    proof = KEY.proof(f"one@{position}", TARGET)
    names = {"REDRIVE_REPLAY_SOURCE": position, "REDRIVE_REPLAY_PROOF": proof}
    cluster.put(TARGET, b"message", {"UNIQ_KEY": "copied", **names})
    assert move(job(), was_planned=True).moved == 5
    assert ids(cluster) == ["copied", *ALL]


def test_master_that_skips_offsets_costs_no_time(cluster: FakeCluster) -> None:
    """Its answers lead to the highest offset at once."""
    cluster.failures = [None, KilledError("killed")]
    with pytest.raises(KilledError):
        move(job())
    (record,) = cluster.read(LEDGER)
    plan = json.loads(zlib.decompress(record.content))
    cluster.first[LEDGER, 0] = 1
    plan |= {"selected": [[0, 5], [2**46, 2**46 + 1]], "last": 2**46}
    sign(cluster, zlib.compress(json.dumps(plan).encode()), "one")
    cluster.first[DEAD, 0] = 2**46 + 1
    account = move(job(), was_planned=True)
    assert (account.matched, account.skipped, account.moved) == (6, 6, 0)
