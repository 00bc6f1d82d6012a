"""Topic policies: how each is read and written, and which values are sufficient; pure.

`Admin.topic_policy` reads and `Admin.set_topic_policy` writes them. A policy of a topic has
priority over that of its namespace, and that over the broker's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

EVICTS = "consumer_backlog_eviction"
"""Backlog quota that deletes the oldest messages unread when it is reached."""
REFUSES = "producer_exception"
"""Backlog quota that refuses new messages: their producers get an error, and keep them."""
DELAYED_DELIVERY = "delayedDelivery"
"""Policy of delayed delivery: its precision and its maximum delay."""


class Write(NamedTuple):
    """One write: path below the topic with its query, and the body."""

    path: str
    body: Any
    method: str = "POST"


class TopicPolicy(Protocol):
    """A policy that a topic needs; `str` names it in messages.

    Values that redrive does not need are kept as they are in force. They are read from the broker,
    never assumed: most roles cannot read its configuration, and defaults differ between releases.
    So the values in force are known once the topic exists.
    """

    @property
    def read(self) -> str:
        """Return the path below the topic of the value to compare.

        It is `own` if only the value of the topic itself counts, else the value in force.
        """

    @property
    def own(self) -> str:
        """Return the path below the topic of the topic's own value."""

    @property
    def name(self) -> str:
        """Return the name of the policy in the record of original values."""

    def writes(self, value: Any) -> Iterator[Write]:  # noqa: ANN401  the broker's JSON
        """Yield the writes that are needed after *value* was read."""


@dataclass(frozen=True)
class Deduplicates:
    """The broker deduplicates messages; set on the topic itself."""

    read = own = name = "deduplicationEnabled"

    def writes(self, value: Any) -> Iterator[Write]:  # noqa: ANN401  the broker's JSON
        """Enable it on the topic: the setting of the namespace may change."""
        if value is not True:
            yield Write(self.read, body=True)

    def __str__(self) -> str:
        return "deduplication"


@dataclass(frozen=True)
class CompactsAbove:
    """The broker retains the latest message of each key, from a minimum size in bytes.

    Set on the topic itself: the value of the namespace may change.
    """

    size: int
    read = own = name = "compactionThreshold"

    def writes(self, value: Any) -> Iterator[Write]:  # noqa: ANN401  the broker's JSON
        """Set the size if it differs."""
        if value != self.size:
            yield Write(self.read, self.size)

    def __str__(self) -> str:
        return f"compaction above {self.size} bytes"


@dataclass(frozen=True)
class Ttl:
    """Time to live of unacknowledged messages from their publication; 0 means permanent.

    Set on the topic itself: the value of the namespace may change.
    """

    seconds: int
    read = own = name = "messageTTL"

    def writes(self, value: Any) -> Iterator[Write]:  # noqa: ANN401  the broker's JSON
        """Set the time if it differs."""
        if value != self.seconds:
            yield Write(f"{self.read}?messageTTL={self.seconds}", None)

    def __str__(self) -> str:
        return f"messageTTL {self.seconds} s"


@dataclass(frozen=True)
class Holds:
    """A policy that is an object with required fields; its other fields are kept.

    Attributes:
        fields: the required fields.
    """

    name: str
    fields: tuple[tuple[str, Any], ...]
    read: str = field(init=False)
    own: str = field(init=False)

    def __post_init__(self) -> None:
        """Compute the path of the value in force, of topic, namespace or broker."""
        object.__setattr__(self, "read", f"{self.name}?applied=true")
        object.__setattr__(self, "own", self.name)

    def writes(self, value: Mapping[str, Any] | None) -> Iterator[Write]:
        """Set the required fields, and keep the others."""
        before = dict(value or {})
        if not dict(self.fields).items() <= before.items():
            yield Write(self.name, before | dict(self.fields))

    def __str__(self) -> str:
        return f"{self.name} {', '.join(f'{name} {value}' for name, value in self.fields)}"


@dataclass(frozen=True)
class DelaysWithin:
    """Delayed delivery that is early by a maximum of milliseconds.

    The maximum delay is kept as in force when this is set.
    """

    tick: int
    read = f"{DELAYED_DELIVERY}?applied=true"
    own = DELAYED_DELIVERY
    name = "delayedDeliveryTick"

    def writes(self, value: Mapping[str, Any] | None) -> Iterator[Write]:
        """Set the tick if it differs, even if it is finer: that costs the broker."""
        before = dict(value or {})
        after = before | {"active": True, "tickTime": self.tick}
        if after != before:
            yield Write(self.own, after)

    def __str__(self) -> str:
        return f"delayed delivery within {self.tick} ms"


QUOTA_MAP = "backlogQuotaMap"
NUMBERS = frozenset({Deduplicates.own, CompactsAbove.own, Ttl.own})
"""Paths of policies that are a number or a truth value; others are objects."""
BY_SIZE = "destination_storage"
"""Type of a backlog quota in bytes."""
BY_AGE = "message_age"
"""Type of a backlog quota in seconds."""
_LIMITS = {BY_SIZE: "limitSize", BY_AGE: "limitTime"}
_QUOTAS = tuple(_LIMITS)
Quotas = Mapping[str, Mapping[str, Any]]
"""Backlog quotas of a topic or a namespace, by type."""


