"""`install.yaml` and the kustomize base: what the chart renders, for whoever has no Helm.

Both serve all namespaces, from the namespace redrive-system. The images have names that a
kustomization replaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from redrive import __version__
from sandbox import chart

NAMESPACE = "redrive-system"
IMAGE = "registry.example/redrive"
"""What stands for the image of the operator, and with `-replay` for that of replay jobs."""
_NAMESPACE_OBJECT = {
    "apiVersion": "v1",
    "kind": "Namespace",
    "metadata": {
        "name": NAMESPACE,
        "labels": {"pod-security.kubernetes.io/enforce": "restricted"},
    },
}
_MANAGED_BY = "app.kubernetes.io/managed-by"


def objects() -> list[dict[str, Any]]:
    """Return what the chart makes of its defaults, in the order to apply it."""
    rendered = chart.render({})
    made = [_plain(each) for each in rendered if not _is_hook(each)]
    return [_NAMESPACE_OBJECT, *sorted(made, key=_rank)]


def install_yaml() -> str:
    """Return all objects as one file."""
    head = f"# redrive {__version__}, generated from its Helm chart. Replace {IMAGE}.\n"
    return head + _documents(objects())


def write_kustomize_base(folder: Path) -> None:
    """Write the same as a kustomize base, the kinds apart from what uses them."""
    folder.mkdir(parents=True)
    made = objects()
    kinds = [each for each in made if each["kind"] == "CustomResourceDefinition"]
    parts = {"crds.yaml": kinds, "operator.yaml": [each for each in made if each not in kinds]}
    for name, part in parts.items():
        (folder / name).write_text(_documents(part), "utf-8")
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": list(parts),
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization, sort_keys=False))


def _is_hook(body: dict[str, Any]) -> bool:
    return "helm.sh/hook" in (body["metadata"].get("annotations") or {})


def _plain(value: Any) -> Any:  # noqa: ANN401  any part of a manifest
    """Remove the labels and annotations that are of Helm, at any depth."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    plain = {
        name: _plain(inner)
        for name, inner in value.items()
        if name != _MANAGED_BY and not name.startswith("helm.sh/")
    }
    if plain.get("annotations") == {}:
        del plain["annotations"]
    return plain


def _rank(body: dict[str, Any]) -> int:
    first = ("CustomResourceDefinition", "ServiceAccount", "ClusterRole", "Role")
    return first.index(body["kind"]) if body["kind"] in first else len(first)


def _documents(bodies: Sequence[dict[str, Any]]) -> str:
    return "".join(f"---\n{yaml.safe_dump(body, sort_keys=False)}" for body in bodies)
