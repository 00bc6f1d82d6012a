"""A RocketMQRetryPolicy with an API server in memory, for tests with any RocketMQ."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

from redrive.api.rocketmq import RocketMQRule
from redrive.errors import Requeue
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.resources import Key
from redrive.kube.rocketmq import RocketMQConnection
from redrive.provision.groups import GroupClaims
from redrive.provision.reconciler import OrphanedPolicies
from redrive.provision.rocketmq import RocketMQReconciler
from tests.support.fake_kubernetes import FakeKubernetes

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
