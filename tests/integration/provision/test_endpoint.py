"""Metrics, health checks and logs of the running operator."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

from sandbox import builds, installation
from sandbox.sandbox import Sandbox
from tests.integration.provision.conftest import SECONDS, Shop, redrive


def get(sandbox: Sandbox, path: str) -> tuple[int, str]:
    url = installation.endpoint(sandbox) + path
    with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310  our own, of http
        return answer.status, answer.read().decode()


def test_running_operator_is_live_ready_and_counts_objects(installed: Sandbox, shop: Shop) -> None:
    shop.create_topic(shop.topic("orders"))
    shop.policy()
    shop.ready()
    status, parts = get(installed, "/livez")
    assert status == 200
    assert [part.split(": last active ")[0] for part in parts.splitlines()] == [
        "event loop",
        "lease",
        "watch of /api/v1/configmaps",
        "watch of /apis/batch/v1/jobs",
        "watch of /apis/redrive.io/v1beta1/brokerconnections",
        "watch of /apis/redrive.io/v1beta1/inspections",
        "watch of /apis/redrive.io/v1beta1/replays",
        "watch of /apis/redrive.io/v1beta1/retrypolicies",
        "watch of /apis/redrive.io/v1beta1/rocketmqretrypolicies",
        "watch of /apis/spark.apache.org/v1/sparkapplications",
        "watch of /apis/sparkoperator.k8s.io/v1beta2/sparkapplications",
    ]
    assert get(installed, "/readyz") == (200, "ready\n")
    ready = (
        'redrive_objects{condition="Ready",kind="RetryPolicy",reason="Provisioned",status="True"}'
    )
    deadline = time.monotonic() + SECONDS
    # It counts the objects of its cache, which a watch may update later.
    while not re.search(rf"^{re.escape(ready)} [1-9]", get(installed, "/metrics")[1], re.MULTILINE):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    _, shown = get(installed, "/metrics")
    assert "redrive_lease_held 1.0\n" in shown
    created = re.search(r'redrive_admin_calls_total\{status="20\d",verb="PUT"\} (\S+)', shown)
    assert created is not None
    assert float(created[1]) >= 3
    assert 'redrive_admin_call_duration_seconds_count{verb="GET"}' in shown
    assert re.search(r"^redrive_lease_transitions_total \d", shown, re.MULTILINE)
    assert "redrive_build_info{" in shown
    assert 'redrive_reconcile_queue_duration_seconds_count{kind="RetryPolicy"}' in shown
    checked = subprocess.run(
        [builds.promtool() / "promtool", "check", "metrics"],
        input=shown, check=False, text=True, capture_output=True,
    )  # fmt: skip
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_forged_replay_status_breaks_no_scrape_and_is_replaced(
    installed: Sandbox, shop: Shop
) -> None:
    """The API server accepts this status from each client that may write it."""
    shop.apply({"forged": redrive("Replay", {"policyRef": {"name": "random"}})})
    shop.reaches("forged", "PolicyNotFound", "replay")
    condition = {"type": "type-1", "status": "True", "reason": "Reason1", "message": ""}
    forged = {
        "phase": "Completed",
        "startTime": "2026-01-01T00:00:00+99:00",
        "completionTime": "0000-01-01T00:00:00Z",
        "run": {"counts": {"moved": -5}},
        "conditions": [condition | {"lastTransitionTime": "0000-01-01T00:00:00Z"}],
    }
    objects = shop.cluster.objects
    objects.patch("replay", "forged", {"status": forged}, shop.namespace, "status")
    assert shop.get("replay", "forged")["status"].items() >= forged.items()
    labels = 'phase="Completed",policy="random",policy_kind="RetryPolicy",'
    labels += f'policy_namespace="{shop.namespace}"'
    ended = f"redrive_replays{{{labels}}} 1.0"
    deadline = time.monotonic() + SECONDS
    while ended not in (shown := get(installed, "/metrics")[1]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert re.search(
        r'^redrive_objects\{condition="Other",kind="Replay",reason="Other"', shown, re.MULTILINE
    )
    assert "Reason1" not in shown
    shop.annotate("forged", "replay", reconcile_requested_at="now")
    while "completionTime" in shop.get("replay", "forged")["status"]:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_log_lines_are_json_and_name_their_object(shop: Shop, operator_process: Path) -> None:
    before = len(operator_process.read_text("utf-8"))
    shop.create_topic(shop.topic("orders"))
    shop.policy()
    uid = shop.ready()["metadata"]["uid"]

    def policy_lines() -> list[dict[str, Any]]:
        written = operator_process.read_text("utf-8")[before:].splitlines(keepends=True)
        lines = [json.loads(line) for line in written if line.endswith("\n")]
        return [line for line in lines if line.get("uid") == uid]

    deadline = time.monotonic() + SECONDS
    while not any("Provisioned" in line["message"] for line in policy_lines()):
        assert time.monotonic() < deadline, policy_lines()  # logged after the status is written
        time.sleep(0.1)
    about = policy_lines()
    assert {(a["kind"], a["namespace"], a["name"]) for a in about} == {
        ("RetryPolicy", shop.namespace, "orders")
    }
