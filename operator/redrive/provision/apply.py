"""Actions, done one after the other.

A crash in between leaves fewer actions for the next time: `diff` chooses each by what is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from redrive.admin.client import Admin
from redrive.admin.errors import (
    AdminConflictError,
    AdminError,
    AdminForbiddenError,
    BrokerRefusedError,
    UnsupportedError,
)
from redrive.admin.granting import Granter
from redrive.admin.policies import TopicPolicy, Write
from redrive.kube import resources
from redrive.kube.client import Kubernetes
from redrive.kube.resources import Key
from redrive.policy.naming import TopicName
from redrive.provision import actions, ownership


@dataclass(frozen=True)
class Refused:
    """An action that the broker refuses, and without which a policy works all the same."""

    action: actions.Refusable
    error: AdminError


async def apply(
    planned: Iterable[actions.Action], admin: Admin, grant: Granter, kubernetes: Kubernetes
) -> tuple[Refused, ...]:
    """Do what is *planned*, in order; return what was refused of it.

    Args:
        grant: changes rights, together with others who announced theirs to *admin*.

    Raises:
        AdminError, KubernetesError: an action failed; those before it are done.
    """
    refused = []
    for action in planned:
        match action:
            case actions.CopySchema():
                if (error := await _copy_schema(action, admin)) is not None:
                    refused.append(Refused(action, error))
            case actions.SetTopicPolicy(topic, policy, write) if actions.is_refusable(action):
                if (error := await _tune(topic, policy, write, admin)) is not None:
                    refused.append(Refused(action, error))
            case actions.ChangeRights(changes):
                await grant(changes)
            case actions.CreateConfigMap(body):
                await kubernetes.create(resources.CONFIG_MAPS, body)
            case actions.PatchConfigMap(body):
                labels = {"labels": body["metadata"]["labels"]}
                ours = {"metadata": labels, "data": body["data"]}
                await kubernetes.patch(resources.CONFIG_MAPS, Key.of(body), ours)
            case _:
                await _on_topic(action, admin)
    return tuple(refused)


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


async def _tune(
    topic: TopicName, policy: TopicPolicy, write: Write, admin: Admin
) -> AdminError | None:
    """Set a topic policy that a broker, or what authorizes calls there, may forbid."""
    try:
        await admin.set_topic_policy(topic, policy, write)
    except (AdminForbiddenError, BrokerRefusedError, UnsupportedError) as error:
        return error
    return None


async def _on_topic(action: actions.OnTopic, admin: Admin) -> None:
    match action:
        case actions.CreateTopic(topic, partitions, properties):
            await admin.create_topic(topic, partitions, properties)
        case actions.Mark(topic, properties):
            await admin.set_properties(topic, properties)
        case actions.AddPartitions(topic, partitions):
            await admin.add_partitions(topic, partitions)
        case actions.RestorePartitions(topic, _):
            await admin.restore_partitions(topic)
        case actions.SetTopicPolicy(topic, policy, write) | actions.RestoreTopicPolicy(
            topic, policy, write
        ):
            await admin.set_topic_policy(topic, policy, write)
        case actions.CreateSubscription(topic, subscription):
            await admin.create_subscription(topic, subscription)
        case actions.DeleteTopic(topic, partitioned):
            await admin.delete_topic(topic, partitioned=partitioned)
        case actions.DeleteSubscription(topic, subscription):
            await admin.delete_subscription(topic, subscription)
