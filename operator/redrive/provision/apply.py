"""Execution of actions, one after the other.

After a crash the next reconcile performs the remaining actions: `diff` compares observed state.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from redrive.admin.client import Admin
from redrive.admin.errors import (
    AdminConflictError,
    AdminError,
    AdminForbiddenError,
    BrokerRefusedError,
    UnsupportedError,
)
from redrive.admin.granting import Granter
from redrive.kube import resources
from redrive.kube.client import Kubernetes
from redrive.kube.resources import Key
from redrive.policy.naming import PARTITION_SUFFIX, TopicName
from redrive.provision import actions, ownership
from redrive.reasons import Reason


@dataclass
class Applied:
    """Results of actions.

    Attributes:
        done: actions that changed something, in order.
        refused: actions that the broker refused.
        in_force: topic policies of new topics by their read name, where the value was unknown
            before.
    """

    done: list[actions.Action] = field(default_factory=list)
    refused: list[actions.Refused] = field(default_factory=list)
    in_force: dict[str, Any] = field(default_factory=dict)


async def apply(
    planned: Iterable[actions.Action], admin: Admin, grant: Granter, kubernetes: Kubernetes | None
) -> Applied:
    """Perform *planned* actions in order, and return the results.

    Args:
        grant: changes grants, together with other callers that announced theirs to *admin*.
        kubernetes: None skips ConfigMaps.

    Raises:
        AdminError, KubernetesError: an action failed; the actions before it are performed.
        StrayPartition: a topic has the name of a partition; see there.
    """
    applied = Applied()
    for action in planned:
        match action:
            case actions.CopySchema():
                if (error := await _copy_schema(action, admin)) is not None:
                    applied.refused.append(actions.Refused(action, error))
                    continue
            case actions.SetTopicPolicy():
                await _set_topic_policy(action, admin, applied)
                continue
            case actions.ChangeRights(changes):
                await grant(changes)
            case actions.CreateConfigMap() | actions.PatchConfigMap():
                if kubernetes is None:
                    continue
                await _write_config_map(action, kubernetes)
            case _:
                await _on_topic(action, admin)
        applied.done.append(action)
    return applied


async def _write_config_map(
    action: actions.CreateConfigMap | actions.PatchConfigMap, kubernetes: Kubernetes
) -> None:
    body = action.body
    if isinstance(action, actions.CreateConfigMap):
        await kubernetes.create(resources.CONFIG_MAPS, body)
    else:
        ours = {"metadata": {"labels": body["metadata"]["labels"]}, "data": body["data"]}
        await kubernetes.patch(resources.CONFIG_MAPS, Key.of(body), ours)


async def _copy_schema(copy: actions.CopySchema, admin: Admin) -> AdminError | None:
    """Copy missing versions in order, and return the first refusal.

    After a refusal the remaining versions are still tried: most consumers need the latest.
    """
    refused = None
    existing = await admin.schemas(copy.topic)
    for version in await admin.schemas(copy.source):
        if version not in existing:
            try:
                await admin.put_schema(copy.topic, version)
            except (AdminConflictError, BrokerRefusedError) as error:
                refused = refused or error
    if refused is None:
        await admin.set_properties(copy.topic, {ownership.SCHEMA: copy.schema.fingerprint})
    return refused


async def _set_topic_policy(action: actions.SetTopicPolicy, admin: Admin, applied: Applied) -> None:
    """Set a topic policy; first read the value in force if the action depends on it.

    The broker, or a proxy that authorizes calls, may forbid both.
    """
    topic, policy, write = action.topic, action.policy, action.write
    try:
        if write is None:
            in_force = applied.in_force[policy.read] = await admin.topic_policy(topic, policy)
            write = next(policy.writes(in_force), None)
            if write is None:
                return
            await admin.set_topic_policy(topic, policy, write)
            applied.in_force[policy.read] = write.body
        else:
            await admin.set_topic_policy(topic, policy, write)
    except (AdminForbiddenError, BrokerRefusedError, UnsupportedError) as error:
        if not actions.is_refusable(action):
            raise
        applied.refused.append(actions.Refused(action, error))
    else:
        applied.done.append(action)


async def _on_topic(action: actions.OnTopic, admin: Admin) -> None:
    match action:
        case actions.CreateTopic(topic, partitions, properties):
            async with _naming_strays(topic, admin):
                await admin.create_topic(topic, partitions, properties)
        case actions.Mark(topic, properties):
            await admin.set_properties(topic, properties)
        case actions.AddPartitions(topic, partitions):
            async with _naming_strays(topic, admin):
                await admin.add_partitions(topic, partitions)
        case actions.RestorePartitions(topic, _):
            await admin.restore_partitions(topic)
        case actions.RestoreTopicPolicy(topic, policy, write):
            await admin.set_topic_policy(topic, policy, write)
        case actions.CreateSubscription(topic, subscription):
            await admin.create_subscription(topic, subscription)
        case actions.DeleteTopic(topic, partitioned):
            await admin.delete_topic(topic, partitioned=partitioned)
        case actions.DeleteSubscription(topic, subscription):
            await admin.delete_subscription(topic, subscription)


@asynccontextmanager
async def _naming_strays(topic: TopicName, admin: Admin) -> AsyncIterator[None]:
    """Name the stray topic if the broker refuses to create partitions: its answer does not.

    Raises:
        StrayPartition: a topic has the name of a partition that should be created.
    """
    try:
        yield
    except AdminConflictError as error:
        topics, partitioned = await admin.topics(topic.namespace_name)
        count = await admin.partitions(topic) if str(topic) in partitioned else 0
        indexes = (int(match[1]) for match in map(PARTITION_SUFFIX.search, topics) if match)
        strays = {str(topic.partition(index)) for index in indexes if index >= count} & topics
        if not strays:
            raise
        raise Reason.STRAY_PARTITION.error(
            f"the broker cannot create the partitions of {topic}: another topic has the name of a "
            "partition",
            got=min(strays),
            remedy="process or move its messages and delete it; stop the client that uses the "
            "partition name, because it would create the topic again",
        ) from error
