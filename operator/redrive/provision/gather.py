"""A RetryPolicy object → what it asks for, read and typed; nothing here talks to a broker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from redrive.api.parsing import parse_spec
from redrive.api.retrypolicy import RetryPolicySpec
from redrive.cluster import connections
from redrive.cluster.resources import Body, Key
from redrive.cluster.world import World
from redrive.errors import RedriveError
from redrive.provision import conditions
from redrive.provision.facts import Asked


def gather(body: Body, world: World) -> Asked:
    """Read a RetryPolicy, and the PulsarConnection it refers to.

    Raises:
        InvalidSpecError: the policy's spec can't be obeyed.
        RedriveError: the connection can't be used; see `redrive.cluster.connections.find`.
    """
    key = Key.of(body)
    metadata = body["metadata"]
    spec = parse_spec(RetryPolicySpec, body)
    connection = connections.find(spec.connection_ref, key.namespace, world.connections)
    spec = spec.completed(connection.policy_defaults)
    return Asked(
        key=key,
        age=(metadata["creationTimestamp"], metadata["uid"]),
        spec=spec,
        policy=spec.to_policy(str(key), metadata["generation"]),
        connection=connection,
    )


def gather_admissible(keys: Iterable[Key], world: World) -> Iterator[Asked]:
    """Yield what those of *keys* ask for that may be obeyed."""
    for key in keys:
        body = world.policies.get(key)
        if body is None:
            continue
        try:
            asked = gather(body, world)
        except RedriveError:
            continue  # its own reconcile says so in its status
        if conditions.first_violation(conditions.ADMISSIBLE, asked) is None:
            yield asked
