"""`python -m sandbox.spark_operator.in_cluster`: run the applications of all namespaces in pods.

It runs in a pod whose image has Spark and the Kubernetes client for Python. It submits like the
real operator: a driver and its executors are pods, created by `spark-submit --master k8s://`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from . import command, template
from .cluster import APIS, POLL_SECONDS, Api, Cluster, PodState, connected
from .controller import Controller, serve
from .errors import RefusedError, UnavailableError
from .lifecycle import Observation, Phase
from .objects import Application
from .runner import Submission

_PHASES = {
    "Pending": Phase.PENDING,
    "Running": Phase.RUNNING,
    "Succeeded": Phase.SUCCEEDED,
    "Failed": Phase.FAILED,
}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pods:
    """A runner whose drivers are pods of the cluster."""

    cluster: Cluster

    async def submit(self, app: Application) -> Submission:
        """Delete the pod of an earlier attempt, and have Spark create the driver's pod.

        Raises:
            RefusedError: Spark or the API server refused.
        """
        template.check(app)
        await self.cluster.delete_driver(app)
        with tempfile.TemporaryDirectory() as folder:
            await _spark_submit(_arguments(app, self.cluster.api, Path(folder)))
        state = await self.cluster.driver(app)
        if state is None:
            raise RefusedError("the pod of the driver was deleted right after its creation")
        return Submission(
            state.application_id,
            lambda on_change: DriverPod(app, state, self.cluster, on_change),
        )


class DriverPod:
    """The driver's pod of *app*; *on_change* is called when `observation` changes."""

    def __init__(
        self, app: Application, state: PodState, cluster: Cluster, on_change: Callable[[], None]
    ) -> None:
        self.observation: Observation | None = _observed(state)
        self._app = app
        self._cluster = cluster
        self._on_change = on_change
        self._following = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        """Delete the pod, and with it its dependents."""
        self._following.cancel()
        await asyncio.wait([self._following])
        try:
            await self._cluster.delete_driver(self._app)
        except UnavailableError as error:
            # The pod is deleted with its application, or by the next submission.
            log.warning("%s/%s: %s", *self._app.key, error)

    async def _follow(self) -> None:
        while self.observation is not None:
            await asyncio.sleep(POLL_SECONDS)
            try:
                observation = _observed(await self._cluster.driver(self._app))
            except UnavailableError as error:
                log.warning("%s/%s: %s", *self._app.key, error)
                continue
            if observation != self.observation:
                self.observation = observation
                self._on_change()


def _observed(state: PodState | None) -> Observation | None:
    if state is None:
        return None
    phase = _PHASES.get(state.phase, Phase.PENDING)
    if phase is not Phase.FAILED:
        return Observation(phase)
    reason = f"driver container failed with ExitCode: {state.exit_code}, Reason: {state.reason}"
    return Observation(phase, reason)


def _arguments(app: Application, api: Api, folder: Path) -> list[str]:
    """Write the files for spark-submit into *folder*, and return its arguments."""
    files = {}
    for role in template.ROLES:
        file = folder / f"{role}.json"
        pod = template.template(app, role, version=api.version, label=api.label)
        file.write_text(json.dumps(pod), encoding="utf-8")
        files[role] = str(file)
    properties = folder / "spark.properties"
    properties.write_text(command.properties_file(template.properties(app, files)), "utf-8")
    # The kubelet replaces variables in arguments.
    return command.arguments(app, properties, None)


async def _spark_submit(arguments: list[str]) -> None:
    process = await asyncio.create_subprocess_exec(
        "spark-submit", *arguments,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        written, _ = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        raise
    if process.returncode:
        # Like the real operator: the whole output, with the stack of the JVM.
        raise RefusedError(f"failed to run spark-submit: {written.decode(errors='replace')}")


async def _serve() -> None:
    async with AsyncExitStack() as stack:
        clusters = [await stack.enter_async_context(connected(None, api)) for api in APIS]
        await serve(*(Controller(cluster, Pods(cluster), ()) for cluster in clusters))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(_serve())
