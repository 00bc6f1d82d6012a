"""The operator under measurement: its metrics, and its stop and start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sandbox import installation
from sandbox.sandbox import Sandbox
from tests.support.operator_metrics import metric


@dataclass(frozen=True)
class Operator:
    """The operator of a sandbox."""

    sandbox: Sandbox

    @property
    def kubeconfig(self) -> Path:
        """The kubeconfig of the cluster's administrator."""
        return self.sandbox.cluster.kubeconfig

    def stop(self) -> None:
        """Stop the operator, and wait for its end."""
        self.sandbox.processes.stop(installation.OPERATOR)

    def start(self) -> None:
        """Start the operator again, and wait until it serves."""
        installation.start_operator(self.sandbox)

    def memory(self) -> float:
        """The resident memory of the operator in MB."""
        return self.measured("process_resident_memory_bytes") / 1e6

    def measured(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples with these labels."""
        return metric(self.sandbox, name, seconds=10, **labels)
