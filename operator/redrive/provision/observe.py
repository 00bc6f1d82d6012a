"""Observed state of a policy's topics, from reads only.

Topics and grants are read for a whole Pulsar namespace at once, and shared by policies that are
reconciled at the same time. The broker has no such call for subscriptions and topic policies.
"""

from __future__ import annotations

from dataclasses import replace

from redrive.admin.client import Admin
from redrive.admin.errors import AdminNotFoundError
from redrive.admin.model import NamespaceState, TopicMetadata
from redrive.api import Body
from redrive.kube import resources
from redrive.kube.client import NotFoundError as ObjectNotFoundError
from redrive.kube.context import Context
from redrive.kube.resources import Key, retained_config_map
from redrive.policy.naming import TopicName
from redrive.provision.checks import namespace_expires_subscriptions
from redrive.provision.desired import (
    POLICIES_OF_FIELDS,
    Desired,
    DesiredTopic,
    Observed,
    TopicState,
    inherited_policies,
    policies_in_force,
)
from redrive.provision.ownership import OwnershipRecord
from redrive.reasons import Reason

RECENT_SECONDS = 60.0
POLLED_SECONDS = 900.0
"""Maximum age of statistics that show subscriptions. Their poll enqueues a policy without one."""
AWAITED_SECONDS = 3.0
"""Maximum age of cached namespace data for policies that wait for a tenant, namespace or topic.

Such policies are reconciled up to 15 s apart, so the end of the wait is seen within 18 s. However
many they are, they cost their namespace at most four calls every 3 s.
"""


async def observe(
    desired: Desired, admin: Admin, ctx: Context, *, recent: bool = False
) -> Observed:
    """Read the observed state of *desired*: at the broker, and the ConfigMap.

    Args:
        recent: True accepts recent data of a poll or a watch for the Pulsar namespace and the
            ConfigMap. That is sufficient to see that no action is needed, never to act.

    Raises:
        TenantNotFound, NamespaceNotFound, TopicNotFound: the source topic, its namespace or its
            tenant does not exist.
        SubscriptionExpiry: the Pulsar namespace deletes idle subscriptions. This is checked before
            any topic is read, because it concerns all policies of the namespace.
        AdminError, KubernetesError: a read failed.
    """
    observed = await observe_broker(desired, admin, recent=recent)
    key = Key.of(desired.config_map)
    return replace(observed, config_map=await config_map(key, ctx, recent=recent))


async def observe_broker(desired: Desired, admin: Admin, *, recent: bool = False) -> Observed:
    """Read the observed state of *desired* at the broker; see `observe`."""
    age = RECENT_SECONDS if recent else 0.0
    namespace = await around(desired.policy.topic, admin, max_age=age)
    _check_expiry(desired.policy.topic, namespace)
    # A recent read never leads to an action, so it may leave properties out.
    source = await _source(desired.policy.topic, namespace, admin, whole=not recent)
    schema = await admin.schema(desired.policy.topic)
    states = [
        (topic.role, await _topic(topic, namespace, admin, recent=recent))
        for topic in desired.topics
    ]
    return Observed(
        source_partitions=source.partitions,
        source_properties=source.properties,
        source_schema=schema,
        topics={role: state for role, state in states if state is not None},
        unused=await _unused(desired.unused, namespace, admin),
        namespace=namespace,
        inherited=inherited_policies(namespace),
        settings=admin.settings,
    )


async def around(source: TopicName, admin: Admin, *, max_age: float) -> NamespaceState:
    """Read the Pulsar namespace of a source topic, and check that the topic exists.

    Args:
        source: the source topic.
        admin: client of the broker.
        max_age: maximum age in seconds of cached data.

    Raises:
        TenantNotFound, NamespaceNotFound, TopicNotFound: the source topic, its namespace or its
            tenant does not exist.
        AdminError: a read failed.
    """
    namespace = await _namespace(source, admin, max_age=max_age)
    _check_exists(source, namespace)
    return namespace


def in_namespace(want: Desired, namespace: NamespaceState, config_map: Body | None) -> Observed:
    """Return the observed state that one read of a Pulsar namespace shows.

    Args:
        want: desired state of a policy.
        namespace: state of its namespace. A topic without listed partitions counts as missing.
        config_map: any ConfigMap with the name of the policy's.

    Raises:
        TopicNotFound, SubscriptionExpiry: as for `observe`.
    """
    source = want.policy.topic
    _check_exists(source, namespace)
    _check_expiry(source, namespace)
    states = [(topic.role, _listed(topic, namespace)) for topic in want.topics]
    return Observed(
        source_partitions=max(namespace.partitions(source), str(source) in namespace.partitioned),
        topics={role: state for role, state in states if state is not None},
        namespace=namespace,
        inherited=inherited_policies(namespace),
        config_map=config_map,
    )


