"""All reads and writes of the stand-in at the API server.

The only module that imports the Kubernetes client. A temporary failure (no connection, a busy
server) is raised as UnavailableError, a deleted object as GoneError.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

import aiohttp
from kubernetes.aio import client, config

from . import apache, jobs
from .clock import now
from .environment import Data, Source
from .errors import GoneError, RefusedError, UnavailableError
from .objects import Application, Object, Status

# The API server ends a watch after this time; a new one begins with a new list.
WATCH_SECONDS = 240

# No kubelet renews a driver's token, so it is valid for long.
TOKEN_SECONDS = 24 * 3600

POLL_SECONDS = 1


@dataclass(frozen=True)
class Api:
    """An API of SparkApplications, or that of Jobs.

    Attributes:
        address: group, version and plural.
        label: label of pods with the name of their application.
        read: returns an object of the API server as an application.
        history: returns the new `.status` from the current one, the status that is reached, and the
            time; None if `.status` does not depend on the current one.
    """

    address: tuple[str, str, str]
    label: str
    read: Callable[[Object], Application]
    history: Callable[[Object, Status, datetime], Object] | None = None

    @property
    def version(self) -> str:
        """The `apiVersion` of its objects."""
        group, version, _ = self.address
        return f"{group}/{version}"


KUBEFLOW = Api(
    ("sparkoperator.k8s.io", "v1beta2", "sparkapplications"),
    "sparkoperator.k8s.io/app-name",
    Application.read,
)
APACHE = Api(
    ("spark.apache.org", "v1", "sparkapplications"),
    "spark.operator/spark-app-name",
    apache.read,
    apache.history,
)
JOBS = Api(("batch", "v1", "jobs"), "batch.kubernetes.io/job-name", jobs.read, jobs.history)
APIS = (KUBEFLOW, APACHE)
"""APIs of Spark operators."""


@dataclass(frozen=True)
class Listing:
    """All existing applications, and the resource version from which a watch continues."""

    applications: tuple[Application, ...]
    resource_version: str


@dataclass(frozen=True)
class Change:
    """An application that was added, modified or deleted."""

    application: Application
    deleted: bool


@dataclass(frozen=True)
class PodState:
    """The state of a driver's pod at the API server; the exit code is None before its end."""

    owners: tuple[str, ...]
    phase: str
    application_id: str
    exit_code: int | None
    reason: str

    @classmethod
    def read(cls, raw: Object) -> PodState:
        """Read a pod."""
        metadata, status = raw["metadata"], raw["status"]
        states = [container["state"] for container in status.get("containerStatuses", [])]
        ended: Object = next((state["terminated"] for state in states if "terminated" in state), {})
        return cls(
            owners=tuple(owner["uid"] for owner in metadata.get("ownerReferences", [])),
            phase=status["phase"],
            application_id=metadata.get("labels", {}).get("spark-app-selector", ""),
            exit_code=ended.get("exitCode"),
            reason=ended.get("reason") or status.get("reason", ""),
        )


