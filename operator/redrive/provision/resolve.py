"""A RetryPolicy → what it asks for, read and checked; no calls to a broker.

Used by all that looks at policies: reconcile, resync, finalize and health.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from redrive.admin.paths import broker_at
from redrive.api.connection import PulsarConnectionSpec
from redrive.errors import RedriveError
from redrive.kube import connections
from redrive.kube.context import Context
from redrive.kube.policies import effective_spec, names_no_scheme, policy_of, spec_of
from redrive.kube.resources import Body, Key
from redrive.provision.admission_checks import ADMISSION, prior_claim
from redrive.provision.conflicts import Conflicts
from redrive.provision.facts import Request
from redrive.provision.ownership import named_in
from redrive.provision.pause import ignores_outages
from redrive.provision.standing import Standing, is_proven


def resolve(body: Body, ctx: Context) -> Request:
    """Read a RetryPolicy, and the PulsarConnection it refers to.

    Raises:
        InvalidSpecError: the policy's spec can't be obeyed.
        RedriveError: the connection can't be used; see `redrive.kube.connections.find`.
    """
    ref = spec_of(body, ctx.policies).connection_ref
    namespace = Key.of(body).namespace
    connection = connections.find(ref, namespace, ctx.connections, ctx.namespaces)
    return resolve_through(body, connection, ctx)


def resolve_through(body: Body, connection: PulsarConnectionSpec, ctx: Context) -> Request:
    """Read a RetryPolicy that uses *connection*.

    Raises:
        InvalidSpecError: the policy's spec can't be obeyed.
        RedriveError: what the connection permits can't be found out.
    """
    key = Key.of(body)
    spec = effective_spec(body, ctx.policies, connection.policy_defaults)
    policy = policy_of(body, ctx.policies, spec)
    through = connections.connection_of(body)
    return Request(
        key=key,
        age=(body["metadata"]["creationTimestamp"], body["metadata"]["uid"]),
        spec=spec,
        policy=replace(policy, ignore_outages=True) if ignores_outages(body) else policy,
        connection=connection,
        permissions=connections.permissions(connection, through, key.namespace, ctx.namespaces),
        standing=Standing.of(body),
        is_proven=is_proven(body, through, broker_at(connection.admin_url)),
        takes_over=named_in(body),
        names_no_scheme=names_no_scheme(body),
    )


def admit(request: Request, ctx: Context, conflicts: Conflicts) -> tuple[Request, ...]:
    """Check whether *request* may be obeyed; return its rivals, as `rivals` does.

    Raises:
        RedriveError: its connection does not allow it, or a rival comes first.
    """
    ADMISSION.check(request)
    found = rivals(request.key, ctx, conflicts)
    contested = prior_claim(request, found)
    if contested is not None:
        raise contested
    return found


def rivals(key: Key, ctx: Context, conflicts: Conflicts) -> tuple[Request, ...]:
    """Return what the admissible policies ask for that claim a name which *key* claims too.

    A policy that is gone claims nothing any more: any other may be its rival.
    """
    gone = ctx.policies.get(key) is None
    others = map(Key.of, ctx.policies) if gone else conflicts.rivals(key)
    return tuple(_admissible(others, ctx))


def _admissible(keys: Iterable[Key], ctx: Context) -> Iterator[Request]:
    for key in keys:
        body = ctx.policies.get(key)
        if body is None:
            continue
        try:
            request = resolve(body, ctx)
            ADMISSION.check(request)
        except RedriveError:
            continue  # shown by the policy's own status
        yield request
