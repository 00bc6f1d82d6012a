"""The example repositories, rendered and applied in the order of Argo CD and Flux."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from graphlib import TopologicalSorter

import yaml

from redrive.api import GROUP
from release import CHECKOUT, gitops
from tests.integration.gitops.conftest import EXAMPLES, Body, Team
from tests.support import argocd, flux
from tests.support.waiting import wait_until


def documents(path: str) -> list[Body]:
    return list(yaml.safe_load_all((EXAMPLES / path).read_text("utf-8")))


def apply(team: Team, bodies: list[Body]) -> None:
    """Apply objects, namespaces first, as both tools do."""
    for body in sorted(bodies, key=lambda body: bool(body["kind"] != "Namespace")):
        team.cluster.objects.apply(body)


def health(team: Team, body: Body) -> Body:
    """Return the health of an object as it is, by the script of its kind."""
    script = (gitops.CUSTOMIZATIONS / body["kind"] / "health.lua").read_text("utf-8")
    return argocd.health(script, team.get(body))


def run_action(team: Team, body: Body, name: str) -> Body:
    """Run an action on an object as it is; write the result, or validate a new object."""
    script = (gitops.CUSTOMIZATIONS / body["kind"] / f"actions/{name}/action.lua").read_text(
        "utf-8"
    )
    stored = team.get(body)
    operation, result = argocd.act(script, stored)
    if operation == "create":
        return team.cluster.objects.put(result, team.name, dry_run=True)
    patch = json.dumps(argocd.merge_patch(stored, result))
    kind, metadata = body["kind"].lower(), body["metadata"]
    team.cluster.kubectl(
        "patch",
        kind,
        metadata["name"],
        f"-n={metadata['namespace']}",
        "--type=merge",
        f"-p={patch}",
    )
    return team.get(body)


def permits(application: Body, body: Body) -> bool:
    """Return True if the project of an application permits the kind of an object."""
    projects = yaml.safe_load_all((gitops.ARGOCD / "appproject.yaml").read_text("utf-8"))
    [project] = [p for p in projects if p["metadata"]["name"] == application["spec"]["project"]]
    group = body["apiVersion"].rpartition("/")[0]
    rule, spec = {"group": group, "kind": body["kind"]}, project["spec"]
    if body["metadata"].get("namespace") is None:
        return rule in spec["clusterResourceWhitelist"]
    permitted = spec.get("namespaceResourceWhitelist", [rule])
    return rule in permitted and rule not in spec.get("namespaceResourceBlacklist", ())


def test_examples_for_flux_become_current_in_their_order(team: Team) -> None:
    specs = {
        body["metadata"]["name"]: body["spec"]
        for body in documents("flux/cluster/kustomizations.yaml")
    }
    needs = {
        name: [need["name"] for need in spec.get("dependsOn", ())] for name, spec in specs.items()
    }
    operator, *steps = TopologicalSorter(needs).static_order()
    assert specs[operator]["path"] == "./gitops/flux/operator"  # installed already
    checks = flux.expressions()
    kinds = []
    for step in steps:
        bodies = team.render(CHECKOUT / specs[step]["path"])
        apply(team, bodies)
        for body in (body for body in bodies if body["kind"] in checks):
            wait_until(partial(is_current, team, body, checks[body["kind"]]))
            kinds.append(body["kind"])
    assert kinds == ["BrokerConnection", "RetryPolicy"]
    assert_provisioned(team)


def test_examples_for_argo_cd_become_healthy_in_their_waves(team: Team) -> None:
    def wave(body: Body) -> int:
        annotations = body["metadata"].get("annotations", {})
        return int(annotations.get("argocd.argoproj.io/sync-wave", "0"))

    operator, *applications = sorted(documents("argocd/applications.yaml"), key=wave)
    assert operator["spec"]["source"]["path"] == "charts/redrive"  # installed already
    states = []
    for application in applications:
        bodies = team.render(CHECKOUT / application["spec"]["source"]["path"])
        assert {body["kind"] for body in bodies if not permits(application, body)} == set()
        for number in sorted({wave(body) for body in bodies}):
            current = [body for body in bodies if wave(body) == number]
            apply(team, current)
            for body in (body for body in current if body["apiVersion"].startswith(GROUP)):
                wait_until(partial(is_healthy, team, body))
                states.append((body["kind"], number))
    assert states == [("BrokerConnection", 0), ("RetryPolicy", -1)]
    assert_provisioned(team)
    policy = next(body for body in bodies if body["kind"] == "RetryPolicy")
    assert_actions_work(team, policy)


def is_current(team: Team, body: Body, checks: Mapping[str, str]) -> bool:
    return flux.evaluate(checks, team.get(body)) == flux.CURRENT


def is_healthy(team: Team, body: Body) -> bool:
    return bool(health(team, body)["status"] == "Healthy")


def assert_provisioned(team: Team) -> None:
    """Check that consumers find the ConfigMap that their pods mount, and jobs their account."""
    deployment = team.cluster.objects.get("deployment", "fulfilment", team.name)
    volumes = deployment["spec"]["template"]["spec"]["volumes"]
    [name] = [volume["configMap"]["name"] for volume in volumes if volume.get("configMap")]
    config_map = team.cluster.objects.get("configmap", name, team.name)
    assert json.loads(config_map["data"]["policy.json"])["maxRetries"] == 3
    for account in ("redrive-job", "redrive-replay"):
        assert team.cluster.objects.get("serviceaccount", account, team.name)
    for binding in team.cluster.objects.list("rolebinding", team.name):
        role, namespace = binding["roleRef"], binding["metadata"]["namespace"]
        where = namespace if role["kind"] == "Role" else None
        assert team.cluster.objects.get(role["kind"].lower(), role["name"], where)


def assert_actions_work(team: Team, policy: Body) -> None:
    """Run each action of a policy on the stored object, with the statuses of the operator."""
    run_action(team, policy, "pause")
    wait_until(lambda: health(team, policy)["status"] == "Suspended")
    run_action(team, policy, "resume")
    wait_until(partial(is_healthy, team, policy))
    requested = run_action(team, policy, "reconcile")["metadata"]["annotations"]
    assert "redrive.io/reconcile-requested-at" in requested
    assert "redrive.io/paused" not in requested
    plan = run_action(team, policy, "plan-replay")
    assert plan["spec"]["mode"] == "Plan"
    assert plan["metadata"]["ownerReferences"][0]["uid"] == team.get(policy)["metadata"]["uid"]
