"""Prints the series of an operator and a consumer after one of each operation, as JSON.

A separate process, because metrics are global to a process.
"""

from __future__ import annotations

import json
import sys

from prometheus_client import REGISTRY

from redrive import prometheus
from redrive.admin.http import ADMIN_CALLS
from redrive.api.replay import Phase
from redrive.cli import operator  # noqa: F401  declares all reasons of conditions
from redrive.delivery.reporting import Event, Name
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.observability import (
    BREAKER_OPEN,
    LEASE_HELD,
    QUEUE_DEPTH,
    RECONCILES,
    counting_objects,
)
from redrive.provision.health import BACKLOG, DELIVERIES, OLDEST_DEAD_LETTER, REPAIRS
from redrive.replay.controller import metrics as replay

POLICY = ("orders", "shop", "persistent://shop/prod/orders", "fulfilment")


def objects(kind: str, reason: str) -> Cache:
    """Return one object of a kind, with a Ready condition."""
    condition = {"type": "Ready", "status": "True", "reason": reason}
    name, namespace, topic, subscription = POLICY
    body = {
        "kind": kind,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"topic": topic, "subscription": subscription},
        "status": {"conditions": [condition]},
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
                "status": {"phase": phase, "moved": 1, "completionTime": "1970-01-01T00:01:00Z"},
            }
            for phase in Phase
        ]
    )


def work() -> None:
    """Increment each metric."""
    LEASE_HELD.set(1)
    RECONCILES.labels("RetryPolicy", "success").inc()
    QUEUE_DEPTH.labels("RetryPolicy").set(1)
    BREAKER_OPEN.labels("shop", "main").set(1)
    ADMIN_CALLS.labels("GET", "200").inc()
    BACKLOG.labels(*POLICY, "retry").set(1)
    BACKLOG.labels(*POLICY, "dead-letter").set(1)
    OLDEST_DEAD_LETTER.labels(*POLICY).set(1)
    DELIVERIES.labels(*POLICY, "source").inc()
    REPAIRS.labels("CreateTopic").inc()
    replay.MESSAGES.labels(*POLICY[:2], "moved").inc()
    replay.SECONDS.labels("Completed").observe(60)
    name, namespace, topic, subscription = POLICY
    for event in (Name.ATTEMPT_FAILED, Name.RETRIED, Name.UNSENT):
        prometheus.count(
            Event(
                event=event, policy=f"{namespace}/{name}", source=topic, subscription=subscription,
                origin="1:1", message_id="1:1", attempt=1, generation=1, reason="Why",
            )
        )  # fmt: skip


def main() -> None:
    """Print each series with its value."""
    work()
    shown = {
        resources.POLICIES: objects("RetryPolicy", "Provisioned"),
        resources.REPLAYS: objects("Replay", "Completed"),
    }
    series = {}
    with counting_objects(shown), replay.counting(replays(), Cache()):
        for family in REGISTRY.collect():
            for sample in family.samples:
                if sample.name.startswith("redrive_") and not sample.name.endswith("_created"):
                    labels = ", ".join(f'{k}="{v}"' for k, v in sample.labels.items())
                    series[f"{sample.name}{{{labels}}}"] = sample.value
    json.dump(series, sys.stdout)


if __name__ == "__main__":
    main()
