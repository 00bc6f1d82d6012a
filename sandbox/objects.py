"""Objects of a cluster, read and written in this process instead of by kubectl.

Called by `sandbox.kubernetes`. Each kubectl takes half a second of a core to start, which would be
most of the cost of a test that polls an object.
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
_MANAGER = "kubectl"  # so that kubectl may change these fields, and vice versa


class Objects:
    """The objects of a cluster, with the rights of a kubeconfig.

    A kind is its singular name in lower case, such as ``retrypolicy``, with ``.GROUP`` where two
    groups have that kind. A refusal of the API server raises SandboxError with its message.

    Args:
        kubeconfig: the address of the API server, and the credentials.
        kinds: a file that caches the kinds of the cluster.
        user: the user that each call impersonates, if the credentials permit it.
    """

    def __init__(self, kubeconfig: Path, kinds: Path, user: str = "") -> None:
        client = new_client_from_config(str(kubeconfig))  # type: ignore[no-untyped-call]
        self._api = DynamicClient(client, cache_file=str(kinds))  # type: ignore[no-untyped-call]
        if user:
            client.set_default_header("Impersonate-User", user)

    def get(self, kind: str, name: str, namespace: str | None = None) -> dict[str, Any]:
        """Return an object.

        Raises:
            SandboxError: it does not exist, or reading it is forbidden.
        """
        return _answer(self._kind(kind).get, name=name, namespace=namespace)

    def list(
        self, kind: str, namespace: str | None = None, fields: str = ""
    ) -> list[dict[str, Any]]:
        """Return the objects of a namespace, or of all, that match the field selector *fields*.

        Raises:
            SandboxError: reading them is forbidden.
        """
        page = _answer(self._kind(kind).get, namespace=namespace, field_selector=fields or None)
        return list(page["items"])

    def apply(self, body: Mapping[str, Any], namespace: str | None = None) -> dict[str, Any]:
        """Create or change an object by server-side apply, and return the stored object.

        Raises:
            SandboxError: it was refused.
        """
        return _answer(
            self._kind_of(body).server_side_apply,
            body=dict(body),
            namespace=namespace,
            field_manager=_MANAGER,
        )

    def admit(self, body: Mapping[str, Any], namespace: str) -> None:
        """Have the API server admit an object as by `apply`, without storing it.

        Unknown fields are refused, and the fields of other managers are taken over.

        Args:
            body: the whole object.
            namespace: of an object that is namespaced and has none.

        Raises:
            SandboxError: it was refused.
        """
        _answer(
            self._kind_of(body).server_side_apply,
            body=dict(body),
            force_conflicts=True,
            **_strictly(body["metadata"].get("namespace", namespace), dry_run=True),
        )

    def create(
        self, body: Mapping[str, Any], namespace: str | None = None, *, dry_run: bool = False
    ) -> dict[str, Any]:
        """Create an object, and return the stored object. Unknown fields are refused.

        Args:
            body: the whole object.
            namespace: of an object that is namespaced and has none.
            dry_run: validate and return the object without storing it.

        Raises:
            SandboxError: it was refused, or already exists.
        """
        options = _strictly(namespace, dry_run=dry_run)
        return _answer(self._kind_of(body).create, body=dict(body), **options)

    def patch(
        self,
        kind: str,
        name: str,
        change: Mapping[str, Any],
        namespace: str | None = None,
        subresource: str = "",
    ) -> dict[str, Any]:
        """Change an object, or a subresource of it, by a merge patch; return the stored object.

        Raises:
            SandboxError: it does not exist, or the change was refused.
        """
        resource = self._kind(kind)
        return _answer(
            (resource.subresources[subresource] if subresource else resource).patch,
            body=dict(change),
            name=name,
            namespace=namespace,
            content_type="application/merge-patch+json",
        )

    def create_namespace(self, name: str) -> None:
        """Create a namespace.

        Raises:
            SandboxError: it was refused, or already exists.
        """
        self.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    def put(
        self, body: Mapping[str, Any], namespace: str | None = None, *, dry_run: bool = False
    ) -> dict[str, Any]:
        """Create or replace an object, and return the stored object. Unknown fields are refused.

        Args:
            body: the whole object.
            namespace: of the object.
            dry_run: validate and return the object without storing it.

        Raises:
            SandboxError: it was refused.
        """
        resource = self._kind_of(body)
        with _refusals():
            while True:
                options = _strictly(namespace, dry_run=dry_run)
                try:
                    stored = resource.get(name=body["metadata"]["name"], namespace=namespace)
                except NotFoundError:
                    return dict(resource.create(body=dict(body), **options).to_dict())
                version = {"resourceVersion": stored.metadata.resourceVersion}
                whole = {**body, "metadata": {**body["metadata"], **version}}
                with suppress(ConflictError):  # written in between, for example by the operator
                    return dict(resource.replace(body=whole, **options).to_dict())

    def delete(self, kind: str, name: str, namespace: str | None = None) -> None:
        """Request the deletion of an object, without waiting for its finalizers.

        Raises:
            SandboxError: it does not exist, or deleting it is forbidden.
        """
        _answer(self._kind(kind).delete, name=name, namespace=namespace)

    def token(self, account: str, namespace: str, seconds: int) -> str | None:
        """Return a token of a ServiceAccount that is valid for *seconds*; None without the account.

        Raises:
            SandboxError: it was refused.
        """
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"audiences": [], "expirationSeconds": seconds},
        }
        create: Callable[..., Any] = self._kind("serviceaccount").subresources["token"].create
        with _refusals(), suppress(NotFoundError):
            token: str = create(body, name=account, namespace=namespace).status.token
            return token
        return None

    def _kind(self, word: str) -> Resource:
        name, _, group = word.partition(".")
        deadline = time.monotonic() + _DISCOVERY_SECONDS
        while True:
            try:
                resources: list[Resource] = self._api.resources.search(
                    group=group or None, singular_name=name
                )
                break
            except ResourceNotFoundError:  # a group is listed a moment before it is served
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
                self._api.resources.invalidate_cache()
        if not resources:
            raise SandboxError("the cluster has no such kind", got=word, remedy="define it")
        return min(resources, key=lambda kind: kind.group or "")  # the core group, as in kubectl

    def _kind_of(self, body: Mapping[str, Any]) -> Resource:
        return self._api.resources.get(  # type: ignore[no-any-return]
            api_version=body["apiVersion"], kind=body["kind"]
        )


def _strictly(namespace: str | None, *, dry_run: bool = False) -> dict[str, Any]:
    """Return the arguments of one call. The client changes the list, so they are not shared."""
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
