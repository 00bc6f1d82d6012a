"""Status writes of a driver, its rate and its causes of failure."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from redrive.api.replay_status import ADMITTED, CHECKED, MAX_AUDITED
from redrive.errors import RedriveError
from redrive.kube import resources
from redrive.kube.client import Kubernetes, UnavailableError
from redrive.kube.context import wall_clock
from redrive.kube.resources import Key, Resource
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.reading.positions import EntryId
from redrive.reading.ranges import Range
from redrive.replay import __main__ as driver
from redrive.replay import audit
from redrive.replay.account import Account
from redrive.replay.audit import AuditFindings
from redrive.replay.job.outcomes import MessageOutcomes
from redrive.replay.job.plan import (
    SUSPENDED,
    DesiredState,
    ReplayGoneError,
    RunEndedError,
    RunPreview,
    Scanned,
)
from redrive.replay.job.progress import (
    REVIEW_TIME,
    WINDOW_SECONDS,
    Progress,
    Speed,
    cause_of,
)
from redrive.replay.job.run import Review
from redrive.replay.ledger import FencedError
from redrive.replay.spec import ReplayJob
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.reasons import raises

KEY = Key("shop", "again")
FIRST, SECOND = EntryId(7, 4), EntryId(7, 9)
POLICY = Policy(TopicName.parse("persistent://shop/prod/orders"), "fulfilment")
JOB = ReplayJob(*KEY, "uid", POLICY, "", "", None)
WRITES: dict[str, Callable[[Progress], object]] = {
    "report": lambda progress: progress.report(Account(matched=3, moved=1, left=2)),
    "report_scan": lambda progress: progress.report_scan(Scanned(3)),
    "report_outcomes": lambda progress: progress.report_outcomes(
        MessageOutcomes(3, 1, 0, {}, settled=False)
    ),
    "preview": lambda progress: progress.preview(RunPreview(Account(), {}, {}, (), 1)),
    "finish": Progress.finish,
    "fail": lambda progress: progress.fail(RuntimeError("cut off")),
}


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeKubernetes:
    """An API server with the Replay."""
    api = FakeKubernetes()
    metadata = {**KEY._asdict(), "uid": "uid", "generation": 1, "resourceVersion": "1"}
    api.add(resources.REPLAYS, {"metadata": metadata, "spec": {}, "status": {}})

    @asynccontextmanager
    async def connect() -> AsyncIterator[Kubernetes]:
        yield api

    monkeypatch.setattr(Kubernetes, "connect", connect)
    return api


def progress(*, dry_run: bool = False, approval_above: int | None = None) -> Progress:
    job = ReplayJob(*KEY, "uid", POLICY, "", "", None, dry_run=dry_run)
    return Progress(replace(job, approval_above=approval_above))


@pytest.mark.parametrize(
    ("hours", "desired"),
    [(0.9, DesiredState.RUN), (1.1, DesiredState.EXPIRE)],
    ids=["before", "after"],
)
@pytest.mark.parametrize("skew", [-2, 0, 2])
def test_deadline_counts_by_the_clock_of_the_api_server(
    api: FakeKubernetes, hours: float, desired: DesiredState, skew: int
) -> None:
    now = wall_clock() + timedelta(hours=skew)
    replay = api.objects[resources.REPLAYS][KEY]
    replay["spec"]["deadline"] = "1h"
    replay["status"]["startTime"] = (now - timedelta(hours=hours)).isoformat()
    api.server_time = now
    begun = run(FIRST)
    assert begun.report(Account(matched=2, moved=1, left=1)) is desired
    assert begun.desired_state() is desired


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.floats(-100_000, 100_000), st.integers(1, 1_000), st.floats(0, 2_000))
def test_no_clock_of_a_node_moves_the_deadline(
    api: FakeKubernetes, skew: float, minutes: int, elapsed: float
) -> None:
    """The clock of the node is ahead or behind by *skew* hours."""
    now = wall_clock() + timedelta(hours=skew)
    replay = api.objects[resources.REPLAYS][KEY]
    replay["spec"]["deadline"] = f"{minutes}m"
    replay["status"] = {"startTime": (now - timedelta(minutes=elapsed)).isoformat()}
    api.server_time = now
    begun = run(FIRST)
    is_past = timedelta(minutes=elapsed) >= timedelta(minutes=minutes)
    desired = DesiredState.EXPIRE if is_past else DesiredState.RUN
    assert begun.report(Account(matched=2, moved=1, left=1)) is desired


def run(token: EntryId) -> Progress:
    """A run that has begun, and has taken the ledger over."""
    begun = progress()
    begun.begin()
    begun.take_over(token)
    return begun


def status(api: FakeKubernetes) -> dict[str, Any]:
    stored: dict[str, Any] = api.objects[resources.REPLAYS][KEY]["status"]
    return stored


def job_status(api: FakeKubernetes) -> dict[str, Any]:
    """Return `status.run`."""
    run: dict[str, Any] = status(api).get("run", {})
    return run


def write_between(api: FakeKubernetes, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the Replay as another client does, after the driver has read it."""

    def change_once(verb: str, _resource: Resource, _key: Key) -> None:
        if verb == "apply_status":
            api.before = lambda *_: None
            replay = api.objects[resources.REPLAYS][KEY]
            change(replay)
            replay["metadata"]["resourceVersion"] += "1"

    api.before = change_once


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("phase", ["Completed", "Failed"])
def test_status_of_ended_replay_is_never_written(
    api: FakeKubernetes,
    write: Callable[[Progress], object],
    between: bool,  # noqa: FBT001
    phase: str,
) -> None:
    late = run(FIRST)
    ended = {"phase": phase, "run": {"counts": {"moved": 3, "left": 0}}}
    if between:
        write_between(api, lambda replay: replay.update(status=ended))
    else:
        status(api).update(ended)
    try:
        assert write(late) is DesiredState.END
    except ReplayGoneError as error:
        assert f"has ended; got {phase!r}" in str(error)  # noqa: PT017
    assert status(api) == ended


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("between", [False, True])
def test_status_of_later_run_is_never_written(
    api: FakeKubernetes,
    write: Callable[[Progress], object],
    between: bool,  # noqa: FBT001
) -> None:
    stopped = run(FIRST)
    stopped.report(Account(matched=3, moved=1, left=2))
    counts = {"moved": 2, "left": 1}
    later = {"fencingToken": str(SECOND), "counts": counts}
    if between:
        write_between(api, lambda replay: replay["status"].update(run=later))
    else:
        run(SECOND).report(Account(matched=3, moved=2, left=1))
    with pytest.raises(FencedError, match="shop/again has taken over; got '7:9'"):
        write(stopped)
    run_status = job_status(api)
    assert run_status["fencingToken"] == str(SECOND)
    assert counts.items() <= run_status["counts"].items()
    assert run_status.keys().isdisjoint({"outcome", "failure", "finished", "preview"})


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_status_of_replay_created_again_is_not_written(
    api: FakeKubernetes, write: Callable[[Progress], object]
) -> None:
    late = run(FIRST)

    def create_again(replay: dict[str, Any]) -> None:
        replay["metadata"]["uid"] = "another"
        replay["status"] = {}

    write_between(api, create_again)
    try:
        assert write(late) is DesiredState.END
    except ReplayGoneError as error:
        assert "got 'another'" in str(error)  # noqa: PT017
    assert status(api) == {}


