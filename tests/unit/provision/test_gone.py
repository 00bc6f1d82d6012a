from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from redrive.errors import Requeue
from redrive.kube.cache import Cache
from redrive.kube.client import Kubernetes
from redrive.kube.errors import NotFoundError
from redrive.kube.resources import Body, Key, Resource
from redrive.provision import connection, reconcile
from redrive.provision.conflicts import Conflicts
from redrive.provision.health.watch import Health

MakeBody = Callable[..., dict[str, Any]]


class Empty(Kubernetes):
    """An API server that has none of the objects any more."""

    def __init__(self) -> None:
        pass

    async def patch(self, resource: Resource, key: Key, patch: Body) -> Body:
        """Find nothing to patch."""
        del patch
        raise NotFoundError(f"no {resource.kind} {key}", remedy="none")

    async def patch_status(self, resource: Resource, key: Key, status: Body) -> Body:
        """Find nothing to patch."""
        return await self.patch(resource, key, status)


def ctx(policies: Cache, connections: Cache) -> Any:  # noqa: ANN401 - what of a Context is used
    return SimpleNamespace(
        kubernetes=Empty(),
        policies=policies,
        connections=connections,
        replays=Cache(),
        clock=lambda: datetime(2026, 1, 1, tzinfo=UTC),
    )


async def test_an_object_that_went_unseen_is_forgotten_and_never_looked_at_again(
    policy: MakeBody,
) -> None:
    body = policy()
    policies, connections = Cache([body]), Cache([body | {"kind": "PulsarConnection"}])
    emptied, key = ctx(policies, connections), Key.of(body)
    conflicts, health = Conflicts(policies, lambda _: None), Health(emptied, lambda _: None)
    assert await reconcile.reconcile(key, emptied, conflicts, health) is Requeue.NEVER
    await health.stop()
    assert await connection.reconcile(key, emptied) is Requeue.NEVER
    assert policies.get(key) is None
    assert connections.get(key) is None
