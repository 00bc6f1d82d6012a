"""Forks: consumers, producers and their client belong to the process that made them.

A forked child has copies of all objects and of the messages in the client, none of the threads, and
shares the connections of its parent. There a call of the client hangs, and an object that goes away
writes into a connection of the parent, whose consumer the broker closes then. So each use of an
inherited object raises `InheritedError`, closing it does nothing, and the client's own objects,
those of the program too, are kept until the child ends.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator

import pulsar

from redrive.errors import InvalidSpecError, RedriveError

REMEDY = "create the client, its consumers and its producers in the child, after the fork"

_forks = 0
_handles: list[object] = []  # of the client, during a fork
_inherited: set[int] = set()  # the identities of clients, which are kept
_callbacks: set[weakref.WeakMethod[Callable[[], None]]] = set()


class InheritedError(RedriveError):
    """A forked process used an object of its parent."""

    reason = "Inherited"


class OwnerProcess:
    """The process that made an object.

    Args:
        kind: names the object in errors.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._forks = _forks
        self._process = os.getpid()

    @property
    def is_parent(self) -> bool:
        """Return True in a child that was forked since."""
        return self._forks != _forks

    def check(self) -> None:
        """Pass in the process that made the object.

        Raises:
            InheritedError: this is a child of it.
        """
        if self._forks != _forks:
            raise InheritedError(
                f"a {self._kind} can't be used by a process that was forked after it was made",
                got=f"process {os.getpid()}, made by process {self._process}",
                remedy=REMEDY,
            )


def is_inherited(client: object) -> bool:
    """Return True if *client* was made by a parent of this process."""
    return id(client) in _inherited


def check_client(client: object) -> None:
    """Pass if *client* was made by this process.

    Raises:
        InheritedError: it was made by a parent.
        InvalidSpecError: it is another object.
    """
    if not (hasattr(client, "subscribe") or hasattr(client, "create_producer")):
        raise InvalidSpecError(
            "client must be a pulsar.Client",
            got=client,
            remedy='give one such as pulsar.Client("pulsar://localhost:6650")',
        )
    if is_inherited(client):
        raise InheritedError(
            "a client can't be used by a process that was forked after it was made",
            got=f"process {os.getpid()}, a child of the process that made it",
            remedy=REMEDY,
        )


def call_in_children(method: Callable[[], None]) -> None:
    """Have *method*, bound to an object that still exists then, called in forked children."""
    _callbacks.add(weakref.WeakMethod(method, _callbacks.discard))


def _classes(kind: type) -> Iterator[type]:
    derived: type
    yield kind
    for derived in kind.__subclasses__():
        yield from _classes(derived)


def _before() -> None:
    """Find the objects of the client: it lists none of its own."""
    kinds = (pulsar.Client, pulsar.Consumer, pulsar.Producer, pulsar.Reader)
    classes = [subclass for kind in kinds for subclass in _classes(kind)]
    _handles[:] = [handle for handle in gc.get_referrers(*classes) if isinstance(handle, kinds)]
    if _handles:
        # While other threads run that may be importing it, a child could wait for it permanently.
        import ctypes  # noqa: F401, PLC0415 - few programs fork


def _in_child() -> None:
    global _forks  # noqa: PLW0603 - one for the process
    _forks += 1
    if _handles:
        import ctypes  # noqa: PLC0415 - see `_before`

        for handle in _handles:  # a reference that nothing gives back, at the end of Python neither
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))
            _inherited.add(id(handle))
    _handles.clear()
    for reference in list(_callbacks):
        callback = reference()
        if callback is not None:
            callback()


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(before=_before, after_in_parent=_handles.clear, after_in_child=_in_child)
