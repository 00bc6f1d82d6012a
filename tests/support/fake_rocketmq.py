"""A RocketMQ cluster in memory, and a RocketMQRetryPolicy for tests with any RocketMQ."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

from redrive.admin.errors import without_master
from redrive.admin.rocketmq import Master, QueueCounts
from redrive.api.rocketmq import RocketMQRule
from redrive.errors import Requeue
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.resources import Key
from redrive.kube.rocketmq import RocketMQConnection
from redrive.provision.groups import GroupClaims
from redrive.provision.reconciler import OrphanedPolicies
from redrive.provision.rocketmq import RocketMQReconciler
from redrive.reading.queues import QueueMessage, parse_stored
from tests.support.fake_kubernetes import FakeKubernetes

MASTER = Master("broker-a", "127.0.0.1:10911")
IPV6 = 1 << 4 | 1 << 5
_V2 = 0xDAA320AB


def stored(  # noqa: PLR0913  fields of a message
    offset: int,
    body: bytes = b"message",
    properties: bytes = b"",
    *,
    flags: int = 0,
    kind: int = 0xDAA320A7,
    retries: int = 16,
    log: int = 0,
) -> bytes:
    """Return a message as a master stores it."""
    host, width = bytes(20 if flags & IPV6 else 8), "H" if kind == _V2 else "B"
    frame = struct.pack(">I3iqqiq", kind, 0, 0, 0, offset, log, flags, 1_000) + host
    frame += struct.pack(">q", 2_000) + host + struct.pack(">iqi", retries, 0, len(body)) + body
    frame += struct.pack(f">{width}", 3) + b"abc"
    frame += struct.pack(">H", len(properties)) + properties
    return struct.pack(">I", len(frame) + 4) + frame


class FakeCluster:
    """One session and the cluster behind it, which has one master. A pull has two messages.

    Attributes:
        first: the first kept offset of a queue, by topic and queue.
        counts: number of queues of each topic.
        failures: errors of the next calls of `send`; None lets a call pass.
    """

    def __init__(self, **counts: int) -> None:
        self.counts = dict(counts)
        self.first: defaultdict[tuple[str, int], int] = defaultdict(int)
        self.failures: list[Exception | None] = []
        self._size = 0  # of the log
        self._stored: defaultdict[tuple[str, int], list[bytes]] = defaultdict(list)

    def add(self, topic: str, queue: int = 0, body: bytes = b"message", **names: str) -> None:
        """Store a message with properties."""
        self.put(topic, body, names, queue)

    def put(
        self, topic: str, body: bytes, names: Mapping[str, str], queue: int = 0, retries: int = 0
    ) -> None:
        """Store a message with properties of any name. Dead letters have had all retries."""
        properties = "".join(f"{k}\1{v}\2" for k, v in names.items())
        retries = 16 if topic.startswith("%DLQ%") else retries
        self._add(topic, queue, body, properties, retries=retries)

    def _add(  # noqa: PLR0913, PLR0917  fields of a message
        self, topic: str, queue: int, body: bytes, properties: str, flags: int = 0, retries: int = 0
    ) -> None:
        messages = self._stored[topic, queue]
        numbers = {"flags": flags, "retries": retries, "log": self._size}
        message = stored(len(messages), body, properties.encode(), **numbers)
        messages.append(message)
        self._size += len(message)

    def drop(self, topic: str, *, others: int = 0) -> None:
        """Delete a topic, and create it again with a number of other messages in each queue."""
        for queue in range(self.counts[topic]):
            self._stored[topic, queue].clear()
            for _ in range(others):
                self.add(topic, queue, UNIQ_KEY="other")

    def read(self, topic: str, queue: int = 0) -> list[QueueMessage]:
        """Return the kept messages of a queue."""
        return list(parse_stored(b"".join(self._stored[topic, queue][self.first[topic, queue] :])))

    async def masters(self, recorded: Sequence[str] = ()) -> tuple[Master, ...]:
        missing = (Master(name, "") for name in recorded if name != MASTER.name)
        return (MASTER, *missing)

    async def topic(self, master: Master, name: str) -> QueueCounts | None:
        if not master.address:
            raise without_master(master.name, "read a topic")
        count = self.counts.get(name)
        return None if count is None else QueueCounts(count, count, 6)

    async def offsets(self, _master: Master, topic: str, queue: int) -> range:
        return range(self.first[topic, queue], len(self._stored[topic, queue]))

    async def pull(
        self, _master: Master, topic: str, queue: int, offset: int, _group: str, count: int = 32
    ) -> tuple[bytes, int]:
        first = self.first[topic, queue]
        if offset < first:
            return b"", first
        messages = self._stored[topic, queue][offset : offset + min(2, count)]
        return b"".join(messages), offset + len(messages)

    async def send(  # noqa: PLR0913  see `RocketMQSession.send`
        self,
        _master: Master,
        topic: str,
        queue: int,
        content: bytes,
        properties: str = "",
        *,
        flags: int = 0,
        born: int | None = None,  # noqa: ARG002
    ) -> None:
        if self.failures and (failure := self.failures.pop(0)) is not None:
            raise failure
        self._add(topic, queue, content, properties, flags)

    def close(self) -> None:
        """Close nothing."""


KEY = Key("shop", "orders")
NOW = datetime(2026, 1, 1, tzinfo=UTC)


class RocketMQPolicy:
    """A policy of group `fulfilment` of topic `orders`, with its operator.

    Args:
        admin: the client of its cluster, or a fake of it.
        spec: fields other than the defaults.
    """

    def __init__(self, admin: object, **spec: object) -> None:
        body = {
            "apiVersion": "redrive.io/v1beta1",
            "kind": "RocketMQRetryPolicy",
            "metadata": {
                "namespace": "shop", "name": "orders", "uid": "u", "generation": 1,
                "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z",
            },
            "spec": {
                "connectionRef": {"name": "main"}, "topic": "orders", "group": "fulfilment", **spec
            },
        }  # fmt: skip
        self.has_replays = False
        self.kubernetes = FakeKubernetes()
        self.kubernetes.add(resources.ROCKETMQ_POLICIES, body)
        rule = RocketMQRule(name="one", topics=("orders",), groups=("ful*",), deletion="Allowed")

        async def rocketmq(key: Key, _: str) -> Any:  # noqa: ANN401
            return RocketMQConnection(
                key, cast("Any", admin), (rule,), has_replays=self.has_replays
            )

        self.ctx: Any = SimpleNamespace(
            kubernetes=self.kubernetes,
            rocketmq_policies=Cache([body]),
            connections=Cache(),
            brokers=SimpleNamespace(rocketmq=rocketmq),
            clock=lambda: NOW,
            began=NOW,
        )

    @property
    def body(self) -> Any:  # noqa: ANN401
        """Return the policy as it is stored."""
        return self.kubernetes.objects[resources.ROCKETMQ_POLICIES].get(KEY)

    async def reconcile(self, *, failures: int = 0) -> Requeue:
        """Reconcile the policy once, after a number of failures."""
        orphans = OrphanedPolicies(self.ctx.rocketmq_policies, self.ctx.clock)
        reconciler = RocketMQReconciler(self.ctx, GroupClaims(self.ctx), orphans)
        return await reconciler.reconcile(KEY, failures=failures)
