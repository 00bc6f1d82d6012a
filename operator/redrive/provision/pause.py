"""Conditions of a policy that is paused, or that only observes.

Pure; called by `reconcile`.
"""

from __future__ import annotations

from collections.abc import Sequence

from redrive.api.conditions import Condition, Reason
from redrive.kube import status
from redrive.kube.resources import Body
from redrive.kube.status import StatusWarning
from redrive.provision.actions import Action

PAUSE = "redrive.io/paused"
"""An annotation: while it is `true`, nothing is read or written for the policy."""
IGNORE_OUTAGES = "redrive.io/ignore-outages"
"""An annotation: while it is `true`, consumers don't pause for outages."""
PAUSED = Reason("Paused")
"""Condition and reason: the annotation is there."""
OBSERVED = Reason("Observed")
"""Reason: the policy only observes, and was looked at."""
DRIFT_DETECTED = Reason("DriftDetected")
"""Condition: something is not as a policy that only observes would have it."""

MAX_ACTIONS = 32
MAX_ACTION = 512
_SHOWN = 5


def is_paused(body: Body) -> bool:
    """Whether a RetryPolicy is paused."""
    return (body["metadata"].get("annotations") or {}).get(PAUSE) == "true"


def ignores_outages(body: Body) -> bool:
    """Whether consumers of a RetryPolicy go on in spite of outages."""
    return (body["metadata"].get("annotations") or {}).get(IGNORE_OUTAGES) == "true"


def paused(body: Body) -> tuple[Condition, ...]:
    """Say that a policy is paused; how it stood stays said, unless its spec is another by now."""
    told = (
        f"nothing is done for the policy while it has the annotation {PAUSE}=true, and "
        "drift is not repaired; remove the annotation to go on"
    )
    if status.is_new(body):
        return status.paused(PAUSED, told)
    return (*status.unchanged(body, without=PAUSED), status.warning(StatusWarning(PAUSED, told)))


def observed(
    planned_changes: Sequence[Action], warnings: Sequence[StatusWarning]
) -> tuple[Condition, ...]:
    """Say what redrive would have done for a policy that only observes."""
    found = list(warnings)
    if planned_changes:
        more = len(planned_changes) - _SHOWN
        actions = "; ".join(shown(planned_changes)[:_SHOWN]) + (
            f"; and {more} more" if more > 0 else ""
        )
        message = (
            f"the policy only observes; with managementPolicy Manage redrive would have {actions}"
        )
        found.insert(0, StatusWarning(DRIFT_DETECTED, message))
    told = "the policy only observes, and nothing is changed for it"
    return status.ready(OBSERVED, told, found)


def shown(planned_changes: Sequence[Action]) -> list[str]:
    """Return what of *planned_changes* has room in a status."""
    return [str(action)[:MAX_ACTION] for action in planned_changes[:MAX_ACTIONS]]
