"""The application that runs a Replay: template, credentials, size.

A Replay that may run → the application that runs it. Pure.

Called by `reconcile`, which creates it once and never changes it: a Spark operator answers a
changed spec by killing the run and starting another.

What the chart, a connection and a Replay say about a job's pods → one template. Pure.

Called by `admission`. The chart permits images, and the connection what a Replay may change.

Credentials of the replay role → a volume of a job's pods, and what tells the job of it. Pure.

Called by `reconcile`. Only references to Secrets are written; each lies in the namespace of the
Replay. Of a Secret only the keys that are named are mounted.

`JobApplication`: what a Spark operator is to run, whichever operator it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from redrive.api import Body
from redrive.api.connection import CaKind, CaRef, OAuth2, ReplayAuthentication, ReplayIdentity
from redrive.api.job import (
    DynamicAllocation,
    JobDefaults,
    JobOverrides,
    JobRequest,
    JobTemplate,
    JobUser,
    JobVolume,
    PodSize,
    is_among,
    mebibytes,
    requested_cores,
)
from redrive.auth.method import ACCESS_VARIABLE, BrokerAccess, Method
from redrive.errors import JobNotPermittedError
from redrive.kube import resources
from redrive.kube.context import Settings
from redrive.kube.resources import Key, Resource
from redrive.replay.spec import ReplayJob

SPARK_VERSION = "4.3.0"

_RETRIES = 3
_RETRY_SECONDS = 10
_NAME_ROOM = 26
"""What is left of a Replay's name: Spark makes longer names from ours, of 63 characters at most."""


def name_of(replay: Body) -> str:
    """Return the name of the application of *replay*: its own, whoever asks and how often.

    A Replay that is created again under the same name gets another one.
    """
    metadata = replay["metadata"]
    digest = hashlib.sha256(metadata["uid"].encode()).hexdigest()[:10]
    readable = metadata["name"][:_NAME_ROOM].replace(".", "-").strip("-")
    return f"replay-{readable}-{digest}"


def application(  # noqa: PLR0913  each has a source of its own
    replay: Body,
    job: ReplayJob,
    access: PodAccess,
    template: JobDefaults,
    settings: Settings,
    *,
    image: str,
) -> JobApplication:
    """Return the application to create for *replay*.

    A failed run is started again a few times: it goes on where it was.

    Args:
        access: what gives driver and executors the credentials of the replay role.
        template: what is said about the pods, see `template.resolve`.
        image: of the pods, where the template has none.
    """
    user = template.security_context or JobUser()
    volumes = template.volumes or ()
    return JobApplication(
        metadata=_metadata(replay),
        image=template.image or image,
        image_pull_secrets=template.image_pull_secrets or (),
        program=settings.replay_application,
        argument=job.encode(),
        service_account=settings.replay_service_account,
        spark_version=SPARK_VERSION,
        spark_conf={**(template.spark_conf or {}), **_properties(name_of(replay))},
        driver=_pod(template.driver),
        executor=_pod(template.executor),
        executors=_executors(template),
        allocation=template.dynamic_allocation,
        labels=template.labels or {},
        annotations=template.annotations or {},
        node_selector=template.node_selector or {},
        tolerations=tuple(each.to_manifest() for each in template.tolerations or ()),
        container_security={**RESTRICTED, **_identity(user)},
        pod_security={} if user.fs_group is None else {"fsGroup": user.fs_group},
        volumes=(*map(_volume, volumes), *access.volumes),
        mounts=(*map(_mount, volumes), *access.mounts),
        environment=(access.variable,),
        time_to_live_seconds=template.time_to_live_seconds,
        retries=_RETRIES,
        retry_seconds=_RETRY_SECONDS,
    )


def _metadata(replay: Body) -> dict[str, Any]:
    return {
        "name": name_of(replay),
        "namespace": Key.of(replay).namespace,
        "labels": {
            "app.kubernetes.io/name": "redrive",
            "app.kubernetes.io/component": "replay",
            "app.kubernetes.io/managed-by": "redrive",
        },
        "ownerReferences": [resources.owner_reference(resources.REPLAYS, replay)],
    }


def _properties(name: str) -> dict[str, str]:
    """Return the Spark properties that nothing overrides."""
    return {
        # A second copy of a task would find its producers taken, and fail the stage.
        "spark.speculation": "false",
        # Else it is made of the name of the Replay, which may be too long, or begin with a digit.
        "spark.kubernetes.executor.podNamePrefix": name,
        # Executors need no file of the driver's configuration, so a driver needs no right to
        # ConfigMaps: it could write those of others.
        "spark.kubernetes.executor.disableConfigMap": "true",
    }


