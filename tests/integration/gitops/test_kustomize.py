"""The building blocks for kustomize, built by a real kubectl."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from redrive.api.crds import KINDS, structural
from release import CHECKOUT
from sandbox import builds, chart

GITOPS = CHECKOUT / "gitops"
COMPONENT = GITOPS / "kustomize" / "component"
REFERENCE_NAMES = {"spec/connectionRef", "spec/naming/configMap"}
"""References that are no `…Ref/name`: one has a namespace, one names an object of the operator."""
OBJECTS = """
apiVersion: redrive.io/v1beta1
kind: BrokerConnection
metadata: {name: main, namespace: shop}
spec:
  pulsar:
    authentication: {type: Token, token: {secretRef: {name: pulsar-admin, key: token}}}
    tls: {caRef: {kind: ConfigMap, name: broker-ca, key: ca.crt}}
  replay:
    authentication: {type: OAuth2, oauth2: {clientSecret: {secretRef: {name: client, key: secret}}}}
  inspection:
    destinations: [{name: archive, secretRef: {name: store-keys}}]
---
apiVersion: redrive.io/v1beta1
kind: RetryPolicy
metadata: {name: orders, namespace: shop}
spec: {connectionRef: {name: main}, naming: {configMap: orders}}
---
apiVersion: redrive.io/v1beta1
kind: RetryPolicy
metadata: {name: others, namespace: pay}
spec: {connectionRef: {name: main, namespace: shop}}
---
apiVersion: redrive.io/v1beta1
kind: RetryPolicy
metadata: {name: foreign, namespace: shop}
spec: {connectionRef: {name: main, namespace: platform}}
---
apiVersion: redrive.io/v1beta1
kind: Replay
metadata: {name: again, namespace: shop}
spec: {policyRef: {name: orders}}
---
apiVersion: redrive.io/v1beta1
kind: ReplayApproval
metadata: {name: again, namespace: shop}
spec: {replayRef: {name: again, uid: x}, messages: 1}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: consumers, namespace: shop}
spec:
  template:
    spec:
      containers:
        - {name: consumer, image: one, args: [kept]}
        - {name: other, image: two}
      volumes:
        - {name: policy, configMap: {name: orders}}
        - {name: all, projected: {sources: [{configMap: {name: orders}}]}}
"""
KUSTOMIZATION: Mapping[str, Any] = {
    "namePrefix": "eu-",
    "resources": ["objects.yaml"],
    "components": ["component"],
    "secretGenerator": [
        {"name": name, "namespace": "shop", "literals": ["token=t"]}
        for name in ("pulsar-admin", "client", "store-keys")
    ],
    "configMapGenerator": [{"name": "broker-ca", "namespace": "shop", "literals": ["ca.crt=c"]}],
    "patches": [
        {
            "patch": yaml.safe_dump(
                {
                    "apiVersion": "apps/v1",
                    "kind": "Deployment",
                    "metadata": {"name": "consumers", "namespace": "shop"},
                    "spec": {
                        "template": {
                            "spec": {"containers": [{"name": "consumer", "image": "patched"}]}
                        }
                    },
                }
            )
        }
    ],
}
Built = Mapping[tuple[str, str], Any]


def build(folder: Path) -> Built:
    """Return the objects of a kustomization by kind and name."""
    command = [str(builds.kubernetes() / "kubectl"), "kustomize", str(folder)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {(body["kind"], body["metadata"]["name"]): body for body in yaml.safe_load_all(text)}


@pytest.fixture(scope="module")
def prefixed(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The objects with a name prefix, generated Secrets and a strategic merge patch."""
    folder = tmp_path_factory.mktemp("kustomize")
    (folder / "component").symlink_to(COMPONENT)
    (folder / "objects.yaml").write_text(OBJECTS)
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(dict(KUSTOMIZATION)))
    return build(folder)


