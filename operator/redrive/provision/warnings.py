"""Warnings about a policy that is ready: named checks on the observed state; pure.

The reconciler publishes them as conditions and Warning Events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from redrive.admin.internal_stats import REQUIRES_ENCRYPTION
from redrive.admin.policies import DelaysWithin
from redrive.api.conditions import StatusWarning, first_of
from redrive.policy.model import SubscriptionType
from redrive.policy.naming import TopicName
from redrive.policy.values import format_duration
from redrive.provision.actions import CopySchema
from redrive.provision.checks import Evidence
from redrive.provision.desired import DELAYS, TopicRole, delay_limit, earliness
from redrive.reasons import Reason

_KEY_VALUE = "KEY_VALUE"
_SENT_WITH_SCHEMA = {"STRING", "JSON", "AVRO", "PROTOBUF", "PROTOBUF_NATIVE"}
"""Schema types that the Python client uses for sending; KeyValue aside, others are sent without."""


def ladder_descends(evidence: Evidence) -> StatusWarning | None:
    """Find a ladder whose delays decrease."""
    if not evidence.request.policy.ladder.descends:
        return None
    return StatusWarning(
        Reason.LADDER_DESCENDS,
        "the delay ladder descends: a later retry has a shorter delay than an earlier one; "
        "sort the delays unless that is intended",
    )


def topics_have_too_many_partitions(evidence: Evidence) -> StatusWarning | None:
    """Find topics with more partitions than desired; a topic cannot shrink.

    For a dead-letter topic only a requested number counts: otherwise it is kept as it is.
    """
    fields = {TopicRole.RETRY: "retry", TopicRole.DEAD_LETTER: "deadLetter"}
    surplus = []
    for topic, have in evidence.desired.pairs(evidence.observed):
        want = topic.count_partitions(evidence.observed.source_partitions)
        is_fixed = want > 0 or topic.role is TopicRole.RETRY
        if have is not None and topic.role in fields and is_fixed and have.partitions > want:
            surplus.append(
                f"{topic.name} should have {want} partitions, and a topic cannot shrink; got "
                f"{have.partitions}; all partitions are consumed, so leave it, or set "
                f"{fields[topic.role]}.partitions to {have.partitions}"
            )
    return StatusWarning(Reason.PARTITIONS_NEVER_SHRINK, "; ".join(surplus)) if surplus else None


def delay_is_limited(evidence: Evidence) -> StatusWarning | None:
    """Find a limit of the broker below the longest delay of the ladder."""
    limit = delay_limit(_policies_of_retry(evidence))
    longest = max(evidence.request.policy.ladder.rungs)
    if limit is None or limit >= longest:
        return None
    return StatusWarning(
        Reason.MAX_DELIVERY_DELAY,
        f"the broker limits delays on {evidence.desired.retry.name} to less than the longest delay "
        f"of the ladder, {format_duration(longest)}; got a maxDeliveryDelay of "
        f"{limit.total_seconds():g} s; shorten the ladder, or raise the limit of the topic: "
        "pulsar-admin topicPolicies set-delayed-delivery --enable --maxDelay "
        f"{format_duration(longest)} {evidence.desired.retry.name}",
    )


def delayed_delivery_is_refused(evidence: Evidence) -> StatusWarning | None:
    """Find a broker that does not let the operator set delayed delivery."""
    refused = [r for r in evidence.refused if not isinstance(r.action, CopySchema)]
    if not refused:
        return None
    policies, shortest = _policies_of_retry(evidence), evidence.request.shortest_delay
    if policies.get(DELAYS.read) is None:
        effect = "retries are early by the unknown tick of the broker's configuration"
    elif (early := earliness(policies)) is None:
        effect = "retries are delivered immediately, without their delay"
    else:
        effect = (
            f"retries may come {early.total_seconds():g} s early, and the shortest delay is "
            f"{format_duration(shortest)}"
        )
    return StatusWarning(
        Reason.DELAYED_DELIVERY_REFUSED,
        f"delayed delivery of {evidence.desired.retry.name} could not be set, so {effect}: "
        f"{refused[0].error}; allow the operator's role to set it",
    )


def retries_come_early(evidence: Evidence) -> StatusWarning | None:
    """Find delays that may end at once: within a tick of a broker whose tick cannot be set."""
    policies = _policies_of_retry(evidence)
    sets_tick = any(isinstance(p, DelaysWithin) for p in evidence.desired.retry.policies)
    if sets_tick or policies.get(DELAYS.read) is None:
        return None  # unknown until the topic exists
    early, shortest = earliness(policies), evidence.request.shortest_delay
    if early is None or early < shortest:
        return None
    return StatusWarning(
        Reason.RETRIES_EARLY,
        "the broker may deliver each retry one tick early, and so a retry of "
        f"{format_duration(shortest)} at once; a topic cannot have a finer tick, because brokers "
        "since 4.1 keep delays in buckets of half their own tick; "
        f"got a tick of {early.total_seconds():g} s on {evidence.desired.retry.name}; set "
        "delayedDeliveryTickTimeMillis=50 in the configuration of the brokers, or increase the "
        "shortest delay",
    )


def _policies_of_retry(evidence: Evidence) -> Mapping[str, Any]:
    retry = evidence.observed.topics.get(TopicRole.RETRY)
    return evidence.observed.inherited if retry is None else retry.policies or {}


def topics_are_replicated(evidence: Evidence) -> StatusWarning | None:
    """Find replicated topics of the policy: each cluster would process the same retries."""
    topics = {
        want.name: evidence.observed.namespace.replicated_to if have is None else have.replicated_to
        for want, have in evidence.desired.pairs(evidence.observed)
        if not want.role.holds_records  # consumers process no records
    }
    replicated = {name: clusters for name, clusters in topics.items() if len(clusters) > 1}
    if not replicated:
        return None
    listed = ", ".join(f"{name} to {'+'.join(sorted(to))}" for name, to in replicated.items())
    return StatusWarning(
        Reason.GEO_REPLICATED,
        "messages are retried in the cluster where they failed; if that cluster replicates retries "
        "and dead letters, other clusters process them again; got "
        f"{listed}; keep each topic in this cluster: pulsar-admin topics set-replication-clusters "
        "--clusters CLUSTER TOPIC",
    )


def schema_is_refused(evidence: Evidence) -> StatusWarning | None:
    """Find topics whose schema the broker refuses to update."""
    refused = [r for r in evidence.refused if isinstance(r.action, CopySchema)]
    if not refused:
        return None
    topics = ", ".join(str(r.action.topic) for r in refused)
    return StatusWarning(
        Reason.SCHEMA_REFUSED,
        f"the schema of {evidence.request.policy.topic} could not be copied to {topics}, so "
        f"consumers of that schema may be refused there: {refused[0].error}; let the Pulsar "
        "namespace allow the change (schema compatibility strategy), or delete the schema of "
        "these topics",
    )


def schema_is_not_allowed(evidence: Evidence) -> StatusWarning | None:
    """Find topics without the source topic's schema, which some of their roles may not see."""
    source, wanted = evidence.request.policy.topic, evidence.desired
    names = [topic.name for topic in wanted.topics if not topic.role.holds_records]
    withheld = [name for name in names if name not in wanted.schema_topics]
    if evidence.observed.source_schema is None or not withheld:
        return None
    permissions = evidence.request.permissions
    roles = {role for name in withheld for role in permissions.roles_on(name)}
    lacking = ", ".join(sorted(roles.difference(permissions.roles_on(source))))
    return StatusWarning(
        Reason.SCHEMA_NOT_ALLOWED,
        f"the schema of {source} is not copied to {', '.join(map(str, withheld))}: the connection "
        "allows policies of this namespace to grant rights there to roles that no rule allows on "
        f"{source}, and these roles would see the schema; consumers of that schema may be refused "
        f"there; got {lacking}; add these roles to a rule of the connection's spec.allow that "
        "includes that topic",
    )


