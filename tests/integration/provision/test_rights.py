"""Rights of the operator's ServiceAccount: those of the chart, each with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sandbox import chart, installation
from sandbox.kubernetes import Cluster
from tests.integration.provision.conftest import MakeShop

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
