"""An installation whose operator has rights in one Kubernetes namespace only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sandbox import chart, installation
from sandbox.sandbox import Sandbox


@contextmanager
def namespaced_operator(sandbox: Sandbox, namespace: str, **values: object) -> Iterator[str]:
    """Run the operator of a release of its own in place of that of *sandbox*.

    Args:
        sandbox: no other worker may use it meanwhile.
        namespace: the only one that the operator serves.
        values: of the chart, in addition to those of the sandbox.

    Yields:
        the Kubernetes namespace of the release.
    """
    release_in = f"{namespace}-redrive"
    values = {
        **installation.VALUES,
        **values,
        "namespaces": [namespace],
        "clusterId": "ours",
        "crds": {"install": False},
    }
    sandbox.processes.stop(installation.OPERATOR)
    try:
        chart.install(sandbox.cluster, installation.RELEASE, release_in, values)
        installation.start_operator(sandbox, namespace=release_in, name=release_in)
        yield release_in
    finally:
        sandbox.processes.stop(release_in)
        sandbox.cluster.objects.delete("namespace", release_in)
        installation.start_operator(sandbox)
