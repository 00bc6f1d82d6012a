"""A table of the objects with a label, kept up to date by a watch that selects them at the server.

kopf's watches bring every object of a kind; of ConfigMaps a cluster may hold thousands that are
none of ours. Started by `World.open`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from redrive.cluster.client import Kubernetes
from redrive.cluster.errors import KubernetesError, UnavailableError
from redrive.cluster.resources import Label, Resource
from redrive.cluster.table import Table

RETRY_SECONDS = 1.0

logger = logging.getLogger(__name__)


@asynccontextmanager
async def following(
    kubernetes: Kubernetes, resource: Resource, namespaces: Sequence[str], label: Label
) -> AsyncIterator[Table]:
    """Give a table that is complete from the start, and follows while the block runs.

    Args:
        namespaces: whose objects; of all if none is named.

    Raises:
        KubernetesError: they may not be listed.
    """
    table = Table()
    follows = [_Follow(kubernetes, resource, name, label, table) for name in namespaces or (None,)]
    since = [await follow.begin() for follow in follows]
    tasks = [
        asyncio.create_task(follow.go_on(version), name=f"watch {resource.kind}")
        for follow, version in zip(follows, since, strict=True)
    ]
    try:
        yield table
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Follow:
    """Follows the objects of one namespace, or of all."""

    def __init__(
        self,
        kubernetes: Kubernetes,
        resource: Resource,
        namespace: str | None,
        label: Label,
        table: Table,
    ) -> None:
        self._kubernetes = kubernetes
        self._what = resource, namespace, label
        self._namespace = namespace
        self._table = table

    async def begin(self) -> str:
        """Read what there is, waiting for an API server that is just starting too."""
        while True:
            try:
                return await self._list()
            except UnavailableError as error:
                logger.warning("%s", error)
                await asyncio.sleep(RETRY_SECONDS)

    async def go_on(self, since: str) -> None:
        """Follow for ever.

        A watch is never resumed: the list that the next one begins with shows what it missed.
        """
        while True:
            try:
                await self._watch(since)
                since = await self._list()
            except KubernetesError as error:
                logger.warning("watch of %s: %s", self._what[0].kind, error)
                await asyncio.sleep(RETRY_SECONDS)
            except Exception:
                logger.exception("watch of %s: failed, will begin anew", self._what[0].kind)
                await asyncio.sleep(RETRY_SECONDS)

    async def _list(self) -> str:
        known = [b for b in self._table if self._namespace in {None, b["metadata"]["namespace"]}]
        there, version = await self._kubernetes.list_labelled(*self._what)
        uids = {body["metadata"]["uid"] for body in there}
        for body in known:
            if body["metadata"]["uid"] not in uids:
                self._table.drop(body)
        for body in there:
            self._table.put(body)
        return version

    async def _watch(self, since: str) -> None:
        async for event in self._kubernetes.watch(*self._what, since):
            if event["type"] == "ERROR":  # mostly: *since* is too long ago
                logger.info("watch of %s begins anew: %s", self._what[0].kind, event["object"])
                return
            if event["type"] != "BOOKMARK":
                await self._table.seen(event)
