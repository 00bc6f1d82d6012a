"""Parts of a launch of an Inspection that differ by the kind of its policy.

`BROKERS` has one member for each kind: the access of jobs that a connection gives, and the messages
of a policy.
"""

from __future__ import annotations

from typing import Protocol

from redrive.api import Body
from redrive.api.inspection import InspectedMessages
from redrive.api.model import parse_spec
from redrive.api.rocketmq import RocketMQMessages, RocketMQRetryPolicySpec
from redrive.inspection.checks import (
    InspectionAccess,
    dead_letters_are_discarded,
    pulsar_access,
    rocketmq_access,
)
from redrive.inspection.job import PulsarMessages
from redrive.kube import connections, resources
from redrive.kube.connections import connection_of, rocketmq_at, spec_at
from redrive.kube.context import Context
from redrive.kube.resources import Key
from redrive.kube.rocketmq import cluster_of
from redrive.policy.naming import TopicName
from redrive.reasons import Reason
from redrive.replay.controller.admission import used_policy

_GRANTS_SECONDS = 5.0
"""Maximum age of the grants that pending Inspections of all namespaces read."""


class InspectionBroker(Protocol):
    """Kind of broker, by the kind of its policies."""

    def access(self, through: Key, namespace: str, ctx: Context) -> InspectionAccess:
        """Return the access that the connection *through* gives to jobs of *namespace*.

        Raises:
            RedriveError: the connection gives none, or not to the namespace.
        """

    async def messages(
        self, policy: Body, source: InspectedMessages, access: InspectionAccess, ctx: Context
    ) -> PulsarMessages | RocketMQMessages:
        """Return the messages of a Ready policy, which *access* permits to read.

        Raises:
            RedriveError: the policy has none, or they may not be read yet.
        """


class _Pulsar:
    def access(self, through: Key, namespace: str, ctx: Context) -> InspectionAccess:
        spec = connections.find_at(through, namespace, ctx.connections, ctx.namespaces)
        return pulsar_access(spec, through)

    async def messages(
        self, policy: Body, source: InspectedMessages, access: InspectionAccess, ctx: Context
    ) -> PulsarMessages:
        _, connection, _, used = used_policy(policy, ctx)
        if error := dead_letters_are_discarded(source, used):
            raise error
        is_retry = source is InspectedMessages.RETRY
        topic = used.retry_topic if is_retry else used.dead_letter_topic
        await self._check_granted(topic, access.role, connection_of(policy), ctx)
        pulsar = connection.pulsar
        subscription = used.subscription if is_retry else used.dead_letter_subscription
        return PulsarMessages(str(topic), subscription, pulsar.service_url, pulsar.admin_url)

    async def _check_granted(self, topic: TopicName, role: str, through: Key, ctx: Context) -> None:
        """Check that the policy has granted the role its right, which follows a spec change.

        Raises:
            InspectionRoleNotGranted: it has not.
            RedriveError: the broker does not answer.
        """
        connection = await ctx.brokers.open(through)
        namespace = await connection.admin.namespace(topic.namespace_name, max_age=_GRANTS_SECONDS)
        if "consume" not in namespace.permissions.get(str(topic), {}).get(role, frozenset()):
            raise Reason.INSPECTION_ROLE_NOT_GRANTED.error(
                f"the policy has not granted consume on {topic} to the inspection role yet",
                got=role,
                remedy="No action needed: this Inspection starts automatically then",
            )


class _RocketMQ:
    def access(self, through: Key, namespace: str, ctx: Context) -> InspectionAccess:
        cluster, _ = rocketmq_at(through, namespace, ctx.connections, ctx.namespaces)
        return rocketmq_access(cluster, through)

    async def messages(
        self,
        policy: Body,
        source: InspectedMessages,  # noqa: ARG002  the access permits no retries
        access: InspectionAccess,  # noqa: ARG002  of the group
        ctx: Context,
    ) -> RocketMQMessages:
        key = connection_of(policy)
        cluster = cluster_of(spec_at(key, ctx.connections), key)
        spec = parse_spec(RocketMQRetryPolicySpec, policy)
        return cluster.messages(spec.dead_letter_topic, spec.group)


BROKERS: dict[str, InspectionBroker] = {
    resources.POLICIES.kind: _Pulsar(),
    resources.ROCKETMQ_POLICIES.kind: _RocketMQ(),
}
