"""Objects of a cluster, read and written without a process for each call, as kubectl needs.

Called by `sandbox.kubernetes`. kubectl takes half a second of a core to start, which is more than
all the rest where a test looks at an object until it is as it should be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kubernetes.config import new_client_from_config
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import (
    ConflictError,
    DynamicApiError,
    NotFoundError,
    ResourceNotFoundError,
)
from kubernetes.dynamic.resource import Resource

from sandbox.errors import SandboxError

_DISCOVERY_SECONDS = 30.0
_MANAGER = "kubectl"  # so that kubectl changes what was written here, and the other way round


class Objects:
    """The objects of a cluster as the bearer of a kubeconfig sees them.

    Kinds are in lower case and in the singular, as in ``retrypolicy``, with their API group where
    two have one of that name. Whatever the API server refuses raises a SandboxError with its words.

    Args:
        kubeconfig: says where the API server is, and who asks.
        kinds: a file to remember the kinds of the cluster in.
    """

    def __init__(self, kubeconfig: Path, kinds: Path) -> None:
        client = new_client_from_config(str(kubeconfig))  # type: ignore[no-untyped-call]
        self._api = DynamicClient(client, cache_file=str(kinds))  # type: ignore[no-untyped-call]

    def get(self, kind: str, name: str, namespace: str | None = None) -> dict[str, Any]:
        """Return an object as it is.

        Raises:
            SandboxError: it is not there, or may not be read.
        """
        return _answer(self._kind(kind).get, name=name, namespace=namespace)

    def list(self, kind: str, namespace: str, fields: str = "") -> list[dict[str, Any]]:
        """Return the objects of a namespace, those that a field selector chooses.

        Raises:
            SandboxError: they may not be read.
        """
        found = _answer(self._kind(kind).get, namespace=namespace, field_selector=fields or None)
        return list(found["items"])

    def apply(self, body: Mapping[str, Any], namespace: str | None = None) -> dict[str, Any]:
        """Have the server make or change an object, and return what it made of *body*.

        Raises:
            SandboxError: it was refused.
        """
        return _answer(
            self._kind_of(body).server_side_apply,
            body=dict(body),
            namespace=namespace,
            field_manager=_MANAGER,
        )

    def create(self, body: Mapping[str, Any], namespace: str | None = None) -> dict[str, Any]:
        """Make an object, and return what the server made of *body*.

        A field that its kind does not have is refused.

        Raises:
            SandboxError: it was refused, also if it exists.
        """
        return _answer(self._kind_of(body).create, body=dict(body), **_strictly(namespace))

    def create_namespace(self, name: str) -> None:
        """Make a namespace.

        Raises:
            SandboxError: it was refused, also if it exists.
        """
        self.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    def put(
        self, body: Mapping[str, Any], namespace: str | None = None, *, dry_run: bool = False
    ) -> dict[str, Any]:
        """Make an object or replace all of it, and return what the server made of *body*.

        A field that its kind does not have is refused, as by `create`.

        Args:
            body: the whole object.
            namespace: of the object.
            dry_run: only tell what would be.

        Raises:
            SandboxError: it was refused.
        """
        resource = self._kind_of(body)
        with _refusals():
            while True:
                how = _strictly(namespace, dry_run=dry_run)
                try:
                    found = resource.get(name=body["metadata"]["name"], namespace=namespace)
                except NotFoundError:
                    return dict(resource.create(body=dict(body), **how).to_dict())
                version = {"resourceVersion": found.metadata.resourceVersion}
                whole = {**body, "metadata": {**body["metadata"], **version}}
                with suppress(ConflictError):  # another was quicker, such as the operator
                    return dict(resource.replace(body=whole, **how).to_dict())

    def delete(self, kind: str, name: str, namespace: str | None = None) -> None:
        """Have an object deleted; that it is gone is not waited for.

        Raises:
            SandboxError: it is not there, or may not be deleted.
        """
        _answer(self._kind(kind).delete, name=name, namespace=namespace)

    def _kind(self, word: str) -> Resource:
        name, _, group = word.partition(".")
        deadline = time.monotonic() + _DISCOVERY_SECONDS
        while True:
            try:
                found: list[Resource] = self._api.resources.search(
                    group=group or None, singular_name=name
                )
                break
            except ResourceNotFoundError:  # a group is listed a moment before it is served
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
                self._api.resources.invalidate_cache()
        if not found:
            raise SandboxError("the cluster has no such kind", got=word, remedy="define it")
        return min(found, key=lambda kind: kind.group or "")  # the core's, as kubectl has it

    def _kind_of(self, body: Mapping[str, Any]) -> Resource:
        return self._api.resources.get(  # type: ignore[no-any-return]
            api_version=body["apiVersion"], kind=body["kind"]
        )


def _strictly(namespace: str | None, *, dry_run: bool = False) -> dict[str, Any]:
    """Return arguments of one call: the client adds to the list."""
    return {
        "namespace": namespace,
        "field_manager": _MANAGER,
        "dry_run": "All" if dry_run else None,
        "query_params": [("fieldValidation", "Strict")],
    }


def _answer(call: Callable[..., Any], **arguments: object) -> dict[str, Any]:
    with _refusals():
        return dict(call(**arguments).to_dict())


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except DynamicApiError as error:
        raise SandboxError(
            f"the API server refused: {error.summary()}",  # type: ignore[no-untyped-call]
            remedy="fix the call",
        ) from error
