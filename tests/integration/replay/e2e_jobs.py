"""Replays as Kubernetes Jobs and in review: operator, API server, driver and status."""

from __future__ import annotations

import json
import signal
from typing import Any

import psutil
import pytest

from sandbox.errors import SandboxError
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


def in_review(shop: Shop, name: str) -> dict[str, Any]:
    return shop.reaches(name, "Suspended", "InReview")


def change(shop: Shop, name: str, user: str = "", **spec: object) -> None:
    """Change the spec of a Replay, as *user*."""
    patch = json.dumps({"spec": spec})
    caller = [f"--as={user}"] if user else []
    shop.kubectl("patch", "replay", name, "--type=merge", f"--patch={patch}", *caller)


def numbers(status: dict[str, Any], *names: str) -> list[int]:
    return [status["run"]["counts"][name] for name in names]


def kill_driver(shop: Shop, name: str) -> int:
    """Kill the driver of a Replay, and return its process id."""
    words = f'"namespace": "{shop.name}"', f'"name": "{name}"'
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if all(word in line for word in words):
            process.send_signal(signal.SIGKILL)
            return process.pid
    pytest.fail(f"no driver of {name} runs")


def may_not_confirm(shop: Shop, name: str) -> None:
    """Check that a review is confirmed by no viewer, no job and not by the operator."""
    viewer = "--clusterrole=redrive-viewer.redrive-system"
    shop.kubectl("create", "rolebinding", "viewers", viewer, "--user=bob")
    accounts = f"system:serviceaccount:{shop.name}"
    users = {
        "bob": 'User "bob" cannot patch resource',
        f"{accounts}:redrive-job": "cannot patch resource",
        f"{accounts}:redrive-replay": "cannot patch resource",
        "system:serviceaccount:redrive-system:redrive": "the operator does not change the spec",
    }
    for user, problem in users.items():
        with pytest.raises(SandboxError, match=problem):
            change(shop, name, user, mode="Run")


@pytest.mark.timeout(3 * SECONDS)
def test_reviews_of_one_policy_move_what_each_has_shown(shop: Shop) -> None:
    shop.declare()
    shop.bury(5, "WarehouseDown")
    shop.bury(3, "JSONDecodeError")
    warehouse = {"causes": ["WarehouseDown"]}
    shop.replay("first", mode="Review", select=warehouse)
    both = {"causes": ["WarehouseDown", "JSONDecodeError"]}
    shop.replay("second", mode="Review", select=both)
    first, second = in_review(shop, "first"), in_review(shop, "second")
    assert numbers(first, "scanned", "matched", "moved", "left") == [8, 5, 0, 5]
    assert numbers(second, "matched", "left") == [8, 8]
    (cause,) = first["run"]["preview"]["causes"]
    assert (cause["cause"], cause["messages"], cause["replayed"]) == ("WarehouseDown", 5, 0)
    shop.bury(4, "WarehouseDown")  # after the plans
    shop.replay("third", select={"causes": ["JSONDecodeError"], "limit": 1})
    assert numbers(shop.reaches("third", "Completed"), "moved") == [1]  # it waits for no review

    kill_driver(shop, "second")
    change(shop, "second", mode="Run")
    may_not_confirm(shop, "first")
    shop.kubectl(
        "create", "rolebinding", "responders", "--user=ann",
        "--clusterrole=redrive-responder.redrive-system",
    )  # fmt: skip
    change(shop, "first", "ann", mode="Run")
    first, second = shop.reaches("first", "Completed"), shop.reaches("second", "Completed")

    assert numbers(first, "matched", "left") == [5, 0]
    assert sum(numbers(first, "moved") + numbers(second, "moved")) == 7
    assert shop.replayed() == ["JSONDecodeError"] * 3 + ["WarehouseDown"] * 5
    assert "review" not in first["run"]
