"""What should be fixed although a policy is ready: named checks on observed facts; pure.

Called by `reconcile`, which shows what they find as conditions and Warning events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from redrive.api.conditions import StatusWarning
from redrive.policy.values import format_duration
from redrive.provision.actions import CopySchema
from redrive.provision.apply import Refused
from redrive.provision.desired import (
    DELAYS,
    Desired,
    Observed,
    delay_limit,
    earliness,
    partitions_of_retry,
)
from redrive.provision.request import NameCollisionError, Request, ResourceConflictError
from redrive.reasons import Reason

_KEY_VALUE = "KEY_VALUE"
_SENT_WITH_SCHEMA = {"STRING", "JSON", "AVRO", "PROTOBUF", "PROTOBUF_NATIVE"}
"""What the Python client sends with its schema; of other types, but KeyValue, it sends none."""

_SHOWN = 5


@dataclass(frozen=True)
class Seen:
    """What these checks look at.

    Attributes:
        rivals: admissible policies that claim one of its names.
        refused: what could not be done for it, and is not needed for it to work.
    """

    request: Request
    rivals: Sequence[Request]
    desired: Desired
    observed: Observed
    refused: Sequence[Refused]

    @property
    def waiting(self) -> list[Request]:
        """Return the rivals that it keeps from their topics, the oldest first."""
        found = [rival for rival in self.rivals if rival.yields_to(self.request)]
        return sorted(found, key=lambda rival: rival.age)


def ladder_descends(seen: Seen) -> StatusWarning | None:
    """Find a ladder whose delays get shorter."""
    if not seen.request.policy.ladder.descends:
        return None
    return StatusWarning(
        Reason.LADDER_DESCENDS,
        "the delay ladder descends: a later retry waits a shorter time than one before it; "
        "sort the delays unless that is meant",
    )


def topics_have_too_many_partitions(seen: Seen) -> StatusWarning | None:
    """Find topics that would have to shrink, which no topic can.

    Of a dead-letter topic only a number that is asked for counts: without one it stays as it is.
    """
    retry = partitions_of_retry(seen.desired, seen.observed.source_partitions)
    dead_letter = seen.desired.dead_letter_partitions
    compared = (
        ("retry", seen.desired.retry, seen.observed.retry, retry),
        ("deadLetter", seen.desired.dead_letter, seen.observed.dead_letter, dead_letter or inf),
    )
    found = [
        f"{topic.name} should have {want} partitions, and no topic can shrink; got "
        f"{have.partitions}; all of them are consumed, so leave it, or set {part}.partitions to "
        f"{have.partitions}"
        for part, topic, have, want in compared
        if topic is not None and have is not None and have.partitions > want
    ]
    return StatusWarning(Reason.PARTITIONS_NEVER_SHRINK, "; ".join(found)) if found else None


def delay_is_limited(seen: Seen) -> StatusWarning | None:
    """Find a limit of the broker that is below the longest delay of the ladder."""
    limit = delay_limit(_policies_of_retry(seen))
    longest = max(seen.request.policy.ladder.rungs)
    if limit is None or limit >= longest:
        return None
    return StatusWarning(
        Reason.MAX_DELIVERY_DELAY,
        f"the broker delays messages of {seen.desired.retry.name} for a shorter time than the "
        f"longest delay of the ladder, {format_duration(longest)}; got a maxDeliveryDelay of "
        f"{limit.total_seconds():g} s; shorten the ladder, or raise the limit of the topic: "
        "pulsar-admin topicPolicies set-delayed-delivery --enable --maxDelay "
        f"{format_duration(longest)} {seen.desired.retry.name}",
    )


def delayed_delivery_is_refused(seen: Seen) -> StatusWarning | None:
    """Find a broker that does not let the operator set how exactly it keeps delays."""
    refused = [each for each in seen.refused if not isinstance(each.action, CopySchema)]
    if not refused:
        return None
    policies, shortest = _policies_of_retry(seen), seen.request.shortest_delay
    if policies.get(DELAYS.read) is None:
        effect = "retries come as early as the broker is configured to, which it does not tell"
    elif (early := earliness(policies)) is None:
        effect = "retries come at once, whatever their delay"
    else:
        effect = (
            f"retries may come {early.total_seconds():g} s early, and the shortest delay is "
            f"{format_duration(shortest)}"
        )
    return StatusWarning(
        Reason.DELAYED_DELIVERY_REFUSED,
        f"delayed delivery of {seen.desired.retry.name} could not be set, so {effect}: "
        f"{refused[0].error}; allow the operator's role to set it",
    )


def retries_come_early(seen: Seen) -> StatusWarning | None:
    """Find delays that are over at once: within a tick, at a broker whose tick can't be set."""
    policies = _policies_of_retry(seen)
    if seen.desired.sets_tick or policies.get(DELAYS.read) is None:
        return None  # of a topic that does not exist yet it is not known
    early, shortest = earliness(policies), seen.request.shortest_delay
    if early is None or early < shortest:
        return None
    return StatusWarning(
        Reason.RETRIES_EARLY,
        "the broker may deliver each retry a tick early, and so one of "
        f"{format_duration(shortest)} at once; a topic gets no finer tick, for brokers since 4.1 "
        "keep delays in buckets of half their own; "
        f"got a tick of {early.total_seconds():g} s on {seen.desired.retry.name}; set "
        "delayedDeliveryTickTimeMillis=50 in the configuration of the brokers, or make the "
        "shortest delay longer",
    )


