"""Actions, done one after the other.

A crash in between leaves fewer actions for the next time: `diff` chooses each by what is there.
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


@dataclass(frozen=True)
class Refused:
    """An action that the broker refuses, and without which a policy works all the same."""

    action: actions.Refusable
    error: AdminError


@dataclass
class Applied:
    """The results of actions.

    Attributes:
        done: those that changed something, in order.
        refused: those that the broker refuses.
        in_force: the topic policies of topics that were just created, by how each is read, where
            that was not known before.
    """

    done: list[actions.Action] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    in_force: dict[str, Any] = field(default_factory=dict)


async def apply(
    planned: Iterable[actions.Action], admin: Admin, grant: Granter, kubernetes: Kubernetes | None
) -> Applied:
    """Do what is *planned*, in order; return what came of it.

    Args:
        grant: changes rights, together with others who announced theirs to *admin*.
        kubernetes: None leaves ConfigMaps out.

    Raises:
        AdminError, KubernetesError: an action failed; those before it are done.
        StrayPartition: see there; the actions before are done.
    """
    applied = Applied()
    for action in planned:
        match action:
            case actions.CopySchema():
                if (error := await _copy_schema(action, admin)) is not None:
                    applied.refused.append(Refused(action, error))
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
    """Copy what is missing, in order; return the first refusal.

    A later version may be accepted all the same, and is what most consumers need.
    """
    refused = None
    there = await admin.schemas(copy.topic)
    for version in await admin.schemas(copy.source):
        if version not in there:
            try:
                await admin.put_schema(copy.topic, version)
            except (AdminConflictError, BrokerRefusedError) as error:
                refused = refused or error
    if refused is None:
        await admin.set_properties(copy.topic, {ownership.SCHEMA: copy.schema.fingerprint})
    return refused


async def _set_topic_policy(action: actions.SetTopicPolicy, admin: Admin, applied: Applied) -> None:
    """Set a topic policy, and read before what is in force where the action depends on that.

    A broker, or what authorizes calls there, may forbid both.
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
        applied.refused.append(Refused(action, error))
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
    """Name the topic for which the broker refuses to create partitions: its answer does not.

    Raises:
        StrayPartition: the broker refused, and there is such a topic.
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
            f"the broker can't create the partitions of {topic}: a topic of its own has the name "
            "of one",
            got=min(strays),
            remedy="handle or move its messages and delete it; stop the client that names the "
            "partition, which would create it again",
        ) from error
