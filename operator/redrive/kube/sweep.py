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

from redrive.kube.cache import Cache
from redrive.kube.client import Kubernetes
from redrive.kube.context import Context
from redrive.kube.errors import ForbiddenError, KubernetesError
from redrive.kube.resources import Key, Resource

SWEEP_SECONDS = 300.0

logger = logging.getLogger(__name__)


@asynccontextmanager
async def sweeping(ctx: Context) -> AsyncIterator[None]:
    """Sweep the tables of *world* every five minutes while the block runs."""
    task = asyncio.create_task(_sweep_for_ever(ctx), name="sweep")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def sweep(ctx: Context) -> None:
    """Drop from the tables what is there no more.

    Raises:
        KubernetesError: a kind could not be listed; the tables from it on are left as they are.
    """
    for resource, table in ctx.tables.items():
        for namespace in ctx.settings.namespaces or (None,):
            try:
                await _sweep(ctx.kubernetes, resource, table, namespace)
            except ForbiddenError as error:
                # One namespace, of a list of them, may have been deleted, and the Role in it too.
                if namespace is None:
                    raise
                logger.warning("sweep: %s", error)


async def _sweep(
    kubernetes: Kubernetes, resource: Resource, table: Cache, namespace: str | None
) -> None:
    """Drop from *table* what is there no more, of one namespace or of all."""
    # Only what was known before the list was made: what came since isn't in it either.
    known = [body for body in table if namespace in {None, body["metadata"]["namespace"]}]
    if known:
        there = await kubernetes.list(resource, () if namespace is None else (namespace,))
        uids = {body["metadata"]["uid"] for body in there}
        for body in known:
            if body["metadata"]["uid"] not in uids:
                logger.info("%s %s went unseen by the watch", resource.kind, Key.of(body))
                table.drop(body)


async def _sweep_for_ever(ctx: Context) -> None:
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        try:
            await sweep(ctx)
        except KubernetesError as error:
            logger.warning("sweep: %s", error)
        except Exception:
            logger.exception("sweep: failed, will be tried again")
