"""Parts of a launch of an Inspection that differ by the kind of its policy.

`BROKERS` has one member for each kind: the access of jobs that a connection gives, and the messages
of a policy.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from redrive.api import Body
from redrive.api.connection import Destination, InspectionIdentity
from redrive.api.inspection import InspectedMessages
from redrive.api.job import ConnectionJobs
from redrive.api.model import parse_spec
from redrive.api.permissions import Consent
from redrive.api.rocketmq import (
    RocketMQInspection,
    RocketMQMessages,
    RocketMQRetryPolicySpec,
)
from redrive.errors import RedriveError
from redrive.inspection.job import PulsarMessages
from redrive.kube import connections, resources
from redrive.kube.connections import connection_of, spec_at
from redrive.kube.context import Context
from redrive.kube.resources import Key
from redrive.kube.rocketmq import cluster_of, rules_at
from redrive.policy.naming import TopicName
from redrive.reasons import Reason
from redrive.replay.controller.admission import used_policy

_GRANTS_SECONDS = 5.0
"""Maximum age of the grants that pending Inspections of all namespaces read."""


class InspectionAccess(NamedTuple):
    """Access of jobs that a connection gives to Inspections of a namespace.

    Attributes:
        redirect_hosts: hosts that requests may be redirected to, see `Access.hosts`.
        jobs: limits of the job templates.
        reads_retries: True if messages that wait for a retry may be read.
        destinations: places for files.
        role: to which the policy grants its rights; empty without grants.
    """

    identity: InspectionIdentity | RocketMQInspection
    redirect_hosts: tuple[str, ...] = ()
    jobs: ConnectionJobs | None = None
    reads_retries: bool = False
    destinations: tuple[Destination, ...] = ()
    role: str = ""


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
        identity, pulsar = spec.inspection, spec.pulsar
        if identity is None:
            raise _no_identity(
                through, "spec.inspection, with a role and where its credentials lie"
            )
        if pulsar.tls is not None and identity.tls is None:
            raise _no_trust(through, "spec.pulsar.tls", "spec.inspection.tls")
        return InspectionAccess(
            identity,
            pulsar.redirect_hosts,
            spec.jobs,
            identity.retry_topics is Consent.ALLOWED,
            identity.destinations,
            identity.role,
        )

    async def messages(
        self, policy: Body, source: InspectedMessages, access: InspectionAccess, ctx: Context
    ) -> PulsarMessages:
        _, connection, _, used = used_policy(policy, ctx)
        is_retry = source is InspectedMessages.RETRY
        if not is_retry and not used.dead_letters:
            raise Reason.DEAD_LETTERS_DISCARDED.error(
                "the RetryPolicy discards its dead letters, so none can be inspected",
                remedy="set its deadLetter.mode to Keep, or inspect messages from: Retry",
            )
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
        spec = spec_at(through, ctx.connections)
        cluster = cluster_of(spec, through)
        labels = ctx.namespaces.of(namespace) if spec.selects_namespaces else {}
        rules_at(spec, through, namespace, labels)
        if cluster.inspection is None:
            raise _no_identity(through, "spec.rocketmq.inspection, with an access key for jobs")
        if cluster.tls is not None and cluster.inspection.tls is None:
            raise _no_trust(through, "spec.rocketmq.tls", "spec.rocketmq.inspection.tls")
        return InspectionAccess(cluster.inspection)

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


def _no_identity(through: Key, field: str) -> RedriveError:
    return Reason.INSPECTION_IDENTITY_MISSING.error(
        f"the BrokerConnection {through} names no role for Inspections", remedy=f"give it {field}"
    )


def _no_trust(through: Key, field: str, missing: str) -> RedriveError:
    return Reason.TRUST_NOT_SUPPORTED.error(
        f"the BrokerConnection {through} has certificate authorities of its own, and names "
        "none for Inspections",
        got=f"{field} without {missing}",
        remedy=f"store them in the namespaces of Inspections, and name them in {missing}",
    )
