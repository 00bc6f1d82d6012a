"""Values that the admin API returns or accepts, and the parsers of its responses.

What is read from a broker and written to it, as values.

A broker's answers, as JSON → values; called by `client`. Statistics are read by `stats`.

An answer of another form raises what Python raises then; `client` makes an `AdminError` of it.

A broker's statistics of a topic, as JSON → statistics of its subscriptions; pure.

Partitions are combined here: a broker's own sum of all of them adds up what belongs to each, and
has no oldest message where one partition has none.

What a broker remembers of acknowledgements when it unloads a topic; pure.

Of a subscription it stores up to where all is acknowledged, and what is acknowledged behind that as
far as its settings go: so many ranges, or whole ledgers until they hold so many messages.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from redrive.errors import InvalidSpecError
from redrive.policy.naming import SYSTEM_PREFIX, SYSTEM_TOPIC, TopicName, cursor_name

MOST_PARTITIONS = 10_000
"""An answer with more partitions of a topic is not a broker's: each costs memory and calls."""


def broker_at(admin_url: str) -> str:
    """Name a broker by its admin URL, for lack of anything that a tenant admin may read.

    Two connections to one broker name it alike, unless they call it by different addresses.
    """
    return admin_url.rstrip("/").lower()


@dataclass(frozen=True)
class Grant:
    """All rights of a role on a topic from then on: a broker replaces those before.

    Attributes:
        actions: of `produce` and `consume`, the two that redrive grants, and whatever else the
            role had; an empty set revokes the role's rights there.
    """

    topic: TopicName
    role: str
    actions: frozenset[str]


