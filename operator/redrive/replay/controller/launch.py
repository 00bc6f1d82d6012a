"""Application of an admitted Replay: pods from a job template, and mounted credentials.

`reconcile` creates the application once and never changes it, because a Spark operator kills and
restarts a run whose spec changes.

Pods mount the credentials of the replay role in one volume, and an environment variable describes
its files. Manifests contain only references to Secrets of the Replay's namespace, and only the
named keys of a Secret are mounted.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from redrive.api import Body
from redrive.api.connection import CaKind, CaRef, OAuth2, ReplayAuthentication, ReplayIdentity
from redrive.api.job import (
    ACCESS_FOLDER,
    SPARK_ROLES,
    JobPod,
    JobTemplate,
    Role,
    pod_of,
    references,
)
from redrive.api.replay import ReplayEngine
from redrive.auth.method import ACCESS_VARIABLE, BrokerAccess, Method
from redrive.kube import resources
from redrive.kube.context import Settings
from redrive.kube.resources import MANAGED, POLICY_LABEL, Key, Resource
from redrive.replay.spec import PodSize, ReplayJob

SPARK_VERSION = "4.3.0"

_RETRIES = 3
_RETRY_SECONDS = 10
_NAME_ROOM = 26
"""Length to which the name of a Replay is cut, because Spark appends to names, up to 63
characters."""


def name_of(replay: Body) -> str:
    """Return the name of the application of *replay*, which depends on its name and uid alone.

    A Replay that is created again under the same name gets another application.
    """
    metadata = replay["metadata"]
    digest = hashlib.sha256(metadata["uid"].encode()).hexdigest()[:10]
    readable = metadata["name"][:_NAME_ROOM].replace(".", "-").strip("-")
    return f"replay-{readable}-{digest}"


@dataclass(frozen=True)
class ChosenTemplate:
    """The job template of a Replay, its number of executors, and its engine, Job or Spark."""

    name: str
    template: JobTemplate
    executors: int
    engine: ReplayEngine


def application(  # noqa: PLR0913  each has a source of its own
    replay: Body,
    job: ReplayJob,
    access: PodAccess,
    chosen: ChosenTemplate,
    settings: Settings,
    *,
    image: str,
) -> JobApplication:
    """Return the application to create for *replay*.

    A failed run is restarted up to `_RETRIES` times and resumes from the ledger.

    Args:
        replay: the Replay.
        job: its run.
        access: volumes and variables with the credentials of the replay role.
        chosen: its job template.
        settings: of the operator.
        image: of the pods, where the template has none.
    """
    template, labels = chosen.template, _labels(replay)
    is_job = chosen.engine is ReplayEngine.JOB
    roles = (Role.JOB,) if is_job else SPARK_ROLES
    pods = {role: _completed(pod_of(template, role), access, labels) for role in roles}
    if is_job:
        pod = pods[Role.JOB]
        job = dataclasses.replace(job, pod=PodSize(pod.cores, pod.mebibytes * 2**20))
    sizes = [pod.properties(role) for role, pod in pods.items()]
    return JobApplication(
        metadata=_metadata(replay, template, labels),
        image=template.image or image,
        pull_policy=next((pod.pull_policy for pod in pods.values() if pod.pull_policy), ""),
        program=settings.replay_application,
        argument=job.encode(),
        service_account=settings.job_service_account if is_job else settings.replay_service_account,
        spark_version=SPARK_VERSION,
        spark_conf={
            **template.spark_conf,
            **_properties(name_of(replay), chosen.executors),
            **{name: value for size in sizes for name, value in size.items()},
        },
        pods=pods,
        executors=chosen.executors,
        retries=_RETRIES,
        retry_seconds=_RETRY_SECONDS,
    )


def _labels(replay: Body) -> dict[str, str]:
    name, value = MANAGED
    return {
        name: value,
        "app.kubernetes.io/name": "redrive",
        "app.kubernetes.io/component": "replay",
        POLICY_LABEL: replay["spec"]["policyRef"]["name"],
        "redrive.io/replay": replay["metadata"]["name"],
    }


def _metadata(replay: Body, template: JobTemplate, labels: Mapping[str, str]) -> dict[str, Any]:
    annotations = dict(template.metadata.annotations)
    return {
        "name": name_of(replay),
        "namespace": Key.of(replay).namespace,
        "labels": {**template.metadata.labels, **labels},
        **({"annotations": annotations} if annotations else {}),
        "ownerReferences": [resources.owner_reference(resources.REPLAYS, replay)],
    }


def _properties(name: str, executors: int) -> dict[str, str]:
    """Return the Spark properties that nothing overrides, beside sizes."""
    return {
        # A second copy of a task would find its producers taken, and fail the stage.
        "spark.speculation": "false",
        # The default derives from the name of the Replay, which may be too long or begin with a
        # digit.
        "spark.kubernetes.executor.podNamePrefix": name,
        # Executors need no file of the driver's configuration. So the driver needs no right to
        # ConfigMaps, with which it could write those of other workloads.
        "spark.kubernetes.executor.disableConfigMap": "true",
        "spark.executor.instances": str(executors),
        # Read only where `sparkConf` of the template enables dynamic allocation.
        "spark.dynamicAllocation.maxExecutors": str(executors),
    }


def _completed(pod: JobPod, access: PodAccess, labels: Mapping[str, str]) -> JobPod:
    """Add credentials and labels to a pod."""
    metadata, spec = pod.template["metadata"], pod.template["spec"]
    own, *others = spec["containers"]
    own = {
        **own,
        "env": [*own.get("env", ()), access.variable],
        **_extended(own, "volumeMounts", access.mounts),
    }
    template = {
        "metadata": {**metadata, "labels": {**metadata.get("labels", {}), **labels}},
        "spec": {
            **spec,
            "containers": [own, *others],
            **_extended(spec, "volumes", access.volumes),
        },
    }
    return dataclasses.replace(pod, template=template)


def _extended(
    parent: Mapping[str, Any], field: str, items: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    values = [*parent.get(field, ()), *items]
    return {field: values} if values else {}


class NamedObject(NamedTuple):
    """A Secret, ConfigMap, claim or ServiceAccount of the Replay's namespace."""

    resource: Resource
    name: str