def _pod(size: PodSize | None) -> JobPod:
    return JobPod(**(size or PodSize()).model_dump(exclude_none=True))


def _executors(template: JobDefaults) -> int:
    """Return how many executors there are at first, within the bounds of a dynamic allocation."""
    wanted, bounds = template.executors or 1, template.dynamic_allocation
    if bounds is None:
        return wanted
    return min(max(wanted, bounds.min_executors), bounds.max_executors)


def _identity(user: JobUser) -> dict[str, Any]:
    given = user.to_manifest()
    return {name: given[name] for name in ("runAsUser", "runAsGroup") if name in given}


def _volume(volume: JobVolume) -> dict[str, Any]:
    return {**volume.to_manifest(), "name": _volume_name(volume)}


def _mount(volume: JobVolume) -> dict[str, Any]:
    return {"name": _volume_name(volume), "mountPath": f"/mnt/{volume.name}"}


def _volume_name(volume: JobVolume) -> str:
    """Return its name among the volumes of a pod, which Spark and redrive add others to."""
    return f"job-{volume.name}"


def resolve_template(
    settings: Settings, connection: JobTemplate | None, replay: JobRequest | None
) -> JobDefaults:
    """Return the template of a job's pods: what the Replay says comes first, the chart's last.

    Raises:
        JobNotPermittedError: the connection names an image that the operator does not permit, or
            the Replay asks for what its connection does not permit.
    """
    template = settings.replay_job
    if connection is not None:
        _check_image(connection.image, settings, "the BrokerConnection")
        template = connection.on_top_of(template)
    if replay is None:
        return template
    allowed = template.overrides or JobOverrides()
    _check_image(replay.image, settings, "the Replay")
    if problem := next(_beyond(replay, allowed), None):
        raise JobNotPermittedError(
            "the connection does not permit what the Replay asks for in spec.job",
            got=problem,
            remedy="make another Replay without it, or extend job.overrides of the "
            "BrokerConnection; this Replay starts by itself then",
        )
    return replay.on_top_of(template)


def _check_image(image: str | None, settings: Settings, asking: str) -> None:
    """Check that the operator permits an image: it runs with the rights of the ServiceAccount."""
    own = {None, settings.replay_job.image}
    if image in own or settings.replay_job.permits(str(image)):
        return
    raise JobNotPermittedError(
        f"{asking} names an image for replay jobs that the operator does not permit",
        got=image,
        remedy="have it permitted with replay.job.images of the Helm chart, or leave it out",
    )


def _beyond(asked: JobRequest, allowed: JobOverrides) -> Iterator[str]:
    """Yield what is asked for and not allowed."""
    if asked.image is not None and not is_among(asked.image, allowed.images):
        yield f"image {asked.image}"
    for name, size in (("driver", asked.driver), ("executor", asked.executor)):
        yield from (f"{name}.{problem}" for problem in _too_big(size or PodSize(), allowed))
    most = allowed.max_executors or 0
    if (asked.executors or 0) > most:
        yield f"executors: {asked.executors}"
    if asked.dynamic_allocation and asked.dynamic_allocation.max_executors > most:
        yield f"dynamicAllocation.maxExecutors: {asked.dynamic_allocation.max_executors}"
    chosen = asked.node_selector is not None or asked.tolerations is not None
    if chosen and not allowed.placement:
        yield "nodeSelector or tolerations"
    for name in asked.spark_conf or ():
        if name not in allowed.spark_conf:
            yield f"sparkConf: {name}"


def _too_big(size: PodSize, allowed: JobOverrides) -> Iterator[str]:
    cores = allowed.max_cores or 0
    if (size.cores or 0) > cores:
        yield f"cores: {size.cores}"
    if size.core_request is not None and requested_cores(size.core_request) > cores:
        yield f"coreRequest: {size.core_request}"
    if size.memory is not None and (
        allowed.max_memory is None or mebibytes(size.memory) > mebibytes(allowed.max_memory)
    ):
        yield f"memory: {size.memory}"


class NamedObject(NamedTuple):
    """A Secret, ConfigMap, claim or ServiceAccount of the Replay's namespace."""

    resource: Resource
    name: str


