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
from redrive.provision import conditions, drift
from redrive.provision.claims import Claims
from redrive.provision.desired import Desired, desired
from redrive.provision.facts import Asked
from redrive.provision.gather import gather, gather_admissible

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Survey:
    """Compares policies with what the watches and the brokers show.

    Attributes:
        claims: who has a claim on whose topics.
    """

    ctx: Context
    claims: Claims

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
            asked = self._unrefused(body)
            if asked is None:
                found.append(Key.of(body))
            elif not asked.only_observes:
                wanted = self._desired(asked, body)
                if self._lacks_config_map(wanted):
                    found.append(asked.key)
                else:
                    namespaces[asked.policy.topic.namespace_name].append(wanted)
        if namespaces:
            admin = (await self.ctx.brokers.open(connection)).admin
            for namespace, each in namespaces.items():
                found.extend(await _amiss_in(namespace, each, admin))
        return found

    def lacks_config_map(self, body: Body) -> bool:
        """Whether a settled policy has to be looked at for its ConfigMap."""
        asked = self._unrefused(body)
        if asked is None:
            return True
        return not asked.only_observes and self._lacks_config_map(self._desired(asked, body))

    def _unrefused(self, body: Body) -> Asked | None:
        """Return what a policy asks for, or None if it is to be refused."""
        try:
            asked = gather(body, self.ctx)
        except RedriveError:
            return None
        rivals = gather_admissible(self.claims.rivals(asked.key), self.ctx)
        if (
            conditions.first_violation(conditions.ADMISSIBLE, asked) is not None
            or conditions.older_rival(asked, rivals) is not None
        ):
            return None
        return asked

    def _desired(self, asked: Asked, body: Body) -> Desired:
        return desired(asked, body, self.ctx.settings.cluster_id)

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