_KINDS = {
    resource.kind: resource
    for resource in (resources.SECRETS, resources.CONFIG_MAPS, resources.CLAIMS)
}


def needed_objects(template: Body) -> Iterator[NamedObject]:
    """Yield the objects that the pods of a template need in their namespace."""
    for kind, name in references(template):
        yield NamedObject(_KINDS[kind], name)


def lent_objects(identity: ReplayIdentity) -> frozenset[NamedObject]:
    """Return the objects that a connection names for jobs, which need the consent of their owner.

    Args:
        identity: replay role of the connection.
    """
    volumes = [_volume(_sources(identity))]
    return frozenset(needed_objects({"spec": {"volumes": volumes, "containers": ()}}))


KEY_FILE = "key"
"""Key of the Secret that contains the key of a ledger."""
_VOLUME = "redrive-access"


@dataclass(frozen=True)
class PodAccess:
    """Access of a pod to the credentials of the replay role and to the key of the ledger.

    Attributes:
        volumes: volumes of the application.
        mounts: volume mounts of each pod.
        variable: environment variable of each pod with a `BrokerAccess`.
    """

    volumes: tuple[Mapping[str, Any], ...]
    mounts: tuple[Mapping[str, Any], ...]
    variable: Mapping[str, Any]


def pod_access(
    identity: ReplayIdentity, redirect_hosts: Sequence[str], key_secret: str
) -> PodAccess:
    """Return the access of driver and executors to the credentials of *identity*.

    Args:
        identity: the replay role.
        redirect_hosts: hosts that requests may be redirected to, see `Access.hosts`.
        key_secret: name of the Secret with the key of the ledger.
    """
    description = _description(identity.authentication, tuple(redirect_hosts))
    variable = {"name": ACCESS_VARIABLE, "value": description.encode()}
    key = _source("secret", key_secret, {KEY_FILE: "ledger/key"})
    volume = _volume([*_sources(identity), key])
    mount = {"name": _VOLUME, "mountPath": ACCESS_FOLDER, "readOnly": True}
    return PodAccess((volume,), (mount,), variable)


def _volume(sources: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    return {"name": _VOLUME, "projected": {"sources": list(sources)}}


def _description(
    authentication: ReplayAuthentication, redirect_hosts: tuple[str, ...]
) -> BrokerAccess:
    method = Method(authentication.type.lower())
    client = authentication.oauth2
    if client is None:
        return BrokerAccess(method, ACCESS_FOLDER, redirect_hosts)
    return BrokerAccess(
        method,
        ACCESS_FOLDER,
        redirect_hosts,
        client.issuer_url,
        client.client_id,
        client.audience,
        client.scope,
    )


def _sources(identity: ReplayIdentity) -> Iterator[Mapping[str, Any]]:
    """Yield the mounted sources, each at its path of `BrokerAccess`."""
    match identity.authentication:
        case ReplayAuthentication(token=token) if token is not None:
            ref = token.secret_ref
            yield _source("secret", ref.name, {ref.key: "credentials/token"})
        case ReplayAuthentication(tls=certificate) if certificate is not None:
            pair = {file: f"credentials/{file}" for file in ("tls.crt", "tls.key")}
            yield _source("secret", certificate.secret_ref.name, pair)
        case ReplayAuthentication(oauth2=OAuth2() as client):
            ref = client.client_secret.secret_ref
            yield _source("secret", ref.name, {ref.key: "credentials/client-secret"})
            if client.ca_ref is not None:
                yield _authorities(client.ca_ref, "issuer-ca/ca.crt")
    if identity.tls is not None:
        yield _authorities(identity.tls.ca_ref, "ca/ca.crt")


def _authorities(ref: CaRef, path: str) -> Mapping[str, Any]:
    kind = "secret" if ref.kind is CaKind.SECRET else "configMap"
    return _source(kind, ref.name, {ref.key: path})


def _source(kind: str, name: str, keys: Mapping[str, str]) -> Mapping[str, Any]:
    return {kind: {"name": name, "items": [{"key": k, "path": path} for k, path in keys.items()]}}


@dataclass(frozen=True)
class JobApplication:
    """One run, independent of its engine. Spark properties and executors apply to Spark alone.

    Attributes:
        metadata: name, namespace, labels, annotations and owner of the object.
        image: image of all pods.
        pull_policy: pull policy of all pods; empty for Spark's default.
        program: `local://` URL in the image.
        argument: argument of the program.
        service_account: ServiceAccount of driver or job.
        spark_version: version of Spark in the image.
        spark_conf: Spark properties, with the sizes of pods, without the fields above.
        pods: size and template of each pod; Spark's container is the first one.
        executors: number of executors.
        retries: restarts after failures.
        retry_seconds: time between restarts.
    """

    metadata: Mapping[str, Any]
    image: str
    pull_policy: str
    program: str
    argument: str
    service_account: str
    spark_version: str
    spark_conf: Mapping[str, str]
    pods: Mapping[Role, JobPod]
    executors: int
    retries: int
    retry_seconds: int
