"""Prints the series of an operator and a consumer after one of each operation, as JSON.

A separate process, because metrics are global to a process.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime, timedelta

from prometheus_client import REGISTRY, generate_latest

from redrive import prometheus
from redrive.admin.http import ADMIN_CALLS, ADMIN_SECONDS
from redrive.admin.model import SubscriptionStats
from redrive.api.replay_status import Phase
from redrive.cli import operator  # noqa: F401  declares all reasons of conditions
from redrive.delivery.reporting import Event, Name
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.observability import (
    BREAKER_OPEN,
    LEASE,
    LEASE_HELD,
    LOOP_DELAY,
    QUEUE_DEPTH,
    QUEUE_SECONDS,
    RECONCILE_SECONDS,
    RECONCILES,
    counting_objects,
)
from redrive.kube.resources import Key
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.provision.findings import Findings
from redrive.provision.health_checks import THRESHOLDS, Reading
from redrive.provision.metrics import REPAIRS, TopicMetrics
from redrive.replay.controller import metrics as replay

POLICY = ("orders", "shop", "persistent://shop/prod/orders", "fulfilment")
NOW = datetime(1970, 1, 1, 0, 5, tzinfo=UTC)


def objects(kind: str, reason: str) -> Cache:
    """Return one object of a kind, with a Ready condition and a warning."""
    conditions = [
        {"type": "Ready", "status": "True", "reason": reason},
        {"type": "AckHoles", "status": "True", "reason": "AckHoles"},
    ]
    name, namespace, topic, subscription = POLICY
    body = {
        "kind": kind,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"topic": topic, "subscription": subscription},
        "status": {"conditions": conditions},
    }
    return Cache([body])


def replays() -> Cache:
    """Return a Replay of each phase."""
    name, namespace, *_ = POLICY
    return Cache(
        [
            {
                "kind": "Replay",
                "metadata": {"name": phase.lower(), "namespace": namespace},
                "spec": {"policyRef": {"name": name}},
                "status": {
                    "phase": phase,
                    "run": {
                        "counts": dict.fromkeys(("moved", "left", "skipped", "refused"), 1),
                        "ratePerMinute": 60,
                        "remaining": "1m",
                    },
                    "completionTime": "1970-01-01T00:01:00Z",
                },
            }
            for phase in Phase
        ]
    )


def reading() -> Reading:
    """Return statistics of the topics of the policy."""
    name, _, topic, subscription = POLICY
    waiting = SubscriptionStats(
        3, 7, 1, durable=True, ack_holes=0, oldest=NOW - timedelta(minutes=4), bytes=800, delayed=1
    )
    return Reading(
        policy=Policy(TopicName.parse(topic), subscription, name=name),
        begun=NOW,
        seconds=0.0,
        requested=False,
        quota=1_000,
        source={subscription: waiting},
        retry={subscription: waiting},
        dead_letter={"redrive": waiting},
        published={"": 3},
    )


def work() -> None:
    """Increment each metric."""
    LEASE_HELD.set(1)
    LEASE.transitions = 1
    RECONCILES.labels("RetryPolicy", "success").inc()
    RECONCILES.labels("RetryPolicy", "error").inc()
    RECONCILE_SECONDS.labels("RetryPolicy").observe(1)
    QUEUE_DEPTH.labels("RetryPolicy").set(1)
    LOOP_DELAY.observe(1)
    QUEUE_SECONDS.labels("RetryPolicy").observe(1)
    BREAKER_OPEN.labels("shop", "main").set(1)
    ADMIN_CALLS.labels("GET", "200").inc()
    ADMIN_SECONDS.labels("GET").observe(1)
    REPAIRS.labels("CreateTopic").inc()
    replay.MESSAGES.labels(*POLICY[:2], "RetryPolicy", "moved").inc()
    replay.SECONDS.labels("Completed").observe(60)
    name, namespace, topic, subscription = POLICY
    for event in (Name.ATTEMPT_FAILED, Name.RETRIED, Name.DEAD_LETTERED, Name.UNSENT):
        prometheus.count(
            Event(
                event=event, policy=f"{namespace}/{name}", source=topic, subscription=subscription,
                origin="1:1", message_id="1:1", attempt=1, generation=1, reason="Why",
            )
        )  # fmt: skip


def main() -> None:
    """Print each series with its value, and the exposition of all as Prometheus scrapes it."""
    work()
    shown = {
        resources.POLICIES: objects("RetryPolicy", "Provisioned"),
        resources.REPLAYS: objects("Replay", "Completed"),
    }
    topics = TopicMetrics(lambda: NOW)
    name, namespace, *_ = POLICY
    topics.show(Key(namespace, name), reading(), Findings.of(reading(), None, (), THRESHOLDS))
    series = {}
    with counting_objects(shown), replay.counting(replays(), {}):
        exposition = generate_latest(REGISTRY).decode()
        for family in REGISTRY.collect():
            for sample in family.samples:
                if sample.name.startswith("redrive_") and not sample.name.endswith("_created"):
                    labels = ", ".join(f'{k}="{v}"' for k, v in sample.labels.items())
                    series[f"{sample.name}{{{labels}}}"] = sample.value
    json.dump({"series": series, "exposition": exposition}, sys.stdout)


if __name__ == "__main__":
    main()
