"""Which settled policies have drifted, as far as one read of a Pulsar namespace shows for all.

Called by `resync`, and when a ConfigMap changes. A policy that is found here is reconciled, which
reads again what it repairs.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from redrive.admin.client import Admin
from redrive.admin.errors import AdminError, AdminNotFoundError, BrokerUnreachableError
from redrive.admin.model import NamespaceState
from redrive.errors import RedriveError
from redrive.kube.context import Context
from redrive.kube.resources import Body, Key
from redrive.provision import observe
from redrive.provision.conflicts import Conflicts
from redrive.provision.desired import Desired, desired
from redrive.provision.diff import config_map_actions, diff
from redrive.provision.facts import Request
from redrive.provision.preflight_checks import is_of_the_other_kind
from redrive.provision.resolve import admit, resolve

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NamespaceFacts:
    """Compares policies with what the watches and lists of the brokers show.

    Attributes:
        conflicts: which policies claim the same names.
    """

    ctx: Context
    conflicts: Conflicts

    async def drifted(self, connection: Key, bodies: Iterable[Body]) -> list[Key]:
        """Return those of *bodies*, settled policies of *connection*, that have drifted.

        Policies that only observe are left to the rotation: they may differ for ever.

        Three calls to the broker for each Pulsar namespace, however many policies are in it.

        Raises:
            RedriveError: the connection can't be used, or its broker can't be reached.
        """
        found: list[Key] = []
        namespaces: dict[str, list[tuple[Request, Body]]] = defaultdict(list)
        for body in bodies:
            await asyncio.sleep(0)  # others come in between: a thousand policies take a while
            request = self._unrefused(body)
            if request is None:
                found.append(Key.of(body))
            elif not request.only_observes:
                namespaces[request.policy.topic.namespace_name].append((request, body))
        if namespaces:
            admin = (await self.ctx.brokers.open(connection)).admin
            for namespace, each in namespaces.items():
                found.extend(await self._drifted_in(namespace, each, admin))
        return found

    def lacks_config_map(self, body: Body) -> bool:
        """Whether a settled policy has to be reconciled for its ConfigMap."""
        request = self._unrefused(body)
        if request is None:
            return True
        if request.only_observes:
            return False
        wanted = self._desired(request, body).config_map
        return any(config_map_actions(wanted, self.ctx.config_maps.get(Key.of(wanted))))

    def _unrefused(self, body: Body) -> Request | None:
        """Return what a policy asks for, or None if it is to be refused."""
        try:
            request = resolve(body, self.ctx)
            admit(request, self.ctx, self.conflicts)
        except RedriveError:
            return None
        return request

    def _desired(self, request: Request, body: Body) -> Desired:
        return desired(request, body, self.ctx.settings.cluster_id)

    async def _drifted_in(
        self, namespace: str, each: Iterable[tuple[Request, Body]], admin: Admin
    ) -> list[Key]:
        try:
            there = await admin.namespace(namespace)
        except BrokerUnreachableError:
            raise
        except AdminError as error:
            logger.info("resync of Pulsar namespace %s: %s", namespace, error)
            # What stays so is for each policy's status; the rest may be over by the next time.
            stays = error.stalls or isinstance(error, AdminNotFoundError)
            return [request.key for request, _ in each] if stays else []
        found = []
        for request, body in each:
            await asyncio.sleep(0)
            wanted = self._desired(request, body)
            config_map = self.ctx.config_maps.get(Key.of(wanted.config_map))
            if has_drifted(wanted, there, config_map):
                found.append(request.key)
        return found


def has_drifted(wanted: Desired, namespace: NamespaceState, config_map: Body | None) -> bool:
    """Whether what is listed of a policy that was ready is not as it needs it."""
    try:
        have = observe.in_namespace(wanted, namespace, config_map)
    except RedriveError:
        return True
    return is_of_the_other_kind(wanted, have) or bool(diff(wanted, have))
