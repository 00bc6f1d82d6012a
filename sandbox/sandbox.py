"""The sandbox: a Kubernetes control plane and Pulsar, with one state directory.

Called by the command ``python -m sandbox``, the demo, and the fixtures of the tests.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from sandbox import builds, kubernetes, pulsar, versions
from sandbox.errors import SandboxError
from sandbox.kubernetes import Cluster
from sandbox.process import Processes
from sandbox.pulsar import Broker
from sandbox.steps import step

_DESCRIPTION = "sandbox.json"
_PARTS = (pulsar.NAME, *kubernetes.NAMES)


class KubernetesSandbox:
    """A running sandbox without a broker.

    Only as a context manager it is stopped, at the end of the block.

    Args:
        state: the directory of logs, data, keys and kubeconfigs, readable by its owner only.
        processes: of the sandbox. Processes that are added here are stopped with the others.
        cluster: the Kubernetes control plane.
    """

    def __init__(self, state: Path, processes: Processes, cluster: Cluster) -> None:
        self.state = state
        self.processes = processes
        self.cluster = cluster

    @classmethod
    def start(cls, state: Path) -> Self:
        """Start the control plane as `Sandbox.start` does.

        Raises:
            SandboxError: likewise.
        """
        state = _fresh(state)
        builds.prepare(with_pulsar=False)
        processes = Processes(state)
        try:
            with step("start the Kubernetes control plane"):
                return cls(state, processes, kubernetes.start(state, processes))
        except BaseException:
            processes.stop_all()
            raise

    def stop(self) -> None:
        """Stop all processes. The state directory stays, for its logs."""
        (self.state / _DESCRIPTION).unlink(missing_ok=True)
        self.processes.stop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


class Sandbox(KubernetesSandbox):
    """A running sandbox with Pulsar.

    Args:
        state: see `KubernetesSandbox`, as for *processes* and *cluster*.
        pulsar: the broker.
    """

    def __init__(self, state: Path, processes: Processes, pulsar: Broker, cluster: Cluster) -> None:
        super().__init__(state, processes, cluster)
        self.pulsar = pulsar

    @classmethod
    def start(
        cls, state: Path, pulsar_version: str = versions.PULSAR, *, full_jit: bool = False
    ) -> Self:
        """Fetch and build missing components, start all, and wait until they answer.

        *state* must be missing or empty. If a component fails, the others are stopped.
        *full_jit* is that of `pulsar.launch`.

        Raises:
            SandboxError: *state* is in use, or a component could not be fetched, built or started.
        """
        state = _fresh(state)
        builds.prepare()
        processes = Processes(state)
        try:
            broker = pulsar.launch(
                state, processes, pulsar_version, full_jit=full_jit
            )  # it starts while the control plane does
            with step("start the Kubernetes control plane"):
                cluster = kubernetes.start(state, processes)
            with step("wait for Pulsar"):
                pulsar.wait(broker, processes)
            sandbox = cls(state, processes, broker, cluster)
            sandbox._describe()
        except BaseException:
            processes.stop_all()
            raise
        return sandbox

    def restart_broker(self) -> None:
        """Start a killed Pulsar again, and wait until it answers.

        Raises:
            SandboxError: it ended or did not answer in time.
        """
        if not self.processes.alive(pulsar.NAME):
            pulsar.forget_bookie(self.pulsar)
            pulsar.start(self.pulsar, self.processes)
            pulsar.wait(self.pulsar, self.processes)

    @classmethod
    def attach(cls, state: Path) -> Self:
        """Return the running sandbox that was started with *state*.

        Raises:
            SandboxError: no complete sandbox runs.
        """
        state = state.absolute()
        file = state / _DESCRIPTION
        processes = Processes(state)
        dead = [name for name in _PARTS if not processes.alive(name)]
        if dead or not is_described(state):
            raise SandboxError(
                f"no sandbox runs with the state directory {state}",
                got=f"ended: {', '.join(dead)}" if dead else f"no {_DESCRIPTION}",
                remedy="stop its other processes with `make sandbox-down`, then start one",
            )
        description = json.loads(file.read_text())
        broker = pulsar.Broker(state, **description["pulsar"])
        return cls(state, processes, broker, kubernetes.Cluster(state, **description["cluster"]))

    def _describe(self) -> None:
        """Write the description for `attach`, which marks the sandbox as complete."""
        description = {
            "pulsar": {
                "port": self.pulsar.port,
                "admin_port": self.pulsar.admin_port,
                "admin_tls_port": self.pulsar.admin_tls_port,
                "tls_port": self.pulsar.tls_port,
                "version": self.pulsar.version,
                "full_jit": self.pulsar.full_jit,
            },
            "cluster": {"port": self.cluster.port},
        }
        (self.state / _DESCRIPTION).write_text(json.dumps(description))


def default_state() -> Path:
    """Return the directory of ``make sandbox``, in the user's state directory."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "redrive" / "sandbox"


def is_described(state: Path) -> bool:
    """Return True if a sandbox was started completely with *state*, and not stopped."""
    return (state / _DESCRIPTION).is_file()


def remove(state: Path) -> None:
    """Stop all processes that were started with *state*, and delete the directory."""
    Processes(state).stop_all()
    if state.exists():
        shutil.rmtree(state)


def _fresh(state: Path) -> Path:
    state = state.absolute()
    if any(character.isspace() for character in str(state)):
        raise SandboxError(
            "Pulsar's start script takes no path with white space in it",
            got=str(state),
            remedy="choose another state directory",
        )
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(state.iterdir()):
        raise SandboxError(
            f"the state directory {state} is not empty",
            remedy="attach to the sandbox that uses it, or stop it with `make sandbox-down`",
        )
    return state
