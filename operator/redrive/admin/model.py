"""Values that the admin API returns or accepts, and the parsers of its responses; pure.

An answer of another form raises Python's own errors, and the client turns them into an
`AdminError`.

Statistics are combined from partitions here: a broker's own sum adds values that belong to each
partition, and has no oldest message if one partition has none.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, NamedTuple

from redrive.admin.policies import LIMITS, NUMBERS, QUOTA_MAP, Limits
from redrive.errors import InvalidSpecError
from redrive.policy.naming import SYSTEM_PREFIX, SYSTEM_TOPIC, TopicName

MOST_PARTITIONS = 10_000
"""Maximum partitions of a topic in an answer: each costs memory and calls."""
LONGEST_TEXT = 16 * 2**10
"""Maximum characters of a text in the metadata of a producer."""
HIGHEST_NUMBER = 2**48
"""Maximum of any other number: the sums of all partitions have 64 bits, as in a status."""


def broker_at(admin_url: str) -> str:
    """Return the name of a broker, by its admin URL: a tenant admin may read no other identity.

    Two connections to one broker have the same name, unless their addresses differ.
    """
    return admin_url.rstrip("/").lower()


@dataclass(frozen=True)
class Grant:
    """All actions of a role on a topic; a grant replaces the earlier one.

    Attributes:
        actions: `produce` and `consume`, which redrive grants, and any others that the role had.
            An empty set revokes all.
    """

    topic: TopicName
    role: str
    actions: frozenset[str]


@dataclass(frozen=True)
class RightsChange:
    """Change of the actions of a role on a topic; other actions are kept.

    Raises:
        InvalidSpecError: it grants actions on a system topic of Pulsar. Producers there could stop
            a namespace. Revocation is always possible.
    """

    topic: TopicName
    role: str
    give: frozenset[str] = frozenset()
    take: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Check that no action on a system topic is granted."""
        if self.give and self.topic.is_system:
            raise InvalidSpecError(
                SYSTEM_TOPIC, got=str(self.topic), remedy="use a topic of an application"
            )

    def on(self, actions: frozenset[str]) -> frozenset[str]:
        """Return the actions of the role after the change, from its current *actions*."""
        return (actions | self.give) - self.take


@dataclass(frozen=True)
class Schema:
    """Schema of a topic's messages, as the broker reads and writes it."""

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
    """Metadata of a topic.

    Attributes:
        partitions: 0 if it is not partitioned.
        properties: may be set by any administrator of the tenant.
    """

    partitions: int
    properties: Mapping[str, str]


class TopicPermissions(Mapping[str, Mapping[str, frozenset[str]]]):
    """Topic → role → actions, parsed on access.

    A namespace is read repeatedly while policies are provisioned, and each time few of its topics
    are needed.

    Args:
        written: the same as the broker's JSON.

    Raises:
        AttributeError, TypeError: it has another form.
    """

    def __init__(self, written: Mapping[str, Mapping[str, Iterable[str]]]) -> None:
        for roles in written.values():
            if not all(isinstance(actions, list) for actions in roles.values()):
                raise TypeError("the actions of a role are a list")
        self._written = written

    def __getitem__(self, topic: str) -> Mapping[str, frozenset[str]]:
        """Return the actions of each role on a topic."""
        roles = self._written[topic].items()
        return {role: frozenset(a for a in held if isinstance(a, str)) for role, held in roles}

    def __iter__(self) -> Iterator[str]:
        """Iterate over the topics that have grants."""
        return iter(self._written)

    def __len__(self) -> int:
        """Return the number of these topics."""
        return len(self._written)


_PER_ROLE = 28
"""Bytes of the actions of one role in the record of a namespace."""


