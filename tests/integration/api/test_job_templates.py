"""Job templates at a real API server: a dry run refuses invalid ones and admits valid ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from redrive.kube.client import Kubernetes
from redrive.kube.job_templates import JobTemplates
from redrive.reasons import Reason
from sandbox.kubernetes import Cluster
from tests.support.reasons import raises

pytestmark = pytest.mark.xdist_group("control plane")


async def read(folder: Path, **templates: object) -> JobTemplates:
    """Return the job templates of a file, as the operator reads them."""
    file = folder / "templates.yaml"
    file.write_text(yaml.safe_dump(templates))
    store = JobTemplates(file)
    async with Kubernetes.connect() as kubernetes:
        await store.read(kubernetes, "default")
    return store


@pytest.fixture(autouse=True)
def kubeconfig(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connect the client to the cluster of the test."""
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))


@pytest.mark.parametrize(
    ("pod", "message"),
    [
        ({"spec": {"nodeSelectors": {"a": "b"}}}, 'unknown field "template.spec.nodeSelectors"'),
        ({"spec": {"tolerations": [{"operator": "Sometimes"}]}}, "tolerations"),
        ({"spec": {"containers": [{"env": [{"name": "A", "values": 1}]}]}}, "env\\[0\\].values"),
        ({"spec": {"volumes": [{"name": "A B", "emptyDir": {}}]}}, "volumes\\[0\\].name"),
        ({"spec": {"containers": [{"volumeMounts": [{"name": "a", "mountPath": "/a"}]}]}}, "Not f"),
        ({"metadata": {"labels": {"a b": "c"}}}, "labels"),
        ({"spec": {"priorityClassName": 5}}, "priorityClassName"),
    ],
)
@pytest.mark.parametrize("role", ["driver", "executor"])
async def test_template_that_api_server_refuses_is_invalid(
    tmp_path: Path, role: str, pod: dict[str, Any], message: str
) -> None:
    store = await read(tmp_path, large={role: pod})
    with raises(Reason.JOB_TEMPLATE_INVALID, match=message):
        store.find("large")


async def test_whole_template_is_admitted_and_not_stored(cluster: Cluster, tmp_path: Path) -> None:
    pod = {
        "metadata": {"labels": {"team": "shop"}},
        "spec": {
            "securityContext": {"runAsUser": 1_000_700_000, "fsGroup": 1_000_700_000},
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
            ],
            "initContainers": [{"name": "wait", "image": "busybox", "restartPolicy": "Always"}],
            "containers": [
                {"name": "proxy", "image": "proxy:1"},
                {"name": "redrive", "resources": {"requests": {"cpu": 0.5, "memory": "2Gi"}}},
            ],
        },
    }
    store = await read(tmp_path, large={"driver": pod, "executor": pod}, small={})
    assert store.names == ("default", "large", "small")
    assert [store.problem(name) for name in store.names] == [None] * 3
    stored = json.loads(cluster.kubectl("get", "podtemplates", "-n", "default", "-o", "json"))
    assert stored["items"] == []
