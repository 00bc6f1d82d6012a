"""What can be seen of a policy's drift without a call of its own to the broker; pure.

Called by `survey`, with what one read of a Pulsar namespace shows for all policies in it, and with
what a watch has shown of ConfigMaps. What is found here is a reason for a look and no more: the
look reads again what it repairs.
"""

from __future__ import annotations

from redrive.admin.model import Grant, NamespaceState
from redrive.kube.resources import Body
from redrive.provision.desired import Desired, partitions_of_retry
from redrive.provision.diff import config_map_actions


def is_at_broker(wanted: Desired, namespace: NamespaceState) -> bool:
    """Whether topics or grants, of a policy that was ready, are not as it needs them."""
    topics = [wanted.policy.topic, wanted.retry.name]
    if wanted.dead_letter is not None:
        topics.append(wanted.dead_letter.name)
    partitions = partitions_of_retry(wanted, namespace.partitions(wanted.policy.topic))
    return (
        not all(map(namespace.exists, topics))
        or namespace.partitions(wanted.retry.name) < partitions
        or any(_is_missing(grant, namespace) for grant in wanted.grants)
        or namespace.subscription_expiry_minutes > 0
    )


def is_of_the_other_kind(wanted: Desired, namespace: NamespaceState) -> bool:
    """Whether the retry topic has partitions where it should have none, or the other way round."""
    source, retry = wanted.policy.topic, wanted.retry.name
    if not (namespace.exists(source) and namespace.exists(retry)):
        return False
    should = partitions_of_retry(wanted, int(str(source) in namespace.partitioned))
    return bool(should) != (str(retry) in namespace.partitioned)


def is_in_config_map(wanted: Desired, found: Body | None) -> bool:
    """Whether the ConfigMap for consumers is not as it should be."""
    return any(config_map_actions(wanted.config_map, found))


def _is_missing(grant: Grant, namespace: NamespaceState) -> bool:
    roles = namespace.permissions.get(str(grant.topic), {})
    return not grant.actions <= roles.get(grant.role, frozenset())