@dataclass(frozen=True)
class RightsChange:
    """What is added to the rights of a role on a topic, and what is taken; all else stays.

    Raises:
        InvalidSpecError: it gives rights on a topic of Pulsar's own. Whoever may write there can
            stop a namespace. Taking rights back is always possible.
    """

    topic: TopicName
    role: str
    give: frozenset[str] = frozenset()
    take: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Refuse rights that no role may have."""
        if self.give and self.topic.is_system:
            raise InvalidSpecError(
                SYSTEM_TOPIC, got=str(self.topic), remedy="name a topic of an application"
            )

    def on(self, actions: frozenset[str]) -> frozenset[str]:
        """Return what the role may do then, if it may do *actions* now."""
        return (actions | self.give) - self.take


@dataclass(frozen=True)
class Schema:
    """The schema of a topic's messages, as the broker reads and writes it."""

    type: str
    data: str
    properties: Mapping[str, str]

    @property
    def fingerprint(self) -> str:
        """Return a hash that identifies this schema."""
        written = json.dumps([self.type, self.data, sorted(self.properties.items())])
        return hashlib.sha256(written.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class TopicMetadata:
    """What a broker keeps of a topic as a whole.

    Attributes:
        partitions: 0 where it is not partitioned.
        properties: as any administrator of the tenant has set them.
    """

    partitions: int
    properties: Mapping[str, str]


class TopicPermissions(Mapping[str, Mapping[str, frozenset[str]]]):
    """Topic → role → actions, each read when it is asked for.

    A namespace is read again and again while policies are provisioned there, and each time few of
    its topics matter.

    Args:
        written: the same as the broker's JSON.

    Raises:
        TypeError: it has another form.
    """

    def __init__(self, written: Mapping[str, Mapping[str, Iterable[str]]]) -> None:
        if not all(isinstance(roles, dict) for roles in written.values()):
            msg = "rights are objects by topic and role"
            raise TypeError(msg)
        self._written = written

    def __getitem__(self, topic: str) -> Mapping[str, frozenset[str]]:
        """Return who may do what on a topic."""
        return {role: frozenset(actions) for role, actions in self._written[topic].items()}

    def __iter__(self) -> Iterator[str]:
        """Go through the topics on which rights were granted."""
        return iter(self._written)

    def __len__(self) -> int:
        """Return how many these are."""
        return len(self._written)


@dataclass(frozen=True)
class NamespaceState:
    """The topics of a Pulsar namespace, and the rights on them.

    Attributes:
        unpartitioned: the topics without partitions, and the single partitions of the others.
        partitioned: the partitioned topics.
        permissions: topic → role → actions, as granted on topics (not on the namespace).
        subscription_expiry_minutes: after how long the broker deletes an idle subscription, with
            all that it keeps; 0 is never.
        backlog_quotas: by type, as the broker writes them.
        delayed_delivery: as the broker writes it; None where the namespace sets nothing.
        replicated_to: the clusters that its topics are replicated to, this one among them, unless
            a topic has its own.
        enforces_schemas: whether a producer without a schema is refused by a topic that has one.
        subscription_types: those that consumers may have, as the broker writes them; none for what
            the broker is configured to allow.
        requires_encryption: whether messages that are not encrypted are refused.
    """

    unpartitioned: frozenset[str]
    partitioned: frozenset[str]
    permissions: Mapping[str, Mapping[str, frozenset[str]]]
    subscription_expiry_minutes: int
    backlog_quotas: Mapping[str, Mapping[str, Any]]
    delayed_delivery: Mapping[str, Any] | None
    replicated_to: frozenset[str] = frozenset()
    enforces_schemas: bool = False
    subscription_types: frozenset[str] = frozenset()
    requires_encryption: bool = False

    def exists(self, topic: TopicName) -> bool:
        """Whether there is such a topic, partitioned or not."""
        return str(topic) in self.unpartitioned or str(topic) in self.partitioned

    def partitions(self, topic: TopicName) -> int:
        """Return how many partitions of *topic* are there; 0 if it is not partitioned.

        For a moment, while they are being made, that is fewer than the topic has.
        """
        if str(topic) not in self.partitioned:
            return 0
        for number in range(MOST_PARTITIONS):
            if f"{topic}-partition-{number}" not in self.unpartitioned:
                return number
        return MOST_PARTITIONS


@dataclass(frozen=True)
class TopicSubscriptions:
    """The names of a topic's subscriptions: a partition keeps messages only for those on itself.

    Attributes:
        parts: what is on each partition, in order, or on the one topic without any; None where a
            partition is not there, though the topic has it.
    """

    parts: tuple[frozenset[str] | None, ...]

    def has(self, name: str) -> bool:
        """Whether a subscription is on every partition, so that no message is lost to it."""
        return all(names is not None and name in names for names in self.parts)

    def has_some_of(self, name: str) -> bool:
        """Whether a subscription is on some partition, if not on all."""
        return any(names is not None and name in names for names in self.parts)

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all that are on some partition."""
        return frozenset(name for names in self.parts if names is not None for name in names)

    @property
    def missing(self) -> tuple[int, ...]:
        """Return the numbers of the partitions that are not there."""
        return tuple(number for number, names in enumerate(self.parts) if names is None)


@dataclass(frozen=True)
class TopicUsage:
    """Who uses a topic, and what it holds for one subscription.

    Attributes:
        producers: how many are connected; of a partitioned topic, where most are.
        uncounted: bytes stored where that subscription is not (in the topic, or in partitions of
            it): it is unknown how many messages it would have kept there. Acknowledged messages
            that are not trimmed yet are among them.
    """

    subscriptions: Mapping[str, SubscriptionStats]
    producers: int
    uncounted: int


@dataclass(frozen=True)
class SubscriptionStats:
    """How a subscription stands; of a partitioned topic, over all its partitions.

    Attributes:
        backlog: messages that are not acknowledged, those that wait for their time among them.
        delivered: messages sent to consumers, also again; a broker counts from 0 whenever it loads
            the topic.
        consumers: how many are connected, where most are.
        durable: whether it outlives its consumers; that of a reader does not.
        ack_holes: ranges of acknowledged messages behind one that is not, where most are: a broker
            persists so many of each partition, and forgets the others when it unloads it.
        oldest: when the oldest message of the backlog was published; None if there is none, or if
            that was not asked for.
        unacknowledged: messages that consumers have.
        stranded: unacknowledged messages that no connected consumer has, while consumers are
            connected. A broker that is delivering counts some for a moment.
        bytes: of the backlog, about, in the partition where most are; 0 if not asked for.
        delayed: messages of the backlog that wait for their time. A broker counts those that it has
            read for connected consumers, so none for a subscription without consumers.
        type: of the connected consumers, as the broker writes it; empty without any.
    """

    backlog: int
    delivered: int
    consumers: int
    durable: bool
    ack_holes: int
    oldest: datetime | None
    unacknowledged: int = 0
    stranded: int = 0
    bytes: int = 0
    delayed: int = 0
    type: str = ""

    @property
    def due(self) -> int:
        """Return how many messages of the backlog can be processed now, or are in-flight."""
        return max(0, self.backlog - self.delayed)


class TopicStats(Mapping[str, SubscriptionStats]):
    """Statistics of a topic: those of its subscriptions, by name.

    Attributes:
        published: how many messages were stored, by partition. A broker counts from 0 whenever it
            loads the partition.
    """

    def __init__(
        self, subscriptions: Mapping[str, SubscriptionStats], published: Mapping[str, int]
    ) -> None:
        self._subscriptions = subscriptions
        self.published = published

    def __getitem__(self, subscription: str) -> SubscriptionStats:
        """Return the statistics of one subscription."""
        return self._subscriptions[subscription]

    def __iter__(self) -> Iterator[str]:
        """Go through the names of the subscriptions."""
        return iter(self._subscriptions)

    def __len__(self) -> int:
        """Return how many subscriptions the topic has."""
        return len(self._subscriptions)


def as_is(answer: Any) -> Any:  # noqa: ANN401  JSON
    """Return the answer itself."""
    return answer


def read_partitions(answer: Any) -> int:  # noqa: ANN401  JSON
    """Read the number of a topic's partitions.

    Raises:
        ValueError: it is more than `MOST_PARTITIONS`, or negative.
    """
    partitions = int(answer["partitions"])
    if not 0 <= partitions <= MOST_PARTITIONS:
        raise ValueError(f"{partitions} partitions")
    return partitions


def read_metadata(answer: Any) -> TopicMetadata:  # noqa: ANN401  JSON
    """Read the metadata of a topic with partitions."""
    return TopicMetadata(read_partitions(answer), dict(answer.get("properties") or {}))


def read_unpartitioned_metadata(answer: Any) -> TopicMetadata:  # noqa: ANN401  JSON
    """Read the properties of a topic without partitions, which are all of its metadata."""
    return TopicMetadata(0, dict(answer or {}))


def read_namespace_policies(answer: Any) -> dict[str, Any]:  # noqa: ANN401  JSON
    """Read what a `NamespaceState` holds of the policies of a namespace."""
    return {
        "permissions": TopicPermissions(answer["auth_policies"]["destination_auth"]),
        "subscription_expiry_minutes": int(answer.get("subscription_expiration_time_minutes") or 0),
        "backlog_quotas": answer.get("backlog_quota_map") or {},
        "delayed_delivery": answer.get("delayed_delivery_policies"),
        "replicated_to": frozenset(answer.get("replication_clusters") or ()),
        "enforces_schemas": answer.get("schema_validation_enforced") is True,
        "subscription_types": frozenset(answer.get("subscription_types_enabled") or ()),
        "requires_encryption": answer.get("encryption_required") is True,
    }


def read_schema(answer: Any) -> Schema | None:  # noqa: ANN401  JSON
    """Read a schema; one of plain bytes is none."""
    if answer["type"] in {"NONE", "BYTES"}:
        return None
    return Schema(str(answer["type"]), str(answer["data"]), dict(answer.get("properties") or {}))


def read_schemas(answer: Any) -> tuple[Schema, ...]:  # noqa: ANN401  JSON
    """Read all versions of a schema, the oldest first; what is none is left out."""
    found = sorted(answer["getSchemaResponses"], key=lambda each: int(each["version"]))
    return tuple(version for version in map(read_schema, found) if version is not None)


def read_version(answer: str) -> tuple[int, ...]:
    """Read a release such as `4.0.8` or `4.2.0-SNAPSHOT`; empty for anything else."""
    found = re.match(r"(\d{1,3})\.(\d{1,3})(?:\.(\d{1,3}))?(?![.\d])", answer)
    return () if found is None else tuple(int(part) for part in found.groups() if part)


def read_stats(answer: Mapping[str, Any]) -> TopicStats:
    """Read the answer for a topic without partitions, or for a partitioned one with each of them.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: it is no broker's answer.
    """
    parts = answer.get("partitions") or {"": answer}
    published = {name: int(part.get("msgInCounter", 0)) for name, part in parts.items()}
    return TopicStats(_by_name(map(_subscriptions, parts.values())), published)


def read_producers(answer: Mapping[str, Any]) -> list[Mapping[str, str]]:
    """Read the metadata of the producers, from an answer as for `read_stats` that has them.

    Raises:
        AttributeError, KeyError, TypeError: it is no broker's answer.
    """
    parts = (answer.get("partitions") or {"": answer}).values()
    return [dict(each.get("metadata") or {}) for part in parts for each in part["publishers"]]


def read_names(part: Mapping[str, Any]) -> frozenset[str]:
    """Read the names of the subscriptions of one partition.

    Raises:
        KeyError, TypeError: it is no broker's answer.
    """
    return frozenset(part["subscriptions"])


def read_receivers(part: Mapping[str, Any]) -> frozenset[str]:
    """Read the names of the durable subscriptions of one partition that are not Pulsar's own.

    Raises:
        AttributeError, KeyError, TypeError: it is no broker's answer.
    """
    return frozenset(
        name
        for name, subscription in part["subscriptions"].items()
        if subscription.get("isDurable", True) and not name.startswith(SYSTEM_PREFIX)
    )


def read_usage(part: Mapping[str, Any], subscription: str) -> TopicUsage:
    """Read who uses one partition, or a topic without any.

    Args:
        part: its statistics, those of producers included.
        subscription: see `TopicUsage`.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: it is no broker's answer.
    """
    found, stored = _subscriptions(part), int(part["storageSize"])
    return TopicUsage(found, len(part["publishers"]), 0 if subscription in found else stored)


def combine_partitions(parts: Iterable[TopicUsage]) -> TopicUsage:
    """Put the partitions of a topic together; of none of them there is nothing."""
    parts = list(parts)
    return TopicUsage(
        subscriptions=_by_name(part.subscriptions for part in parts),
        producers=max((part.producers for part in parts), default=0),
        uncounted=sum(part.uncounted for part in parts),
    )


def _subscriptions(part: Mapping[str, Any]) -> dict[str, SubscriptionStats]:
    return {name: _read_subscription(found) for name, found in part["subscriptions"].items()}


def _by_name(parts: Iterable[Mapping[str, SubscriptionStats]]) -> dict[str, SubscriptionStats]:
    found: dict[str, list[SubscriptionStats]] = {}
    for part in parts:
        for name, stands in part.items():
            found.setdefault(name, []).append(stands)
    return {name: _combine(each) for name, each in found.items()}


def _read_subscription(found: Mapping[str, Any]) -> SubscriptionStats:
    oldest = int(found.get("earliestMsgPublishTimeInBacklog", 0))
    unacknowledged = int(found.get("unackedMessages", 0))
    held = [int(consumer.get("unackedMessages", 0)) for consumer in found["consumers"]]
    return SubscriptionStats(
        backlog=int(found["msgBacklog"]),
        delivered=int(found["msgOutCounter"]),
        consumers=len(found["consumers"]),
        durable=bool(found.get("isDurable", True)),
        ack_holes=int(found.get("nonContiguousDeletedMessagesRanges", 0)),
        oldest=datetime.fromtimestamp(oldest / 1_000, UTC) if oldest > 0 else None,
        unacknowledged=unacknowledged,
        stranded=max(0, unacknowledged - sum(held)) if held else 0,
        bytes=max(0, int(found.get("backlogSize", 0))),  # -1 where it was not asked for
        delayed=int(found.get("msgDelayed", 0)),
        type=str(found.get("type", "")) if found["consumers"] else "",
    )


def _combine(parts: Iterable[SubscriptionStats]) -> SubscriptionStats:
    parts = list(parts)
    return SubscriptionStats(
        backlog=sum(part.backlog for part in parts),
        delivered=sum(part.delivered for part in parts),
        consumers=max(part.consumers for part in parts),
        durable=any(part.durable for part in parts),
        ack_holes=max(part.ack_holes for part in parts),
        oldest=min((part.oldest for part in parts if part.oldest is not None), default=None),
        unacknowledged=sum(part.unacknowledged for part in parts),
        stranded=sum(part.stranded for part in parts),
        bytes=max(part.bytes for part in parts),
        delayed=sum(part.delayed for part in parts),
        type=max(part.type for part in parts),  # consumers of one connection have the same
    )


RANGES = "managedLedgerMaxUnackedRangesToPersist"
AS_ARRAYS = "managedLedgerPersistIndividualAckAsLongArray"
_IN_ARRAYS = "managedLedgerUnackedRangesOpenCacheSetEnabled"
"""Without which `AS_ARRAYS` has no effect; brokers after 4.2 always have it."""
_DEFAULT_RANGES = 10_000
_ARRAYS_SINCE = (4, 1)


@dataclass(frozen=True)
class AckPersistence:
    """How far acknowledgements behind a message that is not acknowledged are stored.

    Attributes:
        limit: so many ranges of them; of *whole_ledgers*, those of each ledger until the ledgers
            before it have more acknowledged messages than this.
        whole_ledgers: whether they are stored as a bitmap for each ledger.
        configured: whether the broker's configuration says so; else its release does.
    """

    limit: int = _DEFAULT_RANGES
    whole_ledgers: bool = False
    configured: bool = False

    @classmethod
    def of(cls, settings: Mapping[str, str], release: tuple[int, ...]) -> AckPersistence:
        """Read the configuration of a broker.

        Args:
            settings: by name; none where it may not be read.
            release: of the broker, whose defaults stand for what is not there.

        Raises:
            ValueError: a setting has no value of its kind.
        """
        arrays = settings.get(AS_ARRAYS, str(release >= _ARRAYS_SINCE))
        return cls(
            int(settings.get(RANGES, _DEFAULT_RANGES)),
            arrays.lower() == settings.get(_IN_ARRAYS, "true").lower() == "true",
            configured=RANGES in settings,
        )


BY_DEFAULT = AckPersistence()
"""That of brokers before 4.1."""


def acknowledged_behind(part: Mapping[str, Any], subscription: str) -> int:
    """Count what is acknowledged behind a message that is not, where it lies in several ledgers.

    In a single one it is stored, however much it is.

    Args:
        part: the internal statistics of a topic without partitions, or of one partition.
        subscription: of which; 0 where there is none.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: it is no broker's answer.
    """
    cursor = part["cursors"].get(cursor_name(subscription))
    if cursor is None:
        return 0
    through, after = (int(each) for each in cursor["markDeletePosition"].split(":"))
    newest, last = (int(each) for each in part["lastConfirmedEntry"].split(":"))
    entries = {int(each["ledgerId"]): int(each["entries"]) for each in part["ledgers"]}
    if newest in entries:  # of the ledger being written the list does not tell the number
        entries[newest] = last + 1
    behind = {ledger: count for ledger, count in entries.items() if ledger >= through}
    if through in behind:
        behind[through] -= after + 1
    if sum(count > 0 for count in behind.values()) <= 1:
        return 0
    backlog = int(part["entriesAddedCounter"]) - int(cursor["messagesConsumedCounter"])
    return max(0, sum(behind.values()) - backlog)
