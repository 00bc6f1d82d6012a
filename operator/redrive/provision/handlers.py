"""Watch events of policies, connections and ConfigMaps → the caches.

Their listeners, in `queues`, enqueue what a change affects. The one door to kopf in this journey.
Called once, by the operator's command.
"""

from __future__ import annotations

from typing import Protocol

import kopf

from redrive.kube import resources
from redrive.kube.context import Context
from redrive.provision.queues import Queues
from redrive.provision.resync import Resync


class Stoppable(Protocol):
    """What runs in the background."""

    async def stop(self) -> None:
        """Stop it, and wait until it has stopped."""


def register(registry: kopf.OperatorRegistry, ctx: Context) -> tuple[Stoppable, ...]:
    """Register the handlers of this journey, and enqueue what needs a reconcile already.

    Returns:
        What the caller has to stop in the end.
    """
    queues = Queues(ctx)
    queues.listen()

    @kopf.on.event(*resources.POLICIES.address, registry=registry)
    async def policy(event: kopf.RawEvent, **_: object) -> None:
        ctx.policies.on_event(event)

    @kopf.on.event(*resources.CONNECTIONS.address, registry=registry)
    async def pulsar_connection(event: kopf.RawEvent, **_: object) -> None:
        ctx.connections.on_event(event)

    @kopf.on.event(*resources.CONFIG_MAPS.address, registry=registry)
    async def config_map(event: kopf.RawEvent, **_: object) -> None:
        ctx.config_maps.on_event(event)

    queues.enqueue_unsettled()
    resync = Resync(
        queues.facts, queues.stalls, queues.policies.enqueue, queues.connections.enqueue
    )
    return resync, queues.health, queues.policies, queues.connections, queues.deletion_events
