"""The running operator: its rights, each with a reason, its metrics, health checks and logs."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

from sandbox import builds, chart, installation
from sandbox.kubernetes import Cluster
from sandbox.sandbox import Sandbox
from tests.integration.provision.conftest import SECONDS, MakeShop, Shop, redrive

VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
FOLLOW = "objects of users are read at the start and followed by watches"
TELL = "progress and conditions are written into the status"
NEEDED: dict[str, dict[str, str]] = {
    "redrive.io/brokerconnections": {
        "list": FOLLOW,
        "watch": FOLLOW,
        "patch": "the finalizer is there while policies use it",
    },
    "redrive.io/brokerconnections/status": {"patch": TELL},
    "redrive.io/retrypolicies": {
        "list": FOLLOW,
        "watch": FOLLOW,
        "get": "a deleted policy is read before its topics are deleted: a watch may be late",
        "patch": "the finalizer is added, and removed in the end",
    },
    "redrive.io/retrypolicies/status": {"patch": TELL},
    "redrive.io/rocketmqretrypolicies": {
        "list": FOLLOW,
        "watch": FOLLOW,
        "get": "a deleted policy is read before its group is deleted: a watch may be late",
        "patch": "the finalizer is added, and removed in the end",
    },
    "redrive.io/rocketmqretrypolicies/status": {"patch": TELL},
    "redrive.io/replays": {
        "list": FOLLOW,
        "watch": FOLLOW,
        "get": "its job may have written the final account after the last watch event",
        "patch": "the finalizer is there while its role has rights at a target",
        "delete": "a Replay that has ended is deleted after its ttlAfterFinished",
    },
    "redrive.io/replays/status": {"patch": TELL},
    "redrive.io/inspections": {
        "list": FOLLOW,
        "watch": FOLLOW,
        "get": "the summary of its job may come later than the watch shows the end of the Job",
        "delete": "an Inspection that has ended is deleted after its ttlAfterFinished",
    },
    "redrive.io/inspections/status": {"patch": TELL},
    "/secrets": {"get": "credentials of connections, each read by its name"},
    "/serviceaccounts": {},
    "/persistentvolumeclaims": {"get": "a Replay waits until those of its job template are there"},
    "/configmaps": {
        "get": "an existing ConfigMap may belong to another owner",
        "list": "ConfigMaps with the label of redrive are compared with their policies",
        "watch": "a deleted or changed ConfigMap is restored at once",
        "create": "the policy that consumers mount",
        "patch": "the same, when the policy has changed",
    },
    "/events": {"create": "Events for `kubectl describe`"},
    "/pods": {},
    "/namespaces": {"get": "labels that a connection selects by, each namespace read by its name"},
    "rbac.authorization.k8s.io/roles": {},
    "apiextensions.k8s.io/customresourcedefinitions": {},
    "batch/jobs": {
        "list": "the states of the runs of Replays with engine Job, at the start",
        "watch": "and from then on",
        "create": "a Replay's run",
    },
    "sparkoperator.k8s.io/sparkapplications": {
        "list": "the states of the runs of Replays, at the start",
        "watch": "and from then on",
        "create": "a Replay's run",
    },
    "spark.apache.org/sparkapplications": {
        "list": "the same, by the other Spark operator",
        "watch": "likewise",
        "create": "likewise",
    },
    "authorization.k8s.io/localsubjectaccessreviews": {
        "create": "a Replay waits until the ServiceAccount of its job has the rights of a job",
    },
    "coordination.k8s.io/leases": {},
}
"""All rights of the operator: resource → verb → reason."""
ACCOUNT = {"get": "a Replay waits until the ServiceAccount of its job is there"}
"""Rights to the ServiceAccount of replay jobs, in each namespace that is served."""
DRIVERS = {
    "/pods": {"list": "the reason why the driver of a job does not start"},
    "/events": {"list": "reasons that the pod does not contain, such as a missing volume"},
    "/secrets": {"create": "the key of a ledger, which the pods of a job mount"},
}
"""Additional rights in the namespaces that are prepared for Replays."""
SERVING = ("ClusterRole", f"{installation.RELEASE}.{installation.NAMESPACE}.operator")
LEASE = {
    "get": "the holder",
    "patch": "to renew, take over and release it",
    "create": "at the very first start",
}
"""Rights to the Lease of the operator, in the namespace of the release."""


def review(resource: str, verb: str, *, release_in: str, namespace: str = "") -> dict[str, Any]:
    """A SubjectAccessReview: may the account of a release use *verb* on *resource*?

    Args:
        resource: group, plural and, optionally, subresource.
        verb: of the API.
        release_in: the namespace of the release.
        namespace: of the resource; empty means all namespaces.
    """
    group, plural, *subresource = resource.split("/")
    attributes = {"verb": verb, "group": group, "resource": plural, "namespace": namespace}
    if subresource:
        attributes["subresource"] = subresource[0]
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": f"system:serviceaccount:{release_in}:{installation.RELEASE}",
            "groups": ["system:serviceaccounts", "system:authenticated"],
            "resourceAttributes": attributes,
        },
    }


def allowed(cluster: Cluster, *, release_in: str, namespace: str = "") -> dict[str, set[str]]:
    """The verbs that the account of a release may use on each resource of `NEEDED`."""
    pairs = [(resource, verb) for resource in NEEDED for verb in VERBS]
    items = [review(*pair, release_in=release_in, namespace=namespace) for pair in pairs]
    answers = cluster.kubectl(
        "create", "-f", "-", '--output=jsonpath={.status.allowed}{"\\n"}',
        input=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}),
    ).splitlines()  # fmt: skip
    verbs: dict[str, set[str]] = {resource: set() for resource in NEEDED}
    for (resource, verb), answer in zip(pairs, answers, strict=True):
        assert answer in {"true", "false"}
        if answer == "true":
            verbs[resource].add(verb)
    return verbs


def rules(role: dict[str, Any]) -> dict[str, set[str]]:
    """The rights of a role: resource → verbs."""
    verbs: dict[str, set[str]] = {}
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                verbs.setdefault(f"{group}/{resource}", set()).update(rule["verbs"])
    return verbs


def test_operator_has_exactly_the_needed_rights(cluster: Cluster, operator_process: Path) -> None:
    assert operator_process.is_file()
    needed = {resource: set(verbs) for resource, verbs in NEEDED.items()}
    assert allowed(cluster, release_in=installation.NAMESPACE) == needed


def test_chart_grants_no_right_without_a_reason() -> None:
    rendered = chart.render(installation.VALUES)
    (serving,) = (o for o in rendered if (o["kind"], o["metadata"]["name"]) == SERVING)
    needed = {resource: set(verbs) for resource, verbs in NEEDED.items() if verbs}
    assert rules(serving) == needed | {"/serviceaccounts": set(ACCOUNT)}
    names = {
        r["resources"][0]: r["resourceNames"] for r in serving["rules"] if "resourceNames" in r
    }
    assert names == {"serviceaccounts": ["redrive-replay", "redrive-job", "redrive-inspection"]}
    roles = {o["metadata"]["name"]: o for o in rendered if o["kind"] == "Role"}
    holding = roles.pop("redrive.redrive-system.release")
    # That of `helm test`: nothing is prepared for Replays.
    assert set(roles) == {"redrive.redrive-system.test"}
    assert rules(holding) == {
        "coordination.k8s.io/leases": set(LEASE),
        # The image of replay jobs, and dry runs by which job templates are validated.
        "/podtemplates": {"get", "create"},
        # The keys from which those of ledgers are derived.
        "/secrets": {"get", "create"},
    }
    by_name = {r["resourceNames"][0]: r["verbs"] for r in holding["rules"] if "resourceNames" in r}
    assert by_name == {
        "redrive": ["get", "patch"],
        "redrive-replay": ["get"],
        "redrive-replay-keys": ["get"],
    }


def test_broker_role_of_the_operator_is_no_super_user(
    make_shop: MakeShop, operator_process: Path
) -> None:
    assert operator_process.is_file()
    shop = make_shop()
    shop.create_topic(shop.topic("orders"))
    shop.connection()
    shop.policy()
    shop.ready()  # with this token and no other
    token = shop.broker.token(shop.role)
    for method, path in (
        ("GET", "tenants"),
        ("PUT", f"tenants/{shop.tenant}-b"),
        ("GET", "broker-stats/topics"),
        ("GET", "namespaces/public"),
        ("PUT", f"namespaces/{make_shop().tenant}/mine"),
    ):
        answer = shop.broker.request(method, f"/admin/v2/{path}", token=token)
        assert answer.status in {401, 403}, (method, path)


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