@dataclass(frozen=True)
class NamespaceState:
    """Topics of a Pulsar namespace, grants on them, and policies of the namespace.

    Attributes:
        unpartitioned: topics without partitions, and the single partitions of the others.
        partitioned: partitioned topics.
        permissions: topic → role → actions, as granted on topics, not on the namespace.
        subscription_expiry_minutes: time after which the broker deletes an idle subscription with
            its backlog; 0 means never.
        backlog_quotas: by type, as the broker writes them.
        delayed_delivery: as the broker writes it; None if the namespace sets nothing.
        replicated_to: clusters that have its topics, this one included, unless a topic has its own
            setting.
        enforces_schemas: True if a topic with a schema refuses producers without one.
        subscription_types: allowed types as the broker writes them; empty means the configuration
            of the broker.
        requires_encryption: True if unencrypted messages are refused.
        limits: those that it sets for its topics; otherwise the broker's apply.
    """

    unpartitioned: frozenset[str] = frozenset()
    partitioned: frozenset[str] = frozenset()
    permissions: Mapping[str, Mapping[str, frozenset[str]]] = field(default_factory=dict)
    subscription_expiry_minutes: int = 0
    backlog_quotas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    delayed_delivery: Mapping[str, Any] | None = None
    replicated_to: frozenset[str] = frozenset()
    enforces_schemas: bool = False
    subscription_types: frozenset[str] = frozenset()
    requires_encryption: bool = False
    limits: Limits = field(default_factory=dict)

    @cached_property
    def size_of_grants(self) -> int:
        """Return the bytes of its grants in the broker's record; computed once for each read."""
        names = [[topic, *roles] for topic, roles in self.permissions.items()]
        # The record is JSON: a character of a name takes up to four bytes.
        text = json.dumps(names, ensure_ascii=False, separators=(",", ":"))
        return len(text.encode(errors="replace")) + _PER_ROLE * sum(len(n) - 1 for n in names)

    def exists(self, topic: TopicName) -> bool:
        """Return True if a topic exists, partitioned or not."""
        return str(topic) in self.unpartitioned or str(topic) in self.partitioned

    def partitions(self, topic: TopicName) -> int:
        """Return the number of existing partitions of *topic*; 0 if it is not partitioned.

        While partitions are being created, that is fewer than the topic has.
        """
        if str(topic) not in self.partitioned:
            return 0
        for number in range(MOST_PARTITIONS):
            if f"{topic}-partition-{number}" not in self.unpartitioned:
                return number
        return MOST_PARTITIONS


@dataclass(frozen=True)
class TopicSubscriptions:
    """Names of a topic's subscriptions; a partition retains messages only for its own.

    Attributes:
        parts: subscriptions of each partition in order, or of the topic without partitions; None
            for a missing partition.
    """

    parts: tuple[frozenset[str] | None, ...]

    def has(self, name: str) -> bool:
        """Return True if a subscription exists on every partition, so it misses no message."""
        return all(names is not None and name in names for names in self.parts)

    def retain_for(self, receiver: str) -> bool:
        """Return True if every partition has the subscription *receiver*; any, if it is empty."""
        return self.has(receiver) if receiver else all(self.parts)

    def has_some_of(self, name: str) -> bool:
        """Return True if a subscription exists on any partition."""
        return any(names is not None and name in names for names in self.parts)

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all subscriptions on any partition."""
        return frozenset(name for names in self.parts if names is not None for name in names)

    @property
    def missing(self) -> tuple[int, ...]:
        """Return the numbers of the missing partitions."""
        return tuple(number for number, names in enumerate(self.parts) if names is None)


@dataclass(frozen=True)
class TopicUsage:
    """Clients of a topic, and its content for one subscription.

    Attributes:
        producers: connected producers, of a partitioned topic the maximum of a partition.
        uncounted: bytes stored in the topic or in partitions that lack the subscription. The
            number of messages that it would have there is unknown. Acknowledged messages that are
            not trimmed yet are included.
    """

    subscriptions: Mapping[str, SubscriptionStats]
    producers: int
    uncounted: int


@dataclass(frozen=True)
class SubscriptionStats:
    """Statistics of a subscription; of a partitioned topic, of all its partitions.

    Attributes:
        backlog: unacknowledged messages, including delayed ones.
        delivered: deliveries to consumers, including redeliveries; a broker counts from 0 when it
            loads the topic.
        consumers: connected consumers, the maximum of a partition.
        durable: True if it exists without consumers; False for a reader.
        ack_holes: ranges of messages acknowledged out of order, the maximum of a partition. A
            broker persists a limited number for each partition.
        oldest: publish time of the oldest message of the backlog; None if there is none, or if it
            was not requested.
        unacknowledged: messages held by consumers.
        stranded: unacknowledged messages of no connected consumer, while consumers are connected.
            A broker that is delivering counts some for a moment.
        bytes: approximate size of the backlog, the maximum of a partition; 0 if not requested.
        delayed: delayed messages of the backlog. A broker counts those that it has read for
            connected consumers, so none for a subscription without consumers.
        type: type of the connected consumers, as the broker writes it; empty without any.
        partitions: number of partitions that have it; 1 for a topic without partitions.
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
    partitions: int = 1

    @property
    def due(self) -> int:
        """Return the number of messages that can be processed now, or are in-flight."""
        return max(0, self.backlog - self.delayed)


