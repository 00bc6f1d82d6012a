"""A table of the objects with a label, kept up to date by a watch that selects them at the server.

kopf's watches bring every object of a kind; of ConfigMaps a cluster may hold thousands that are
none of ours. Started by `Context.open`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from redrive.kube.cache import Cache
from redrive.kube.client import Kubernetes
from redrive.kube.errors import ForbiddenError, KubernetesError
from redrive.kube.liveness import Liveness
from redrive.kube.reading import allowed
from redrive.kube.resources import Label, Resource

RETRY_SECONDS = 1.0
FORBIDDEN_SECONDS = 20.0
"""How long a namespace that may not be read is left alone: mostly it has been deleted."""

logger = logging.getLogger(__name__)


@asynccontextmanager
async def following(
    kubernetes: Kubernetes,
    resource: Resource,
    namespaces: Sequence[str],
    label: Label,
    health: Liveness,
) -> AsyncIterator[Cache]:
    """Give a table that is complete from the start, and follows while the block runs.

    Of several namespaces one may be forbidden, as a deleted one is: it is tried now and then.

    Args:
        namespaces: whose objects; of all if none is named.
        health: gets the signs of life.

    Raises:
        KubernetesError: none of them may be listed.
    """
    table = Cache()
    follows = [
        _Follow(kubernetes, (resource, name, label), table, health)
        for name in namespaces or (None,)
    ]
    since = await allowed([follow.list for follow in follows])
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
        what: tuple[Resource, str | None, Label],
        table: Cache,
        health: Liveness,
    ) -> None:
        self._kubernetes = kubernetes
        self._what = what
        self._table = table
        self._health = health
        self._part = f"watch of {what[0].path(what[1])}"

    async def go_on(self, since: str | None) -> None:
        """Follow for ever, at first from *since* on; None begins with a list.

        A watch goes on where the last one came to its end, and so misses nothing. After a failure,
        or where the API server does not know that point any more, a list shows what was missed.
        """
        while True:
            self._beat()
            pause = RETRY_SECONDS
            begin, since = since, None
            try:
                since = await self._watch(await self.list() if begin is None else begin)
            except ForbiddenError as error:
                logger.warning("watch of %s: %s", self._what[0].kind, error)
                pause = FORBIDDEN_SECONDS
            except KubernetesError as error:
                logger.warning("watch of %s: %s", self._what[0].kind, error)
            except Exception:
                logger.exception("watch of %s: failed, will begin anew", self._what[0].kind)
            await asyncio.sleep(pause)

    def _beat(self) -> None:
        self._health.beat(self._part)

    async def list(self) -> str:
        """Read what there is; return from where to go on."""
        namespace = self._what[1]
        known = [b for b in self._table if namespace in {None, b["metadata"]["namespace"]}]
        there, version = await self._kubernetes.list_labelled(*self._what)
        uids = {body["metadata"]["uid"] for body in there}
        for body in known:
            if body["metadata"]["uid"] not in uids:
                self._table.drop(body)
        for body in there:
            self._table.put(body)
        return version

    async def _watch(self, since: str) -> str | None:
        """Follow until the watch ends; return from where to go on, None for a list."""
        self._beat()  # the list before may have taken long
        async for event in self._kubernetes.watch(*self._what, since):
            self._beat()
            if event["type"] == "ERROR":  # mostly: *since* is too long ago
                logger.info("watch of %s begins anew: %s", self._what[0].kind, event["object"])
                return None
            if event["type"] != "BOOKMARK":
                await self._table.seen(event)
            since = event["object"]["metadata"]["resourceVersion"]
        return since
