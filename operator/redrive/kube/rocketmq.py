"""BrokerConnections of RocketMQ clusters, and their rules for the policies of a namespace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from redrive.admin.model import ROCKETMQ_RELEASES
from redrive.admin.rocketmq import RocketMQAdmin
from redrive.api.connection import BrokerConnectionSpec
from redrive.api.rocketmq import RocketMQCluster, RocketMQRule
from redrive.errors import RedriveError
from redrive.kube.resources import Key
from redrive.reasons import Reason


@dataclass(frozen=True)
class RocketMQConnection:
    """A BrokerConnection of a RocketMQ cluster that may be used, with an authenticated client.

    Attributes:
        rules: its rules for the object that uses it.
        has_replays: True if it has credentials for Replays.
    """

    key: Key
    admin: RocketMQAdmin
    rules: tuple[RocketMQRule, ...] = ()
    has_replays: bool = False
    supported: ClassVar = ROCKETMQ_RELEASES

    async def probe(self) -> tuple[int, ...]:
        """Check that each master accepts the credentials; return their oldest release.

        Raises:
            AdminError: a server does not answer, or refuses the call.
        """
        async with self.admin.session() as session:
            return min([await session.version(master) for master in await session.masters()])


def cluster_of(spec: BrokerConnectionSpec, key: Key) -> RocketMQCluster:
    """Return the cluster of the connection *key*.

    Raises:
        RedriveError: the connection is for Pulsar.
    """
    if spec.rocketmq is None:
        raise Reason.OTHER_BROKER.error(
            "the connection is for Pulsar, and this object needs RocketMQ",
            got=str(key),
            remedy="refer to another BrokerConnection, or create a RetryPolicy",
        )
    return spec.rocketmq


def rules_at(
    spec: BrokerConnectionSpec, key: Key, namespace: str, labels: Mapping[str, str]
) -> tuple[RocketMQRule, ...]:
    """Return the rules of the connection *key* for objects of *namespace*, which has *labels*.

    Raises:
        RedriveError: the connection is for Pulsar, or has no such rule.
    """
    rules = cluster_of(spec, key).allow
    applying = tuple(rule for rule in rules if rule.is_for(namespace, labels, key.namespace))
    if not applying:
        raise not_allowed(key, namespace, "spec.rocketmq.allow")
    return applying


def not_allowed(key: Key, namespace: str, rules: str) -> RedriveError:
    """Return the error of an object whose namespace has none of the *rules* of a connection."""
    return Reason.NAMESPACE_NOT_ALLOWED.error(
        f"the BrokerConnection {key} may not be used from this namespace",
        got=namespace,
        remedy=f"add the namespace to a rule of its {rules}, or use another connection",
    )
