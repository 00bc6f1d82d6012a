"""The steps of a plan, done one after the other.

A crash in between leaves fewer steps for the next plan: each step is planned from what is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from redrive.admin.client import Admin
from redrive.admin.errors import AdminError, BrokerRefusedError, ConflictError
from redrive.admin.granting import Granter
from redrive.kube import resources
from redrive.kube.client import Kubernetes
from redrive.kube.resources import Key
from redrive.provision import ownership, steps


@dataclass(frozen=True)
class Refused:
    """A step that the broker refuses, and without which a policy works all the same."""

    step: steps.CopySchema
    error: AdminError


async def apply(
    planned: Iterable[steps.Step], admin: Admin, grant: Granter, kubernetes: Kubernetes
) -> tuple[Refused, ...]:
    """Do what is *planned*, in order; return what was refused of it.

    Args:
        grant: grants rights, together with others who announced theirs to *admin*.

    Raises:
        AdminError, KubernetesError: a step failed; those before it are done.
    """
    refused = []
    for step in planned:
        match step:
            case steps.CopySchema(topic, schema):
                try:
                    await admin.put_schema(topic, schema)
                except (ConflictError, BrokerRefusedError) as error:
                    refused.append(Refused(step, error))
                else:
                    await admin.set_properties(topic, {ownership.SCHEMA: schema.fingerprint})
            case steps.SetGrants(grants):
                await grant(grants)
            case steps.CreateConfigMap(body):
                await kubernetes.create(resources.CONFIG_MAPS, body)
            case steps.PatchConfigMap(body):
                labels = {"labels": body["metadata"]["labels"]}
                ours = {"metadata": labels, "data": body["data"]}
                await kubernetes.patch(resources.CONFIG_MAPS, Key.of(body), ours)
            case _:
                await _on_topic(step, admin)
    return tuple(refused)


async def _on_topic(step: steps.OnTopic, admin: Admin) -> None:
    match step:
        case steps.CreateTopic(topic, partitions, properties):
            await admin.create_topic(topic, partitions, properties)
        case steps.Mark(topic, properties):
            await admin.set_properties(topic, properties)
        case steps.AddPartitions(topic, partitions):
            await admin.add_partitions(topic, partitions)
        case steps.RestorePartitions(topic, _):
            await admin.restore_partitions(topic)
        case steps.SetTopicPolicy(topic, policy, write):
            await admin.set_topic_policy(topic, policy, write)
        case steps.CreateSubscription(topic, subscription):
            await admin.create_subscription(topic, subscription)
        case steps.DeleteTopic(topic, partitioned):
            await admin.delete_topic(topic, partitioned=partitioned)
        case steps.DeleteSubscription(topic, subscription):
            await admin.delete_subscription(topic, subscription)
