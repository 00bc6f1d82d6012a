"""Kinds of objects, their keys, and the fields of an object that a cache retains; pure.

A label selects ConfigMaps and SparkApplications, and any user can set it: a namespace may have a
thousand such ConfigMaps of a mebibyte each. So the retained part of either has a maximum length. Of
redrive's own kinds the spec and the status are retained, which their schemas limit, and a bounded
part of the metadata. Of an Inspection nothing is retained that only its job and people read.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from redrive.api import GROUP, VERSION, Body, LauncherName


class Key(NamedTuple):
    """Namespace and name of an object of a known kind."""

    namespace: str
    name: str

    @classmethod
    def of(cls, body: Body) -> Key:
        """Return the key of *body*."""
        return cls(body["metadata"]["namespace"], body["metadata"]["name"])

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class PolicyKey(NamedTuple):
    """Kind, namespace and name of a policy: policies of two kinds may share a name."""

    kind: str
    namespace: str
    name: str

    @classmethod
    def of(cls, run: Body) -> PolicyKey:
        """Return the policy that a Replay or an Inspection refers to."""
        reference = run["spec"]["policyRef"]
        kind = reference.get("kind", POLICIES.kind)
        return cls(kind, run["metadata"]["namespace"], reference["name"])

    @property
    def key(self) -> Key:
        """Return its key among policies of its kind."""
        return Key(self.namespace, self.name)

    def __str__(self) -> str:
        return str(self.key)


@dataclass(frozen=True)
class Resource:
    """A kind of objects; the core group is "".

    Attributes:
        selector: label selector of the objects that redrive lists and watches; empty for all.
        fields: field selector, likewise.
    """

    group: str
    version: str
    plural: str
    kind: str
    selector: str = ""
    fields: str = ""

    @property
    def api_version(self) -> str:
        """Return the `apiVersion` of its objects."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def typed(self) -> dict[str, str]:
        """Return `apiVersion` and `kind` of its objects."""
        return {"apiVersion": self.api_version, "kind": self.kind}

    @property
    def address(self) -> tuple[str, str, str]:
        """Return group, version and plural for a watch."""
        return self.group, self.version, self.plural

    def path(self, namespace: str | None = None, name: str | None = None) -> str:
        """Return the URL path of one object, of a namespace's objects, or of all.

        Objects without a namespace, such as a Namespace, have an empty one.
        """
        root = f"/apis/{self.group}" if self.group else "/api"
        within = f"/namespaces/{namespace}" if namespace else ""
        one = f"/{name}" if name is not None else ""
        return f"{root}/{self.version}{within}/{self.plural}{one}"


MANAGED = ("app.kubernetes.io/managed-by", "redrive")
"""Label and value of objects that redrive creates: a cluster may have thousands of other
objects."""
CONNECTION = "redrive.io/connection"
"""Annotation of a Job or SparkApplication: the connection that permitted it, `namespace/name`."""
POLICY_LABEL = "redrive.io/policy"
"""Label of objects that the operator creates: the name of their RetryPolicy."""

PAUSE = "redrive.io/paused"
"""Annotation of a RetryPolicy: while it is `true`, the policy is not reconciled."""
IGNORE_OUTAGES_UNTIL = "redrive.io/ignore-outages-until"
"""Annotation of a RetryPolicy with a time: until then consumers do not pause for outages."""
DEAD_LETTER_NOW = "redrive.io/dead-letter-now"
"""Annotation of a RetryPolicy: messages that consumers dead-letter at their next failure, each as
`ORIGIN@TIME`, until that time; separated by spaces."""
RECONCILE_REQUESTED_AT = "redrive.io/reconcile-requested-at"
"""Annotation with a time: a change of it causes a reconcile."""
UNLOAD_REQUESTED_AT = "redrive.io/unload-requested-at"
"""Annotation of a RetryPolicy with a time: the broker loads the retry topic again, once for each
value."""
JOB_MANAGER = "redrive-job"
"""Field manager of the writes of jobs."""
REQUESTED_BY = "redrive.io/requested-by"
"""Annotation: the user who created a Replay or an Inspection, or who last annotated a RetryPolicy.
The admission policy of the chart verifies it."""
SKIP_CLEANUP = "redrive.io/skip-cleanup"
"""Annotation of a RetryPolicy: with `true` a deleted policy is removed at once, without cleanup."""
HAND_OVER_TO = "redrive.io/hand-over-to"
"""Annotation of a RetryPolicy: id of another cluster, whose policy of the same namespace and name
gets its topics."""
TAKE_OVER_FROM = "redrive.io/take-over-from"
"""Annotation of a RetryPolicy: names of policies in its namespace whose topics it may take over,
separated by commas."""
USABLE_BY = "redrive.io/usable-by"
"""Annotation of a Secret, ConfigMap or claim: the BrokerConnections whose replay jobs may mount it,
each as `namespace/name`, separated by commas. On the ServiceAccount of replay jobs it is the
consent for all objects of the namespace that the operator may not read."""

