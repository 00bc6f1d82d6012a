"""A PulsarConnection does not go before the policies that use it: their deletion may need it."""

from __future__ import annotations

from collections.abc import Sequence

from redrive.api.conditions import Reason
from redrive.kube import finalizers
from redrive.kube.connections import may_use, users
from redrive.kube.context import Context
from redrive.kube.resources import Body, Key
from redrive.kube.status import Publisher, StatusWarning

IN_USE = "redrive.io/in-use"
"""The finalizer of a connection that policies use, and of no other."""
DELETION_BLOCKED = Reason("DeletionBlocked")
"""The connection is being deleted, and waits for the policies that use it."""
_SHOWN = 5


def users_of(connection: Body, ctx: Context) -> tuple[Body, ...]:
    """Return the policies that use *connection*, of all namespaces.

    One of a namespace that it is not for does not count: anyone could name it, to keep it.
    """
    key = Key.of(connection)
    found = users(key, ctx.policies)
    namespaces = {Key.of(body).namespace for body in found}
    allowed = {ns for ns in namespaces if may_use(key, ns, ctx.connections, ctx.namespaces)}
    return tuple(body for body in found if Key.of(body).namespace in allowed)


def is_due(connection: Body, *, used: bool) -> bool:
    """Whether the finalizer of a connection, or what it says, has to change.

    Args:
        connection: as it is.
        used: whether any policy names it.
    """
    return _is_deleted(connection) or finalizers.has(connection, IN_USE) is not used


async def protect(connection: Body, used: Sequence[Body], out: Publisher) -> Body | None:
    """Have the finalizer on a connection that is used, and on no other.

    A crash before that leaves it for the next reconcile. The API server takes no new finalizer for
    an object that is being deleted; that without ours is gone in a moment.

    Args:
        connection: as it is.
        used: the policies that use it.
        out: writes it.

    Returns:
        The connection as it is then; None where nothing keeps it from being deleted.

    Raises:
        ConflictError: it was changed meanwhile.
        NotFoundError: it is gone.
    """
    if not used:
        after = await finalizers.remove(connection, IN_USE, out)
        return None if _is_deleted(after) else after
    if _is_deleted(connection):
        return connection
    return await finalizers.add(connection, IN_USE, out)


def blocked(connection: Body, used: Sequence[Body]) -> StatusWarning | None:
    """Say what a deletion waits for; the names of other namespaces' policies are not shown."""
    if not used or not _is_deleted(connection):
        return None
    namespace = Key.of(connection).namespace
    own = sorted(name for ns, name in map(Key.of, used) if ns == namespace)
    more = len(used) - len(own)
    named = [f"RetryPolicy {name}" for name in own[:_SHOWN]]
    named += [f"{len(own) - _SHOWN} more"] if len(own) > _SHOWN else []
    named += [f"{more} of other namespaces"] if more else []
    return StatusWarning(
        DELETION_BLOCKED,
        "the connection is being deleted, and goes once no policy uses it: their deletion may need "
        f"it; got {', '.join(named)}; delete them, or have them use another connection",
    )


def _is_deleted(body: Body) -> bool:
    return "deletionTimestamp" in body["metadata"]