class Cluster:
    """The API server with the rights of one kubeconfig, by one API; created by `connected`."""

    def __init__(self, connection: client.ApiClient, api: Api) -> None:
        self.api = api
        self._core = client.CoreV1Api(connection)
        self._custom = client.CustomObjectsApi(connection)
        self._configuration = connection.configuration

    async def listing(self, namespace: str | None) -> Listing:
        """Return the applications of *namespace*, or of all namespaces if it is None."""
        group, version, plural = self.api.address
        with _translated():
            if namespace is None:
                raw = await self._custom.list_cluster_custom_object(group, version, plural)
            else:
                raw = await self._custom.list_namespaced_custom_object(
                    group, version, namespace, plural
                )
        listed = cast("Object", raw)
        return Listing(
            applications=tuple(self.api.read(item) for item in listed["items"]),
            resource_version=listed["metadata"]["resourceVersion"],
        )

    async def changes(self, namespace: str | None, since: str) -> AsyncIterator[Change]:
        """Yield the changes after the resource version *since*, until the watch ends."""
        options: dict[str, Any] = {
            "watch": True,
            "resource_version": since,
            "timeout_seconds": WATCH_SECONDS,
        }
        group, version, plural = self.api.address
        with _translated():
            if namespace is None:
                response = await self._custom.list_cluster_custom_object_without_preload_content(
                    group, version, plural, **options
                )
            else:
                response = await self._custom.list_namespaced_custom_object_without_preload_content(
                    group, version, namespace, plural, **options
                )
            async with response:
                async for line in response.content:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise UnavailableError(event["object"].get("message", "the watch ended"))
                    yield Change(self.api.read(event["object"]), event["type"] == "DELETED")

    async def write_status(self, app: Application, status: Status) -> None:
        """Write *status* into `.status` of *app*, but not into a later object of the same name."""
        group, version, plural = self.api.address
        with _translated():
            patch: list[Object] = [
                {"op": "test", "path": "/metadata/uid", "value": app.uid},
                {"op": "add", "path": "/status", "value": await self._written(app, status)},
            ]
            await self._custom.patch_namespaced_custom_object_status(
                *(group, version, app.namespace, plural, app.name, patch),
                _content_type="application/json-patch+json",
            )

    async def _written(self, app: Application, status: Status) -> Object:
        if self.api.history is None:
            return status.written()
        group, version, plural = self.api.address
        raw = await self._custom.get_namespaced_custom_object(
            group, version, app.namespace, plural, app.name
        )
        return self.api.history(cast("Object", raw).get("status", {}), status, now())

    async def delete(self, app: Application) -> None:
        """Delete the object."""
        group, version, plural = self.api.address
        with _translated():
            await self._custom.delete_namespaced_custom_object(
                group,
                version,
                app.namespace,
                plural,
                app.name,
                body=client.V1DeleteOptions(preconditions=client.V1Preconditions(uid=app.uid)),
            )

    async def data(self, namespace: str, sources: Iterable[Source]) -> Data:
        """Return the content of *sources*, without those that do not exist."""
        content: dict[Source, dict[str, str]] = {}
        for source in sources:
            try:
                content[source] = await self._entries(namespace, source)
            except GoneError:
                continue
        return Data(content)

    async def driver(self, app: Application) -> PodState | None:
        """Return the state of the driver's pod; None if *app* has none."""
        try:
            with _translated():
                raw = await self._core.read_namespaced_pod(app.driver_pod, app.namespace)
        except GoneError:
            return None
        pod = PodState.read(self._core.api_client.sanitize_for_serialization(raw))
        return pod if app.uid in pod.owners else None

    async def delete_driver(self, app: Application) -> None:
        """Delete the driver's pod, and wait until it is gone with its name."""
        while await self.driver(app) is not None:
            with contextlib.suppress(GoneError), _translated():
                await self._core.delete_namespaced_pod(app.driver_pod, app.namespace)
            await asyncio.sleep(POLL_SECONDS)

    async def warn(self, app: Application, message: str, at: datetime) -> None:
        """Record an Event about the driver's pod, as the kubelet does when it cannot start it."""
        pod = client.V1ObjectReference(
            kind="Pod", api_version="v1", namespace=app.namespace, name=app.driver_pod
        )
        event = client.CoreV1Event(
            metadata=client.V1ObjectMeta(name=f"{app.driver_pod}.{uuid.uuid4().hex[:16]}"),
            involved_object=pod,
            type="Warning",
            reason="Failed",
            message=f"Error: {message}",
            first_timestamp=at,
            last_timestamp=at,
            count=1,
        )
        with _translated():
            await self._core.create_namespaced_event(app.namespace, event)

    async def driver_kubeconfig(self, app: Application) -> str:
        """Return a kubeconfig with a token of the driver's ServiceAccount and no other right.

        Raises:
            RefusedError: there is no such ServiceAccount.
        """
        request = client.AuthenticationV1TokenRequest(
            spec=client.V1TokenRequestSpec(audiences=[], expiration_seconds=TOKEN_SECONDS)
        )
        try:
            with _translated():
                answer = await self._core.create_namespaced_service_account_token(
                    app.service_account, app.namespace, request
                )
        except GoneError as error:
            msg = (
                "error looking up service account "
                f'{app.namespace}/{app.service_account}: serviceaccount "{app.service_account}" '
                "not found"
            )
            raise RefusedError(msg) from error
        if answer.status is None or answer.status.token is None:
            msg = f"no token came for service account {app.namespace}/{app.service_account}"
            raise UnavailableError(msg)
        return self._kubeconfig(app.namespace, answer.status.token)

    def _kubeconfig(self, namespace: str, token: str) -> str:
        authority = Path(self._configuration.ssl_ca_cert).read_bytes()
        cluster = {
            "server": self._configuration.host,
            "certificate-authority-data": base64.b64encode(authority).decode(),
        }
        context = {"cluster": "cluster", "user": "driver", "namespace": namespace}
        return json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "cluster", "cluster": cluster}],
                "users": [{"name": "driver", "user": {"token": token}}],
                "contexts": [{"name": "driver", "context": context}],
                "current-context": "driver",
            }
        )

    async def _entries(self, namespace: str, source: Source) -> dict[str, str]:
        with _translated():
            if source.kind == "configmap":
                config_map = await self._core.read_namespaced_config_map(source.name, namespace)
                return dict(config_map.data or {})
            secret = await self._core.read_namespaced_secret(source.name, namespace)
        return {
            # The bytes of a Secret reach the driver unchanged.
            key: base64.b64decode(value).decode(errors="surrogateescape")
            for key, value in (secret.data or {}).items()
        }


@asynccontextmanager
async def connected(kubeconfig: Path | None, api: Api) -> AsyncIterator[Cluster]:
    """Connect with *kubeconfig*, or without one as this pod, until the block ends."""
    configuration = client.Configuration()
    if kubeconfig is None:
        config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    else:
        await config.load_kube_config(  # type: ignore[no-untyped-call]
            str(kubeconfig), client_configuration=configuration, persist_config=False
        )
    async with client.ApiClient(configuration) as connection:
        yield Cluster(connection, api)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except client.ApiException as error:
        if error.status == HTTPStatus.NOT_FOUND:
            raise GoneError(error.reason) from error
        msg = f"the API server answered {error.status} {error.reason}: {error.body}"
        raise UnavailableError(msg) from error
    except (aiohttp.ClientError, OSError) as error:  # a time-out is an OSError too
        msg = f"the API server does not answer: {error}"
        raise UnavailableError(msg) from error
