"""The Kubernetes client, and its errors.

Calls to the Kubernetes API: plain objects in and out, failures as errors with a reason.

Called by `provision` and `replay`, in the operator and in the driver of a replay job.

What stands in the way on the side of Kubernetes, each with the reason that conditions show.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import aiohttp
from kubernetes.aio import client, config

from redrive.admin.guards import Fence, guarding
from redrive.admin.http import transport_failure
from redrive.admin.proxies import proxy_for
from redrive.api import Body
from redrive.errors import RedriveError
from redrive.kube import resources
from redrive.kube.resources import Key, Resource, keep_of
from redrive.reasons import Reason

TIMEOUT_SECONDS = 30.0
COMPONENT = "redrive"
PAGE = 500
"""So many objects come with one answer: a list of ten thousand is never in memory twice."""
SMALLER = 5
"""So many times fewer objects are asked for where an answer is too long."""
LONGEST_PAGE = 8 * 2**20
"""In bytes; the rest of a longer answer is not read. Parsed, it may be fifteen times as much.

An object may have over a mebibyte. Those of redrive have some kilobytes, and come in whole pages.
"""
LONGEST_ANSWER = 32 * 2**20
"""In bytes, of any other answer: an object of etcd may have 1.5 MiB, and escapes of JSON more."""
_MAPPINGS = ("spec", "status", "data")
_MERGE_PATCH = "application/merge-patch+json"
_APPLY_PATCH = "application/apply-patch+yaml"
_JSON = "application/json"
_METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_METADATA_OF_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

logger = logging.getLogger(__name__)


def is_in_cluster() -> bool:
    """Whether to use the account of the pod this runs in: KUBECONFIG, where set, comes first."""
    return "KUBECONFIG" not in os.environ and "KUBERNETES_SERVICE_HOST" in os.environ


class _TooLongError(Exception):
    """A page is longer than `LONGEST_PAGE`."""


class Versions(NamedTuple):
    """The `resourceVersion`s of a list.

    Attributes:
        latest: that of the list: no object had a later one when it was made.
        by_uid: that of each object.
    """

    latest: int
    by_uid: Mapping[str, int]


class Kubernetes:
    """A client of one API server; made by `connect`."""

    server_time: datetime | None = None
    """The last answer's time by the clock of the API server, in whole seconds; None where no answer
    has one."""

    def __init__(self, api: client.ApiClient) -> None:
        self._api = api

    @classmethod
    @asynccontextmanager
    async def connect(cls, fence: Fence | None = None) -> AsyncIterator[Kubernetes]:
        """Connect to the cluster this runs in, or to that of a kubeconfig; see `is_in_cluster`.

        Args:
            fence: what every write has to pass; None lets all pass.

        Raises:
            NoCluster: there is neither.
            ProxyInvalid: the environment names a proxy for it that can't be used.
        """
        configuration = client.Configuration()
        # aiohttp's own look at the environment misses networks, reads a .netrc file, and takes a
        # tenth of the operator's time.
        configuration.client_session_kwargs = {"trust_env": False}
        try:
            if is_in_cluster():
                config.load_incluster_config(  # type: ignore[no-untyped-call]
                    client_configuration=configuration
                )
            else:
                # The library itself looks at the variable only once, when it is imported.
                await config.load_kube_config(  # type: ignore[no-untyped-call]
                    config_file=os.environ.get("KUBECONFIG"), client_configuration=configuration
                )
        except config.ConfigException as error:
            raise Reason.NO_CLUSTER.error(
                "no Kubernetes cluster to talk to",
                got=str(error),
                remedy="set KUBECONFIG, or run this in a cluster",
            ) from error
        configuration.proxy = configuration.proxy or proxy_for(configuration.host)
        if fence is not None:
            configuration.trace_configs = [guarding(fence)]
        async with client.ApiClient(configuration) as api:
            api.user_agent = COMPONENT
            yield cls(api)

    async def cluster_id(self) -> str:
        """Return the uid of the namespace `kube-system`, which is as old as the cluster.

        Raises:
            ClusterUnknown: it may not be read.
        """
        try:
            answer = await self.get(resources.NAMESPACES, Key("", "kube-system"))
        except ForbiddenError as error:
            raise Reason.CLUSTER_UNKNOWN.error(
                "nothing tells this cluster from others that may use the same brokers",
                got=str(error),
                remedy="start the operator with --cluster-id, clusterId in the Helm chart, and any "
                "text that no other cluster uses; the uid of the namespace kube-system is usual",
            ) from error
        uid: str = answer["metadata"]["uid"]
        return uid

    async def list(self, resource: Resource, namespace: str | None = None) -> list[Body]:
        """Read all objects that redrive reads of a kind, of one namespace or of all.

        Each is reduced to what is kept of it as soon as its page was read.
        """
        # The items of a list leave out what the list itself says.
        typed = {"apiVersion": resource.api_version, "kind": resource.kind}
        keep = keep_of(resource)
        pages = self._pages(resource, namespace)
        return [
            keep(_object(typed | item, resource.plural))
            async for page in pages
            for item in page["items"] or ()
        ]

    async def versions(self, resource: Resource, namespace: str | None = None) -> Versions:
        """Read the versions of the same objects, and nothing else of them."""
        found, latest = dict[str, int](), 0
        async for page in self._pages(resource, namespace, accept=_METADATA_OF_LIST):
            latest = _version_of(page, resource.plural)
            for item in page["items"] or ():  # null where there are none
                metadata = _object(item, resource.plural)["metadata"]
                found[metadata["uid"]] = int(metadata["resourceVersion"])
        return Versions(latest, found)

    async def _pages(
        self, resource: Resource, namespace: str | None, accept: str = _JSON
    ) -> AsyncIterator[dict[str, Any]]:
        """Read page by page; where objects are long, with fewer in each, down to one."""
        selectors = {"labelSelector": resource.selector, "fieldSelector": resource.fields}
        chosen = {name: each for name, each in selectors.items() if each}
        size, going_on = PAGE, dict[str, str]()
        while True:
            query = {"limit": str(size)} | chosen | going_on
            try:
                page = await self._call(
                    "GET",
                    resource.path(namespace),
                    query=query,
                    accept=accept,
                    longest=LONGEST_PAGE if size > 1 else None,
                )
            except _TooLongError:
                size = max(size // SMALLER, 1)
                continue
            _check_page(page, resource.plural)
            yield page
            if not page["metadata"].get("continue"):
                return
            going_on = {"continue": page["metadata"]["continue"]}
            del page  # before the next one is read

    async def get(self, resource: Resource, key: Key) -> Body:
        """Read one object.

        Raises:
            NotFoundError: it is not there.
        """
        return _object(await self._call("GET", resource.path(*key)), resource.plural)

    async def annotations(self, resource: Resource, key: Key) -> Mapping[str, str]:
        """Read the annotations of one object; of a Secret no data is requested.

        Raises:
            NotFoundError: it does not exist.
        """
        answer = await self._call("GET", resource.path(*key), accept=_METADATA_ONLY)
        return answer["metadata"].get("annotations") or {}

    async def create(self, resource: Resource, body: Body) -> Body:
        """Create *body*; a field that the schema does not know is refused, never dropped.

        Raises:
            ConflictError: an object of that name is there already.
        """
        path = resource.path(body["metadata"]["namespace"])
        created = await self._call("POST", path, body, query={"fieldValidation": "Strict"})
        return _object(created, resource.plural)

    async def is_allowed(self, attributes: Mapping[str, str]) -> bool:
        """Return True if the API server grants this client the right of *attributes*.

        Args:
            attributes: `resourceAttributes` of a SelfSubjectAccessReview.
        """
        return await self._review(
            resources.ACCESS_REVIEWS, None, {"resourceAttributes": attributes}
        )

    async def account_may(self, account: Key, attributes: Mapping[str, str]) -> bool:
        """Return True if a ServiceAccount has the right of *attributes* in its own namespace.

        Args:
            account: the ServiceAccount, which need not exist.
            attributes: `resourceAttributes` of a LocalSubjectAccessReview, without the namespace.

        Raises:
            ForbiddenError: this client may not ask.
        """
        spec = {
            "user": f"system:serviceaccount:{account.namespace}:{account.name}",
            "groups": [
                "system:serviceaccounts",
                f"system:serviceaccounts:{account.namespace}",
                "system:authenticated",
            ],
            "resourceAttributes": {"namespace": account.namespace, **attributes},
        }
        return await self._review(resources.ACCOUNT_REVIEWS, account.namespace, spec)

    async def _review(self, resource: Resource, namespace: str | None, spec: Body) -> bool:
        review = {
            "apiVersion": resource.api_version,
            "kind": resource.kind,
            "metadata": {} if namespace is None else {"namespace": namespace},
            "spec": spec,
        }
        path = resource.path(namespace)
        answer = await self._call("POST", path, review, query={"fieldValidation": "Strict"})
        status = answer.get("status")  # an answer without identity: it is not stored
        if not isinstance(status, dict) or not isinstance(status.get("allowed"), bool):
            raise _malformed(path, "a review without a decision")
        return bool(status["allowed"])

    async def dry_run(self, resource: Resource, body: Body) -> None:
        """Have the API server admit *body* as `create` would, and persist nothing."""
        path = resource.path(body["metadata"]["namespace"])
        query = {"fieldValidation": "Strict", "dryRun": "All"}
        await self._call("POST", path, body, query=query)

    async def patch(self, resource: Resource, key: Key, patch: Body) -> Body:
        """Merge *patch* into one object: None removes a field, a list replaces the whole list.

        A `metadata.resourceVersion` in it makes the patch fail when the object has changed since.

        Raises:
            NotFoundError: it is not there.
            ConflictError: it has changed.
        """
        query = {"fieldValidation": "Strict"}
        patched = await self._call("PATCH", resource.path(*key), patch, query=query)
        return _object(patched, resource.plural)

    async def delete(self, resource: Resource, body: Body) -> None:
        """Delete one object if it is still as in *body*; what it owns is deleted after it.

        Raises:
            NotFoundError: it is not there.
            ConflictError: it has changed, or another one has its name.
        """
        metadata = body["metadata"]
        same = {name: metadata[name] for name in ("uid", "resourceVersion")}
        await self._call("DELETE", resource.path(*Key.of(body)), {"preconditions": same})

    async def patch_status(
        self, resource: Resource, key: Key, status: Body, version: str | None = None
    ) -> Body:
        """Merge *status* into the status of one object, as `patch` does.

        Args:
            version: the `resourceVersion` that the object must have; None accepts any, and then an
                object that was created again under the same name is written too.

        Raises:
            NotFoundError: it is not there.
            ConflictError: it has another version.
        """
        path = f"{resource.path(*key)}/status"
        patch: dict[str, Any] = {"status": status}
        if version is not None:
            patch["metadata"] = {"resourceVersion": version}
        return _object(await self._call("PATCH", path, patch), resource.plural)

    async def apply_status(
        self, resource: Resource, body: Body, status: Body, manager: str
    ) -> Body:
        """Apply *status* to the status of one object, if it is as in *body* (server-side apply).

        *manager* owns the fields of *status* from then on, also those of other managers. Fields
        that it owned before and that *status* lacks are removed.

        Args:
            resource: the kind.
            body: the object as it was read.
            status: all fields that *manager* shall own; none of them is None.
            manager: the field manager.

        Raises:
            NotFoundError: it is not there.
            ConflictError: it has changed since it was read.
            KubernetesError: the API server refuses, as where another object has its name.
        """
        identity = ("name", "namespace", "uid", "resourceVersion")
        applied = {
            "apiVersion": resource.api_version,
            "kind": resource.kind,
            "metadata": {name: body["metadata"][name] for name in identity},
            "status": status,
        }
        after = await self._call(
            "PATCH",
            f"{resource.path(*Key.of(body))}/status",
            applied,
            query={"fieldManager": manager, "force": "true"},
            patch_type=_APPLY_PATCH,
        )
        return _object(after, resource.plural)

    async def read_secret_key(self, secret: Key, key: str) -> str:
        """Read the text under *key* of a Secret, without white space around it.

        Raises:
            SecretNotFoundError: there is no such Secret.
            SecretKeyNotFoundError: it has no such key, or no plain text under it.
            ForbiddenError: the operator may not read it.
        """
        try:
            text = (await self.read_key(resources.SECRETS, secret, key)).decode("ascii").strip()
        except UnicodeDecodeError:
            text = ""
        if not text.isprintable() or not text:
            raise SecretKeyNotFoundError(
                f"key {key!r} of the Secret {secret} holds no token: it is empty or not plain text",
                remedy="store the token itself under that key",
            )
        return text

    async def read_key(self, resource: Resource, where: Key, key: str) -> bytes:
        """Read what a Secret or a ConfigMap holds under *key*.

        Raises:
            SecretNotFoundError: there is no such object.
            SecretKeyNotFoundError: it has no such key, or something else than base64 under it.
            ForbiddenError: the operator may not read it.
        """
        try:
            data = (await self.get(resource, where)).get("data") or {}
        except NotFoundError:
            raise SecretNotFoundError(
                f"a {resource.kind} that the connection names does not exist",
                got=str(where),
                remedy="create it, or correct the reference",
            ) from None
        except KubernetesError as error:
            error.names_object = True
            raise
        if key not in data:
            raise SecretKeyNotFoundError(
                f"the {resource.kind} {where} has no key {key!r}",
                got=sorted(data),
                remedy="add the key, or correct the reference",
            )
        if resource != resources.SECRETS:
            return str(data[key]).encode()
        try:
            return base64.b64decode(data[key])
        except (binascii.Error, TypeError, ValueError):
            return b""

    async def emit(
        self, about: Body, *, kind: str, reason: str, message: str, now: datetime
    ) -> None:
        """Record an Event about an object, for `kubectl describe`; a failure is only logged.

        In a namespace that is being deleted no Event can be made, and work has to go on.

        Args:
            kind: `Normal` or `Warning`.
            reason: one word for machines.
            message: a sentence for people; cut to the 1 024 characters that an Event may have.
        """
        try:
            await self.create(resources.EVENTS, _event(about, kind, reason, message, now))
        except KubernetesError as error:
            logger.warning("no Event %s about %s: %s", reason, Key.of(about), error)

    async def _call(  # noqa: PLR0913  what makes a request, and what may come of it
        self,
        method: str,
        path: str,
        body: Body | None = None,
        *,
        query: dict[str, str] | None = None,
        accept: str = _JSON,
        patch_type: str = _MERGE_PATCH,
        longest: int | None = None,
    ) -> dict[str, Any]:
        headers = {"Accept": accept}
        if method == "PATCH":
            headers["Content-Type"] = patch_type
        request = await self._api.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            response: Any = await self._api.call_api(*request, _request_timeout=TIMEOUT_SECONDS)
            self.server_time = _time_of(response.response)
            answer = await _whole(response.response, longest or LONGEST_ANSWER)
        except (aiohttp.ClientError, OSError) as error:
            raise _unavailable(error) from error
        except _TooLongError:
            if longest is not None:
                raise
            raise _malformed(path, f"more than {LONGEST_ANSWER} bytes") from None
        if not 200 <= response.status < 300:  # noqa: PLR2004  success, as HTTP has it
            text = answer.decode(errors="replace")
            raise kubernetes_error(f"{method} {path}", response.status, text)
        try:
            document = json.loads(answer)
        except (ValueError, RecursionError):
            raise _malformed(path, f"{len(answer)} bytes that are no JSON") from None
        if not isinstance(document, dict):
            raise _malformed(path, type(document).__name__)
        return document


def _time_of(response: aiohttp.ClientResponse) -> datetime | None:
    """Return the time of an answer by the server's clock; None if the header `Date` is invalid."""
    try:
        return parsedate_to_datetime(response.headers.get("Date", "")).astimezone(UTC)
    except ValueError:
        return None