class TopicStats(dict[str, SubscriptionStats]):
    """Statistics of a topic: those of its subscriptions, by name.

    Attributes:
        published: number of stored messages, by partition. A broker counts from 0 when it loads
            the partition.
        producers: metadata of each producer; empty if not requested.
    """

    def __init__(
        self,
        subscriptions: Mapping[str, SubscriptionStats],
        published: Mapping[str, int],
        producers: Sequence[Mapping[str, str]] = (),
    ) -> None:
        super().__init__(subscriptions)
        self.published = published
        self.producers = producers

    @property
    def complete(self) -> frozenset[str]:
        """Return the names of the subscriptions that each partition has."""
        count = len(self.published)
        return frozenset(name for name, stats in self.items() if stats.partitions == count)


def bounded(value: Any, most: int = HIGHEST_NUMBER) -> int:  # noqa: ANN401  JSON
    """Return *value* if it is a whole number, and neither it nor its negative exceeds *most*.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is too high or too low.
    """
    if not isinstance(value, int):
        raise TypeError("no whole number")
    if abs(value) > most:
        raise ValueError(f"a number above {most}")
    return value


def name_set(value: Any) -> frozenset[str]:  # noqa: ANN401  JSON
    """Return the texts of a list.

    Raises:
        TypeError: it is no list, or an item is no text.
    """
    if isinstance(value, str) or not all(isinstance(name, str) for name in value):
        raise TypeError("no list of texts")
    return frozenset(value)


def read_flag(answer: Any) -> bool:  # noqa: ANN401  JSON
    """Parse a setting that is on or off, or not set.

    Raises:
        TypeError: it is neither.
    """
    if not isinstance(answer, bool | None):
        raise TypeError("neither true nor false")
    return answer is True


def read_limit(answer: Any) -> int | None:  # noqa: ANN401  JSON
    """Parse a limit; None if it is not set."""
    return None if answer is None else bounded(answer)


def _text_map(value: Mapping[str, Any] | None) -> dict[str, str]:
    name_set((value or {}).values())
    return dict(value or {})


def read_partitions(answer: Any) -> int:  # noqa: ANN401  JSON
    """Parse the number of a topic's partitions.

    Raises:
        TypeError, ValueError: it is no number, negative, or exceeds `MOST_PARTITIONS`.
    """
    partitions = bounded(answer["partitions"], MOST_PARTITIONS)
    if partitions < 0:
        raise ValueError(f"{partitions} partitions")
    return partitions


def read_metadata(answer: Any) -> TopicMetadata:  # noqa: ANN401  JSON
    """Parse the metadata of a partitioned topic."""
    return TopicMetadata(read_partitions(answer), _text_map(answer.get("properties")))


def read_unpartitioned_metadata(answer: Any) -> TopicMetadata:  # noqa: ANN401  JSON
    """Parse the properties of a topic without partitions, which are all of its metadata."""
    return TopicMetadata(0, _text_map(answer))


