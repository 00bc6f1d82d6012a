"""Job templates: the pods of replay jobs, as administrators write them; pure.

Administrators define job pods: a `JobTemplate` has a PodTemplateSpec of the driver and one of the
executors. A BrokerConnection has the names of templates that its Replays may use
(`ConnectionJobs`). A Replay has the name of one of them and a number of executors
(`ReplayJobTemplate`).

A template may set all fields of a pod except those by which redrive runs a job: see `pod_of`. Spark
takes sizes, image and pull policy from properties, and overwrites those of a template, so `pod_of`
translates them.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any

from pydantic import Field, Strict, WithJsonSchema

from redrive.api import Body, model
from redrive.api.permissions import Namespaces
from redrive.errors import InvalidSpecError

MAX_EXECUTORS = 1_000
MAX_TEMPLATES = 64
"""Maximum job templates of a connection, in its spec and in its status."""
DEFAULT_TEMPLATE = "default"
"""Default name of the job template, if neither connection nor Replay has one."""
ACCESS_FOLDER = "/etc/redrive/access"
"""Folder of the credentials of a job, in each of its pods."""

TemplateName = Annotated[
    str,
    Field(max_length=63),
    model.Form(
        r"[a-z0-9]([-a-z0-9]*[a-z0-9])?",
        "the name of a job template must be lower-case letters, digits and '-'",
        "use a template of the operator, such as default",
    ),
]
Executors = Annotated[int, Strict(), Field(ge=1, le=MAX_EXECUTORS)]

_Labels = Annotated[Mapping[str, Annotated[str, Field(max_length=63)]], Field(max_length=64)]
_PodTemplate = Annotated[Mapping[str, Any], WithJsonSchema({"type": "object"})]


class ReplayJobTemplate(model.ApiModel):
    """The job template of a Replay."""

    name: TemplateName | None = None
    """Name of a job template, one of `status.jobTemplates` of the BrokerConnection. Defaults to
    `jobs.defaultTemplate` of the BrokerConnection. Example: `large`."""

    executors: Executors | None = None
    """Number of executors, 1 to 1000, at most the limit of the template. Defaults to the number of
    the template. Example: `8`."""


_DEFAULT_LISTED = model.Rule(
    "!has(self.templates) || !has(self.defaultTemplate) || self.defaultTemplate in self.templates",
    "`defaultTemplate` must be one of `templates`",
    "add it to them, or use one of them",
)


class ConnectionJobs(model.CheckedModel):
    """The job templates that Replays of a connection may use."""

    RULES = (_DEFAULT_LISTED,)

    templates: (
        Annotated[tuple[TemplateName, ...], Field(min_length=1, max_length=MAX_TEMPLATES)] | None
    ) = None
    """Names of job templates of the operator, 1 to 64. A Replay may use those that allow its
    namespace. Defaults to all templates. Example: `[default, large]`."""

    default_template: TemplateName | None = None
    """Job template of Replays without one. Defaults to the first of `templates`, else to
    `default`."""

    max_executors: Executors | None = None
    """Maximum number of executors of a Replay, 1 to 1000. The lowest limit applies: this one, that
    of the template, or that of the operator. Defaults to the latter two. Example: `20`."""

    def _check(self) -> None:
        name = self.default_template
        if name is not None and self.templates is not None and name not in self.templates:
            raise _DEFAULT_LISTED.error(name)

    @property
    def default(self) -> str:
        """Return the name of the template of Replays without one."""
        return self.default_template or (self.templates or (DEFAULT_TEMPLATE,))[0]

    def permits(self, name: str) -> bool:
        """Return True if Replays of the connection may use the template *name*."""
        return self.templates is None or name in self.templates


class AvailableTemplate(model.StatusModel):
    """A job template that Replays of the connection may use."""

    name: Annotated[str, Field(max_length=63)]
    """Name of the template."""

    max_executors: int
    """Maximum number of executors of a Replay with this template."""


class JobMetadata(model.ApiModel):
    """Metadata of the Job or SparkApplication, for queues and cost centres."""

    labels: _Labels = Field(default_factory=dict)
    """Labels, beside those of redrive."""

    annotations: Mapping[str, str] = Field(default_factory=dict)
    """Annotations."""


class JobTemplate(model.CheckedModel):
    """The pods of replay jobs, as administrators write them in the file of job templates."""

    namespaces: Namespaces | None = None
    """Kubernetes namespaces of the Replays that may use it. Defaults to all."""

    metadata: JobMetadata = JobMetadata()
    """Labels and annotations of the Job or SparkApplication."""

    image: Annotated[
        str,
        Field(max_length=512),
        model.Form(
            r"([a-zA-Z0-9][-._:/@a-zA-Z0-9]*)?",
            "`image` must be the full name of an image, such as registry.example/redrive-replay:1",
            "correct it, or leave it out",
        ),
    ] = ""
    """Image of all pods. Defaults to the replay image of the operator's release."""

    job: _PodTemplate = Field(default_factory=dict)
    """PodTemplateSpec of the single pod of engine Job."""

    driver: _PodTemplate = Field(default_factory=dict)
    """PodTemplateSpec of the driver, which plans the run and records its progress."""

    executor: _PodTemplate = Field(default_factory=dict)
    """PodTemplateSpec of each executor, which moves messages."""

    spark_conf: Mapping[str, str] = Field(default_factory=dict)
    """Spark properties. Those that redrive sets, and those of pods, are refused."""

    executors: Executors = 1
    """Number of executors of Replays without a number. Defaults to 1."""

    max_executors: Executors = 4
    """Maximum number of executors of a Replay. Defaults to 4."""

    def _check(self) -> None:
        if self.executors > self.max_executors:
            raise InvalidSpecError(
                "`executors` must be at most `maxExecutors`",
                got=f"{self.executors} and {self.max_executors}",
                remedy="reduce it, or increase maxExecutors",
            )
        _check_labels("metadata", self.metadata.labels)
        for name in self.spark_conf:
            _check_property(name)
        pods = {role: pod_of(self, role) for role in Role}
        policies = {pods[role].pull_policy for role in SPARK_ROLES} - {""}
        if len(policies) > 1:
            raise InvalidSpecError(
                "`imagePullPolicy` must be the same in driver and executor, because Spark has one "
                "property for both",
                got=", ".join(sorted(policies)),
                remedy="set one of them",
            )

    def is_for(self, namespace: str, labels: Mapping[str, str]) -> bool:
        """Return True if Replays of *namespace* may use the template.

        Args:
            namespace: its name.
            labels: its labels; used only if `selects_namespaces`.
        """
        return self.namespaces is None or self.namespaces.include(namespace, labels)

    @property
    def selects_namespaces(self) -> bool:
        """Return True if `is_for` uses labels of namespaces."""
        return self.namespaces is not None and self.namespaces.selector is not None


