"""A harness around `reconcile`: one RetryPolicy, a fake Kubernetes and a fake broker."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

from redrive.api import Body
from redrive.api.connection import BrokerConnectionSpec
from redrive.api.retrypolicy import ConnectionRef
from redrive.errors import Requeue
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.connections import Connection
from redrive.kube.resources import Key
from redrive.provision.claims import Conflicts
from redrive.provision.reconciler import OrphanedPolicies, PolicyReconciler
from tests.support.fake_admin import FakeBroker, Namespace, Topic
from tests.support.fake_kubernetes import FakeKubernetes

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