def read_namespace_policies(answer: Any) -> dict[str, Any]:  # noqa: ANN401  JSON
    """Parse the policies of a namespace for a `NamespaceState`."""
    limits = {setting: answer.get(name) for setting, (_, name) in LIMITS.items()}
    return {
        "permissions": TopicPermissions(answer["auth_policies"]["destination_auth"]),
        "subscription_expiry_minutes": bounded(
            answer.get("subscription_expiration_time_minutes") or 0
        ),
        "backlog_quotas": read_quotas(answer.get("backlog_quota_map")),
        "delayed_delivery": read_delayed_delivery(answer.get("delayed_delivery_policies")),
        "replicated_to": name_set(answer.get("replication_clusters") or ()),
        "enforces_schemas": answer.get("schema_validation_enforced") is True,
        "subscription_types": name_set(answer.get("subscription_types_enabled") or ()),
        "requires_encryption": answer.get("encryption_required") is True,
        "limits": {name: bounded(limit) for name, limit in limits.items() if limit is not None},
    }


def read_quotas(answer: Any) -> dict[str, Mapping[str, Any]]:  # noqa: ANN401  JSON
    """Parse the backlog quotas of a topic or a namespace, by type; empty if there are none."""
    quotas = dict(answer or {})
    for quota in quotas.values():
        for limit in ("limit", "limitSize", "limitTime"):
            bounded(quota.get(limit) or 0)
        if not isinstance(quota.get("policy"), str | None):
            raise TypeError("no text")
    return quotas


def read_delayed_delivery(answer: Any) -> dict[str, Any] | None:  # noqa: ANN401  JSON
    """Parse the delayed delivery of a topic or a namespace; None if it sets nothing."""
    if answer is None:
        return None
    bounded(answer.get("tickTime", 0))
    bounded(answer.get("maxDeliveryDelayInMillis", 0))
    return dict(answer)


def read_policy(name: str, answer: Any) -> Any:  # noqa: ANN401  JSON
    """Parse a policy of a topic; None if it sets nothing."""
    if answer is None or name in NUMBERS:
        return answer if answer is None else bounded(answer)
    return read_quotas(answer) if name == QUOTA_MAP else read_delayed_delivery(answer)


def read_schema(answer: Any) -> Schema | None:  # noqa: ANN401  JSON
    """Parse a schema; None for plain bytes."""
    if answer["type"] in {"NONE", "BYTES"}:
        return None
    return Schema(str(answer["type"]), str(answer["data"]), _text_map(answer.get("properties")))


def read_schemas(answer: Any) -> tuple[Schema, ...]:  # noqa: ANN401  JSON
    """Parse all versions of a schema, the oldest first, without plain bytes."""
    versions = sorted(answer["getSchemaResponses"], key=lambda version: bounded(version["version"]))
    return tuple(schema for schema in map(read_schema, versions) if schema is not None)


def read_version(answer: str) -> tuple[int, ...]:
    """Parse a release such as `4.0.8` or `4.2.0-SNAPSHOT`; empty for other texts."""
    match = re.match(r"(\d{1,3})\.(\d{1,3})(?:\.(\d{1,3}))?(?![.\d])", answer)
    return () if match is None else tuple(int(part) for part in match.groups() if part)


def read_stats(answer: Mapping[str, Any]) -> TopicStats:
    """Parse the statistics of a topic without partitions, or of each partition.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: it is not an answer of a broker.
    """
    parts = answer.get("partitions") or {"": answer}
    bounded(len(parts), MOST_PARTITIONS)
    published = {name: bounded(part.get("msgInCounter", 0)) for name, part in parts.items()}
    producers = [p for part in parts.values() for p in part.get("publishers") or ()]
    metadata = [_text_map(producer.get("metadata")) for producer in producers]
    # Any client of the topic can write it, up to mebibytes.
    short = [{n: t for n, t in texts.items() if len(t) <= LONGEST_TEXT} for texts in metadata]
    return TopicStats(_by_name(map(_subscriptions, parts.values())), published, short)