class Role(enum.StrEnum):
    """Kind of pod: of a Spark application, or the single pod of engine Job."""

    DRIVER = "driver"
    EXECUTOR = "executor"
    JOB = "job"


SPARK_ROLES = (Role.DRIVER, Role.EXECUTOR)


RESTRICTED: Mapping[str, Any] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""Defaults of the security context of containers, so that a namespace with the restricted pod
security admits the pods."""


@dataclass(frozen=True)
class JobPod:
    """One kind of pod of a job, without credentials, image and labels of redrive.

    Attributes:
        template: the PodTemplateSpec; its first container is the job's.
        pull_policy: `imagePullPolicy` of that container; empty means Spark's default.
        cores: number of concurrent tasks.
        memory: heap of the JVM, in Spark's notation.
        memory_overhead: memory of the pod beyond the heap, in Spark's notation.
        core_request: CPU request, in Kubernetes notation.
        core_limit: CPU limit, in Kubernetes notation; empty means none.
    """

    template: Body
    pull_policy: str
    cores: int
    memory: str
    memory_overhead: str
    core_request: str
    core_limit: str

    @property
    def mebibytes(self) -> int:
        """Return the memory of the pod in MiB."""
        return int(self.memory.rstrip("m")) + int(self.memory_overhead.rstrip("m"))

    def sized(self) -> Body:
        """Return the template with size and pull policy, which Spark takes from properties."""
        spec = self.template["spec"]
        own, *others = spec["containers"]
        resources = own.get("resources", {})
        memory = {"memory": f"{self.mebibytes}Mi"}
        limits = {"cpu": self.core_limit} if self.core_limit else {}
        own = {
            **own,
            "resources": {
                **resources,
                "requests": {**resources.get("requests", {}), "cpu": self.core_request, **memory},
                "limits": {**resources.get("limits", {}), **limits, **memory},
            },
            **({"imagePullPolicy": self.pull_policy} if self.pull_policy else {}),
        }
        return {**self.template, "spec": {**spec, "containers": [own, *others]}}

    def properties(self, role: Role) -> dict[str, str]:
        """Return the Spark properties of the pod, for fields that Spark overwrites."""
        limit = {f"spark.kubernetes.{role}.limit.cores": self.core_limit}
        grace = self.template["spec"].get(_GRACE)
        is_overwritten = role is Role.EXECUTOR and grace is not None
        return {
            f"spark.{role}.cores": str(self.cores),
            f"spark.{role}.memory": self.memory,
            f"spark.{role}.memoryOverhead": self.memory_overhead,
            f"spark.kubernetes.{role}.request.cores": self.core_request,
            **(limit if self.core_limit else {}),
            **({f"spark.kubernetes.{role}.{_GRACE}": f"{grace}s"} if is_overwritten else {}),
            f"spark.kubernetes.{role}.podTemplateContainerName": container_name(role),
        }


_GRACE = "terminationGracePeriodSeconds"


def container_name(role: Role) -> str:
    """Return the name of the job's container; for Spark the one that both operators expect."""
    return "redrive" if role is Role.JOB else f"spark-kubernetes-{role}"


