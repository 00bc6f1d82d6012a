"""Names of topics: the one place that builds or takes apart any.

Derived names have no inverse: `orders-eu` with subscription `billing` and `orders` with
`eu-billing` meet in one name. So the origin of a message travels in its envelope and is never
read back from a name.
"""

from __future__ import annotations

import enum
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from redrive.errors import InvalidSpecError

DEAD_LETTER_SUBSCRIPTION = "redrive"
"""The durable subscription that keeps dead letters: a topic without one keeps nothing."""

LEDGER_SUFFIX = "-LEDGER"
LEDGER_SUBSCRIPTION = "__compaction"
"""The broker's own, of a compacted topic: what it has not compacted yet is kept for it."""
SEQUENCES_SUFFIX = "-SEQUENCES"

MAX_NAME = 255
_NO_STEP = r"(?!\.\.?(?:/|\Z))"  # in an address, . and .. lead to another place
_ENTITY = rf"{_NO_STEP}[-=:.\w]+"  # what Pulsar accepts as the name of a tenant or namespace
_LOCAL = rf"{_NO_STEP}[^/\s\x00-\x1f\x7f]+"
_TOPIC = re.compile(rf"persistent://({_ENTITY})/({_ENTITY})/({_LOCAL})", re.ASCII)
_SUBSCRIPTION = re.compile(_LOCAL)
PARTITION_SUFFIX = re.compile(r"-partition-(\d+)\Z")

SYSTEM_PREFIX = "__"
"""Names that begin with it are Pulsar's own: of topics such as `__change_events`, which holds topic
policies, and of subscriptions such as `__compaction`."""
PENDING_ACKS = "__transaction_pending_ack"
"""Part of the names of topics in which Pulsar keeps acknowledgements within transactions."""
SYSTEM_NAMESPACE = "pulsar/system"
HEALTH_CHECK = "healthcheck"
"""The name of a topic in a namespace of each broker, of the tenant of `SYSTEM_NAMESPACE`."""
_SYSTEM_TENANT = SYSTEM_NAMESPACE.partition("/")[0]
SYSTEM_TOPIC = (
    "the topic is one of Pulsar's own, as are all whose names begin with __ or contain "
    "__transaction_pending_ack: other messages there stop brokers, or change topic policies"
)
SYSTEM_SUBSCRIPTION = (
    "a subscription whose name begins with __ or contains __transaction_pending_ack is one of "
    "Pulsar's own, or leads to a topic of Pulsar's own"
)


class Scheme(enum.StrEnum):
    """How topics are named after a source topic and a subscription."""

    PULSAR = "Pulsar"
    SUBSCRIPTION_UPPER = "SubscriptionUpper"
    SUBSCRIPTION_LOWER = "SubscriptionLower"
    ROCKETMQ = "RocketMQ"

    @classmethod
    def parse(cls, text: str) -> Scheme:
        """Read the name of a scheme.

        Raises:
            InvalidSpecError: there is none of that name.
        """
        try:
            return cls(text)
        except ValueError:
            raise InvalidSpecError(
                "the naming scheme is an unknown one",
                got=text[:64],
                remedy=f"use one of {', '.join(cls)}",
            ) from None


_DERIVED = re.compile(
    rf"(?:.*(?:-RETRY|-DLQ|-retry|-dlq)(?:{LEDGER_SUFFIX}|{SEQUENCES_SUFFIX})?|%(?:RETRY|DLQ)%.*)"
)

# The retry topic and the dead-letter topic. All but the first leave the topic out, so that two
# topics of a namespace which share a subscription's name share these too: a collision.
_FORMS: Mapping[Scheme, tuple[str, str]] = MappingProxyType(
    {
        Scheme.PULSAR: ("{topic}-{subscription}-RETRY", "{topic}-{subscription}-DLQ"),
        Scheme.SUBSCRIPTION_UPPER: ("{subscription}-RETRY", "{subscription}-DLQ"),
        Scheme.SUBSCRIPTION_LOWER: ("{subscription}-retry", "{subscription}-dlq"),
        Scheme.ROCKETMQ: ("%RETRY%{subscription}", "%DLQ%{subscription}"),
    }
)