async def _whole(response: aiohttp.ClientResponse, longest: int) -> bytes:
    """Read an answer.

    Raises:
        _TooLongError: it has more than *longest* bytes; the rest is not read.
    """
    read = bytearray()
    async with response:
        async for part in response.content.iter_any():
            read += part
            if len(read) > longest:
                raise _TooLongError
    return bytes(read)


def _unavailable(error: Exception) -> UnavailableError:
    return UnavailableError(
        "the Kubernetes API does not answer",
        got=transport_failure(error),
        remedy="it is tried again; check the API server and the way to it",
    )


def _check_page(page: Body, path: str) -> None:
    """Check the parts of a list that its readers rely on.

    Raises:
        UnavailableError: one of them is missing, or of another type.
    """
    items, metadata = page.get("items", ""), page.get("metadata")
    if not isinstance(items, list | None) or not isinstance(metadata, dict):
        raise _malformed(path, "a list without items or metadata")
    if not all(isinstance(item, dict) for item in items or ()):
        raise _malformed(path, "an item that is no object")
    if not isinstance(metadata.get("continue") or "", str):
        raise _malformed(path, "a continuation that is no text")


def _object(body: Body, path: str) -> Body:
    """Return *body*, which has an identity, and mappings where an object has some.

    Raises:
        UnavailableError: it does not.
    """
    metadata = body.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("uid"), str):
        raise _malformed(path, "an object without metadata or uid")
    _version_of(body, path)
    texts = (metadata.get("name", ""), metadata.get("namespace", ""))
    if not all(isinstance(text, str) for text in texts):
        raise _malformed(path, "a name that is no text")
    mappings = [metadata.get("labels"), metadata.get("annotations")]
    mappings += [body.get(name) for name in _MAPPINGS]
    if not all(isinstance(mapping, dict | None) for mapping in mappings):
        raise _malformed(path, "a field that is no mapping")
    owners = metadata.get("ownerReferences") or []
    if not isinstance(owners, list) or not all(isinstance(owner, dict) for owner in owners):
        raise _malformed(path, "owners that are no mappings")
    return body