def test_write_beside_the_operator_is_repeated(api: FakeKubernetes) -> None:
    begun = run(FIRST)
    write_between(api, lambda replay: replay["status"].update(phase="Running"))
    assert begun.report(Account(matched=3, moved=1, left=2)) is DesiredState.RUN
    assert status(api)["phase"] == "Running"
    assert job_status(api)["counts"]["moved"] == 1


def test_job_applies_its_run_and_nothing_else(api: FakeKubernetes) -> None:
    status(api).update(phase="Running")
    begun = run(FIRST)
    begun.report_scan(Scanned(3))
    begun.report(Account(scanned=3, matched=3, moved=1, left=2))
    begun.finish()
    assert {write.verb for write in api.writes} == {"apply_status"}
    assert status(api).keys() == {"phase", "run"}
    assert job_status(api) == {
        "counts": {
            "scanned": 3, "matched": 3, "moved": 1, "skipped": 0, "refused": 0, "left": 2,
            "unevaluated": 0, "discarded": 0, "batched": 0,
        },
        "progress": "1/3",
        "refusals": [],
        "finished": True,
        "fencingToken": str(FIRST),
    }  # fmt: skip


def test_skipped_ledger_records_are_in_the_status(api: FakeKubernetes) -> None:
    begun = run(FIRST)
    begun.report(Account(matched=3, left=3, skipped_records=2))
    assert job_status(api)["skippedRecords"] == 2
    begun.report(Account(matched=3, left=3))
    assert "skippedRecords" not in job_status(api)


