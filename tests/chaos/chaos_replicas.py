"""Two operators compete for the lease: they never write at the same time, and policies converge."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event
from weakref import WeakKeyDictionary

import psutil
import pytest

from sandbox import installation
from tests.chaos.conftest import Harness, wait_for
from tests.support.installed_operator import NAMES, OperatorReplica, StartReplica, start_replica

__all__ = ["start_replica"]

END_SECONDS = 15
PAUSE_SECONDS = 0.5
"""The interval between changes of policies."""
WAITING = 5
"""The number of policies that are created before one is changed or deleted."""


@dataclass
class Crowd:
    """Policies that are created continuously; every third is changed, every third is deleted.

    Attributes:
        names: of all created policies.
    """

    harness: Harness
    names: list[str] = field(default_factory=list)

    @property
    def changed(self) -> list[str]:
        return self.names[0::3]

    @property
    def gone(self) -> list[str]:
        return self.names[1::3]

    @contextmanager
    def coming(self) -> Iterator[None]:
        """Create policies until the block ends; return after all changes are made."""
        enough = Event()
        with ThreadPoolExecutor(1) as apart:
            work = apart.submit(self._come_until, enough)
            try:
                yield
            finally:
                enough.set()
            work.result()

    def _come_until(self, enough: Event) -> None:
        while not enough.wait(PAUSE_SECONDS):
            self._come()
            if len(self.names) > WAITING:
                self._change(self.names[-WAITING - 1])
        for name in self.names[-WAITING:]:
            self._change(name)

    def _come(self) -> None:
        name = f"fought-{len(self.names):03}"
        self.names.append(name)
        self.harness.source(name)
        self.harness.ask(name, deletionPolicy="Delete")

    def _change(self, name: str) -> None:
        if name in self.changed:
            self.harness.ask(name, deletionPolicy="Delete", maxRetries=7)
        elif name in self.gone:
            self.harness.shop.kubectl("delete", "retrypolicy", name, "--wait=false")


@dataclass
class Witness:
    """Records the process of each write to the broker."""

    processes: list[psutil.Process] = field(default_factory=list)
    writers: list[int] = field(default_factory=list)
    _known: WeakKeyDictionary[asyncio.BaseTransport, int] = field(default_factory=WeakKeyDictionary)

    def __call__(self, connection: asyncio.BaseTransport) -> None:
        """Record a write. The process of a connection is read once, because that takes long.

        Otherwise the proxy delays writes so much that those of an ended process come
        after the first writes of the next.
        """
        if connection not in self._known:
            port = connection.get_extra_info("peername")[1]
            for process in self.processes:
                if process.is_running() and port in _ports(process):
                    self._known[connection] = process.pid
        if connection in self._known:
            self.writers.append(self._known[connection])

    def sees(self, replica: OperatorReplica) -> None:
        """Wait until *replica* writes."""
        before = self.writers.count(replica.process.pid)
        wait_for(
            lambda: self.writers.count(replica.process.pid) > before, f"{replica.name} is idle"
        )


def _ports(process: psutil.Process) -> set[int]:
    try:
        return {connection.laddr.port for connection in process.net_connections("tcp")}
    except psutil.Error:  # it has ended
        return set()


@dataclass
class Fight:
    """The leader and the standby.

    Attributes:
        led: the processes that were leaders, in order.
    """

    harness: Harness
    start_replica: StartReplica
    witness: Witness
    led: list[int] = field(default_factory=list)

    def begin(self) -> None:
        self.leads = self._starts(NAMES[0], "redrive serves")
        self.waits = self._starts(NAMES[1], "redrive is a standby")
        self.led.append(self.leads.process.pid)

    def takes(self, blow: Callable[[Fight], None]) -> None:
        """Disturb the working leader, and wait until the standby takes over."""
        self.witness.sees(self.leads)
        blow(self)
        beaten, self.leads = self.leads, self.waits
        self.led.append(self.leads.process.pid)
        self.harness.sandbox.processes.stop(beaten.name)  # it has ended; this removes its record
        self.waits = self._starts(beaten.name, "redrive is a standby")
        self.witness.sees(self.leads)

    def _starts(self, name: str, until: str) -> OperatorReplica:
        replica = self.start_replica(name, until)
        self.witness.processes.append(replica.process)
        return replica


def is_killed(fight: Fight) -> None:
    """Kill the leader."""
    fight.harness.sandbox.processes.kill(fight.leads.name)
    fight.waits.takes_over()


def is_frozen(fight: Fight) -> None:
    """Freeze the leader past its lease, and resume it in the middle of its work."""
    fight.leads.process.send_signal(signal.SIGSTOP)
    fight.waits.takes_over()
    fight.witness.sees(fight.waits)
    fight.leads.process.send_signal(signal.SIGCONT)
    ends(fight.leads)
    fight.witness.sees(fight.waits)


def loses_its_lease_to_a_stranger(fight: Fight) -> None:
    """Edit the lease to name a holder that does not exist."""
    hand_over(fight, "stranger")


def loses_its_lease_to_the_other(fight: Fight) -> None:
    """Edit the lease to name the standby while the leader still writes."""
    hand_over(fight, fight.waits.name)


def hand_over(fight: Fight, holder: str) -> None:
    patch = json.dumps({"spec": {"holderIdentity": holder}})
    lease = f"--namespace={installation.NAMESPACE}", "patch", "lease", installation.RELEASE
    fight.harness.sandbox.cluster.kubectl(*lease, "--type=merge", f"--patch={patch}")
    ends(fight.leads)
    fight.waits.takes_over()


def ends(replica: OperatorReplica) -> None:
    """Wait until a replica exits because of the lost lease."""
    replica.process.wait(timeout=END_SECONDS)
    assert "lease lost: another operator has taken the lease" in replica.logged()


@pytest.fixture
def fight(harness: Harness, start_replica: StartReplica) -> Fight:
    fight = Fight(harness, start_replica, Witness())
    harness.proxy.witness = fight.witness
    fight.begin()
    return fight


def test_replicas_fight_while_policies_come_change_and_go(harness: Harness, fight: Fight) -> None:
    source = {topic: state for topic, state in harness.right.items() if "-fulfilment-" not in topic}
    crowd = Crowd(harness)
    with crowd.coming():
        for blow in (
            is_killed,
            is_frozen,
            loses_its_lease_to_a_stranger,
            loses_its_lease_to_the_other,
            is_frozen,
        ):
            fight.takes(blow)
            harness.is_intact()

    assert len(crowd.gone) > 10
    harness.shop.kubectl(
        "wait", "--for=delete", "--timeout=60s", *(f"retrypolicy/{name}" for name in crowd.gone)
    )
    for name in crowd.names:
        if name in crowd.gone:
            assert harness.made(name) == source
            continue
        harness.shop.ready(name)
        assert harness.made(name) == harness.right
        written = harness.shop.get("configmap", f"{name}-redrive")["data"]["policy.json"]
        assert ('"maxRetries": 7' in written) is (name in crowd.changed)
    harness.is_intact()
    # No process wrote after the first write of the next one.
    assert [pid for pid, _ in itertools.groupby(fight.witness.writers)] == fight.led
