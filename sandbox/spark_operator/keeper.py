"""The loop of one SparkApplication: decide, act, write the status, wait for a change.

Created by the controller, one per object. Between two steps the keeper holds the state of the run:
the last written status and the started driver, so it never starts a driver twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from datetime import datetime

from . import lifecycle
from .clock import now
from .cluster import Cluster
from .errors import GoneError, RefusedError, UnavailableError
from .lifecycle import Delete, Move, Rest, Submit
from .objects import Application, Object, State, Status
from .runner import Driver, Runner

RETRY_SECONDS = 1

log = logging.getLogger(__name__)


class Keeper:
    """Runs one object, identified by its uid, until it is deleted or the keeper is cancelled."""

    def __init__(self, app: Application, cluster: Cluster, runner: Runner) -> None:
        self.uid = app.uid
        self.ended = asyncio.Event()
        self._app = app
        self._status = app.status
        self._cluster = cluster
        self._runner = runner
        self._changed = asyncio.Event()
        self._deleted = app.deleting
        self._driver: Driver | None = None
        # The spec of the current run; a change of it starts another run.
        self._basis: Object | None = None if app.status.state is State.NEW else app.run_spec

    def see(self, app: Application, *, deleted: bool) -> None:
        """Store the current version of the object."""
        self._app = app
        self._deleted = deleted or app.deleting
        self._changed.set()

    def forget(self) -> None:
        """Treat the object as deleted."""
        self._deleted = True
        self._changed.set()

    async def run(self) -> None:
        """Run the object. Its driver is stopped when this returns or raises."""
        try:
            while not self._deleted:
                self._changed.clear()
                try:
                    await self._step()
                except UnavailableError as error:
                    log.warning("%s/%s: %s; trying again", *self._app.key, error)
                    await self._rest(RETRY_SECONDS)
        except GoneError:
            log.info("%s/%s is gone", *self._app.key)
        finally:
            await self._stop_driver()
            self.ended.set()

    async def _step(self) -> None:
        if self._basis not in (None, self._app.run_spec):
            self._basis = None
            await self._move(Status(state=State.INVALIDATING))
            return
        observation = None if self._driver is None else self._driver.observation
        match lifecycle.decide(self._app, self._status, observation, now()):
            case Submit():
                await self._submit()
            case Move(status, stop_driver):
                if stop_driver:
                    await self._stop_driver()
                await self._move(status)
            case Delete():
                log.info("%s/%s outlived its time", *self._app.key)
                await self._cluster.delete(self._app)
                await self._rest(None)
            case Rest(until):
                await self._rest(None if until is None else _seconds_until(until))

    async def _submit(self) -> None:
        app = self._app
        self._basis = app.run_spec
        attempt = lifecycle.attempted(app, self._status, str(uuid.uuid4()), now())
        try:
            submission = await self._runner.submit(app)
        except RefusedError as error:
            await self._move(lifecycle.refused(attempt, str(error)))
            return
        await self._move(lifecycle.submitted(attempt, submission.application_id))
        self._driver = submission.follow(self._changed.set)

    async def _move(self, status: Status) -> None:
        await self._cluster.write_status(self._app, status)
        self._status = status
        log.info("%s/%s is %s %s", *self._app.key, status.state, status.error_message)

    async def _stop_driver(self) -> None:
        if self._driver is not None:
            await self._driver.stop()
            self._driver = None

    async def _rest(self, seconds: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)


def _seconds_until(moment: datetime) -> float:
    return max(0.0, (moment - now()).total_seconds())
