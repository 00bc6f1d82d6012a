"""RocketMQ in the API: the cluster of a BrokerConnection, and the kind RocketMQRetryPolicy.

The kind has only fields that a RocketMQ broker obeys. So it is not a RetryPolicy with exceptions.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Annotated

from pydantic import AfterValidator, Field, Strict

from redrive.api import model
from redrive.api.permissions import (
    MAX_PATTERNS,
    MAX_RULES,
    NAMESPACE,
    Consent,
    HostPattern,
    MaskedPayloads,
    NamespaceRule,
    PolicyLimits,
    consent,
)
from redrive.api.policy_defaults import Delay
from redrive.api.retrypolicy import (
    ConnectionRef,
    ManagementPolicy,
    Ordering,
    SharedPolicyStatus,
    fixed,
)
from redrive.policy.ladder import LEVELS
from redrive.policy.values import Patterns, parse_duration

MAX_NAME = 100
"""Maximum characters of a topic or group: a broker limits the names that it derives to 255."""
DEFAULT_RETRIES = 16
DEFAULT_LADDER = LEVELS[2:]
"""Delays of RocketMQ, which starts at the third of its levels."""

HostPort = Annotated[
    str,
    Field(max_length=260),
    model.Form(
        r"([-._a-zA-Z0-9]+|\[[:a-fA-F0-9]+\]):[0-9]{1,5}",
        "an address of a name server must be written as host:port",
        "write it like rocketmq-namesrv.rocketmq.svc:9876",
    ),
]
NamePattern = Annotated[
    str,
    Field(max_length=255),
    model.Form(
        r"[-*_{}a-zA-Z0-9]+",
        "a pattern must be letters, digits, '-', '_' and '*', which stands for any characters",
        "write it like shop-*",
    ),
]


def _not_of_broker(
    names: str, problem: str, remedy: str
) -> tuple[model.Rule, Callable[[str], str]]:
    """Return the rule that a name is not reserved, and its check in Python.

    Args:
        names: pattern of reserved names.
        problem: problem of such a name.
        remedy: its remedy.
    """
    rule = model.Rule(f"!self.matches('^({names})$')", problem, remedy, got=model.QUOTED)

    def check(name: str) -> str:
        if re.fullmatch(names, name):
            raise rule.error(name)
        return name

    return rule, check


_NO_SYSTEM_TOPIC, queue_topic = _not_of_broker(
    "(rmq_sys_|RMQ_SYS_|redrive-ledger-).*|TBW102|SCHEDULE_TOPIC_XXXX|BenchmarkTest|"
    "SELF_TEST_TOPIC|TRANS_CHECK_MAX_TIME_TOPIC|OFFSET_MOVED_EVENT|CHECKPOINT_TOPIC",
    "a topic must not be one of the broker, or a ledger of redrive",
    "use a topic of an application",
)
_NO_SYSTEM_GROUP, _queue_group = _not_of_broker(
    "CID_(RMQ_SYS_|ONSAPI_|ONS-HTTP-PROXY).*|SELF_TEST_C_GROUP|"
    "(DEFAULT|FILTERSRV|SCHEDULE|TOOLS|__MONITOR)_CONSUMER",
    "a group must not be one of the broker",
    "use a group of an application",
)
APPLICATION_TOPIC = _NO_SYSTEM_TOPIC, AfterValidator(model.refusing(queue_topic))
_APPLICATION_GROUP = _NO_SYSTEM_GROUP, AfterValidator(model.refusing(_queue_group))


def _name(field: str) -> tuple[object, ...]:
    return (
        Field(max_length=MAX_NAME),
        model.Form(
            r"[-_a-zA-Z0-9]+",
            f"`{field}` must be letters, digits, '-' and '_', at most {MAX_NAME} of them",
            "use the name of an application, without %RETRY% or %DLQ%",
        ),
        fixed(field, "RocketMQRetryPolicy"),
    )


class AccessKey(model.ApiModel):
    """An access key of RocketMQ."""

    user: Annotated[
        str,
        Field(max_length=255),
        model.Form(
            r"[^\s\x00-\x1f\x7f]+",
            "`user` must be the name of a user of RocketMQ, without white space",
            "use the name that mqadmin listUser shows",
        ),
    ]
    """Name of the user, which clients call the access key. Example: `redrive`."""

    secret_ref: model.SecretKeyRef
    """The Secret and its key that contain the secret key, as text."""


class RocketMQAuthenticationType(enum.StrEnum):
    """Kind of credentials for RocketMQ."""

    ACCESS_KEY = "AccessKey"
    NONE = "None"


class RocketMQAuthentication(model.TypedUnion):
    """Credentials at a RocketMQ cluster."""

    MEMBERS = {RocketMQAuthenticationType.ACCESS_KEY.value: "accessKey"}  # noqa: RUF012
    RULES = (model.of_its_type("authentication", MEMBERS),)

    type: Annotated[
        RocketMQAuthenticationType,
        *model.one_of(RocketMQAuthenticationType, "`type` of `authentication`"),
    ]
    """Kind of credentials: `AccessKey` with the field `accessKey`. `None` is for development
    clusters without authentication."""

    access_key: AccessKey | None = None
    """User and secret key, which sign each call. The Secret of the operator must be in the
    namespace of the BrokerConnection, that of jobs in the namespaces of the Inspections."""


class RocketMQRule(NamespaceRule):
    """Topics and groups that policies of some Kubernetes namespaces may use."""

    topics: Annotated[tuple[NamePattern, ...], model.items(MAX_PATTERNS, model.SET)]
    """Topics that policies may have as source topics, and Replays as targets, as patterns. `*`
    stands for any characters, `{namespace}` for the Kubernetes namespace of the policy. Example:
    `["shop-*"]`."""

    groups: Annotated[tuple[NamePattern, ...], model.items(MAX_PATTERNS, model.SET)]
    """Consumer groups that policies may change, as patterns likewise. Put a
    `_` after `{namespace}`: no namespace contains one. Examples: `["shop-fulfilment"]`;
    `["{namespace}_*"]`."""

    deletion: Annotated[Consent, *consent("deletion")] = Consent.NEVER
    """`Allowed`: a `deletionPolicy` may delete these groups, with their retry and dead-letter
    topics. Defaults to Never."""

    limits: PolicyLimits | None = None
    """Limits for each namespace of the rule. If several rules apply to a namespace, the highest
    value applies. Defaults to 100 policies. Example: `{policies: 20}`."""

    def covers(self, namespace: str, topic: str, group: str) -> bool:
        """Return True if a policy of *namespace* may use *group* of *topic*."""
        return _matches(self.topics, namespace, topic) and _matches(self.groups, namespace, group)


def _matches(patterns: tuple[str, ...], namespace: str, name: str) -> bool:
    return Patterns(tuple(p.replace(NAMESPACE, namespace) for p in patterns), but="\n").match(name)


class RocketMQJobs(model.ApiModel):
    """Access of jobs to the cluster, which differs from the operator's."""

    authentication: RocketMQAuthentication
    """Credentials of the jobs. Their pods mount the Secret; the operator never reads it. All users
    need the rights `Get` and `Sub` on dead-letter topics, and `Sub` on their groups. Those of
    Replays also need `Get` on groups, and `Get`, `Sub` and `Pub` on source topics and other targets
    and on the topics `redrive-ledger-*`."""

    tls: model.Tls | None = None
    """Verification of certificates by jobs. Required if `spec.rocketmq.tls` is set. Defaults to
    connections without TLS."""


