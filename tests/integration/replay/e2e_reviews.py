"""Replays in review: operator, driver and API server; what was shown is moved, and nothing else."""

from __future__ import annotations

import json
import signal
from typing import Any

import psutil
import pytest

from sandbox.errors import SandboxError
from tests.support.replay_shop import SECONDS, Shop, shop

__all__ = ["shop"]


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
