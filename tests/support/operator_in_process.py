"""The operator in this process with a fake API server: all controllers, or one reconcile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

from redrive.admin.http import Http
from redrive.api import Body
from redrive.api.connection import BrokerConnectionSpec
from redrive.api.retrypolicy import ConnectionRef
from redrive.errors import Requeue
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.connections import Connection, Connections, NamespaceLabels
from redrive.kube.context import Context, Settings, wall_clock
from redrive.kube.credentials import CredentialReader
from redrive.kube.job_templates import JobTemplates
from redrive.kube.resources import Key, keep_of, retained_config_map
from redrive.provision import handlers
from redrive.provision.claims import Conflicts
from redrive.provision.reconciler import OrphanedPolicies, PolicyReconciler
from tests.support.fake_admin import FakeBroker, Namespace, Topic
from tests.support.fake_kubernetes import FakeKubernetes


@asynccontextmanager
async def operator_in_process(
    kubernetes: FakeKubernetes, http: Http, clock: Callable[[], datetime] = wall_clock
) -> AsyncIterator[Context]:
    """Run the operator's controllers for policies, starting with the existing objects.

    A write is forgotten once it is in the caches: tens of thousands would fill the memory.
    """
    connections, labels = (
        Cache(await kubernetes.list(resources.CONNECTIONS)),
        NamespaceLabels(kubernetes),
    )
    reader = CredentialReader(kubernetes, http, None)
    ctx = Context(
        settings=Settings("here", (), None, "", ""),
        kubernetes=kubernetes,
        connections=connections,
        policies=Cache(await kubernetes.list(resources.POLICIES)),
        replays=Cache(),
        inspections=Cache(),
        applications={resources.JOBS: Cache(keep=keep_of(resources.JOBS))},
        config_maps=Cache(await kubernetes.list(resources.CONFIG_MAPS), retained_config_map),
        brokers=Connections(connections, http, reader, clock, labels),
        namespaces=labels,
        job_templates=JobTemplates(None),
        clock=clock,
        began=clock(),
        missing=(),
    )
    watch = asyncio.create_task(_show(kubernetes, ctx))
    stoppables = handlers.start(ctx)
    try:
        yield ctx
    finally:
        watch.cancel()
        for stoppable in stoppables:
            await stoppable.stop()


async def _show(kubernetes: FakeKubernetes, ctx: Context) -> None:
    """Put written objects into the caches, like watches; Secrets have none."""
    while True:
        write = await kubernetes.written()
        cache = ctx.caches.get(write.resource)
        if cache is not None:
            cache.put(write.body)
        kubernetes.writes.clear()


NOW = datetime(2026, 1, 1, tzinfo=UTC)
KEY = Key("shop", "orders")
SOURCE = "orders"


@dataclass
class ReconcileHarness:
    """The arguments of `reconcile` for one policy, and the fakes that it reads and writes."""

    ctx: Any
    broker: FakeBroker
    kubernetes: FakeKubernetes
    now: datetime = NOW

    def __post_init__(self) -> None:
        self.ctx.clock = lambda: self.now
        self.conflicts = Conflicts(self.ctx.policies, self.ctx.connections, lambda _: None)
        self.lost = OrphanedPolicies(self.ctx.policies, self.ctx.clock)

    async def reconcile(self) -> Requeue:
        health = cast("Any", SimpleNamespace(warnings=lambda _: ()))
        reconciler = PolicyReconciler(self.ctx, self.conflicts, health, self.lost)
        return await reconciler.reconcile(KEY)

    def watch_shows_deletion(self) -> None:
        """Deliver the deletion of the policy to the cache."""
        if body := self.ctx.policies.get(KEY):
            self.ctx.policies.drop(body)

    @property
    def topics(self) -> set[str]:
        return set(self.broker.namespaces["shop/prod"].topics)


def reconcile_harness(connection: Body, body: Body, kubernetes: FakeKubernetes) -> ReconcileHarness:
    through = {"metadata": {"namespace": "shop", "name": "main", "uid": "u"}, "spec": connection}
    broker = FakeBroker()
    broker.tenants = {"shop": []}
    broker.namespaces = {"shop/prod": Namespace({SOURCE: Topic(2, {})})}
    admin = broker.admin()

    async def resolve(ref: ConnectionRef, namespace: str) -> Connection:
        spec = BrokerConnectionSpec.model_validate(connection)
        return Connection(Key(namespace, ref.name), spec, admin)

    kubernetes.add(resources.POLICIES, body)
    ctx = SimpleNamespace(
        kubernetes=kubernetes,
        policies=Cache([body]),
        connections=Cache([through]),
        namespaces=None,
        began=NOW,
        config_maps=Cache(),
        brokers=SimpleNamespace(resolve=resolve),
        settings=SimpleNamespace(cluster_id="this-cluster", namespaces=()),
    )
    return ReconcileHarness(ctx, broker, kubernetes)
