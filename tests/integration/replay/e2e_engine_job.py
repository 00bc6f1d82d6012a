"""Replays as Kubernetes Jobs: operator, Job, one pod with child processes or Spark, and status."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.replay_shop import (
    SECONDS,
    SPARK_APPLICATION,
    Shop,
    check_no_token_leaked,
    shop,
)
from tests.support.waiting import wait_until

__all__ = ["shop"]


@pytest.mark.timeout(2 * SECONDS + 60)
def test_jobs_replay_with_and_without_a_condition(shop: Shop) -> None:
    shop.declare()
    shop.bury(8, "WarehouseDown")
    shop.bury(5, "JSONDecodeError")

    shop.replay("first", "cause_type = 'WarehouseDown'")
    first = shop.reaches("first", "Completed")
    # Created within the same second, either one could run first.
    shop.replay("second", engine="Auto", select={"limit": 3})
    second = shop.reaches("second", "Completed")

    numbers = ("scanned", "matched", "moved", "skipped", "refused", "left")
    assert [first["run"]["counts"][name] for name in numbers] == [13, 8, 8, 0, 0, 0]
    assert [second["run"]["counts"][name] for name in numbers[1:]] == [3, 3, 0, 0, 0]
    assert shop.replayed() == ["JSONDecodeError"] * 3 + ["WarehouseDown"] * 8
    jobs = {job["metadata"]["name"]: job for job in shop.applications("job")}
    assert {first["job"], second["job"]} == jobs.keys()
    assert (first["engine"], second["engine"]) == ("Job", "Job")
    assert "sparkApplication" not in first
    assert shop.applications(SPARK_APPLICATION) == []
    for job in jobs.values():
        assert job["spec"]["template"]["spec"]["serviceAccountName"] == "redrive-job"
        assert job["status"]["succeeded"] == 1
    check_no_token_leaked(shop)
    assert all(token not in json.dumps(jobs) for token in shop.tokens.values())


@pytest.mark.timeout(2 * SECONDS + 60)
def test_deleted_job_is_relaunched_and_moves_once(shop: Shop) -> None:
    shop.declare()
    shop.bury(6, "WarehouseDown")
    shop.replay("again", rateLimit={"messages": 1, "per": "10s"})
    name = shop.reaches("again", "Running")["job"]
    uid = shop.applications()[0]["metadata"]["uid"]
    shop.kubectl("delete", "job", name)
    wait_until(lambda: [job for job in shop.applications() if job["metadata"]["uid"] != uid])
    shop.replay("again", rateLimit={"messages": 1_000})

    status = shop.reaches("again", "Completed")

    (job,) = shop.applications()
    assert job["metadata"]["uid"] != uid
    counts = status["run"]["counts"]
    assert (counts["matched"], counts["moved"]) == (6, 6)
    assert shop.replayed() == ["WarehouseDown"] * 6


@pytest.mark.timeout(2 * SECONDS + 60)
def test_target_that_evicts_meanwhile_stops_a_resumed_run(shop: Shop) -> None:
    shop.declare()
    shop.bury(6, "WarehouseDown")
    orders = f"persistent/{shop.name}/prod/orders"
    shop.rest("PUT", f"{orders}/subscription/fulfilment")
    run: dict[str, Any] = {"target": {"type": "Source"}, "guarantee": "AtLeastOnce"}
    slow: dict[str, Any] = {"rateLimit": {"messages": 1, "per": "10s"}}
    shop.replay("again", **run, **slow, suspend=False)
    shop.reaches("again", "Running")
    shop.replay("again", **run, **slow, suspend=True)
    shop.reaches("again", "Suspended")
    quota = f"{orders}/backlogQuota"
    evicting = {"policy": "consumer_backlog_eviction", "limitSize": 10}
    shop.rest("POST", f"{quota}?backlogQuotaType=destination_storage", evicting)

    shop.replay("again", **run, rateLimit={"messages": 1_000}, suspend=False)

    wait_until(lambda: shop.status("again")["Ready"]["reason"] == "TargetEvicts", SECONDS)
    assert shop.status("again")["run"]["counts"]["left"]
    shop.rest("DELETE", f"{quota}?backlogQuotaType=destination_storage")
    counts = shop.reaches("again", "Completed")["run"]["counts"]
    assert (counts["matched"], counts["moved"]) == (6, 6)
    assert shop.replayed(shop.policy.topic) == ["WarehouseDown"] * 6
