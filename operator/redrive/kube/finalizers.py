"""Finalizers: by them the API server keeps a deleted object until its work is done."""

from __future__ import annotations

from collections.abc import Sequence

from redrive.kube.resources import Body, Key
from redrive.kube.status import Publisher


def has(body: Body, name: str) -> bool:
    """Whether the API server keeps an object for this finalizer."""
    return name in _of(body)


async def add(body: Body, name: str, out: Publisher) -> Body:
    """Have a finalizer on an object; return the object as it is then.

    Raises:
        ConflictError: it was changed meanwhile.
        NotFoundError: it is gone.
    """
    if _of(body).count(name) == 1:
        return body
    return await _set(body, [*_others(body, name), name], out)


async def remove(body: Body, name: str, out: Publisher) -> Body:
    """Have no such finalizer on an object; return the object as it is then.

    The API server takes no new finalizer for one that is being deleted. So where such a one has no
    others, a change meanwhile, as of its status, does not matter.

    Raises:
        ConflictError: it was changed meanwhile, and has other finalizers or is not being deleted.
        NotFoundError: it is gone.
    """
    if not has(body, name):
        return body
    others = _others(body, name)
    goes = not others and "deletionTimestamp" in body["metadata"]
    return await _set(body, others, out, only="uid" if goes else "resourceVersion")


def _of(body: Body) -> Sequence[str]:
    names: Sequence[str] = body["metadata"].get("finalizers", [])
    return names


def _others(body: Body, name: str) -> list[str]:
    return [each for each in _of(body) if each != name]


async def _set(body: Body, names: list[str], out: Publisher, only: str = "resourceVersion") -> Body:
    # The list is replaced as a whole: only if the object is as it was read, or the same.
    patch = {"metadata": {"finalizers": names, only: body["metadata"][only]}}
    after = await out.kubernetes.patch(out.resource, Key.of(body), patch)
    out.table.renew(after)
    return after
