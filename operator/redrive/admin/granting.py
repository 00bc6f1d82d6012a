"""What roles may do in one Pulsar namespace, set for many policies in one call.

Called by `client`. A broker keeps all rights of a namespace in one record, and every topic that is
loaded reads it again after each change: a call for each topic costs the square of their number.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from redrive.admin.errors import AdminError, NotFoundError, UnsupportedError
from redrive.admin.gathering import Gathering
from redrive.admin.http import Call
from redrive.admin.model import Grant
from redrive.admin.paths import permission_path

logger = logging.getLogger(__name__)

Grants = Sequence[Grant]
Granter = Callable[[Grants], Awaitable[None]]
Refusals = Mapping[Grant, AdminError]

PATIENCE_SECONDS = 2.0


class Granting:
    """Sets rights in one namespace, for all who announced themselves together.

    Args:
        namespace: `tenant/namespace`.
        send: makes a call.
    """

    def __init__(self, namespace: str, send: Callable[[Call], Awaitable[Any]]) -> None:
        self._namespace = namespace
        self._send = send
        self._gathering: Gathering[Grants, Refusals] = Gathering(
            self._set, patience=PATIENCE_SECONDS
        )

    @contextmanager
    def announced(self) -> Iterator[Granter]:
        """Announce that rights may be set within the block; see `Admin.granting`."""
        with self._gathering.announced() as ask:

            async def grant(grants: Grants) -> None:
                refusals = await ask(grants)
                for grant in grants:
                    if grant in refusals:
                        raise refusals[grant]

            yield grant

    async def _set(self, asks: Sequence[Grants]) -> Refusals:
        grants = [grant for ask in asks for grant in ask]
        given = [grant for grant in grants if grant.actions]
        taken = [grant for grant in grants if not grant.actions]
        refused = {
            **await self._in_one_call("grant", given),
            **await self._in_one_call("revoke", taken),
        }
        logger.info("%d rights in %s: set for %d policies", len(grants), self._namespace, len(asks))
        return refused

    async def _in_one_call(self, verb: str, grants: Grants) -> Refusals:
        if not grants:
            return {}
        does = f"{verb} {len(grants)} rights in {self._namespace}"
        try:
            body = [
                {"topic": str(grant.topic), "role": grant.role, "actions": sorted(grant.actions)}
                for grant in grants
            ]
            await self._send(Call(does, "POST", f"namespaces/{verb}PermissionsOnTopics", body))
        except (NotFoundError, UnsupportedError) as error:
            # One missing topic refuses the whole batch, and not every broker knows batches (4.0.8
            # does).
            logger.info("%s: one by one, because: %s", does, error)
            return await self._one_by_one(grants)
        return {}

    async def _one_by_one(self, grants: Grants) -> Refusals:
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
                refusals[grant] = error
        return refusals