def _version_of(body: Body, path: str) -> int:
    version = body["metadata"].get("resourceVersion")
    if not isinstance(version, str) or not version.isdecimal():
        raise _malformed(path, f"resourceVersion {version!r}"[:200])
    return int(version)


def _malformed(path: str, got: str) -> UnavailableError:
    return UnavailableError(
        f"the Kubernetes API gave an answer about {path} that no API server gives",
        got=got[:200],
        remedy="no action needed if it passes: the operator retries; else check the API server, "
        "and proxies before it",
    )


def _event(about: Body, kind: str, reason: str, message: str, now: datetime) -> Body:
    metadata = about["metadata"]
    moment = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "generateName": f"{metadata['name'][:50]}-",
            "namespace": metadata["namespace"],
        },
        "involvedObject": {
            "apiVersion": about["apiVersion"],
            "kind": about["kind"],
            "namespace": metadata["namespace"],
            "name": metadata["name"],
            "uid": metadata["uid"],
        },
        "type": kind,
        "reason": reason,
        "message": message[:1024],
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "firstTimestamp": moment,
        "lastTimestamp": moment,
        "count": 1,
    }


class KubernetesError(RedriveError):
    """The Kubernetes API refused a call, or failed at it."""

    reason = Reason.KUBERNETES_REFUSED