class RocketMQInspection(MaskedPayloads, RocketMQJobs):
    """Access of the jobs of Inspections to the cluster, which differs from the operator's."""


class RocketMQReplays(RocketMQJobs):
    """Access of the jobs of Replays to the cluster, which differs from the operator's."""

    approval_above: model.ApprovalAbove | None = None
    """Number of messages that a Replay may move without approval. A Replay of more messages waits
    for a ReplayApproval. Defaults to no limit."""


class RocketMQCluster(model.ApiModel):
    """A RocketMQ cluster: its name servers, the operator's credentials, and permissions."""

    name_servers: Annotated[tuple[HostPort, ...], Field(min_length=1, max_length=16)]
    """Addresses of the name servers, as `host:port`; the first that answers is used. Example:
    `["rocketmq-namesrv.rocketmq.svc:9876"]`."""

    cluster: (
        Annotated[
            str,
            Field(max_length=255),
            model.Form(
                r"[^\x00-\x1f\x7f]+",
                "`cluster` must be the name of a cluster",
                "use the name that mqadmin clusterList shows",
            ),
        ]
        | None
    ) = None
    """Name of the cluster. Defaults to the only cluster that the name servers know. Example:
    `DefaultCluster`."""

    broker_hosts: Annotated[tuple[HostPattern, ...], model.items(64, model.SET)] = ()
    """Hosts of brokers, beside those of `nameServers`, to which the operator may send signed calls,
    as patterns: `*` stands for any characters but a dot. A pattern without a port covers all ports.
    Defaults to none. Example: `["rocketmq-broker-*.rocketmq.svc"]`."""

    authentication: RocketMQAuthentication
    """Credentials of the operator."""

    tls: model.Tls | None = None
    """Verification of the certificates of name servers and brokers. Defaults to connections without
    TLS."""

    allow: Annotated[tuple[RocketMQRule, ...], model.items(MAX_RULES, model.BY_NAME)] = ()
    """Kubernetes namespaces that may use the connection, with their topics and groups, as additive
    rules. Defaults to none: nothing is allowed."""

    inspection: RocketMQInspection | None = None
    """Credentials of the jobs of Inspections. Defaults to none: dead letters of this connection
    cannot be inspected."""

    replay: RocketMQReplays | None = None
    """Credentials of the jobs of Replays. Each policy has a topic `redrive-ledger-GROUP` then, with
    the records of its Replays. Defaults to none: dead letters of this connection cannot be
    replayed."""

    def messages(self, topic: str, group: str, masters: tuple[str, ...] = ()) -> RocketMQMessages:
        """Return the address of a topic that *group* may read; it is known to be at *masters*."""
        servers, hosts = list(self.name_servers), list(self.broker_hosts)
        return RocketMQMessages(topic, group, servers, self.cluster, hosts, masters)


