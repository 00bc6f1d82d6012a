"""Checks before a policy is provisioned; pure.

`ADMISSION` checks the request without a broker; `PREFLIGHT` checks the observed state. Each check
is named after the violation that it finds. It returns the violation as the error that the
conditions of the policy show, or None.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from redrive.admin.model import NamespaceState
from redrive.api import Body
from redrive.api.permissions import Consent, PolicyLimits
from redrive.api.policy_defaults import DeletionPolicy
from redrive.api.retrypolicy import Adoption, Chaining
from redrive.api.rocketmq import GroupDeletion, RocketMQRetryPolicySpec, RocketMQRule
from redrive.errors import OwnerConflictError, RedriveError
from redrive.kube.resources import ROCKETMQ_POLICIES, TAKE_OVER_FROM, TOPIC_OWNER, Key, is_owned_by
from redrive.policy.naming import TopicName
from redrive.provision import ownership
from redrive.provision.actions import Refused
from redrive.provision.desired import Desired, DesiredTopic, Observed, TopicRole, TopicState
from redrive.provision.ownership import Owner, OwnershipRecord, shown_owner
from redrive.provision.request import ContestedError, Request
from redrive.reasons import Reason

F = TypeVar("F")


class Checks(Generic[F]):
    """Checks of one input, in order."""

    def __init__(self, *checks: Callable[[F], RedriveError | None]) -> None:
        self.checks = checks

    def violations(self, evidence: F) -> Iterator[RedriveError]:
        """Yield the error of each check that fails."""
        return (error for check in self.checks if (error := check(evidence)) is not None)

    def check(self, evidence: F) -> None:
        """Raise the error of the first check that fails."""
        for error in self.violations(evidence):
            raise error


_SHOWN = 5


def topic_is_not_allowed(request: Request) -> RedriveError | None:
    """Find a source topic that the connection does not allow."""
    if request.permissions.allows_topic(request.policy.topic):
        return None
    return Reason.TOPIC_NOT_ALLOWED.error(
        f"spec.topic is not among the topics that the connection allows to namespace "
        f"{request.key.namespace} ({_listed(request.permissions.topics)})",
        got=str(request.policy.topic),
        remedy="add it to a rule of the connection's spec.allow, or use another connection",
    )


def own_topic_is_not_allowed(request: Request) -> RedriveError | None:
    """Find a retry or dead-letter topic that the connection does not allow.

    Users choose the names freely. Topic `orders` with subscription `eu-billing` would give grants
    and Replays access to the retry topic of subscription `billing` of another team's `orders-eu`.
    """
    kinds = ("retry topic", "dead-letter topic")
    topics = request.spec.permitted_topics
    for kind, topic in zip(kinds, topics, strict=False):  # without a dead-letter topic one
        if not request.permissions.allows_topic(topic):
            return Reason.TOPIC_NOT_ALLOWED.error(
                f"namespace {request.key.namespace} may not use this {kind}, which spec.topic, "
                f"spec.subscription and spec.naming result in: no rule of the connection allows it "
                f"({_listed(request.permissions.topics)})",
                got=str(topic),
                remedy="add it to a rule of the connection's spec.allow, or use another "
                "subscription, name or connection",
            )
    return None


def role_is_not_allowed(request: Request) -> RedriveError | None:
    """Find a role that the connection does not allow on a topic that it would get grants on.

    One rule of the connection may allow the topic, and another rule the role, for other topics.
    """
    spec, permitted = request.spec, request.spec.permitted_topics
    granted = (
        ("consumerRoles", spec.consumer_roles, permitted),
        ("deadLetter.readerRoles", spec.dead_letter.reader_roles, permitted[1:]),
    )
    for field, roles, topics in granted:
        refused = request.permissions.first_refused(roles, topics)
        if refused is not None:
            role, topic = refused
            return Reason.ROLE_NOT_ALLOWED.error(
                f"a role of spec.{field} is not among those that the connection allows to "
                f"namespace {request.key.namespace} on {topic} "
                f"({_listed(request.permissions.roles_on(topic))})",
                got=role,
                remedy="add it to a rule for that topic in the connection's spec.allow, or use "
                "another role",
            )
    return None


def deletion_is_not_allowed(request: Request) -> RedriveError | None:
    """Find a deletionPolicy that deletes topics whose deletion the connection does not allow."""
    if request.deletion not in {DeletionPolicy.DELETE_IF_EMPTY, DeletionPolicy.DELETE}:
        return None
    for topic in request.spec.permitted_topics:
        if not request.permissions.allows_deletion(topic):
            return Reason.DELETION_NOT_ALLOWED.error(
                f"with deletionPolicy {request.deletion} the topic would be deleted together with "
                "the policy, which the connection does not allow to namespace "
                f"{request.key.namespace}",
                got=str(topic),
                remedy="use deletionPolicy Retain, or set deletion to Allowed in a rule for that "
                "topic in the connection's spec.allow",
            )
    return None


def group_is_not_allowed(
    spec: RocketMQRetryPolicySpec, namespace: str, rules: Sequence[RocketMQRule]
) -> RedriveError | None:
    """Find a group of RocketMQ that *rules* do not cover, or whose deletion they do not allow."""
    covering = [rule for rule in rules if rule.covers(namespace, spec.topic, spec.group)]
    if not covering:
        return Reason.GROUP_NOT_ALLOWED.error(
            "no rule of the connection allows this group of this topic",
            got=f"group {spec.group}, topic {spec.topic}",
            remedy="add both to a rule of its rocketmq.allow, or use others",
        )
    deletes = spec.deletion_policy is GroupDeletion.DELETE
    if deletes and not any(rule.deletion is Consent.ALLOWED for rule in covering):
        return Reason.DELETION_NOT_ALLOWED.error(
            "no rule of the connection allows to delete this group",
            got=spec.group,
            remedy="set deletionPolicy to Retain, or deletion: Allowed in a rule",
        )
    return None


def most_policies(rules: Sequence[RocketMQRule]) -> int:
    """Return the number of RocketMQRetryPolicies that *rules* allow to a namespace."""
    default = PolicyLimits()
    return max(((rule.limits or default).policies for rule in rules), default=default.policies)


def partitions_exceed_limit(request: Request) -> RedriveError | None:
    """Find a topic with more requested partitions than the connection allows to the namespace."""
    spec = request.spec
    asked = (
        ("retry.partitions", spec.retry.partitions),
        ("deadLetter.partitions", spec.dead_letter.partitions),
    )
    for field, count in asked:
        if (count or 0) > request.permissions.limits.partitions:
            return _too_many_partitions(f"spec.{field} is", count or 0, request)
    return None


def _too_many_partitions(subject: str, count: int, request: Request) -> RedriveError:
    most = request.permissions.limits.partitions
    return Reason.LIMIT_EXCEEDED.error(
        f"{subject} more than the {most} partitions of a topic that the connection allows to "
        f"namespace {request.key.namespace}",
        got=count,
        remedy="set retry.partitions or deadLetter.partitions to fewer, or raise limits.partitions "
        "in a rule of the connection's spec.allow",
    )


def contested_group(group: str, rival: Key, namespace: str) -> ContestedError:
    """Return the error of a policy of a group that *rival*, another policy, manages."""
    return ContestedError(
        f"another policy manages group {group}",
        rival=rival,
        namespace=namespace,
        remedy="delete one of the two",
        reason=Reason.RESOURCE_CONFLICT,
        kind=ROCKETMQ_POLICIES.kind,
    )


def too_many_policies(namespace: str, through: Key, most: int, count: int) -> RedriveError:
    """Return the error of a policy that exceeds the number that its namespace may have."""
    return Reason.LIMIT_EXCEEDED.error(
        f"namespace {namespace} has more policies than the {most} that the BrokerConnection "
        f"{through} allows, and older ones come first",
        got=count,
        remedy="delete unused policies, or raise limits.policies in a rule of the connection; the "
        "policy is then provisioned within minutes",
    )


def _listed(patterns: Sequence[str]) -> str:
    more = [f"and {len(patterns) - _SHOWN} more"] if len(patterns) > _SHOWN else []
    return ", ".join([*patterns[:_SHOWN], *more]) or "which is empty"


ADMISSION = Checks(
    topic_is_not_allowed,
    own_topic_is_not_allowed,
    role_is_not_allowed,
    deletion_is_not_allowed,
    partitions_exceed_limit,
)


def prior_claim(request: Request, winner: Request) -> ContestedError | None:
    """Return the error of a policy if a rival at the same broker has priority.

    Args:
        request: the policy.
        winner: an admissible policy that claims one of its names. An inadmissible policy must not
            block others.
    """
    if not request.yields_to(winner):
        return None
    policy, namespace = request.policy, request.key.namespace
    contested = functools.partial(ContestedError, rival=winner.key, namespace=namespace)
    if winner.subscribes_like(request):
        return contested(
            f"subscription {policy.subscription} of {policy.topic} already has a RetryPolicy, "
            "which keeps it until it is deleted or stalls",
            remedy="delete one of the two",
            reason=Reason.RESOURCE_CONFLICT,
        )
    if winner.policy.topic in request.spec.own_topics:
        return contested(
            "spec.naming gives a topic of this policy the name of the source topic of an older "
            f"RetryPolicy, {winner.policy.topic}, which would be changed as if it held retries",
            remedy="delete this policy and create it again with other names for its topics",
            reason=Reason.NAME_COLLISION,
        )
    named = f", for subscription {winner.policy.subscription} of {winner.policy.topic},"
    return contested(
        f"another RetryPolicy{named if winner.key.namespace == namespace else ''} has "
        "a retry, dead-letter or ledger topic with a name that this policy needs",
        remedy="use another subscription for one of the two policies, or other topic names",
        reason=Reason.NAME_COLLISION,
    )


@dataclass(frozen=True)
class Evidence:
    """Input of `PREFLIGHT` and of warnings: a policy, its desired state and the observed one.

    Attributes:
        rivals: admissible policies that claim one of its names.
        refused: actions that the broker refused and that the policy does not need.
    """

    body: Body
    desired: Desired
    observed: Observed
    request: Request
    rivals: Sequence[Request] = ()
    refused: Sequence[Refused] = ()

    @property
    def blocked(self) -> list[Request]:
        """Return the rivals that this policy blocks, the oldest first."""
        blocked = [rival for rival in self.rivals if rival.yields_to(self.request)]
        return sorted(blocked, key=lambda rival: rival.age)


def has_other_partitioning(want: Desired, have: Observed) -> bool:
    """Return True if the retry topic is partitioned and should not be, or the reverse.

    Also if the dead-letter topic is not partitioned and should be.
    """
    pairs = want.pairs(have)
    return any(_has_other_partitioning(topic, state, have) for topic, state in pairs)


def _has_other_partitioning(
    want: DesiredTopic, have: TopicState | None, observed: Observed
) -> bool:
    if have is None or want.role.holds_records:
        return False
    count = want.count_partitions(observed.source_partitions)
    if want.role is TopicRole.DEAD_LETTER and not count:
        return False  # an existing topic with partitions is kept
    return bool(have.partitions) != bool(count)


def retry_topic_has_other_partitioning(evidence: Evidence) -> RedriveError | None:
    """Find a retry topic that is partitioned and should not be, or the reverse.

    A broker cannot convert one into the other, and the topic holds waiting messages.
    """
    want, retry = evidence.desired.retry, evidence.observed.topics.get(TopicRole.RETRY)
    source = evidence.observed.source_partitions
    if retry is None or not _has_other_partitioning(want, retry, evidence.observed):
        return None
    ways = ["delete it once it is drained, then it is created again"]
    if retry.partitions:
        ways.append(f"set retry.partitions to {retry.partitions}")
    elif not source:
        ways.append("leave retry.partitions out")
    why = "as the source topic has" if want.partitions is None else "as requested"
    return Reason.PARTITIONS_DIFFER.error(
        f"the retry topic {want.name} already exists and should have "
        f"{_partitions(want.count_partitions(source))}, {why}; a broker cannot convert a topic",
        got=_partitions(retry.partitions),
        remedy=", or ".join(ways),
    )


def dead_letter_topic_lacks_partitions(evidence: Evidence) -> RedriveError | None:
    """Find a dead-letter topic without partitions that should have some.

    A broker cannot convert it, and it may hold dead letters.
    """
    want = evidence.desired.topic(TopicRole.DEAD_LETTER)
    have = evidence.observed.topics.get(TopicRole.DEAD_LETTER)
    if want is None or not _has_other_partitioning(want, have, evidence.observed):
        return None
    return Reason.PARTITIONS_DIFFER.error(
        f"the dead-letter topic {want.name} already exists and should have "
        f"{_partitions(want.partitions or 0)}, as requested; a broker cannot "
        "convert a topic",
        got=_partitions(0),
        remedy="delete it once it is empty, then it is created again, or leave "
        "deadLetter.partitions out",
    )


def topic_has_another_owner(evidence: Evidence) -> RedriveError | None:
    """Find a topic of another policy, even of a deleted one, that may not be taken over."""
    for want, have in evidence.desired.pairs(evidence.observed):
        record = OwnershipRecord.of({} if have is None else have.properties or {})
        if not record.may_pass_to(evidence.desired.owner, evidence.request.takes_over):
            return _owner_conflict(want.name, record, evidence.desired.owner)
    return None


def topic_is_not_redrives(evidence: Evidence) -> RedriveError | None:
    """Find a topic that others created and that may not be adopted.

    A topic of records is never adopted: compaction would delete messages of others.
    """
    want = evidence.desired
    for topic, have in want.pairs(evidence.observed):
        if have is None or not _is_free(have, about_to=str(topic.name) in want.creating):
            continue
        if topic.role.holds_records:
            return Reason.TOPIC_EXISTS.error(
                f"the topic {topic.name} exists, and redrive did not create it: the records of the "
                "dead-letter topic need this name",
                remedy="delete the topic, or use another name for the dead-letter topic",
            )
        if evidence.request.spec.adoption is Adoption.NEVER:
            return Reason.TOPIC_EXISTS.error(
                f"the topic {topic.name} exists, and redrive did not create it: adoption would "
                "change its grants and topic policies, and add a subscription",
                got="spec.adoption of Never",
                remedy="use other names for this policy's topics, delete the topic, or set "
                "spec.adoption to IfPresent",
            )
        if not evidence.request.permissions.allows_adoption(topic.name):
            return Reason.ADOPTION_NOT_ALLOWED.error(
                "the connection does not allow policies of namespace "
                f"{evidence.request.key.namespace} to adopt a topic that redrive did not create",
                got=str(topic.name),
                remedy="set adoption to Allowed in a rule for that topic in the connection's "
                "spec.allow, or use other names for this policy's topics",
            )
    return None


def _is_free(have: TopicState, *, about_to: bool) -> bool:
    """Return True if a topic, as read, belongs neither to redrive nor to a policy."""
    if have.properties is None:
        return False
    names = frozenset[str]() if have.subscriptions is None else have.subscriptions.names
    unmarked = ownership.created_unmarked(have.properties, names, about_to=about_to)
    return OwnershipRecord.of(have.properties).is_free and not unmarked


def source_is_of_redrive(evidence: Evidence) -> RedriveError | None:
    """Find a source topic that is a retry, dead-letter or ledger topic of another policy."""
    record = OwnershipRecord.of(evidence.observed.source_properties or {})
    is_allowed = evidence.request.spec.chaining is Chaining.ALLOWED
    if not record.owner or is_allowed or "retryTopic" in _status(evidence.body):
        return None
    return chained(shown_owner(record.owner, evidence.request.key.namespace))


def chained(owner: str) -> RedriveError:
    """Return the error of a policy whose source topic belongs to *owner*."""
    return Reason.CHAINED_POLICY.error(
        "the source topic is a retry, dead-letter or ledger topic of another RetryPolicy; its "
        "messages would be retried again, in topics of this policy",
        got=owner,
        remedy="use the topic that producers send to; to retry this topic, create the policy with "
        "spec.chaining Allowed",
    )


def topics_are_elsewhere(evidence: Evidence) -> RedriveError | None:
    """Find a policy whose connectionRef changed to a broker without its topics."""
    status, have = _status(evidence.body), evidence.observed.topics.get(TopicRole.RETRY)
    former, now = status.get("connection"), str(evidence.request.through)
    record = OwnershipRecord.of({} if have is None else have.properties or {})
    if former in {None, now} or record.is_of(evidence.desired.owner):
        return None
    topics = " and ".join(status[key] for key in ("retryTopic", "deadLetterTopic") if key in status)
    return Reason.BROKER_CHANGED.error(
        f"spec.connectionRef leads to another broker than before: {topics} are at the broker of "
        f"BrokerConnection {former}, with their messages",
        got=f"BrokerConnection {now}",
        remedy="set connectionRef back; to move, create another RetryPolicy for the new broker, "
        "and delete this one once its topics are drained",
    )


def _status(body: Body) -> Mapping[str, Any]:
    return body.get("status") or {}


def _owner_conflict(topic: TopicName, record: OwnershipRecord, ours: Owner) -> RedriveError:
    """Return the error about a topic of another owner, with the way to take it over by *ours*."""
    way = f"pulsar-admin topics remove-properties -k {TOPIC_OWNER} {topic}"
    named = Owner.parse(record.owner)
    if named is not None and record.may_pass_to(ours, {named.key.name}):
        way = (
            f"kubectl annotate retrypolicy --namespace={ours.key.namespace} {ours.key.name} "
            f"{TAKE_OVER_FROM}={named.key.name}"
        )
    return OwnerConflictError(
        f"the topic {topic} belongs to another RetryPolicy, which may be deleted and have retained "
        "it; the topic is not changed",
        owner=record.owner,
        got=shown_owner(record.owner, ours.key.namespace),
        remedy=f"use other names for this policy's topics; to take the topic over, run: {way}",
    )


def namespace_expires_subscriptions(
    source: TopicName, namespace: NamespaceState
) -> RedriveError | None:
    """Find a Pulsar namespace of a source topic that deletes idle subscriptions.

    A topic cannot be exempted. Dead letters have no consumer, so their subscription is always idle.
    """
    minutes, name = namespace.subscription_expiry_minutes, source.namespace_name
    if not minutes:
        return None
    return Reason.SUBSCRIPTION_EXPIRY.error(
        f"the Pulsar namespace {name} deletes idle subscriptions, and with them dead letters "
        "and waiting retries",
        got=f"subscriptionExpirationTime of {minutes} minutes",
        remedy=f"run: pulsar-admin namespaces set-subscription-expiration-time {name} -t 0",
    )


def config_map_is_not_ours(evidence: Evidence) -> RedriveError | None:
    """Find a ConfigMap with the name of the policy's that the policy does not own."""
    config_map = evidence.observed.config_map
    if config_map is None or is_owned_by(config_map, evidence.body):
        return None
    return foreign_config_map(config_map["metadata"]["name"])


