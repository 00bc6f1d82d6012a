"""Many policies at once, created and watched through the API server as fast as possible."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio import client, config, watch

from redrive.api import Body
from redrive.api.conditions import is_settled
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.client import Kubernetes
from redrive.kube.resources import Key
from tests.benchmarks.provision import bare
from tests.integration.provision.conftest import Shop

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
        phases = bare.sources([self.source(name) for name in names])
        await bare.run(phases, self.shop.broker.admin_url, token)

    async def make(self, names: Iterable[str]) -> None:
        """Create policies."""
        await _all(self.kubernetes.create(resources.POLICIES, self._body(n)) for n in names)

    async def change(self, name: str, spec: Mapping[str, Any]) -> None:
        """Change the spec of a policy."""
        key = Key(self.shop.namespace, name)
        await self.kubernetes.patch(resources.POLICIES, key, {"spec": spec})

    async def remake(self, name: str) -> None:
        """Delete a policy, wait for its end, and create it again."""
        self.shop.kubectl("delete", "retrypolicy", name, "--timeout=60s")
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