@dataclass(frozen=True)
class RocketMQMessages:
    """Address of a topic of RocketMQ, in the argument of a job.

    Attributes:
        group: consumer group that may read the topic.
        name_servers: see `RocketMQCluster`, also for the following ones.
        masters: names of masters that have the topic, beside those that a name server lists.
    """

    topic: str
    group: str
    name_servers: Sequence[str]
    cluster: str | None
    broker_hosts: Sequence[str]
    masters: tuple[str, ...] = ()


ONE_BROKER = model.Rule(
    "present(self.pulsar) != present(self.rocketmq)",
    "a connection must have exactly one of pulsar and rocketmq",
    "keep one of them",
)
_FIELDS_OF_PULSAR = ("allow", "replay", "inspection", "jobs", "policyDefaults")
ONLY_PULSAR = model.Rule(
    "!present(self.rocketmq) || !("
    + " || ".join(
        f"has(self.{field}) && self.{field}.size() > 0"
        if field == "allow"
        else f"present(self.{field})"
        for field in _FIELDS_OF_PULSAR
    )
    + ")",
    f"{', '.join(_FIELDS_OF_PULSAR)} are for Pulsar: a connection with rocketmq must have none of "
    "them",
    "remove them, and write rules into rocketmq.allow",
)


class ClientKind(enum.StrEnum):
    """Protocol of the consumers of a group."""

    GRPC = "GRPC"
    REMOTING = "Remoting"


class GroupDeletion(enum.StrEnum):
    """Effect of the deletion of a policy on its group."""

    RETAIN = "Retain"
    DELETE = "Delete"


class RocketMQRetryPolicySpec(model.ApiModel):
    """Retries of one consumer group of a RocketMQ topic, and its dead letters."""

    connection_ref: ConnectionRef
    """The BrokerConnection of the cluster, which has `spec.rocketmq`."""

    topic: Annotated[str, *_name("topic"), *APPLICATION_TOPIC]
    """The source topic, 1 to 100 letters, digits, '-' and '_'. It must exist, and the connection
    must allow it. Immutable. Example: `orders`."""

    group: Annotated[str, *_name("group"), *_APPLICATION_GROUP]
    """The consumer group, likewise. It is created if it does not exist. Immutable. Example:
    `fulfilment`."""

    clients: Annotated[ClientKind, *model.one_of(ClientKind, "`clients`")] = ClientKind.GRPC
    """Protocol of the group's consumers. `GRPC`: clients of RocketMQ 5, which obey the policy of
    the group. `Remoting`: older clients, which retry by settings of their own and the broker's
    levels; `maxRetries` and `ladder` are not enforced then. Defaults to GRPC."""

    max_retries: Annotated[int, Strict(), Field(ge=0, le=1_000)] | None = None
    """Number of retries of a message before it becomes a dead letter, 0 to 1000. Defaults to 16."""

    ladder: (
        Annotated[tuple[Delay, ...], Field(max_length=32, json_schema_extra={"minItems": 1})] | None
    ) = None
    """Delays before retry 1, 2, 3 …, 1 to 32 of them, each from 1s to 10d; the last one repeats.
    Ordered groups retry at a fixed interval instead. Defaults to the 16 delays of RocketMQ, from
    10s to 2h. Example: `[10s, 1m, 30m]`."""

    ordering: Annotated[Ordering, *model.one_of(Ordering, "`ordering`")] = Ordering.NONE
    """`PerKey`: the group consumes in order, and a failed message blocks later ones of its queue.
    Defaults to None."""

    retry_queues: Annotated[int, Strict(), Field(ge=1, le=64)] = 1
    """Number of queues of the retry topic at each master, 1 to 64. Defaults to 1."""

    deletion_policy: Annotated[GroupDeletion, *model.one_of(GroupDeletion, "`deletionPolicy`")] = (
        GroupDeletion.RETAIN
    )
    """`Delete`: the deletion of the policy deletes the group and the retry and dead-letter topics,
    each only if redrive created it. A rule of the connection must allow it. `Retain`: they stay.
    Defaults to Retain."""

    management_policy: Annotated[
        ManagementPolicy, *model.one_of(ManagementPolicy, "`managementPolicy`")
    ] = ManagementPolicy.MANAGE
    """`Manage`: redrive creates and repairs group and topics. `Observe`: it changes nothing; the
    condition `DriftDetected` and `status.plannedChanges` show the changes that it would make.
    Defaults to Manage."""

    @property
    def retries(self) -> int:
        """Return the effective number of retries."""
        return DEFAULT_RETRIES if self.max_retries is None else self.max_retries

    @cached_property
    def delays(self) -> tuple[timedelta, ...]:
        """Return the effective delays."""
        return DEFAULT_LADDER if self.ladder is None else tuple(map(parse_duration, self.ladder))

    @property
    def retry_topic(self) -> str:
        """Return the topic of retries of remoting clients; it is a prefix for others."""
        return f"%RETRY%{self.group}"

    @property
    def dead_letter_topic(self) -> str:
        """Return the topic of dead letters."""
        return f"%DLQ%{self.group}"

    @property
    def ledger_topic(self) -> str:
        """Return the topic of the records of Replays."""
        return f"redrive-ledger-{self.group}"


class RocketMQRetryPolicyStatus(SharedPolicyStatus):
    """State of the policy. The operator writes it."""

    retry_topic: Annotated[str, Field(max_length=255)] | None = None
    """Name of the topic of retries. gRPC clients use one for each source topic, which has this
    prefix."""

    dead_letter_topic: Annotated[str, Field(max_length=255)] | None = None
    """Name of the topic of dead letters."""

    masters: (
        Annotated[tuple[Annotated[str, Field(max_length=255)], ...], Field(max_length=64)] | None
    ) = None
    """Masters at which the policy was last provisioned. One that the name servers no longer list
    makes the policy `BrokerUnreachable`; remove its name here if it was removed permanently."""

    dead_letters: Annotated[int, Field(ge=0)] | None = None
    """Number of messages in the dead-letter topic at all masters, handled ones included, when the
    policy was last compared with the cluster."""

    max_retries: int | None = None
    """Effective number of retries. Absent if it is not enforced."""
