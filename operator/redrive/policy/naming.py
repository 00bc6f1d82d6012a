"""Names of topics: the only module that builds or parses them; pure.

Derived names cannot be reversed: `orders-eu` with subscription `billing` and `orders` with
`eu-billing` result in one name. So the origin of a message is stored in its envelope and never
derived from a name.
"""

from __future__ import annotations

import enum
import re
import struct
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Self

from redrive.errors import InvalidSpecError

DEAD_LETTER_SUBSCRIPTION = "redrive"
"""Durable subscription of dead letters: a topic without subscription retains nothing."""

LEDGER_SUFFIX = "-LEDGER"
LEDGER_SUBSCRIPTION = "__compaction"
"""Subscription of the broker on compacted topics; it retains messages until their compaction."""
SEQUENCES_SUFFIX = "-SEQUENCES"

MAX_NAME = 255
_NO_STEP = r"(?!\.\.?(?:/|\Z))"  # in a URL, . and .. are resolved
_ENTITY = rf"{_NO_STEP}[-=:.\w]+"  # characters that Pulsar allows in a tenant or namespace
_LOCAL = rf"{_NO_STEP}[^/\s\x00-\x1f\x7f]+"
_TOPIC = re.compile(rf"persistent://({_ENTITY})/({_ENTITY})/({_LOCAL})", re.ASCII)
_SUBSCRIPTION = re.compile(_LOCAL)
PARTITION_SUFFIX = re.compile(r"-partition-(\d+)\Z")

SYSTEM_PREFIX = "__"
"""Prefix of Pulsar's system names: of topics such as `__change_events`, which holds topic policies,
and of subscriptions such as `__compaction`."""
PENDING_ACKS = "__transaction_pending_ack"
"""Part of the names of topics in which Pulsar stores acknowledgements within transactions."""
SYSTEM_NAMESPACE = "pulsar/system"
HEALTH_CHECK = "healthcheck"
"""Name of a topic in a namespace of each broker, in the tenant of `SYSTEM_NAMESPACE`."""
_SYSTEM_TENANT = SYSTEM_NAMESPACE.partition("/")[0]
SYSTEM_TOPIC = (
    "the topic is a system topic of Pulsar, as are all whose names begin with __ or contain "
    "__transaction_pending_ack: other messages there stop brokers, or change topic policies"
)
SYSTEM_SUBSCRIPTION = (
    "a subscription whose name begins with __ or contains __transaction_pending_ack belongs to "
    "Pulsar, or leads to a system topic"
)


class Scheme(enum.StrEnum):
    """Naming scheme of the topics of a source topic and subscription."""

    PULSAR = "Pulsar"
    SUBSCRIPTION_UPPER = "SubscriptionUpper"
    SUBSCRIPTION_LOWER = "SubscriptionLower"
    ROCKETMQ = "RocketMQ"


_DERIVED = re.compile(
    rf"(?:.*(?:-RETRY|-DLQ|-retry|-dlq)(?:{LEDGER_SUFFIX}|{SEQUENCES_SUFFIX})?|%(?:RETRY|DLQ)%.*)"
)

# Names of the retry topic and the dead-letter topic. All schemes but the first leave the topic out:
# two topics of a namespace that have a subscription of the same name then collide.
_FORMS: Mapping[Scheme, tuple[str, str]] = MappingProxyType(
    {
        Scheme.PULSAR: ("{topic}-{subscription}-RETRY", "{topic}-{subscription}-DLQ"),
        Scheme.SUBSCRIPTION_UPPER: ("{subscription}-RETRY", "{subscription}-DLQ"),
        Scheme.SUBSCRIPTION_LOWER: ("{subscription}-retry", "{subscription}-dlq"),
        Scheme.ROCKETMQ: ("%RETRY%{subscription}", "%DLQ%{subscription}"),
    }
)