def pod_of(template: JobTemplate, role: Role) -> JobPod:
    """Return one kind of pod of *template*, with the settings of redrive.

    The job's container is the one named `redrive`, else the first. Each container gets the fields
    of `RESTRICTED` that neither it nor the pod sets.

    Raises:
        InvalidSpecError: the template sets a field that redrive sets.
    """
    written: Mapping[str, Any] = getattr(template, role)
    metadata, spec = (_object(written, field, role) for field in ("metadata", "spec"))
    _check_pod(role, written, metadata, spec)
    containers = _list(spec, "containers", role) or [{}]
    own = next((c for c in containers if c.get("name") == "redrive"), containers[0])
    _check_container(role, own)
    size = _size(role, _object(own, "resources", role))
    context = _object(spec, "securityContext", role)
    first = {
        **_restricted(own, context),
        "name": container_name(role),
        "resources": _without_size(own.get("resources") or {}),
    }
    first.pop("imagePullPolicy", None)
    others = [_restricted(c, context) for c in containers if c is not own]
    init = [_restricted(c, context) for c in _list(spec, "initContainers", role)]
    pod = {
        **spec,
        "automountServiceAccountToken": role is not Role.EXECUTOR,
        "containers": [_filled(first), *others],
        "initContainers": init,
    }
    whole = {"metadata": dict(metadata), "spec": _filled(pod)}
    return JobPod(template=whole, pull_policy=own.get("imagePullPolicy") or "", **size)


def _object(parent: Mapping[str, Any], field: str, role: Role) -> Mapping[str, Any]:
    value = parent.get(field) or {}
    if not isinstance(value, Mapping):
        raise _wrong_type(role, field, value, "an object")
    return value


def _list(parent: Mapping[str, Any], field: str, role: Role) -> list[Mapping[str, Any]]:
    values = parent.get(field) or []
    if not isinstance(values, list) or not all(isinstance(item, Mapping) for item in values):
        raise _wrong_type(role, field, values, "a list of objects")
    return values


def _wrong_type(role: Role, field: str, value: object, kind: str) -> InvalidSpecError:
    return InvalidSpecError(
        f"`{field}` of {role} must be {kind}", got=type(value).__name__, remedy="correct it"
    )


def _filled(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in ({}, [], None)}


