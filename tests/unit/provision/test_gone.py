from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from redrive.errors import Requeue
from redrive.kube.cache import Cache
from redrive.kube.resources import Key
from redrive.provision import connection, reconciler
from redrive.provision.claims import Conflicts
from redrive.provision.health import Health
from redrive.provision.orphans import LostPolicies
from tests.support.fake_kubernetes import FakeKubernetes

MakeBody = Callable[..., dict[str, Any]]


def ctx(policies: Cache, connections: Cache) -> Any:  # noqa: ANN401 - what of a Context is used
    return SimpleNamespace(
        kubernetes=FakeKubernetes(),  # none of the objects is there any more
        policies=policies,
        connections=connections,
        namespaces=None,
        replays=Cache(),
        clock=lambda: datetime(2026, 1, 1, tzinfo=UTC),
    )


async def test_an_object_that_went_unseen_is_forgotten_and_never_looked_at_again(
    policy: MakeBody,
) -> None:
    body = policy()
    policies, connections = Cache([body]), Cache([body | {"kind": "BrokerConnection"}])
    emptied, key = ctx(policies, connections), Key.of(body)
    conflicts, health = (
        Conflicts(policies, connections, lambda _: None),
        Health(emptied, lambda _: None),
    )
    lost = LostPolicies(policies, emptied.clock)
    assert await reconciler.reconcile(key, emptied, conflicts, health, lost) is Requeue.ON_CHANGE
    await health.stop()
    assert await connection.reconcile(key, emptied) is Requeue.ON_CHANGE
    assert policies.get(key) is None
    assert connections.get(key) is None
