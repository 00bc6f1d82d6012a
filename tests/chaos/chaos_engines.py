"""Replays by both engines at once, and Jobs that are refused or deleted: accounts and messages.

A user deletes a SparkApplication while its Replay runs; `make test` deletes a Job.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from redrive.policy.model import Policy
from sandbox.errors import SandboxError
from tests.support.replay_shop import SECONDS, Shop, shop
from tests.support.waiting import wait_until

__all__ = ["shop"]
pytestmark = pytest.mark.timeout(4 * SECONDS)
ENGINES = ("Job", "Spark")
FIRST, LATER = 40, 25
SLOW, FAST = {"messages": 1, "per": "10s"}, {"messages": 1_000}


def completed(shop: Shop, name: str, engine: str) -> list[int]:
    """Wait for the end of a Replay; return its matched and moved messages, if none is left."""
    status = shop.reaches(name, "Completed")
    assert status["engine"] == engine
    counts = status["run"]["counts"]
    assert counts["left"] == 0
    assert counts["matched"] == counts["moved"] + counts["skipped"] + counts["refused"]
    return [counts["matched"], counts["moved"]]


@pytest.mark.parametrize("engines", [ENGINES, ENGINES[::-1]], ids=["Job first", "Spark first"])
def test_engines_take_turns_on_one_policy(shop: Shop, engines: tuple[str, str]) -> None:
    """The second moves the dead letters that came after the plan of the first."""
    first, second = engines
    shop.declare()
    shop.bury(FIRST, "WarehouseDown")
    shop.replay("first", engine=first, rateLimit=SLOW)
    wait_until(lambda: shop.status("first").get("run", {}).get("counts", {}).get("moved"), SECONDS)
    shop.replay("second", engine=second)
    shop.bury(LATER, "JSONDecodeError")
    shop.reaches("second", "Pending", "ReplayInProgress")
    shop.replay("first", engine=first, rateLimit=FAST)

    assert completed(shop, "first", first) == [FIRST, FIRST]
    assert completed(shop, "second", second) == [LATER, LATER]
    assert shop.replayed() == ["JSONDecodeError"] * LATER + ["WarehouseDown"] * FIRST


def test_engines_move_to_one_target_at_once(shop: Shop) -> None:
    """Two policies of one topic, whose Replays run together, each with a ledger of its own."""
    shop.declare()
    audit = Policy(shop.policy.topic, "audit")
    spec = {"connectionRef": {"name": "main"}, "topic": str(audit.topic), "subscription": "audit"}
    shop.apply("redrive.io/v1beta1", "RetryPolicy", "audit", spec=spec)
    shop.wait_until_ready("audit")
    source = f"persistent/{shop.name}/prod/orders"
    for name in ("fulfilment", "audit"):
        shop.rest("PUT", f"{source}/subscription/{name}", {"ledgerId": -1, "entryId": -1})
    shop.rest("POST", f"{source}/deduplicationEnabled", body=True)
    shop.bury(FIRST, "WarehouseDown")
    shop.bury(LATER, "JSONDecodeError", audit.dead_letter_topic)

    def replay(rate: Mapping[str, object]) -> None:
        shared: dict[str, Any] = {"target": {"type": "Source"}, "rateLimit": rate}
        shop.replay("by-job", engine="Job", **shared)
        shop.replay("by-spark", engine="Spark", policyRef={"name": "audit"}, **shared)

    replay(SLOW)
    for name in ("by-job", "by-spark"):
        shop.reaches(name, "Running")
    replay(FAST)

    assert completed(shop, "by-job", "Job") == [FIRST, FIRST]
    assert completed(shop, "by-spark", "Spark") == [LATER, LATER]
    expected = ["JSONDecodeError"] * LATER + ["WarehouseDown"] * FIRST
    assert shop.replayed(shop.policy.topic) == expected


@contextmanager
def quota(shop: Shop) -> Iterator[str]:
    """A quota that admits no Job."""
    hard = {"count/jobs.batch": "0"}
    shop.apply("v1", "ResourceQuota", "no-jobs", spec={"hard": hard})
    status = json.dumps({"status": {"hard": hard, "used": hard}})  # the sandbox counts none
    shop.kubectl("patch", "quota/no-jobs", "--subresource=status", "--type=merge", "-p", status)
    yield "exceeded quota: no-jobs"
    shop.kubectl("delete", "quota/no-jobs")


@contextmanager
def policy(shop: Shop) -> Iterator[str]:
    """An admission policy that denies Jobs."""
    name, group = f"no-jobs-{shop.name}", "admissionregistration.k8s.io/v1"
    rule = {"apiGroups": ["batch"], "apiVersions": ["v1"], "resources": ["jobs"]}
    matched = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": shop.name}},
        "resourceRules": [{**rule, "operations": ["CREATE"]}],
    }
    denial = {"expression": "false", "message": "no Jobs tonight", "reason": "Forbidden"}
    spec: dict[str, Any] = {"matchConstraints": matched, "validations": [denial]}
    binding = {"policyName": name, "validationActions": ["Deny"]}
    kinds = "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"
    objects = shop.sandbox.cluster.objects
    for kind, body in zip(kinds, (spec, binding), strict=True):
        objects.apply({"apiVersion": group, "kind": kind, "metadata": {"name": name}, "spec": body})
    yield "denied request: no Jobs tonight"
    for kind in kinds:
        shop.sandbox.cluster.kubectl("delete", kind, name)


@pytest.mark.parametrize("refusal", [quota, policy], ids=["quota", "policy"])
def test_refused_job_is_created_once_it_is_admitted(
    shop: Shop, refusal: Callable[[Shop], Any]
) -> None:
    def is_refused() -> bool:
        try:
            shop.kubectl("create", "job", "probe", "--image=none", "--dry-run=server")
        except SandboxError:
            return True
        return False

    shop.declare()
    shop.bury(FIRST, "WarehouseDown")
    with refusal(shop) as cause:
        wait_until(is_refused)
        shop.replay("refused")
        message = shop.reaches("refused", "Pending", "KubernetesRefused")["Ready"]["message"]
        assert cause in message
        assert "the operator retries" in message
        assert shop.applications() == []
    assert completed(shop, "refused", "Job") == [FIRST, FIRST]
    assert shop.replayed() == ["WarehouseDown"] * FIRST


@pytest.mark.timeout(2 * SECONDS + 60)
def test_deleted_application_is_relaunched_and_moves_once(shop: Shop) -> None:
    shop.declare()
    shop.bury(6, "WarehouseDown")
    shop.replay("again", engine="Spark", rateLimit={"messages": 1})  # so that one sees it run
    name = shop.reaches("again", "Running")["sparkApplication"]
    before = shop.applications()[0]["metadata"]["uid"]
    shop.kubectl("delete", "sparkapp", name)

    status = shop.reaches("again", "Completed")

    (application,) = shop.applications()
    assert application["metadata"]["uid"] != before
    counts = status["run"]["counts"]
    assert (counts["matched"], counts["moved"]) == (6, 6)
    assert shop.replayed() == ["WarehouseDown"] * 6
