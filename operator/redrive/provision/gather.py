"""A RetryPolicy object → what it asks for, read and typed; nothing here talks to a broker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from redrive.api.connection import PulsarConnectionSpec
from redrive.api.parsing import parse_spec
from redrive.api.retrypolicy import RetryPolicySpec
from redrive.errors import RedriveError
from redrive.kube import connections
from redrive.kube.context import Context
from redrive.kube.resources import Body, Key
from redrive.provision import conditions
from redrive.provision.facts import Asked


def gather(body: Body, ctx: Context) -> Asked:
    """Read a RetryPolicy, and the PulsarConnection it refers to.

    Raises:
        InvalidSpecError: the policy's spec can't be obeyed.
        RedriveError: the connection can't be used; see `redrive.kube.connections.find`.
    """
    ref = parse_spec(RetryPolicySpec, body).connection_ref
    return gather_from(body, connections.find(ref, Key.of(body).namespace, ctx.connections))


def gather_from(body: Body, connection: PulsarConnectionSpec) -> Asked:
    """Read a RetryPolicy that uses *connection*.

    Raises:
        InvalidSpecError: the policy's spec can't be obeyed.
    """
    key = Key.of(body)
    metadata = body["metadata"]
    spec = parse_spec(RetryPolicySpec, body).completed(connection.policy_defaults)
    return Asked(
        key=key,
        age=(metadata["creationTimestamp"], metadata["uid"]),
        spec=spec,
        policy=spec.to_policy(str(key), metadata["generation"]),
        connection=connection,
    )


def gather_admissible(keys: Iterable[Key], ctx: Context) -> Iterator[Asked]:
    """Yield what those of *keys* ask for that may be obeyed."""
    for key in keys:
        body = ctx.policies.get(key)
        if body is None:
            continue
        try:
            asked = gather(body, ctx)
        except RedriveError:
            continue  # its own reconcile says so in its status
        if conditions.first_violation(conditions.ADMISSIBLE, asked) is None:
            yield asked
