"""A RetryPolicy → what it asks for, read and checked; no calls to a broker.

Used by all that looks at policies: reconcile, resync, finalize and health. Each generation of a
policy is read once with each generation of its connection.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from redrive.api.connection import PulsarConnectionSpec
from redrive.api.retrypolicy import RetryPolicySpec
from redrive.errors import RedriveError
from redrive.kube import connections
from redrive.kube.context import Context
from redrive.kube.resources import Body, Key
from redrive.provision import conditions
from redrive.provision.conflicts import Conflicts, spec_of
from redrive.provision.facts import Request
from redrive.provision.ownership import named_in
from redrive.provision.standing import Standing


def resolve(body: Body, ctx: Context) -> Request:
    """Read a RetryPolicy, and the PulsarConnection it refers to.

    Raises:
        InvalidSpecError: the policy's spec can't be obeyed.
        RedriveError: the connection can't be used; see `redrive.kube.connections.find`.
    """
    ref = spec_of(body, ctx.policies).connection_ref
    return resolve_through(
        body, connections.find(ref, Key.of(body).namespace, ctx.connections), ctx
    )


def resolve_through(body: Body, connection: PulsarConnectionSpec, ctx: Context) -> Request:
    """Read a RetryPolicy that uses *connection*.

    Raises:
        InvalidSpecError: the policy's spec can't be obeyed.
    """
    spec = spec_of(body, ctx.policies)
    return ctx.policies.derive(_request, body, spec, connection, Standing.of(body), named_in(body))


def _request(
    body: Body,
    spec: RetryPolicySpec,
    connection: PulsarConnectionSpec,
    standing: Standing,
    takes_over: frozenset[str],
) -> Request:
    key, metadata = Key.of(body), body["metadata"]
    completed = spec.completed(connection.policy_defaults)
    return Request(
        key=key,
        age=(metadata["creationTimestamp"], metadata["uid"]),
        spec=completed,
        policy=completed.to_policy(str(key), metadata["generation"]),
        connection=connection,
        standing=standing,
        takes_over=takes_over,
    )


def admit(request: Request, ctx: Context, conflicts: Conflicts) -> tuple[Request, ...]:
    """Check whether *request* may be obeyed; return its rivals, as `rivals` does.

    Raises:
        RedriveError: its connection does not allow it, or a rival comes first.
    """
    conditions.check(conditions.ADMISSIBLE, request)
    found = rivals(request.key, ctx, conflicts)
    contested = conditions.prior_claim(request, found)
    if contested is not None:
        raise contested
    return found


def rivals(key: Key, ctx: Context, conflicts: Conflicts) -> tuple[Request, ...]:
    """Return what the admissible policies ask for that claim a name which *key* claims too."""
    return tuple(_admissible(conflicts.rivals(key), ctx))


def _admissible(keys: Iterable[Key], ctx: Context) -> Iterator[Request]:
    for key in keys:
        body = ctx.policies.get(key)
        if body is None:
            continue
        try:
            request = resolve(body, ctx)
            conditions.check(conditions.ADMISSIBLE, request)
        except RedriveError:
            continue  # shown by the policy's own status
        yield request