def test_run_above_its_bound_waits_for_approval(api: FakeKubernetes) -> None:
    account = Account(matched=3, left=3)
    bounded = progress(approval_above=2)
    bounded.begin()
    assert bounded.report(account) is DesiredState.SUSPEND
    assert bounded.report(account, pause=SUSPENDED) is DesiredState.SUSPEND
    assert job_status(api)["approval"] == {"messages": 3}
    for uid, messages in (("other", 3), ("uid", 2)):
        api.add(resources.APPROVALS, approval(uid, messages))
        assert bounded.report(account) is DesiredState.SUSPEND
    approved, created = approval("uid", 3), "2026-11-20T10:00:00Z"
    api.add(resources.APPROVALS, approved)
    assert bounded.report(account) is DesiredState.RUN
    bounded.report(account)
    assert job_status(api)["approval"] == {"messages": 3, "approvedTime": created}
    approved["metadata"]["annotations"] = {"redrive.io/requested-by": "ann"}
    api.add(resources.APPROVALS, approved)
    bounded.report(account)
    bounded.report(account)
    assert job_status(api)["approval"]["approvedBy"] == "ann"
    del api.objects[resources.APPROVALS][KEY]
    assert bounded.report(account) is DesiredState.SUSPEND
    moved = Account(matched=3, moved=1, left=2)
    assert bounded.report(moved, pause=SUSPENDED) is DesiredState.SUSPEND
    assert job_status(api)["approval"] == {"messages": 3}
    assert bounded.report(Account(matched=3, left=2)) is DesiredState.RUN
    bounded.report(account)
    assert "approval" not in job_status(api)


@pytest.mark.parametrize("target", [None, TopicName.parse("persistent://shop/prod/archive")])
def test_other_target_is_checked_before_a_run_resumes(
    api: FakeKubernetes, target: TopicName | None
) -> None:
    account, begun = Account(matched=3, left=3), Progress(replace(JOB, target=target))
    begun.begin()
    change(api, suspend=True)
    assert begun.report(account, pause=SUSPENDED) is DesiredState.SUSPEND
    since = job_status(api)["suspendedTime"]
    change(api, suspend=False)
    begun = Progress(replace(JOB, target=target))  # restarted after a kill
    begun.begin()
    if target is not None:
        for checked in ("2026-01-01T00:00:00Z", since):
            assert begun.report(account, pause=SUSPENDED) is DesiredState.SUSPEND
            metadata = api.objects[resources.REPLAYS][KEY]["metadata"]
            metadata["annotations"] = {CHECKED: checked}
    assert begun.report(account, pause=SUSPENDED) is DesiredState.RUN
    begun.report(account)
    assert "suspendedTime" not in job_status(api)


@pytest.fixture
def review(api: FakeKubernetes) -> Progress:
    """A run that has shown its review of three messages."""
    api.objects[resources.REPLAYS][KEY]["spec"]["mode"] = "Review"
    shown = Progress(replace(JOB, review=True))
    shown.begin()
    assert shown.awaits_admission
    preview = RunPreview(Account(matched=3, left=3), {}, {}, (), 1)
    shown.show_review(preview, Review({0: FIRST}))
    return shown


def change(api: FakeKubernetes, **spec: object) -> None:
    api.objects[resources.REPLAYS][KEY]["spec"].update(spec)


def confirm(api: FakeKubernetes) -> None:
    change(api, mode="Run")
    api.objects[resources.REPLAYS][KEY]["metadata"]["annotations"] = {ADMITTED: "uid"}