class NotFoundError(KubernetesError):
    """The object is not there (404)."""

    reason = Reason.KUBERNETES_NOT_FOUND


class ConflictError(KubernetesError):
    """The object exists already, or has changed since it was read (409)."""

    reason = Reason.KUBERNETES_CONFLICT


class ForbiddenError(KubernetesError):
    """The ServiceAccount lacks a right (403)."""

    reason = Reason.KUBERNETES_FORBIDDEN


class UnavailableError(KubernetesError):
    """The Kubernetes API does not answer, or limits the rate of calls (429, 5xx)."""

    reason = Reason.KUBERNETES_UNAVAILABLE


class LeaseLostError(RedriveError):
    """Another operator has taken over."""

    reason = Reason.LEASE_LOST


class SecretNotFoundError(RedriveError):
    """A Secret that a spec refers to is not there."""

    reason = Reason.SECRET_NOT_FOUND


class SecretKeyNotFoundError(RedriveError):
    """A Secret lacks the key that a spec refers to, or holds nothing usable there."""

    reason = Reason.SECRET_KEY_NOT_FOUND


class ConnectionNotFoundError(RedriveError):
    """No BrokerConnection has the name that a spec refers to."""

    reason = Reason.CONNECTION_NOT_FOUND


class NamespaceUnreadError(RedriveError):
    """A selector of the BrokerConnection is about the labels of a namespace not yet read."""

    reason = Reason.NAMESPACE_UNREAD


_KINDS: dict[int, type[KubernetesError]] = {
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    429: UnavailableError,
}
_REMEDIES = {
    403: "grant it to the ServiceAccount, as the Helm chart does",
    404: "create it, or install its CustomResourceDefinition",
    409: "it is tried again with what is there now",
}


def kubernetes_error(call: str, status: int, answer: str) -> KubernetesError:
    """Name the failure of *call* by the HTTP *status* and what the API server says about it."""
    try:
        message = str(json.loads(answer)["message"])[:2000]
    except (ValueError, KeyError, TypeError, RecursionError):
        message = f"and {len(answer)} characters that are no error of an API server"
    kind = UnavailableError if status >= 500 else KubernetesError  # noqa: PLR2004
    return _KINDS.get(status, kind)(
        f"the Kubernetes API refused to {call}",
        got=f"{status} {message}",
        remedy=_REMEDIES.get(status, "it is tried again; see the message for what to fix"),
    )
