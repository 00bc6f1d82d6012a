"""Progress of a run in the status of its Replay.

A job writes `status.run`, and the operator the rest of the status. The job uses server-side apply:
each write is the whole of `status.run`, so fields that it leaves out are removed.

A driver may be stopped at any point and resume after the Replay has ended, or while another run of
the same Replay works. So each write is one compare-and-swap, by the version of the object: nothing
is written into a Replay that has ended or was created again, nor over the status of a later run.
Runs are ordered by their fencing tokens: the position of the record with which a run took the
ledger over. What needs no ledger, a dry run and the outcome of replayed messages, takes the next
token when it begins.

How fast a run is, and how long it still takes. Pure: the time is an argument.
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
from redrive.api.model import is_empty, parse_spec
from redrive.api.replay import (
    FINAL,
    WHILE_RUNNING,
    Mode,
    ReplayApprovalSpec,
    ReplayRate,
    ReplayRun,
    ReplayStatus,
    RunApproval,
    RunOutcome,
    RunReview,
    is_admitted,
)
from redrive.errors import RedriveError
from redrive.kube import resources
from redrive.kube.client import ConflictError, Kubernetes, NotFoundError
from redrive.kube.context import wall_clock
from redrive.kube.resources import Key
from redrive.policy.values import format_duration
from redrive.reading.positions import NOWHERE, EntryId
from redrive.replay.job.aftermath import Aftermath
from redrive.replay.job.dispatch import CanceledRunError, DeadlineError, RunEndedError
from redrive.replay.job.plan import SUSPENDED, Rest, RunPreview, Scanned, Wish, so_far
from redrive.replay.job.run import Review
from redrive.replay.ledger import FencedError
from redrive.replay.records import Account
from redrive.replay.spec import ReplayJob

MAX_MESSAGE = 1_024
MANAGER = "redrive-job"
"""Field manager of a job's writes."""
_AT_REST: dict[str, object] = dict.fromkeys(WHILE_RUNNING)
REVIEW_TIME = timedelta(minutes=15)
"""Time after which a review ends unconfirmed."""
_ENDS: Mapping[Wish, type[RedriveError]] = {
    Wish.END: RunEndedError,
    Wish.EXPIRE: DeadlineError,
    Wish.CANCEL: CanceledRunError,
}

logger = logging.getLogger(__name__)


class ReplayGoneError(RedriveError):
    """The Replay that the job was launched for has ended, or is not there any more."""

    reason = "ReplayGone"