TOPIC_OWNER = "redrive.io/owner"
"""Topic property: the owner of a topic, as `cluster/namespace/name`."""

CONNECTIONS = Resource(GROUP, VERSION, "brokerconnections", "BrokerConnection")
POLICIES = Resource(GROUP, VERSION, "retrypolicies", "RetryPolicy")
ROCKETMQ_POLICIES = Resource(GROUP, VERSION, "rocketmqretrypolicies", "RocketMQRetryPolicy")
POLICY_KINDS = {resource.kind: resource for resource in (POLICIES, ROCKETMQ_POLICIES)}
"""Kinds of policies, by the name in a `policyRef`."""
REPLAYS = Resource(GROUP, VERSION, "replays", "Replay")
INSPECTIONS = Resource(GROUP, VERSION, "inspections", "Inspection")
APPROVALS = Resource(GROUP, VERSION, "replayapprovals", "ReplayApproval")
ACCESS_REVIEWS = Resource(
    "authorization.k8s.io", "v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview"
)
ACCOUNT_REVIEWS = Resource(
    "authorization.k8s.io", "v1", "localsubjectaccessreviews", "LocalSubjectAccessReview"
)
_managed = partial(Resource, selector="=".join(MANAGED))
SPARK_APPLICATIONS = _managed(
    "sparkoperator.k8s.io", "v1beta2", "sparkapplications", "SparkApplication"
)
APACHE_SPARK_APPLICATIONS = _managed(
    "spark.apache.org", "v1", "sparkapplications", "SparkApplication"
)
JOBS = _managed("batch", "v1", "jobs", "Job")
SECRETS = Resource("", "v1", "secrets", "Secret")
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
CONFIG_MAPS = _managed("", "v1", "configmaps", "ConfigMap")
EVENTS = Resource("", "v1", "events", "Event")
PODS = Resource("", "v1", "pods", "Pod")
CLAIMS = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
POD_TEMPLATES = Resource("", "v1", "podtemplates", "PodTemplate")
NAMESPACES = Resource("", "v1", "namespaces", "Namespace")
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
APPLICATIONS: Mapping[LauncherName, Resource] = {
    LauncherName.KUBEFLOW: SPARK_APPLICATIONS,
    LauncherName.APACHE: APACHE_SPARK_APPLICATIONS,
}
"""Kind of each Spark operator. Both have the same name, so the group must always be named."""


def is_paused(policy: Body) -> bool:
    """Return True if a RetryPolicy is paused."""
    return (policy["metadata"].get("annotations") or {}).get(PAUSE) == "true"


def owner_reference(resource: Resource, owner: Body) -> dict[str, Any]:
    """Return the owner reference that makes *owner* the controller of another object."""
    return {
        **resource.typed,
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
    }


def is_owned_by(body: Body, owner: Body) -> bool:
    """Return True if *owner*, and not only an object of its name, is an owner of *body*."""
    owners = body["metadata"].get("ownerReferences", [])
    return any(reference["uid"] == owner["metadata"]["uid"] for reference in owners)


_MAPPINGS = ("spec", "status", "data")
_VERSION_DIGITS = 128
_FIELDS: Mapping[str, type] = {
    "name": str, "namespace": str, "creationTimestamp": str, "deletionTimestamp": str,
    "generation": int, "labels": dict, "annotations": dict, "finalizers": list,
}  # fmt: skip
_WITHOUT_SCHEMA = frozenset(kind.group for kind in APPLICATIONS.values())
"""Groups whose kinds may have no schema: a user may write any conditions."""


def malformed(body: Body) -> str:
    """Return how an answer or event of an API server is no object; empty for an object.

    It needs an identity, and the forms of fields that every kind has.
    """
    metadata = body.get("metadata") if isinstance(body, dict) else None
    if not isinstance(metadata, dict) or not isinstance(metadata.get("uid"), str):
        return "an object without metadata or uid"
    if not is_version(version := metadata.get("resourceVersion")):
        return f"resourceVersion {version!r}"[:_LONGEST_WORD]
    for name, kind in _FIELDS.items():
        if not isinstance(metadata.get(name), kind | None):
            return f"a {name} that is not of type {kind.__name__}"
    texts = [
        text for name in ("labels", "annotations") for text in (metadata.get(name) or {}).values()
    ]
    if not all(isinstance(text, str) for text in texts):
        return "a label or an annotation that is not text"
    owners = metadata.get("ownerReferences") or []
    if not isinstance(owners, list) or not all(isinstance(owner, dict) for owner in owners):
        return "owners that are not mappings"
    return _malformed_content(body)


