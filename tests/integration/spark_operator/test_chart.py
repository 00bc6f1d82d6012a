"""The stand-in as a chart, which `make e2e-node` installs by the command for Kubeflow's."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from sandbox import chart, spark_operator
from sandbox.kubernetes import Cluster
from tests.node.conftest import PUBLISHED, write_chart_of_stand_in
from tests.support.documented import INSTALL, commands

pytestmark = pytest.mark.xdist_group("control plane")


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    cluster.objects.create_namespace("spark-operator")
    yield "spark-operator"
    cluster.objects.delete("namespace", "spark-operator")


def test_the_documented_command_installs_it(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    made = write_chart_of_stand_in(tmp_path / "stand-in")
    (block,) = commands(INSTALL, "A Spark operator")
    command = shlex.split(block.text.replace("\\\n", "").replace(PUBLISHED, str(made)))
    assert command[:3] == ["helm", "upgrade", "--install"]
    words = [word for word in command[1:] if word != "--wait"]  # nothing runs pods here
    output = chart.helm(*words, f"--kubeconfig={cluster.kubeconfig}")
    assert "STATUS: deployed" in output
    where = f"--namespace={namespace}"
    (program,) = yaml.safe_load_all(
        cluster.kubectl("get", "configmap/program", where, "--output=yaml")
    )
    folder = Path(spark_operator.__file__).parent
    assert program["data"] == {
        file.name: file.read_text("utf-8") for file in folder.iterdir() if file.is_file()
    }
    assert "sparkapplications.sparkoperator.k8s.io" in cluster.kubectl("get", "crds")
    cluster.kubectl("get", "deployment/spark-operator", where)
    chart.helm("uninstall", "spark-operator", where, f"--kubeconfig={cluster.kubeconfig}")
