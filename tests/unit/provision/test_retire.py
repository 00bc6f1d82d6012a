from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from redrive.cluster import resources
from redrive.cluster.client import Kubernetes
from redrive.cluster.errors import ConflictError
from redrive.cluster.resources import Body, Key, Resource
from redrive.cluster.status import Publisher
from redrive.cluster.table import Table
from redrive.provision.retire import FINALIZER, RETAINED, retire

MakeBody = Callable[..., dict[str, Any]]


class Disputed(Kubernetes):
    """An API server where somebody else changes the object before each of the first patches."""

    def __init__(self, body: dict[str, Any], conflicts: int) -> None:
        self.body = body
        self.conflicts = conflicts
        self.events: list[str] = []

    async def patch(self, resource: Resource, key: Key, patch: Body) -> Body:
        """Refuse, or set the finalizers."""
        assert (resource, key) == (resources.POLICIES, Key.of(self.body))
        if self.conflicts:
            self.conflicts -= 1
            raise ConflictError("the object has been modified", remedy="try again")
        version = {"resourceVersion": str(int(patch["metadata"]["resourceVersion"]) + 1)}
        self.body = {**self.body, "metadata": self.body["metadata"] | patch["metadata"] | version}
        return self.body

    async def emit(
        self, about: Body, *, kind: str, reason: str, message: str, now: datetime
    ) -> None:
        """Keep the reason."""
        del about, kind, message, now
        self.events.append(reason)


async def test_what_stays_is_told_once_however_often_letting_go_is_tried(policy: MakeBody) -> None:
    body = policy() | {"status": {"retryTopic": "r", "deadLetterTopic": "d"}}
    body["metadata"] |= {"finalizers": ["others", FINALIZER], "deletionTimestamp": "2026-01-01"}
    api, table = Disputed(body, conflicts=2), Table([body])
    out = Publisher(api, resources.POLICIES, table, lambda: datetime(2026, 1, 1, tzinfo=UTC))
    for _ in range(2):
        with pytest.raises(ConflictError):
            await retire(body, out)
    for _ in range(2):
        (known,) = table
        await retire(known, out)
    assert api.events == [RETAINED]
    assert api.body["metadata"]["finalizers"] == ["others"]
