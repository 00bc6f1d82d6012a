"""The steps of the demo of RocketMQ, in order, in a sandbox where redrive is installed.

Called by ``python -m sandbox.demo rocketmq``, and by the end-to-end test. The programs are those of
`examples/04-rocketmq`: they use the gRPC client of RocketMQ, and know nothing of redrive.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import ClassVar

from redrive.admin.rocketmq import Master, RocketMQSession
from redrive.policy.envelope import REPLAY_SOURCE
from redrive.reading.queues import QueueMessage, parse_stored
from sandbox import SOURCE_ROOT, chart, rocketmq, toolchain, versions
from sandbox.demo import screen
from sandbox.demo.account import Account
from sandbox.demo.stage import NAMESPACE, Stage
from sandbox.errors import SandboxError
from sandbox.rocketmq import RocketMQ

TOPIC, GROUP = "orders", "fulfilment"
DEAD_LETTER_TOPIC = f"%DLQ%{GROUP}"
LADDER = 1.0, 5.0, 15.0
_SOURCE = {"PYTHONPATH": str(SOURCE_ROOT)}
_POLICY = "rmqpol/orders-fulfilment"
_READ, _ALL = ["Get", "Sub"], ["Get", "Sub", "Pub"]
_RIGHTS = {
    "web-shop": {f"Topic:{TOPIC}": ["Pub"]},
    "fulfilment": {f"Topic:{TOPIC}": ["Sub"], f"Group:{GROUP}": ["Sub"]},
    "inspector": {f"Topic:{DEAD_LETTER_TOPIC}": _READ, f"Group:{GROUP}": ["Sub"]},
    "replayer": {
        f"Topic:{DEAD_LETTER_TOPIC}": _READ,
        f"Topic:redrive-ledger-{GROUP}": _ALL,
        f"Topic:{TOPIC}": _ALL,
        f"Group:{GROUP}": _READ,
    },
}
"""The users of the programs and of the jobs, with their rights."""


@dataclass(frozen=True)
class RocketMQStory(Stage):
    """One run of the demo of RocketMQ.

    Attributes:
        cluster: with one master.
        proxy: address of its proxy.
    """

    EXAMPLE: ClassVar[str] = "04-rocketmq"
    cluster: RocketMQ
    proxy: str

    def play(self) -> Account:
        """Run all steps and return the account of the orders.

        Raises:
            SandboxError: a step failed, or did not end in time.
        """
        users = self.declare()
        self.fail(users)
        self.show_ladder()
        self.peek()
        self.replay()
        return self.settle()

    def declare(self) -> dict[str, str]:
        """Apply the connection and the policy; return the secret keys of all users."""
        delays = ", ".join(f"{delay:g}" for delay in LADDER)
        screen.heading(f"2. A policy is applied: retries after {delays} s, then dead letters")
        users = rocketmq.at_master(self.cluster, _open_shop)
        self.sandbox.cluster.kubectl("create", "namespace", NAMESPACE)
        chart.prepare_replays(self.sandbox.cluster, NAMESPACE)
        for user in ("redrive", "inspector", "replayer"):
            secret = f"rocketmq-{user}"
            key = f"--from-literal=secretKey={users[user]}"
            self.kubectl("create", "secret", "generic", secret, key)
            self.kubectl("annotate", "secret", secret, f"redrive.io/usable-by={NAMESPACE}/rocketmq")
        for name in ("1-connection.yaml", "2-policy.yaml"):
            self.apply(name)
        self.wait("condition=Ready", _POLICY)
        screen.output(self.kubectl("get", "bconn,rmqpol"))
        return users

    def fail(self, users: dict[str, str]) -> None:
        """Send the orders while the warehouse is down."""
        screen.heading(f"3. {self.count} orders by a gRPC client, while the warehouse is down")
        warehouse = f"--warehouse={self.warehouse}"
        self._start("consumer", users, "fulfilment", f"--log={self.logs.handled}", warehouse)
        self._start(
            "producer", users, "web-shop", f"--log={self.logs.produced}", f"--count={self.count}"
        )
        self.watch(
            "each order is processed or a dead letter",
            lambda counts: counts.produced == self.count and counts.settled,
        )

    def show_ladder(self) -> None:
        """Show the pauses before the retries of some orders.

        Raises:
            SandboxError: one was shorter than the policy allows.
        """
        for order, gaps in self.logs.gaps().items():
            is_kept = len(gaps) == len(LADDER) and all(
                gap >= delay for gap, delay in zip(gaps, LADDER, strict=True)
            )
            shown = ", ".join(f"{gap:.1f}" for gap in gaps)
            if not is_kept:
                raise SandboxError(
                    f"{order} was not retried as the policy says", got=f"after {shown or 'none'} s",
                    remedy="this is a bug in redrive, please report it",
                )  # fmt: skip
            screen.console.print(f"{order}: handled again after {shown} s, then a dead letter")

    def peek(self) -> None:
        """Show dead letters by the command."""
        screen.heading("4. The dead letters: what failed, how often, since when")
        command = ["peek", "--namespace", NAMESPACE, _POLICY]
        screen.console.print(f"redrive {' '.join(command)}")
        shown = subprocess.run(  # noqa: S603  our own interpreter
            [sys.executable, "-m", "redrive", *command],
            env={**os.environ, "KUBECONFIG": str(self.sandbox.cluster.kubeconfig), **_SOURCE},
            check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        screen.output(shown.stdout)
        if shown.returncode != 0:
            raise SandboxError(
                "redrive peek failed",
                got=f"exit status {shown.returncode}",
                remedy=f"see the logs in {self.sandbox.state / 'logs'}",
            )

    def replay(self) -> None:
        """Bring the warehouse back and replay all dead letters; the malformed ones die again."""
        screen.heading("5. The warehouse is back: the dead letters are replayed by a Job")
        self.warehouse.touch()
        self.apply("3-replay.yaml")
        self.watch(
            "the replayed orders are processed, or dead letters again",
            lambda _: self.has_replayed("after-the-outage") and self.counts().settled,
        )
        screen.output(self.kubectl("get", "rmqpol,replay,job"))

    def settle(self) -> Account:
        """Stop the consumer and return the account."""
        screen.heading("6. The account: the producer's log, the handler's log, the dead letters")
        self.sandbox.processes.stop("consumer")
        ids = rocketmq.at_master(self.cluster, _dead)
        self.logs.dead.write_text("".join(f"{order}\n" for order in ids), encoding="ascii")
        return self.logs.account()

    def counts(self) -> screen.Counts:
        """Count the orders by place."""
        produced, outcomes = self.logs.count_produced(), self.logs.outcomes()
        dead = rocketmq.at_master(self.cluster, _count_dead(produced))
        waiting = produced - outcomes["done"] - dead
        return screen.Counts(produced, outcomes, waiting, dead)

    def manifest(self, name: str) -> str:
        """Return a manifest of the example with the addresses of this sandbox."""
        text = (self.example / name).read_text(encoding="utf-8")
        return text.replace("rocketmq-namesrv.rocketmq.svc:9876", self.cluster.name_server)

    def _start(self, program: str, users: dict[str, str], user: str, *options: str) -> None:
        python = toolchain.python_environment(versions.ROCKETMQ_CLIENT_LOCK) / "bin" / "python"
        environment = {"ROCKETMQ_PROXY": self.proxy, "ROCKETMQ_USER": user, "PYTHONPATH": ""}
        environment |= {"ROCKETMQ_SECRET": users[user], "HOME": str(self.sandbox.state)}
        command = [str(python), str(self.example / f"{program}.py"), *options]
        self.sandbox.processes.start(program, command, env=environment)


async def _open_shop(session: RocketMQSession, master: Master) -> dict[str, str]:
    """Create the source topic and all users; return their secret keys."""
    await session.put_topic(master, TOPIC, 2)
    users = {"redrive": await rocketmq.create_user(session, master, "redrive", "Super")}
    for user, rights in _RIGHTS.items():
        users[user] = await rocketmq.create_user(session, master, user)
        await rocketmq.allow(session, master, user, rights)
    return users


def _count_dead(produced: int) -> Callable[[RocketMQSession, Master], Awaitable[int]]:
    """Return a call that counts the dead letters which no Replay has moved.

    The source topic has the produced orders and one copy of each moved dead letter.
    """

    async def count(session: RocketMQSession, master: Master) -> int:
        stored = await session.count(master, TOPIC, 2)
        dead = await session.count(master, DEAD_LETTER_TOPIC, 1)
        return max(0, dead - max(0, stored - produced))

    return count


async def _dead(session: RocketMQSession, master: Master) -> list[str]:
    """Return the ids of the orders whose dead letters no Replay has moved."""
    copies = [message async for _, message in _messages(session, master, TOPIC, 2)]
    moved = {(copy.properties or {}).get(REPLAY_SOURCE) for copy in copies}
    return [
        (message.properties or {})["KEYS"]
        async for queue, message in _messages(session, master, DEAD_LETTER_TOPIC, 1)
        if f"{master.name}:{queue}:{message.offset}" not in moved
    ]


async def _messages(
    session: RocketMQSession, master: Master, topic: str, queues: int
) -> AsyncIterator[tuple[int, QueueMessage]]:
    for queue in range(queues):
        offsets = await session.offsets(master, topic, queue)
        offset = offsets.start
        while offset < offsets.stop:
            content, offset = await session.pull(master, topic, queue, offset, GROUP)
            for message in parse_stored(content):
                yield queue, message