def test_review_waits_until_it_is_confirmed_and_admitted(
    api: FakeKubernetes, review: Progress
) -> None:
    api.server_time = wall_clock() + REVIEW_TIME - timedelta(seconds=5)
    assert review.is_confirmed() is None
    annotations = api.objects[resources.REPLAYS][KEY]["metadata"].setdefault("annotations", {})
    annotations[ADMITTED] = "uid"
    assert review.is_confirmed() is None
    annotations[ADMITTED] = "of another"
    change(api, mode="Run")
    api.server_time += timedelta(hours=1)
    assert review.is_confirmed() is None
    annotations[ADMITTED] = "uid"
    assert review.is_confirmed() is True
    assert job_status(api)["review"]["ends"] == [{"partition": 0, "entry": "7:4"}]
    review.take_over(SECOND)
    review.report(Account(matched=3, left=3))
    assert "review" not in job_status(api)


def test_review_ends_in_time_in_spite_of_a_restart(api: FakeKubernetes, review: Progress) -> None:
    expiry = job_status(api)["review"]["expiryTime"]
    api.server_time = wall_clock() + REVIEW_TIME - timedelta(minutes=1)
    again = Progress(replace(JOB, review=True))
    assert again.begin().review is not None
    again.show_review(RunPreview(Account(matched=2, left=2), {}, {}, (), 1), Review({0: FIRST}))
    assert job_status(api)["review"]["expiryTime"] == expiry
    assert again.is_confirmed() is None
    with pytest.raises(FencedError):
        review.is_confirmed()
    api.server_time += timedelta(minutes=1, seconds=5)
    assert again.is_confirmed() is False
    assert job_status(api)["finished"] is True


def test_confirmation_at_the_last_moment_counts(api: FakeKubernetes, review: Progress) -> None:
    api.server_time = wall_clock() + 2 * REVIEW_TIME
    write_between(api, lambda replay: replay["spec"].update(mode="Run"))
    assert review.is_confirmed() is None
    confirm(api)
    assert review.is_confirmed() is True
    assert "finished" not in job_status(api)


def test_review_of_nothing_ends_at_once(api: FakeKubernetes, review: Progress) -> None:
    review.show_review(RunPreview(Account(matched=1, refused=1), {}, {}, (), 1), Review({}))
    assert review.is_confirmed() is False
    assert job_status(api)["finished"] is True


def test_removed_review_is_shown_again(api: FakeKubernetes, review: Progress) -> None:
    del job_status(api)["review"]
    assert review.is_confirmed() is None
    assert job_status(api)["review"]["ends"] == [{"partition": 0, "entry": "7:4"}]


@pytest.mark.parametrize("mode", ["Review", "Run"])
def test_review_can_be_canceled(api: FakeKubernetes, review: Progress, mode: str) -> None:
    change(api, mode=mode, cancel=True)
    with raises("Canceled"):
        review.is_confirmed()


def approval(uid: str, messages: int) -> dict[str, Any]:
    """Return a ReplayApproval of the Replay's name."""
    spec = {"replayRef": {"name": KEY.name, "uid": uid}, "messages": messages}
    metadata = KEY._asdict() | {"creationTimestamp": "2026-11-20T10:00:00Z"}
    return {"metadata": metadata, "spec": spec}


def test_rate_limit_follows_the_spec(api: FakeKubernetes) -> None:
    begun, job = run(FIRST), ReplayJob(*KEY, "uid", POLICY, "", "", None)
    limits: tuple[tuple[dict[str, Any] | None, float | None], ...] = (
        ({"messages": 5, "per": "2s"}, 2.5),
        ({"messages": 60}, 60),
        ({}, None),
        (None, None),
    )
    for written, limit in limits:
        api.objects[resources.REPLAYS][KEY]["spec"]["rateLimit"] = written
        begun.report(Account())
        assert begun.rate_limit(job) == limit


def test_unknown_approval_suspends_the_run(api: FakeKubernetes) -> None:
    account = Account(matched=2, left=2)
    bounded, unbounded = progress(approval_above=2), progress()
    for begun in (bounded, unbounded):
        begun.begin()

    def refuse(*_: object) -> None:
        raise UnavailableError("no answer", remedy="wait")

    api.before = refuse
    assert bounded.report(account) is DesiredState.SUSPEND
    with pytest.raises(UnavailableError):
        unbounded.report(account)
    api.before = lambda *_: None
    assert bounded.report(account) is DesiredState.RUN
    api.before = refuse
    with pytest.raises(UnavailableError):
        bounded.report(account)


