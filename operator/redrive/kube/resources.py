"""Kinds of objects, their keys, and the fields of an object that a cache retains.

The kinds of Kubernetes objects that redrive reads or writes, and how one object is named.

What is kept in memory of an object: what redrive reads of it, and no more. Pure.

A label selects ConfigMaps and SparkApplications, and everyone can set it: a namespace may hold a
thousand ConfigMaps of a mebibyte each that have it. So what is kept of either has a length of its
own, whatever the object holds. Of redrive's own kinds the spec and the status are kept, whose
schemas limit them, and of the rest nothing that others write for themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from redrive.api import GROUP, VERSION, Body, LauncherName


class Key(NamedTuple):
    """An object of a known kind: its namespace and name."""

    namespace: str
    name: str

    @classmethod
    def of(cls, body: Body) -> Key:
        """Identify *body*."""
        return cls(body["metadata"]["namespace"], body["metadata"]["name"])

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class Resource:
    """A kind of objects; the core group is "".

    Attributes:
        selector: the label selector by which the API server chooses the objects that redrive lists
            and watches; empty for all.
        fields: the field selector, likewise.
    """

    group: str
    version: str
    plural: str
    kind: str
    selector: str = ""
    fields: str = ""

    @property
    def api_version(self) -> str:
        """Return what a manifest writes as `apiVersion`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def address(self) -> tuple[str, str, str]:
        """Return group, version and plural, by which a watch knows it."""
        return self.group, self.version, self.plural

    def path(self, namespace: str | None = None, name: str | None = None) -> str:
        """Return the URL path of one object, of a namespace's objects, or of all.

        What lies in no namespace, such as a Namespace, has an empty one.
        """
        root = f"/apis/{self.group}" if self.group else "/api"
        within = f"/namespaces/{namespace}" if namespace else ""
        one = f"/{name}" if name is not None else ""
        return f"{root}/{self.version}{within}/{self.plural}{one}"


MANAGED = ("app.kubernetes.io/managed-by", "redrive")
"""The label, and its value, of what redrive makes: a cluster may hold thousands of others' objects.
"""
POLICY_LABEL = "redrive.io/policy"
"""Label of all objects that the operator creates: the name of their RetryPolicy."""

PAUSE = "redrive.io/paused"
"""Annotation of a RetryPolicy: while it is `true`, nothing is read or written for the policy."""
IGNORE_OUTAGES_UNTIL = "redrive.io/ignore-outages-until"
"""Annotation of a RetryPolicy with a time: until then consumers don't pause for outages."""
DEAD_LETTER_NOW = "redrive.io/dead-letter-now"
"""Annotation of a RetryPolicy: messages that consumers dead-letter at their next failure, as
`ORIGIN@TIME`, until that time; separated by spaces."""
RECONCILE_REQUESTED_AT = "redrive.io/reconcile-requested-at"
"""Annotation with a time: a change of it has the object reconciled."""
UNLOAD_REQUESTED_AT = "redrive.io/unload-requested-at"
"""Annotation of a RetryPolicy with a time: the operator has the broker load the retry topic again,
once for each value."""
REQUESTED_BY = "redrive.io/requested-by"
"""Annotation: the user who created a Replay, or who annotated a RetryPolicy last. The admission
policy of the chart verifies it."""
SKIP_CLEANUP = "redrive.io/skip-cleanup"
"""Annotation of a RetryPolicy: with `true` a deleted policy goes at once, without cleanup."""
HAND_OVER_TO = "redrive.io/hand-over-to"
"""Annotation of a RetryPolicy: the id of another cluster, whose policy of the same namespace and
name gets its topics."""
TAKE_OVER_FROM = "redrive.io/take-over-from"
"""Annotation of a RetryPolicy: names of others of its namespace whose topics it may take over,
separated by commas."""
USABLE_BY = "redrive.io/usable-by"
"""Annotation of a Secret, ConfigMap or claim: the BrokerConnections that may have it mounted into
replay jobs, each as `namespace/name`, separated by commas. On the ServiceAccount of replay jobs it
is the consent for all objects of the namespace that the operator may not read."""

TOPIC_OWNER = "redrive.io/owner"
"""A property of a topic: which policy of which Kubernetes cluster keeps it, as
`cluster/namespace/name`."""

CONNECTIONS = Resource(GROUP, VERSION, "brokerconnections", "BrokerConnection")
POLICIES = Resource(GROUP, VERSION, "retrypolicies", "RetryPolicy")
REPLAYS = Resource(GROUP, VERSION, "replays", "Replay")
APPROVALS = Resource(GROUP, VERSION, "replayapprovals", "ReplayApproval")
ACCESS_REVIEWS = Resource(
    "authorization.k8s.io", "v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview"
)
ACCOUNT_REVIEWS = Resource(
    "authorization.k8s.io", "v1", "localsubjectaccessreviews", "LocalSubjectAccessReview"
)
SPARK_APPLICATIONS = Resource(
    "sparkoperator.k8s.io",
    "v1beta2",
    "sparkapplications",
    "SparkApplication",
    selector="=".join(MANAGED),
)
APACHE_SPARK_APPLICATIONS = Resource(
    "spark.apache.org",
    "v1",
    "sparkapplications",
    "SparkApplication",
    selector="=".join(MANAGED),
)
JOBS = Resource("batch", "v1", "jobs", "Job", selector="=".join(MANAGED))
SECRETS = Resource("", "v1", "secrets", "Secret")
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap", selector="=".join(MANAGED))
EVENTS = Resource("", "v1", "events", "Event")
PODS = Resource("", "v1", "pods", "Pod")
CLAIMS = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
POD_TEMPLATES = Resource("", "v1", "podtemplates", "PodTemplate")
CLAIMS = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
NAMESPACES = Resource("", "v1", "namespaces", "Namespace")
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
APPLICATIONS: Mapping[LauncherName, Resource] = {
    LauncherName.KUBEFLOW: SPARK_APPLICATIONS,
    LauncherName.APACHE: APACHE_SPARK_APPLICATIONS,
}
"""What each Spark operator runs. Both kinds have one name: always name the group."""


