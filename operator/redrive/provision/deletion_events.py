"""Events about policies that were deleted at once: what stays of them at the broker.

Made by `queues`. The deletion of a policy with `deletionPolicy: Retain` waits for nothing, so the
Event comes after it, if the operator runs then.
"""

from __future__ import annotations

import asyncio

from redrive.kube.resources import Body, Key
from redrive.kube.status import ObjectEvent, Publisher
from redrive.provision.finalize import RETAINED, made


class DeletionEvents:
    """Makes an Event about each policy that is deleted at once; needs a running event loop."""

    def __init__(self, out: Publisher) -> None:
        self._out = out
        self._tasks: set[asyncio.Task[None]] = set()
        out.table.listen(self._note)

    async def stop(self) -> None:
        """Drop the Events that are not made yet."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def idle(self) -> None:
        """Wait until the Events of all policies that are gone by now are made."""
        await asyncio.gather(*self._tasks)

    def _note(self, _: Key, before: Body | None, after: Body | None) -> None:
        if after is not None or before is None or "deletionTimestamp" in before["metadata"]:
            return  # what has a deletionTimestamp went through `finalize`, which makes the Event
        if topics := made(before):
            self._emit(before, topics)

    def _emit(self, policy: Body, topics: str) -> None:
        message = (
            f"{topics} stay at the broker, with their messages, subscriptions and grants; delete "
            "them by hand once they are not needed"
        )
        task = asyncio.create_task(self._out.emit(policy, ObjectEvent(RETAINED, message)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
