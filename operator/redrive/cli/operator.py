"""`redrive operator`: provisions policies and runs replays until it is stopped.

One process for a cluster, or for a list of namespaces. SIGTERM and SIGINT end it within seconds
with code 0; the next start continues what was under way.

Its HTTP endpoint has `/metrics`, `/livez` and `/readyz`. Threads serve it, so that it answers even
while the event loop hangs. It shows no secret and needs no authentication: bind it where only the
kubelet and Prometheus can reach it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import platform
import resource
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, cast
from wsgiref.simple_server import WSGIRequestHandler, make_server

import kopf
from prometheus_client import Info, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from redrive import __version__
from redrive.admin.guards import Fence
from redrive.admin.http import without_request
from redrive.admin.proxies import proxy_for
from redrive.api import LauncherName
from redrive.errors import NOTHING, RedriveError
from redrive.inspection import controller as inspection
from redrive.kube import informer, logs
from redrive.kube.cache import Cache
from redrive.kube.client import is_in_cluster
from redrive.kube.context import Context, Settings, wall_clock
from redrive.kube.job_templates import JobTemplates
from redrive.kube.leader_election import leading
from redrive.kube.observability import Liveness, counting_objects
from redrive.kube.resources import Key, Resource
from redrive.provision import handlers as provision
from redrive.replay.controller import handlers as replay
from redrive.replay.controller import metrics as replay_metrics

END_SECONDS = 5.0
"""Time for kopf to end its watches, in seconds. Then all of its tasks are cancelled."""
CANCEL_SECONDS = 1.0
CANCELLATIONS = 3
"""A task of kopf may take a cancellation for a pause of its watch, and need another one."""
EXIT_SECONDS = 20.0
"""Time for the process to end after a signal. Below the 30 s after which a kubelet kills it."""
RELIST_BACK_OFF_SECONDS = 1.0
"""Pause of kopf before it lists a kind again."""
COLLECTOR_THRESHOLDS = 2_000, 10, 25
"""Thresholds of Python's garbage collector. With its own (700, 10, 10), a third of the processor
time for ten thousand new policies goes into searches of the caches for unreachable cycles. At most
half a million objects are created between two searches of all: until then cycles stay in memory."""

logger = logging.getLogger(__name__)

BUILD = Info("redrive_build", "Versions of the operator and of Python.")
BUILD.info({"version": __version__, "python_version": platform.python_version()})


def run(options: argparse.Namespace) -> None:
    """Run the operator until it is stopped.

    Raises:
        KubernetesError: the CRDs are not installed, or a right is missing.
    """
    logs.to_stderr(options.log_format, options.log_level)
    settings = Settings(
        cluster_id=options.cluster_id,
        namespaces=tuple(options.namespace),
        replay_template=options.replay_template,
        replay_application=options.replay_application,
        replay_service_account=options.replay_service_account,
        job_service_account=options.job_service_account,
        inspection_service_account=options.inspection_service_account,
        clear_payloads=options.clear_payloads,
        job_max_messages=options.job_max_messages,
        job_templates=options.job_templates,
        max_executors=options.max_executors,
        replay_launchers=tuple(map(LauncherName, options.replay_launcher or ["Kubeflow"])),
        credentials=options.credentials,
    )
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
    # Containers may start with 1024 descriptors, and each call to a broker needs one.
    _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError):  # macOS has no hard limit, but a highest value
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    health = Liveness()
    with ExitStack() as stack:
        if options.listen is not None:
            address, port = options.listen
            stack.enter_context(serving_endpoint(address, port, health))
        with suppress(asyncio.CancelledError):  # a signal came to a standby
            asyncio.run(stand_by(settings, health, options.lease, options.identity))


async def stand_by(settings: Settings, health: Liveness, lease: Key | None, identity: str) -> None:
    """Serve, after leader election where there is a lease; a signal ends a standby at once.

    Raises:
        RedriveError: another operator has taken over, or the watches failed.
    """
    try:
        async with health.beating():
            _end_at_a_signal()
            if lease is None:
                await _serve_again_and_again(settings, health, identity, None)
                return
            async with leading(lease, identity, health, wall_clock) as fence:
                await _serve_again_and_again(settings, health, identity, fence)
    finally:
        _exit_in_time()  # asyncio.run waits for each task, also for one that ignores cancellations


async def _serve_again_and_again(
    settings: Settings, health: Liveness, identity: str, fence: Fence | None
) -> None:
    job_templates = JobTemplates(settings.job_templates)
    while await serve(settings, health, identity, fence, job_templates):
        _end_at_a_signal()
        logger.info("redrive loads all objects again")


def _end_at_a_signal() -> None:
    """Have a signal cancel this task, until `serve` has it end in order."""
    waiting = asyncio.current_task()
    assert waiting is not None  # noqa: S101  every coroutine runs in a task
    _at_a_signal(waiting.cancel)


def _at_a_signal(act: Callable[[], object]) -> None:
    def end() -> None:
        _exit_in_time()
        act()

    for signal_ in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signal_, end)


def _exit_in_time() -> None:
    """Exit with code 1 if this process still runs after `EXIT_SECONDS`, even if its loop hangs."""

    def give_up() -> None:
        logger.error("redrive did not stop within %.0f s, and exits", EXIT_SECONDS)
        logging.shutdown()
        os._exit(1)

    timer = threading.Timer(EXIT_SECONDS, give_up)
    timer.daemon = True
    timer.start()


async def serve(
    settings: Settings,
    health: Liveness,
    identity: str,
    fence: Fence | None = None,
    job_templates: JobTemplates | None = None,
) -> bool:
    """Watch and reconcile until a signal ends it, then stop all tasks and close connections.

    Returns:
        True if all objects have to be loaded again; see `informer.relisting`.

    Raises:
        RedriveError: kopf ended otherwise.
    """
    signalled, ending = False, asyncio.Event()
    async with (
        Context.open(settings, fence, job_templates) as ctx,
        informer.relisting(
            ctx.kubernetes, ctx.caches, settings.namespaces, ctx.missing
        ) as outdated,
    ):
        registry = kopf.OperatorRegistry()
        journeys = (provision, replay, inspection)
        stoppables = [part for journey in journeys for part in journey.start(ctx)]
        for kind, cache in ctx.caches.items():
            kopf.on.event(*kind.address, registry=registry)(partial(_take_event, cache))

        def end() -> None:
            nonlocal signalled
            signalled = True
            outdated.set()  # which kopf ends by

        async def start(**_: object) -> None:
            # In place of kopf's own handlers, which lose a signal that comes while it ends to load
            # all objects again, and then wait five seconds for who waits for its stop flag. Soon:
            # kopf is just setting them.
            asyncio.get_running_loop().call_soon(_at_a_signal, end)

        async def stop(**_: object) -> None:
            ending.set()  # kopf ends, and may never return
            for stoppable in stoppables:
                await stoppable.stop()

        kopf.on.startup(registry=registry)(start)
        kopf.on.login(registry=registry)(partial(_login, health, outdated))
        # Here and not after kopf has ended: it waits for tasks that began under it.
        kopf.on.cleanup(registry=registry)(stop)
        health.ready = True
        logger.info("redrive serves %s", ", ".join(settings.namespaces) or "all namespaces")
        with counting_objects(ctx.caches), replay_metrics.counting(ctx.replays, ctx.policy_caches):
            watches = kopf.operator(
                registry=registry,
                # kopf's default needs an entry in /etc/passwd, which a pod's user lacks; its type
                # is not exported.
                identity=cast("Any", identity),
                settings=_kopf_settings(ctx.caches),
                namespaces=settings.namespaces,
                clusterwide=not settings.namespaces,
                standalone=True,
                stop_flag=outdated,
            )
            failure = await _supervise(watches, outdated, ending)
    if not outdated.is_set():
        raise RedriveError(
            f"the watches of the Kubernetes API ended{'' if failure else ', see the log of kopf'}",
            got=NOTHING if failure is None else without_request(failure),
            remedy="no action needed: this operator exits, and its container is started again",
            reason="WatchesEnded",
        )
    logger.info("redrive has stopped")
    return not signalled


async def _take_event(cache: Cache, event: kopf.RawEvent, **_: object) -> None:
    cache.on_event(event)


async def _supervise(
    watches: Coroutine[Any, Any, None], *endings: asyncio.Event
) -> BaseException | None:
    """Run kopf until it ends; after one of *endings*, or a cancellation, end it within seconds.

    kopf alone may never end: it stops the task that renews its credentials first, and a watch whose
    connection is closed at that time waits for credentials, and swallows the one cancellation.

    Returns:
        The exception of kopf, or None if it has none.
    """
    others = asyncio.all_tasks()
    running = asyncio.create_task(watches, name="kopf")
    waiting = [asyncio.create_task(ending.wait()) for ending in endings]
    try:
        await asyncio.wait([running, *waiting], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait([running], timeout=END_SECONDS)
    finally:
        for _ in range(CANCELLATIONS):
            tasks = [task for task in asyncio.all_tasks() - others if task is not running]
            for task in (*tasks, running):
                task.cancel()
            await asyncio.wait([*tasks, running], timeout=CANCEL_SECONDS)
    return None if not running.done() or running.cancelled() else running.exception()


def _kopf_settings(kinds: Iterable[Resource]) -> kopf.OperatorSettings:
    """Return settings by which kopf watches and does nothing else.

    It makes no Events of its own, discovers resources at its start only, and has the API server
    select objects by the label selectors of *kinds*.
    """
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.watching.server_timeout = informer.WATCH_SECONDS
    settings.watching.reconnect_backoff = RELIST_BACK_OFF_SECONDS
    settings.watching.chunk_size = informer.WATCH_PAGE
    settings.queueing.idle_timeout = informer.WATCH_IDLE_SECONDS
    settings.watching.inactivity_timeout = informer.INACTIVITY_SECONDS
    settings.networking.error_backoffs = informer.BackOffs()
    for kind in kinds:
        if kind.selector:
            settings.watching.label_selectors[kind.address] = kind.selector
    return settings


async def _login(
    health: Liveness, outdated: asyncio.Event, *, settings: kopf.OperatorSettings, **_: object
) -> kopf.AiohttpSession | None:
    """Log kopf in as our own client does, with connections that send heartbeats."""
    if is_in_cluster():
        access = kopf.login_with_service_account(settings=settings)
    else:
        access = kopf.login_with_kubeconfig(settings=settings)
    if access is None:
        return None
    connections = informer.session(
        health,
        outdated,
        tls=access.as_ssl_context(),
        headers=access.as_http_headers(),
        proxy=proxy_for(access.server, access.proxy_url),
    )
    return kopf.AiohttpSession(server=access.server, aiohttp_session=connections)


IDLE_SECONDS = 10.0
"""Time for which a client may leave its connection idle."""

_StartResponse = Callable[..., Any]
_App = Callable[[dict[str, Any], _StartResponse], Iterable[bytes]]


@contextmanager
def serving_endpoint(address: str, port: int, health: Liveness) -> Iterator[int]:
    """Serve while the block runs; yield the port.

    Args:
        address: of this machine, on which to listen; `0.0.0.0` is all of IPv4, `::` all of IPv6.
        port: 0 takes a free one.
        health: what the probes show.

    Raises:
        RedriveError: the address is not one of this machine, or the port is taken.
    """
    try:
        kind = IPv6Server if ":" in address else ThreadingWSGIServer
        server = make_server(address, port, _app(health), server_class=kind, handler_class=Handler)
    except OSError as error:
        raise RedriveError(
            f"metrics and probes can't be served: {error.strerror}",
            got=f"{address}:{port}",
            remedy="choose another --listen",
            reason="EndpointUnavailable",
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="endpoint", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class IPv6Server(ThreadingWSGIServer):
    """Server on an address of IPv6."""

    address_family = socket.AF_INET6


class Handler(WSGIRequestHandler):
    """Handles a connection in a thread of its own, which an idle client does not keep."""

    timeout = IDLE_SECONDS

    def handle(self) -> None:
        """Answer the request, if one comes in time."""
        with suppress(TimeoutError, ConnectionError):
            super().handle()

    def log_message(self, *_: object) -> None:
        """Log nothing: the kubelet and Prometheus send requests all the time."""


def _app(health: Liveness) -> _App:
    metrics: _App = make_wsgi_app()

    def livez() -> tuple[str, str]:
        text = [
            f"{part}: last active {silence:.0f} s ago"
            for part, silence in health.silent_for().items()
        ]
        return ("503 Stalled" if health.has_stalled() else "200 OK", "\n".join(sorted(text)))

    def readyz() -> tuple[str, str]:
        return ("200 OK", "ready") if health.ready else ("503 Starting", "starting")

    probes = {"/livez": livez, "/readyz": readyz}

    def app(environ: dict[str, Any], start_response: _StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            return metrics(environ, start_response)
        status, text = probes[path]() if path in probes else ("404 Not Found", "no such page")
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{text}\n".encode()]

    return app