_SOURCES = {
    "secret": (resources.SECRETS, "name"),
    "configMap": (resources.CONFIG_MAPS, "name"),
    "persistentVolumeClaim": (resources.CLAIMS, "claimName"),
}
"""Source of a volume → the kind of its object, and the field with the name of that."""


def mounted_objects(volumes: Iterable[Mapping[str, Any]]) -> Iterator[NamedObject]:
    """Yield the objects that *volumes* of a pod contain."""
    for volume in volumes:
        for source in volume.get("projected", {}).get("sources", (volume,)):
            for kind, (resource, field) in _SOURCES.items():
                if kind in source:
                    yield NamedObject(resource, source[kind][field])


def lent_objects(access: PodAccess, job: JobTemplate | None) -> frozenset[NamedObject]:
    """Return the objects that a connection names for jobs; their owners have to consent.

    Args:
        access: the credentials of the connection's replay role.
        job: its template of pods.
    """
    template = job or JobTemplate()
    volumes = (*access.volumes, *map(_volume, template.volumes or ()))
    pulled = (NamedObject(resources.SECRETS, name) for name in template.image_pull_secrets or ())
    return frozenset((*mounted_objects(volumes), *pulled))


ACCESS_FOLDER = "/etc/redrive/access"
_VOLUME = "redrive-access"


@dataclass(frozen=True)
class PodAccess:
    """What gives a pod the credentials of the replay role.

    Attributes:
        volumes: of the application; none where nothing has to be mounted.
        mounts: of each pod.
        variable: of the environment of each pod: a `BrokerAccess`.
    """

    volumes: tuple[Mapping[str, Any], ...]
    mounts: tuple[Mapping[str, Any], ...]
    variable: Mapping[str, Any]


def pod_access(identity: ReplayIdentity, redirect_hosts: Sequence[str]) -> PodAccess:
    """Return what gives driver and executors the credentials of *identity*.

    Args:
        identity: the replay role.
        redirect_hosts: where else than to the host of `adminURL` they may go.
    """
    description = _description(identity.authentication, tuple(redirect_hosts))
    variable = {"name": ACCESS_VARIABLE, "value": description.encode()}
    sources = list(_sources(identity))
    if not sources:
        return PodAccess((), (), variable)
    volume = {"name": _VOLUME, "projected": {"sources": sources}}
    mount = {"name": _VOLUME, "mountPath": ACCESS_FOLDER, "readOnly": True}
    return PodAccess((volume,), (mount,), variable)


def _description(given: ReplayAuthentication, redirect_hosts: tuple[str, ...]) -> BrokerAccess:
    method = Method(given.type.lower())
    client = given.oauth2
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
    """Yield what is mounted, each at the path that `BrokerAccess` has for it."""
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


RESTRICTED: Mapping[str, Any] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""The security context of containers: a namespace with the restricted pod security admits it."""


@dataclass(frozen=True)
class JobPod:
    """The size of one pod.

    Attributes:
        core_request: as Kubernetes writes it; None for what `cores` says.
    """

    cores: int = 1
    memory: str = "1g"
    core_request: str | None = None


@dataclass(frozen=True)
class JobApplication:
    """One run of Spark, with nothing left to decide.

    Attributes:
        metadata: of the object: name, namespace, labels, owner.
        program: a `local://` URL in the image.
        argument: the one that the program takes.
        spark_conf: properties beside those that the other attributes are written as.
        allocation: bounds between which the number of executors follows the work; None keeps
            `executors`.
        container_security: the security context of each container.
        pod_security: that of each pod.
        volumes: of the application.
        mounts: of each container; every one of them mounts all.
        environment: variables of each container.
        time_to_live_seconds: how long the object stays after the run; None for ever.
    """

    metadata: Mapping[str, Any]
    image: str
    image_pull_secrets: tuple[str, ...]
    program: str
    argument: str
    service_account: str
    spark_version: str
    spark_conf: Mapping[str, str]
    driver: JobPod
    executor: JobPod
    executors: int
    allocation: DynamicAllocation | None
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    node_selector: Mapping[str, str]
    tolerations: tuple[Mapping[str, Any], ...]
    container_security: Mapping[str, Any]
    pod_security: Mapping[str, Any]
    volumes: tuple[Mapping[str, Any], ...]
    mounts: tuple[Mapping[str, Any], ...]
    environment: tuple[Mapping[str, Any], ...]
    time_to_live_seconds: int | None
    retries: int
    retry_seconds: int
