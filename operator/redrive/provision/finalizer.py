"""The finalizer by which the API server waits for the cleanup of a deleted policy."""

from __future__ import annotations

from redrive.api.choices import DeletionPolicy
from redrive.kube import finalizers
from redrive.kube.errors import NotFoundError
from redrive.kube.resources import Body, Key
from redrive.kube.status import Publisher

FINALIZER = "redrive.io/cleanup"


async def ensure_finalizer(body: Body, policy: DeletionPolicy, out: Publisher) -> Body:
    """Have the finalizer on a RetryPolicy whose deletion has work to do, and on no other.

    Returns:
        The RetryPolicy as it is then.

    Raises:
        ConflictError: it was changed meanwhile.
        NotFoundError: it is gone, whatever the API server has answered; see `lost`.
    """
    change = finalizers.remove if policy is DeletionPolicy.RETAIN else finalizers.add
    after = await change(body, FINALIZER, out)
    if after is body:
        return body
    known = out.table.get(Key.of(body))
    if known is None or known["metadata"]["uid"] != body["metadata"]["uid"]:
        raise NotFoundError(
            f"RetryPolicy {Key.of(body)} was deleted while its finalizer was added",
            remedy="none is needed: nothing was created for it",
        )
    return after


async def remove_finalizer(body: Body, out: Publisher) -> None:
    """Let the API server delete a RetryPolicy, which is being deleted.

    Raises:
        ConflictError: it was changed meanwhile, and has other finalizers.
    """
    await finalizers.remove(body, FINALIZER, out)


def has_finalizer(body: Body) -> bool:
    """Whether the API server waits for the cleanup."""
    return finalizers.has(body, FINALIZER)
