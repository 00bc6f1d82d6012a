"""Drift: what somebody changes at a broker is found by looking, again and again.

A broker tells nobody of a change. Topics and grants of a whole Pulsar namespace come in three
calls, so a *survey* compares them for all policies every minute. For subscriptions, partitions and
topic policies it has no call for many topics at once below the super-user, so a *rotation* has one
policy after the other looked at: the more policies, the longer it takes. Each connection has both
of its own, and a slow broker keeps nobody else waiting.

Policies that are not ready are no part of it: they are looked at when something changes, or again
and again anyway. Only those whose Pulsar namespace deletes idle subscriptions are surveyed too, for
they are looked at ever less often. So an operator that starts needs one survey to know that all is
well.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator

from redrive.cluster import status
from redrive.cluster.connections import users
from redrive.cluster.resources import Body, Key
from redrive.errors import RedriveError
from redrive.provision.survey import Survey, is_surveyed

SURVEY_SECONDS = 60.0
ROTATION_SECONDS = 15.0
"""How long a rotation takes, unless that were too fast for the broker."""
CALLS_PER_SECOND = 20.0
CALLS_PER_LOOK = 18
"""How many calls to the broker a look takes at most where nothing is amiss."""

logger = logging.getLogger(__name__)


class Rounds:
    """Surveys and rotations over the policies of all connections; needs a running event loop.

    Args:
        wake: has a policy looked at.
    """

    def __init__(self, survey: Survey, wake: Callable[[Key], None]) -> None:
        self._survey = survey
        self._policies = survey.world.policies
        self._wake = wake
        self._tasks: dict[Key, list[asyncio.Task[None]]] = {}
        for body in survey.world.connections:
            self._begin(Key.of(body))
        survey.world.connections.listen(self._connection_changed)

    async def stop(self) -> None:
        """End all of them."""
        tasks = [task for key in tuple(self._tasks) for task in self._end(key)]
        await asyncio.gather(*tasks, return_exceptions=True)

    def _connection_changed(self, key: Key, _before: Body | None, after: Body | None) -> None:
        if after is None:
            self._end(key)
        elif key not in self._tasks:
            self._begin(key)

    def _begin(self, key: Key) -> None:
        self._tasks[key] = [
            asyncio.create_task(self._survey_for_ever(key), name=f"survey {key}"),
            asyncio.create_task(self._rotate_for_ever(key), name=f"rotation {key}"),
        ]

    def _end(self, key: Key) -> list[asyncio.Task[None]]:
        tasks = self._tasks.pop(key, [])
        for task in tasks:
            task.cancel()
        return tasks

    async def _survey_for_ever(self, connection: Key) -> None:
        while True:
            try:
                surveyed = filter(is_surveyed, users(connection, self._policies))
                for key in await self._survey.amiss(connection, surveyed):
                    self._wake(key)
            except RedriveError as error:
                logger.info("survey of PulsarConnection %s: %s", connection, error)
            except Exception:
                logger.exception("survey of PulsarConnection %s: failed", connection)
            await asyncio.sleep(SURVEY_SECONDS)

    async def _rotate_for_ever(self, connection: Key) -> None:
        while True:
            keys = [Key.of(body) for body in self._settled(connection)]
            if not keys:
                await asyncio.sleep(ROTATION_SECONDS)
            # By chance: an operator that is restarted often must not begin with the same ones.
            for key in random.sample(keys, len(keys)):
                await asyncio.sleep(pause(len(keys)))
                self._wake(key)

    def _settled(self, connection: Key) -> Iterator[Body]:
        return filter(status.is_settled, users(connection, self._policies))


def pause(policies: int) -> float:
    """Return the seconds between the looks at two policies, of so many."""
    return max(ROTATION_SECONDS / policies, CALLS_PER_LOOK / CALLS_PER_SECOND)
