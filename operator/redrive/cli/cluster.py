"""API server of one context of a kubeconfig: plain objects in and out, and errors for people.

The loader of the Kubernetes client reads the kubeconfig. The models of that client are never
imported: they take a third of a second of a command's start.
"""

from __future__ import annotations

import builtins
import json
import os
import re
import shlex
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from queue import Empty, Queue
from threading import Event, Thread
from typing import Any
from urllib.parse import unquote, unquote_plus, urlencode

import urllib3

from redrive import __version__
from redrive.admin.proxies import proxy_for
from redrive.api import GROUP, Body
from redrive.cli.frame import ClusterFlags
from redrive.cli.kubeconfig import INVALID, impersonation, loaders
from redrive.cli.output import clean, say
from redrive.errors import RedriveError
from redrive.kube.resources import (
    APPROVALS,
    CONNECTIONS,
    INSPECTIONS,
    POLICIES,
    REPLAYS,
    Key,
    Resource,
)

FIELD_MANAGER = "redrive"
PAGE = 500
"""Objects of one page of a list."""
WATCH_SECONDS = 25
"""Time after which the API server ends a watch."""
RENEW_SECONDS = 1.0
"""Pause after a watch that failed."""
TICK_SECONDS = 1.0
"""Longest time between two yields of a watch: ages continue."""
SELF_REVIEWS = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
_OBJECT_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9.:]*[A-Za-z0-9])?")
"""Names of objects, with those of RBAC; any other could be a part of a path or a query."""
CONFLICT = "Conflict"
"""Reason of the error of a write to an object that was changed since it was read."""
POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

KINDS = (CONNECTIONS, POLICIES, REPLAYS, APPROVALS, INSPECTIONS)
_NAMES = {kind.plural: kind.kind for kind in KINDS}
_CHANGING = {"create", "update", "patch", "delete"}
_ROLES = {
    "replayapprovals": "redrive-approver", "inspections": "redrive-inspector",
    "brokerconnections": "redrive-admin",
}  # fmt: skip
_RESPONDING = {("replays", verb) for verb in _CHANGING} | {("retrypolicies", "patch")}
_CORRECT = "correct the option or the object that the message names"
_REFUSED = re.compile(
    r'User "(?P<user>[^"]*)" cannot (?P<verb>\w+) resource "(?P<resource>[\w/]+)"'
    r' in API group "(?P<group>[^"]*)"(?: in the namespace "(?P<namespace>[^"]*)")?'
)


class ClusterError(RedriveError):
    """The API server can't be reached, or it refuses a request."""

    reason = "ClusterError"


class ObjectNotFoundError(ClusterError):
    """The object does not exist."""


class NotPermittedError(ClusterError):
    """The caller lacks a right."""