class TopicName(str):
    """A persistent topic, partitioned or not: the text `persistent://tenant/namespace/local`.

    Attributes:
        namespace_name: the Pulsar namespace as `tenant/namespace`.
    """

    __slots__ = ("local", "namespace", "namespace_name", "tenant")

    tenant: str
    namespace: str
    local: str
    namespace_name: str

    def __new__(cls, tenant: str, namespace: str, local: str) -> Self:
        """Return the topic with these parts, which are not validated."""
        name = super().__new__(cls, f"persistent://{tenant}/{namespace}/{local}")
        name.tenant, name.namespace, name.local = tenant, namespace, local
        name.namespace_name = f"{tenant}/{namespace}"
        return name

    def __getnewargs__(self) -> tuple[str, str, str]:  # type: ignore[override]
        return self.tenant, self.namespace, self.local

    @classmethod
    def parse(cls, text: str) -> TopicName:
        """Parse a full topic name, possibly of a partition.

        Raises:
            InvalidSpecError: it is not `persistent://tenant/namespace/name`.
        """
        match = _TOPIC.fullmatch(text) if isinstance(text, str) else None
        if match is None or len(match[3]) > MAX_NAME:
            raise InvalidSpecError(
                "a topic must be written as persistent://tenant/namespace/name, the name without "
                f"slashes or white space and of at most {MAX_NAME} characters, no part . or ..",
                got=text[:128] if isinstance(text, str) else text,
                remedy="use the full name of a persistent topic",
            )
        return cls(*match.groups())

    @classmethod
    def parse_whole(cls, text: str) -> TopicName:
        """Parse the name of a topic that a policy or a Replay may use.

        Raises:
            InvalidSpecError: it is not a topic name, or names a partition or a system topic.
        """
        topic = cls.parse(text)
        if topic.is_system:
            raise InvalidSpecError(
                SYSTEM_TOPIC, got=text[:128], remedy="use a topic of an application"
            )
        if topic.without_partition() != topic:
            raise InvalidSpecError(
                "a policy applies to a whole topic, not to one partition of it",
                got=text[:128],
                remedy=f"use the topic itself: {topic.without_partition()}",
            )
        return topic

    @property
    def is_system(self) -> bool:
        """Return True if Pulsar owns the topic, or a partition of it, even if URL-encoded."""
        local = _decoded(self.local)
        if local.startswith(SYSTEM_PREFIX) or PENDING_ACKS in local:
            return True
        is_health_check = PARTITION_SUFFIX.sub("", local) == HEALTH_CHECK
        return self.namespace_name == SYSTEM_NAMESPACE or (
            self.tenant == _SYSTEM_TENANT and is_health_check
        )

    def sibling(self, local: str) -> TopicName:
        """Return another topic of the same namespace."""
        return TopicName(self.tenant, self.namespace, local)

    def partition(self, index: int) -> TopicName:  # type: ignore[override]  # not that of text
        """Return partition *index* of this partitioned topic."""
        return self.sibling(f"{self.local}-partition-{index}")

    def without_partition(self) -> TopicName:
        """Return the topic of this partition; the topic itself if it is not one."""
        return self.sibling(PARTITION_SUFFIX.sub("", self.local))


def _decoded(local: str) -> str:
    if "%" not in local:
        return local
    from urllib.parse import unquote  # noqa: PLC0415  few consumers need it

    while (decoded := unquote(local)) != local:
        local = decoded
    return local


def check_subscription(name: str) -> str:
    """Return *name* if it is valid as a subscription and as part of a topic name.

    Raises:
        InvalidSpecError: it is empty, too long, `.` or `..`, has a slash, white space or control
            character, or belongs to Pulsar.
    """
    if len(name) > MAX_NAME or not _SUBSCRIPTION.fullmatch(name):
        raise InvalidSpecError(
            f"a subscription must have 1 to {MAX_NAME} characters without slashes or white space, "
            "and not be . or .., because topic names and URLs contain it",
            got=name[:128],
            remedy="use another subscription name",
        )
    if name.startswith(SYSTEM_PREFIX) or PENDING_ACKS in name:
        raise InvalidSpecError(
            SYSTEM_SUBSCRIPTION, got=name[:128], remedy="use another subscription name"
        )
    return name