def schema_is_unsupported(evidence: Evidence) -> StatusWarning | None:
    """Find a schema whose messages Python cannot forward, so that failed ones are not settled."""
    schema = evidence.observed.source_schema
    if schema is None or schema.type in _SENT_WITH_SCHEMA:
        return None
    if schema.type == _KEY_VALUE:
        remedy = "consume it with Java"
    elif evidence.observed.namespace.enforces_schemas:
        remedy = "consume it with Java, or do not enforce schemas (schemaValidationEnforced)"
    else:
        return None
    return StatusWarning(
        Reason.SCHEMA_UNSUPPORTED,
        "the Python client cannot send messages of this schema to the retry or the dead-letter "
        f"topic: failed messages stay unacknowledged at their consumer; got {schema.type} on "
        f"{evidence.request.policy.topic}; {remedy}",
    )


def subscription_type_is_not_allowed(evidence: Evidence) -> StatusWarning | None:
    """Find a namespace or a broker that refuses the subscription type of consumers or readers."""
    policy, observed = evidence.request.policy, evidence.observed
    namespace = policy.topic.namespace_name
    place, allowed = f"the Pulsar namespace {namespace}", observed.namespace.subscription_types
    if not allowed:
        place, allowed = "the configuration of the broker", observed.settings.subscription_types
    needed = [(kind, topic) for topic, kind in policy.subscription_types.items()]
    needed += [(SubscriptionType.EXCLUSIVE, topic) for topic in _topics_to_read(evidence)]
    refused = [
        f"{kind} on {topic.local}" for kind, topic in needed if kind.of_broker not in allowed
    ]
    if not allowed or not refused:
        return None
    return StatusWarning(
        Reason.SUBSCRIPTION_TYPE_NOT_ALLOWED,
        f"{place} refuses consumers of type {' and '.join(refused)}, unless these topics have "
        "their own setting; readers, such as those of Replays and Inspections, need Exclusive; got "
        f"{', '.join(sorted(allowed))}; allow them: pulsar-admin namespaces "
        f"set-subscription-types-enabled --types "
        f"{','.join(sorted({*allowed, *(kind.of_broker for kind, _ in needed)}))} {namespace}",
    )


