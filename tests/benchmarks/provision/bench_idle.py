"""Many policies over many brokers that are Ready: what the operator takes while nothing happens.

Against stand-ins: brokers in another process, over HTTP, and an API server in memory. So only what
the operator itself takes is measured.
"""

from __future__ import annotations

import asyncio
import base64
import json
import resource
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import kopf
import pytest
from prometheus_client import REGISTRY

from redrive.admin.http import Http
from redrive.kube import resources, status
from redrive.kube.cache import Cache
from redrive.kube.connections import Connections
from redrive.kube.context import Context, Settings, wall_clock
from redrive.kube.credentials import CredentialReader
from redrive.kube.namespaces import NamespaceLabels
from redrive.kube.resources import Body
from redrive.provision import handlers
from redrive.provision.resync import SURVEY_SECONDS
from tests.benchmarks.figures import Figure
from tests.support.fake_admin import SUPERUSER, FakeBroker
from tests.support.fake_kubernetes import FakeKubernetes

BROKERS = 100
SHARE_OF_A_CORE = 25.0
MEGABYTES = 512
SETTLES_SECONDS = 3_000


@pytest.mark.parametrize("policies", [1_000, 10_000])
async def test_what_does_not_change_takes_a_quarter_of_a_core_at_most(
    policies: int, figures: list[Figure]
) -> None:
    name = f"{policies:,} policies over {BROKERS} brokers, nothing happens"
    async with brokers(BROKERS, policies // BROKERS) as urls, operator(urls, policies) as ctx:
        began = time.monotonic()
        async with asyncio.timeout(SETTLES_SECONDS):
            while not all(map(status.is_settled, ctx.policies)):  # noqa: ASYNC110  looks at all
                await asyncio.sleep(1)
        figures.append(Figure(name, "until all Ready", time.monotonic() - began, "s"))
        await asyncio.sleep(SURVEY_SECONDS)  # what was provisioned is looked at first
        calls, used, began = made(), time.process_time(), time.monotonic()
        await asyncio.sleep(2 * SURVEY_SECONDS)
        seconds = time.monotonic() - began
        share = 100 * (time.process_time() - used) / seconds
        figures += [
            Figure(name, "the operator", share, "% of a core", at_most=SHARE_OF_A_CORE),
            Figure(name, "calls of an hour", 3_600 * (made() - calls) / seconds, "calls"),
            Figure(name, "memory at the most", peak(), "MB", at_most=MEGABYTES),
        ]


def made() -> float:
    """How many calls to brokers were made."""
    return sum(
        sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == "redrive_admin_calls_total"
    )


def peak() -> float:
    """How many MB this process held at the most, the API server in memory included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1_000


@asynccontextmanager
async def brokers(count: int, policies: int) -> AsyncIterator[list[str]]:
    """Run so many brokers; give where they answer."""
    script = ("-m", "tests.benchmarks.provision.brokers", str(count), str(policies))
    process = await asyncio.create_subprocess_exec(
        sys.executable, *script, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        yield json.loads(await process.stdout.readline())
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def operator(urls: list[str], policies: int) -> AsyncIterator[Context]:
    """Run what the operator does for policies, which are spread over the brokers."""
    kubernetes = FakeKubernetes()
    token = base64.b64encode(FakeBroker.token(SUPERUSER).encode()).decode()
    secret = made_object("v1", "Secret", "admin") | {"data": {"token": token}}
    kubernetes.add(resources.SECRETS, secret)
    connections = [connection(number, url) for number, url in enumerate(urls)]
    bodies = [policy(number, len(urls)) for number in range(policies)]
    kubernetes.add(resources.CONNECTIONS, *connections)
    kubernetes.add(resources.POLICIES, *bodies)
    async with Http.open() as http:
        known = Cache(connections)
        labels = NamespaceLabels(kubernetes)
        reader = CredentialReader(kubernetes, http, None)
        ctx = Context(
            settings=Settings("here", (), "", "", ""),
            kubernetes=kubernetes,
            connections=known,
            policies=Cache(bodies),
            replays=Cache(),
            applications=Cache(),
            config_maps=Cache(),
            brokers=Connections(known, http, reader, wall_clock, labels),
            namespaces=labels,
            clock=wall_clock,
            began=wall_clock(),
            missing=(),
        )
        watch = asyncio.create_task(show(kubernetes, ctx))
        stoppables = handlers.register(kopf.OperatorRegistry(), ctx)
        try:
            yield ctx
        finally:
            watch.cancel()
            for each in stoppables:
                await each.stop()


async def show(kubernetes: FakeKubernetes, ctx: Context) -> None:
    """Put what is written into the caches, as watches do."""
    while True:
        write = await kubernetes.written()
        ctx.caches[write.resource].put(write.body)
        kubernetes.writes.clear()


def made_object(version: str, kind: str, name: str) -> dict[str, Any]:
    """An object as the API server would have it after its creation."""
    metadata = {"namespace": "shop", "name": name, "uid": f"{kind}-{name}", "generation": 1}
    created = {"resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {"apiVersion": version, "kind": kind, "metadata": metadata | created}


def connection(number: int, url: str) -> Body:
    """A connection to one broker."""
    spec = {
        "serviceUrl": "pulsar://pulsar:6650",
        "adminUrl": url,
        "authentication": {"token": {"secretRef": {"name": "admin", "key": "token"}}},
        "allow": [{"topics": ["persistent://shop/*/*"], "roles": ["*"]}],
    }
    made = made_object(resources.CONNECTIONS.api_version, "PulsarConnection", f"to-{number}")
    return made | {"spec": spec}


def policy(number: int, brokers: int) -> Body:
    """One policy of many, whose topic has the same name at each broker."""
    spec = {
        "connectionRef": {"name": f"to-{number % brokers}"},
        "topic": f"persistent://shop/prod/orders-{number // brokers}",
        "subscription": "fulfilment",
        "consumerRoles": ["fulfilment"],
    }
    made = made_object(resources.POLICIES.api_version, "RetryPolicy", f"orders-{number}")
    return made | {"spec": spec}
