"""Enforcement of schemas in a namespace."""

from __future__ import annotations

from redrive.policy.naming import TopicName
from sandbox.pulsar import Broker


def enforce(broker: Broker, topic: TopicName) -> None:
    """Have the namespace of *topic* refuse producers without a schema on topics with one."""
    path = f"/admin/v2/namespaces/{topic.namespace_name}/schemaValidationEnforced"
    broker.request("POST", path, body=True).check("enforce schemas")
