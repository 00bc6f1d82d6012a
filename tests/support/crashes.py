"""An operator that crashes at a write to the API server, before or after its execution."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from redrive.api import Body
from redrive.kube import resources
from redrive.kube.resources import Key, Resource
from tests.support.fake_kubernetes import FakeKubernetes


class Crash(BaseException):
    """The end of a crashed operator."""


class Fault:
    """Makes an operator crash at one of its writes, and counts the writes.

    Args:
        at: the number of the write, counted from 1; 0 for none.
        done: execute that write, and lose only its answer.
    """

    def __init__(self, at: int, *, done: bool) -> None:
        self.at, self.done, self.count = at, done, 0

    async def befall(self, write: Callable[[], Awaitable[Any]]) -> Any:  # noqa: ANN401
        self.count += 1
        if self.count != self.at:
            return await write()
        if self.done:
            await write()
        raise Crash


class Faulty(FakeKubernetes):
    """An API server, and an operator that crashes at one of its writes there."""

    fault = Fault(0, done=False)

    async def patch(self, resource: Resource, key: Key, patch: Body) -> Body:
        body: Body = await self.fault.befall(
            lambda: super(Faulty, self).patch(resource, key, patch)
        )
        return body

    async def patch_status(
        self, resource: Resource, key: Key, status: Body, version: str | None = None
    ) -> Body:
        stored: Body = await self.fault.befall(
            lambda: super(Faulty, self).patch_status(resource, key, status, version)
        )
        return stored

    async def apply_status(
        self, resource: Resource, body: Body, status: Body, manager: str
    ) -> Body:
        stored: Body = await self.fault.befall(
            lambda: super(Faulty, self).apply_status(resource, body, status, manager)
        )
        return stored

    async def create(self, resource: Resource, body: Body) -> Body:
        if resource == resources.EVENTS:  # a lost Event changes nothing
            return await super().create(resource, body)
        stored: Body = await self.fault.befall(lambda: super(Faulty, self).create(resource, body))
        return stored

    async def delete(self, resource: Resource, body: Body) -> None:
        await self.fault.befall(lambda: super(Faulty, self).delete(resource, body))
