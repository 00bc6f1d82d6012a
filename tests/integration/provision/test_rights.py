"""The operator's ServiceAccount may do what it needs, as the chart says, and no more."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox import chart, installation
from sandbox.kubernetes import Cluster
from sandbox.sandbox import Sandbox
from tests.integration.provision.conftest import MakeShop, Shop

pytestmark = pytest.mark.xdist_group("own sandbox")

VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
FOLLOW = "what users ask for is read at the start and followed by watches"
TELL = "how things stand is written into the status"
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
        "get": "one that is deleted is read before its topics are: a watch may be late",
        "patch": "the finalizer is put on, and taken off in the end",
    },
    "redrive.io/retrypolicies/status": {"patch": TELL},
    "redrive.io/replays": {
        "list": FOLLOW,
        "watch": FOLLOW,
        "get": "its job may have written the final account after the last watch event",
        "patch": "the finalizer is there while its role has rights at a target",
        "delete": "one that has ended, and says in ttlAfterFinished that it goes then",
    },
    "redrive.io/replays/status": {"patch": TELL},
    "/secrets": {"get": "credentials of connections, each read by its name"},
    "/serviceaccounts": {},
    "/persistentvolumeclaims": {"get": "a Replay waits until those of its job template are there"},
    "/configmaps": {
        "get": "one that is there already may belong to somebody else",
        "list": "those of redrive, by their label, are compared with what they should be",
        "watch": "and one that is deleted or changed is put right at once",
        "create": "the policy that consumers mount",
        "patch": "the same, when the policy has changed",
    },
    "/events": {"create": "what happened, for `kubectl describe`"},
    "/pods": {},
    "/namespaces": {"get": "labels that a connection selects by, each namespace read by its name"},
    "rbac.authorization.k8s.io/roles": {},
    "apiextensions.k8s.io/customresourcedefinitions": {},
    "sparkoperator.k8s.io/sparkapplications": {
        "list": "how the runs of Replays stand, at the start",
        "watch": "and from then on",
        "create": "a Replay's run",
    },
    "spark.apache.org/sparkapplications": {
        "list": "the same, by the other Spark operator",
        "watch": "likewise",
        "create": "likewise",
    },
    "coordination.k8s.io/leases": {},
}
"""All that is asked for: resource → verb → why it can't do without."""


ACCOUNT = {"get": "a Replay waits until the ServiceAccount of its job is there"}
"""What the operator may do to the ServiceAccount of replay jobs, in each namespace it serves."""
DRIVERS = {
    "/pods": {"list": "what the driver of a job waits for, when it does not start"},
    "/events": {"list": "and what its pod does not say itself, such as a volume that is missing"},
}
"""What it may do besides in the namespaces that are prepared for Replays."""
SERVING = ("ClusterRole", f"{installation.RELEASE}.{installation.NAMESPACE}")
LEASE = {
    "get": "who holds it",
    "patch": "to renew it, to take it over, to give it up",
    "create": "at the very first start",
}
"""What the operator may do to its one Lease, in the namespace of the release."""


