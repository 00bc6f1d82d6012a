"""The reference of reasons, from the table `redrive.reasons`.

`python -m release` writes `docs/reference/reasons.md`.
"""

from __future__ import annotations

from redrive.reasons import Reason
from release import CHECKOUT

PAGE = CHECKOUT / "docs" / "reference" / "reasons.md"
_INTRODUCTION = """# Reasons

Every reason that a condition or an Event of a RetryPolicy, a BrokerConnection or a Replay can have.
The message beside it has the value that was found (`got …`) and the remedy for this very object.

**Stalled**: the object needs a change. **Reconciling**: the operator retries automatically. In
both cases Ready is False with the same reason, and nothing was changed; a Warning event is recorded
once. A Replay that has ended also has [`Complete` or `Failed`](replays.md#conditions). **Ready**:
Ready is True. **Warning**: a condition of that name beside Ready, see
[conditions that warn](warnings.md). **Event**: an Event without a condition. **Log**: shown by no
object.

A message names at most five entries of a long list in a spec. A message of more than 32 768
characters is cut and ends with `…`; an Event has the first 1 024.

Generated from `redrive.reasons` by `python -m release`.
"""
_SECTIONS = {
    Reason.PROVISIONED: "Normal states",
    Reason.INVALID_SPEC: "The object itself",
    Reason.CONNECTION_NOT_FOUND: "BrokerConnection and Secrets",
    Reason.REDIRECT_REFUSED: "The broker",
    Reason.CONFIG_MAP_NOT_OURS: "Kubernetes",
    Reason.POLICY_NOT_FOUND: "Replays",
}
"""Sections of the page by their first reason."""
_HEAD = "\n## {}\n\n| reason | shown as | meaning | action |\n|---|---|---|---|\n"
_AFTER = """
## Time until a fix is seen

The operator checks every 15 s whether the cause of `SubscriptionExpiry`, `OwnerConflict`,
`TopicExists`, `AdoptionNotAllowed`, `PartitionsDiffer` or `ConfigMapNotOurs` is gone. With more
than 100 such policies it checks nearly seven policies a second: a thousand take 150 s. Any change
of a policy is reconciled at once, such as an annotation
`redrive.io/reconcile-requested-at: <time>`.
"""


def render() -> str:
    """Write the page."""
    text = _INTRODUCTION
    for reason in Reason:
        if reason in _SECTIONS:
            text += _HEAD.format(_SECTIONS[reason])
        text += f"| `{reason}` | {reason.shown} | {reason.meaning} | {reason.remedy} |\n"
    return text + _AFTER
