"""What a policy asks of its topics beyond their being there; pure.

Called by `desired`. `docs/reference/topic-policies.md` says the same as a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from redrive.admin.model import NamespaceState
from redrive.admin.policies import (
    DELAYED_DELIVERY,
    CompactsAbove,
    Deduplicates,
    DelaysWithin,
    Holds,
    KeepsBacklog,
    LimitsBacklog,
    Quotas,
    TopicPolicy,
    Ttl,
)
from redrive.api.topology import DeadLetterTopic, RetryTopic

# A topic that is deleted for being idle would come back without its subscription, or not at all.
_STAYS = Holds("inactiveTopicPolicies", (("deleteWhileInactive", False),))
_RETENTION = "retention"
OF_A_FIELD = frozenset({_RETENTION, LimitsBacklog.name, DelaysWithin.name})
"""The names of policies that a spec asks for by a field, or of a release of the broker: without it
they are taken back."""
_RECORD_BYTES = 10 * 2**20
_MILLISECOND = timedelta(milliseconds=1)
COARSEST_TICK = timedelta(seconds=1)
"""The coarsest tick that a topic gets; brokers have it by default."""
TICKS_PER_RUNG = 20
"""How often the tick goes into the shortest rung, which is 1 s at least: a retry may come early by
a tick. With 100 000 messages waiting, ticks of 1 s and of 20 ms cost a broker the same."""
BUCKETS_SINCE = (4, 1)
"""The release since when a broker keeps delays in buckets of half its own tick.

With a finer tick of a topic, messages that are due may wait until another one comes (seen with
4.2.4): topics keep the broker's there.
"""
DELAYS = Holds(DELAYED_DELIVERY, (("active", True),))
"""Messages are delayed, as exactly and for as long as the namespace and the broker have it."""


def inherited(namespace: NamespaceState) -> dict[str, Any]:
    """Return the topic policies that *namespace* sets for a new topic, by how each is read.

    A policy that is missing here is the broker's: it is known once the topic exists.
    """
    policies: dict[str, Any] = {KeepsBacklog.read: namespace.backlog_quotas}
    if namespace.delayed_delivery is not None:
        policies[DELAYS.read] = namespace.delayed_delivery
    return policies


def in_force(found: Mapping[str, Any], namespace: NamespaceState) -> dict[str, Any]:
    """Return what a topic of *namespace* has, where *found* was read of it."""
    return {**found, KeepsBacklog.read: quotas_in_force(found[KeepsBacklog.read], namespace)}


def quotas_in_force(own: Quotas | None, namespace: NamespaceState) -> Quotas:
    """Return the backlog quotas of a topic, whose *own* are read of it alone.

    A type it has none of is the namespace's.
    """
    return {**namespace.backlog_quotas, **(own or {})}


def delay_limit(policies: Mapping[str, Any]) -> timedelta | None:
    """Return the longest delay that the broker makes, by a topic's *policies*; None is any."""
    limit = (policies.get(DELAYS.read) or {}).get("maxDeliveryDelayInMillis") or 0
    return timedelta(milliseconds=limit) if limit > 0 else None


def earliness(policies: Mapping[str, Any]) -> timedelta | None:
    """Return by how much the broker may be early, by a topic's *policies*; None: it delays none.

    Raises:
        KeyError: *policies* hold no value of the broker.
    """
    delays = policies[DELAYS.read]
    return delays["tickTime"] * _MILLISECOND if delays["active"] else None


def delays(shortest: timedelta, release: tuple[int, ...]) -> TopicPolicy:
    """Return how a topic delays messages.

    Args:
        shortest: the shortest delay that consumers ask for by the policy.
        release: of the broker; empty where that is not known.
    """
    if not release or release >= BUCKETS_SINCE:
        return DELAYS
    return DelaysWithin(min(COARSEST_TICK, shortest / TICKS_PER_RUNG) // _MILLISECOND)


def of_retry(spec: RetryTopic, delays: TopicPolicy) -> tuple[TopicPolicy, ...]:
    """Return the policies of a retry topic: what waits there is delivered late, once, and kept."""
    return (
        # From the topic's first day: what the broker does not remember it cannot recognise.
        Deduplicates(),
        Ttl(spec.ttl_seconds),
        delays,
        KeepsBacklog(),
        _STAYS,
    )


def of_records() -> tuple[TopicPolicy, ...]:
    """Return the policies of a topic of records: the last record of each key is kept."""
    return (Ttl(0), KeepsBacklog(), CompactsAbove(_RECORD_BYTES), _STAYS)


def of_dead_letter(spec: DeadLetterTopic) -> tuple[TopicPolicy, ...]:
    """Return the policies of a dead-letter topic: what rests there is stored once, and kept."""
    policies: list[TopicPolicy] = [
        Deduplicates(),
        Ttl(spec.ttl_seconds),
        KeepsBacklog(),
        _STAYS,
    ]
    if spec.backlog_quota is not None:
        policies.append(LimitsBacklog(spec.backlog_quota.bytes))
    if spec.retention is not None:
        policies.append(Holds(_RETENTION, tuple(spec.retention.to_broker().items())))
    return tuple(policies)
