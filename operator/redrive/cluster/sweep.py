"""Deletions that no watch told of, found by listing everything again now and then.

A watch that begins anew, after an API server was away for long, tells of all that is there and of
nothing that is not. What stayed in the tables would be obeyed, and waited for, for ever. Started by
the operator's command.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redrive.cluster.errors import KubernetesError
from redrive.cluster.resources import Key
from redrive.cluster.world import World

SWEEP_SECONDS = 300.0

logger = logging.getLogger(__name__)


@asynccontextmanager
async def sweeping(world: World) -> AsyncIterator[None]:
    """Sweep the tables of *world* every five minutes while the block runs."""
    task = asyncio.create_task(_sweep_for_ever(world), name="sweep")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def sweep(world: World) -> None:
    """Drop from the tables what is there no more.

    Raises:
        KubernetesError: a kind could not be listed; the tables from it on are left as they are.
    """
    for resource, table in world.tables.items():
        # Only what was known before the list was made: what came since isn't in it either.
        known = tuple(table)
        if not known:
            continue
        there = await world.kubernetes.list(resource, world.settings.namespaces)
        uids = {body["metadata"]["uid"] for body in there}
        for body in known:
            if body["metadata"]["uid"] not in uids:
                logger.info("%s %s went unseen by the watch", resource.kind, Key.of(body))
                table.drop(body)


async def _sweep_for_ever(world: World) -> None:
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        try:
            await sweep(world)
        except KubernetesError as error:
            logger.warning("sweep: %s", error)
        except Exception:
            logger.exception("sweep: failed, will be tried again")