@dataclass(frozen=True, order=True)
class TopicName:
    """A persistent topic, partitioned or not: `persistent://tenant/namespace/local`."""

    tenant: str
    namespace: str
    local: str

    @classmethod
    def parse(cls, text: str) -> TopicName:
        """Read a full topic name, which may name one partition.

        Raises:
            InvalidSpecError: it is not `persistent://tenant/namespace/name`.
        """
        match = _TOPIC.fullmatch(text)
        if match is None or len(match[3]) > MAX_NAME:
            raise InvalidSpecError(
                "a topic is written persistent://tenant/namespace/name, the name without "
                f"slashes or white space and of at most {MAX_NAME} characters, no part . or ..",
                got=text[:128],
                remedy="give the full name of a persistent topic",
            )
        return cls(*match.groups())

    @classmethod
    def parse_whole(cls, text: str) -> TopicName:
        """Read the name of a topic that a policy or a Replay may use.

        Raises:
            InvalidSpecError: it is no topic name, names a partition, or names a topic of Pulsar's
                own.
        """
        topic = cls.parse(text)
        if topic.is_system:
            raise InvalidSpecError(
                SYSTEM_TOPIC, got=text[:128], remedy="name a topic of an application"
            )
        if topic.without_partition() != topic:
            raise InvalidSpecError(
                "a policy is for a whole topic, not for one partition of it",
                got=text[:128],
                remedy=f"name the topic itself: {topic.without_partition()}",
            )
        return topic

    def __str__(self) -> str:
        return f"persistent://{self.tenant}/{self.namespace}/{self.local}"

    @property
    def namespace_name(self) -> str:
        """Return the Pulsar namespace as `tenant/namespace`."""
        return f"{self.tenant}/{self.namespace}"

    @property
    def is_system(self) -> bool:
        """Return True if Pulsar owns the topic, or a partition of it, however it is encoded."""
        local = _decoded(self.local)
        if local.startswith(SYSTEM_PREFIX) or PENDING_ACKS in local:
            return True
        is_health_check = PARTITION_SUFFIX.sub("", local) == HEALTH_CHECK
        return self.namespace_name == SYSTEM_NAMESPACE or (
            self.tenant == _SYSTEM_TENANT and is_health_check
        )

    def sibling(self, local: str) -> TopicName:
        """Name another topic of the same namespace."""
        return TopicName(self.tenant, self.namespace, local)

    def partition(self, index: int) -> TopicName:
        """Name partition *index* of this partitioned topic."""
        return self.sibling(f"{self.local}-partition-{index}")

    def without_partition(self) -> TopicName:
        """Name the partitioned topic that this is a partition of; itself if it is none."""
        return self.sibling(PARTITION_SUFFIX.sub("", self.local))


def _decoded(local: str) -> str:
    if "%" not in local:
        return local
    from urllib.parse import unquote  # noqa: PLC0415  few consumers need it

    while (decoded := unquote(local)) != local:
        local = decoded
    return local


def check_subscription(name: str) -> str:
    """Return *name* if it can be a subscription and part of a topic's name.

    Raises:
        InvalidSpecError: it is empty, too long, `.` or `..`, holds a slash, white space or control
            character, or is one of Pulsar's own.
    """
    if len(name) > MAX_NAME or not _SUBSCRIPTION.fullmatch(name):
        raise InvalidSpecError(
            f"a subscription is 1 to {MAX_NAME} characters without slashes or white space, and not "
            ". or .., because topics and addresses are made of it",
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


def check_sibling(given: TopicName, source: TopicName) -> TopicName:
    """Return *given*, the name of a policy's own topic, if it can stand beside its source topic.

    Raises:
        InvalidSpecError: it names a partition, or lies in another tenant or namespace.
    """
    TopicName.parse_whole(str(given))
    if given.namespace_name != source.namespace_name:
        raise InvalidSpecError(
            "retry and dead-letter topic lie in the tenant and namespace of their source topic, "
            f"{source.namespace_name}",
            got=str(given),
            remedy="name a topic of that namespace, or leave the name to the scheme",
        )
    return given


def is_derived(topic: TopicName) -> bool:
    """Return True if a topic is a retry topic, a dead-letter topic or one beside it, by its name.

    Names of all schemes count, and those of ledger and sequences topics. Any application can give
    its own topic such a name: use this to leave topics out of a listing, never to decide about
    rights or deletion.
    """
    return _DERIVED.fullmatch(topic.without_partition().local) is not None


def retry_topic(topic: TopicName, subscription: str, scheme: Scheme = Scheme.PULSAR) -> TopicName:
    """Name the topic where messages of *subscription* wait for their next attempt."""
    return _derived(_FORMS[scheme][0], topic.without_partition(), subscription)


def dead_letter_topic(
    topic: TopicName, subscription: str, scheme: Scheme = Scheme.PULSAR
) -> TopicName:
    """Name the topic where the dead letters of *subscription* rest."""
    return _derived(_FORMS[scheme][1], topic.without_partition(), subscription)


def ledger_topic(dead_letter: TopicName) -> TopicName:
    """Name the topic that records which messages of a dead-letter topic were moved by replays."""
    return _beside(dead_letter, LEDGER_SUFFIX)


def sequences_topic(dead_letter: TopicName) -> TopicName:
    """Name the topic that records which keys have messages in a dead-letter topic."""
    return _beside(dead_letter, SEQUENCES_SUFFIX)


def origins(name: TopicName) -> Iterator[tuple[TopicName, str]]:
    """Yield each source topic and subscription for which Pulsar's scheme leads to *name*.

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
        key: a text, which may be empty.
        partitions: their number, at least 1.
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
