"""Change rights of roles in one Pulsar namespace, for many policies in one call.

Called by `client`. A broker keeps all rights of a namespace in one record, and every topic that is
loaded reads it again after each change: a call for each topic costs the square of their number.

A grant replaces all that the role could do on the topic. So the record is read right before it is
written, and what others gave since a policy was looked at stays. A broker has no conditional write:
what another client gives to the same role on the same topic between these two calls is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from redrive.admin.batcher import Batcher
from redrive.admin.errors import AdminError, AdminNotFoundError, UnsupportedError
from redrive.admin.http import Call
from redrive.admin.model import Grant, NamespaceState, RightsChange
from redrive.admin.paths import permission_path
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