_GIGABYTE = 2**30
_MOST = 2**48


def size_limit(quotas: Quotas) -> int | None:
    """Return the backlog limit of *quotas* in bytes; None without one."""
    quota = quotas.get(BY_SIZE) or {}
    limit = quota.get("limitSize") or quota.get("limit") or 0
    return limit if limit > 0 else None


def age_limit(quotas: Quotas) -> int:
    """Return the age in seconds of messages from which *quotas* refuse or hold producers; 0: none.

    A quota that evicts does neither.
    """
    quota = quotas.get(BY_AGE) or {}
    return 0 if quota.get("policy") == EVICTS else max(0, quota.get("limitTime") or 0)


def default_quotas(settings: Mapping[str, str]) -> Quotas:
    """Return the broker's default backlog quotas, by type.

    Args:
        settings: configuration of the broker; a value that is not a number, or too high for one,
            sets no limit.
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


MAX_PRODUCERS = "maxProducersPerTopic"
MAX_CONSUMERS = "maxConsumersPerTopic"
MAX_CONSUMERS_OF_SUBSCRIPTION = "maxConsumersPerSubscription"
MAX_SUBSCRIPTIONS = "maxSubscriptionsPerTopic"
MAX_MESSAGE_SIZE = "maxMessageSize"
DEFAULT_MESSAGE_SIZE = 5 * 2**20
"""Maximum message size of a broker, by default."""
Limits = Mapping[str, int]
"""Limits of a topic or a partition, by setting; 0 for none."""
LIMITS: Mapping[str, tuple[str, str]] = {
    MAX_PRODUCERS: ("maxProducers", "max_producers_per_topic"),
    MAX_CONSUMERS: ("maxConsumers", "max_consumers_per_topic"),
    MAX_CONSUMERS_OF_SUBSCRIPTION: (
        "maxConsumersPerSubscription", "max_consumers_per_subscription",
    ),
    MAX_SUBSCRIPTIONS: ("maxSubscriptionsPerTopic", "max_subscriptions_per_topic"),
    MAX_MESSAGE_SIZE: ("maxMessageSize", ""),
}  # fmt: skip
"""Name of each limit of a topic, and field of that of its namespace, by the setting of a broker."""


def default_limits(settings: Mapping[str, str]) -> Limits:
    """Return the broker's own limits. See `default_quotas`."""
    return {setting: max(0, int(_number(settings, setting))) for setting in LIMITS}


def _number(settings: Mapping[str, str], name: str) -> float:
    try:
        number = float(settings.get(name, -1))
    except ValueError:
        return -1
    return number if number < _MOST else -1


def evicting(quotas: Quotas) -> str:
    """Return the type of the quota that deletes unread messages; empty if there is none.

    A quota without a limit never deletes any.
    """
    for kind, quota in quotas.items():
        limits = (quota.get(_LIMITS.get(kind, "")), quota.get("limit"))
        if quota.get("policy") == EVICTS and any(limit and limit > 0 for limit in limits):
            return kind
    return ""


@dataclass(frozen=True)
class KeepsBacklog:
    """No quota deletes unread messages.

    A quota by size refuses new messages instead, at the same limit. A quota by age gets no limit:
    messages wait on the topics of a policy for days, and the first to reach that age would make the
    broker refuse all others.
    """

    # Never with applied=true: if neither topic nor namespace has a quota, the broker would write
    # its default into the namespace, where the next change makes it permanent.
    read = own = name = QUOTA_MAP

    def writes(self, value: Quotas | None) -> Iterator[Write]:
        """Replace quotas that delete messages."""
        for kind, before in (value or {}).items():
            if (after := _refusing(before)) != before:
                yield _set_quota(kind, {**after, "limitTime": -1} if kind == BY_AGE else after)

    def __str__(self) -> str:
        return "backlog quota"


@dataclass(frozen=True)
class LimitsBacklog:
    """Backlog above a size in bytes is refused; set on the topic itself."""

    size: int
    read = own = QUOTA_MAP
    name = "backlogQuotaSize"

    def writes(self, value: Quotas | None) -> Iterator[Write]:
        """Set the size if it differs, or if exceeding messages are not refused."""
        before = (value or {}).get(BY_SIZE, {})
        after = {**_refusing(before), "limitSize": self.size}
        after.pop("limit", None)  # an older name of the limit, which has priority
        if any(before.get(name) != value for name, value in after.items()):
            yield _set_quota(BY_SIZE, after)

    def __str__(self) -> str:
        return f"backlog quota {self.size} bytes"


def restoring(name: str, before: Any) -> Iterator[Write]:  # noqa: ANN401  the broker's JSON
    """Yield the writes that restore a topic's own policy to *before*.

    Args:
        name: `TopicPolicy.name` of the policy.
        before: value that was read; None if the topic had none.
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
    """Yield the writes of `restoring`, for a topic that must still lose no messages.

    Args:
        name: as for `restoring`.
        before: as for `restoring`.
        inherited: topic policies of the namespace, by their read name.
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
