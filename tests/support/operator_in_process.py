"""The operator in this process with a fake API server, for policies and connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime

from redrive.admin.http import Http
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.connections import Connections, NamespaceLabels
from redrive.kube.context import Context, Settings, wall_clock
from redrive.kube.credentials import CredentialReader
from redrive.kube.job_templates import JobTemplates
from redrive.kube.resources import keep_of, retained_config_map
from redrive.provision import handlers
from tests.support.fake_kubernetes import FakeKubernetes


@asynccontextmanager
async def operator_in_process(
    kubernetes: FakeKubernetes, http: Http, clock: Callable[[], datetime] = wall_clock
) -> AsyncIterator[Context]:
    """Run the operator's controllers for policies, starting with the existing objects.

    A write is forgotten once it is in the caches: tens of thousands would fill the memory.
    """
    connections, labels = (
        Cache(await kubernetes.list(resources.CONNECTIONS)),
        NamespaceLabels(kubernetes),
    )
    reader = CredentialReader(kubernetes, http, None)
    ctx = Context(
        settings=Settings("here", (), None, "", ""),
        kubernetes=kubernetes,
        connections=connections,
        policies=Cache(await kubernetes.list(resources.POLICIES)),
        replays=Cache(),
        inspections=Cache(),
        applications={resources.JOBS: Cache(keep=keep_of(resources.JOBS))},
        config_maps=Cache(await kubernetes.list(resources.CONFIG_MAPS), retained_config_map),
        brokers=Connections(connections, http, reader, clock, labels),
        namespaces=labels,
        job_templates=JobTemplates(None),
        clock=clock,
        began=clock(),
        missing=(),
    )
    watch = asyncio.create_task(_show(kubernetes, ctx))
    stoppables = handlers.start(ctx)
    try:
        yield ctx
    finally:
        watch.cancel()
        for stoppable in stoppables:
            await stoppable.stop()


async def _show(kubernetes: FakeKubernetes, ctx: Context) -> None:
    """Put written objects into the caches, like watches; Secrets have none."""
    while True:
        write = await kubernetes.written()
        cache = ctx.caches.get(write.resource)
        if cache is not None:
            cache.put(write.body)
        kubernetes.writes.clear()
