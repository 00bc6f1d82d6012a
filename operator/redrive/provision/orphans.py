"""Orphaned policies, which were deleted without cleanup, and Events about retained topics.

Policies that the API server deleted although they had the finalizer: their cleanup is still due.

The API server looks at the finalizers of an object once, when a DELETE request begins. One that is
added between then and the end of that request is lost together with the object: the operator has
the answer that its finalizer is there, and creates topics for a policy that is gone.

Events about policies that were deleted at once: what stays of them at the broker.

Made by `queues`. The deletion of a policy with `deletionPolicy: Retain` waits for nothing, so the
Event comes after it, if the operator runs then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta

from redrive.api import Body
from redrive.api.conditions import ObjectEvent
from redrive.kube.cache import Cache
from redrive.kube.resources import Key
from redrive.kube.status import Publisher
from redrive.provision.finalize import made
from redrive.provision.outcome import has_cleanup_finalizer
from redrive.reasons import Reason

REQUEST = timedelta(seconds=60)
"""The longest that the API server works on one request: its default `--request-timeout`.

What is gone later, without a `deletionTimestamp`, was not deleted by such a request: a restored
etcd, for example, forgets policies whose topics hold messages.
"""


class LostPolicies:
    """Policies that went without their cleanup soon after their finalizer came.

    Held in memory only: if the operator ends before their cleanup is done, their topics stay.

    Args:
        policies: all that there are.
        clock: tells when a finalizer was first seen.
    """

    def __init__(self, policies: Cache, clock: Callable[[], datetime]) -> None:
        self._clock = clock
        self._since: dict[Key, datetime] = {}
        self._lost: dict[Key, Body] = {}
        for body in policies:
            self._note(Key.of(body), None, body)
        policies.listen(self._note)

    def get(self, key: Key) -> Body | None:
        """Return a lost policy as one that is being deleted since it was lost."""
        return self._lost.get(key)

    def forget(self, key: Key) -> None:
        """Drop a lost policy: its cleanup is done, or a new policy has its name and its topics."""
        self._lost.pop(key, None)

    def _note(self, key: Key, before: Body | None, after: Body | None) -> None:
        now = self._clock()
        if after is None:
            since = self._since.pop(key, None)
            if before is not None and since is not None and now - since <= REQUEST:
                self._keep(key, before, now)
        elif not has_cleanup_finalizer(after):
            self._since.pop(key, None)
        elif before is None or before["metadata"]["uid"] != after["metadata"]["uid"]:
            # Of one that was listed with it, no more is known than that it can't be older.
            self._since[key] = datetime.fromisoformat(after["metadata"]["creationTimestamp"])
        else:
            self._since.setdefault(key, now)

    def _keep(self, key: Key, body: Body, now: datetime) -> None:
        if "deletionTimestamp" not in body["metadata"]:
            going = {**body["metadata"], "deletionTimestamp": now.isoformat()}
            self._lost[key] = {**body, "metadata": going}


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
        task = asyncio.create_task(self._out.emit(policy, ObjectEvent(Reason.RETAINED, message)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