def _restricted(container: Mapping[str, Any], pod: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {name: value for name, value in RESTRICTED.items() if name not in pod}
    context = {**defaults, **(container.get("securityContext") or {})}
    return {**container, "securityContext": context}


_POD_FIELDS = ("serviceAccountName", "serviceAccount", "automountServiceAccountToken")
_CONTAINER_FIELDS = ("command", "args", "image")
_OWN_LABELS = (
    "app.kubernetes.io/name",
    "app.kubernetes.io/component",
    "app.kubernetes.io/managed-by",
)
_OWN = "redrive"


def _check_pod(
    role: Role, written: Mapping[str, Any], metadata: Mapping[str, Any], spec: Mapping[str, Any]
) -> None:
    for field in written:
        if field not in {"metadata", "spec"}:
            raise _not_yours(f"{role}.{field}", "use `metadata` and `spec` of a PodTemplateSpec")
    for field in metadata:
        if field not in {"labels", "annotations"}:
            raise _not_yours(f"{role}.metadata.{field}")
    _check_labels(f"{role}.metadata", _object(metadata, "labels", role))
    for field in (*_POD_FIELDS, "restartPolicy"):
        if field in spec:
            raise _not_yours(f"{role}.spec.{field}")
    for volume in _list(spec, "volumes", role):
        if str(volume.get("name", "")).startswith(f"{_OWN}-"):
            raise _not_yours(f"{role}.spec.volumes: {volume['name']}", "choose another name")


def _check_container(role: Role, container: Mapping[str, Any]) -> None:
    for field in _CONTAINER_FIELDS:
        if field in container:
            remedy = "set `image` of the template" if field == "image" else "remove it"
            raise _not_yours(f"{role}.spec.containers: {field}", remedy)
    for variable in _list(container, "env", role):
        if str(variable.get("name", "")).startswith("REDRIVE_"):
            raise _not_yours(f"{role}.spec.containers: env {variable['name']}")
    for mount in _list(container, "volumeMounts", role):
        path = str(mount.get("mountPath", "")).rstrip("/") or "/"
        if path == ACCESS_FOLDER or ACCESS_FOLDER.startswith(f"{path}/"):
            raise _not_yours(f"{role}.spec.containers: mountPath {path}", "mount it elsewhere")


def _check_labels(place: str, labels: Mapping[str, str]) -> None:
    for name in labels:
        if name in _OWN_LABELS or name.startswith(f"{_OWN}.io/"):
            raise _not_yours(f"{place}.labels: {name}")


def _not_yours(field: str, remedy: str = "remove it") -> InvalidSpecError:
    return InvalidSpecError(
        "a job template must not set fields that redrive sets", got=field, remedy=remedy
    )


_CONF = re.compile(
    r"spark[.](master|app[.]name|speculation|submit[.](deployMode|pyFiles)"
    r"|executor[.]instances|executor[.]pyspark[.]memory|dynamicAllocation[.]maxExecutors"
    r"|(driver|executor)[.](cores|memory|memoryOverhead|memoryOverheadFactor)"
    r"|kubernetes[.](namespace|memoryOverheadFactor|authenticate[.].*|container[.].*"
    r"|driver[.]pod[.]name|executor[.](podNamePrefix|disableConfigMap)"
    r"|executor[.]terminationGracePeriodSeconds"
    # Settings of pods belong in the pod templates.
    r"|driverEnv[.].*|(driver|executor)[.](request[.]cores|limit[.]cores|podTemplate.*"
    r"|container[.].*|(label|annotation|volumes|secrets|secretKeyRef|node[.]selector)[.].*)"
    r"|node[.]selector[.].*)"
    r"|executorEnv[.].*)"
)


def _check_property(name: str) -> None:
    if not name.startswith("spark."):
        raise InvalidSpecError(
            "a Spark property must begin with `spark.`", got=name, remedy="correct `sparkConf`"
        )
    if _CONF.fullmatch(name):
        raise InvalidSpecError(
            "`sparkConf` must not set a property of pods, or one that redrive sets",
            got=name,
            remedy="use `image`, `executors`, `driver` and `executor` of the template",
        )


_DEFAULT_CPU, _DEFAULT_MEMORY = "1", "1434Mi"
"""Default size of a pod: a heap of 1 GiB, as Spark's own default."""
_LEAST_MEMORY = 896
"""Minimum in MiB: Spark refuses a heap below 450 MiB, and adds at least 384 MiB."""
_LEAST_OVERHEAD = 384
_SUFFIXES = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{unit: Decimal(1000) ** power for power, unit in enumerate("kMGTPE", start=1)},
    **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", start=1)},
}
_QUANTITY = re.compile(r"([0-9]+(?:[.][0-9]*)?|[.][0-9]+)(m|[kMGTPE]|[KMGTPE]i|e[0-9]{1,2})?")