class Progress:
    """The status of one Replay.

    Attributes:
        awaits_admission: whether the run has to be confirmed and admitted before it moves messages;
            known after `begin`.

    Raises:
        ReplayGoneError: from each method but `report`, `read` and `wish`, when the Replay has
            ended, was deleted, or created again. Nothing is written then.
        FencedError: from each method that writes, when a later run does; likewise.
        KubernetesError: from each method, when the API server refuses.
    """

    def __init__(self, job: ReplayJob) -> None:
        self._key = Key(job.namespace, job.name)
        self._uid = job.uid
        self._approval_above = job.approval_above
        self._awaiting = job.approval_above is not None  # until the account is known
        self._approval: dict[str, object] = {}
        self._shows_causes = (job.dry_run or job.review) and job.choice.limit is None
        self._rate_limit = job.rate_limit
        self._speed = Speed()
        self._token = NOWHERE
        self._is_fenced_by_ledger = not job.dry_run
        self._is_review = job.review
        self._review: dict[str, object] = {}
        self.awaits_admission = False
        self._now = wall_clock()

    def read(self) -> ReplayRun:
        """Return `status.run` as it is."""
        replay = asyncio.run(self._exchange({}))
        return ReplayStatus.of(replay).run

    def begin(self) -> ReplayRun:
        """Check that the run may begin, and return how far others have come with it."""
        return asyncio.run(self._begin())

    def take_over(self, token: EntryId) -> None:
        """Write from now on as the run that took the ledger over with this fencing token."""
        self._token = token

    def report(self, account: Account, *, rests: Rest | None = None) -> Wish:
        """Write down how far the run has come, and return what the spec says by now."""
        suspended = rests == SUSPENDED
        if rests is not None:
            self._speed.restart()
        self._speed.note(time.monotonic(), account.moved)
        fields = account.to_status() | {"suspended": suspended} | self._tempo(account)
        fields |= self._approval
        fields["review"] = None  # the plan is in the ledger
        rest = rests or Rest()
        fields["fullTopic"] = rest.full_topic and str(rest.full_topic)
        fields["unsubscribedTopic"] = rest.unsubscribed_topic and str(rest.unsubscribed_topic)
        try:
            return asyncio.run(self._reported(fields, account))
        except (ReplayGoneError, NotFoundError):
            return Wish.END
        except FencedError:
            raise
        except RedriveError:
            if not self._awaiting:
                raise
            logger.warning("it is not known whether the run is approved", exc_info=True)
            return Wish.SUSPEND

    def rate_limit(self, _: ReplayJob) -> float | None:
        """Return the limit of messages a second in the spec, as of the last report."""
        return self._rate_limit

    def report_scan(self, scanned: Scanned) -> None:
        """Write down what scans have found; by cause in a dry run, which a limit does not end."""
        fields: dict[str, object] = {
            "counts": {"scanned": scanned.messages, "unevaluated": scanned.unevaluated},
        }
        if self._shows_causes:
            fields["preview"] = so_far(scanned)
        asyncio.run(self._exchange(fields))

    def report_outcomes(self, aftermath: Aftermath) -> None:
        """Write down what has become of what was moved."""
        observed = {**aftermath.to_status(), "observedTime": wall_clock()}
        outcome = RunOutcome.model_validate(observed).to_manifest()
        asyncio.run(self._exchange({"outcome": outcome}))

    def desired_state(self) -> Wish:
        """Return whether the run is to go on, once all is moved."""
        try:
            return self._ends(asyncio.run(self._exchange({}))) or Wish.RUN
        except (ReplayGoneError, NotFoundError):
            return Wish.END

    async def _reported(self, fields: Mapping[str, object], account: Account) -> Wish:
        async with Kubernetes.connect() as kubernetes:
            replay = await self._write(kubernetes, fields)
            self._rate_limit = _rate_limit(replay)
            return await self._wish(kubernetes, replay, account)

    async def _wish(self, kubernetes: Kubernetes, replay: Body, account: Account) -> Wish:
        ends = self._ends(replay)
        if ends is not None:
            return ends
        bound, messages = self._approval_above, account.moved + account.left
        if bound is not None:
            approval = None
            if messages > bound:
                created = await self._approved_at(kubernetes, messages)
                approval = RunApproval(messages=messages, approved_time=created)
            self._awaiting = approval is not None and approval.approved_time is None
            self._approval = {"approval": approval and approval.to_manifest()}
        rests = self._awaiting or replay["spec"].get("suspend")
        return Wish.SUSPEND if rests else Wish.RUN

    async def _approved_at(self, kubernetes: Kubernetes, messages: int) -> datetime | None:
        """Return the creation time of the ReplayApproval of this Replay; None without one.

        Args:
            messages: a ReplayApproval of fewer messages counts as none.
        """
        try:
            body = await kubernetes.get(resources.APPROVALS, self._key)
        except NotFoundError:
            return None
        spec, metadata = parse_spec(ReplayApprovalSpec, body), body["metadata"]
        is_of_replay = spec.replay_ref.uid == self._uid and "deletionTimestamp" not in metadata
        if not is_of_replay or spec.messages < messages:
            return None
        return datetime.fromisoformat(metadata["creationTimestamp"])

    def preview(self, preview: RunPreview) -> None:
        """Write down what a dry run has found."""
        asyncio.run(self._exchange(preview.to_status()))

    def show_review(self, preview: RunPreview, review: Review) -> None:
        """Write down the plan of a review, and the time at which it ends unconfirmed.

        A run that repeats the review of another one leaves its time.
        """
        asyncio.run(self._show_review(preview, review))

    def is_confirmed(self) -> bool | None:
        """Return True once the run may move what was shown, False if the review has ended.

        None while it waits. A review ends by a write that fails if the Replay has changed, so a
        confirmation is either in time or has no effect.

        Raises:
            CanceledRunError, DeadlineError, RunEndedError: the run has ended by these.
        """
        return asyncio.run(self._is_confirmed())

    def finish(self) -> None:
        """Write down that the account is the last one: nothing is left."""
        asyncio.run(self._exchange(_AT_REST | {"finished": True, "failure": None}))

    def fail(self, error: BaseException) -> None:
        """Write down why the run ended before its time; another one may go on with it."""
        reason = error.reason if isinstance(error, RedriveError) else type(error).__name__
        failure = {"reason": reason, "message": (cause_of(str(error)) or reason)[:MAX_MESSAGE]}
        asyncio.run(self._exchange(_AT_REST | {"failure": failure}))

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
                raise _ENDS[ends]("the run has ended in its review", remedy="make another Replay")
            if status.run.review is None:  # others have changed the status
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
                self.awaits_admission = self._is_review and not is_admitted(replay)
                is_fenced = self._is_fenced_by_ledger and not self.awaits_admission
                if is_fenced and not status.run.finished:
                    return status.run
                self._token = EntryId(self._token.ledger, self._token.entry + 1)
                with suppress(ConflictError):
                    await self._swap(kubernetes, replay, {})
                    return status.run

    async def _exchange(self, fields: Mapping[str, object]) -> Body:
        """Return the Replay, with *fields* written into its `status.run` if there are any."""
        async with Kubernetes.connect() as kubernetes:
            return await self._write(kubernetes, fields)

    async def _write(self, kubernetes: Kubernetes, fields: Mapping[str, object]) -> Body:
        while True:
            replay = await self._get(kubernetes)
            if not fields:
                return replay
            self._check_writable(ReplayStatus.of(replay))
            with suppress(ConflictError):  # what was written meanwhile may have ended it
                return await self._swap(kubernetes, replay, fields)

    async def _get(self, kubernetes: Kubernetes) -> Body:
        replay = await kubernetes.get(resources.REPLAYS, self._key)
        self._now = kubernetes.server_time or wall_clock()
        if replay["metadata"]["uid"] != self._uid:
            raise ReplayGoneError(
                f"the Replay {self._key} is another one than this job was launched for",
                got=replay["metadata"]["uid"],
                remedy="nothing: the other has a job of its own",
            )
        return replay

    async def _swap(self, kubernetes: Kubernetes, replay: Body, fields: Mapping[str, Any]) -> Body:
        """Apply `status.run` of *replay* with *fields*, if the Replay is as it was read.

        Args:
            fields: None removes one; `counts` may be some of the counts, and the others stay.

        Raises:
            ConflictError: it has changed.
        """
        before = (replay.get("status") or {}).get("run") or {}
        run = {**before, **fields, "fencingToken": str(self._token)}
        if "counts" in fields:
            run["counts"] = {**(before.get("counts") or {}), **fields["counts"]}
        status = {"run": {name: value for name, value in run.items() if value is not None}}
        return await kubernetes.apply_status(resources.REPLAYS, replay, status, MANAGER)

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
                remedy="nothing: the other run goes on from what this one has moved",
            )

    def _check_ended(self, status: ReplayStatus) -> None:
        if status.phase in FINAL:
            raise ReplayGoneError(
                f"the Replay {self._key} has ended",
                got=status.phase.value,
                remedy="nothing: another Replay goes on from what was moved",
            )

    def _ends(self, replay: Body) -> Wish | None:
        """Return the reason to end the run, if there is one.

        The deadline counts by the API server's clock: that of a driver's node may be wrong.
        """
        status = ReplayStatus.of(replay)
        if "deletionTimestamp" in replay["metadata"] or status.phase in FINAL:
            return Wish.END
        if replay["spec"].get("cancel"):
            return Wish.CANCEL
        is_late = status.is_past(replay["spec"].get("deadline"), self._now)
        return Wish.EXPIRE if is_late else None