def review(resource: str, verb: str, *, release_in: str, namespace: str = "") -> dict[str, Any]:
    """The question whether a release's account may do *verb*; in any namespace unless one is given.

    Args:
        resource: group, plural and maybe subresource.
        verb: of the API.
        release_in: the namespace of the release.
        namespace: where it would be done.
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
    """What the account of a release may do with the resources of the table."""
    asked = [(resource, verb) for resource in NEEDED for verb in VERBS]
    items = [review(*ask, release_in=release_in, namespace=namespace) for ask in asked]
    answers = cluster.kubectl(
        "create", "-f", "-", '--output=jsonpath={.status.allowed}{"\\n"}',
        input=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}),
    ).splitlines()  # fmt: skip
    found: dict[str, set[str]] = {resource: set() for resource in NEEDED}
    for (resource, verb), answer in zip(asked, answers, strict=True):
        assert answer in {"true", "false"}
        if answer == "true":
            found[resource].add(verb)
    return found


def rules(role: dict[str, Any]) -> dict[str, set[str]]:
    """What a role allows, in the form of the table."""
    found: dict[str, set[str]] = {}
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                found.setdefault(f"{group}/{resource}", set()).update(rule["verbs"])
    return found


def test_the_operator_may_do_what_it_needs_and_nothing_else(
    cluster: Cluster, operator_process: Path
) -> None:
    assert operator_process.is_file()
    needed = {resource: set(verbs) for resource, verbs in NEEDED.items()}
    assert allowed(cluster, release_in=installation.NAMESPACE) == needed


def test_the_chart_asks_for_no_right_without_a_reason() -> None:
    rendered = chart.render(installation.VALUES)
    (serving,) = (o for o in rendered if (o["kind"], o["metadata"]["name"]) == SERVING)
    needed = {resource: set(verbs) for resource, verbs in NEEDED.items() if verbs}
    assert rules(serving) == needed | {"/serviceaccounts": set(ACCOUNT)}
    names = {
        r["resources"][0]: r["resourceNames"] for r in serving["rules"] if "resourceNames" in r
    }
    assert names == {"serviceaccounts": ["redrive-replay"]}
    roles = {o["metadata"]["name"]: o for o in rendered if o["kind"] == "Role"}
    holding = roles.pop(f"{SERVING[1]}.release")
    assert set(roles) == {"redrive-test"}  # of `helm test`; nothing is prepared for Replays
    assert rules(holding) == {
        "coordination.k8s.io/leases": set(LEASE),
        # The image of replay jobs, and dry runs by which job templates are validated.
        "/podtemplates": {"get", "create"},
    }
    by_name = {r["resourceNames"][0]: r["verbs"] for r in holding["rules"] if "resourceNames" in r}
    assert by_name == {"redrive": ["get", "patch"], "redrive-replay": ["get"]}


@pytest.fixture
def in_one_namespace(installed: Sandbox, make_shop: MakeShop) -> Iterator[tuple[Shop, str]]:
    """A shop whose operator has Roles in its namespace alone; where that operator's release is."""
    shop = make_shop()
    release_in = f"{shop.namespace}-redrive"
    values = {
        **installation.VALUES,
        "namespaces": [shop.namespace],
        "clusterId": "ours",
        "crds": {"install": False},
    }
    installed.processes.stop(installation.OPERATOR)
    try:
        chart.install(installed.cluster, installation.RELEASE, release_in, values)
        installation.start_operator(installed, namespace=release_in, name=release_in)
        yield shop, release_in
    finally:
        installed.processes.stop(release_in)
        installed.cluster.objects.delete("namespace", release_in)
        installation.start_operator(installed)


def test_roles_in_the_namespaces_that_are_served_are_enough(
    in_one_namespace: tuple[Shop, str], installed: Sandbox, make_shop: MakeShop
) -> None:
    shop, release_in = in_one_namespace
    elsewhere = make_shop()
    for each in (elsewhere, shop):
        each.create_topic(each.topic("orders"))
        each.connection()
        each.policy()
    shop.ready()
    shop.ready("main", "brokerconnection")
    shop.delete("orders")
    assert "status" not in elsewhere.get("retrypolicy", "orders")
    cluster = installed.cluster
    served = allowed(cluster, release_in=release_in, namespace=shop.namespace)
    needed = {resource: set(verbs) for resource, verbs in NEEDED.items()}
    assert served == needed | {
        resource: {*NEEDED[resource], *verbs} for resource, verbs in DRIVERS.items()
    }
    beyond = allowed(cluster, release_in=release_in, namespace=elsewhere.namespace)
    assert beyond == {resource: set[str]() for resource in NEEDED}
    assert "Forbidden" not in installed.processes.log(release_in).read_text()


def test_the_role_at_the_broker_is_a_tenants_admin_and_no_super_user(
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
