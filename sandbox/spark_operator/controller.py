"""The watch, which passes every SparkApplication and its changes to one keeper per object."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Iterable

from .cluster import Cluster
from .errors import GoneError, UnavailableError
from .keeper import Keeper
from .objects import Application
from .runner import Runner

RECONNECT_SECONDS = 1

log = logging.getLogger(__name__)


class Controller:
    """Runs the applications of some namespaces, or of all.

    A cancelled `run` stops every driver before it ends.
    """

    def __init__(self, cluster: Cluster, runner: Runner, namespaces: Iterable[str]) -> None:
        self._cluster = cluster
        self._runner = runner
        self._namespaces: tuple[str | None, ...] = tuple(namespaces) or (None,)
        self._keepers: dict[tuple[str, str], Keeper] = {}

    async def run(self) -> None:
        """Watch until cancelled. An unexpected error ends the stand-in."""
        async with asyncio.TaskGroup() as group:
            for namespace in self._namespaces:
                group.create_task(self._watch(namespace, group))

    async def _watch(self, namespace: str | None, group: asyncio.TaskGroup) -> None:
        while True:
            try:
                await self._follow(namespace, group)
            except (GoneError, UnavailableError) as error:
                log.warning("the watch of %s broke: %s", namespace or "all namespaces", error)
                await asyncio.sleep(RECONNECT_SECONDS)

    async def _follow(self, namespace: str | None, group: asyncio.TaskGroup) -> None:
        listing = await self._cluster.listing(namespace)
        scope = namespace or "all namespaces"
        log.info("watching the %s of %s", ".".join(self._cluster.api.address[::2][::-1]), scope)
        listed = {app.uid for app in listing.applications}
        for (home, _), keeper in self._keepers.items():
            if namespace in (None, home) and keeper.uid not in listed:
                keeper.forget()
        for app in listing.applications:
            self._see(app, group, deleted=False)
        async for change in self._cluster.changes(namespace, listing.resource_version):
            self._see(change.application, group, deleted=change.deleted)

    def _see(self, app: Application, group: asyncio.TaskGroup, *, deleted: bool) -> None:
        current = self._keepers.get(app.key)
        if current is not None and current.uid == app.uid:
            current.see(app, deleted=deleted)
        elif not deleted:
            keeper = Keeper(app, self._cluster, self._runner)
            self._keepers[app.key] = keeper
            group.create_task(self._keep(app.key, keeper, current))

    async def _keep(self, key: tuple[str, str], keeper: Keeper, namesake: Keeper | None) -> None:
        """Run *keeper* once the deleted *namesake* has stopped its driver."""
        if namesake is not None:
            namesake.forget()
            await namesake.ended.wait()
        await keeper.run()
        if self._keepers.get(key) is keeper:
            del self._keepers[key]


async def serve(*controllers: Controller) -> None:
    """Run *controllers* until SIGTERM or Ctrl-C."""
    running = asyncio.ensure_future(_run(controllers))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def _run(controllers: Iterable[Controller]) -> None:
    async with asyncio.TaskGroup() as group:
        for controller in controllers:
            group.create_task(controller.run())