def cursor_name(subscription: str) -> str:
    """Return the name of a subscription's cursor in `internalStats`, encoded as Java does."""
    from urllib.parse import quote_plus  # noqa: PLC0415  few consumers need it

    return quote_plus(subscription, safe="*").replace("~", "%7E")


def check_sibling(topic: TopicName, source: TopicName) -> TopicName:
    """Return *topic*, a retry or dead-letter topic, if its name is valid beside its source topic.

    Raises:
        InvalidSpecError: it is a partition, or is in another tenant or namespace.
    """
    TopicName.parse_whole(str(topic))
    if topic.namespace_name != source.namespace_name:
        raise InvalidSpecError(
            "retry and dead-letter topic must be in the tenant and namespace of their source "
            f"topic, {source.namespace_name}",
            got=str(topic),
            remedy="use a topic of that namespace, or leave the name to the scheme",
        )
    return topic


def is_derived(topic: TopicName) -> bool:
    """Return True if a topic is named like a retry, dead-letter, ledger or sequences topic.

    Names of all schemes count. Applications can give their own topics such a name: use this to
    filter lists, never to decide about rights or deletion.
    """
    return _DERIVED.fullmatch(topic.without_partition().local) is not None


def retry_topic(topic: TopicName, subscription: str, scheme: Scheme = Scheme.PULSAR) -> TopicName:
    """Return the topic where messages of *subscription* wait for their next attempt."""
    return _derived(_FORMS[scheme][0], topic.without_partition(), subscription)


def dead_letter_topic(
    topic: TopicName, subscription: str, scheme: Scheme = Scheme.PULSAR
) -> TopicName:
    """Return the topic of the dead letters of *subscription*."""
    return _derived(_FORMS[scheme][1], topic.without_partition(), subscription)


def ledger_topic(dead_letter: TopicName) -> TopicName:
    """Return the topic that records which messages of a dead-letter topic Replays moved."""
    return _beside(dead_letter, LEDGER_SUFFIX)


def sequences_topic(dead_letter: TopicName) -> TopicName:
    """Return the topic that records which keys have messages in a dead-letter topic."""
    return _beside(dead_letter, SEQUENCES_SUFFIX)


def origins(name: TopicName) -> Iterator[tuple[TopicName, str]]:
    """Yield each source topic and subscription whose name in the scheme Pulsar is *name*.

    Java clients use that scheme by default.
    """
    for suffix in ("-RETRY", "-DLQ"):
        parts = name.local.removesuffix(suffix).split("-")
        if name.local.endswith(suffix):
            for count in range(1, len(parts)):
                topic, subscription = "-".join(parts[:count]), "-".join(parts[count:])
                if topic and subscription:
                    yield name.sibling(topic), subscription


def partition_of_key(key: str, partitions: int) -> int:
    """Return the index of the partition that Java's producers choose for a key.

    Args:
        key: any text, even empty.
        partitions: number of partitions, at least 1.
    """
    code = 0
    text = key.encode("utf-16-le", "surrogatepass")
    for unit in struct.unpack(f"<{len(text) // 2}H", text):
        code = (31 * code + unit) & 0xFFFFFFFF
    return (code & 0x7FFFFFFF) % partitions


def _beside(dead_letter: TopicName, suffix: str) -> TopicName:
    local = dead_letter.local
    if len(local) > MAX_NAME - len(suffix):
        import hashlib  # noqa: PLC0415  few consumers need it

        digest = hashlib.sha256(local.encode()).hexdigest()[:16]
        local = f"{local[: MAX_NAME - len(suffix) - len(digest) - 1]}-{digest}"
    return dead_letter.sibling(f"{local}{suffix}")


def _derived(form: str, topic: TopicName, subscription: str) -> TopicName:
    return topic.sibling(form.format(topic=topic.local, subscription=subscription))
