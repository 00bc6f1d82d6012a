"""Policies that were deleted without a finalizer at work, and Events about retained topics.

The API server reads the finalizers of an object when a DELETE request begins. A finalizer that is
added before that request ends is deleted together with the object. The operator has the answer that
its finalizer was added, and creates topics for a policy that is gone. `OrphanedPolicies` detects
that, and the reconciler runs the cleanup.

The deletion of a policy with `deletionPolicy: Retain` waits for nothing. `DeletionEvents` emits the
Event after it, if the operator runs then.
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
"""Maximum duration of an API request: the default `--request-timeout` of the API server.

A policy that disappears later without `deletionTimestamp` was not deleted by such a request. For
example, a restored etcd forgets policies whose topics hold messages.
"""


class OrphanedPolicies:
    """Policies that were deleted without their cleanup soon after their finalizer was added.

    They are held in memory only: if the operator ends before their cleanup, their topics are
        retained.

    Args:
        policies: all RetryPolicies.
        clock: time at which a finalizer is first seen.
    """

    def __init__(self, policies: Cache, clock: Callable[[], datetime]) -> None:
        self._clock = clock
        self._since: dict[Key, datetime] = {}
        self._orphans: dict[Key, Body] = {}
        for body in policies:
            self._note(Key.of(body), None, body)
        policies.listen(self._note)

    def get(self, key: Key) -> Body | None:
        """Return an orphaned policy with the deletionTimestamp at which it disappeared."""
        return self._orphans.get(key)

    def forget(self, key: Key) -> None:
        """Drop an orphaned policy: its cleanup is done, or a new policy has its name and topics."""
        self._orphans.pop(key, None)

    def _note(self, key: Key, before: Body | None, after: Body | None) -> None:
        now = self._clock()
        if after is None:
            since = self._since.pop(key, None)
            if before is not None and since is not None and now - since <= REQUEST:
                self._keep(key, before, now)
        elif not has_cleanup_finalizer(after):
            self._since.pop(key, None)
        elif before is None or before["metadata"]["uid"] != after["metadata"]["uid"]:
            # A policy that is listed with the finalizer may have it since its creation.
            self._since[key] = datetime.fromisoformat(after["metadata"]["creationTimestamp"])
        else:
            self._since.setdefault(key, now)

    def _keep(self, key: Key, body: Body, now: datetime) -> None:
        if "deletionTimestamp" not in body["metadata"]:
            metadata = {**body["metadata"], "deletionTimestamp": now.isoformat()}
            self._orphans[key] = {**body, "metadata": metadata}


class DeletionEvents:
    """Emits an Event about each policy that is deleted at once; requires a running event loop."""

    def __init__(self, out: Publisher) -> None:
        self._out = out
        self._tasks: set[asyncio.Task[None]] = set()
        out.table.listen(self._note)

    async def stop(self) -> None:
        """Drop the Events that are not emitted yet."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def idle(self) -> None:
        """Wait until the Events of all policies deleted so far are emitted."""
        await asyncio.gather(*self._tasks)

    def _note(self, _: Key, before: Body | None, after: Body | None) -> None:
        if after is not None or before is None or "deletionTimestamp" in before["metadata"]:
            return  # `finalize` emits the Event of a policy that had a deletionTimestamp
        if topics := made(before):
            self._emit(before, topics)

    def _emit(self, policy: Body, topics: str) -> None:
        message = (
            f"{topics} are retained at the broker, with their messages, subscriptions and grants; "
            "delete them manually when they are no longer needed"
        )
        task = asyncio.create_task(self._out.emit(policy, ObjectEvent(Reason.RETAINED, message)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
