"""Calls that serve many requests at once: batches, cached reads, grants.

Change rights of roles in one Pulsar namespace, for many policies in one call.

Called by `client`. A broker keeps all rights of a namespace in one record, and every topic that is
loaded reads it again after each change: a call for each topic costs the square of their number.

A grant replaces all that the role could do on the topic. So the record is read right before it is
written, and what others gave since a policy was looked at stays. A broker has no conditional write:
what another client gives to the same role on the same topic between these two calls is lost.

Batches requests that are made at the same time into one call.

A broker keeps the permissions of a namespace in one record, and every write to it costs each
loaded topic a read; listing a namespace costs the same for one topic as for a thousand. So
requests that are made while a call is under way wait for its end, and then go out together.
Requests that may be made soon are announced; a call waits for them while they keep coming.

One read at a broker for all that want to know the same, now or a little later; see `Admin`.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

from redrive.admin.errors import AdminError, AdminNotFoundError, UnsupportedError
from redrive.admin.http import Call, permission_path
from redrive.admin.model import Grant, NamespaceState, RightsChange
from redrive.policy.naming import TopicName

logger = logging.getLogger(__name__)

Changes = Sequence[RightsChange]
Granter = Callable[[Changes], Awaitable[None]]
Permissions = Mapping[str, Mapping[str, frozenset[str]]]
"""Topic → role → actions."""
Place = tuple[TopicName, str]
"""A topic, and a role that has rights on it."""
Refusals = Mapping[Place, AdminError]

MAX_GAP_SECONDS = 2.0


class Granting:
    """Changes rights in one namespace, in one call for all that are announced together.

    Args:
        namespace: `tenant/namespace`.
        send: makes a call.
        permissions: reads all rights on topics of the namespace.
        read: reads what is in the namespace now.
    """

    def __init__(
        self,
        namespace: str,
        send: Callable[[Call], Awaitable[Any]],
        permissions: Callable[[], Awaitable[Permissions]],
        read: Callable[[], Awaitable[NamespaceState]],
    ) -> None:
        self._namespace = namespace
        self._send = send
        self._permissions = permissions
        self._read = read
        self._batcher: Batcher[Changes, Refusals] = Batcher(self._set, max_gap=MAX_GAP_SECONDS)

    @contextmanager
    def announced(self) -> Iterator[Granter]:
        """Announce that rights may be set within the block; see `Admin.granting`."""
        with self._batcher.announced() as submit:

            async def grant(changes: Changes) -> None:
                refusals = await submit(changes)
                for change in changes:
                    if (change.topic, change.role) in refusals:
                        raise refusals[change.topic, change.role]

            yield grant

    async def _set(self, requests: Sequence[Changes]) -> Refusals:
        changes = [change for request in requests for change in request]
        grants = _merged(changes, await self._permissions())
        given = [grant for grant in grants if grant.actions]
        taken = [grant for grant in grants if not grant.actions]
        refused = {
            **await self._together("grant", given),
            **await self._together("revoke", taken),
        }
        policies = len(requests)
        logger.info("%d rights in %s: set for %d policies", len(grants), self._namespace, policies)
        return refused

    async def _together(self, verb: str, grants: Sequence[Grant]) -> Refusals:
        """Set *grants* in one call; again without those whose topics are gone, if it is refused."""
        refused: dict[Place, AdminError] = {}
        while grants:
            try:
                await self._in_one_call(verb, grants)
            except UnsupportedError as error:
                logger.info("rights in %s: one by one, because: %s", self._namespace, error)
                return {**refused, **await self._one_by_one(grants)}
            except AdminNotFoundError:
                # One missing topic refuses the whole batch, and only one of them is named.
                there = await self._read()
                missing = [grant for grant in grants if not there.exists(grant.topic)]
                if not missing:
                    raise
                refused.update((_place(grant), _is_missing(verb, grant)) for grant in missing)
                grants = [grant for grant in grants if _place(grant) not in refused]
            else:
                break
        return refused

    async def _in_one_call(self, verb: str, grants: Sequence[Grant]) -> None:
        body = [
            {"topic": str(grant.topic), "role": grant.role, "actions": sorted(grant.actions)}
            for grant in grants
        ]
        does = f"{verb} {len(grants)} rights in {self._namespace}"
        await self._send(Call(does, "POST", f"namespaces/{verb}PermissionsOnTopics", body))

    async def _one_by_one(self, grants: Sequence[Grant]) -> Refusals:
        """Set in sequence: a broker answers parallel changes in one namespace with 409."""
        refusals = {}
        for grant in grants:
            path = permission_path(grant.topic, grant.role)
            on = f"on {grant.topic} to {grant.role}"
            call = Call(f"revoke all rights {on}", "DELETE", path)
            if grant.actions:
                actions = sorted(grant.actions)
                call = Call(f"grant {', '.join(actions)} {on}", "POST", path, actions)
            try:
                await self._send(call)
            except AdminError as error:
                refusals[_place(grant)] = error
        return refusals


def _merged(changes: Changes, permissions: Permissions) -> tuple[Grant, ...]:
    """Return what has to be written so that *changes* are in force beside all other rights."""
    after: dict[Place, frozenset[str]] = {}
    for change in changes:
        place = change.topic, change.role
        after[place] = change.on(after.get(place, _may(permissions, *place)))
    return tuple(
        Grant(topic, role, actions)
        for (topic, role), actions in after.items()
        if actions != _may(permissions, topic, role)
    )


def _may(permissions: Permissions, topic: TopicName, role: str) -> frozenset[str]:
    return permissions.get(str(topic), {}).get(role, frozenset())


def _place(grant: Grant) -> Place:
    return grant.topic, grant.role


def _is_missing(verb: str, grant: Grant) -> AdminNotFoundError:
    return AdminNotFoundError(
        f"the topic is gone on which to {verb} rights of {grant.role}",
        got=str(grant.topic),
        remedy="create it",
    )


Request = TypeVar("Request")
Result = TypeVar("Result")


class Batcher(Generic[Request, Result]):
    """Collects requests while a call is under way, then makes one call for all of them.

    A request gets the result of a call that began after the request was made, so a result is never
    older than its request. At most one call is under way. When a call fails, all of its requests
    get its error; a request that is cancelled does not disturb the others.

    Args:
        call: makes the call for a list of requests.
        max_gap: the seconds that a call waits for the next of the requests that are announced. It
            waits for those alone that were announced before its turn: later announcements, however
            many, never delay it.
    """

    def __init__(
        self, call: Callable[[Sequence[Request]], Awaitable[Result]], *, max_gap: float = 0.0
    ) -> None:
        self._call = call
        self._max_gap = max_gap
        self._requests: list[Request] = []
        self._next: asyncio.Task[Result] | None = None
        self._turn = asyncio.Lock()
        self._announced: set[object] = set()
        self._one_came = asyncio.Event()

    async def submit(self, request: Request) -> Result:
        """Return the result of the call that *request* is part of."""
        self._requests.append(request)
        if self._next is None:
            # In an empty context: what it logs is about none of the objects that wait for it.
            self._next = asyncio.create_task(self._run(), context=contextvars.Context())
        return await asyncio.shield(self._next)

    @contextmanager
    def announced(self) -> Iterator[Callable[[Request], Awaitable[Result]]]:
        """Announce one request, to be made within the block by what this yields, or not at all."""
        announcement = object()
        self._announced.add(announcement)

        def came() -> None:
            self._announced.discard(announcement)
            self._one_came.set()

        async def submit(request: Request) -> Result:
            came()
            return await self.submit(request)

        try:
            yield submit
        finally:
            came()

    async def _run(self) -> Result:
        async with self._turn:
            await self._collect(frozenset(self._announced))
            requests, self._requests, self._next = self._requests, [], None
            return await self._call(requests)

    async def _collect(self, announced: frozenset[object]) -> None:
        """Return once all of *announced* came, or none of them came for `max_gap`."""
        with suppress(TimeoutError):
            while waited_for := announced & self._announced:
                async with asyncio.timeout(self._max_gap):
                    while waited_for <= self._announced:
                        self._one_came.clear()
                        await self._one_came.wait()


Answer = TypeVar("Answer")


class CachedRead(Generic[Answer]):
    """A read that is shared by all callers at the same time, and its last answer.

    That something does not exist is cached too: many policies may wait for the same missing topic.
    Any other failure is not.

    Args:
        read: reads it from the broker.
    """

    def __init__(self, read: Callable[[], Awaitable[Answer]]) -> None:
        self._read = read
        self._reads = Batcher[None, Answer | AdminNotFoundError](lambda _: self._outcome())
        self._known: tuple[float, Answer | AdminNotFoundError] | None = None

    async def get(self, *, max_age: float) -> Answer:
        """Return what was read less than *max_age* seconds ago, or read it now.

        Raises:
            AdminNotFoundError: it does not exist, or did not then.
            AdminError: the read failed.
        """
        asked = asyncio.get_running_loop().time()
        if self._known is not None and asked - self._known[0] < max_age:
            found = self._known[1]
        else:
            found = await self._reads.submit(None)
            self._known = asked, found
        if isinstance(found, AdminNotFoundError):
            # Its traceback would grow with every caller that it is raised to.
            raise found.with_traceback(None)
        return found

    async def _outcome(self) -> Answer | AdminNotFoundError:
        try:
            return await self._read()
        except AdminNotFoundError as error:
            return error
