"""Application of an admitted Replay or Inspection: pods from a job template, and credentials.

`reconcile` creates the application once and never changes it, because a Spark operator kills and
restarts a run whose spec changes.

Pods mount the credentials of their role in one volume, and an environment variable describes its
files. Manifests contain only references to Secrets of the namespace, and only the named keys of a
Secret are mounted.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from redrive.api import Body
from redrive.api.connection import (
    Destination,
    InspectionIdentity,
    JobIdentity,
    OAuth2,
    ReplayAuthentication,
)
from redrive.api.job import (
    ACCESS_FOLDER,
    SPARK_ROLES,
    JobPod,
    JobTemplate,
    Role,
    pod_of,
    references,
)
from redrive.api.model import CaKind, CaRef
from redrive.api.replay import ReplayEngine
from redrive.api.rocketmq import AccessKey, RocketMQAuthentication, RocketMQJobs
from redrive.auth.method import ACCESS_VARIABLE, BrokerAccess, Method
from redrive.kube import resources
from redrive.kube.context import Settings
from redrive.kube.resources import CONNECTION, MANAGED, POLICY_LABEL, Key, Resource
from redrive.replay.spec import PodSize, RunJob

SPARK_VERSION = "4.3.0"

_RETRIES = 3
_RETRY_SECONDS = 10
_NAME_ROOM = 26
"""Length to which the name of an owner is cut, because Spark appends to names, up to 63
characters."""


def name_of(owner: Body, kind: Resource = resources.REPLAYS) -> str:
    """Return the name of the application of *owner*, which depends on its name and uid alone.

    An owner that is created again under the same name gets another application.
    """
    metadata = owner["metadata"]
    digest = hashlib.sha256(metadata["uid"].encode()).hexdigest()[:10]
    readable = metadata["name"][:_NAME_ROOM].replace(".", "-").strip("-")
    return f"{_prefix(kind)}{readable}-{digest}"


def is_named_by(kind: Resource, application: Body) -> bool:
    """Return True if *application* has a name that `name_of` returns for owners of *kind*.

    The name stays when a deletion with `--cascade=orphan` removes the owner.
    """
    return Key.of(application).name.startswith(_prefix(kind))


def _prefix(kind: Resource) -> str:
    return f"{kind.kind.lower()}-"


def launched_through(application: Body) -> Key:
    """Return the connection that permitted an application; one with empty names if unknown."""
    text = (application["metadata"].get("annotations") or {}).get(CONNECTION, "")
    namespace, _, name = text.partition("/")
    return Key(namespace, name) if namespace and name else Key("", "")


@dataclass(frozen=True)
class ChosenTemplate:
    """The job template of a Replay, its number of executors, and its engine, Job or Spark."""

    name: str
    template: JobTemplate
    executors: int
    engine: ReplayEngine


def application(  # noqa: PLR0913, PLR0917  each has a source of its own
    replay: Body,
    through: Key,
    job: RunJob,
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
        through: connection that permits it.
        job: its run.
        access: volumes and variables with the credentials of the replay role.
        chosen: its job template.
        settings: of the operator.
        image: of the pods, where the template has none.
    """
    template = chosen.template
    if chosen.engine is ReplayEngine.JOB:
        pod = pod_of(template, Role.JOB)
        job = dataclasses.replace(job, pod=PodSize(pod.cores, pod.mebibytes * 2**20))
        account = settings.job_service_account
        program = JobProgram("redrive.replay", job.encode(), account)
        kind = resources.REPLAYS
        return job_application(replay, kind, through, program, access, template, image=image)
    labels = _labels(replay, resources.REPLAYS)
    pods = {role: _completed(pod_of(template, role), access, labels) for role in SPARK_ROLES}
    sizes = [pod.properties(role) for role, pod in pods.items()]
    return JobApplication(
        metadata=_metadata(replay, resources.REPLAYS, through, template, labels),
        image=template.image or image,
        pull_policy=next((pod.pull_policy for pod in pods.values() if pod.pull_policy), ""),
        program=JobProgram(
            settings.replay_application, job.encode(), settings.replay_service_account
        ),
        spark_conf={
            **template.spark_conf,
            **_properties(name_of(replay), chosen.executors),
            **{name: value for size in sizes for name, value in size.items()},
        },
        pods=pods,
        executors=chosen.executors,
    )