def test_prefix_and_suffix_reach_every_reference(prefixed: Built) -> None:
    generated = {
        name.removeprefix("eu-").rpartition("-")[0]: name
        for kind, name in prefixed
        if kind in ("Secret", "ConfigMap")
    }
    assert generated.keys() == {"pulsar-admin", "client", "store-keys", "broker-ca"}
    connection = prefixed["BrokerConnection", "eu-main"]["spec"]
    token = connection["pulsar"]["authentication"]["token"]["secretRef"]["name"]
    secret = connection["replay"]["authentication"]["oauth2"]["clientSecret"]["secretRef"]["name"]
    authority = connection["pulsar"]["tls"]["caRef"]["name"]
    assert (token, secret) == (generated["pulsar-admin"], generated["client"])
    assert authority == generated["broker-ca"]
    (destination,) = connection["inspection"]["destinations"]
    assert destination["secretRef"]["name"] == generated["store-keys"]
    assert prefixed["Replay", "eu-again"]["spec"]["policyRef"]["name"] == "eu-orders"
    assert prefixed["ReplayApproval", "eu-again"]["spec"]["replayRef"]["name"] == "eu-again"


def test_prefix_reaches_connections_of_the_own_namespace_only(prefixed: Built) -> None:
    references = {
        name: prefixed["RetryPolicy", f"eu-{name}"]["spec"]["connectionRef"]
        for name in ("orders", "others", "foreign")
    }
    assert references["orders"]["name"] == "eu-main"
    assert references["others"] == {"name": "main", "namespace": "shop"}  # kustomize has no more
    assert references["foreign"] == {"name": "main", "namespace": "platform"}


def test_config_map_named_after_its_policy_follows_a_prefix(prefixed: Built) -> None:
    policy = prefixed["RetryPolicy", "eu-orders"]["spec"]
    pod = prefixed["Deployment", "eu-consumers"]["spec"]["template"]["spec"]
    assert policy["naming"]["configMap"] == "eu-orders"
    mounted = {"configMap": {"name": "eu-orders"}}
    assert pod["volumes"] == [
        {"name": "policy", **mounted}, {"name": "all", "projected": {"sources": [mounted]}}
    ]  # fmt: skip


def test_patch_of_a_deployment_keeps_its_merge_keys(prefixed: Built) -> None:
    pod = prefixed["Deployment", "eu-consumers"]["spec"]["template"]["spec"]
    assert pod["containers"] == [
        {"name": "consumer", "image": "patched", "args": ["kept"]},
        {"name": "other", "image": "two"},
    ]


def references(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield the paths of all references in a schema; kustomize names no index of a list."""
    for name, field in schema.get("items", schema).get("properties", {}).items():
        here = f"{path}/{name}"
        if here in REFERENCE_NAMES:
            yield here
        elif name.endswith("Ref") and "name" in field.get("properties", {}):
            yield f"{here}/name"
        else:
            yield from references(field, here)


def test_component_knows_every_reference_of_the_kinds() -> None:
    table = yaml.safe_load((COMPONENT / "namereference.yaml").read_text("utf-8"))["nameReference"]
    fields = [field for target in table for field in target["fieldSpecs"]]
    listed = {(f["kind"], f["path"]) for f in fields if f.get("group") == "redrive.io"}
    assert listed == {
        (kind.kind, path) for kind in KINDS for path in references(structural(kind.spec), "spec")
    }


def test_namespace_has_what_the_chart_makes(tmp_path: Path) -> None:
    kustomization = {"namespace": "shop", "resources": ["base"]}
    (tmp_path / "base").symlink_to(GITOPS / "namespace")
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    built = dict(build(tmp_path))
    policy = built.pop(("NetworkPolicy", "redrive-replay"))
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": policy["spec"]["podSelector"]}]}]
    rendered = {
        (body["kind"], body["metadata"]["name"]): body
        for body in chart.render({"replay": {"namespaces": ["shop"]}})
        if body["metadata"].get("namespace") == "shop"
    }
    for body in rendered.values():
        del body["metadata"]["labels"]
    assert built == rendered
