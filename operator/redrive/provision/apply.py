"""The steps of a plan, done one after the other.

A crash in between leaves fewer steps for the next plan: each step is planned from what is there.
"""

from __future__ import annotations

from collections.abc import Iterable

from redrive.admin.client import Admin, Granter
from redrive.cluster import resources
from redrive.cluster.client import Kubernetes
from redrive.cluster.resources import Key
from redrive.provision import plan


async def apply(
    steps: Iterable[plan.Step], admin: Admin, grant: Granter, kubernetes: Kubernetes
) -> None:
    """Do *steps* in order.

    Args:
        grant: grants rights, together with others who announced theirs to *admin*.

    Raises:
        AdminError, KubernetesError: a step failed; those before it are done.
    """
    for step in steps:
        match step:
            case plan.CreateTopic(topic, partitions):
                await admin.create_topic(topic, partitions)
            case plan.AddPartitions(topic, partitions):
                await admin.add_partitions(topic, partitions)
            case plan.SetTopicPolicy(topic, policy, write):
                await admin.set_topic_policy(topic, policy, write)
            case plan.SetGrants(grants):
                await grant(grants)
            case plan.CreateSubscription(topic, subscription):
                await admin.create_subscription(topic, subscription)
            case plan.CreateConfigMap(body):
                await kubernetes.create(resources.CONFIG_MAPS, body)
            case plan.PatchConfigMap(body):
                data = {"data": body["data"]}
                await kubernetes.patch(resources.CONFIG_MAPS, Key.of(body), data)