class Cluster:
    """Client of one API server.

    Attributes:
        flags: as they were given.
        context: name of the context; empty in a pod without a kubeconfig.
        namespace: of the flags, else of the context, else `default`.
    """

    def __init__(self, flags: ClusterFlags) -> None:
        """Read the kubeconfig; sends no request.

        Raises:
            ClusterError: there is no kubeconfig and no pod, or the context does not exist; or no
                namespace can have the name of the flags.
        """
        self.flags = flags
        self._configuration, self._acting, self.context, namespace = _configuration(flags)
        self.namespace = _checked("namespace", flags.namespace or namespace or "default")

    @property
    def scope(self) -> str | None:
        """Return the namespace to list; None for all."""
        return None if self.flags.all_namespaces else self.namespace

    @cached_property
    def user(self) -> str:
        """Name of the caller, as the API server knows it."""
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        answer = self.request("POST", SELF_REVIEWS, review, query=_writing())
        return str(answer["status"]["userInfo"].get("username", ""))

    def list(
        self, resource: Resource, namespace: str | None, *, labels: str = "", fields: str = ""
    ) -> builtins.list[Body]:
        """Read all objects of a namespace, None for all, in pages."""
        _, objects = self._list(resource, namespace, _selectors(labels, fields))
        return objects

    def _list(
        self, resource: Resource, namespace: str | None, selectors: Mapping[str, str]
    ) -> tuple[str, builtins.list[Body]]:
        """Return the resource version of a list, and its objects."""
        query = {"limit": str(PAGE), **selectors}
        typed = resource.typed
        objects: builtins.list[Body] = []
        while True:
            page = self.request("GET", resource.path(namespace), query=query)
            objects += [typed | item for item in page["items"] or ()]
            token = page["metadata"].get("continue")
            if not token:
                return page["metadata"]["resourceVersion"], objects
            query["continue"] = token

    def get(self, resource: Resource, namespace: str | None, name: str) -> Body:
        """Read one object; *namespace* is None for a kind without.

        Raises:
            ObjectNotFoundError: it does not exist, or can't: as a part of the path, its name would
                be another path.
        """
        return self.request("GET", resource.path(namespace, _checked(resource.kind, name)))

    def create(self, resource: Resource, body: Body, *, dry_run: str | None = None) -> Body:
        """Create *body* in its namespace; a field that the schema does not know is refused.

        Args:
            resource: the kind.
            body: the object.
            dry_run: `client` sends nothing; `server` has the API server check it; None creates it.
        """
        if dry_run == "client":
            return body
        path = resource.path(body["metadata"]["namespace"])
        return self.request("POST", path, body, query=_writing(dry_run))

    def patch(
        self, resource: Resource, body: Body, patch: Body, *, dry_run: str | None = None
    ) -> Body:
        """Merge *patch* into the object of *body*, unless another object has its name by now.

        Args:
            resource: the kind.
            body: the object as it was read.
            patch: as a merge patch (RFC 7386).
            dry_run: as for `create`.
        """
        if dry_run == "client":
            return _merged(body, patch)
        metadata = body["metadata"]
        own = {"uid": metadata["uid"], **(patch.get("metadata") or {})}
        path = resource.path(metadata["namespace"], metadata["name"])
        return self.request("PATCH", path, {**patch, "metadata": own}, query=_writing(dry_run))

    def delete(self, resource: Resource, body: Body, *, only_as_read: bool = False) -> None:
        """Delete the object of *body* if it exists, unless another object has its name by now.

        Args:
            resource: the kind.
            body: the object as it was read.
            only_as_read: True to refuse it, with the reason `CONFLICT`, if it was changed since.
        """
        metadata = body["metadata"]
        path = resource.path(metadata["namespace"], metadata["name"])
        fields = ("uid", "resourceVersion") if only_as_read else ("uid",)
        preconditions = {field: metadata[field] for field in fields}
        with suppress(ObjectNotFoundError):
            self.request("DELETE", path, {"preconditions": preconditions})

    def watch(
        self, resource: Resource, namespace: str | None, *, labels: str = "", fields: str = ""
    ) -> Generator[Snapshot]:
        """Yield the objects of a list: at once, at each change, and at least each second.

        A watch that ends, and a resource version that expires, are renewed. Without the API server
        the last objects are yielded, with the error. The iterator never ends; close it to end the
        watch.

        Raises:
            ClusterError: the first list failed.
        """
        latest, selectors = Queue[Snapshot](), _selectors(labels, fields)
        version, objects = self._list(resource, namespace, selectors)
        watcher = _Watcher(self, resource, namespace, selectors, latest.put)
        snapshot = Snapshot(tuple(objects))  # before the thread changes the list
        Thread(target=watcher.run, args=(version, objects), daemon=True).start()
        try:
            while True:
                yield snapshot
                with suppress(Empty):
                    snapshot = latest.get(timeout=TICK_SECONDS)
                    while True:
                        snapshot = latest.get_nowait()
        finally:
            watcher.stop()

    def states(self, resource: Resource, body: Body) -> Generator[Snapshot]:
        """Yield the states of one object, as `watch` does; end when it was deleted."""
        metadata = body["metadata"]
        fields = f"metadata.name={metadata['name']}"
        with closing(self.watch(resource, metadata["namespace"], fields=fields)) as snapshots:
            for snapshot in snapshots:
                own = [it for it in snapshot.objects if it["metadata"]["uid"] == metadata["uid"]]
                if not own:
                    return
                yield Snapshot(tuple(own), snapshot.error)

    def request(
        self,
        method: str,
        path: str,
        body: Body | None = None,
        *,
        query: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Send one request; return the answer. Expired credentials are renewed once.

        Raises:
            ClusterError: no answer, or a refusal; callers handle its subclasses.
        """
        response = self.send(method, path, body, query=query)
        if response.status == HTTPStatus.UNAUTHORIZED:
            self._configuration, self._acting, *_ = _configuration(self.flags)
            self.__dict__.pop("_connections", None)
            response = self.send(method, path, body, query=query)
        answer: dict[str, Any]
        try:
            answer = json.loads(response.data)
        except ValueError:
            answer = {"message": response.data[:200].decode(errors="replace")}
        if response.status >= HTTPStatus.BAD_REQUEST:
            raise self._error(method, path, response.status, answer)
        return answer

    def send(
        self,
        method: str,
        path: str,
        body: Body | None = None,
        *,
        query: Mapping[str, str] | None = None,
        stream: bool = False,
    ) -> urllib3.BaseHTTPResponse:
        """Send one request; return the answer of any status, with *stream* without its body.

        Raises:
            ClusterError: no answer.
        """
        configuration, seconds = self._configuration, self.flags.timeout_seconds
        if configuration.refresh_api_key_hook is not None:
            configuration.refresh_api_key_hook(configuration)
        url = f"{configuration.host}{path}?{urlencode(query or {})}"
        kind = "merge-patch+json" if method == "PATCH" else "json"
        headers = urllib3.HTTPHeaderDict(self._headers())
        headers["Content-Type"] = f"application/{kind}"
        begin, status = time.monotonic(), "no answer"
        try:
            response = self._connections.request(
                method,
                url,
                body=None if body is None else json.dumps(body).encode(),
                headers=headers,
                timeout=max(seconds, 2 * WATCH_SECONDS) if stream else seconds or None,
                preload_content=not stream,
            )
            status = str(response.status)
        except urllib3.exceptions.HTTPError as error:
            raise self.silence(error) from error
        finally:
            if self.flags.is_verbose:
                milliseconds = (time.monotonic() - begin) * 1_000
                say(f"{method} {clean(unquote_plus(url))} {status} in {milliseconds:.0f} ms")
        return response

    def silence(self, error: Exception) -> ClusterError:
        """Return the error of a request without an answer."""
        reason = getattr(error, "reason", None) or error
        return ClusterError(
            f"the API server of context {self.context or '(pod)'} does not answer",
            got=f"{self._configuration.host}: {reason}",
            remedy="check --context, the network and the credentials",
        )

    def _headers(self) -> Iterator[tuple[str, str]]:
        yield "User-Agent", f"redrive/{__version__}"
        yield "Accept", "application/json"
        token = self._configuration.api_key.get("BearerToken")
        if token:
            yield "Authorization", token
        yield from self._acting

    @cached_property
    def _connections(self) -> urllib3.PoolManager:
        configuration = self._configuration
        options: dict[str, Any] = {
            # With Retry-After the API server has not processed the request, of whatever method.
            "retries": urllib3.Retry(
                connect=2,
                read=0,
                redirect=0,
                status=3,
                allowed_methods=None,
                raise_on_status=False,
                backoff_factor=0.2,
            ),
            "ca_certs": configuration.ssl_ca_cert,
            "cert_file": configuration.cert_file,
            "key_file": configuration.key_file,
            "cert_reqs": "CERT_REQUIRED" if configuration.verify_ssl else "CERT_NONE",
        }
        if configuration.tls_server_name:
            options["server_hostname"] = configuration.tls_server_name
        if proxy := proxy_for(configuration.host, configuration.proxy):
            login = unquote(urllib3.util.parse_url(proxy).auth or "") or None
            headers = urllib3.make_headers(proxy_basic_auth=login)
            return urllib3.ProxyManager(proxy, proxy_headers=headers, **options)
        return urllib3.PoolManager(**options)

    def _error(self, method: str, path: str, status: int, answer: Body) -> ClusterError:
        message = str(answer.get("message", "")) or f"HTTP {status}"
        if status == HTTPStatus.FORBIDDEN:
            return _not_permitted(message)
        if status == HTTPStatus.UNAUTHORIZED:
            return NotPermittedError(
                f"the API server of context {self.context} does not accept the credentials",
                got=message,
                remedy="log in again, or choose another --context",
            )
        if status == HTTPStatus.NOT_FOUND:
            return self._not_found(path, answer)
        if status == HTTPStatus.CONFLICT:
            problem = "the object exists, or it changed meanwhile"
            remedy = "read the object again, and repeat the command"
            reason = CONFLICT if answer.get("reason") == CONFLICT else None
            return ClusterError(problem, got=message, remedy=remedy, reason=reason)
        if "strict decoding error" in message:
            problem = f"the {GROUP} definitions of the cluster lack a field that this command sends"
            remedy = f"upgrade the chart to the release of this program, {__version__}"
        elif status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            problem = "the API server can't process the request now"
            remedy = "repeat the command later; check the API server if it persists"
        else:
            problem, remedy = f"the API server refuses {method}", _CORRECT
        return ClusterError(problem, got=message, remedy=remedy)

    def _not_found(self, path: str, answer: Body) -> ClusterError:
        details = answer.get("details") or {}
        if f"/apis/{GROUP}/" in path and not details.get("name"):
            return ClusterError(
                f"the cluster of context {self.context} has no {GROUP} definitions",
                got=path,
                remedy="install the chart, or choose another --context",
            )
        namespace = path.partition("/namespaces/")[2].partition("/")[0]
        kind = _NAMES.get(details.get("kind", ""), details.get("kind") or "object")
        return ObjectNotFoundError(
            f"there is no {kind} {details.get('name', path)} in namespace {namespace}",
            remedy="check the name, and choose the namespace with -n",
        )


def clean_up(
    cluster: Cluster,
    resource: Resource,
    body: Body,
    patch: Body | None = None,
    delete: Callable[[Resource, Body], object] | None = None,
) -> None:
    """Delete an object that a command has created, or *patch* it.

    Print an error with the command to run instead: the caller may have an error of its own.

    Args:
        delete: deletes it; defaults to the method of *cluster*.
    """
    try:
        if patch is None:
            (delete or cluster.delete)(resource, body)
        else:
            cluster.patch(resource, body, patch)
    except ObjectNotFoundError:
        pass  # it was deleted
    except ClusterError as error:
        key, kind = Key.of(body), resource.kind
        words = ["kubectl", "delete", kind.lower(), key.name, *cluster.flags.words(key.namespace)]
        if patch is not None:
            words[1] = "patch"
            words += ["--type", "merge", "-p", json.dumps(patch)]
        problem = f"the {kind} {key} was not {'deleted' if patch is None else 'changed'}"
        say(f"warning: {problem}; got {error}; run {shlex.join(words)}")


@dataclass(frozen=True)
class Snapshot:
    """Objects of a watch at one moment.

    Attributes:
        error: of the API server, while it does not answer; the objects are those from before.
    """

    objects: tuple[Body, ...]
    error: ClusterError | None = None


@dataclass
class _Watcher:
    """Thread of one watch: publishes the objects after each change."""

    cluster: Cluster
    resource: Resource
    namespace: str | None
    selectors: Mapping[str, str]
    publish: Callable[[Snapshot], None]
    _stopped: Event = field(default_factory=Event, init=False)
    _response: urllib3.BaseHTTPResponse | None = field(default=None, init=False)

    def stop(self) -> None:
        """End the watch, also while it waits for a change."""
        self._stopped.set()
        if self._response is not None:
            with suppress(ValueError, OSError, RuntimeError):  # it has ended
                self._response.shutdown()

    def run(self, version: str, objects: list[Body]) -> None:
        """Watch from *version* on, and list again when the watch can't continue."""
        while not self._stopped.is_set():
            try:
                self._follow(version, objects)
                if self._stopped.is_set():
                    return
                version, objects = self.cluster._list(  # noqa: SLF001  of the same module
                    self.resource, self.namespace, self.selectors
                )
                self.publish(Snapshot(tuple(objects)))
            except ClusterError as error:
                self.publish(Snapshot(tuple(objects), error))
                self._stopped.wait(RENEW_SECONDS)

    def _follow(self, version: str, objects: list[Body]) -> None:
        """Publish changes until the watch ends."""
        query = {"watch": "true", "resourceVersion": version, "timeoutSeconds": str(WATCH_SECONDS)}
        query |= self.selectors
        path = self.resource.path(self.namespace)
        response = self.cluster.send("GET", path, query=query, stream=True)
        self._response = response
        if response.status != HTTPStatus.OK or self._stopped.is_set():
            response.close()
            if response.status != HTTPStatus.GONE:  # which an expired version has
                self._stopped.wait(RENEW_SECONDS)
            return
        try:
            for line in response:
                if self._stopped.is_set():
                    break
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                body = event["object"]
                uid = body["metadata"]["uid"]
                position = next(
                    (i for i, other in enumerate(objects) if other["metadata"]["uid"] == uid), None
                )
                if position is not None:
                    del objects[position]
                if event["type"] != "DELETED":
                    objects.insert(len(objects) if position is None else position, body)
                self.publish(Snapshot(tuple(objects)))
        except (urllib3.exceptions.HTTPError, ValueError) as error:
            raise self.cluster.silence(error) from error


def _selectors(labels: str, fields: str) -> dict[str, str]:
    selectors = {"labelSelector": labels, "fieldSelector": fields}
    return {name: value for name, value in selectors.items() if value}


def role_with(verb: str, resource: str) -> str:
    """Return the role of the chart that has *verb* on *resource*, a plural of redrive's kinds."""
    if verb not in _CHANGING:
        return "redrive-viewer"
    role = "redrive-responder" if (resource, verb) in _RESPONDING else "redrive-editor"
    return _ROLES.get(resource, role)


def _not_permitted(message: str) -> NotPermittedError:
    refused = _REFUSED.search(message)
    if refused is None:
        return NotPermittedError("the API server refuses", got=message, remedy=_CORRECT)
    verb, resource, group = refused["verb"], refused["resource"], refused["group"]
    namespace = refused["namespace"]
    place = f"in namespace {namespace}" if namespace else "in all namespaces"
    role = role_with(verb, resource) if group == GROUP else "cluster administrator"
    return NotPermittedError(
        f"not permitted to {verb} {resource}{f'.{group}' if group else ''} {place}; you are "
        f"{refused['user']}",
        remedy=f"ask for the role {role} there",
    )


def _writing(dry_run: str | None = None) -> dict[str, str]:
    query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
    return query | {"dryRun": "All"} if dry_run else query


def _merged(body: Body, patch: Body) -> Body:
    """Apply a merge patch (RFC 7386)."""
    merged = dict(body)
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, dict):
            merged[name] = _merged(merged.get(name) or {}, value)
        else:
            merged[name] = value
    return merged


