"""Batches, cached reads, and changes of grants: calls that serve many callers at once.

A broker keeps all grants of a namespace in one record. Every loaded topic reads it again after each
change, so a call for each topic costs the square of their number. `Granting` changes the grants of
many policies in one call. A grant replaces all actions of a role on a topic. So the record is read
immediately before the write, and grants that others added meanwhile are kept. A broker has no
conditional write: grants that another client adds to the same role and topic between the two calls
are lost.

`Batcher` combines requests: those that come while a call is under way wait for its end, and are
then sent together. A call also waits for announced requests while they keep coming. `CachedRead`
shares one read, and its result, among all callers.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
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
"""A topic, and a role that has grants on it."""
Refusals = Mapping[Place, AdminError]

MAX_GAP_SECONDS = 2.0


class Granting:
    """Changes grants in one namespace, in one call for all changes announced together.

    Args:
        namespace: `tenant/namespace`.
        send: sends a call.
        permissions: reads all grants on topics of the namespace.
        read: reads the topics of the namespace.
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
        """Announce a possible change within the block; see `Admin.granting`."""
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
        granted = [grant for grant in grants if grant.actions]
        revoked = [grant for grant in grants if not grant.actions]
        refused = {
            **await self._together("grant", granted),
            **await self._together("revoke", revoked),
        }
        policies = len(requests)
        logger.info("%d grants in %s: set for %d policies", len(grants), self._namespace, policies)
        return refused

    async def _together(self, verb: str, grants: Sequence[Grant]) -> Refusals:
        """Set *grants* in one call; if topics are missing, again without them."""
        refused: dict[Place, AdminError] = {}
        while grants:
            try:
                await self._in_one_call(verb, grants)
            except UnsupportedError as error:
                logger.info("grants in %s: one by one, because: %s", self._namespace, error)
                return {**refused, **await self._one_by_one(grants)}
            except AdminNotFoundError:
                # One missing topic refuses the whole batch, and the answer names only one.
                namespace = await self._read()
                missing = [grant for grant in grants if not namespace.exists(grant.topic)]
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
        does = f"{verb} {len(grants)} permissions in {self._namespace}"
        await self._send(Call(does, "POST", f"namespaces/{verb}PermissionsOnTopics", body))

    async def _one_by_one(self, grants: Sequence[Grant]) -> Refusals:
        """Set them in sequence: a broker answers parallel changes in one namespace with 409."""
        refusals = {}
        for grant in grants:
            path = permission_path(grant.topic, grant.role)
            on = f"on {grant.topic} to {grant.role}"
            call = Call(f"revoke all permissions {on}", "DELETE", path)
            if grant.actions:
                actions = sorted(grant.actions)
                call = Call(f"grant {', '.join(actions)} {on}", "POST", path, actions)
            try:
                await self._send(call)
            except AdminError as error:
                refusals[_place(grant)] = error
        return refusals


def _merged(changes: Changes, permissions: Permissions) -> tuple[Grant, ...]:
    """Return the grants to write for *changes*, with all other actions kept."""
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
        f"cannot {verb} permissions of {grant.role}: the topic does not exist",
        got=str(grant.topic),
        remedy="create it",
    )


Request = TypeVar("Request")
Result = TypeVar("Result")


class Batcher(Generic[Request, Result]):
    """Collects requests while a call is under way, then makes one call for all of them.

    A request gets the result of a call that began after the request, so a result is never older
    than its request. At most one call is under way. A failed call fails all of its requests; a
    cancelled request does not affect the others.

    Args:
        call: makes the call for a list of requests.
        max_gap: maximum seconds that a call waits for the next announced request. It waits only
            for requests announced before its start: later announcements never delay it.
    """

    def __init__(
        self, call: Callable[[Sequence[Request]], Awaitable[Result]], *, max_gap: float = 0.0
    ) -> None:
        self._call = call
        self._max_gap = max_gap
        self._requests: list[Request] = []
        self._next: asyncio.Task[Result] | None = None
        self._running = asyncio.Lock()
        self._announced: set[object] = set()
        self._one_came = asyncio.Event()

    async def submit(self, request: Request) -> Result:
        """Return the result of the call that includes *request*."""
        self._requests.append(request)
        if self._next is None:
            # In an empty context: its log entries belong to none of the waiting objects.
            self._next = asyncio.create_task(self._run(), context=contextvars.Context())
        return await asyncio.shield(self._next)

    @contextmanager
    def announced(self) -> Iterator[Callable[[Request], Awaitable[Result]]]:
        """Announce one request within the block, to be made by the yielded function, or not."""
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
        async with self._running:
            await self._collect(frozenset(self._announced))
            requests, self._requests, self._next = self._requests, [], None
            return await self._call(requests)

    async def _collect(self, announced: frozenset[object]) -> None:
        """Return when all of *announced* came, or none of them came for `max_gap`."""
        with suppress(TimeoutError):
            while waited_for := announced & self._announced:
                async with asyncio.timeout(self._max_gap):
                    while waited_for <= self._announced:
                        self._one_came.clear()
                        await self._one_came.wait()


Answer = TypeVar("Answer")


class CachedRead(Generic[Answer]):
    """A read that concurrent callers share, and its latest answer.

    Absence is cached, too: many policies may wait for one missing topic. Other failures are not.

    Args:
        read: reads from the broker.
    """

    def __init__(self, read: Callable[[], Awaitable[Answer]]) -> None:
        self._read = read
        self._reads = Batcher[None, Answer | AdminNotFoundError](lambda _: self._outcome())
        self._cached: tuple[float, Answer | AdminNotFoundError] | None = None

    async def get(self, *, max_age: float) -> Answer:
        """Return the answer of a read at most *max_age* seconds ago, or read now.

        Raises:
            AdminNotFoundError: it does not exist, or did not then.
            AdminError: the read failed.
        """
        asked = asyncio.get_running_loop().time()
        if self._cached is not None and asked - self._cached[0] < max_age:
            answer = self._cached[1]
        else:
            answer = await self._reads.submit(None)
            self._cached = asked, answer
        if isinstance(answer, AdminNotFoundError):
            # The traceback of a shared instance would grow with every raise.
            raise answer.with_traceback(None)
        return answer

    async def _outcome(self) -> Answer | AdminNotFoundError:
        try:
            return await self._read()
        except AdminNotFoundError as error:
            return error


class CachedReads(Generic[Answer]):
    """A `CachedRead` for each name.

    Args:
        read: reads the answer for a name from the broker.
    """

    def __init__(self, read: Callable[[str], Awaitable[Answer]]) -> None:
        self._read = read
        self._reads: dict[str, CachedRead[Answer]] = {}

    async def get(self, name: str, *, max_age: float) -> Answer:
        """Return the answer for *name*; see `CachedRead.get`."""
        if name not in self._reads:
            self._reads[name] = CachedRead(functools.partial(self._read, name))
        return await self._reads[name].get(max_age=max_age)
