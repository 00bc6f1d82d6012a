"""`install.yaml` and the kustomize base: the rendered chart, for users without Helm.

Both serve all namespaces, from the namespace redrive-system. The names of the images are
placeholders that a kustomization replaces.
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
"""The placeholder for the image of the operator; with `-replay`, for that of replay jobs."""
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
    """Return the objects of the chart with its default values, in the order to apply them."""
    plain = [_plain(body) for body in chart.render({}) if not _is_hook(body)]
    return [_NAMESPACE_OBJECT, *sorted(plain, key=_rank)]


def install_yaml() -> str:
    """Return all objects as one file."""
    head = f"# redrive {__version__}, generated from its Helm chart. Replace {IMAGE}.\n"
    return head + _documents(objects())


def write_kustomize_base(folder: Path) -> None:
    """Write the objects as a kustomize base, with the CRDs in a file of their own."""
    folder.mkdir(parents=True)
    bodies = objects()
    kinds = [body for body in bodies if body["kind"] == "CustomResourceDefinition"]
    parts = {"crds.yaml": kinds, "operator.yaml": [body for body in bodies if body not in kinds]}
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
    """Return *value* without the labels and annotations of Helm, at any depth."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
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