def read_names(part: Mapping[str, Any]) -> frozenset[str]:
    """Parse the names of the subscriptions of one partition.

    Raises:
        KeyError, TypeError: it is not an answer of a broker.
    """
    return name_set(part["subscriptions"])


def has_transactions(part: Mapping[str, Any]) -> bool:
    """Return True if statistics of one partition name a transaction under way.

    Raises:
        TypeError, ValueError: it is not an answer of a broker.
    """
    return bounded(part.get("ongoingTxnCount") or 0) > 0


def read_receivers(part: Mapping[str, Any]) -> frozenset[str]:
    """Parse the names of the durable subscriptions of one partition that are not Pulsar's own.

    Raises:
        AttributeError, KeyError, TypeError: it is not an answer of a broker.
    """
    return frozenset(
        name
        for name, subscription in part["subscriptions"].items()
        if subscription.get("isDurable", True) and not name.startswith(SYSTEM_PREFIX)
    )


def read_usage(part: Mapping[str, Any], subscription: str) -> TopicUsage:
    """Parse the usage of one partition, or of a topic without partitions.

    Args:
        part: its statistics, including producers.
        subscription: see `TopicUsage`.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: it is not an answer of a broker.
    """
    by_name, stored = _subscriptions(part), bounded(part["storageSize"])
    return TopicUsage(by_name, len(part["publishers"]), 0 if subscription in by_name else stored)


def combine_partitions(parts: Iterable[TopicUsage]) -> TopicUsage:
    """Combine the usage of the partitions of a topic."""
    parts = list(parts)
    return TopicUsage(
        subscriptions=_by_name(part.subscriptions for part in parts),
        producers=max((part.producers for part in parts), default=0),
        uncounted=sum(part.uncounted for part in parts),
    )


def _subscriptions(part: Mapping[str, Any]) -> dict[str, SubscriptionStats]:
    return {name: _read_subscription(stats) for name, stats in part["subscriptions"].items()}


def _by_name(parts: Iterable[Mapping[str, SubscriptionStats]]) -> dict[str, SubscriptionStats]:
    by_name: dict[str, list[SubscriptionStats]] = {}
    for part in parts:
        for name, stats in part.items():
            by_name.setdefault(name, []).append(stats)
    return {name: _combine(stats) for name, stats in by_name.items()}


def _read_subscription(stats: Mapping[str, Any]) -> SubscriptionStats:
    oldest = bounded(stats.get("earliestMsgPublishTimeInBacklog", 0))
    unacknowledged = bounded(stats.get("unackedMessages", 0))
    held = [bounded(consumer.get("unackedMessages", 0)) for consumer in stats["consumers"]]
    return SubscriptionStats(
        backlog=max(0, bounded(stats["msgBacklog"])),
        delivered=bounded(stats["msgOutCounter"]),
        consumers=len(stats["consumers"]),
        durable=bool(stats.get("isDurable", True)),
        ack_holes=bounded(stats.get("nonContiguousDeletedMessagesRanges", 0)),
        oldest=datetime.fromtimestamp(oldest / 1_000, UTC) if oldest > 0 else None,
        unacknowledged=unacknowledged,
        stranded=max(0, unacknowledged - sum(held)) if held else 0,
        bytes=max(0, bounded(stats.get("backlogSize", 0))),  # -1 if not requested
        delayed=bounded(stats.get("msgDelayed", 0)),
        type=str(stats.get("type", "")) if stats["consumers"] else "",
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
        partitions=len(parts),
    )


class Supported(NamedTuple):
    """Release lines of a kind of broker that redrive is tested with."""

    name: str
    oldest: tuple[int, int]
    newest: tuple[int, int]


PULSAR_RELEASES = Supported("Pulsar", (4, 0), (4, 2))
ROCKETMQ_RELEASES = Supported("RocketMQ", (5, 5), (5, 5))
