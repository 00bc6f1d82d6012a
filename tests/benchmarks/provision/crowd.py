"""Many policies at once, made through the API server as fast as possible, or by a bare script.

The script makes the calls to the broker in the best order.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from kubernetes.aio import client, config, watch

from redrive.api import Body
from redrive.api.conditions import is_settled
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.client import Kubernetes
from redrive.kube.resources import Key
from tests.integration.provision.conftest import Shop

CONNECTIONS = 20
"""The number of connections that the operator opens to a broker."""

_STAYS = {
    "inactiveTopicDeleteMode": "delete_when_no_subscriptions",
    "maxInactiveDurationSeconds": 60,
    "deleteWhileInactive": False,
}
_EARLIEST = {"ledgerId": -1, "entryId": -1, "partitionIndex": -1}


class Request(NamedTuple):
    """A call below `/admin/v2/`."""

    method: str
    path: str
    body: Any = None


def creates(topics: Iterable[str]) -> list[Request]:
    """Return the calls that create topics without partitions, named `tenant/namespace/name`."""
    return [Request("PUT", f"persistent/{topic}", {}) for topic in topics]


def subscribes(topics: Iterable[str], subscription: str) -> list[Request]:
    """Return the calls that create a subscription on each of *topics*, from its first message."""
    return [
        Request("PUT", f"persistent/{topic}/subscription/{subscription}", _EARLIEST)
        for topic in topics
    ]


def source_calls(topics: Sequence[str]) -> list[list[Request]]:
    """Return the calls that create source topics, with a subscription that keeps them."""
    return [creates(topics), subscribes(topics, "fulfilment")]


def provision_calls(topics: Sequence[str], role: str) -> list[list[Request]]:
    """Return the phases of calls that create retry and dead-letter topics of source *topics*."""
    retries = [f"{topic}-fulfilment-RETRY" for topic in topics]
    dead_letters = [f"{topic}-fulfilment-DLQ" for topic in topics]
    both = [*retries, *dead_letters]
    grants = [(topic, ["consume", "produce"]) for topic in retries]
    grants += [(topic, ["produce"]) for topic in dead_letters]
    return [
        creates(both),
        [
            *(Request("POST", f"persistent/{t}/deduplicationEnabled", body=True) for t in both),
            *(Request("POST", f"persistent/{t}/messageTTL?messageTTL=0") for t in both),
            *(Request("POST", f"persistent/{t}/inactiveTopicPolicies", _STAYS) for t in both),
        ],
        [
            Request(
                "POST",
                "namespaces/grantPermissionsOnTopics",
                [
                    {"topic": f"persistent://{topic}", "role": role, "actions": actions}
                    for topic, actions in grants
                ],
            )
        ],
        [*subscribes(retries, "fulfilment"), *subscribes(dead_letters, "redrive")],
    ]


async def run_script(phases: Iterable[Sequence[Request]], admin_url: str, token: str) -> float:
    """Make all calls, those of a phase concurrently; return the seconds."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=CONNECTIONS)
    began = time.monotonic()
    async with aiohttp.ClientSession(headers=headers, connector=connector) as session:

        async def send(request: Request) -> None:
            url = f"{admin_url}/admin/v2/{request.path}"
            body = None if request.body is None else json.dumps(request.body)
            async with session.request(request.method, url, data=body) as answer:
                assert answer.ok, f"{request}: {answer.status} {await answer.text()}"

        for phase in phases:
            await asyncio.gather(*map(send, phase))
    return time.monotonic() - began


async def connect(shop: Shop, policies: int, admin_url: str | None = None) -> None:
    """Make a connection that allows so many policies, more than by default; wait for it.

    The event loop runs meanwhile, because it may serve the proxy at *admin_url*.
    """
    rule = {**shop.rule("fulfilment"), "limits": {"policies": policies}}
    shop.connection(allow=[rule], adminURL=admin_url or shop.broker.admin_url)
    await asyncio.to_thread(shop.ready, "main", "brokerconnection")


AT_ONCE = 20
PATIENCE_SECONDS = 900


@dataclass(frozen=True)
class Crowd:
    """The policies of a benchmark in one Kubernetes and one Pulsar namespace.

    Attributes:
        seen: the policies in the events of a watch.
    """

    shop: Shop
    kubernetes: Kubernetes
    seen: Cache

    def source(self, name: str) -> str:
        """Return the source topic of a policy, without its domain."""
        return f"{self.shop.tenant}/prod/{name}"

    async def make_sources(self, names: Iterable[str]) -> None:
        """Create the source topics of policies."""
        token = self.shop.broker.token("superuser")
        phases = source_calls([self.source(name) for name in names])
        await run_script(phases, self.shop.broker.admin_url, token)

    async def make(self, names: Iterable[str]) -> None:
        """Create policies."""
        await _all(self.kubernetes.create(resources.POLICIES, self._body(n)) for n in names)

    async def change(self, name: str, spec: Mapping[str, Any]) -> None:
        """Change the spec of a policy."""
        key = Key(self.shop.namespace, name)
        await self.kubernetes.patch(resources.POLICIES, key, {"spec": spec})

    async def remake(self, name: str) -> None:
        """Delete a policy, wait for its end, and create it again."""
        delete = ("delete", "retrypolicy", name, "--timeout=60s")
        await asyncio.to_thread(self.shop.kubectl, *delete)
        await self.make([name])

    async def settled(self, count: int) -> float:
        """Wait until this number of policies exists, all settled; return the time."""
        changed = asyncio.Event()
        self.seen.listen(lambda *_: changed.set())
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not self._is_settled(count):
                changed.clear()
                await changed.wait()
                await asyncio.sleep(0.1)  # reading all of them at each change takes long
        return time.monotonic()

    def _is_settled(self, count: int) -> bool:
        policies = list(self.seen)
        return len(policies) == count and all(map(is_settled, policies))

    def _body(self, name: str) -> Body:
        return {
            "apiVersion": resources.POLICIES.api_version,
            "kind": resources.POLICIES.kind,
            "metadata": {"name": name, "namespace": self.shop.namespace},
            "spec": {
                "connectionRef": {"name": "main"},
                "topic": f"persistent://{self.source(name)}",
                "subscription": "fulfilment",
                "consumerRoles": ["fulfilment"],
            },
        }


@asynccontextmanager
async def crowd(shop: Shop, kubeconfig: Path) -> AsyncIterator[Crowd]:
    """Return an empty crowd in *shop*."""
    seen = Cache()
    watching = asyncio.create_task(_watch(shop.namespace, kubeconfig, seen))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KUBECONFIG", str(kubeconfig))
            async with Kubernetes.connect() as kubernetes:
                yield Crowd(shop, kubernetes, seen)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _watch(namespace: str, kubeconfig: Path, seen: Cache) -> None:
    """Store the policies of a namespace from a watch in *seen*."""
    configuration = client.Configuration()
    await config.load_kube_config(  # type: ignore[no-untyped-call]
        str(kubeconfig), client_configuration=configuration
    )
    async with client.ApiClient(configuration) as api:
        of_namespace = client.CustomObjectsApi(api).list_namespaced_custom_object
        address = (resources.POLICIES.group, resources.POLICIES.version, namespace)
        watch_: Any = watch
        async with watch_.Watch().stream(
            of_namespace, *address, resources.POLICIES.plural
        ) as events:
            async for event in events:
                seen.on_event({"type": event["type"], "object": event["raw_object"]})


async def _all(calls: Iterable[Any]) -> None:
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(call: Any) -> None:  # noqa: ANN401 - any result
        async with slots:
            await call

    await asyncio.gather(*map(one, calls))
