"""The operator with stand-ins: an API server in memory, brokers in another or the same process.

This measures only the operator, and ten thousand policies fit on a small machine. With brokers in
this process time is virtual, so that hours of polling take a minute: no call leaves the process,
the clock of the event loop skips all waits, and each call takes `CALL_SECONDS` of virtual time.
Run as a program, it serves stand-ins for many brokers, and prints their addresses.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import multiprocessing
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import looptime
from prometheus_client import REGISTRY

from redrive.admin.http import Call, Endpoint, Http
from redrive.api import Body
from redrive.api.conditions import is_settled
from redrive.cli.operator import COLLECTOR_THRESHOLDS
from redrive.kube import resources
from redrive.kube.context import Context
from tests.benchmarks.figures import Figure
from tests.support.fake_admin import SUPERUSER, FakeBroker, Namespace, Topic, in_process
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.operator_in_process import operator_in_process

POLICIES_OF_A_NAMESPACE = 1_000
"""The grants of 2,900 policies fill the record in which a broker stores those of a namespace."""


def namespace(policy: int) -> str:
    """Return the Pulsar namespace of the policy of this number at a broker."""
    return f"shop/prod-{policy // POLICIES_OF_A_NAMESPACE}"


async def serve(brokers: int, policies: int) -> None:
    """Serve this number of brokers, each with the source topics of its policies, until killed."""
    async with AsyncExitStack() as stack:
        urls = []
        for _ in range(brokers):
            broker = await stack.enter_async_context(FakeBroker.serving())
            broker.tenants = {"shop": []}
            for number in range(policies):
                topics = broker.namespaces.setdefault(namespace(number), Namespace()).topics
                topics[f"orders-{number}"] = Topic(0, {})
            urls.append(broker.url)
        print(json.dumps(urls), flush=True)  # noqa: T201  read by the parent process
        await asyncio.Event().wait()


PATIENCE_SECONDS = 3_000


def alone(measure: Callable[[], Coroutine[Any, Any, list[Figure]]]) -> list[Figure]:
    """Run the function *measure* of a module in a new process, set up like that of an operator."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_run, measure).result()


def _run(measure: Callable[[], Coroutine[Any, Any, list[Figure]]]) -> list[Figure]:
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
    return asyncio.run(measure())


def calls(*, only_writes: bool = False) -> float:
    """Return the number of calls to brokers by this process."""
    return sum(
        sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == "redrive_admin_calls_total"
        and not (only_writes and sample.labels.get("verb") == "GET")
    )


def peak() -> float:
    """Return the peak memory of this process in MB, including the API server in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1_000


async def settled(ctx: Context) -> float:
    """Wait until all policies are settled; return the seconds."""
    began = time.monotonic()
    unsettled = ctx.policies.index(_is_unsettled)  # counts without reading all policies
    async with asyncio.timeout(PATIENCE_SECONDS):
        while unsettled.count(True):  # noqa: ASYNC110  changes come from many places
            await asyncio.sleep(0.1)
    return time.monotonic() - began


def _is_unsettled(body: Body) -> bool:
    return not is_settled(body)


@asynccontextmanager
async def brokers(count: int, policies: int) -> AsyncIterator[list[str]]:
    """Run this number of brokers, each with its source topics; yield their addresses."""
    script = ("-m", "tests.benchmarks.provision.in_process", str(count), str(policies))
    process = await asyncio.create_subprocess_exec(
        sys.executable, *script, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        yield json.loads(await process.stdout.readline())
    finally:
        process.kill()
        await process.wait()


def cluster(urls: list[str], policies: Iterable[int]) -> FakeKubernetes:
    """Return an API server with a connection to each of *urls*, and policies for all of them."""
    kubernetes = FakeKubernetes()
    token = base64.b64encode(FakeBroker.token(SUPERUSER).encode()).decode()
    secret = _object("v1", "Secret", "admin") | {"data": {"token": token}}
    kubernetes.add(resources.SECRETS, secret)
    kubernetes.add(resources.CONNECTIONS, *(_connection(n, url) for n, url in enumerate(urls)))
    kubernetes.add(resources.POLICIES, *(policy(n, urls) for n in policies))
    return kubernetes


@asynccontextmanager
async def operator(kubernetes: FakeKubernetes) -> AsyncIterator[Context]:
    """Run the operator's controllers of policies until cancelled."""
    async with Http.open() as http, operator_in_process(kubernetes, http) as ctx:
        yield ctx


def _object(version: str, kind: str, name: str) -> dict[str, Any]:
    """Return an object as stored by the API server after its creation."""
    metadata = {"namespace": "shop", "name": name, "uid": f"{kind}-{name}", "generation": 1}
    created = {"resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {"apiVersion": version, "kind": kind, "metadata": metadata | created}


def _connection(number: int, url: str) -> Body:
    spec = {
        "pulsar": {
            "serviceURL": "pulsar://pulsar:6650",
            "adminURL": url,
            "authentication": {
                "type": "Token",
                "token": {"secretRef": {"name": "admin", "key": "token"}},
            },
        },
        "allow": [
            {
                "name": "one",
                "topics": ["persistent://shop/*/*"],
                "roles": ["*"],
                "limits": {"policies": 10_000},
            }
        ],
    }
    made = _object(resources.CONNECTIONS.api_version, "BrokerConnection", f"to-{number}")
    return made | {"spec": spec}


def policy(number: int, urls: list[str]) -> Body:
    """Return one policy of many; each broker has topics of the same names."""
    apart = len(set(urls))
    spec = {
        "connectionRef": {"name": f"to-{number % len(urls)}"},
        "topic": f"persistent://{namespace(number // apart)}/orders-{number // apart}",
        "subscription": "fulfilment",
        "consumerRoles": ["fulfilment"],
    }
    made = _object(resources.POLICIES.api_version, "RetryPolicy", f"orders-{number}")
    return made | {"spec": spec}


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


if __name__ == "__main__":
    asyncio.run(serve(*map(int, sys.argv[1:])))