def test_failure_before_takeover_is_written(api: FakeKubernetes) -> None:
    begun = progress()
    begun.begin()
    begun.fail(RuntimeError("no broker"))
    assert job_status(api)["failure"]["message"] == "no broker"


def test_failure_before_takeover_hides_no_later_run(api: FakeKubernetes) -> None:
    begun = progress()
    begun.begin()
    run(FIRST).report(Account())
    with pytest.raises(FencedError):
        begun.fail(RuntimeError("no broker"))
    assert "failure" not in job_status(api)


@pytest.mark.parametrize("dry_run", [False, True])
def test_runs_without_a_ledger_are_fenced_by_the_next(
    api: FakeKubernetes,
    dry_run: bool,  # noqa: FBT001
) -> None:
    """Dry runs, and drivers that only follow moved messages."""
    status(api)["run"] = {"finished": not dry_run}
    first, second = progress(dry_run=dry_run), progress(dry_run=dry_run)
    first.begin()
    write_between(api, lambda replay: replay["status"]["run"].update(fencingToken="0:0"))
    second.begin()
    second.report_scan(Scanned(5))
    with pytest.raises(FencedError):
        first.report_scan(Scanned(3))
    assert job_status(api)["counts"]["scanned"] == 5


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"spec": {"cancel": True}}, "Canceled"), ({"spec": {"deadline": "1s"}}, "DeadlineExceeded")],
)
def test_report_of_a_scan_ends_a_canceled_or_late_run(
    api: FakeKubernetes, change: dict[str, Any], reason: str
) -> None:
    begun = run(FIRST)
    begun.report_scan(Scanned(3))
    status(api)["startTime"] = (wall_clock() - timedelta(hours=1)).isoformat()
    api.objects[resources.REPLAYS][KEY].update(change)
    with raises(reason):
        begun.report_scan(Scanned(4))
    assert job_status(api)["counts"]["scanned"] == 4


def test_counts_of_a_scan_keep_the_others(api: FakeKubernetes) -> None:
    counts = {"scanned": 3, "matched": 3, "moved": 1, "left": 2}
    status(api)["run"] = {"counts": counts}
    run(FIRST).report_scan(Scanned(5))
    assert job_status(api)["counts"] == counts | {"scanned": 5, "unevaluated": 0}


def test_ended_replay_is_not_begun(api: FakeKubernetes) -> None:
    status(api)["phase"] = "Completed"
    with pytest.raises(RedriveError, match="has ended; got 'Completed'"):
        progress().begin()


def test_speed_is_unknown_at_first_and_after_restart() -> None:
    speed = Speed()
    assert (speed.rate, speed.remaining(5)) == (None, None)
    speed.note(10.0, 400)
    assert (speed.rate, speed.remaining(5)) == (None, None)
    speed.note(12.0, 600)
    assert (speed.rate, speed.remaining(250)) == (100.0, timedelta(seconds=2))
    speed.restart()
    speed.note(500.0, 600)
    assert speed.rate is None


def test_speed_of_idle_run_has_no_remaining_time() -> None:
    speed = Speed()
    speed.note(0.0, 7)
    speed.note(2.0, 7)
    assert (speed.rate, speed.remaining(3)) == (0.0, None)
    assert speed.remaining(0) is None


@given(st.integers(1, 1_000), st.integers(1, 1_000), st.integers(1, 5))
def test_speed_counts_only_its_window(before: int, after: int, step: int) -> None:
    speed, moved = Speed(), 0
    for second in range(0, 200, step):
        moved += step * (before if second <= 100 else after)
        speed.note(float(second), moved)
    assert speed.rate == pytest.approx(after)
    assert 200 - 2 * step - WINDOW_SECONDS > 100


