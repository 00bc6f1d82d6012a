"""The finalizer by which the API server waits for the cleanup of a deleted policy."""

from __future__ import annotations

from collections.abc import Sequence

from redrive.api.choices import DeletionPolicy
from redrive.kube import resources
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
    wanted = [] if policy is DeletionPolicy.RETAIN else [FINALIZER]
    if [name for name in _finalizers(body) if name == FINALIZER] == wanted:
        return body
    after = await _set(body, [*_others(body), *wanted], out)
    known = out.table.get(Key.of(body))
    if known is None or known["metadata"]["uid"] != body["metadata"]["uid"]:
        raise NotFoundError(
            f"RetryPolicy {Key.of(body)} was deleted while its finalizer was added",
            remedy="none is needed: nothing was created for it",
        )
    return after


async def remove_finalizer(body: Body, out: Publisher) -> None:
    """Let the API server delete a RetryPolicy, which is being deleted.

    The API server takes no new finalizer for it. So where it has no others, a change meanwhile, as
    of its status, does not matter.

    Raises:
        ConflictError: it was changed meanwhile, and has other finalizers.
    """
    others = _others(body)
    await _set(body, others, out, only=("resourceVersion" if others else "uid"))


def has_finalizer(body: Body) -> bool:
    """Whether the API server waits for the cleanup."""
    return FINALIZER in _finalizers(body)


def _finalizers(body: Body) -> Sequence[str]:
    names: Sequence[str] = body["metadata"].get("finalizers", [])
    return names


def _others(body: Body) -> list[str]:
    return [name for name in _finalizers(body) if name != FINALIZER]


async def _set(body: Body, names: list[str], out: Publisher, only: str = "resourceVersion") -> Body:
    # The list is replaced as a whole: only if the object is as it was read, or the same.
    patch = {"metadata": {"finalizers": names, only: body["metadata"][only]}}
    after = await out.kubernetes.patch(resources.POLICIES, Key.of(body), patch)
    out.table.renew(after)
    return after
