"""Whose a topic is, and what redrive added to it, as the topic's own properties record; pure.

Used by `diff` and `removal`. A record beside the thing that it is about can't be lost while that
thing lasts, nor outlive it: a topic that is deleted and created again is not ours.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from redrive.admin.model import Grant
from redrive.kube.resources import Key
from redrive.policy.naming import TopicName

OWNER = "redrive.io/owner"
"""Which policy of which Kubernetes cluster keeps the topic: `cluster/namespace/name`."""
CREATED = "redrive.io/created"
"""`true` where redrive made the topic; one without was there before, and is never deleted."""
GRANTED = "redrive.io/granted"
"""JSON: role → the actions that it could not do before redrive granted them."""
SUBSCRIPTION = "redrive.io/subscription"
"""A subscription that redrive added to a topic that was there before."""
SCHEMA = "redrive.io/schema"
"""The fingerprint of the source topic's schema that redrive copied last."""
_KEYS = (OWNER, CREATED, GRANTED, SUBSCRIPTION)

Actions = frozenset[str]
Granted = Mapping[str, Actions]
"""Role → actions; a role without any is left out."""
NOTHING: Actions = frozenset()


@dataclass(frozen=True)
class Owner:
    """A RetryPolicy, told apart from those of all other Kubernetes clusters."""

    cluster: str
    key: Key

    def __str__(self) -> str:
        return f"{self.cluster}/{self.key}"

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """Read what `str` writes; None for anything else."""
        parts = text.rsplit("/", 2)
        return cls(parts[0], Key(*parts[1:])) if len(parts) == 3 and all(parts) else None  # noqa: PLR2004


def may_take_over(mark: str, ours: Owner, older: frozenset[Key], served: Collection[str]) -> bool:
    """Whether a topic that is marked so may become that of *ours*, or is it already.

    Of a policy that is known here only an older one comes first, and only if it needs the topic.

    Args:
        mark: the owner on record; empty where the topic is not marked.
        ours: a policy that needs the topic.
        older: policies that need it too, and are older.
        served: the Kubernetes namespaces whose policies are known here; none means all.
    """
    owner = Owner.parse(mark)
    if not mark or owner == ours:
        return True
    if owner is None or owner.cluster != ours.cluster or owner.key in older:
        return False
    return not served or owner.key.namespace in served


@dataclass(frozen=True)
class OwnershipRecord:
    """What the properties of a topic record.

    Attributes:
        owner: as it is written; empty where the topic is not marked.
        created: whether redrive made the topic.
        granted: what redrive added to the rights of roles.
        subscription: one that redrive added; empty for none, and where the topic is redrive's.
    """

    owner: str = ""
    created: bool = False
    granted: Granted = field(default_factory=dict)
    subscription: str = ""

    @classmethod
    def of(cls, properties: Mapping[str, str]) -> OwnershipRecord:
        """Read *properties*; what is not as redrive writes it counts as empty."""
        return cls(
            owner=properties.get(OWNER, ""),
            created=properties.get(CREATED) == "true",
            granted=_granted(properties.get(GRANTED, "")),
            subscription=properties.get(SUBSCRIPTION, ""),
        )

    def to_properties(self) -> dict[str, str]:
        """Write it; what is empty is left out."""
        granted = {role: sorted(actions) for role, actions in sorted(self.granted.items())}
        written = {
            OWNER: self.owner,
            CREATED: "true" if self.created else "",
            GRANTED: json.dumps(granted, ensure_ascii=False) if granted else "",
            SUBSCRIPTION: self.subscription,
        }
        return {key: value for key, value in written.items() if value}

    def changes(self, properties: Mapping[str, str]) -> dict[str, str]:
        """Return what to set so that *properties* record this; an empty value for nothing."""
        after = self.to_properties()
        return {
            key: after.get(key, "")
            for key in _KEYS
            if properties.get(key, "") != after.get(key, "")
        }


@dataclass(frozen=True)
class Rights:
    """How the rights on one topic are brought to what is needed.

    Attributes:
        grants: what roles shall be able to do, where that is not so already.
        before: what has to be on record before that, so that a crash forgets nothing.
        after: what is on record once it is done.
    """

    grants: tuple[Grant, ...]
    before: Granted
    after: Granted


def rights(topic: TopicName, needed: Granted, have: Granted, recorded: Granted) -> Rights:
    """Plan the rights on *topic*.

    Nothing is taken away that is not on record as added by redrive. A crash between the record and
    the grant leaves a right on record that was not granted: if it is granted by others before
    the next reconcile, it counts as ours.

    Args:
        topic: what the rights are on.
        needed: what roles shall be able to do.
        have: what they may do now.
        recorded: what redrive added of that.
    """
    grants, before, after = [], dict(recorded), {}
    for role in sorted({*needed, *recorded}):
        need, may = needed.get(role, NOTHING), have.get(role, NOTHING)
        added = recorded.get(role, NOTHING)
        missing, surplus = need - may, (added - need) & may
        if missing or surplus:
            # A grant replaces what the role had: whatever others gave it, it keeps.
            grants.append(Grant(topic, role, (may | need) - surplus))
        before[role] = added | missing
        after[role] = (added & need) | missing
    return Rights(tuple(grants), _filled(before), _filled(after))


def _filled(granted: Granted) -> Granted:
    return {role: actions for role, actions in granted.items() if actions}


def _granted(text: str) -> Granted:
    """Read what redrive granted; nothing where it is not as redrive writes it."""
    try:
        written = json.loads(text or "{}")
        return _filled({str(role): frozenset(map(str, may)) for role, may in written.items()})
    except (AttributeError, TypeError, ValueError):
        return {}
