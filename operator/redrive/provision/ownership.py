"""Topic ownership and adoption: owner and additions of redrive, in topic properties; pure.

Creation and adoption of a topic write the same properties. They exist exactly as long as the topic:
a topic that is deleted and recreated has no owner.
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
"""The source of that policy: `topic/subscription`."""
CREATED = "redrive.io/created"
"""`true` if redrive created the topic. A topic without it existed before and is never deleted."""
GRANTED = "redrive.io/granted"
"""JSON: role → the actions that redrive added to its grants."""
SUBSCRIPTION = "redrive.io/subscription"
"""The subscription that redrive added to a topic that existed before."""
REPLACED = "redrive.io/replaced"
"""JSON: topic policies that redrive changed → their values before. On a topic that redrive created,
only policies that a field of the spec requires."""
SCHEMA = "redrive.io/schema"
"""Fingerprint of the schema of the source topic that redrive copied last."""
INTERNAL = "internal"
"""Status field of a policy with internal data of the operator."""
CREATING = "creating"
"""Field of `INTERNAL`: topics whose creation was recorded."""
_KEYS = (TOPIC_OWNER, OWNER_UID, SOURCE, CREATED, GRANTED, SUBSCRIPTION, REPLACED)


Actions = frozenset[str]
Granted = Mapping[str, Actions]
"""Role → actions; a role without actions is left out."""
NOTHING: Actions = frozenset()


@dataclass(frozen=True)
class Owner:
    """A RetryPolicy, unique among all Kubernetes clusters.

    Attributes:
        uid: distinguishes it from earlier and later policies of its name.
        source: its source topic and subscription: `topic/subscription`.
    """

    cluster: str
    key: Key
    uid: str = ""
    source: str = ""

    def __str__(self) -> str:
        return f"{self.cluster}/{self.key}"

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """Parse the text of `str(owner)`; None for any other text."""
        parts = text.rsplit("/", 2)
        return cls(parts[0], Key(*parts[1:])) if len(parts) == 3 and all(parts) else None  # noqa: PLR2004


def shown_policy(policy: Key, namespace: str, kind: str = "RetryPolicy") -> str:
    """Return the text for a policy in the status of an object of *namespace*.

    Names of objects are visible in their own namespace only: others may belong to another tenant.
    """
    if policy.namespace == namespace:
        return f"{kind} {policy}"
    return f"a {kind} of another namespace"


def shown_owner(owner: str, namespace: str) -> str:
    """Return the text for the owner of a topic in the status of an object of *namespace*."""
    policy = Owner.parse(owner)
    if policy is not None and policy.key.namespace == namespace:
        return f"{TOPIC_OWNER}={owner}"
    return "a RetryPolicy of another namespace"


def named_in(body: Body) -> frozenset[str]:
    """Return the names of policies whose topics a RetryPolicy may take over."""
    written = (body["metadata"].get("annotations") or {}).get(TAKE_OVER_FROM, "")
    return frozenset(name for part in written.split(",") if (name := part.strip()))


@dataclass(frozen=True)
class OwnershipRecord:
    """Ownership as recorded in the properties of a topic.

    Attributes:
        owner: as written; empty if the topic is not marked.
        uid: of the owner.
        source: source topic and subscription of the owner.
        created: True if redrive created the topic.
        granted: actions that redrive added to the grants of roles.
        subscription: the subscription that redrive added to an existing topic, or empty.
        replaced: values before redrive of the topic policies that it changed, by
            `TopicPolicy.name`; None if none was set.
    """

    owner: str = ""
    uid: str = ""
    source: str = ""
    created: bool = False
    granted: Granted = field(default_factory=dict)
    subscription: str = ""
    replaced: Mapping[str, Any] = field(default_factory=dict)

    def owned_by(self, owner: Owner) -> OwnershipRecord:
        """Return this with *owner*; the additions of redrive stay on record."""
        return replace(self, owner=str(owner), uid=owner.uid, source=owner.source)

    def is_of(self, owner: Owner) -> bool:
        """Return True if *owner*, or the same policy before it was recreated, owns the topic.

        A policy of the same name with another source is another policy. A record without a uid is
        compared by name.
        """
        same = self.uid in {"", owner.uid} or self.source == owner.source
        return self.owner == str(owner) and same

    @property
    def is_free(self) -> bool:
        """Return True if redrive neither created nor adopted the topic."""
        return not self.owner and not self.created

    def may_pass_to(self, owner: Owner, named: Collection[str]) -> bool:
        """Return True if the topic is free, is *owner*'s, or belongs to a policy in *named*.

        It never passes to another namespace or cluster.
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
        """Parse *properties*; a value that redrive did not write counts as empty."""
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
        """Return the properties; empty values are left out."""
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
        """Return the properties to set on a topic with *properties*; an empty value clears one."""
        after = self.to_properties()
        return {
            key: after.get(key, "")
            for key in _KEYS
            if properties.get(key, "") != after.get(key, "")
        }


def creating(body: Body) -> frozenset[str]:
    """Return the topics of a RetryPolicy whose creation was recorded."""
    return frozenset(internal(body).get(CREATING) or ())


def internal(body: Body) -> Mapping[str, Any]:
    """Return the internal data of the operator in the status of a RetryPolicy."""
    fields = (body.get("status") or {}).get(INTERNAL)
    return fields if isinstance(fields, Mapping) else {}


def created_unmarked(
    properties: Mapping[str, str], subscriptions: Collection[str], *, about_to: bool
) -> bool:
    """Return True if redrive created a topic and the broker lost its properties.

    Args:
        properties: all properties of the topic.
        subscriptions: all subscriptions; redrive marks a topic before it creates any.
        about_to: True if its creation was recorded.
    """
    return about_to and not subscriptions and not any(properties.values())


@dataclass(frozen=True)
class Rights:
    """Change of the grants on one topic.

    Attributes:
        changes: actions to grant and to revoke, for each role.
        before: the record before the change, so that a crash loses nothing.
        after: the record after the change.
    """

    changes: tuple[RightsChange, ...]
    before: Granted
    after: Granted


def rights(topic: TopicName, needed: Granted, have: Granted, recorded: Granted) -> Rights:
    """Plan the grants on *topic*.

    Only grants on record are revoked. After a crash between record and grant, a grant may be on
    record that was not made. If others make it before the next reconcile, it counts as redrive's.

    Args:
        topic: the topic.
        needed: actions that each role needs.
        have: actions that each role has.
        recorded: the part of them that redrive added.
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
    """Parse a JSON object; empty if there is none."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _granted(text: str) -> Granted:
    """Parse the recorded grants; empty if redrive did not write the text."""
    try:
        written = json.loads(text or "{}")
        return _filled({str(role): frozenset(map(str, may)) for role, may in written.items()})
    except (AttributeError, TypeError, ValueError):
        return {}
