"""Informer: list and watch of redrive's kinds, and relists for deletions that a watch missed.

1. List: `load` fills a cache completely, before any decision.
2. Watch: kopf has one for each kind and namespace, over the connections of `session`.
3. Relist: `relisting` finds deletions that happened while no watch was open.
4. Restart: if a relist finds that caches are outdated as a whole, the command loads them again.

A silent watch may be idle or dead. So the API server is asked to end each watch after
`WATCH_SECONDS`, and the next one resumes there; each start is a heartbeat. While the API server is
unavailable, a new attempt follows every few seconds, without limit: that is not a stall.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from http import HTTPStatus
from itertools import chain, repeat
from types import SimpleNamespace
from typing import TypeVar

import aiohttp

from redrive.admin.http import transport_failure
from redrive.api import Body
from redrive.kube.cache import Cache, version
from redrive.kube.client import (
    ForbiddenError,
    Kubernetes,
    KubernetesError,
    NotFoundError,
    UnavailableError,
)
from redrive.kube.observability import Liveness, in_background
from redrive.kube.resources import Key, Resource, keep_of

RETRY_SECONDS = 1.0
RELIST_SECONDS = 300.0
KINDS_SECONDS = 15.0
"""Interval at which a missing kind is checked."""
WATCH_SECONDS = 30
"""Duration of a watch in whole seconds; the next one resumes it."""
WATCH_PAGE = 10
"""Objects in one page if a watch begins with a list: each may have mebibytes, and kopf has no limit
in bytes. This list delays nothing, because the caches are loaded before."""
WATCH_IDLE_SECONDS = 0.1
"""Time for which kopf holds the latest event of each object in memory."""
INACTIVITY_SECONDS = 45.0
"""A watch without any data for longer, not even its end, is closed and reopened."""
T = TypeVar("T")

logger = logging.getLogger(__name__)


async def load(kubernetes: Kubernetes, resource: Resource, namespaces: Sequence[str] = ()) -> Cache:
    """List the objects of a kind in *namespaces*, or in all.

    A forbidden namespace is skipped: the deletion of a namespace deletes its Role, too, and the
    other namespaces must be served.

    Raises:
        ForbiddenError: all namespaces are forbidden.
        KubernetesError: a list failed otherwise.
    """
    bodies: list[Body] = []
    forbidden: list[ForbiddenError] = []
    for namespace in _scopes(namespaces):
        try:
            bodies += await when_available(partial(kubernetes.list, resource, namespace))
        except ForbiddenError as refusal:
            forbidden.append(refusal)
    if len(forbidden) == len(_scopes(namespaces)):
        raise forbidden[0]
    for error in forbidden:
        logger.warning("namespace skipped, access is forbidden: %s", error)
    return Cache(bodies, keep_of(resource))


async def when_available(read: Callable[[], Awaitable[T]]) -> T:
    """Read, and retry while the API server is unavailable: it may be starting."""
    while True:
        try:
            return await read()
        except UnavailableError as error:
            logger.warning("%s", error)
            await asyncio.sleep(RETRY_SECONDS)


class BackOffs:
    """Back-off between connection attempts to the API server, in seconds, without end."""

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
    """Return an HTTP session to the API server whose watches send heartbeats to *health*.

    A watch that gets 404 sets *outdated*: the kind was uninstalled, and kopf ends its watch
    permanently. A list whose continuation expired (410) is restarted, and a refusal of the proxy is
    retried. Errors show no login of the proxy.
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

    async def sending(
        request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        try:
            response = await send(request)
        except (aiohttp.ClientConnectorError, aiohttp.ClientResponseError) as error:
            # kopf ends all watches after the latter, such as a refusal of the proxy, but retries
            # after a lost connection. It logs both with all parts, such as the proxy's password.
            raise aiohttp.ClientConnectionError(transport_failure(error)) from None
        if response.status == HTTPStatus.GONE and "limit" in request.url.query:
            response.release()
            # kopf restarts a list after this error, but ends all watches after a status of 410.
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
        middlewares=(sending,),
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
        An event that is set when all caches and watches must be restarted: the API server's store
        was restored, or one of the *missing* kinds is installed. `session` sets it when a kind was
        uninstalled.
    """
    outdated = asyncio.Event()
    tasks = {"relist": _poll(kubernetes, caches, namespaces, outdated)}
    for kind in missing:
        tasks[f"await {kind.kind}"] = _await_kind(kubernetes, kind, namespaces, outdated)
    async with AsyncExitStack() as stack:
        for name, work in tasks.items():
            await stack.enter_async_context(in_background(work, name))
        yield outdated


async def relist(
    kubernetes: Kubernetes, caches: Mapping[Resource, Cache], namespaces: Sequence[str]
) -> bool:
    """Drop deleted objects from *caches*; return False if the store was restored.

    A watch that begins with a list, after the API server was unavailable for long, reports all
    existing objects and no deletions. Without a relist, deleted objects would stay in the cache.

    When etcd is restored from a backup, versions decrease. Caches would regard all objects as older
    than their own, and watches would wait for higher versions. Then nothing is dropped.

    Raises:
        KubernetesError: a list failed; of several namespaces, a forbidden one is skipped.
    """
    for resource, cache in caches.items():
        for namespace in _scopes(namespaces):
            try:
                if not await _relist(kubernetes, resource, cache, namespace):
                    return False
            except ForbiddenError as error:
                # One of several namespaces may have been deleted, with its Role.
                if namespace is None:
                    raise
                logger.warning("relist: %s", error)
    return True


async def _relist(
    kubernetes: Kubernetes, resource: Resource, cache: Cache, namespace: str | None
) -> bool:
    # Only objects known before the list: newer ones are not in it either.
    cached = [body for body in cache if namespace in {None, body["metadata"]["namespace"]}]
    if not cached:
        return True
    listed = await kubernetes.versions(resource, namespace)
    for body in cached:
        if version(body) > listed.by_uid.get(body["metadata"]["uid"], listed.latest):
            logger.warning(
                "%s %s: the API server has an older version, as after a restore of etcd",
                resource.kind,
                Key.of(body),
            )
            return False
    for body in cached:
        if body["metadata"]["uid"] not in listed.by_uid:
            logger.info("%s %s: no watch reported its deletion", resource.kind, Key.of(body))
            cache.drop(body)
    return True


async def _poll(
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
        for namespace in _scopes(namespaces):
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


def _scopes(namespaces: Sequence[str]) -> Sequence[str | None]:
    """Return the namespaces to list; None stands for all namespaces at once."""
    return namespaces or (None,)