def _quantity(role: Role, name: str, value: object) -> Decimal:
    """Return a positive Quantity of Kubernetes as a number."""
    written = _QUANTITY.fullmatch(str(value))
    suffix = (written[2] or "") if written else ""
    exponent = suffix if suffix.startswith("e") else ""
    number = Decimal(f"{written[1]}{exponent}") if written else Decimal(0)
    amount = number * (1 if exponent else _SUFFIXES[suffix])
    if amount <= 0:
        raise InvalidSpecError(
            f"`{name}` of {role} must be a positive amount, as in a pod",
            got=str(value),
            remedy="write it like 500m for CPU, or 2Gi for memory",
        )
    return amount


def _size(role: Role, resources: Mapping[str, Any]) -> dict[str, Any]:
    """Return the size of a pod as attributes of a `JobPod`.

    Spark sets the memory request to the limit, and needs at least 384 MiB beyond the heap. redrive
    leaves two sevenths, so that the total is 1.4 times the heap, as Spark does for Python.
    """
    requests, limits = (_object(resources, field, role) for field in ("requests", "limits"))
    sizes = [source["memory"] for source in (requests, limits) if "memory" in source]
    amounts = {_quantity(role, "memory", size) for size in sizes or [_DEFAULT_MEMORY]}
    if len(amounts) > 1:
        raise InvalidSpecError(
            f"`memory` of {role} must be the same in requests and limits, because Spark sets both "
            "to one amount",
            got=" and ".join(map(str, sizes)),
            remedy="set one of them",
        )
    memory = math.floor(amounts.pop() / _SUFFIXES["Mi"])
    if memory < _LEAST_MEMORY:
        raise InvalidSpecError(
            f"`memory` of {role} must be at least {_LEAST_MEMORY}Mi",
            got=str(sizes[0]),
            remedy="increase it",
        )
    overhead = max(_LEAST_OVERHEAD, memory - memory * 5 // 7)
    limit = str(limits.get("cpu", ""))
    request = str(requests.get("cpu", limit or _DEFAULT_CPU))
    if limit and _quantity(role, "cpu", limit) < _quantity(role, "cpu", request):
        raise InvalidSpecError(
            f"the CPU limit of {role} must be at least its request",
            got=f"{limit} and {request}",
            remedy="increase the limit, or reduce the request",
        )
    return {
        "cores": math.ceil(_quantity(role, "cpu", limit or request)),
        "memory": f"{memory - overhead}m",
        "memory_overhead": f"{overhead}m",
        "core_request": request,
        "core_limit": limit,
    }


def _without_size(resources: Mapping[str, Any]) -> dict[str, Any]:
    """Return *resources* without CPU and memory, which Spark sets."""
    others = {
        field: {n: v for n, v in amounts.items() if n not in {"cpu", "memory"}}
        if isinstance(amounts, Mapping)
        else amounts
        for field, amounts in resources.items()
    }
    return _filled(others)


def references(template: Body) -> Iterator[tuple[str, str]]:
    """Yield kind and name of each object that a PodTemplateSpec needs in its namespace.

    Kinds are Secret, ConfigMap and PersistentVolumeClaim; optional references are left out.
    """
    spec = template["spec"]
    for secret in spec.get("imagePullSecrets") or ():
        yield "Secret", secret["name"]
    for volume in spec.get("volumes") or ():
        projected = (volume.get("projected") or {}).get("sources") or ()
        for source in (volume, *projected):
            yield from _references(source, {"secret": "Secret", "configMap": "ConfigMap"})
        if claim := volume.get("persistentVolumeClaim"):
            yield "PersistentVolumeClaim", claim["claimName"]
    for container in (*spec["containers"], *(spec.get("initContainers") or ())):
        for source in container.get("envFrom") or ():
            yield from _references(source, {"secretRef": "Secret", "configMapRef": "ConfigMap"})
        for variable in container.get("env") or ():
            kinds = {"secretKeyRef": "Secret", "configMapKeyRef": "ConfigMap"}
            yield from _references(variable.get("valueFrom") or {}, kinds)


def _references(source: Mapping[str, Any], kinds: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for field, kind in kinds.items():
        reference = source.get(field) or {}
        name = reference.get("secretName") or reference.get("name")
        if name and not reference.get("optional"):
            yield kind, name