def owner_reference(resource: Resource, owner: Body) -> dict[str, Any]:
    """Return the entry that makes *owner* the controller of another object of its namespace."""
    return {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
    }


def is_owned_by(body: Body, owner: Body) -> bool:
    """Whether *owner* is among the owners of *body*: the same object, not one of its name."""
    owners = body["metadata"].get("ownerReferences", [])
    return any(reference["uid"] == owner["metadata"]["uid"] for reference in owners)


CONFIG_MAP_KEY = "policy.json"
"""Consumers mount the ConfigMap at `/etc/redrive` and find this file there."""
Keep = Callable[[Body], Body]
"""An object → what is kept of it; of what was kept that is all."""

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
"""In characters: a name or a time is not longer."""
_LONGEST_TEXT = 16_384
"""In characters: the output of a submission that failed, stack traces included, is as long."""
_MOST_CONDITIONS = 16
_LAST_STATES = 4
"""Of its history: one of the last two says how a run has ended."""


def keep_of(resource: Resource) -> Keep:
    """Return what reduces the objects of a kind."""
    return _KEPT.get(resource, of_redrive)


def of_redrive(body: Body) -> Body:
    """Keep an object without what others write into its metadata for themselves.

    Who last wrote which field is half of an object; what `kubectl apply` notes is all of it again.
    """
    metadata = {n: value for n, value in body["metadata"].items() if n != "managedFields"}
    if "annotations" in metadata:
        found = metadata["annotations"] or {}
        ours = {name: value for name, value in found.items() if name.startswith(f"{GROUP}/")}
        metadata["annotations"] = ours
    if "labels" in metadata:
        metadata["labels"] = _own_labels(metadata["labels"])
    return {**body, "metadata": metadata}


def retained_config_map(body: Body) -> Body:
    """Keep of a ConfigMap whose it is, and a digest of the policy in it, which is bytes."""
    found = (body.get("data") or {}).get(CONFIG_MAP_KEY)
    if isinstance(found, str):
        found = hashlib.sha256(found.encode(errors="surrogatepass")).digest()
    return _reduced(body, {"data": {CONFIG_MAP_KEY: found}} if found is not None else {})


def _application(body: Body) -> Body:
    """Keep of a SparkApplication, of either Spark operator, whose it is, and how it stands."""
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
    found = {**states, **dict(_words(status, "lastSubmissionAttemptTime"))}
    return _reduced(body, {"status": {name: value for name, value in found.items() if value}})


def _job(body: Body) -> Body:
    """Keep of a Job whose it is, and how it stands."""
    status = _mapping(body.get("status"))
    counts = {name: status[name] for name in ("active", "ready", "failed") if name in status}
    conditions = [
        _retained_state(condition, "type", "status", "reason", text="message")
        for condition in (status.get("conditions") or ())[:_MOST_CONDITIONS]
    ]
    kept = {**counts, **dict(_words(status, "startTime")), "conditions": conditions}
    return _reduced(body, {"status": {name: value for name, value in kept.items() if value}})


def in_order(numbers: Iterable[str]) -> list[str]:
    """Sort numbers, as they are written, without reading them: others may write any text."""
    return sorted(numbers, key=lambda number: (len(number), number))


def _retained_state(found: object, *words: str, text: str) -> dict[str, str]:
    """Keep *words* of a state, and a text.

    Of a long one the middle is left out: it begins with what was done, and ends with why not.
    """
    known, half = _mapping(found), _LONGEST_TEXT // 2
    state = dict(_words(known, *words))
    if isinstance(said := known.get(text), str):
        state[text] = f"{said[:half]}\n{said[-half:]}" if len(said) > _LONGEST_TEXT else said
    return state


def _apache_state(found: object) -> dict[str, str]:
    return _retained_state(found, "currentStateSummary", "lastTransitionTime", text="message")


def _words(found: Mapping[str, Any], *names: str) -> Iterator[tuple[str, str]]:
    for name in names:
        if isinstance(word := found.get(name), str):
            yield name, word[:_LONGEST_WORD]


def _mapping(found: object) -> Mapping[str, Any]:
    """Return *found* where it is as it should be: a kind of others may have no schema."""
    return found if isinstance(found, dict) else {}


def _reduced(body: Body, content: Body) -> Body:
    """Return an object with its identity, its owners and *content*."""
    found = body["metadata"]
    metadata = {name: found[name] for name in _IDENTITY if name in found}
    if "labels" in found:
        metadata["labels"] = _own_labels(found["labels"])
    owners = [owner for owner in found.get("ownerReferences") or () if _is_short(owner)]
    if owners:
        metadata["ownerReferences"] = owners[:_MOST_OWNERS]
    typed = {name: body[name] for name in ("apiVersion", "kind") if name in body}
    return {**typed, "metadata": metadata, **content}


def _own_labels(labels: Mapping[str, str] | None) -> dict[str, str]:
    own = (MANAGED[0], POLICY_LABEL)
    return {name: labels[name] for name in own if labels and name in labels}


def _is_short(owner: Mapping[str, Any]) -> bool:
    return all(len(str(value)) <= _LONGEST_WORD for value in owner.values())


_KEPT: Mapping[Resource, Keep] = {
    CONFIG_MAPS: retained_config_map,
    SPARK_APPLICATIONS: _application,
    APACHE_SPARK_APPLICATIONS: _application,
    JOBS: _job,
}
