"""The operator under measurement: what it tells of itself, and a stop and start of it."""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from sandbox import installation
from sandbox.sandbox import Sandbox


@dataclass(frozen=True)
class Operator:
    """The operator of a sandbox."""

    sandbox: Sandbox

    @property
    def kubeconfig(self) -> Path:
        """That of the cluster's administrator."""
        return self.sandbox.cluster.kubeconfig

    def stop(self) -> None:
        """Stop it; it has ended when this returns."""
        self.sandbox.processes.stop(installation.OPERATOR)

    def start(self) -> None:
        """Start it again; it serves when this returns."""
        installation.start_operator(self.sandbox)

    def memory(self) -> float:
        """How much it holds resident, in MB."""
        return self.measured("process_resident_memory_bytes") / 1e6

    def measured(self, name: str, **labels: str) -> float:
        """The sum over what it tells of a metric with these labels."""
        url = f"{installation.endpoint(self.sandbox)}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - our own
            families = list(text_string_to_metric_families(answer.read().decode()))
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )
