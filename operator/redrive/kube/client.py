"""Client of the Kubernetes API, with plain objects, and its errors.

The operator and the driver of a replay job use it. Each failure has a reason that conditions show.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import aiohttp
from kubernetes.aio import client, config

from redrive.admin.fair_slots import FairSlots
from redrive.admin.guards import Fence, guarding
from redrive.admin.http import AnswerTooLongError, read_bounded, transport_failure
from redrive.admin.proxies import proxy_for
from redrive.api import Body
from redrive.errors import RedriveError
from redrive.kube import resources
from redrive.kube.resources import Key, Resource, keep_of
from redrive.reasons import Reason

TIMEOUT_SECONDS = 30.0
CALLS, OF_NAMESPACE = 80, 20
"""Maximum calls at a time, and those about objects of one namespace: others find a free slot."""
COMPONENT = "redrive"
EVENTS_AT_ONCE, EVENT_SECONDS = 25, 300.0
"""Events that an object may have at once, and the seconds until it may have one more."""
PAGE = 500
"""Objects in one page: a list of ten thousand is never in memory twice."""
SMALLER = 5
"""Factor by which a page is reduced if its answer is too long."""
LONGEST_PAGE = 8 * 2**20
"""Maximum bytes of a page; the rest is not read. Parsed, it may take fifteen times as much memory.

Objects may exceed one mebibyte. Those of redrive have some kilobytes, so they come in full pages.
"""
LONGEST_ANSWER = 32 * 2**20
"""Maximum bytes of any other answer. An object in etcd has up to 1.5 MiB, plus escapes of JSON."""
_MERGE_PATCH = "application/merge-patch+json"
_APPLY_PATCH = "application/apply-patch+yaml"
_JSON = "application/json"
_STRICT = {"fieldValidation": "Strict"}
_METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_METADATA_OF_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

logger = logging.getLogger(__name__)


def is_in_cluster() -> bool:
    """Return True in a pod without KUBECONFIG, which has priority."""
    return "KUBECONFIG" not in os.environ and "KUBERNETES_SERVICE_HOST" in os.environ


class Versions(NamedTuple):
    """The `resourceVersion`s of a list.

    Attributes:
        latest: version of the list; at that time no object had a later one.
        by_uid: version of each object.
    """

    latest: int
    by_uid: Mapping[str, int]


class Kubernetes:
    """Client of one API server; created by `connect`.

    Attributes:
        event_budget: budget of the Events that it creates.
    """

    server_time: datetime | None = None
    """Time of the latest answer by the clock of the API server, in whole seconds; None if the
    answer had none."""

    def __init__(self, api: client.ApiClient) -> None:
        self._api = api
        self._slots = FairSlots(CALLS, OF_NAMESPACE)
        self.event_budget = EventBudget()

    @classmethod
    @asynccontextmanager
    async def connect(cls, fence: Fence | None = None) -> AsyncIterator[Kubernetes]:
        """Connect to the cluster of this pod, or of a kubeconfig; see `is_in_cluster`.

        Args:
            fence: must be open for each write; None allows all writes.

        Raises:
            NoCluster: there is neither.
            ProxyInvalid: the proxy in the environment cannot be used.
        """
        configuration = client.Configuration()
        # aiohttp's own evaluation of the environment ignores networks, reads .netrc, and takes a
        # tenth of the operator's time.
        configuration.client_session_kwargs = {"trust_env": False}
        try:
            if is_in_cluster():
                config.load_incluster_config(  # type: ignore[no-untyped-call]
                    client_configuration=configuration
                )
            else:
                # The library evaluates the variable only at its import.
                await config.load_kube_config(  # type: ignore[no-untyped-call]
                    config_file=os.environ.get("KUBECONFIG"), client_configuration=configuration
                )
        except config.ConfigException as error:
            raise Reason.NO_CLUSTER.error(
                "no Kubernetes cluster is configured",
                got=str(error),
                remedy="set KUBECONFIG, or run in a cluster",
            ) from error
        configuration.proxy = proxy_for(configuration.host, configuration.proxy)
        if fence is not None:
            configuration.trace_configs = [guarding(fence)]
        async with client.ApiClient(configuration) as api:
            api.user_agent = COMPONENT
            yield cls(api)

    async def cluster_id(self) -> str:
        """Return the uid of the namespace `kube-system`, which identifies the cluster.

        Raises:
            ClusterUnknown: it may not be read.
        """
        try:
            answer = await self.get(resources.NAMESPACES, Key("", "kube-system"))
        except ForbiddenError as error:
            raise Reason.CLUSTER_UNKNOWN.error(
                "the uid of the namespace kube-system, the id of this cluster, may not be read",
                got=str(error),
                remedy="start the operator with --cluster-id (clusterId in the Helm chart) and a "
                "text that no other cluster uses, usually that uid",
            ) from error
        uid: str = answer["metadata"]["uid"]
        return uid

    async def list(self, resource: Resource, namespace: str | None = None) -> list[Body]:
        """List the objects of a kind in one namespace or in all.

        Each page is reduced to the retained fields before the next is read.
        """
        # Items of a list have no apiVersion and kind.
        typed = resource.typed
        keep = keep_of(resource)
        pages = self._pages(resource, namespace)
        return [
            keep(_object(typed | item, resource.plural))
            async for page in pages
            for item in page["items"] or ()
        ]

    async def versions(self, resource: Resource, namespace: str | None = None) -> Versions:
        """Return the versions of the same objects."""
        by_uid, latest = dict[str, int](), 0
        async for page in self._pages(resource, namespace, accept=_METADATA_OF_LIST):
            latest = _version_of(page, resource.plural)
            for item in page["items"] or ():  # null if there are none
                metadata = _object(item, resource.plural)["metadata"]
                by_uid[metadata["uid"]] = int(metadata["resourceVersion"])
        return Versions(latest, by_uid)

    async def _pages(
        self, resource: Resource, namespace: str | None, accept: str = _JSON
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield pages; if objects are long, with fewer objects, down to one."""
        selectors = {"labelSelector": resource.selector, "fieldSelector": resource.fields}
        chosen = {name: selector for name, selector in selectors.items() if selector}
        size, continuation = PAGE, dict[str, str]()
        while True:
            query = {"limit": str(size)} | chosen | continuation
            try:
                page = await self._call(
                    "GET",
                    resource.path(namespace),
                    query=query,
                    accept=accept,
                    longest=LONGEST_PAGE if size > 1 else None,
                )
            except AnswerTooLongError:
                size = max(size // SMALLER, 1)
                continue
            _check_page(page, resource.plural)
            yield page
            if not page["metadata"].get("continue"):
                return
            continuation = {"continue": page["metadata"]["continue"]}
            del page  # before the next page is read

    async def get(self, resource: Resource, key: Key) -> Body:
        """Read one object.

        Raises:
            NotFoundError: it does not exist.
        """
        return _object(await self._call("GET", resource.path(*key)), resource.plural)

    async def annotations(self, resource: Resource, key: Key) -> Mapping[str, str]:
        """Read the annotations of one object; the data of a Secret is not requested.

        Raises:
            NotFoundError: it does not exist.
        """
        answer = await self._call("GET", resource.path(*key), accept=_METADATA_ONLY)
        return _object(answer, resource.plural)["metadata"].get("annotations") or {}

    async def create(self, resource: Resource, body: Body) -> Body:
        """Create *body*; fields that are not in the schema are refused, never dropped.

        Raises:
            ConflictError: an object of that name exists.
        """
        path = resource.path(body["metadata"]["namespace"])
        created = await self._call("POST", path, body, query=_STRICT)
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
            **resource.typed,
            "metadata": {} if namespace is None else {"namespace": namespace},
            "spec": spec,
        }
        path = resource.path(namespace)
        answer = await self._call("POST", path, review, query=_STRICT)
        status = answer.get("status")  # an answer without identity: it is not stored
        if not isinstance(status, dict) or not isinstance(status.get("allowed"), bool):
            raise _malformed(path, "a review without a decision")
        return bool(status["allowed"])

    async def dry_run(self, resource: Resource, body: Body) -> None:
        """Validate *body* as `create` would, without storing it."""
        path = resource.path(body["metadata"]["namespace"])
        await self._call("POST", path, body, query=_STRICT | {"dryRun": "All"})

    async def patch(self, resource: Resource, key: Key, patch: Body) -> Body:
        """Merge *patch* into one object: None removes a field, and lists are replaced.

        With a `metadata.resourceVersion` the patch fails if the object has changed.

        Raises:
            NotFoundError: it does not exist.
            ConflictError: it has changed.
        """
        patched = await self._call("PATCH", resource.path(*key), patch, query=_STRICT)
        return _object(patched, resource.plural)

    async def delete(self, resource: Resource, body: Body) -> None:
        """Delete one object if it is unchanged since *body*; its dependents are deleted later.

        Raises:
            NotFoundError: it does not exist.
            ConflictError: it has changed, or another object has its name.
        """
        metadata = body["metadata"]
        same = {name: metadata[name] for name in ("uid", "resourceVersion")}
        await self._call("DELETE", resource.path(*Key.of(body)), {"preconditions": same})

    async def patch_status(
        self, resource: Resource, key: Key, status: Body, version: str | None = None
    ) -> Body:
        """Merge *status* into the status of one object, as `patch` does.

        Args:
            version: required `resourceVersion`; None accepts any, even of an object that was
                recreated under the same name.

        Raises:
            NotFoundError: it does not exist.
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
        """Apply *status* to one object if it is unchanged since *body* (server-side apply).

        *manager* then owns the fields of *status*, including those of other managers. Fields that
        it owned before and that are missing in *status* are removed.

        Args:
            resource: the kind.
            body: the object as it was read.
            status: all fields that *manager* should own, without None.
            manager: the field manager.

        Raises:
            NotFoundError: it does not exist.
            ConflictError: it has changed since it was read.
            KubernetesError: the API server refuses, for example if another object has its name.
        """
        identity = ("name", "namespace", "uid", "resourceVersion")
        applied = {
            **resource.typed,
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
        """Read the text under *key* of a Secret, without surrounding white space.

        Raises:
            ReferenceNotFoundError: the Secret or its key does not exist, or is not plain text.
            ForbiddenError: the operator may not read it.
        """
        try:
            text = (await self.read_key(resources.SECRETS, secret, key)).decode("ascii").strip()
        except UnicodeDecodeError:
            text = ""
        if not text.isprintable() or not text:
            raise ReferenceNotFoundError(
                f"key {key!r} of the Secret {secret} has no token: it is empty or not plain text",
                remedy="store the token itself under that key",
                reason=Reason.SECRET_KEY_NOT_FOUND,
            )
        return text

    async def read_key(self, resource: Resource, where: Key, key: str) -> bytes:
        """Read the value of *key* in a Secret or a ConfigMap.

        Raises:
            ReferenceNotFoundError: the object or its key does not exist.
            ForbiddenError: the operator may not read it.
        """
        try:
            data = (await self.get(resource, where)).get("data") or {}
        except NotFoundError:
            raise ReferenceNotFoundError(
                f"the {resource.kind} of the connection does not exist",
                got=str(where),
                remedy="create it, or correct the reference",
            ) from None
        except KubernetesError as error:
            error.names_object = True
            raise
        if key not in data:
            raise ReferenceNotFoundError(
                f"the {resource.kind} {where} has no key {key!r}",
                got=sorted(data),
                remedy="add the key, or correct the reference",
                reason=Reason.SECRET_KEY_NOT_FOUND,
            )
        if resource != resources.SECRETS:
            return str(data[key]).encode()
        try:
            return base64.b64decode(data[key])
        except (binascii.Error, TypeError, ValueError):
            return b""

    async def _call(  # noqa: PLR0913  parts of a request
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
        namespace = path.partition("/namespaces/")[2].partition("/")[0]
        try:
            async with self._slots.slot(namespace):
                response: Any = await self._api.call_api(*request, _request_timeout=TIMEOUT_SECONDS)
                self.server_time = _time_of(response.response)
                async with response.response as stream:
                    parts = stream.content.iter_any()
                    answer = await read_bounded(parts, longest or LONGEST_ANSWER)
        except (aiohttp.ClientError, OSError) as error:
            raise UnavailableError(
                "the Kubernetes API does not answer",
                got=transport_failure(error),
                remedy="the operator retries; check the API server and the network path to it",
            ) from None  # a traceback with an error of the proxy would show its password
        except AnswerTooLongError:
            if longest is not None:
                raise
            raise _malformed(path, f"more than {LONGEST_ANSWER} bytes") from None
        if not 200 <= response.status < 300:  # noqa: PLR2004  success in HTTP
            text = answer.decode(errors="replace")
            raise kubernetes_error(f"{method} {path}", response.status, text)
        try:
            document = json.loads(answer)
        except (ValueError, RecursionError):
            raise _malformed(path, f"{len(answer)} bytes that are not JSON") from None
        if not isinstance(document, dict):
            raise _malformed(path, type(document).__name__)
        return document


def _time_of(response: aiohttp.ClientResponse) -> datetime | None:
    try:
        return parsedate_to_datetime(response.headers.get("Date", "")).astimezone(UTC)
    except (OverflowError, ValueError):
        return None


def _check_page(page: Body, path: str) -> None:
    """Check the parts of a list that callers rely on; raise `UnavailableError` otherwise."""
    items, metadata = page.get("items", ""), page.get("metadata")
    if not isinstance(items, list | None) or not isinstance(metadata, dict):
        raise _malformed(path, "a list without items or metadata")
    if not all(isinstance(item, dict) for item in items or ()):
        raise _malformed(path, "an item that is not an object")
    if not isinstance(metadata.get("continue") or "", str):
        raise _malformed(path, "a continuation that is not text")


def _object(body: Body, path: str) -> Body:
    """Return *body*, or raise `UnavailableError` if it is malformed."""
    if problem := resources.malformed(body):
        raise _malformed(path, problem)
    return body


def _version_of(body: Body, path: str) -> int:
    version = body["metadata"].get("resourceVersion")
    if not resources.is_version(version):
        raise _malformed(path, f"resourceVersion {version!r}")
    return int(version)


def _malformed(path: str, got: str) -> UnavailableError:
    return UnavailableError(
        f"the Kubernetes API gave an unexpected answer about {path}",
        got=got[:200],
        remedy="No action needed if it does not persist: the operator retries; otherwise check the "
        "API server and its proxies",
    )


class EventBudget:
    """Budget of Events about each object: a burst, then few, as client-go has it.

    An object whose state changes continuously would otherwise fill the store of the API server.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._full_at: dict[str, float] = {}

    def take(self, uid: str) -> bool:
        """Return True if an object may have another Event now."""
        now = self._clock()
        while self._full_at and next(iter(self._full_at.values())) <= now:
            del self._full_at[next(iter(self._full_at))]
        full_at = max(now, self._full_at.get(uid, now)) + EVENT_SECONDS
        if full_at > now + EVENTS_AT_ONCE * EVENT_SECONDS:
            return False
        self._full_at.pop(uid, None)
        self._full_at[uid] = full_at
        return True


class KubernetesError(RedriveError):
    """The Kubernetes API refused a call, or a call failed."""

    reason = Reason.KUBERNETES_REFUSED


class NotFoundError(KubernetesError):
    """The object does not exist (404)."""

    reason = Reason.KUBERNETES_NOT_FOUND


class ConflictError(KubernetesError):
    """The object already exists, or has changed since it was read (409)."""

    reason = Reason.KUBERNETES_CONFLICT


class ForbiddenError(KubernetesError):
    """The ServiceAccount has no permission (403, unless by admission)."""

    reason = Reason.KUBERNETES_FORBIDDEN


class UnavailableError(KubernetesError):
    """The Kubernetes API does not answer, or limits the rate of calls (429, 5xx)."""

    reason = Reason.KUBERNETES_UNAVAILABLE


class ReferenceNotFoundError(RedriveError):
    """A spec refers to an object that does not exist: a Secret or ConfigMap, or a connection."""

    reason = Reason.SECRET_NOT_FOUND


_KINDS: dict[int, type[KubernetesError]] = {
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    429: UnavailableError,
}
_REMEDIES = {
    403: "grant it to the ServiceAccount, as the Helm chart does",
    404: "create it, or install its CustomResourceDefinition",
    409: "the operator retries with the current object",
}
_ADMISSION = "exceeded quota", "failed quota", "denied request", "denied the request"
"""Texts of refusals by quotas, policies and webhooks, which no permission lifts."""


def kubernetes_error(call: str, status: int, answer: str) -> KubernetesError:
    """Return the error of *call* from the HTTP *status* and the message of the API server."""
    try:
        message = str(json.loads(answer)["message"])[:2000]
    except (ValueError, KeyError, TypeError, RecursionError):
        message = f"and {len(answer)} characters that are not an error of an API server"
    code = 0 if any(text in message for text in _ADMISSION) else status
    kind = UnavailableError if code >= 500 else KubernetesError  # noqa: PLR2004
    return _KINDS.get(code, kind)(
        f"the Kubernetes API refused to {call}",
        got=f"{status} {message}",
        remedy=_REMEDIES.get(code, "the operator retries; correct the cause in the message"),
    )
