"""Metrics of Replays."""

from __future__ import annotations

import asyncio
import dataclasses
from datetime import UTC, datetime
from typing import Any

import pytest
from prometheus_client import REGISTRY, generate_latest

from redrive.api.replay_status import Phase, ReplayStatus
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.resources import Key
from redrive.replay.controller import launch, metrics
from redrive.replay.controller.metrics import counting
from redrive.replay.controller.reconciler import reconcile
from tests.support.fake_kubernetes import FakeKubernetes
from tests.unit.replay.controller.test_admission import ctx, launched, named, replay, reported

POLICY = {"policy": "orders", "policy_namespace": "shop", "policy_kind": "RetryPolicy"}


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def application_in(state: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the SparkApplication of a Replay in *state*."""
    application = named("SparkApplication", launch.name_of(body), {})
    application["metadata"]["ownerReferences"] = [{"uid": body["metadata"]["uid"]}]
    application["status"] = {"applicationState": {"state": state}}
    return application


def test_replays_are_counted_by_phase_without_dry_runs() -> None:
    done = {"phase": "Completed", "completionTime": "2026-11-22T10:00:00Z"}
    later = {"phase": "Completed", "completionTime": "2026-11-22T11:00:00Z"}
    failed = {"phase": "Failed", "completionTime": "2026-11-22T12:00:00Z"}
    replays = [
        replay("first", status=later),
        replay("second", status=done),
        replay("third", status=failed),
        replay("dry", spec={"mode": "Plan"}, status=failed),
        replay("new"),
    ]
    with counting(Cache(replays), {}):
        phases = {
            phase: value("redrive_replays", **POLICY, phase=phase)
            for phase in ("Pending", "Completed", "Failed")
        }
        succeeded = value("redrive_replay_last_success_timestamp_seconds", **POLICY)
        had_failed = value("redrive_replay_last_failure_timestamp_seconds", **POLICY)
    assert phases == {"Pending": 1, "Completed": 2, "Failed": 1}
    assert succeeded == datetime.fromisoformat("2026-11-22T11:00:00Z").timestamp()
    assert had_failed == datetime.fromisoformat("2026-11-22T12:00:00Z").timestamp()


def test_policies_of_two_kinds_with_one_name_have_own_series() -> None:
    other = {"policyRef": {"kind": "RocketMQRetryPolicy", "name": "orders"}}
    tables = ctx(rocketmq_policies=[named("RocketMQRetryPolicy", "orders", {})]).policy_caches
    with counting(Cache([replay("one"), replay("two", spec=other)]), tables):
        for kind in tables:
            labels = POLICY | {"policy_kind": kind}
            assert value("redrive_replays", **labels, phase="Pending") == 1
            shown = REGISTRY.get_sample_value(
                "redrive_replay_messages_total", labels | {"outcome": "moved"}
            )
            assert shown == 0


def test_progress_is_shown_only_of_running_replay() -> None:
    """A new job shows 0; a pending, suspended or finished one shows nothing."""

    def progress(**status: object) -> float | None:
        with counting(Cache([replay("it", status=status)]), {}):
            labels = POLICY | {"replay": "it"}
            return REGISTRY.get_sample_value("redrive_replay_progress_messages", labels)

    account = {"scanned": 20, "matched": 18, "moved": 4, "skipped": 3, "refused": 2, "left": 9}
    assert progress(phase="Running", **account) == 20 + 4 + 3 + 2
    assert progress(phase="Running", scanned=20) == 20  # it is planned
    assert progress(phase="Running") == 0
    assert progress(phase="Submitted") == 0
    for phase in ("Pending", "Suspended", "Completed", "Failed"):
        assert progress(phase=phase, **account) is None
    assert progress(phase="Running", finished=True, **account) is None


@pytest.mark.parametrize(
    ("spec", "status"),
    [
        ({"deadline": "1h"}, {}),  # DeadlineExceeded
        ({}, {"failure": {"reason": "Why", "message": "so"}}),  # ReplayFailed
    ],
)
async def test_failed_replay_shows_time_of_failure(
    spec: dict[str, Any], status: dict[str, Any]
) -> None:
    body = launched(replay(spec=spec, status=status), minutes_ago=10**6)
    application = application_in("RUNNING" if spec else "FAILED", body)
    api = FakeKubernetes()
    api.add(resources.REPLAYS, body)
    context = ctx(replays=[body], applications=[application])
    now = datetime(2026, 11, 22, 12, tzinfo=UTC)
    context = dataclasses.replace(context, kubernetes=api, clock=lambda: now)
    with counting(context.replays, context.policy_caches):
        assert value("redrive_replay_last_failure_timestamp_seconds", **POLICY) == 0
        await reconcile(Key.of(body), context, asyncio.Lock())
        at = value("redrive_replay_last_failure_timestamp_seconds", **POLICY)
    assert at == now.timestamp()


@pytest.mark.parametrize(("state", "outcome"), [("COMPLETED", "Completed"), ("FAILED", "Failed")])
async def test_ended_replay_counts_its_messages_once(state: str, outcome: str) -> None:
    status: dict[str, Any] = {
        "matched": 9, "moved": 4, "skipped": 3, "refused": 2, "left": 0,
        "finished": state == "COMPLETED",
        "startTime": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    body = replay(status=status)
    application = application_in(state, body)
    api = FakeKubernetes()
    api.add(resources.REPLAYS, body)
    context = ctx(replays=[body], applications=[application])
    context = dataclasses.replace(context, kubernetes=api)

    def counted() -> list[float]:
        messages = [
            value("redrive_replay_messages_total", **POLICY, outcome=result)
            for result in ("moved", "skipped", "refused", "left")
        ]
        return [*messages, value("redrive_replay_duration_seconds_count", outcome=outcome)]

    before = counted()
    for _ in range(2):
        await reconcile(Key.of(body), context, asyncio.Lock())
    assert [after - earlier for after, earlier in zip(counted(), before, strict=True)] == [
        4, 3, 2, 0, 1,
    ]  # fmt: skip


def live(**status: object) -> dict[str, float]:
    """Return the series of a Replay `it` and its policy, without those by phase."""
    body = replay("it", status=status)
    with counting(Cache([body]), {}):
        return {
            sample.labels.get("outcome")
            or sample.name.removeprefix("redrive_replay_"): sample.value
            for family in REGISTRY.collect()
            for sample in family.samples
            if sample.labels.items() >= POLICY.items()
            and sample.name.startswith("redrive_replay_")
            and not sample.name.endswith(("_total", "_created"))
        }


def test_live_replay_shows_messages_rate_and_remaining_time() -> None:
    account = {"matched": 21, "moved": 4, "skipped": 3, "refused": 2, "discarded": 0, "left": 9}
    shown = live(phase="Running", ratePerMinute=90, remaining="1h30m", **account)
    assert shown == {
        "moved": 4,
        "skipped": 3,
        "refused": 2,
        "discarded": 0,
        "left": 9,
        "progress_messages": 9,
        "live_messages_per_second": 1.5,
        "live_remaining_seconds": 5_400,
        "awaits_approval": 0,
    }
    assert live(phase="Submitted") == {"progress_messages": 0, "awaits_approval": 0}
    assert live(phase="Pending") == {}


def test_replay_that_waits_for_approval_is_shown() -> None:
    suspended = live(phase="Suspended", suspended=True, approval={"messages": 9}, left=9)
    assert suspended == {"left": 9, "awaits_approval": 1}
    assert live(phase="Suspended", suspended=True) == {"awaits_approval": 0}


def test_ended_replay_shows_when_it_refused_messages() -> None:
    end = {"completionTime": "2026-11-22T10:00:00Z"}
    at = datetime.fromisoformat("2026-11-22T10:00:00Z").timestamp()
    some = live(phase="Completed", moved=3, refused=2, approval={"messages": 5}, **end)
    assert some == {"last_success_timestamp_seconds": at, "last_refusal_timestamp_seconds": at}
    every = live(phase="Failed", refused=2, **end)
    assert every == {"last_failure_timestamp_seconds": at, "last_refusal_timestamp_seconds": at}
    assert live(phase="Completed", moved=3, refused=0, **end).keys() == {
        "last_success_timestamp_seconds"
    }


async def test_counters_begin_at_zero_with_the_first_replay() -> None:
    def moved() -> float | None:
        labels = POLICY | {"outcome": "moved"}
        return REGISTRY.get_sample_value("redrive_replay_messages_total", labels)

    context = ctx()
    with counting(context.replays, context.policy_caches):
        context.replays.put(replay("dry", spec={"mode": "Plan"}))
        context.replays.put(replay("first", spec={"mode": "Review"}))
        assert moved() is None
        context.replays.put(replay("first", spec={"mode": "Run"}))
        assert moved() == 0
    with counting(context.replays, context.policy_caches):
        assert moved() == 0


FORGED: tuple[dict[str, Any], ...] = (
    {"phase": "Completed", "completionTime": "0000-01-01T00:00:00Z"},
    {"phase": "Failed", "completionTime": "2026-01-01T00:00:00+99:00"},
    {"phase": "Completed", "completionTime": "9999-12-31T23:59:59-14:00"},
    {"phase": "Running", "moved": 1e308, "skipped": 1e308},
    {"phase": "Running", "moved": -5, "remaining": "99999999999999999999d", "ratePerMinute": -1},
)
"""The API server lets all of these pass."""


def test_forged_status_does_not_break_the_scrape() -> None:
    good = {"phase": "Completed", "completionTime": "2026-11-22T10:00:00Z"}
    forged = [replay(f"forged-{n}", status=status) for n, status in enumerate(FORGED)]
    with counting(Cache([*forged, replay("good", status=good)]), {}):
        at = value("redrive_replay_last_success_timestamp_seconds", **POLICY)
        completed = value("redrive_replays", **POLICY, phase="Completed")
        failed = REGISTRY.get_sample_value("redrive_replay_last_failure_timestamp_seconds", POLICY)
        generate_latest(REGISTRY)
    assert at == datetime.fromisoformat("2026-11-22T10:00:00Z").timestamp()
    assert (completed, failed) == (3, None)


@pytest.mark.parametrize(
    "status",
    [
        {"moved": -5, "left": 0},
        {"moved": 1e300},
        {"startTime": "9999-01-01T00:00:00Z", "finished": True},
    ],
)
async def test_forged_numbers_are_not_counted(status: dict[str, Any]) -> None:
    body = replay(status={"finished": True, **status})
    application = application_in("COMPLETED", body)
    api = FakeKubernetes()
    api.add(resources.REPLAYS, body)
    context = dataclasses.replace(ctx(replays=[body], applications=[application]), kubernetes=api)
    seconds = value("redrive_replay_duration_seconds_sum", outcome="Completed")
    moved = value("redrive_replay_messages_total", **POLICY, outcome="moved")
    await reconcile(Key.of(body), context, asyncio.Lock())
    assert value("redrive_replay_duration_seconds_sum", outcome="Completed") == seconds
    assert value("redrive_replay_messages_total", **POLICY, outcome="moved") == moved


def counted_policies() -> set[str]:
    """Return the names of the policies that have a metric of their own."""
    return {
        sample.labels["policy"]
        for family in metrics.MESSAGES.collect()
        for sample in family.samples
    }


async def test_replay_of_missing_policy_leaves_no_metric() -> None:
    before = counted_policies()
    for number in range(3):
        spec = {"policyRef": {"name": f"random-{number}"}, "select": {"where": "no sql"}}
        body = replay(f"bad-{number}", spec=spec)
        api = FakeKubernetes()
        api.add(resources.REPLAYS, body)
        context = dataclasses.replace(ctx(replays=[body]), kubernetes=api)
        await reconcile(Key.of(body), context, asyncio.Lock())
        assert api.objects[resources.REPLAYS][Key.of(body)]["status"]["phase"] == "Failed"
    assert counted_policies() == before


async def test_deleted_policy_takes_its_metrics_along() -> None:
    body = replay(spec={"select": {"where": "no sql"}})
    api = FakeKubernetes()
    api.add(resources.REPLAYS, body)
    context = dataclasses.replace(ctx(replays=[body]), kubernetes=api)
    with counting(context.replays, context.policy_caches):
        await reconcile(Key.of(body), context, asyncio.Lock())
        assert "orders" in counted_policies()
        (policy,) = context.policies
        context.policies.put({**policy, "metadata": {**policy["metadata"], "labels": {}}})
        assert "orders" in counted_policies()
        context.policies.drop(policy)
        assert "orders" not in counted_policies()
        context.policies.put(policy)
        metrics.ended(body, ReplayStatus.of({"status": reported(moved=1)}), Phase.FAILED, context)
        assert "orders" in counted_policies()
    assert not counted_policies()
