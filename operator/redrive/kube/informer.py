"""Informer: list and watch of the kinds that redrive reads, and relists for what a watch missed.

1. List: `load` fills a cache, completely, before anything is decided.
2. Watch: kopf keeps one for each kind and namespace, over the connections of `session`.
3. Relist: `relisting` finds deletions that happened while no watch was open.
4. Begin again: caches that a relist finds outdated as a whole are loaded again, by the command.

A watch that shows nothing may be a quiet one or a dead one. So the API server is asked to end each
after `WATCH_SECONDS`, and the next one resumes where it ended; each beginning is a heartbeat.
While the API server is away it is tried again every few seconds, without end: that is no stall.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from itertools import chain, repeat
from types import SimpleNamespace
from typing import TypeVar

import aiohttp

from redrive.api import Body
from redrive.kube.cache import Cache, version
from redrive.kube.client import (
    ForbiddenError,
    Kubernetes,
    KubernetesError,
    NotFoundError,
    UnavailableError,
)
from redrive.kube.observability import Liveness
from redrive.kube.resources import Key, Resource, keep_of

RETRY_SECONDS = 1.0
RELIST_SECONDS = 300.0
KINDS_SECONDS = 15.0
"""How often a kind that was not installed is looked for."""
WATCH_SECONDS = 30
"""How long a watch lasts before the next one resumes; whole seconds."""
WATCH_PAGE = 10
"""So many objects come with one answer where a watch begins with a list: each may have mebibytes.
kopf knows no limit in bytes. This list delays nothing: the caches are loaded before."""
WATCH_IDLE_SECONDS = 0.1
"""So long kopf holds the last event of each object in memory, as a whole, for those that follow."""
INACTIVITY_SECONDS = 45.0
"""A watch that brings nothing for longer, not even its end, is closed, and the next one begins."""
T = TypeVar("T")

logger = logging.getLogger(__name__)


async def load(kubernetes: Kubernetes, resource: Resource, namespaces: Sequence[str] = ()) -> Cache:
    """List the objects of a kind, of these namespaces or of all.

    A forbidden namespace is left out: deleting a namespace deletes the Role in it too, and the
    other ones have to be served all the same.

    Raises:
        ForbiddenError: all of them are forbidden.
        KubernetesError: a list failed otherwise.
    """
    bodies: list[Body] = []
    forbidden: list[ForbiddenError] = []
    for namespace in _each(namespaces):
        try:
            bodies += await when_available(partial(kubernetes.list, resource, namespace))
        except ForbiddenError as refusal:
            forbidden.append(refusal)
    if len(forbidden) == len(_each(namespaces)):
        raise forbidden[0]
    for error in forbidden:
        logger.warning("left out for now: %s", error)
    return Cache(bodies, keep_of(resource))


async def when_available(read: Callable[[], Awaitable[T]]) -> T:
    """Read something; retry while the API server is unavailable, for it may be just starting."""
    while True:
        try:
            return await read()
        except UnavailableError as error:
            logger.warning("%s", error)
            await asyncio.sleep(RETRY_SECONDS)


class BackOffs:
    """The back-off between attempts to reach the API server, in seconds, without end."""

    def __iter__(self) -> Iterator[float]:
        """Start over for each request."""
        return chain((0.5, 1.0, 2.0), repeat(5.0))


def session(
    health: Liveness,
    outdated: asyncio.Event,
    *,
    tls: ssl.SSLContext,
    headers: Mapping[str, str],
    proxy: str | None,
) -> aiohttp.ClientSession:
    """Return HTTP connections to the API server whose watches send heartbeats to *health*.

    A watch that is not found sets *outdated*: the kind was uninstalled, and kopf, which watches the
    kinds that it found at its start, ends that watch for good. A list whose continuation has
    expired (410) is begun again.
    """

    async def begun(
        _session: aiohttp.ClientSession,
        _context: SimpleNamespace,
        request: aiohttp.TraceRequestStartParams,
    ) -> None:
        if request.url.query.get("watch") == "true":
            health.beat(f"watch of {request.url.path}")

    async def answered(
        _session: aiohttp.ClientSession,
        _context: SimpleNamespace,
        request: aiohttp.TraceRequestEndParams,
    ) -> None:
        if (
            request.url.query.get("watch") == "true"
            and request.response.status == HTTPStatus.NOT_FOUND
        ):
            health.forget(f"watch of {request.url.path}")
            outdated.set()

    async def beginning_again(
        request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        response = await send(request)
        if response.status == HTTPStatus.GONE and "limit" in request.url.query:
            response.release()
            # kopf begins a list again after this error, and ends all watches after a status of 410.
            raise aiohttp.ClientPayloadError(f"410: the list of {request.url.path} has expired")
        return response

    trace = aiohttp.TraceConfig()
    trace.on_request_start.append(begun)
    trace.on_request_end.append(answered)
    connector = aiohttp.TCPConnector(limit=0, ssl=tls)
    return aiohttp.ClientSession(
        connector=connector,
        headers=headers,
        proxy=proxy,
        trace_configs=[trace],
        middlewares=(beginning_again,),
    )


@asynccontextmanager
async def relisting(
    kubernetes: Kubernetes,
    caches: Mapping[Resource, Cache],
    namespaces: Sequence[str],
    missing: Sequence[Resource] = (),
) -> AsyncIterator[asyncio.Event]:
    """Relist every five minutes while the block runs.

    Yields:
        An event that is set once all caches have to be loaded again, and all watches begun again:
        the API server's store was restored, or one of the *missing* kinds is installed. `session`
        sets it when a kind was uninstalled.
    """
    outdated = asyncio.Event()
    tasks = [
        asyncio.create_task(
            _relist_for_ever(kubernetes, caches, namespaces, outdated), name="relist"
        ),
        *(
            asyncio.create_task(
                _await_kind(kubernetes, kind, namespaces, outdated), name=f"await {kind.kind}"
            )
            for kind in missing
        ),
    ]
    try:
        yield outdated
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def relist(
    kubernetes: Kubernetes, caches: Mapping[Resource, Cache], namespaces: Sequence[str]
) -> bool:
    """Drop from *caches* what does not exist any more; return whether they are of this store.

    A watch that begins with a list, after the API server was away for long, shows all objects that
    exist and no deletion. Without this, a deleted object would stay in its cache for ever.

    When etcd is restored from a backup, versions go back. Caches would take all that is there for
    older than what they hold, and watches would wait for versions to come. Then nothing is dropped.

    Raises:
        KubernetesError: a list failed; of several namespaces, a forbidden one is left out.
    """
    for resource, cache in caches.items():
        for namespace in _each(namespaces):
            try:
                if not await _relist(kubernetes, resource, cache, namespace):
                    return False
            except ForbiddenError as error:
                # One namespace, of a list of them, may have been deleted, and the Role in it too.
                if namespace is None:
                    raise
                logger.warning("relist: %s", error)
    return True


async def _relist(
    kubernetes: Kubernetes, resource: Resource, cache: Cache, namespace: str | None
) -> bool:
    # Only what was known before the list was made: what came since isn't in it either.
    known = [body for body in cache if namespace in {None, body["metadata"]["namespace"]}]
    if not known:
        return True
    there = await kubernetes.versions(resource, namespace)
    for body in known:
        if version(body) > there.by_uid.get(body["metadata"]["uid"], there.latest):
            logger.warning(
                "%s %s: the API server has an older version of it, as after a restore of etcd",
                resource.kind,
                Key.of(body),
            )
            return False
    for body in known:
        if body["metadata"]["uid"] not in there.by_uid:
            logger.info("%s %s: no watch has shown its deletion", resource.kind, Key.of(body))
            cache.drop(body)
    return True


async def _relist_for_ever(
    kubernetes: Kubernetes,
    caches: Mapping[Resource, Cache],
    namespaces: Sequence[str],
    outdated: asyncio.Event,
) -> None:
    while True:
        await asyncio.sleep(RELIST_SECONDS)
        try:
            if not await relist(kubernetes, caches, namespaces):
                outdated.set()
        except KubernetesError as error:
            logger.warning("relist: %s", error)
        except Exception:
            logger.exception("relist: failed, will be retried")


async def _await_kind(
    kubernetes: Kubernetes, kind: Resource, namespaces: Sequence[str], outdated: asyncio.Event
) -> None:
    while True:
        await asyncio.sleep(KINDS_SECONDS)
        for namespace in _each(namespaces):
            try:
                await kubernetes.versions(kind, namespace)
            except NotFoundError:
                continue
            except KubernetesError as error:
                logger.warning("%s: %s", kind.kind, error)
                continue
            logger.info("the kind %s is installed now", kind.kind)
            outdated.set()
            return


def _each(namespaces: Sequence[str]) -> Sequence[str | None]:
    """Return what to list, one after the other; None stands for all namespaces at once."""
    return namespaces or (None,)
