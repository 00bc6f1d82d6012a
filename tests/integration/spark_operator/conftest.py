"""The stand-in as a process against the real API server, in a namespace of the test's own.

In the API server of the sandbox another stand-in may run everything already.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sandbox import spark
from sandbox.errors import SandboxError
from sandbox.kubernetes import Cluster
from sandbox.process import Processes
from tests.support.namespaces import new_namespace

KIND = "sparkapplication.sparkoperator.k8s.io"
SECONDS = 180  # a Spark of a few seconds takes minutes on a machine that is busy


class StandIn:
    """A stand-in that watches one namespace; `start` and `stop` may be repeated."""

    def __init__(self, cluster: Cluster, namespace: str, folder: Path) -> None:
        self.namespace = namespace
        self.work_dir = folder / "drivers"
        self.work_dir.mkdir()
        self.processes = Processes(folder)
        self._cluster = cluster
        self._records = folder / "processes"

    def start(self) -> None:
        """Start it; it watches when this returns."""
        spark.start(self.processes, self._cluster, self.work_dir, namespaces=[self.namespace])

    def stop(self) -> None:
        """Stop it as the sandbox does."""
        self.processes.stop_all()

    def kill(self) -> None:
        """Let it die as in a crash."""
        record = json.loads((self._records / "spark-operator.json").read_text())
        psutil.Process(record["pid"]).kill()
        self.processes.stop_all()

    def create(self, name: str, script: str, **fields: Any) -> None:  # noqa: ANN401 - spec fields
        """Apply a SparkApplication that runs *script*."""
        program = self.work_dir / f"{name}.py"
        program.write_text(script)
        self.apply(name, mainApplicationFile=f"local://{program}", **fields)

    def apply(self, name: str, **fields: Any) -> None:  # noqa: ANN401 - spec fields
        """Apply a SparkApplication with *fields* in its spec."""
        spec = {"type": "Python", "sparkVersion": "4.3.0", "driver": {}, "executor": {}, **fields}
        manifest = {
            "apiVersion": "sparkoperator.k8s.io/v1beta2",
            "kind": "SparkApplication",
            "metadata": {"name": name},
            "spec": spec,
        }
        self.kubectl("apply", "-f", "-", input=json.dumps(manifest))

    def patch(self, name: str, **fields: Any) -> None:  # noqa: ANN401 - spec fields
        """Change *fields* of the spec."""
        patch = json.dumps({"spec": fields})
        self.kubectl("patch", "sparkapp", name, "--type=merge", "-p", patch)

    def kubectl(self, *args: str, input: str | None = None) -> str:  # noqa: A002 - as kubectl's
        """Call kubectl in the stand-in's namespace."""
        return self._cluster.kubectl(f"--namespace={self.namespace}", *args, input=input)

    def status(self, name: str) -> dict[str, Any]:
        """Read the status; a new object has an empty state."""
        raw = self._cluster.objects.get(KIND, name, self.namespace)
        return {"applicationState": {"state": ""}, **raw.get("status", {})}

    def wait(self, name: str, state: str) -> dict[str, Any]:
        """Wait for *state* and return the status then."""
        condition = f"--for=jsonpath={{.status.applicationState.state}}={state}"
        try:
            self.kubectl("wait", condition, f"sparkapp/{name}", f"--timeout={SECONDS}s")
        except SandboxError as error:
            pytest.fail(f"{error}\n{self.status(name)}\n{self.log(name)}")
        return self.status(name)

    def log(self, name: str) -> str:
        """Return the log of the driver so far."""
        file = self.work_dir / self.namespace / f"{name}-driver.log"
        return file.read_text() if file.exists() else ""

    def files(self, name: str) -> Path:
        """Where the files of the driver are while it runs."""
        return self.work_dir / self.namespace / f"{name}-driver"

    def leader(self, name: str) -> int:
        """Return the pid of the driver's first process."""
        record = self.work_dir / self.namespace / f"{name}-driver.pid"
        eventually(lambda: record.exists() and record.read_text())
        pid: int = json.loads(record.read_text())["pid"]
        return pid


def eventually(holds: Callable[[], object], seconds: float = SECONDS) -> None:
    """Wait until *holds* returns something true."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        time.sleep(0.2)


def session(leader: int) -> list[int]:
    """Return the living processes of the session of *leader*."""
    members = []
    for process in psutil.process_iter():
        try:
            # One that has ended stays visible until its parent has asked how.
            living = process.status() != psutil.STATUS_ZOMBIE
            if living and os.getsid(process.pid) == leader:
                members.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return members


@pytest.fixture(scope="module")
def stand_in(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    with new_namespace(cluster) as namespace:
        account = "serviceaccount/default"
        cluster.kubectl("wait", "--for=create", account, f"--namespace={namespace}")
        stand_in = StandIn(cluster, namespace, tmp_path_factory.mktemp("spark-operator"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OF_THE_STAND_IN", "no business of a driver")
            stand_in.start()
        yield stand_in
        stand_in.stop()
