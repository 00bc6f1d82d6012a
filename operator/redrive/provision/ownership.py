"""Topic ownership: the owner of a topic and redrive's additions to it, in topic properties; pure.

Used by `diff` and `finalize`. Creation and adoption of a topic write the same properties. They
exist exactly as long as the topic: one that is deleted and created again has no owner.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from redrive.admin.model import RightsChange
from redrive.api import Body
from redrive.kube.resources import TAKE_OVER_FROM, TOPIC_OWNER, Key
from redrive.policy.naming import TopicName

OWNER_UID = "redrive.io/owner-uid"
"""The uid of the policy that `TOPIC_OWNER` names."""
SOURCE = "redrive.io/source"
"""What that policy retries: `topic/subscription`."""
CREATED = "redrive.io/created"
"""`true` where redrive made the topic; one without was there before, and is never deleted."""
GRANTED = "redrive.io/granted"
"""JSON: role → the actions that it could not do before redrive granted them."""
SUBSCRIPTION = "redrive.io/subscription"
"""A subscription that redrive added to a topic that was there before."""
REPLACED = "redrive.io/replaced"
"""JSON: topic policies that redrive changed → what the topic had set before. On a topic that
redrive made, only those that a field of a spec asks for."""
SCHEMA = "redrive.io/schema"
"""The fingerprint of the source topic's schema that redrive copied last."""
INTERNAL = "internal"
"""Field of a policy's status with bookkeeping of the operator."""
CREATING = "creating"
"""Field of `INTERNAL`: the topics that were about to be created for the policy."""
_KEYS = (TOPIC_OWNER, OWNER_UID, SOURCE, CREATED, GRANTED, SUBSCRIPTION, REPLACED)


Actions = frozenset[str]
Granted = Mapping[str, Actions]
"""Role → actions; a role without any is left out."""
NOTHING: Actions = frozenset()


@dataclass(frozen=True)
class Owner:
    """A RetryPolicy, told apart from those of all other Kubernetes clusters.

    Attributes:
        uid: tells it apart from others that had, or will have, its name.
        source: what it retries: `topic/subscription`.
    """

    cluster: str
    key: Key
    uid: str = ""
    source: str = ""

    def __str__(self) -> str:
        return f"{self.cluster}/{self.key}"

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """Read what `str` writes; None for anything else."""
        parts = text.rsplit("/", 2)
        return cls(parts[0], Key(*parts[1:])) if len(parts) == 3 and all(parts) else None  # noqa: PLR2004


def shown_policy(policy: Key, namespace: str) -> str:
    """Return the text by which an object of *namespace* shows a RetryPolicy.

    The names of objects are for their own namespace: others may be of another tenant.
    """
    if policy.namespace == namespace:
        return f"RetryPolicy {policy}"
    return "a RetryPolicy of another namespace"


def shown_owner(owner: str, namespace: str) -> str:
    """Return the text by which an object of *namespace* shows the owner of a topic."""
    policy = Owner.parse(owner)
    if policy is not None and policy.key.namespace == namespace:
        return f"{TOPIC_OWNER}={owner}"
    return "a RetryPolicy of another namespace"


def named_in(body: Body) -> frozenset[str]:
    """Return the names of the policies whose topics a RetryPolicy may take over."""
    written = (body["metadata"].get("annotations") or {}).get(TAKE_OVER_FROM, "")
    return frozenset(name for part in written.split(",") if (name := part.strip()))