def job_application(  # noqa: PLR0913, PLR0917  each has a source of its own
    owner: Body,
    kind: Resource,
    through: Key,
    program: JobProgram,
    access: PodAccess,
    template: JobTemplate,
    *,
    image: str,
) -> JobApplication:
    """Return the Job to create for *owner*, a Replay or an Inspection; see `application`."""
    labels = _labels(owner, kind)
    pod = _completed(pod_of(template, Role.JOB), access, labels)
    return JobApplication(
        metadata=_metadata(owner, kind, through, template, labels),
        image=template.image or image,
        pull_policy=pod.pull_policy,
        program=program,
        pods={Role.JOB: pod},
    )


def _labels(owner: Body, kind: Resource) -> dict[str, str]:
    name, value = MANAGED
    component = kind.kind.lower()
    return {
        name: value,
        "app.kubernetes.io/name": "redrive",
        "app.kubernetes.io/component": component,
        POLICY_LABEL: owner["spec"]["policyRef"]["name"],
        f"redrive.io/{component}": owner["metadata"]["name"],
    }


def _metadata(
    owner: Body, kind: Resource, through: Key, template: JobTemplate, labels: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "name": name_of(owner, kind),
        "namespace": Key.of(owner).namespace,
        "labels": {**template.metadata.labels, **labels},
        "annotations": {**template.metadata.annotations, CONNECTION: str(through)},
        "ownerReferences": [resources.owner_reference(kind, owner)],
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


class NeededRights(NamedTuple):
    """Rights to objects of one kind, as in a rule of a Role.

    Attributes:
        resource: plural, with `/status` for the status alone.
    """

    group: str
    resource: str
    verbs: tuple[str, ...]

    def attributes(self, verb: str) -> Mapping[str, str]:
        """Return one of the rights as an API server names it in reviews."""
        plural, _, subresource = self.resource.partition("/")
        return {
            "verb": verb,
            "group": self.group,
            "resource": plural,
            "subresource": subresource,
        }


_RIGHTS: Mapping[str, tuple[NeededRights, ...]] = {
    kind.kind: (
        *(NeededRights(read.group, read.plural, ("get",)) for read in (kind, *others)),
        NeededRights(kind.group, f"{kind.plural}/status", ("patch",)),
    )
    for kind, *others in ((resources.REPLAYS, resources.APPROVALS), (resources.INSPECTIONS,))
}
_DRIVER_VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
_DRIVER_RIGHTS = tuple(
    NeededRights("", resource, _DRIVER_VERBS)
    for resource in ("pods", "services", "persistentvolumeclaims")
)


def needed_rights(kind: str, roles: Collection[Role]) -> tuple[NeededRights, ...]:
    """Return the rights that a job needs in its namespace: those of the Roles of the chart.

    Args:
        kind: kind of its owner.
        roles: its pods.
    """
    return (*_RIGHTS[kind], *(_DRIVER_RIGHTS if Role.DRIVER in roles else ()))


def lent_objects(identity: JobIdentity | RocketMQJobs) -> frozenset[NamedObject]:
    """Return the objects that a connection names for jobs, which need the consent of their owner.

    Args:
        identity: role of the jobs.
    """
    destinations = identity.destinations if isinstance(identity, InspectionIdentity) else ()
    sources = [*_sources(identity), *chain.from_iterable(map(destination_sources, destinations))]
    volumes = [_volume(sources)]
    return frozenset(needed_objects({"spec": {"volumes": volumes, "containers": ()}}))


KEY_FILE = "key"
"""Key of the Secret that contains the key of a ledger."""
_VOLUME = "redrive-access"


@dataclass(frozen=True)
class PodAccess:
    """Access of a pod to the credentials of its role, and to the key of the ledger if it has one.

    Attributes:
        volumes: volumes of the application.
        mounts: volume mounts of each pod.
        variable: environment variable of each pod with a `BrokerAccess`.
    """

    volumes: tuple[Mapping[str, Any], ...]
    mounts: tuple[Mapping[str, Any], ...]
    variable: Mapping[str, Any]


def pod_access(
    identity: JobIdentity | RocketMQJobs,
    redirect_hosts: Sequence[str],
    *more_sources: Mapping[str, Any],
) -> PodAccess:
    """Return the access of pods to the credentials of *identity*.

    Args:
        identity: role of the jobs.
        redirect_hosts: hosts that requests may be redirected to, see `Access.hosts`.
        more_sources: of the volume, see `key_source` and `destination_sources`.
    """
    description = _description(identity.authentication, tuple(redirect_hosts))
    variable = {"name": ACCESS_VARIABLE, "value": description.encode()}
    sources = [*_sources(identity), *more_sources]
    if not sources:
        return PodAccess((), (), variable)
    mount = {"name": _VOLUME, "mountPath": ACCESS_FOLDER, "readOnly": True}
    return PodAccess((_volume(sources),), (mount,), variable)


def key_source(secret: str) -> Mapping[str, Any]:
    """Return the source of the key of a ledger."""
    return _source("secret", secret, {KEY_FILE: "ledger/key"})


def destination_sources(destination: Destination) -> Iterator[Mapping[str, Any]]:
    """Yield the source of the keys of an object store, if the destination names a Secret."""
    if destination.secret_ref is not None:
        keys = ("access-key-id", "secret-access-key")
        files = {key: f"destination/{key}" for key in keys}
        yield _source("secret", destination.secret_ref.name, files)


def _volume(sources: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    return {"name": _VOLUME, "projected": {"sources": list(sources)}}


def _description(
    authentication: ReplayAuthentication | RocketMQAuthentication, redirect_hosts: tuple[str, ...]
) -> BrokerAccess:
    access = BrokerAccess(Method(authentication.type.lower()), ACCESS_FOLDER, redirect_hosts)
    match authentication:
        case RocketMQAuthentication(access_key=AccessKey(user=user)):
            return dataclasses.replace(access, user=user)
        case ReplayAuthentication(oauth2=OAuth2() as client):
            return dataclasses.replace(
                access,
                issuer_url=client.issuer_url,
                client_id=client.client_id,
                audience=client.audience,
                scope=client.scope,
            )
    return access


def _sources(identity: JobIdentity | RocketMQJobs) -> Iterator[Mapping[str, Any]]:
    """Yield the mounted sources, each at its path of `BrokerAccess`."""
    match identity.authentication:
        case RocketMQAuthentication(access_key=AccessKey(secret_ref=ref)):
            yield _source("secret", ref.name, {ref.key: "credentials/secret-key"})
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
class JobProgram:
    """Program of the pods of a run.

    Attributes:
        name: Python module of a Job; `local://` URL in the image for Spark.
        argument: its argument.
        service_account: ServiceAccount of driver or job.
        seconds: time limit of a Job; None without one.
    """

    name: str
    argument: str
    service_account: str
    seconds: int | None = None


@dataclass(frozen=True)
class JobApplication:
    """One run, independent of its engine. Spark properties and executors apply to Spark alone.

    Attributes:
        metadata: name, namespace, labels, annotations and owner of the object.
        image: image of all pods.
        pull_policy: pull policy of all pods; empty for Spark's default.
        program: program of the pods.
        spark_conf: Spark properties, with the sizes of pods, without the fields above.
        pods: size and template of each pod; Spark's container is the first one.
        executors: number of executors.
        retries: restarts after failures.
        retry_seconds: time between restarts.
    """

    metadata: Mapping[str, Any]
    image: str
    pull_policy: str
    program: JobProgram
    pods: Mapping[Role, JobPod]
    spark_conf: Mapping[str, str] = field(default_factory=dict)
    executors: int = 0
    retries: int = _RETRIES
    retry_seconds: int = _RETRY_SECONDS