def _policies_of_retry(seen: Seen) -> Mapping[str, Any]:
    retry = seen.observed.retry
    return seen.observed.inherited if retry is None else retry.policies or {}


def topics_are_replicated(seen: Seen) -> StatusWarning | None:
    """Find own topics that are replicated, so that each cluster would handle what one retries."""
    found = {
        want.name: seen.observed.replicated_to if have is None else have.replicated_to
        for want, have in seen.desired.pairs(seen.observed)
        if want not in seen.desired.records  # no consumer handles what they hold
    }
    replicated = {name: clusters for name, clusters in found.items() if len(clusters) > 1}
    if not replicated:
        return None
    listed = ", ".join(f"{name} to {'+'.join(sorted(to))}" for name, to in replicated.items())
    return StatusWarning(
        Reason.GEO_REPLICATED,
        "the source topic's messages are retried in the cluster where they failed; if that cluster "
        "replicates retries and dead letters, others handle them a second time; got "
        f"{listed}; keep each in this cluster: pulsar-admin topics set-replication-clusters "
        "--clusters CLUSTER TOPIC",
    )


def schema_is_refused(seen: Seen) -> StatusWarning | None:
    """Find topics that can't have the schema of the source topic."""
    refused = [each for each in seen.refused if isinstance(each.action, CopySchema)]
    if not refused:
        return None
    topics = ", ".join(str(each.action.topic) for each in refused)
    return StatusWarning(
        Reason.SCHEMA_REFUSED,
        f"the schema of {seen.request.policy.topic} could not be copied to {topics}, so consumers "
        f"of that schema may be refused there: {refused[0].error}; have the Pulsar namespace "
        "allow the change (schema compatibility strategy), or delete the schema of these topics",
    )


def schema_is_not_allowed(seen: Seen) -> StatusWarning | None:
    """Find topics without the source topic's schema, which roles of the topics may not see."""
    source, wanted = seen.request.policy.topic, seen.desired
    names = [topic.name for topic, _ in wanted.pairs(seen.observed) if topic not in wanted.records]
    withheld = [name for name in names if name not in wanted.schema_topics]
    if seen.observed.source_schema is None or not withheld:
        return None
    permissions = seen.request.permissions
    roles = {role for name in withheld for role in permissions.roles_on(name)}
    lacking = ", ".join(sorted(roles.difference(permissions.roles_on(source))))
    return StatusWarning(
        Reason.SCHEMA_NOT_ALLOWED,
        f"the schema of {source} is not copied to {', '.join(map(str, withheld))}: the connection "
        "allows policies of this namespace to grant rights there to roles that no rule allows on "
        f"{source}, and these would see the schema; consumers of that schema may be refused there; "
        f"got {lacking}; have a rule of the connection's spec.allow name them together with that "
        "topic",
    )