def _listed(want: DesiredTopic, namespace: NamespaceState) -> TopicState | None:
    partitions = namespace.partitions(want.name)
    listed = partitions > 0 or str(want.name) in namespace.unpartitioned
    return TopicState(partitions) if listed else None


def _check_expiry(source: TopicName, namespace: NamespaceState) -> None:
    expires = namespace_expires_subscriptions(source, namespace)
    if expires is not None:
        raise expires


def _check_exists(source: TopicName, namespace: NamespaceState) -> None:
    if not namespace.exists(source):
        raise Reason.TOPIC_NOT_FOUND.error(
            "the source topic does not exist",
            got=str(source),
            remedy="create it; the policy resumes automatically then",
        )


async def _namespace(source: TopicName, admin: Admin, *, max_age: float) -> NamespaceState:
    try:
        return await admin.namespace(source.namespace_name, max_age=max_age)
    except AdminNotFoundError as error:
        if not await admin.tenant_exists(source.tenant, max_age=max_age):
            raise Reason.TENANT_NOT_FOUND.error(
                "the source topic's tenant does not exist",
                got=source.tenant,
                remedy="create it; the policy resumes automatically then",
            ) from error
        raise Reason.NAMESPACE_NOT_FOUND.error(
            "the source topic's Pulsar namespace does not exist",
            got=source.namespace_name,
            remedy="create it; the policy resumes automatically then",
        ) from error


async def _topic(
    want: DesiredTopic, namespace: NamespaceState, admin: Admin, *, recent: bool
) -> TopicState | None:
    """Read a topic; of settled records only the existence, and the owner once.

    The calls for each topic limit how often a policy is polled, and a topic of records never
    changes after its creation. If Replays are enabled for a connection later, settled policies need
    ledgers.
    """
    if not (recent and want.role.holds_records):
        return await _whole(want, namespace, admin, POLLED_SECONDS if recent else 0.0)
    if want.is_recorded or not namespace.exists(want.name):
        return _listed(want, namespace)
    return await _marked(want.name, namespace, admin)


async def _whole(
    wanted: DesiredTopic, namespace: NamespaceState, admin: Admin, max_age: float
) -> TopicState | None:
    name = wanted.name
    if not namespace.exists(name):
        return None
    partitioned = str(name) in namespace.partitioned
    metadata = await admin.metadata(name, partitioned=partitioned)
    if namespace.partitions(name) < metadata.partitions:
        max_age = 0.0  # statistics do not show which partition is missing
    subscriptions = await admin.subscriptions(name, partitioned=partitioned, max_age=max_age)
    reads = {policy.read: policy for policy in wanted.policies}
    own = {read: await admin.topic_policy(name, policy) for read, policy in reads.items()}
    policies = policies_in_force(own, namespace)
    record = OwnershipRecord.of(metadata.properties)
    originals = {
        policy.name: await admin.topic_policy(name, policy, own=True)
        for policy in wanted.policies
        if (not record.created or policy.name in POLICIES_OF_FIELDS)
        and policy.name not in record.replaced
        and any(policy.writes(policies.get(policy.read)))
    }
    return TopicState(
        partitions=metadata.partitions,
        subscriptions=subscriptions,
        policies=policies,
        properties=metadata.properties,
        originals=originals,
        # A topic cannot be replicated further than its namespace: save the call.
        replicated_to=(
            await admin.replicated_to(name)
            if len(namespace.replicated_to) > 1
            else namespace.replicated_to
        ),
    )


async def _source(
    name: TopicName, namespace: NamespaceState, admin: Admin, *, whole: bool
) -> TopicMetadata:
    """Read the source topic; of one without partitions properties only if *whole*."""
    partitioned = str(name) in namespace.partitioned
    if partitioned or whole:
        return await admin.metadata(name, partitioned=partitioned)
    return TopicMetadata(0, {})


async def _unused(
    name: TopicName | None, namespace: NamespaceState, admin: Admin
) -> TopicState | None:
    """Read the owner of the former dead-letter topic, if roles have grants on it."""
    if name is None or not namespace.exists(name) or str(name) not in namespace.permissions:
        return None
    return await _marked(name, namespace, admin)


async def _marked(name: TopicName, namespace: NamespaceState, admin: Admin) -> TopicState:
    """Read the owner of a topic."""
    partitioned = str(name) in namespace.partitioned
    metadata = await admin.metadata(name, partitioned=partitioned)
    return TopicState(metadata.partitions, properties=metadata.properties)


async def config_map(key: Key, ctx: Context, *, recent: bool) -> Body | None:
    """Read any ConfigMap with the name of a policy's, in the form of the cache; see `observe`.

    Raises:
        KubernetesError: the read failed.
    """
    if recent and (cached := ctx.config_maps.get(key)) is not None:
        return cached
    try:
        return retained_config_map(await ctx.kubernetes.get(resources.CONFIG_MAPS, key))
    except ObjectNotFoundError:
        return None
