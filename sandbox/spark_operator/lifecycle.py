"""The next step of an application: the real operator's state machine as one pure function.

The keeper calls `decide` after each change of the object, its driver or the time. The other
functions return the status after a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import Enum, auto

from .objects import Application, State, Status

DEFAULT_RETRY_INTERVAL_SECONDS = 5


class Phase(Enum):
    """The phase of a pod, as a kubelet reports it."""

    PENDING = auto()
    RUNNING = auto()
    SUCCEEDED = auto()
    FAILED = auto()


@dataclass(frozen=True)
class Observation:
    """The current state of the driver's pod; the message is the reason of a failure."""

    phase: Phase
    message: str = ""


@dataclass(frozen=True)
class Submit:
    """Start a driver."""


@dataclass(frozen=True)
class Move:
    """Stop the driver if `stop_driver`, then write the status."""

    status: Status
    stop_driver: bool = False


@dataclass(frozen=True)
class Delete:
    """Delete the object: its time to live has passed."""


@dataclass(frozen=True)
class Rest:
    """Wait for a change or, if set, for the moment *until*."""

    until: datetime | None = None


Decision = Submit | Move | Delete | Rest


def decide(  # noqa: PLR0911 - one state, one answer
    app: Application, status: Status, driver: Observation | None, now: datetime
) -> Decision:
    """Return the next step of *app* with the status *status* and the pod *driver*.

    A missing pod is a failed run. It is not started a second time without a record.
    """
    settled = (State.COMPLETED, State.FAILED, State.SUSPENDING, State.SUSPENDED)
    if app.suspended and status.state not in settled:
        return Move(replace(status, state=State.SUSPENDING))
    match status.state:
        case State.NEW | State.PENDING_RERUN | State.RESUMING:
            return Submit()
        case State.SUBMITTED | State.RUNNING:
            return _follow(status, driver, now)
        case State.SUBMISSION_FAILED | State.FAILING | State.SUCCEEDING:
            return _retry_or_end(app, status, now)
        case State.INVALIDATING:
            return Move(Status(state=State.PENDING_RERUN), stop_driver=True)
        case State.SUSPENDING:
            return Move(_without_run(status, State.SUSPENDED), stop_driver=True)
        case State.SUSPENDED:
            return Rest() if app.suspended else Move(replace(status, state=State.RESUMING))
        case State.COMPLETED | State.FAILED:
            return _expire(app, status, now)


def attempted(app: Application, status: Status, submission_id: str, now: datetime) -> Status:
    """Return the status before the next attempt at a submission."""
    return replace(
        status,
        error_message="",
        submission_id=submission_id,
        driver_pod=app.driver_pod,
        last_submission_attempt=now,
        submission_attempts=status.submission_attempts + 1,
    )


def submitted(status: Status, application_id: str) -> Status:
    """Return the status after a submission that was accepted."""
    return replace(
        status,
        state=State.SUBMITTED,
        spark_application_id=application_id,
        termination=None,
        execution_attempts=status.execution_attempts + 1,
    )


def refused(status: Status, message: str) -> Status:
    """Return the status after a submission that was refused with *message*."""
    return replace(status, state=State.SUBMISSION_FAILED, error_message=message)


def _follow(status: Status, driver: Observation | None, now: datetime) -> Decision:
    if driver is None:
        lost = replace(status, error_message="driver pod not found", termination=now)
        return Move(replace(lost, state=State.FAILING))
    match driver.phase:
        case Phase.SUCCEEDED:
            return Move(replace(status, state=State.SUCCEEDING, termination=now))
        case Phase.FAILED:
            failed = replace(status, error_message=driver.message, termination=now)
            return Move(replace(failed, state=State.FAILING))
        case Phase.RUNNING if status.state is State.SUBMITTED:
            return Move(replace(status, state=State.RUNNING))
        case _:
            return Rest()


def _retry_or_end(app: Application, status: Status, now: datetime) -> Decision:
    if not _runs_again(app, status):
        return Move(_ended(status, now))
    due = _retry_due(app, status)
    if now < due:
        return Rest(due)
    if status.state is State.SUBMISSION_FAILED:
        return Submit()
    return Move(_without_run(status, State.PENDING_RERUN), stop_driver=True)


def _runs_again(app: Application, status: Status) -> bool:
    policy = app.spec["restartPolicy"]
    match policy["type"], status.state:
        case "Always", _:
            return True
        case "OnFailure", State.FAILING:
            return status.execution_attempts <= int(policy.get("onFailureRetries", -1))
        case "OnFailure", State.SUBMISSION_FAILED:
            return status.submission_attempts <= int(policy.get("onSubmissionFailureRetries", -1))
        case _:
            return False


def _retry_due(app: Application, status: Status) -> datetime:
    """Return the time of the next run: interval times attempts after the last submission.

    After a success the next run is due at once.
    """
    last = status.last_submission_attempt
    if last is None:
        msg = f"an application in state {status.state} was never submitted"
        raise ValueError(msg)
    if status.state is State.SUCCEEDING:
        return last
    field = "onFailureRetryInterval"
    if status.state is State.SUBMISSION_FAILED:
        field = "onSubmissionFailureRetryInterval"
    interval = app.spec["restartPolicy"].get(field, DEFAULT_RETRY_INTERVAL_SECONDS)
    return last + timedelta(seconds=interval * status.submission_attempts)


def _ended(status: Status, now: datetime) -> Status:
    if status.state is State.SUCCEEDING:
        return replace(status, state=State.COMPLETED)
    return replace(status, state=State.FAILED, termination=status.termination or now)


def _without_run(status: Status, state: State) -> Status:
    return replace(
        status,
        state=state,
        error_message="",
        spark_application_id="",
        driver_pod="",
        termination=None,
    )


def _expire(app: Application, status: Status, now: datetime) -> Decision:
    seconds = app.spec.get("timeToLiveSeconds")
    if seconds is None or status.termination is None:
        return Rest()
    due = status.termination + timedelta(seconds=seconds)
    return Delete() if now >= due else Rest(due)
