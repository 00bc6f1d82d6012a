"""The Helm chart `charts/redrive`, rendered and installed by a real Helm without user settings.

Called by `sandbox.installation` and by the tests of the chart.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from sandbox import CHECKOUT, builds
from sandbox.errors import SandboxError
from sandbox.kubernetes import Cluster
from sandbox.process import FOR_GO

CHART = CHECKOUT / "charts" / "redrive"
_EXAMPLE = "namespace-with-replays"


def helm(*args: str, values: Mapping[str, Any] | None = None) -> str:
    """Return the output of ``helm``; *values* override the chart's.

    Raises:
        SandboxError: helm failed; the message contains its standard error.
    """
    command = [str(builds.helm() / "helm"), *args, *(() if values is None else ("--values=-",))]
    with TemporaryDirectory() as home:
        run = subprocess.run(  # noqa: S603 - helm of our own building
            command, input=yaml.safe_dump(values), env=_environment(home), check=False, text=True,
            capture_output=True,
        )  # fmt: skip
    if run.returncode != 0:
        raise SandboxError(
            f"helm {' '.join(args)} ended with {run.returncode}:\n{run.stderr.strip()}",
            remedy="fix the chart, the values or the call",
        )
    return run.stdout


def install(
    cluster: Cluster, release: str, namespace: str, values: Mapping[str, Any], chart: Path = CHART
) -> None:
    """Install or upgrade a release, without waiting for pods: the sandbox runs none.

    The release takes over existing objects, such as CRDs that were applied by hand.

    Raises:
        SandboxError: the chart or the API server refused it.
    """
    helm(
        "upgrade", "--install", release, str(chart), f"--namespace={namespace}",
        "--create-namespace", "--take-ownership", f"--kubeconfig={cluster.kubeconfig}",
        values=values,
    )  # fmt: skip


def prepare_replays(cluster: Cluster, namespace: str) -> None:
    """Apply the chart's objects for a namespace of `replay.namespaces`.

    They include the rights there of the operator of a release with the chart's names.

    Raises:
        SandboxError: the API server refused it.
    """
    for body in json.loads(_for_example().replace(_EXAMPLE, namespace)):
        cluster.objects.apply(body)


@functools.cache
def _for_example() -> str:
    """Return the objects for the namespace `_EXAMPLE`, rendered once for all namespaces."""
    bodies = render({"replay": {"namespaces": [_EXAMPLE]}})
    return json.dumps([body for body in bodies if body["metadata"].get("namespace") == _EXAMPLE])


def uninstall(cluster: Cluster, release: str, namespace: str) -> None:
    """Uninstall a release.

    Raises:
        SandboxError: the release does not exist, or the API server refused.
    """
    helm("uninstall", release, f"--namespace={namespace}", f"--kubeconfig={cluster.kubeconfig}")


def installed(cluster: Cluster, release: str, namespace: str) -> list[dict[str, Any]]:
    """Return the objects of a release as they were rendered.

    Raises:
        SandboxError: the release does not exist.
    """
    options = f"--namespace={namespace}", f"--kubeconfig={cluster.kubeconfig}"
    return list(_objects(helm("get", "manifest", release, *options)))


def render(
    values: Mapping[str, Any],
    *,
    release: str = "redrive",
    namespace: str = "redrive-system",
    chart: Path = CHART,
) -> list[dict[str, Any]]:
    """Render the chart with *values* and return its objects.

    Raises:
        SandboxError: helm refused the values.
    """
    args = "template", release, str(chart), f"--namespace={namespace}"
    return list(_objects(helm(*args, values=values)))


def _objects(documents: str) -> Iterator[dict[str, Any]]:
    # In C: ten times as fast, for the 230 kB of a chart with its CRDs.
    bodies = yaml.load_all(documents, yaml.CSafeLoader)
    yield from (body for body in bodies if body)


def _environment(home: str) -> dict[str, str]:
    """Return an environment in which helm reads no plugins or repositories of the user."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("HELM_")}
    folders = dict.fromkeys(("HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"), home)
    return {**ours, **FOR_GO, **folders}