@dataclass(frozen=True)
class OwnershipRecord:
    """What the properties of a topic record.

    Attributes:
        owner: as it is written; empty where the topic is not marked.
        uid: of the owner.
        source: what the owner retries.
        created: whether redrive made the topic.
        granted: what redrive added to the rights of roles.
        subscription: one that redrive added; empty for none, and where the topic is redrive's.
        replaced: what was set on the topic of each policy that redrive changed, by
            `TopicPolicy.name`; None where nothing was.
    """

    owner: str = ""
    uid: str = ""
    source: str = ""
    created: bool = False
    granted: Granted = field(default_factory=dict)
    subscription: str = ""
    replaced: Mapping[str, Any] = field(default_factory=dict)

    def owned_by(self, owner: Owner) -> OwnershipRecord:
        """Return this with *owner*; what redrive added stays on record."""
        return replace(self, owner=str(owner), uid=owner.uid, source=owner.source)

    def is_of(self, owner: Owner) -> bool:
        """Whether the topic is that of *owner*: the same object, or the same policy made again.

        One of the same name that retries something else is another policy. A record without a uid
        goes by the name.
        """
        same = self.uid in {"", owner.uid} or self.source == owner.source
        return self.owner == str(owner) and same

    @property
    def is_free(self) -> bool:
        """Whether redrive neither created the topic nor has adopted it for a policy."""
        return not self.owner and not self.created

    def may_pass_to(self, owner: Owner, named: Collection[str]) -> bool:
        """Whether the topic is free, is *owner*'s, or is that of a policy that *owner* has *named*.

        It never passes to another namespace, or another cluster.
        """
        if not self.owner or self.is_of(owner):
            return True
        former = Owner.parse(self.owner)
        return former is not None and (
            (former.cluster, former.key.namespace) == (owner.cluster, owner.key.namespace)
            and former.key.name in named
        )

    @classmethod
    def of(cls, properties: Mapping[str, str]) -> OwnershipRecord:
        """Read *properties*; what is not as redrive writes it counts as empty."""
        return cls(
            owner=properties.get(TOPIC_OWNER, ""),
            uid=properties.get(OWNER_UID, ""),
            source=properties.get(SOURCE, ""),
            created=properties.get(CREATED) == "true",
            granted=_granted(properties.get(GRANTED, "")),
            subscription=properties.get(SUBSCRIPTION, ""),
            replaced=_object(properties.get(REPLACED, "")),
        )

    def to_properties(self) -> dict[str, str]:
        """Write it; what is empty is left out."""
        granted = {role: sorted(actions) for role, actions in sorted(self.granted.items())}
        written = {
            TOPIC_OWNER: self.owner,
            OWNER_UID: self.uid,
            SOURCE: self.source,
            CREATED: "true" if self.created else "",
            GRANTED: json.dumps(granted, ensure_ascii=False) if granted else "",
            SUBSCRIPTION: self.subscription,
            REPLACED: json.dumps(dict(sorted(self.replaced.items()))) if self.replaced else "",
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


def creating(body: Body) -> frozenset[str]:
    """Return the topics that were about to be created for a RetryPolicy."""
    return frozenset(internal(body).get(CREATING) or ())


def internal(body: Body) -> Mapping[str, Any]:
    """Return the bookkeeping of the operator in the status of a RetryPolicy."""
    fields = (body.get("status") or {}).get(INTERNAL)
    return fields if isinstance(fields, Mapping) else {}


def created_unmarked(
    properties: Mapping[str, str], subscriptions: Collection[str], *, about_to: bool
) -> bool:
    """Whether redrive created a topic, and the broker lost its properties.

    Args:
        properties: all of the topic.
        subscriptions: the same; redrive creates none before the topic is marked.
        about_to: whether redrive was about to create it.
    """
    return about_to and not subscriptions and not any(properties.values())


@dataclass(frozen=True)
class Rights:
    """How the rights on one topic are brought to what is needed.

    Attributes:
        changes: what is given to roles, and taken from them.
        before: what has to be on record before that, so that a crash forgets nothing.
        after: what is on record once it is done.
    """

    changes: tuple[RightsChange, ...]
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
    changes, before, after = [], dict(recorded), {}
    for role in sorted({*needed, *recorded}):
        need, may = needed.get(role, NOTHING), have.get(role, NOTHING)
        added = recorded.get(role, NOTHING)
        missing, surplus = need - may, (added - need) & may
        if missing or surplus:
            changes.append(RightsChange(topic, role, give=missing, take=surplus))
        before[role] = added | missing
        after[role] = (added & need) | missing
    return Rights(tuple(changes), _filled(before), _filled(after))


def _filled(granted: Granted) -> Granted:
    return {role: actions for role, actions in granted.items() if actions}


def _object(text: str) -> Mapping[str, Any]:
    """Read a JSON object; an empty one where there is none."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _granted(text: str) -> Granted:
    """Read what redrive granted; nothing where it is not as redrive writes it."""
    try:
        written = json.loads(text or "{}")
        return _filled({str(role): frozenset(map(str, may)) for role, may in written.items()})
    except (AttributeError, TypeError, ValueError):
        return {}
