"""Parts that the demos of all brokers share: programs, commands, and waiting.

Subclassed by `story` and `rocketmq`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from sandbox import CHECKOUT
from sandbox.demo import orders, screen
from sandbox.errors import SandboxError
from sandbox.sandbox import KubernetesSandbox

NAMESPACE = "shop"
TIMEOUT_SECONDS = 180.0


@dataclass(frozen=True)
class Stage(ABC):
    """One run of a demo.

    Attributes:
        sandbox: redrive runs in it, without a shop yet.
        count: the number of orders to send.
    """

    EXAMPLE: ClassVar[str]
    sandbox: KubernetesSandbox
    count: int

    @abstractmethod
    def counts(self) -> screen.Counts:
        """Count the orders by place."""

    @abstractmethod
    def manifest(self, name: str) -> str:
        """Return a manifest of the example with the addresses of this sandbox."""

    @property
    def example(self) -> Path:
        """The manifests and programs of the demo."""
        return CHECKOUT / "examples" / self.EXAMPLE

    @property
    def logs(self) -> orders.Logs:
        """The logs of the two programs."""
        return orders.Logs(self.sandbox.state)

    @property
    def warehouse(self) -> Path:
        """A file that exists while the warehouse answers."""
        return self.sandbox.state / "warehouse.up"

    def watch(self, goal: str, until: screen.Condition) -> None:
        """Show the counts until a condition holds.

        Raises:
            SandboxError: it took too long, or a program ended.
        """
        if not screen.watch(self._checked_counts, until, seconds=TIMEOUT_SECONDS):
            raise SandboxError(
                f"it took more than {TIMEOUT_SECONDS:.0f} s until {goal}",
                got=str(self.counts()),
                remedy=f"see the logs in {self.sandbox.state / 'logs'}",
            )

    def has_replayed(self, name: str) -> bool:
        """Return True if a Replay is complete.

        Raises:
            SandboxError: it has failed.
        """
        true = 'jsonpath={.status.conditions[?(@.status=="True")].type}'
        conditions = self.kubectl("get", f"replay/{name}", "-o", true).split()
        if "Failed" in conditions:
            raise SandboxError(
                "the replay failed",
                got=self.kubectl("get", f"replay/{name}", "-o", "jsonpath={.status}"),
                remedy=f"see the logs in {self.sandbox.state / 'logs'}",
            )
        return "Complete" in conditions

    def apply(self, name: str) -> None:
        """Apply a manifest of the example."""
        screen.console.print(f"kubectl apply -f examples/{self.EXAMPLE}/{name}")
        self.kubectl("apply", "-f", "-", text=self.manifest(name))

    def wait(self, condition: str, name: str) -> None:
        """Wait until an object has a condition, or a field."""
        self.kubectl("wait", f"--for={condition}", name, f"--timeout={TIMEOUT_SECONDS:.0f}s")

    def kubectl(self, *args: str, text: str | None = None) -> str:
        """Run kubectl in the namespace of the shop."""
        return self.sandbox.cluster.kubectl("-n", NAMESPACE, *args, input=text)

    def _checked_counts(self) -> screen.Counts:
        for program in ("consumer", "producer"):
            finished = program == "producer" and self.logs.count_produced() == self.count
            if not finished and not self.sandbox.processes.alive(program):
                raise SandboxError(
                    f"the {program} ended early",
                    remedy=f"see {self.sandbox.processes.log(program)}",
                )
        return self.counts()