def foreign_config_map(name: str) -> RedriveError:
    """Return the error of a policy whose ConfigMap belongs to another owner."""
    return Reason.CONFIG_MAP_NOT_OURS.error(
        "a ConfigMap that this policy does not own has the name that the policy needs",
        got=name,
        remedy="delete or rename that ConfigMap, or give the policy another name",
    )


def _partitions(count: int) -> str:
    return f"{count} partitions" if count else "no partitions"


MAX_RECORD = 2**19
"""Maximum size in bytes of the grants on all topics of a Pulsar namespace.

The broker stores them in one record, which each client of the namespace reads. Its metadata store
limits a record to 1 MiB by default.
"""


def source_has_too_many_partitions(evidence: Evidence) -> RedriveError | None:
    """Find a source topic with more partitions than the retry topic may get."""
    request, retry = evidence.request, evidence.observed.topics.get(TopicRole.RETRY)
    count = evidence.desired.retry.count_partitions(evidence.observed.source_partitions)
    existing = 0 if retry is None else retry.partitions
    if count <= max(request.permissions.limits.partitions, existing):
        return None
    return _too_many_partitions(f"{request.policy.topic} has", count, request)


def rights_exceed_record(evidence: Evidence) -> RedriveError | None:
    """Find grants that would exceed the record of the Pulsar namespace.

    Existing grants are kept, and can be revoked.
    """
    namespace = evidence.observed.namespace
    missing: dict[str, dict[str, frozenset[str]]] = defaultdict(dict)
    for grant in evidence.desired.grants:
        topic, role = str(grant.topic), grant.role
        if not grant.actions <= namespace.permissions.get(topic, {}).get(role, frozenset()):
            missing[topic][role] = grant.actions
    if not missing:
        return None
    size = namespace.size_of_grants + NamespaceState(permissions=missing).size_of_grants
    if size <= MAX_RECORD:
        return None
    return Reason.LIMIT_EXCEEDED.error(
        f"the grants on topics of {evidence.request.policy.topic.namespace_name} would exceed "
        f"{MAX_RECORD} bytes, the limit of the record in which the broker stores them",
        got=size,
        remedy="revoke unused grants, use fewer or shorter roles, or move topics to another Pulsar "
        "namespace",
    )


PREFLIGHT = Checks(
    topics_are_elsewhere,
    source_is_of_redrive,
    topic_has_another_owner,
    retry_topic_has_other_partitioning,
    dead_letter_topic_lacks_partitions,
    topic_is_not_redrives,
    config_map_is_not_ours,
    source_has_too_many_partitions,
    rights_exceed_record,
)