def _checked(kind: str, name: str) -> str:
    if not _OBJECT_NAME.fullmatch(name):
        raise ObjectNotFoundError(
            f"no {kind} can have this name", got=name, remedy="use the name that kubectl shows"
        )
    return name


def _configuration(flags: ClusterFlags) -> tuple[Any, list[tuple[str, str]], str, str]:
    """Return the configuration, headers of the impersonated user, the context, its namespace."""
    loader, pod = loaders()
    paths = flags.kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
    configuration = loader.Configuration()
    configuration.proxy = None  # unless the kubeconfig names one, `proxy_for` decides
    try:
        content = loader.KubeConfigMerger(paths).config
        is_named = flags.kubeconfig or flags.context
        if content is None and not is_named and "KUBERNETES_SERVICE_HOST" in os.environ:
            pod.load_incluster_config(client_configuration=configuration)
            acting = impersonation({}, flags.user, flags.groups)
            return configuration, acting, "", POD_NAMESPACE.read_text("utf-8")
        if content is None:
            raise ClusterError(
                "there is no kubeconfig", got=paths, remedy="set KUBECONFIG, or use --kubeconfig"
            )
        config = loader.KubeConfigLoader(
            config_dict=content, active_context=flags.context, config_base_path=None
        )
        config.load_and_set(configuration)
        context = config.current_context
        name = context["context"].get("user")
        user = content["users"].get_with_name(name, safe=True) if name else None
        entry = {} if user is None else user.value.get("user") or {}
        acting = impersonation(entry, flags.user, flags.groups)
    except (*INVALID, loader.ConfigException, loader.yaml.YAMLError) as error:
        raise ClusterError(
            "the kubeconfig can't be used", got=str(error), remedy="check it, and --context"
        ) from error
    return configuration, acting, context["name"], context["context"].get("namespace") or ""