CALL = "An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.\n"
ABORTED = (
    ": org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 3.0 "
    "failed 4 times, most recent failure: Lost task 0.3 in stage 3.0 (TID 9) (10.0.0.7 executor "
    "1): "
)
JAVA = "\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.read(P.scala:1)\n"
DRIVER = (
    "\nDriver stacktrace:\n\tat org.apache.spark.scheduler.DAGScheduler.abortStage(D.scala:1)\n"
)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("the ledger is lost\nsecond line", "the ledger is lost"),
        ("", ""),
        pytest.param(
            CALL
            + ABORTED
            + "org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)\n"
            + JAVA
            + "Caused by: java.io.EOFException\n"
            + JAVA
            + DRIVER,
            "Python worker exited unexpectedly (crashed)",
            id="a worker that was killed",
        ),
        pytest.param(
            CALL
            + ABORTED
            + "org.apache.spark.api.python.PythonException: Traceback (most recent call last):\n"
            + '  File "worker.py", line 1, in main\n    process()\n'
            + "redrive.reading.reader.SourceSilentError: the broker has delivered nothing\n\n"
            + JAVA
            + DRIVER,
            "SourceSilentError: the broker has delivered nothing",
            id="an exception in Python",
        ),
        pytest.param(
            CALL + ABORTED + "ExecutorLostFailure (executor 1 exited caused by one of the running "
            "tasks) Reason: The executor with id 1 exited with exit code 137(SIGKILL)." + DRIVER,
            "ExecutorLostFailure (executor 1 exited caused by one of the running tasks) Reason: "
            "The executor with id 1 exited with exit code 137(SIGKILL).",
            id="an executor that was killed",
        ),
        pytest.param(
            CALL + ": java.lang.OutOfMemoryError: Java heap space\n" + JAVA,
            "OutOfMemoryError: Java heap space",
            id="no task",
        ),
    ],
)
def test_cause_of_py4j_error_is_its_root(text: str, cause: str) -> None:
    assert cause_of(text) == cause


AUDIT = replace(JOB, dry_run=True, audited=(POLICY.retry_topic,))
DOUBLED = AuditFindings(doubled={(Range(-1, 7, 0, 9_999), 0): 0b1})


def audit_run(api: FakeKubernetes, before_message: Callable[[int], object]) -> dict[str, Any]:
    """Run an audit of three messages; return what its Replay shows before each, and at the end."""
    shown: list[Any] = []

    def read(*_: object, on_read: Callable[[], object]) -> AuditFindings:
        for number in range(3):
            before_message(number)
            on_read()
            shown.append(run_of(api).get("audit"))
        return DOUBLED

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit, "audit", read)
        patch.setattr(driver, "AUDIT_SECONDS", 0.0)
        driver._audit(AUDIT, progress(dry_run=True))  # noqa: SLF001
    return {"meanwhile": shown, "end": run_of(api)["audit"]}


def run_of(api: FakeKubernetes) -> dict[str, Any]:
    return dict(api.objects[resources.REPLAYS][KEY]["status"].get("run") or {})


def test_audit_shows_messages_and_then_differences(api: FakeKubernetes) -> None:
    shown = audit_run(api, lambda _: None)
    unknown = {"topics": list(map(str, AUDIT.audited)), "unrecordedExamples": []}
    assert shown["meanwhile"] == [
        {"messages": number, "doubledExamples": [], **unknown} for number in (1, 2, 3)
    ]
    numbers = {"doubled": 1, "unrecorded": 0, "missing": 0, "returned": 0, "open": 0}
    examples = {"doubledExamples": ["7:0:-1:0"]}
    assert shown["end"] == {"messages": 3, **numbers, **unknown, **examples}


def test_audit_of_many_targets_names_the_first(
    api: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = tuple(TopicName("shop", "prod", f"target-{n}") for n in range(MAX_AUDITED + 1))
    monkeypatch.setitem(globals(), "AUDIT", replace(AUDIT, audited=many))
    shown = audit_run(api, lambda _: None)
    assert shown["end"]["topics"] == list(map(str, many[:MAX_AUDITED]))


def test_canceled_audit_ends_before_all_is_read(api: FakeKubernetes) -> None:
    read = []

    def cancel(number: int) -> None:
        read.append(number)
        api.objects[resources.REPLAYS][KEY]["spec"]["cancel"] = number == 1

    with pytest.raises(RunEndedError, match="ended before all was read") as ended:
        audit_run(api, cancel)
    assert (ended.value.reason, read) == ("Canceled", [0, 1])
