"""Which policies are not as they were left: what is told of many at once, never a call for each.

Called by `rounds`, and when a ConfigMap changes. What it finds has to be looked at; the look reads
again what it repairs.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from redrive.admin.client import Admin
from redrive.admin.errors import AdminError, BrokerUnreachableError, NotFoundError
from redrive.errors import RedriveError
from redrive.kube.context import Context
from redrive.kube.resources import Body, Key
from redrive.provision import drift
from redrive.provision.conflicts import Conflicts
from redrive.provision.desired import Desired, desired
from redrive.provision.facts import Request
from redrive.provision.resolve import admit, resolve

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NamespaceFacts:
    """Compares policies with what the watches and the brokers show.

    Attributes:
        conflicts: who has a claim on whose topics.
    """

    ctx: Context
    conflicts: Conflicts

    async def amiss(self, connection: Key, bodies: Iterable[Body]) -> list[Key]:
        """Return those of *bodies*, settled policies of *connection*, that need a look.

        Not those that only observe: they may differ for ever, and for them the rotation is soon
        enough.

        Three calls to the broker for each Pulsar namespace, however many policies are in it.

        Raises:
            RedriveError: the connection can't be used, or its broker can't be reached.
        """
        found: list[Key] = []
        namespaces: dict[str, list[Desired]] = defaultdict(list)
        for body in bodies:
            await asyncio.sleep(0)  # others come in between: a thousand policies take a while
            request = self._unrefused(body)
            if request is None:
                found.append(Key.of(body))
            elif not request.only_observes:
                wanted = self._desired(request, body)
                if self._lacks_config_map(wanted):
                    found.append(request.key)
                else:
                    namespaces[request.policy.topic.namespace_name].append(wanted)
        if namespaces:
            admin = (await self.ctx.brokers.open(connection)).admin
            for namespace, each in namespaces.items():
                found.extend(await _amiss_in(namespace, each, admin))
        return found

    def lacks_config_map(self, body: Body) -> bool:
        """Whether a settled policy has to be looked at for its ConfigMap."""
        request = self._unrefused(body)
        if request is None:
            return True
        return not request.only_observes and self._lacks_config_map(self._desired(request, body))

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

    def _lacks_config_map(self, wanted: Desired) -> bool:
        there = self.ctx.config_maps.get(Key.of(wanted.config_map))
        return drift.is_in_config_map(wanted, there)


async def _amiss_in(namespace: str, each: Iterable[Desired], admin: Admin) -> list[Key]:
    """Return the policies of which topics or grants in a Pulsar namespace are amiss."""
    try:
        there = await admin.namespace(namespace)
    except BrokerUnreachableError:
        raise
    except AdminError as error:
        logger.info("survey: %s", error)
        # What stays so is for each policy's status to say; all else may be over by the next time.
        stays = error.stalls or isinstance(error, NotFoundError)
        return [wanted.owner.key for wanted in each] if stays else []
    return [wanted.owner.key for wanted in each if drift.is_at_broker(wanted, there)]
