"""Which settled policies are amiss, by what many of them are told at once: never a call for each.

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
from redrive.cluster.resources import Body, Key
from redrive.cluster.world import World
from redrive.errors import RedriveError
from redrive.provision import conditions, drift, errors
from redrive.provision.claims import Claims
from redrive.provision.desired import Desired, config_map_name, desired
from redrive.provision.gather import gather, gather_admissible

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Survey:
    """Compares policies with what the watches and the brokers show.

    Attributes:
        claims: who has a claim on whose topics.
    """

    world: World
    claims: Claims

    async def amiss(self, connection: Key, bodies: Iterable[Body]) -> list[Key]:
        """Return those of *bodies*, settled policies of *connection*, that need a look.

        Three calls to the broker for each Pulsar namespace, however many policies are in it.

        Raises:
            RedriveError: the connection can't be used, or its broker can't be reached.
        """
        found: list[Key] = []
        namespaces: dict[str, list[tuple[Key, Desired]]] = defaultdict(list)
        for body in bodies:
            await asyncio.sleep(0)  # others come in between: a thousand policies take a while
            key, wanted = Key.of(body), self.unrefused(body)
            if wanted is None or self._lacks_config_map(key, wanted):
                found.append(key)
            else:
                namespaces[wanted.policy.topic.namespace_name].append((key, wanted))
        if namespaces:
            admin = (await self.world.brokers.open(connection)).admin
            for namespace, policies in namespaces.items():
                found.extend(await _amiss_in(namespace, policies, admin))
        return found

    def lacks_config_map(self, body: Body) -> bool:
        """Whether a settled policy has to be looked at for its ConfigMap."""
        wanted = self.unrefused(body)
        return wanted is None or self._lacks_config_map(Key.of(body), wanted)

    def unrefused(self, body: Body) -> Desired | None:
        """Return what a policy needs, or None if it is to be refused."""
        try:
            asked = gather(body, self.world)
        except RedriveError:
            return None
        rivals = gather_admissible(self.claims.rivals(asked.key), self.world)
        if (
            conditions.first_violation(conditions.ADMISSIBLE, asked) is not None
            or conditions.older_rival(asked, rivals) is not None
        ):
            return None
        return desired(asked, body, self.world.settings.cluster_id)

    def _lacks_config_map(self, key: Key, wanted: Desired) -> bool:
        there = self.world.config_maps.get(Key(key.namespace, config_map_name(key.name)))
        return drift.is_in_config_map(wanted, there)


async def _amiss_in(
    namespace: str, policies: Iterable[tuple[Key, Desired]], admin: Admin
) -> list[Key]:
    """Return those of *policies* whose topics or grants in a Pulsar namespace are amiss."""
    try:
        there = await admin.namespace(namespace)
    except BrokerUnreachableError:
        raise
    except AdminError as error:
        logger.info("survey: %s", error)
        # What stays so is for each policy's status to say; all else may be over by the next time.
        stays = isinstance(error, (NotFoundError, *errors.STALLS))
        return [key for key, _ in policies] if stays else []
    return [key for key, wanted in policies if drift.is_at_broker(wanted, there)]