def _malformed_content(body: Body) -> str:
    if not all(isinstance(body.get(name), dict | None) for name in _MAPPINGS):
        return "a field that is not a mapping"
    conditions = (body.get("status") or {}).get("conditions")
    if conditions is None or str(body.get("apiVersion")).partition("/")[0] in _WITHOUT_SCHEMA:
        return ""
    if not isinstance(conditions, list) or not all(map(_is_condition, conditions)):
        return "conditions without type and status"
    return ""


def _is_condition(value: object) -> bool:
    words, texts = ("type", "status"), ("reason", "message", "lastTransitionTime")
    return (
        isinstance(value, dict)
        and all(isinstance(value.get(word), str) for word in words)
        and all(isinstance(value.get(text), str | None) for text in texts)
    )


def is_version(text: object) -> bool:
    """Return True if *text* is a `resourceVersion`."""
    return isinstance(text, str) and text.isdecimal() and len(text) <= _VERSION_DIGITS


CONFIG_MAP_KEY = "policy.json"
"""Key of the ConfigMap; consumers mount it at `/etc/redrive` and read this file."""
Keep = Callable[[Body], Body]
"""Reduces an object to its retained fields; idempotent."""

_IDENTITY = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
)
_MOST_OWNERS = 16
_LONGEST_WORD = 253
"""Maximum characters of a name or a time."""
_LONGEST_CONNECTION = 63 + 1 + _LONGEST_WORD
"""Maximum characters of the namespace and the name of a connection."""
_LONGEST_TEXT = 16_384
"""Maximum characters of the output of a failed submission, with stack traces."""
_MOST_CONDITIONS = 16
MAX_FINALIZERS = 16
"""Finalizers of an object of redrive that are retained, and one more if it has more."""
_MAX_ANNOTATIONS = 32 * 2**10
"""Size in memory of the retained annotations of an object of redrive."""
_UNREAD_SPEC = {"select", "reason", "ticket"}
"""Fields of an Inspection that its job reads, and the operator does not."""
_LAST_STATES = 4
"""Retained entries of the history; one of the last two shows how a run ended."""


def keep_of(resource: Resource) -> Keep:
    """Return the function that reduces objects of a kind."""
    return _KEPT.get(resource, of_redrive)


def of_redrive(body: Body) -> Body:
    """Retain an object with a bounded part of its metadata.

    `managedFields` is half of an object, and the annotation of `kubectl apply` repeats all of it.
    """
    metadata = {n: value for n, value in body["metadata"].items() if n != "managedFields"}
    if "annotations" in metadata:
        metadata["annotations"] = _own_annotations(metadata["annotations"] or {})
    if "labels" in metadata:
        metadata["labels"] = _own_labels(metadata["labels"])
    if "ownerReferences" in metadata:
        metadata["ownerReferences"] = _short_owners(metadata)
    if len(names := metadata.get("finalizers") or ()) > MAX_FINALIZERS:
        own = [name for name in names if str(name).startswith(f"{GROUP}/")]
        others = [name for name in names if name not in own]
        metadata["finalizers"] = [*own, *others][: MAX_FINALIZERS + 1]
    return {**body, "metadata": metadata}


def _own_annotations(annotations: Mapping[str, Any]) -> dict[str, str]:
    """Retain the annotations of redrive; the shortest ones if they have more than the size."""
    ours = [
        (sys.getsizeof(value), name)
        for name, value in annotations.items()
        if name.startswith(f"{GROUP}/") and isinstance(value, str)
    ]
    kept, room = dict[str, str](), _MAX_ANNOTATIONS
    for size, name in sorted(ours):
        room -= size + sys.getsizeof(name)
        if room >= 0:
            kept[name] = annotations[name]
    return kept


def _inspection(body: Body) -> Body:
    """Retain an Inspection without its selection and its summary."""
    body = of_redrive(body)
    metadata = {name: value for name, value in body["metadata"].items() if name != "finalizers"}
    spec = {n: v for n, v in _mapping(body.get("spec")).items() if n not in _UNREAD_SPEC}
    kept = {**body, "metadata": metadata, "spec": spec}
    if "status" in body:
        kept["status"] = {n: v for n, v in _mapping(body["status"]).items() if n != "run"}
    return kept


