"""RocketMQ in the attacks on another tenant: its cluster and policy, and a hostile server."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from redrive.admin.rocketmq import Master, RocketMQSession
from sandbox import rocketmq
from sandbox.process import Processes
from sandbox.rocketmq import ADMIN, RocketMQ, allow, at_master, create_user
from tests.chaos.proxy import in_thread, stop_accepting
from tests.integration.provision.conftest import redrive
from tests.support.replay_shop import Shop
from tests.support.rocketmq import send
from tests.support.waiting import wait_until
from tests.unit.admin.test_answers import HOSTILE

GENUINE = 5
"""Dead letters of the victim in each Replay."""
SYSTEM_NAMES = ("RMQ_SYS_TRANS_HALF_TOPIC", "SCHEDULE_TOPIC_XXXX", "TBW102", "CID_RMQ_SYS_TRANS")
POLICY = {"kind": "RocketMQRetryPolicy", "name": "queues"}
_SECONDS = 180
_CODES = (0, 0, 0, 0, 1, 2, 16, 17, 26, 206, -1, 10**9)
_DRIP_SECONDS = 0.5
_Body = dict[str, Any]


@dataclass
class QueueVictim:
    """A RocketMQRetryPolicy of another tenant, which works, and its cluster.

    Attributes:
        moved: number of its dead letters that were moved.
    """

    shop: Shop
    cluster: RocketMQ
    moved: int = field(default=0)

    @classmethod
    @contextmanager
    def working(cls, shop: Shop, folder: Path) -> Iterator[Self]:
        """Start a cluster, and provision the policy."""
        processes = Processes(folder)
        try:
            victim = cls(shop, rocketmq.start(folder, processes))
            victim._provision()
            yield victim
        finally:
            processes.kill_all()

    @property
    def names(self) -> tuple[str, ...]:
        """Return its group and its topics; the source topic has the name of the group."""
        group = self.shop.name
        return group, f"%RETRY%{group}", f"%DLQ%{group}", f"redrive-ledger-{group}"

    def _provision(self) -> None:
        group = self.shop.name
        secret = at_master(self.cluster, self._prepare)
        for name, key in {"queues-admin": self.cluster.secret, "queues-jobs": secret}.items():
            self.shop.lend("Secret", name, stringData={"secretKey": key})
        # The Secrets are lent to the connection `main`, so this one needs its own consent.
        usable = f"redrive.io/usable-by={self.shop.name}/queues"
        self.shop.kubectl("annotate", "--overwrite", "secret", "queues-jobs", usable)
        spec = {
            "nameServers": [self.cluster.name_server],
            "authentication": access_key(ADMIN, "queues-admin"),
            "allow": [{"name": "shop", "topics": [group], "groups": [group]}],
            "replay": {"authentication": access_key("jobs", "queues-jobs")},
        }
        api = "redrive.io/v1beta1"
        self.shop.apply(api, "BrokerConnection", "queues", spec={"rocketmq": spec})
        wants = {"connectionRef": {"name": "queues"}, "topic": group, "group": group}
        self.shop.apply(api, "RocketMQRetryPolicy", "queues", spec=wants)
        wait_until(lambda: "masters" in self._policy().get("status", {}), _SECONDS)

    async def _prepare(self, session: RocketMQSession, master: Master) -> str:
        group, _, dead, ledger = self.names
        await session.put_topic(master, group, 1)
        secret = await create_user(session, master, "jobs")
        every = ["Get", "Sub", "Pub"]
        rights = {f"Topic:{dead}": ["Get", "Sub"], f"Group:{group}": ["Get", "Sub"]}
        await allow(
            session, master, "jobs", {**rights, f"Topic:{group}": every, f"Topic:{ledger}": every}
        )
        return secret

    def _policy(self) -> _Body:
        return self.shop.sandbox.cluster.objects.get(
            "rocketmqretrypolicy", "queues", self.shop.name
        )

    def lend(self, namespace: str) -> None:
        """Let another namespace use all groups and topics, by a connection of its own."""
        spec = self.shop.sandbox.cluster.objects.get("brokerconnection", "queues", self.shop.name)
        every = {"name": "all", "topics": ["*"], "groups": ["*"], "deletion": "Allowed"}
        rule = every | {"namespaces": {"names": [namespace]}}
        lent = spec["spec"]["rocketmq"] | {"allow": [rule]}
        api = "redrive.io/v1beta1"
        self.shop.apply(api, "BrokerConnection", "lent-queues", spec={"rocketmq": lent})

    def move_dead_letters(self, name: str) -> None:
        """Bury dead letters, and check that a Replay moves each of them once."""

        async def bury(session: RocketMQSession, master: Master) -> None:
            for number in range(GENUINE):
                await send(session, master, self.names[2], retries=number)

        at_master(self.cluster, bury)
        self.shop.replay(f"queues-{name}", policyRef=POLICY, target={"type": "Source"})
        counts = self.shop.reaches(f"queues-{name}", "Completed")["run"]["counts"]
        assert (counts["matched"], counts["moved"], counts["left"]) == (GENUINE, GENUINE, 0)
        self.moved += GENUINE

    def write_forged(self, chosen: random.Random) -> None:
        """Store forged records in the ledger, and copies in the target, as their users may."""

        async def forge(session: RocketMQSession, master: Master) -> None:
            for topic in (self.names[0], self.names[3]):
                for content in chosen.sample(HOSTILE, 4):
                    properties = f"KEYS\x01x\x02redrive-owner\x01{master.name}\x02"
                    properties += "redrive-number\x010\x02REDRIVE_REPLAY_SOURCE\x01broker-a:0:1\x02"
                    await session.send(master, topic, 0, content.encode(), properties)

        at_master(self.cluster, forge)
        self._forged = 4

    def protected(self) -> _Body:
        """Return settings of the group and its topics, and the messages that are not forged."""

        async def read(session: RocketMQSession, master: Master) -> _Body:
            group, *topics = self.names
            settings = await session.group(master, group)
            counts = {topic: await session.topic(master, topic) for topic in (group, *topics)}
            return {"group": settings, "topics": counts, "spec": self._policy()["spec"]}

        return at_master(self.cluster, read)

    def check_copies(self) -> None:
        """Check that the source topic has each moved message, and the forged ones."""

        async def count(session: RocketMQSession, master: Master) -> int:
            return await session.count(master, self.names[0], 1)

        assert at_master(self.cluster, count) == self.moved + self._forged

    _forged = 0


def access_key(user: str, secret: str) -> _Body:
    """Return the authentication of a user, with the name of a Secret."""
    reference = {"name": secret, "key": "secretKey"}
    return {"type": "AccessKey", "accessKey": {"user": user, "secretRef": reference}}


def objects(victim: QueueVictim, address: str, chosen: random.Random) -> Iterator[_Body]:
    """Yield one valid object of each kind for RocketMQ, of an attacker.

    Args:
        address: of a hostile server.
    """
    number = chosen.randrange(10**6)
    lent = {"name": "lent-queues", "namespace": victim.shop.name}
    group = victim.names[0]
    yield redrive(
        "RocketMQRetryPolicy",
        {
            "connectionRef": chosen.choice([lent, {"name": "hostile-queues"}]),
            "topic": chosen.choice([group, f"own-{number}", *SYSTEM_NAMES]),
            "group": chosen.choice([group, f"g-{number}", f"redrive-ledger-{group}"]),
            "clients": "Remoting",
            "retryQueues": chosen.choice([1, 64]),
            "deletionPolicy": chosen.choice(["Delete", "Retain"]),
        },
    )
    for kind, more in (("Replay", {"target": {"type": "Source"}}), ("Inspection", {"newest": 5})):
        name = chosen.choice(["queues", f"p{number % 150}"])
        yield redrive(kind, {"policyRef": {**POLICY, "name": name}, "deadline": "1h", **more})
    key = access_key("admin", "queues-admin")
    cluster = {
        "nameServers": [address, victim.cluster.name_server],
        "brokerHosts": ["*"],
        "authentication": key,
        "allow": [{"name": "all", "topics": ["*"], "groups": ["*"], "deletion": "Allowed"}],
        "replay": {"authentication": key},
        "inspection": {"authentication": key},
    }
    yield redrive("BrokerConnection", {"rocketmq": cluster})


class HostileQueueServer:
    """A name server and master that answers each call at random.

    Attributes:
        address: of the server.
        answers: the number of its answers.
    """

    def __init__(self, chosen: random.Random) -> None:
        self._chosen = chosen
        self.address = ""
        self.answers = 0

    @classmethod
    @contextmanager
    def serving(cls, chosen: random.Random) -> Iterator[Self]:
        """Serve in a thread until the block ends."""
        server = cls(chosen)
        with in_thread(server._serving, name="hostile RocketMQ"):
            yield server

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        listener = socket.create_server(("127.0.0.1", 0))
        opened: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            opened[task] = writer
            with suppress(OSError, EOFError, ValueError):
                await self._answer(reader, writer)
            writer.transport.abort()
            del opened[task]

        server = await asyncio.start_server(answer, sock=listener)
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        try:
            yield
        finally:
            await stop_accepting(listener)
            server.close()
            for writer in opened.values():
                writer.transport.abort()
            await asyncio.gather(*opened, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            text = await reader.readexactly(int.from_bytes(await reader.readexactly(4)))
            call = json.loads(text[4 : 4 + int.from_bytes(text[1:4])])
            self.answers += 1
            for part in self._parts(call):
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(_DRIP_SECONDS if len(part) == 1 else 0)

    def _parts(self, call: _Body) -> Iterator[bytes]:
        """Yield an answer; its parts of one byte are sent slowly."""
        kind = self._chosen.randrange(12)
        valid = self._frame(call, self._valid(call))
        if kind == 0:
            yield self._chosen.choice([b"HTTP/1.1 200 OK\r\n\r\n", b"\0" * 9_000, b"\xff" * 9_000])
        elif kind == 1:  # endless frames that answer another call
            yield self._frame({"opaque": -1}, b"{}") * 1_000
        elif kind == 2:
            yield from (valid[place : place + 1] for place in range(30))
        elif kind == 3:
            yield struct.pack(">II", 2**31, 2**24) + b"[" * 500_000
        elif kind < 6:
            yield self._frame(call, self._chosen.choice(HOSTILE).encode())
        else:
            yield valid

    def _frame(self, call: _Body, body: bytes) -> bytes:
        numbers = self._chosen.choice(["7", "0", str(2**47 - 1), str(2**63), 10**30, -1, [], {}])
        fields = {"offset": numbers, "nextBeginOffset": numbers}
        header = {"code": self._chosen.choice(_CODES), "flag": 1, "opaque": call["opaque"]}
        header |= {"extFields": fields, "remark": self._chosen.choice(["no", "\u202e" * 99, 7, []])}
        text = json.dumps(header).encode()
        return struct.pack(">II", 4 + len(text) + len(body), len(text)) + text + body

    def _valid(self, call: _Body) -> bytes:
        """Return an answer of the form of a server's."""
        queues = self._chosen.choice([1, 1_024, 2**31 - 1, 10**30])
        names = [f"m{number}" for number in range(self._chosen.choice([1, 64, 900]))]
        nested = json.loads("[" * 60 + "]" * 60)
        documents: dict[int, object] = {
            106: {
                "clusterAddrTable": {"one": names},
                "brokerAddrTable": {n: {"brokerAddrs": {"0": self.address}} for n in names},
            },
            28: {"table": {"brokerVersionDesc": "V5_5_0"}},
            351: {"readQueueNums": queues, "writeQueueNums": queues, "perm": 6},
            352: {"groupName": "x", "retryMaxTimes": queues, "more": nested},
        }
        if call.get("code") == 26:
            return b"fileReservedTime=72\n" * 9_000
        return json.dumps(documents.get(call.get("code", 0), {})).encode()