def schema_is_unsupported(seen: Seen) -> StatusWarning | None:
    """Find a schema whose messages Python can't send on, so that those that fail stay in hand."""
    schema = seen.observed.source_schema
    if schema is None or schema.type in _SENT_WITH_SCHEMA:
        return None
    if schema.type == _KEY_VALUE:
        remedy = "consume it with Java"
    elif seen.observed.enforces_schemas:
        remedy = "consume it with Java, or do not enforce schemas (schemaValidationEnforced)"
    else:
        return None
    return StatusWarning(
        Reason.SCHEMA_UNSUPPORTED,
        "the Python client can't send messages of this schema to the retry or the dead-letter "
        f"topic: those that fail stay with their consumer, unacknowledged; got {schema.type} on "
        f"{seen.request.policy.topic}; {remedy}",
    )


def subscription_type_is_not_allowed(seen: Seen) -> StatusWarning | None:
    """Find a namespace that refuses the consumers of the source topic or of the retry topic."""
    policy, allowed = seen.request.policy, seen.observed.subscription_types
    types = policy.subscription_types
    refused = [
        f"{kind} on {topic.local}" for topic, kind in types.items() if kind.of_broker not in allowed
    ]
    if not allowed or not refused:
        return None
    return StatusWarning(
        Reason.SUBSCRIPTION_TYPE_NOT_ALLOWED,
        f"the Pulsar namespace {policy.topic.namespace_name} refuses consumers that need "
        f"{' and '.join(refused)}, unless these topics have a setting of their own; got "
        f"{', '.join(sorted(allowed))}; allow it: pulsar-admin namespaces "
        f"set-subscription-types-enabled --types "
        f"{','.join(sorted({*allowed, *(kind.of_broker for kind in types.values())}))} "
        f"{policy.topic.namespace_name}",
    )


def encryption_is_required(seen: Seen) -> StatusWarning | None:
    """Find a namespace that refuses the messages of Replays, and of consumers without a key."""
    policy = seen.request.policy
    if not seen.observed.requires_encryption:
        return None
    return StatusWarning(
        Reason.ENCRYPTION_REQUIRED,
        f"the Pulsar namespace {policy.topic.namespace_name} takes encrypted messages only: "
        "consumers need crypto= to retry and dead-letter what fails, and Replays fail, because "
        "they have no keys; got encryptionRequired=true; to replay, switch it off for that time: "
        f"pulsar-admin namespaces set-encryption-required --disable {policy.topic.namespace_name}",
    )


def subscription_is_contested(seen: Seen) -> StatusWarning | None:
    """Find other policies for the same topic and subscription."""
    same = [other for other in seen.waiting if other.subscribes_like(seen.request)]
    return _contested(
        ResourceConflictError.reason,
        "other RetryPolicies are for the same topic and subscription, and wait for this one to go "
        "or to stall; got {}; delete them, or this one",
        same,
        seen.request.key.namespace,
    )


def names_are_contested(seen: Seen) -> StatusWarning | None:
    """Find policies for other subscriptions that need topics of the same names."""
    others = [other for other in seen.waiting if not other.subscribes_like(seen.request)]
    return _contested(
        NameCollisionError.reason,
        "RetryPolicies for other subscriptions need a topic of a name that this one, or its source "
        "topic, has, and are refused; got {}; give their topics other names",
        others,
        seen.request.key.namespace,
    )


CHECKS: tuple[Callable[[Seen], StatusWarning | None], ...] = (
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


def warnings(seen: Seen) -> tuple[StatusWarning, ...]:
    """Return all that is found."""
    found = (check(seen) for check in CHECKS)
    return tuple(warning for warning in found if warning is not None)


def _contested(
    reason: str, message: str, rivals: Sequence[Request], namespace: str
) -> StatusWarning | None:
    if not rivals:
        return None
    names = [f"RetryPolicy {other.key}" for other in rivals if other.key.namespace == namespace]
    shown = names[:_SHOWN]
    if more := len(names) - len(shown):
        shown.append(f"{more} more")
    if foreign := len(rivals) - len(names):
        shown.append(f"{foreign} of other namespaces")
    return StatusWarning(reason, message.format(", ".join(shown)))