def retained_config_map(body: Body) -> Body:
    """Retain of a ConfigMap its owners, and a digest, in bytes, of the policy in it."""
    policy = (body.get("data") or {}).get(CONFIG_MAP_KEY)
    if isinstance(policy, str):
        policy = hashlib.sha256(policy.encode(errors="surrogatepass")).digest()
    return _reduced(body, {"data": {CONFIG_MAP_KEY: policy}} if policy is not None else {})


def _application(body: Body) -> Body:
    """Retain of a SparkApplication, of either Spark operator, owners, connection and state."""
    status = _mapping(body.get("status"))
    history = _mapping(status.get("stateTransitionHistory"))
    numbers = in_order(number for number in history if len(number) <= _LONGEST_WORD)
    states = {
        "applicationState": _retained_state(
            status.get("applicationState"), "state", text="errorMessage"
        ),
        "currentState": _apache_state(status.get("currentState")),
        "stateTransitionHistory": {n: _apache_state(history[n]) for n in numbers[-_LAST_STATES:]},
    }
    kept = {**states, **dict(_words(status, "lastSubmissionAttemptTime"))}
    return _reduced_run(body, kept)


def _job(body: Body) -> Body:
    """Retain of a Job its owners, its connection and its state."""
    status = _mapping(body.get("status"))
    counts = {name: status[name] for name in ("active", "ready", "failed") if name in status}
    conditions = [
        _retained_state(condition, "type", "status", "reason", text="message")
        for condition in (status.get("conditions") or ())[:_MOST_CONDITIONS]
    ]
    kept = {**counts, **dict(_words(status, "startTime")), "conditions": conditions}
    return _reduced_run(body, kept)


def _reduced_run(body: Body, status: Body) -> Body:
    """Return an application with its identity, its owners, its connection and *status*."""
    run = _reduced(body, {"status": {name: value for name, value in status.items() if value}})
    connection = _mapping(body["metadata"].get("annotations")).get(CONNECTION)
    if connection and len(connection) <= _LONGEST_CONNECTION:
        run["metadata"]["annotations"] = {CONNECTION: connection}
    return run


def in_order(numbers: Iterable[str]) -> list[str]:
    """Sort decimal numbers without parsing them: other tools may write any text."""
    return sorted(numbers, key=lambda number: (len(number), number))


def _retained_state(value: object, *words: str, text: str) -> dict[str, str]:
    """Retain *words* of a state, and a text.

    The middle of a long text is cut: it begins with the action and ends with the error.
    """
    fields, half = _mapping(value), _LONGEST_TEXT // 2
    state = dict(_words(fields, *words))
    if isinstance(message := fields.get(text), str):
        is_long = len(message) > _LONGEST_TEXT
        state[text] = f"{message[:half]}\n{message[-half:]}" if is_long else message
    return state


def _apache_state(value: object) -> dict[str, str]:
    return _retained_state(value, "currentStateSummary", "lastTransitionTime", text="message")


def _words(fields: Mapping[str, Any], *names: str) -> Iterator[tuple[str, str]]:
    for name in names:
        if isinstance(word := fields.get(name), str):
            yield name, word[:_LONGEST_WORD]


def _mapping(value: object) -> Mapping[str, Any]:
    """Return *value* if it is a mapping, else an empty one: kinds of others may have no schema."""
    return value if isinstance(value, dict) else {}


def _reduced(body: Body, content: Body) -> Body:
    """Return an object with its identity, its owners and *content*."""
    source = body["metadata"]
    metadata = {name: source[name] for name in _IDENTITY if name in source}
    if "labels" in source:
        metadata["labels"] = _own_labels(source["labels"])
    if owners := _short_owners(source):
        metadata["ownerReferences"] = owners
    typed = {name: body[name] for name in ("apiVersion", "kind") if name in body}
    return {**typed, "metadata": metadata, **content}


def _own_labels(labels: Mapping[str, str] | None) -> dict[str, str]:
    own = (MANAGED[0], POLICY_LABEL)
    return {name: labels[name] for name in own if labels and name in labels}


def _short_owners(metadata: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    owners = [owner for owner in metadata.get("ownerReferences") or () if _is_short(owner)]
    return owners[:_MOST_OWNERS]


def _is_short(owner: Mapping[str, Any]) -> bool:
    return all(len(str(value)) <= _LONGEST_WORD for value in owner.values())


_KEPT: Mapping[Resource, Keep] = {
    CONFIG_MAPS: retained_config_map,
    SPARK_APPLICATIONS: _application,
    APACHE_SPARK_APPLICATIONS: _application,
    JOBS: _job,
    INSPECTIONS: _inspection,
}
