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


class Write(NamedTuple):
    """One write: the part of the path below the topic, with its query, and the body if any."""

    path: str
    body: Any
    method: str = "POST"


class TopicPolicy(Protocol):
    """A policy as a topic needs it; as a string, for messages."""

    @property
    def read(self) -> str:
        """Return the part of the path below the topic that reads it."""

    @property
    def own(self) -> str:
        """Return the part of the path that reads what is set on the topic itself, and names it."""

    def writes(self, found: Any) -> Iterator[Write]:  # noqa: ANN401  the broker's JSON
        """Yield what has to be written where *found* was read; nothing where that is enough."""


@dataclass(frozen=True)
class Deduplicates:
    """The broker drops what a producer sends twice; set on this very topic."""

    read = own = "deduplicationEnabled"

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
    read = own = "compactionThreshold"

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
    read = own = "messageTTL"

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
        others: what those that do not matter shall be where nothing is in force.
    """

    name: str
    fields: tuple[tuple[str, Any], ...]
    others: tuple[tuple[str, Any], ...] = ()

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
        before = dict(self.others) if found is None else dict(found)
        if not dict(self.fields).items() <= before.items():
            yield Write(self.name, before | dict(self.fields))

    def __str__(self) -> str:
        return f"{self.name} {', '.join(f'{name} {value}' for name, value in self.fields)}"


@dataclass(frozen=True)
class KeepsBacklog:
    """No quota evicts messages; where a size is given, more than that is refused.

    Attributes:
        size: in bytes; None leaves a quota that evicts nothing as it is.
    """

    size: int | None
    # Never with applied=true: where neither topic nor namespace has a quota, that has the broker
    # write its own default into the namespace, for good with the namespace's next change.
    read = own = "backlogQuotaMap"

    def writes(self, found: Mapping[str, Mapping[str, Any]] | None) -> Iterator[Write]:
        """Turn quotas that evict into such that refuse, and set the size."""
        for kind, before in _quotas(found, self.size):
            after = dict(before)
            if before.get("policy") in {None, EVICTS}:
                after["policy"] = REFUSES
            if kind == _BY_SIZE and self.size is not None:
                after["limitSize"] = self.size
                after.pop("limit", None)  # an old name of the same, which would win
            if any(before.get(name) != value for name, value in after.items()):
                yield Write(f"backlogQuota?backlogQuotaType={kind}", after)

    def __str__(self) -> str:
        return "backlog quota" if self.size is None else f"backlog quota {self.size} bytes"


_BY_SIZE = "destination_storage"
_QUOTAS = (_BY_SIZE, "message_age")


def restoring(own: str, before: Any) -> Iterator[Write]:  # noqa: ANN401  the broker's JSON
    """Yield what has to be written for a topic to have *before* as its own policy *own* again.

    Args:
        own: of the policy, as `TopicPolicy.own` names it.
        before: what was read there; None where nothing was set on the topic.
    """
    if own == KeepsBacklog.own:
        for kind in _QUOTAS:
            path = f"backlogQuota?backlogQuotaType={kind}"
            quota = (before or {}).get(kind)
            yield Write(path, None, "DELETE") if quota is None else Write(path, quota)
    elif before is None:
        yield Write(own, None, "DELETE")
    elif own == Ttl.own:
        yield from Ttl(before).writes(None)
    else:
        yield Write(own, before)


def _quotas(
    found: Mapping[str, Mapping[str, Any]] | None, size: int | None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield from (found or {}).items()
    if size is not None and _BY_SIZE not in (found or {}):
        yield _BY_SIZE, {}
