"""Labels of Kubernetes namespaces, for connections that choose namespaces by a selector.

Called by `connections`. A watch would need the right to list all namespaces of the cluster. So each
is read by name, which a Role in it can permit, and only those whose objects use such a connection:
when they are first asked for, and every `READ_SECONDS` from then on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from redrive.errors import RedriveError
from redrive.kube import resources
from redrive.kube.client import Kubernetes
from redrive.kube.errors import NamespaceUnreadError, NotFoundError, UnavailableError
from redrive.kube.resources import Key

READ_SECONDS = 30.0
"""How old labels are at most: a namespace that loses one loses what it permits within that time."""

logger = logging.getLogger(__name__)
Labels = Mapping[str, str]
L = TypeVar("L", bound=Callable[[str], None])


class NamespaceLabels:
    """The labels of the namespaces that were asked for, as last read."""

    def __init__(self, kubernetes: Kubernetes) -> None:
        self._kubernetes = kubernetes
        self._known: dict[str, Labels | RedriveError] = {}
        self._asked = asyncio.Event()
        self._listeners: list[Callable[[str], None]] = []

    def listen(self, listener: L) -> L:
        """Call *listener* with each namespace whose labels have changed; usable as a decorator."""
        self._listeners.append(listener)
        return listener

    def of(self, namespace: str) -> Labels:
        """Return the labels of a namespace.

        Raises:
            NamespaceUnreadError: they were not read yet; listeners are called once they are.
            KubernetesError: they can't be read.
        """
        found = self._known.setdefault(namespace, _unread(namespace))
        if isinstance(found, NamespaceUnreadError):
            self._asked.set()
        if isinstance(found, RedriveError):
            raise found
        return found

    async def read(self, namespaces: Iterable[str]) -> None:
        """Read the labels of *namespaces*; a failure is for those who ask for them."""
        for namespace in sorted(namespaces):
            try:
                body = await self._kubernetes.get(resources.NAMESPACES, Key("", namespace))
            except UnavailableError as error:
                logger.info("labels of the namespace %s: %s", namespace, error)
                continue  # what was read before stays in use
            except NotFoundError:
                self._known.pop(namespace, None)
                continue
            except RedriveError as error:
                self._put(namespace, error)
            else:
                self._put(namespace, body["metadata"].get("labels") or {})

    def _put(self, namespace: str, found: Labels | RedriveError) -> None:
        before = self._known.get(namespace)
        self._known[namespace] = found
        if before != found:
            for listener in self._listeners:
                listener(namespace)

    async def _read_for_ever(self) -> None:
        while True:
            self._asked.clear()
            try:
                await self.read(tuple(self._known))
            except Exception:
                logger.exception("labels of namespaces: failed")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), READ_SECONDS)


def _unread(namespace: str) -> NamespaceUnreadError:
    return NamespaceUnreadError(
        "the labels of this Kubernetes namespace, which a selector of the connection is about, "
        "were not read yet",
        got=namespace,
        remedy="wait a second: it goes on by itself",
    )


@asynccontextmanager
async def following(kubernetes: Kubernetes) -> AsyncIterator[NamespaceLabels]:
    """Keep labels up to date while the block runs."""
    labels = NamespaceLabels(kubernetes)
    task = asyncio.create_task(labels._read_for_ever(), name="namespaces")  # noqa: SLF001
    try:
        yield labels
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
