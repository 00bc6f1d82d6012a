"""Brokers in the process of the operator, and virtual time: hours of polling take a minute.

No call leaves the process, so the clock of the event loop skips all waits. Each call takes
`CALL_SECONDS` of virtual time.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import looptime

from redrive.admin.http import Call, Endpoint, Http
from redrive.kube.context import Context
from tests.benchmarks.provision.brokers import namespace
from tests.benchmarks.provision.in_process import cluster
from tests.support.fake_admin import FakeBroker, Namespace, Topic, in_process
from tests.support.operator_in_process import operator_in_process

CALL_SECONDS = 0.005
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
KINDS = (
    ("namespace", r"namespaces/\w+/[^/]+|persistent/\w+/[^/]+(/partitioned)?"),
    ("connection", r"clusters|brokers/.*|namespaces/\w+"),
    ("statistics", r".*/(partitioned-)?stats"),
    ("state of topics", r".*/(partitioned-)?internalStats"),
    ("subscriptions", r".*/subscriptions"),
    ("properties", r".*/(properties|partitions)"),
    ("schemas", r"schemas/.*"),
    ("topic policies", r".*"),
)
"""Kinds of reads, and patterns of their paths; the first one counts."""


class VirtualHttp(Http):
    """Calls brokers in memory.

    Attributes:
        brokers: brokers by URL.
        calls: number of calls by kind.
    """

    def __init__(self, brokers: Mapping[str, FakeBroker]) -> None:
        super().__init__(in_process(*brokers.values()))
        self.brokers = brokers
        self.calls = Counter[str]()

    async def send(self, call: Call, endpoint: Endpoint) -> Any:  # noqa: ANN401  JSON
        """Have a broker answer *call*."""
        path = call.path.partition("?")[0]
        read = next(kind for kind, pattern in KINDS if re.fullmatch(pattern, path))
        self.calls[read if call.method == "GET" else "writes"] += 1
        await asyncio.sleep(CALL_SECONDS)
        return await super().send(call, endpoint)


@asynccontextmanager
async def idle_operator(brokers: int, policies: int) -> AsyncIterator[tuple[Context, VirtualHttp]]:
    """Run the operator in virtual time with *policies*, spread over this number of brokers."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, asyncio.BaseEventLoop)
    looptime.patch_event_loop(loop, start=0.0, noop_cycles=1)
    served = {f"http://broker-{number}:8080": FakeBroker() for number in range(brokers)}
    for url, broker in served.items():
        broker.url = url
        broker.tenants = {"shop": []}
        for number in range(policies // brokers):
            topics = broker.namespaces.setdefault(namespace(number), Namespace()).topics
            topics[f"orders-{number}"] = Topic(0, {})
    http = VirtualHttp(served)
    kubernetes = cluster(list(served), range(policies))

    def clock() -> datetime:
        return BEGIN + timedelta(seconds=loop.time())

    async with operator_in_process(kubernetes, http, clock) as ctx:
        yield ctx, http
