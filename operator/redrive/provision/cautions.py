"""What should be seen to although a policy is ready: named checks on gathered facts; pure.

Called by `reconcile`, which shows what they find as conditions and Warning events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from redrive.cluster.status import Caution
from redrive.provision import errors
from redrive.provision.facts import Asked

LADDER_DESCENDS = "LadderDescends"
"""Some retry waits a shorter time than the one before it."""

_SHOWN = 5


def ladder_descends(asked: Asked, _rivals: Sequence[Asked]) -> Caution | None:
    """Find a ladder whose delays get shorter."""
    if not asked.policy.ladder.descends:
        return None
    return Caution(
        LADDER_DESCENDS,
        "the delay ladder descends: a later retry waits a shorter time than one before it; "
        "sort the delays unless that is meant",
    )


def subscription_is_contested(asked: Asked, rivals: Sequence[Asked]) -> Caution | None:
    """Find younger policies for the same topic and subscription."""
    same = [other for other in rivals if other.subscribes_like(asked)]
    return _contested(
        errors.ResourceConflictError.reason,
        "younger RetryPolicies are for the same topic and subscription, and wait for this one to "
        "go; got {}; delete them, or this one",
        same,
    )


def names_are_contested(asked: Asked, rivals: Sequence[Asked]) -> Caution | None:
    """Find younger policies, for other subscriptions, that need topics of the same names."""
    others = [other for other in rivals if not other.subscribes_like(asked)]
    return _contested(
        errors.NameCollisionError.reason,
        "younger RetryPolicies, for other subscriptions, need a topic of a name that this one has, "
        "and are refused; got {}; give their topics other names",
        others,
    )


CAUTIONS: tuple[Callable[[Asked, Sequence[Asked]], Caution | None], ...] = (
    ladder_descends,
    subscription_is_contested,
    names_are_contested,
)


def cautions(asked: Asked, rivals: Sequence[Asked]) -> tuple[Caution, ...]:
    """Return all that is found.

    Args:
        rivals: admissible policies that claim one of its names.
    """
    younger = [other for other in rivals if other.broker == asked.broker and asked.age < other.age]
    found = (check(asked, younger) for check in CAUTIONS)
    return tuple(caution for caution in found if caution is not None)


def _contested(reason: str, message: str, rivals: Sequence[Asked]) -> Caution | None:
    if not rivals:
        return None
    named = [f"RetryPolicy {other.key}" for other in sorted(rivals, key=lambda other: other.age)]
    more = [f"{len(named) - _SHOWN} more"] if len(named) > _SHOWN else []
    return Caution(reason, message.format(", ".join([*named[:_SHOWN], *more])))
