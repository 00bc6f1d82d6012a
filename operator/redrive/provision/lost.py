"""Policies that the API server deleted although they had the finalizer: their cleanup is still due.

The API server looks at the finalizers of an object once, when a DELETE request begins. One that is
added between then and the end of that request is lost together with the object: the operator has
the answer that its finalizer is there, and creates topics for a policy that is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

from redrive.kube.cache import Cache
from redrive.kube.resources import Body, Key
from redrive.provision.finalizer import has_finalizer

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
        elif not has_finalizer(after):
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
