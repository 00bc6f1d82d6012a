"""What a policy asks of its topics beyond their being there; pure.

Called by `desired`. `docs/reference/topic-policies.md` says the same as a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from redrive.admin.model import NamespaceState
from redrive.admin.policies import (
    CompactsAbove,
    Deduplicates,
    Holds,
    KeepsBacklog,
    LimitsBacklog,
    TopicPolicy,
    Ttl,
)
from redrive.api.topology import DeadLetterTopic, RetryTopic

# A topic that is deleted for being idle would come back without its subscription, or not at all.
_STAYS = Holds(
    "inactiveTopicPolicies",
    (("deleteWhileInactive", False),),
    (
        ("inactiveTopicDeleteMode", "delete_when_no_subscriptions"),
        ("maxInactiveDurationSeconds", 60),
    ),
)
_RETENTION = "retention"
OF_A_FIELD = frozenset({_RETENTION, LimitsBacklog.name})
"""The names of policies that a spec asks for by a field: without it they are taken back."""
_LEDGER_BYTES = 10 * 2**20
_DELAYS = Holds(
    "delayedDelivery", (("active", True),), (("tickTime", 1_000), ("maxDeliveryDelayInMillis", 0))
)


def inherited(namespace: NamespaceState) -> dict[str, Any]:
    """Return what a new topic of *namespace* has, by how it is read.

    A broker delays messages unless its configuration, or the namespace, disables that.
    """
    return {
        _DELAYS.read: namespace.delayed_delivery or {"active": True},
        KeepsBacklog.read: namespace.backlog_quotas,
    }


def in_force(found: Mapping[str, Any], namespace: NamespaceState) -> dict[str, Any]:
    """Return what a topic of *namespace* has, where *found* was read of it.

    Backlog quotas are read of the topic alone; a type it has none of is the namespace's.
    """
    quotas = {**namespace.backlog_quotas, **(found[KeepsBacklog.read] or {})}
    return {**found, KeepsBacklog.read: quotas}


def delay_limit(policies: Mapping[str, Any]) -> timedelta | None:
    """Return the longest delay that the broker makes, by a topic's *policies*; None is any."""
    limit = (policies.get(_DELAYS.read) or {}).get("maxDeliveryDelayInMillis") or 0
    return timedelta(milliseconds=limit) if limit > 0 else None


def of_retry(spec: RetryTopic) -> tuple[TopicPolicy, ...]:
    """Return the policies of a retry topic: what waits there is delivered late, once, and kept."""
    return (
        # From the topic's first day: what the broker does not remember it cannot recognise.
        Deduplicates(),
        Ttl(spec.ttl_seconds),
        _DELAYS,
        KeepsBacklog(),
        _STAYS,
    )


def of_ledger() -> tuple[TopicPolicy, ...]:
    """Return the policies of a ledger: the last record of each key is kept."""
    return (Ttl(0), KeepsBacklog(), CompactsAbove(_LEDGER_BYTES), _STAYS)


def of_dead_letter(spec: DeadLetterTopic) -> tuple[TopicPolicy, ...]:
    """Return the policies of a dead-letter topic: what rests there is kept."""
    policies: list[TopicPolicy] = [
        Ttl(spec.ttl_seconds),
        KeepsBacklog(),
        _STAYS,
    ]
    if spec.backlog_quota is not None:
        policies.append(LimitsBacklog(spec.backlog_quota.bytes))
    if spec.retention is not None:
        policies.append(Holds(_RETENTION, tuple(spec.retention.to_broker().items())))
    return tuple(policies)
