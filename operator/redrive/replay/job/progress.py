"""Progress of a run in the status of its Replay.

A job writes `status.run`, and the operator the rest of the status. The job uses server-side apply:
each write is the whole of `status.run`, so fields that it leaves out are removed.

A driver may be stopped at any point, and resume after the Replay has ended or during another run of
the same Replay. So each write is a compare-and-swap by the version of the object. It fails if the
Replay has ended, was created again, or has the status of a later run. Runs are ordered by their
fencing tokens: the position of the record with which a run took the ledger over. Dry runs and the
tracking of outcomes need no ledger, and use the next token when they begin.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

from redrive.api import Body
from redrive.api.conditions import written
from redrive.api.model import is_empty, parse_spec
from redrive.api.replay import Mode, ReplayApprovalSpec, ReplayRate
from redrive.api.replay_status import (
    FINAL,
    WHILE_RUNNING,
    AuditResult,
    JobFailure,
    ReplayRun,
    ReplayStatus,
    RunApproval,
    RunOutcome,
    RunReview,
    is_admitted,
    is_checked,
)
from redrive.api.retrypolicy import MAX_SHOWN
from redrive.errors import RedriveError
from redrive.kube import resources
from redrive.kube.client import ConflictError, Kubernetes, NotFoundError
from redrive.kube.context import wall_clock
from redrive.kube.resources import Key
from redrive.policy.values import format_duration
from redrive.reading.positions import NOWHERE, EntryId
from redrive.replay.account import Account
from redrive.replay.job.outcomes import MessageOutcomes
from redrive.replay.job.plan import (
    CANCELED,
    DEADLINE_EXCEEDED,
    SUSPENDED,
    DesiredState,
    Pause,
    ReplayGoneError,
    RunEndedError,
    RunPreview,
    Scanned,
    so_far,
)
from redrive.replay.job.run import Review
from redrive.replay.ledger import FencedError
from redrive.replay.spec import ReplayJob, RunJob

_AT_REST: dict[str, object] = dict.fromkeys(WHILE_RUNNING)
REVIEW_TIME = timedelta(minutes=15)
"""Time after which a review ends unconfirmed."""

logger = logging.getLogger(__name__)


class Progress:
    """The status of one Replay.

    Attributes:
        awaits_admission: True if the run has to be confirmed and admitted before it moves messages;
            set by `begin`.

    Raises:
        ReplayGoneError: from each method but `report`, `read` and `desired_state`, if the Replay
            has ended, was deleted, or was created again. Nothing is written.
        FencedError: from each method that writes, if a later run writes; likewise.
        KubernetesError: from each method, if the API server refuses.
    """

    def __init__(self, job: RunJob) -> None:
        self._key = Key(job.namespace, job.name)
        self._uid = job.uid
        self._approval_above = job.approval_above
        self._awaiting = job.approval_above is not None  # until the account is known
        self._approval: dict[str, object] = {}
        self._shows_causes = (job.dry_run or job.review) and job.choice.limit is None
        self._rate_limit = job.rate_limit
        self._speed = Speed()
        self._token = NOWHERE
        self._is_fenced_by_ledger = job.is_fenced_by_ledger
        self._is_review = job.review
        self._has_target = isinstance(job, ReplayJob) and job.target is not None
        self._suspended_time: datetime | None = None
        self._review: dict[str, object] = {}
        self.awaits_admission = False
        self._now = wall_clock()

    def read(self) -> ReplayRun:
        """Return the current `status.run`."""
        replay = asyncio.run(self._exchange({}))
        return ReplayStatus.of(replay).run

    def begin(self) -> ReplayRun:
        """Check that the run may begin, and return the status of earlier runs of the Replay."""
        return asyncio.run(self._begin())

    def take_over(self, token: EntryId) -> None:
        """Use the fencing token with which this run took the ledger over in later writes."""
        self._token = token

    def report(self, account: Account, *, pause: Pause | None = None) -> DesiredState:
        """Write the progress of the run, and return the desired state of the spec."""
        suspended = pause == SUSPENDED
        if suspended and self._suspended_time is None:
            self._suspended_time = self._now
        if pause is not None:
            self._speed.restart()
        self._speed.note(time.monotonic(), account.moved)
        fields = account.to_status() | {"suspended": suspended} | self._tempo(account)
        fields["suspendedTime"] = self._suspended_time and written(self._suspended_time)
        fields |= self._approval
        fields["review"] = None  # the plan is in the ledger
        pause = pause or Pause()
        fields["fullTopic"] = pause.full_topic and str(pause.full_topic)
        fields["unsubscribedTopic"] = pause.unsubscribed_topic and str(pause.unsubscribed_topic)
        try:
            return asyncio.run(self._reported(fields, account))
        except (ReplayGoneError, NotFoundError):
            return DesiredState.END
        except FencedError:
            raise
        except RedriveError:
            if not self._awaiting:
                raise
            logger.warning("approval of the run could not be read, suspending", exc_info=True)
            return DesiredState.SUSPEND

    def rate_limit(self, _: RunJob) -> float | None:
        """Return the limit of messages a second in the spec, as of the last report."""
        return self._rate_limit

    def report_scan(self, scanned: Scanned) -> None:
        """Write the results of scans; a dry run without a limit includes numbers by cause.

        Raises:
            ReplayGoneError, RunEndedError: the run has to end.
        """
        fields: dict[str, object] = {
            "counts": {"scanned": scanned.messages, "unevaluated": scanned.unevaluated},
        }
        if self._shows_causes:
            fields["preview"] = so_far(scanned)
        ends = self._ends(asyncio.run(self._exchange(fields)))
        if ends is not None:
            raise _ended("the run has ended before it was planned", ends)

    def report_outcomes(self, outcomes: MessageOutcomes) -> None:
        """Write the outcome of replayed messages."""
        observed = {**outcomes.to_status(), "observedTime": wall_clock()}
        outcome = RunOutcome.model_validate(observed).to_manifest()
        asyncio.run(self._exchange({"outcome": outcome}))

    def desired_state(self) -> DesiredState:
        """Return the desired state of a run whose messages are all moved."""
        try:
            return self._ends(asyncio.run(self._exchange({}))) or DesiredState.RUN
        except (ReplayGoneError, NotFoundError):
            return DesiredState.END

    async def _reported(self, fields: Mapping[str, object], account: Account) -> DesiredState:
        async with Kubernetes.connect() as kubernetes:
            replay = await self._write(kubernetes, fields)
            self._rate_limit = _rate_limit(replay)
            return await self._desired_state(kubernetes, replay, account)

    async def _desired_state(
        self, kubernetes: Kubernetes, replay: Body, account: Account
    ) -> DesiredState:
        ends = self._ends(replay)
        if ends is not None:
            return ends
        bound, messages = self._approval_above, account.moved + account.left
        if bound is not None:
            approval = None
            if messages > bound:
                approval = await self._approved(kubernetes, messages)
            self._awaiting = approval is not None and approval.approved_time is None
            self._approval = {"approval": approval and approval.to_manifest()}
        if self._awaiting or replay["spec"].get("suspend") or not self._may_resume(replay):
            return DesiredState.SUSPEND
        self._suspended_time = None
        return DesiredState.RUN

    def _may_resume(self, replay: Body) -> bool:
        """Return True unless the target has to be checked again after a suspension.

        Only the operator may read quotas and TTLs.
        """
        since = self._suspended_time
        return not self._has_target or since is None or is_checked(replay, since)

    async def _approved(self, kubernetes: Kubernetes, messages: int) -> RunApproval:
        """Return time and author of the ReplayApproval of this Replay; neither without one.

        Args:
            kubernetes: client.
            messages: number of messages; an approval of fewer messages is ignored.
        """
        approval = RunApproval(messages=messages)
        try:
            body = await kubernetes.get(resources.APPROVALS, self._key)
        except NotFoundError:
            return approval
        spec, metadata = parse_spec(ReplayApprovalSpec, body), body["metadata"]
        is_of_replay = spec.replay_ref.uid == self._uid and "deletionTimestamp" not in metadata
        if not is_of_replay or spec.messages < messages:
            return approval
        author = (metadata.get("annotations") or {}).get(resources.REQUESTED_BY)
        created = datetime.fromisoformat(metadata["creationTimestamp"])
        return RunApproval(
            messages=messages, approved_time=created, approved_by=author and author[:MAX_SHOWN]
        )

    def preview(self, preview: RunPreview) -> None:
        """Write the result of a dry run."""
        asyncio.run(self._exchange(preview.to_status()))

    def report_audit(self, result: AuditResult) -> None:
        """Write the progress of an audit, and check that it need not end.

        Raises:
            ReplayGoneError, RunEndedError: it has to.
        """
        ends = self._ends(asyncio.run(self._exchange({"audit": result.to_manifest()})))
        if ends is not None:
            raise _ended("the audit has ended before all was read", ends)

    def show_audit(self, result: AuditResult) -> None:
        """Write the result of an audit."""
        asyncio.run(self._exchange({"audit": result.to_manifest()}))

    def show_review(self, preview: RunPreview, review: Review) -> None:
        """Write the plan of a review, and the time at which it ends unconfirmed.

        A run that repeats the review of an earlier run keeps this time.
        """
        asyncio.run(self._show_review(preview, review))

    def is_confirmed(self) -> bool | None:
        """Return True if the review is confirmed, False if it has ended, None while it waits.

        A review ends by a write that fails if the Replay has changed. So a confirmation is either
        in time or has no effect.

        Raises:
            ReplayGoneError, RunEndedError: the run has ended.
        """
        return asyncio.run(self._is_confirmed())

    def finish(self) -> None:
        """Mark the account as final: no message is left."""
        asyncio.run(self._exchange(_AT_REST | {"finished": True, "failure": None}))

    def fail(self, error: BaseException) -> None:
        """Write the error that ended the run. Another run may resume it."""
        reason = error.reason if isinstance(error, RedriveError) else type(error).__name__
        failure = JobFailure.of(reason, cause_of(str(error)) or reason)
        asyncio.run(self._exchange(_AT_REST | {"failure": failure.to_manifest()}))

    async def _show_review(self, preview: RunPreview, review: Review) -> None:
        ends = [
            {"partition": index, "entry": str(entry)}
            for index, entry in sorted(review.ends.items())
        ]
        async with Kubernetes.connect() as kubernetes:
            shown = ReplayStatus.of(await self._get(kubernetes)).run.review
            expiry_time = shown.expiry_time if shown else self._now + REVIEW_TIME
            written = RunReview.model_validate({"expiryTime": expiry_time, "ends": ends})
            self._review = preview.to_status() | {"review": written.to_manifest()}
            await self._write(kubernetes, self._review)

    async def _is_confirmed(self) -> bool | None:
        async with Kubernetes.connect() as kubernetes:
            replay = await self._get(kubernetes)
            status = ReplayStatus.of(replay)
            self._check_writable(status)
            ends = self._ends(replay)
            if ends is not None:
                raise _ended("the run has ended in its review", ends)
            if status.run.review is None:  # changed by another client
                status = ReplayStatus.of(await self._write(kubernetes, self._review))
            if is_admitted(replay):
                self.awaits_admission = False
                return True
            if replay["spec"].get("mode") != Mode.REVIEW:
                return None
            shown = status.run.review
            if status.run.counts.left and (shown is None or self._now < shown.expiry_time):
                return None
            with suppress(ConflictError):
                await self._swap(kubernetes, replay, _AT_REST | {"finished": True})
                return False
            return None

    def _tempo(self, account: Account) -> dict[str, object]:
        rate, remaining = self._speed.rate, self._speed.remaining(account.left)
        return {
            "ratePerMinute": None if rate is None else round(rate * 60),
            "remaining": None if remaining is None else format_duration(remaining),
        }

    async def _begin(self) -> ReplayRun:
        async with Kubernetes.connect() as kubernetes:
            while True:
                replay = await self._get(kubernetes)
                status = ReplayStatus.of(replay)
                self._check_ended(status)
                self._token = _token(status)
                self._suspended_time = status.run.suspended_time
                self.awaits_admission = self._is_review and not is_admitted(replay)
                is_fenced = self._is_fenced_by_ledger and not self.awaits_admission
                if is_fenced and not status.run.finished:
                    return status.run
                self._token = EntryId(self._token.ledger, self._token.entry + 1)
                with suppress(ConflictError):
                    await self._swap(kubernetes, replay, {})
                    return status.run

    async def _exchange(self, fields: Mapping[str, object]) -> Body:
        """Write *fields* into `status.run`, if any; return the Replay."""
        async with Kubernetes.connect() as kubernetes:
            return await self._write(kubernetes, fields)

    async def _write(self, kubernetes: Kubernetes, fields: Mapping[str, object]) -> Body:
        while True:
            replay = await self._get(kubernetes)
            if not fields:
                return replay
            self._check_writable(ReplayStatus.of(replay))
            with suppress(ConflictError):  # the other write may have ended the Replay
                return await self._swap(kubernetes, replay, fields)

    async def _get(self, kubernetes: Kubernetes) -> Body:
        replay = await kubernetes.get(resources.REPLAYS, self._key)
        self._now = kubernetes.server_time or wall_clock()
        if replay["metadata"]["uid"] != self._uid:
            raise ReplayGoneError(
                f"the Replay {self._key} was created again after this job was launched",
                got=replay["metadata"]["uid"],
                remedy="No action needed: the new Replay has its own job",
            )
        return replay

    async def _swap(self, kubernetes: Kubernetes, replay: Body, fields: Mapping[str, Any]) -> Body:
        """Apply `status.run` of *replay* with *fields*, if the Replay has not changed.

        Args:
            kubernetes: client.
            replay: Replay as it was read.
            fields: None removes a field. `counts` are merged with the current counts.

        Raises:
            ConflictError: it has changed.
        """
        before = (replay.get("status") or {}).get("run") or {}
        run = {**before, **fields, "fencingToken": str(self._token)}
        if "counts" in fields:
            run["counts"] = {**(before.get("counts") or {}), **fields["counts"]}
        status = {"run": {name: value for name, value in run.items() if value is not None}}
        return await kubernetes.apply_status(
            resources.REPLAYS, replay, status, resources.JOB_MANAGER
        )

    def _check_writable(self, status: ReplayStatus) -> None:
        """Check that this run may write the status.

        Raises:
            ReplayGoneError: the Replay has ended.
            FencedError: a later run writes it.
        """
        self._check_ended(status)
        latest = _token(status)
        if latest > self._token:
            raise FencedError(
                f"another run of the Replay {self._key} has taken over",
                got=str(latest),
                remedy="No action needed: the other run moves the messages that are left",
            )

    def _check_ended(self, status: ReplayStatus) -> None:
        if status.phase in FINAL:
            raise ReplayGoneError(
                f"the Replay {self._key} has ended",
                got=status.phase.value,
                remedy="create another Replay for the messages that are left",
            )

    def _ends(self, replay: Body) -> DesiredState | None:
        """Return the state to end the run with; None if it continues.

        The deadline is compared with the clock of the API server, because the clock of the node may
        be wrong.
        """
        status = ReplayStatus.of(replay)
        if "deletionTimestamp" in replay["metadata"] or status.phase in FINAL:
            return DesiredState.END
        if replay["spec"].get("cancel"):
            return DesiredState.CANCEL
        is_late = status.is_past(replay["spec"].get("deadline"), self._now)
        return DesiredState.EXPIRE if is_late else None


def _token(status: ReplayStatus) -> EntryId:
    """Return the fencing token of the last run that wrote *status*."""
    token = status.run.fencing_token
    return NOWHERE if token is None else EntryId.parse(token)


def _ended(problem: str, ends: DesiredState) -> RedriveError:
    """Return the error of a run that has to end, and moves nothing."""
    remedy = "create another Replay"
    if ends is DesiredState.END:
        return ReplayGoneError(problem, remedy=remedy)
    reason = DEADLINE_EXCEEDED if ends is DesiredState.EXPIRE else CANCELED
    return RunEndedError(problem, remedy=remedy, reason=reason)


def _rate_limit(replay: Body) -> float | None:
    limit = replay["spec"].get("rateLimit")
    return None if is_empty(limit) else ReplayRate.model_validate(limit).per_second


def cause_of(text: str) -> str:
    """Return the line of the text of an error that has the cause.

    The text of a Py4J error begins with a call of the driver and contains frames of Java. Its cause
    is the last failure of the task. The cause of a Python exception follows its frames.
    """
    causes = [
        line.strip()
        for line in text.split("Driver stacktrace:", maxsplit=1)[0].splitlines()
        if line.strip() and not _FRAME.match(line)
    ]
    failures = [index for index, line in enumerate(causes) if _TASK_FAILURE in line]
    if failures:
        causes = causes[failures[-1] :]
        causes[0] = causes[0].rpartition("): ")[2]
    elif causes and causes[0].startswith(_CALL):
        causes = causes[1:]
    if causes and _TRACEBACK in causes[0] and len(causes) > 1:
        causes = causes[1:]
    return _PACKAGE.sub("", causes[0]).removeprefix("SparkException: ") if causes else ""


_TASK_FAILURE, _CALL = "most recent failure: ", "An error occurred while calling "
_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r"\s+(at [\w.$]+\(|\.\.\. \d+ more|File \"|[ ]{3})")
"""Frame of Java or Python, or its code. A cause begins without white space."""
_PACKAGE = re.compile(r"^(: )?([a-z]\w*\.)+(?=[A-Z]\w*: )")


WINDOW_SECONDS = 30.0
"""Time over which a rate is measured."""
MIN_SECONDS = 1.0


class Speed:
    """Rate of a run, measured from its last accounts. The time is an argument."""

    def __init__(self) -> None:
        self._noted: deque[tuple[float, int]] = deque()

    def note(self, now: float, moved: int) -> None:
        """Add a measurement.

        Args:
            now: monotonic time in seconds.
            moved: number of moved messages, including those of earlier runs.
        """
        self._noted.append((now, moved))
        while len(self._noted) > 1 and self._noted[1][0] <= now - WINDOW_SECONDS:
            self._noted.popleft()

    def restart(self) -> None:
        """Discard all measurements, after a pause of the run."""
        self._noted.clear()

    @property
    def rate(self) -> float | None:
        """Return the messages moved per second; None while unknown."""
        if not self._noted:
            return None
        (begin, before), (end, after) = self._noted[0], self._noted[-1]
        if end - begin < MIN_SECONDS:
            return None
        return max(0.0, (after - before) / (end - begin))

    def remaining(self, messages: int) -> timedelta | None:
        """Return the time to move *messages*; None while unknown."""
        return timedelta(seconds=round(messages / self.rate)) if self.rate else None
