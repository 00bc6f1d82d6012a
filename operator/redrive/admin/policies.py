"""Topic policies: how each is read and written, and whether what is there is enough.

Pure values; `Admin.topic_policy` reads them and `Admin.set_topic_policy` writes. A policy set on a
topic wins over that of its namespace, and that over the broker's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

EVICTS = "consumer_backlog_eviction"
"""The backlog quota that drops the oldest messages unread once it is reached."""
REFUSES = "producer_exception"
"""The backlog quota that refuses new messages: their producers get an error, and keep them."""
DELAYED_DELIVERY = "delayedDelivery"
"""The policy by which a topic holds delayed messages back, how exactly, and for how long."""


class Write(NamedTuple):
    """One write: the part of the path below the topic, with its query, and the body if any."""

    path: str
    body: Any
    method: str = "POST"


class TopicPolicy(Protocol):
    """A policy as a topic needs it; as a string, for messages.

    Values that do not matter to redrive stay as they are in force. They are read from the broker,
    and never assumed: its configuration can't be read by most roles, and defaults differ between
    releases. So what is in force for a topic is known once the topic exists.
    """

    @property
    def read(self) -> str:
        """Return the part of the path below the topic that reads it.

        It is `own` where only the value that is set on the topic itself matters, else what is in
        force.
        """

    @property
    def own(self) -> str:
        """Return the part of the path that reads what is set on the topic itself."""

    @property
    def name(self) -> str:
        """Return what names it in the record of what was set on a topic before."""

    def writes(self, found: Any) -> Iterator[Write]:  # noqa: ANN401  the broker's JSON
        """Yield what has to be written where *found* was read; nothing where that is enough."""


@dataclass(frozen=True)
class Deduplicates:
    """The broker drops what a producer sends twice; set on this very topic."""

    read = own = name = "deduplicationEnabled"

    def writes(self, found: Any) -> Iterator[Write]:  # noqa: ANN401  the broker's JSON
        """Switch it on where it is not, whatever the namespace has: that may change."""
        if found is not True:
            yield Write(self.read, body=True)

    def __str__(self) -> str:
        return "deduplication"


@dataclass(frozen=True)
class CompactsAbove:
    """The broker keeps of each key the last message alone, once so many bytes are more than that.

    Set on this very topic: a namespace's changes without notice.
    """

    size: int
    read = own = name = "compactionThreshold"

    def writes(self, found: Any) -> Iterator[Write]:  # noqa: ANN401  the broker's JSON
        """Set it where it is not set, or otherwise."""
        if found != self.size:
            yield Write(self.read, self.size)

    def __str__(self) -> str:
        return f"compaction above {self.size} bytes"


@dataclass(frozen=True)
class Ttl:
    """How long an unacknowledged message lives, counted from its publication; 0 is for ever.

    Set on this very topic: a namespace's changes without notice.
    """

    seconds: int
    read = own = name = "messageTTL"

    def writes(self, found: Any) -> Iterator[Write]:  # noqa: ANN401  the broker's JSON
        """Set it where it is not set, or otherwise."""
        if found != self.seconds:
            yield Write(f"{self.read}?messageTTL={self.seconds}", None)

    def __str__(self) -> str:
        return f"messageTTL {self.seconds} s"


@dataclass(frozen=True)
class Holds:
    """A policy that is an object, some fields of which matter; the others stay as in force.

    Attributes:
        fields: those that matter.
    """

    name: str
    fields: tuple[tuple[str, Any], ...]

    @property
    def read(self) -> str:
        """Read what is in force, be it set on the topic, its namespace or the broker."""
        return f"{self.name}?applied=true"

    @property
    def own(self) -> str:
        """Read what is set on the topic."""
        return self.name

    def writes(self, found: Mapping[str, Any] | None) -> Iterator[Write]:
        """Set the fields that matter, and keep the others."""
        before = dict(found or {})
        if not dict(self.fields).items() <= before.items():
            yield Write(self.name, before | dict(self.fields))

    def __str__(self) -> str:
        return f"{self.name} {', '.join(f'{name} {value}' for name, value in self.fields)}"


@dataclass(frozen=True)
class DelaysWithin:
    """Messages are delayed, and come early by so many milliseconds at most.

    The longest delay stays as in force when this is set.
    """

    tick: int
    read = f"{DELAYED_DELIVERY}?applied=true"
    own = DELAYED_DELIVERY
    name = "delayedDeliveryTick"

    def writes(self, found: Mapping[str, Any] | None) -> Iterator[Write]:
        """Set the tick where it is another one, be it finer: that costs the broker."""
        before = dict(found or {})
        after = before | {"active": True, "tickTime": self.tick}
        if after != before:
            yield Write(self.own, after)

    def __str__(self) -> str:
        return f"delayed delivery within {self.tick} ms"


_QUOTA_MAP = "backlogQuotaMap"
BY_SIZE = "destination_storage"
"""The type of a backlog quota in bytes."""
BY_AGE = "message_age"
"""The type of a backlog quota in seconds."""
_LIMITS = {BY_SIZE: "limitSize", BY_AGE: "limitTime"}
_QUOTAS = tuple(_LIMITS)
Quotas = Mapping[str, Mapping[str, Any]]
"""The backlog quotas of a topic or a namespace, by their type."""


_GIGABYTE = 2**30


def size_limit(quotas: Quotas) -> int | None:
    """Return the bytes of backlog that *quotas* permit; None where they limit no size."""
    found = quotas.get(BY_SIZE) or {}
    limit = found.get("limitSize") or found.get("limit") or 0
    return limit if limit > 0 else None


def default_quotas(settings: Mapping[str, str]) -> Quotas:
    """Return the backlog quotas of a topic that has none, nor its namespace, by their type.

    Args:
        settings: the configuration of the broker, by name; what is no number sets no limit.
    """
    gigabytes = _number(settings, "backlogQuotaDefaultLimitGB")
    size = _number(settings, "backlogQuotaDefaultLimitBytes")
    limits = {
        "limitSize": int(gigabytes * _GIGABYTE if gigabytes > 0 else size),
        "limitTime": int(_number(settings, "backlogQuotaDefaultLimitSecond")),
    }
    policy = settings.get("backlogQuotaDefaultRetentionPolicy", REFUSES)
    return {
        kind: {limit: limits[limit], "policy": policy}
        for kind, limit in _LIMITS.items()
        if limits[limit] > 0
    }


def _number(settings: Mapping[str, str], name: str) -> float:
    try:
        return float(settings.get(name, -1))
    except ValueError:
        return -1


def evicting(quotas: Quotas) -> str:
    """Return the type of the quota that drops messages unread; empty where none does.

    One without a limit never drops any.
    """
    for kind, quota in quotas.items():
        limits = (quota.get(_LIMITS.get(kind, "")), quota.get("limit"))
        if quota.get("policy") == EVICTS and any(limit and limit > 0 for limit in limits):
            return kind
    return ""


@dataclass(frozen=True)
class KeepsBacklog:
    """No quota evicts messages: those that would refuse them instead, at the same limit."""

    # Never with applied=true: where neither topic nor namespace has a quota, that has the broker
    # write its own default into the namespace, for good with the namespace's next change.
    read = own = name = _QUOTA_MAP

    def writes(self, found: Quotas | None) -> Iterator[Write]:
        """Turn quotas that evict into such that refuse."""
        for kind, before in (found or {}).items():
            if (after := _refusing(before)) != before:
                yield _set_quota(kind, after)

    def __str__(self) -> str:
        return "backlog quota"


@dataclass(frozen=True)
class LimitsBacklog:
    """More than so many bytes of backlog are refused; set on this very topic."""

    size: int
    read = own = _QUOTA_MAP
    name = "backlogQuotaSize"

    def writes(self, found: Quotas | None) -> Iterator[Write]:
        """Set the size where it is another one, or what is more is not refused."""
        before = (found or {}).get(BY_SIZE, {})
        after = {**_refusing(before), "limitSize": self.size}
        after.pop("limit", None)  # an old name of the same, which would win
        if any(before.get(name) != value for name, value in after.items()):
            yield _set_quota(BY_SIZE, after)

    def __str__(self) -> str:
        return f"backlog quota {self.size} bytes"


def restoring(name: str, before: Any) -> Iterator[Write]:  # noqa: ANN401  the broker's JSON
    """Yield what has to be written for a topic to have *before* as its own policy again.

    Args:
        name: of the policy, as `TopicPolicy.name`.
        before: what was read there; None where nothing was set on the topic.
    """
    if name == KeepsBacklog.name:
        for kind in _QUOTAS:
            yield _restore_quota(kind, (before or {}).get(kind))
    elif name == LimitsBacklog.name:
        yield _restore_quota(BY_SIZE, (before or {}).get(BY_SIZE))
    elif name == DelaysWithin.name:
        yield from restoring(DelaysWithin.own, before)
    elif before is None:
        yield Write(name, None, "DELETE")
    elif name == Ttl.name:
        yield from Ttl(before).writes(None)
    else:
        yield Write(name, before)


def withdrawing(
    name: str,
    before: Any,  # noqa: ANN401  the broker's JSON
    inherited: Mapping[str, Any],
) -> Iterator[Write]:
    """Yield what `restoring` does, but for a topic that goes on to lose no messages.

    Args:
        name: as for `restoring`.
        before: likewise.
        inherited: what its namespace has of topic policies, by how each is read.
    """
    if name != LimitsBacklog.name:
        yield from restoring(name, before)
        return
    own = (before or {}).get(BY_SIZE)
    in_force = own or (inherited.get(LimitsBacklog.read) or {}).get(BY_SIZE) or {}
    evicts = in_force.get("policy") == EVICTS
    yield _restore_quota(BY_SIZE, _refusing(in_force) if evicts else own)


def _refusing(quota: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**quota, "policy": REFUSES} if quota.get("policy") in {None, EVICTS} else quota


def _set_quota(kind: str, quota: Mapping[str, Any]) -> Write:
    return Write(f"backlogQuota?backlogQuotaType={kind}", quota)


def _restore_quota(kind: str, quota: Mapping[str, Any] | None) -> Write:
    set_ = _set_quota(kind, quota or {})
    return set_ if quota is not None else Write(set_.path, None, "DELETE")