def _topics_to_read(evidence: Evidence) -> list[TopicName]:
    """Return the topics that consumers, Replays or Inspections read without a subscription."""
    connection = evidence.request.connection
    has_readers = connection.replay is not None or connection.inspection is not None
    return [
        topic.name
        for topic in evidence.desired.topics
        if has_readers or topic.role is TopicRole.SEQUENCES
    ]


def encryption_is_required(evidence: Evidence) -> StatusWarning | None:
    """Find a place that refuses messages of Replays, and of consumers without a key."""
    namespace, observed = evidence.request.policy.topic.namespace_name, evidence.observed
    remedies = {}
    if observed.namespace.requires_encryption:
        remedies["encryptionRequired=true"] = (
            f"pulsar-admin namespaces set-encryption-required --disable {namespace}"
        )
    if observed.settings.requires_encryption:
        remedies[f"{REQUIRES_ENCRYPTION}=true of the broker"] = (
            "set it to false in the configuration of the brokers"
        )
    if not remedies:
        return None
    return StatusWarning(
        Reason.ENCRYPTION_REQUIRED,
        f"the Pulsar namespace {namespace} accepts only encrypted messages: consumers need crypto= "
        "to retry and dead-letter messages, and Replays fail, because they have no keys; got "
        f"{' and '.join(remedies)}; to replay, disable it temporarily: "
        f"{'; '.join(remedies.values())}",
    )


def subscription_is_contested(evidence: Evidence) -> StatusWarning | None:
    """Find other policies with the same topic and subscription."""
    return _contested(
        Reason.RESOURCE_CONFLICT,
        "other RetryPolicies have the same topic and subscription, and wait until this policy is "
        "deleted or stalls; got {}; delete them, or this policy",
        evidence,
        alike=True,
    )


def names_are_contested(evidence: Evidence) -> StatusWarning | None:
    """Find policies for other subscriptions that need topics of the same names."""
    return _contested(
        Reason.NAME_COLLISION,
        "RetryPolicies for other subscriptions need a topic name that this policy, or its source "
        "topic, has, and are refused; got {}; give their topics other names",
        evidence,
        alike=False,
    )


CHECKS: tuple[Callable[[Evidence], StatusWarning | None], ...] = (
    ladder_descends,
    topics_have_too_many_partitions,
    delay_is_limited,
    delayed_delivery_is_refused,
    retries_come_early,
    topics_are_replicated,
    schema_is_refused,
    schema_is_not_allowed,
    schema_is_unsupported,
    subscription_type_is_not_allowed,
    encryption_is_required,
    subscription_is_contested,
    names_are_contested,
)


def warnings(evidence: Evidence) -> tuple[StatusWarning, ...]:
    """Return all warnings."""
    results = (check(evidence) for check in CHECKS)
    return tuple(warning for warning in results if warning is not None)


def _contested(
    reason: str, message: str, evidence: Evidence, *, alike: bool
) -> StatusWarning | None:
    """Return the warning about blocked policies, those of the same subscription if *alike*."""
    own, namespace = evidence.request, evidence.request.key.namespace
    rivals = [other for other in evidence.blocked if other.subscribes_like(own) is alike]
    if not rivals:
        return None
    names = [f"RetryPolicy {other.key}" for other in rivals if other.key.namespace == namespace]
    shown = first_of(names)
    if foreign := len(rivals) - len(names):
        shown.append(f"{foreign} of other namespaces")
    return StatusWarning(reason, message.format(", ".join(shown)))