def _token(status: ReplayStatus) -> EntryId:
    """Return the fencing token of the last run that has written *status*."""
    token = status.run.fencing_token
    return NOWHERE if token is None else EntryId.parse(token)


def _rate_limit(replay: Body) -> float | None:
    limit = replay["spec"].get("rateLimit")
    return None if is_empty(limit) else ReplayRate.model_validate(limit).per_second


def cause_of(text: str) -> str:
    """Return the line of an error's text that has its cause.

    Of an error that came through Py4J the first line names a call of the driver, and others frames
    of Java. The cause is the last failure of the task, and of an exception in Python the line
    behind its frames.
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
"""A frame of Java or Python, or the code of one; a cause begins without white space."""
_PACKAGE = re.compile(r"^(: )?([a-z]\w*\.)+(?=[A-Z]\w*: )")


WINDOW_SECONDS = 30.0
"""Over so long a rate is measured."""
MIN_SECONDS = 1.0


class Speed:
    """Measures the rate of a run from its last accounts."""

    def __init__(self) -> None:
        self._noted: deque[tuple[float, int]] = deque()

    def note(self, now: float, moved: int) -> None:
        """Take note of how far the run is.

        Args:
            now: in seconds, of a clock that never goes back.
            moved: how many messages are moved, by earlier attempts too.
        """
        self._noted.append((now, moved))
        while len(self._noted) > 1 and self._noted[1][0] <= now - WINDOW_SECONDS:
            self._noted.popleft()

    def restart(self) -> None:
        """Forget all: the run has rested."""
        self._noted.clear()

    @property
    def rate(self) -> float | None:
        """Return how many messages are moved in a second; None while that is not known."""
        if not self._noted:
            return None
        (begin, before), (end, after) = self._noted[0], self._noted[-1]
        if end - begin < MIN_SECONDS:
            return None
        return max(0.0, (after - before) / (end - begin))

    def remaining(self, left: int) -> timedelta | None:
        """Return how long it takes to move *left* messages; None while that is not known."""
        return timedelta(seconds=round(left / self.rate)) if self.rate else None
