"""The pages on GitOps and their example repositories: commands run, manifests admitted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import hcl2
import pytest
import yaml
from celpy.adapter import json_to_cel

from redrive.api import GROUP
from release import CHECKOUT, gitops
from sandbox import builds, chart
from sandbox.kubernetes import Cluster
from tests.integration.gitops.conftest import EXAMPLES, Body, Team
from tests.support import argocd, flux
from tests.support.documented import ARGOCD, BACK_UP, FLUX, GITOPS, PROBES, ROOT, block, commands
from tests.support.waiting import wait_until

ARGOCD_NAMESPACE = "argocd"


def paste(script: str, folder: Path, cluster: Cluster) -> str:
    """Run commands of a page in *folder*, and return their output."""
    path = [str(Path(sys.executable).parent), str(builds.kubernetes()), os.environ["PATH"]]
    environment = os.environ | {
        "KUBECONFIG": str(cluster.kubeconfig),
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": str(ROOT / "operator"),
    }
    command = f'redrive() {{ "{sys.executable}" -m redrive "$@"; }}\n{script}'
    run = subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", command],
        cwd=folder, env=environment, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture
def repository(team: Team, tmp_path: Path) -> Path:
    """A checkout of the examples and building blocks, with the names of the team."""
    for name in ("examples/gitops", "gitops"):
        shutil.copytree(CHECKOUT / name, tmp_path / name)
    for file in tmp_path.rglob("*.yaml"):
        text = file.read_text("utf-8")
        if file.name == "kustomization.yaml":  # its paths stay
            text = text.replace("namespace: shop", f"namespace: {team.name}")
        else:
            text = team.adapt(text)
        file.write_text(text, "utf-8")
    return tmp_path


def test_keys_of_ledgers_are_restored_from_their_backup(cluster: Cluster, tmp_path: Path) -> None:
    backup, restore = (block.text for block in commands(BACK_UP))
    namespace = f"t-{tmp_path.name[-40:]}".replace("_", "-").lower()
    show = ("get", "secret", "redrive-replay-keys", "-n", namespace, "-o", "jsonpath={.data}")
    cluster.kubectl("create", "namespace", namespace)
    literals = ("--from-literal=current=one", "--from-literal=before=two")
    cluster.kubectl("create", "secret", "generic", show[2], *literals, "-n", namespace)
    keys = cluster.kubectl(*show)
    paste(backup.replace("redrive-system", namespace), tmp_path, cluster)
    cluster.kubectl("delete", "namespace", namespace)
    paste(restore.replace("redrive-system", namespace), tmp_path, cluster)
    assert cluster.kubectl(*show) == keys
    cluster.kubectl("delete", "namespace", namespace, "--wait=false")


def test_commands_for_every_tool_lead_to_a_paused_policy(team: Team, repository: Path) -> None:
    policy = {
        "kind": "RetryPolicy",
        "metadata": {"name": "orders-fulfilment", "namespace": team.name},
    }
    [order] = commands(GITOPS, "Order")
    shown = paste(order.text.replace("-n shop", f"-n {team.name}"), repository, team.cluster)
    assert shown.endswith("retrypolicy.redrive.io/orders-fulfilment condition met\n")
    [pause] = commands(GITOPS, "Annotations set by people")
    paste(pause.text.replace("-n shop", f"-n {team.name}"), repository, team.cluster)
    text = team.cluster.kubectl(
        "get", "rpol", "orders-fulfilment", "-n", team.name, "--show-managed-fields", "-o=yaml"
    )
    writers = [
        entry["manager"]
        for entry in yaml.safe_load(text)["metadata"]["managedFields"]
        if "f:redrive.io/paused" in entry["fieldsV1"].get("f:metadata", {}).get("f:annotations", {})
    ]
    assert writers == ["redrive"]
    assert team.get(policy)["metadata"]["annotations"]["redrive.io/paused"] == "true"


def test_commands_without_a_cluster_work_as_written(cluster: Cluster) -> None:
    [check] = commands(GITOPS, "Check before the merge")
    assert "0 errors" in paste(f"{{\n{check.text}}} 2>&1", CHECKOUT, cluster)
    [build] = commands(FLUX, "Set it up")
    bodies = list(yaml.safe_load_all(paste(build.text, CHECKOUT, cluster)))
    assert len(bodies) == 4
    for body in bodies:
        assert body["spec"]["wait"] is True
        kinds = {check["kind"] for check in body["spec"]["healthCheckExprs"]}
        assert kinds == flux.expressions().keys()


@pytest.fixture
def argocd_configuration(cluster: Cluster) -> Iterator[None]:
    """The namespace of Argo CD with a configuration of its own."""
    cluster.objects.create_namespace(ARGOCD_NAMESPACE)
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "argocd-cm"}}
    cluster.objects.create({**body, "data": {"url": "https://argocd"}}, namespace=ARGOCD_NAMESPACE)
    yield
    cluster.objects.delete("namespace", ARGOCD_NAMESPACE)


@pytest.mark.usefixtures("argocd_configuration")
def test_scripts_are_added_to_the_configuration_of_argo_cd(cluster: Cluster) -> None:
    [apply] = commands(ARGOCD, "Set it up")
    paste(apply.text, CHECKOUT, cluster)
    data = cluster.objects.get("configmap", "argocd-cm", ARGOCD_NAMESPACE)["data"]
    assert data.pop("url") == "https://argocd"
    assert data == yaml.safe_load(gitops.CONFIGURATION.read_text("utf-8"))["data"]


@pytest.mark.usefixtures("operator_process")
def test_manifests_of_pages_are_admitted(
    cluster: Cluster, kube_namespace: str, tmp_path: Path
) -> None:
    hook = yaml.safe_load(block(ARGOCD, "Replays as hooks", "yaml"))
    bodies = [
        hook,
        *of_helm(block(GITOPS, "Helm", "yaml"), tmp_path),
        *of_terraform(),
        of_crossplane(),
    ]
    assert [body["kind"] for body in bodies] == [
        "Replay",
        "RetryPolicy",
        "BrokerConnection",
        "RetryPolicy",
        "RetryPolicy",
    ]
    bodies.append(probed())
    for body in bodies:
        metadata = {**body["metadata"], "namespace": kube_namespace}
        cluster.objects.admit({**body, "metadata": metadata}, kube_namespace)


def probed() -> Body:
    """Return the Deployment of the example, with the probes of the page in its container."""
    manifest_file = CHECKOUT / "examples/02-deployment/deployment.yaml"
    [body] = [
        body
        for body in yaml.safe_load_all(manifest_file.read_text("utf-8"))
        if body["kind"] == "Deployment"
    ]
    [container] = body["spec"]["template"]["spec"]["containers"]
    container |= yaml.safe_load(block(PROBES, "Declare them", "yaml"))
    deployment: Body = body
    return deployment


def of_helm(template: str, folder: Path) -> list[Body]:
    """Return the objects of the chart of a consumer with this template."""
    (folder / "templates").mkdir()
    (folder / "Chart.yaml").write_text("apiVersion: v2\nname: fulfilment\nversion: 0.1.0\n")
    (folder / "templates" / "retrypolicy.yaml").write_text(template)
    return chart.render({"topic": "orders"}, release="eu", namespace="shop", chart=folder)


def of_terraform() -> list[Body]:
    """Return the manifests of the example for Terraform, which waits for each."""
    options = hcl2.SerializationOptions(
        strip_string_quotes=True, explicit_blocks=False, with_comments=False
    )
    with (EXAMPLES / "terraform" / "main.tf").open(encoding="utf-8") as file:
        configuration = hcl2.load(file, serialization_options=options)
    resources: list[Any] = [
        body
        for resource in configuration["resource"]
        for body in resource["kubernetes_manifest"].values()
    ]
    for resource in resources:
        assert resource["wait"] == [{"condition": [{"type": "Ready", "status": "True"}]}]
        assert "metadata.annotations" in resource["computed_fields"]
    return [resource["manifest"] for resource in resources]


def of_crossplane() -> Body:
    """Return the manifest in the example for Crossplane."""
    example = yaml.safe_load((EXAMPLES / "crossplane" / "policy.yaml").read_text("utf-8"))
    body: Body = example["spec"]["forProvider"]["manifest"]
    return body


def test_object_of_crossplane_is_ready_with_its_policy() -> None:
    example = yaml.safe_load((EXAMPLES / "crossplane" / "policy.yaml").read_text("utf-8"))
    query = example["spec"]["readiness"]["celQuery"]
    ready = {
        name
        for name, body in gitops.states("RetryPolicy").items()
        if "status" in body and flux.compute(query, {"object": json_to_cel(body)})
    }
    assert ready == {"provisioned", "warning", "observed", "paused"}


def test_kustomization_of_the_page_prefixes_a_policy(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text(block(GITOPS, "kustomize", "yaml"))
    shutil.copytree(CHECKOUT / "gitops/kustomize/component", tmp_path / "component")
    objects = tmp_path / "objects"
    shutil.copytree(EXAMPLES / "base/apps/fulfilment", objects)
    (objects / "kustomization.yaml").write_text("resources: [policy.yaml, deployment.yaml]\n")
    command = [str(builds.kubernetes() / "kubectl"), "kustomize", str(tmp_path)]
    built = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    bodies = {body["kind"]: body for body in yaml.safe_load_all(built)}
    name = "eu-orders-fulfilment"
    assert bodies["RetryPolicy"]["metadata"]["name"] == name
    assert bodies["RetryPolicy"]["spec"]["naming"]["configMap"] == name
    volumes = bodies["Deployment"]["spec"]["template"]["spec"]["volumes"]
    assert {"name": "policy", "configMap": {"name": name}} in volumes


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
