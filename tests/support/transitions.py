"""Each field of a spec is changed, and changed back; the result equals that of a new object.

The fields are read from the CRDs (`tests.support.crd_fields`), and so are their values. For each
field one object goes from value to value; beside it, objects with each of the values are new. The
two have to end alike: spec, finalizers, status, the ConfigMap, and all that the broker holds.
`tests/integration/provision/e2e_transitions.py` takes some fields, and
`tests/chaos/chaos_transitions.py` all.
"""

from __future__ import annotations

import difflib
import itertools
import json
import re
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from redrive.api import Body
from redrive.reasons import Reason
from tests.integration.provision.conftest import Shop, redrive, rest_path
from tests.integration.provision.e2e_tenants import consumed_topic
from tests.support.crd_fields import SpecField, SpecFields

TOPIC_POLICIES = (
    "messageTTL",
    "deduplicationEnabled",
    # In force: a tick that is the broker's own already is not set on a new topic.
    "delayedDelivery?applied=true",
    "inactiveTopicPolicies",
    "retention",
    "backlogQuotaMap",
    "compactionThreshold",
)
STATISTICS = {
    Reason.ACK_HOLES,
    Reason.FOREIGN_SUBSCRIPTION,
    Reason.RETRY_TOPIC_NOT_CONSUMED,
    Reason.RETRY_STORM,
    Reason.RETRIES_OVERDUE,
    Reason.QUOTA_NEARLY_REACHED,
}
"""Conditions that depend on messages and clients, not on the spec."""
State = dict[str, Any]
NAME = "NAME"
"""Stands for the name of an object, in specs and states."""


@dataclass(frozen=True)
class Lasting:
    """A residue of a former value that stays by design.

    Attributes:
        why: the reason.
        parts: the parts of a state that may exceed those of a new object, as patterns of paths.
    """

    why: str
    parts: tuple[str, ...]

    def without(self, actual: Any, expected: Any, path: str = "") -> Any:  # noqa: ANN401  JSON
        """Return *actual* without residues that are not *expected*."""
        if isinstance(actual, list) and self._lasts(path):
            return [item for item in actual if item in expected]
        if not isinstance(actual, dict) or not isinstance(expected, dict):
            return actual
        kept = {
            name: self.without(value, expected.get(name), f"{path}/{name}")
            for name, value in actual.items()
        }
        gone = {name for name in kept.keys() - expected.keys() if self._lasts(f"{path}/{name}")}
        return {name: value for name, value in kept.items() if name not in gone}

    def _lasts(self, path: str) -> bool:
        return any(re.fullmatch(part, path) for part in self.parts)


@dataclass
class World:
    """The last read objects of a shop, and their state at the broker.

    Attributes:
        before: the state at the broker when an object was last correct, by its name.
    """

    shop: Shop
    pool: ThreadPoolExecutor
    objects: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    rights: dict[str, Any] = field(default_factory=dict)
    topics: list[str] = field(default_factory=list)
    before: dict[str, State] = field(default_factory=dict)

    def look(self) -> None:
        """Read all objects, and the names and rights of all topics."""
        shop = self.shop
        self.objects = {
            (kind, body["metadata"]["name"]): body
            for kind in ("RetryPolicy", "BrokerConnection", "ConfigMap")
            for body in shop.cluster.objects.list(kind.lower(), shop.namespace)
        }
        space = f"{shop.tenant}/prod"
        auth = shop.request("GET", f"namespaces/{space}")["auth_policies"]
        self.rights = auth["destination_auth"]
        self.topics = [
            *shop.request("GET", f"persistent/{space}"),
            *shop.request("GET", f"persistent/{space}/partitioned"),
        ]

    def object_state(self, kind: str, name: str) -> State:
        """Spec, finalizers and status, and the ConfigMap of a policy."""
        policy = self.objects["RetryPolicy", name]
        state = {"policy": shown(policy), "config map": self._config_map(policy)}
        if kind == "BrokerConnection":
            state["connection"] = shown(self.objects[kind, name])
        return plain(state, name, [body["metadata"]["uid"] for body in self._of(name)])

    def broker_state(self, name: str) -> State:
        """Return the state at the broker of the topics of a policy, by name."""
        topics = sorted(topic for topic in self.topics if name in topic)
        uids = [body["metadata"]["uid"] for body in self._of(name)]
        states = dict(zip(topics, self.pool.map(self._topic, topics), strict=True))
        return plain(states, name, uids)

    def reason(self, name: str) -> str:
        """The reason of a policy's Ready condition."""
        conditions = self.objects["RetryPolicy", name].get("status", {}).get("conditions", [])
        return next((c["reason"] for c in conditions if c["type"] == "Ready"), "")

    def _of(self, name: str) -> Iterator[dict[str, Any]]:
        for kind in ("RetryPolicy", "BrokerConnection"):
            if (kind, name) in self.objects:
                yield self.objects[kind, name]

    def _config_map(self, policy: dict[str, Any]) -> State | None:
        body = self.objects.get(("ConfigMap", f"{policy['metadata']['name']}-redrive"))
        if body is None:
            return None
        written = json.loads(body["data"]["policy.json"])
        if written["generation"] == policy["metadata"]["generation"]:
            written["generation"] = "current"
        metadata = body["metadata"]
        return {
            "labels": metadata["labels"],
            "owners": metadata["ownerReferences"],
            "data": {**body["data"], "policy.json": written},
        }

    def _topic(self, topic: str) -> State:
        path = rest_path(topic)
        read = ["subscriptions"]
        if not re.search(r"-partition-\d+$", topic):
            read += ["properties", *TOPIC_POLICIES]
        state: State = {}
        for name in read:
            answer = self.shop.broker.request("GET", f"/admin/v2/{path}/{name}")
            if answer.status == HTTPStatus.NOT_FOUND:
                return {"deleted": "since it was listed"}
            answer.check(f"read {name} of {topic}")
            state[name] = json.loads(answer.body) if answer.body else None
        state["subscriptions"].sort()
        if "properties" in state:
            properties = state["properties"] or {}
            state["properties"] = {key: value for key, value in properties.items() if value}
            rights = self.rights.get(topic, {})
            state["rights"] = {role: sorted(may) for role, may in rights.items()}
        return state


def shown(body: dict[str, Any]) -> State:
    """Return an object without times and counters of changes."""
    generation = body["metadata"]["generation"]
    status = {k: v for k, v in body.get("status", {}).items() if k not in {"backlog", "warnings"}}
    if status.get("observedGeneration") == generation:
        status["observedGeneration"] = "current"
    status["conditions"] = sorted(
        (
            {
                "type": c["type"],
                "status": c["status"],
                "reason": c["reason"],
                "message": c["message"],
                "current": c["observedGeneration"] == generation,
            }
            for c in status.get("conditions", [])
            if c["type"] not in STATISTICS
        ),
        key=lambda c: c["type"],
    )
    finalizers = sorted(body["metadata"].get("finalizers", []))
    return {"spec": body["spec"], "finalizers": finalizers, "status": status}


def plain(state: State, name: str, uids: Iterable[str]) -> State:
    """Return *state* with the name of its object replaced."""
    text = json.dumps(state).replace(name, NAME)
    for uid in uids:
        text = text.replace(uid, "UID")
    result: State = json.loads(text)
    return result


def difference(expected: State, actual: State, lasting: Lasting | None = None) -> str | None:
    """Return the differences of two states except residues; None if there are none."""
    if lasting is not None:
        actual = lasting.without(actual, expected)
    if expected == actual:
        return None
    one, other = (
        json.dumps(state, indent=1, sort_keys=True).splitlines() for state in (expected, actual)
    )
    return "\n".join(difflib.unified_diff(one, other, "new", "changed", lineterm="", n=3))


ROUND_SECONDS = 60.0
"""A round fails after this time without a change."""
LOOK_SECONDS = 1.5
"""The interval between reads of all objects, which are expensive."""
AT_ONCE = 8


def given(shop: Shop) -> dict[str, dict[str, tuple[Any, ...]]]:
    """Kind → field → values, where one of the right form is not enough: it has to be there."""
    here = shop.namespace
    return {
        "RetryPolicy": {
            "connectionRef.name": ("second",),
            "connectionRef.namespace": (here, "elsewhere"),
            # More than the broker's own default of the quota, or it refuses it.
            "deadLetter.retention.size": ("20Gi", "40Gi"),
            "outageBreaker.maxProbeInterval": ("10s", "20s"),
        },
        "BrokerConnection": {
            "pulsar.adminURL": (shop.broker.admin_url.replace("127.0.0.1", "localhost"),),
            "pulsar.authentication.token.secretRef.name": ("second-admin", "none"),
            "pulsar.authentication.token.secretRef.key": ("second", "none"),
            "allow[].namespaces.names": ([here], [here, "elsewhere"]),
            "allow[].namespaces.selector.matchLabels": (
                {"kubernetes.io/metadata.name": here},
                {"kubernetes.io/metadata.name": "elsewhere"},
            ),
            "allow[].namespaces.selector.matchExpressions[].key": (
                "kubernetes.io/metadata.name",
                "team",
            ),
            "allow[].namespaces.selector.matchExpressions[].values": ([here], [here, "elsewhere"]),
            "allow[].topics": (
                [f"persistent://{shop.tenant}/prod/*"],
                ["persistent://elsewhere/*/*", f"persistent://{shop.tenant}/*/*"],
            ),
            "allow[].roles": (["*"], ["f*", "billing"]),
            "policyDefaults.outageBreaker.maxProbeInterval": ("10s", "20s"),
            "jobs.templates": (["default"], ["default", "large"]),
            "jobs.defaultTemplate": ("default", "large"),
        },
    }


def beside() -> dict[str, dict[str, dict[str, Any]]]:
    """Kind → field → the spec before the field is set; None removes a field."""
    return {
        "RetryPolicy": {
            "ordering": {"subscriptionType": "KeyShared"},
            # A topic without partitions never gets any.
            "deadLetter.sequenced": {"subscriptionType": "KeyShared", "ordering": "PerKey"},
            "retry.partitions": {"retry": {"partitions": 1}},
            "deadLetter.partitions": {"deadLetter": {"partitions": 1}},
        },
        "BrokerConnection": {},
    }


ONE_VALUE: dict[str, str] = {}
"""Fields of fewer than two values, and why."""


_NEVER_SHRINK = Lasting(
    "no topic can lose partitions: a warning tells",
    (".*-(RETRY|DLQ)-partition-[12]", "/policy/status/conditions"),
)
_DEAD_LETTERS_REST = Lasting(
    "dead letters rest in the topic, and consumers may still run with the policy before",
    (".*-DLQ(-LEDGER)?",),
)
LASTING = {
    "RetryPolicy retry.partitions": _NEVER_SHRINK,
    "RetryPolicy deadLetter.partitions": _NEVER_SHRINK,
    "RetryPolicy deadLetter.mode": _DEAD_LETTERS_REST,
    "RetryPolicy deadLetter.sequenced": Lasting(
        "consumers may still run with the policy before, and records rest with their dead letters",
        (".*-DLQ-SEQUENCES",),
    ),
    "RetryPolicy deadLetter.subscription": Lasting(
        "the subscription of before may hold dead letters, and consumers: it is deleted by hand",
        (".*-DLQ/subscriptions",),
    ),
}
"""Fields of which something stays."""
LAST_SEEN = Lasting(
    "of a broker that is not reached any more, and of one that was read a moment ago, the release "
    "that was last seen is shown",
    ("/connection/status/brokerVersion",),
)
"""The residues of any change."""
FOR_NEW_OBJECTS: dict[str, str] = {}
"""Fields whose change concerns new objects only, and why."""


@dataclass(frozen=True)
class Case:
    """A field, the specs that an object has one after the other, and new objects with each.

    Attributes:
        name: of the object that changes.
        new: the names of the new ones, by the step.
    """

    kind: str
    leaf: SpecField
    specs: tuple[Body, ...]
    name: str
    new: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind} {self.leaf}"


def cases(shop: Shop) -> list[Case]:
    """Return a case for each field that may change; fails for those that have no values."""
    result: list[Case] = []
    poor: list[str] = []
    names: dict[str, str] = {}
    for kind in ("RetryPolicy", "BrokerConnection"):
        fields, before = SpecFields(kind, given(shop)[kind]), beside()[kind]
        unknown = {*fields.given, *before} - set(map(str, fields.all))
        assert not unknown, f"{kind} has no fields {unknown}"
        for leaf in fields.all:
            if leaf.immutable or leaf.steps[0] == "rocketmq":  # this connection has Pulsar
                continue
            start = base(kind, shop) | before.get(str(leaf), {})
            start = {key: value for key, value in start.items() if value is not None}
            values = fields.specs(leaf, start, len(leaf.schema.get("enum", "ab")))
            settings = [spec for spec in (start, *values) if leaf.of(spec) is not None]
            if len(settings) < 2 and f"{kind} {leaf}" not in ONE_VALUE:
                poor.append(f"{kind} {leaf}: {values}")
            specs = (start, *values, start)
            new = (names.setdefault(f"{kind}{spec}", f"n{len(names):03d}n") for spec in specs)
            result.append(Case(kind, leaf, specs, f"c{len(result):03d}c", tuple(new)))
    assert not poor, f"give these values, or a reason for which they have none: {poor}"
    return result


def prepared(shop: Shop) -> Shop:
    """Create the Secrets and connections in *shop* that the specs name."""
    token = shop.token(shop.role)
    shop.secret("pulsar-admin", token=token, second=token)
    shop.secret("second-admin", token=token)
    for name in ("main", "second"):
        shop.connection(name, **connection_base(shop))
        shop.ready(name, "brokerconnection")
    return shop


def some(all_: Sequence[Case], share: int) -> list[Case]:
    """Return every *share*-th case of each kind.

    The choice depends only on the names of the fields: the same tree gives the same cases, and
    another field gives others.
    """
    chosen: list[Case] = []
    for _, group in itertools.groupby(all_, key=lambda case: case.kind):
        of_kind = list(group)
        first = zlib.crc32("".join(map(str, of_kind)).encode()) % share
        chosen += of_kind[first::share]
    return chosen


def problems_of(shop: Shop, changing: Sequence[Case]) -> list[str]:
    """Take an object of each case from spec to spec; return its differences from a new one."""
    new = {name: case for case in changing for name in case.new}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        names = [*new, *(case.name for case in changing)]
        list(pool.map(lambda name: consumed_topic(shop, shop.topic(name)), names))
        apply(shop, ((case, case.new.index(name), name) for name, case in new.items()))
        world = World(shop, pool)
        problems: list[str] = []
        for step in range(max(len(case.specs) for case in changing)):
            changing = [case for case in changing if step < len(case.specs)]
            apply(shop, ((case, step, case.name) for case in changing))
            last = differences(world, changing, step)
            problems += [f"{c}, step {step}:\n{last[c.name]}" for c in changing if c.name in last]
            changing = [case for case in changing if case.name not in last]
    return problems


def base(kind: str, shop: Shop) -> dict[str, Any]:
    """Return the initial spec of all objects."""
    return connection_base(shop) if kind == "BrokerConnection" else policy_base(shop, NAME)


def connection_base(shop: Shop) -> dict[str, Any]:
    """The spec of a connection whose policies can be replayed."""
    token = {"secretRef": {"name": "pulsar-replayer", "key": "token"}}
    topics = [f"persistent://{shop.tenant}/*/*"]
    return {
        "pulsar": {
            "serviceURL": shop.broker.service_url,
            "adminURL": shop.broker.admin_url,
            "authentication": {
                "type": "Token",
                "token": {"secretRef": {"name": "pulsar-admin", "key": "token"}},
            },
        },
        "allow": [
            {
                "name": "one",
                "topics": topics,
                "roles": ["*"],
                "adoption": "Allowed",
                "deletion": "Allowed",
                "limits": {"policies": 1_000},
            }
        ],
        "replay": {
            "role": "replayer",
            "authentication": {"type": "Token", "token": token},
        },
    }


def policy_base(shop: Shop, name: str) -> dict[str, Any]:
    """The spec of a policy; its topic has the policy's name."""
    return {
        "connectionRef": {"name": "main"},
        "topic": shop.topic(name),
        "subscription": name,
        "consumerRoles": ["fulfilment"],
    }


def apply(shop: Shop, which: Iterable[tuple[Case, int, str]]) -> None:
    """Apply the spec of a step of a case to an object of this name."""
    for case, step, name in which:
        for manifest in manifests(shop, case, step, name):
            shop.cluster.objects.apply(manifest)


def manifests(shop: Shop, case: Case, step: int, name: str) -> list[dict[str, Any]]:
    """Return the objects of one name: a policy, and its connection if that one changes."""
    meta = {"metadata": {"name": name, "namespace": shop.namespace}}
    spec = json.loads(json.dumps(case.specs[step]).replace(NAME, name))
    changing = redrive(case.kind, spec) | meta
    if case.kind == "RetryPolicy":
        return [changing]
    policy = policy_base(shop, name) | {"connectionRef": {"name": name}}
    return [changing, redrive("RetryPolicy", policy) | meta]


def differences(world: World, changing: Sequence[Case], step: int) -> dict[str, str | None]:
    """Wait until each of *changing* equals the new object with its spec; return the differences."""
    pending = {case.name: case for case in changing}
    problems: dict[str, str | None] = {}
    deadline = time.monotonic() + ROUND_SECONDS
    while pending and time.monotonic() < deadline:
        world.look()
        for name, case in list(pending.items()):
            problem = compare(world, case, step)
            if problem is None:
                del pending[name]
            if problems.get(name, "") != problem:
                deadline = time.monotonic() + ROUND_SECONDS
            problems[name] = problem
        time.sleep(LOOK_SECONDS)
    return {name: problems[name] for name in pending}


def compare(world: World, case: Case, step: int) -> str | None:
    """Return how the changed object differs from the new one; None if it does not."""
    name, new = case.name, case.new[step]
    one, other = (world.object_state(case.kind, object_name) for object_name in (name, new))
    reason = world.reason(new)
    if reason in {"", "Progressing"} or (step == 0 and reason != "Provisioned"):
        return f"{new} is not ready: {reason}"
    kept = str(case) in FOR_NEW_OBJECTS and case.specs[step] != case.specs[0]
    works = reason == "Provisioned" and not kept
    if not works:
        # A spec that is refused or only observed changes no object of an earlier spec.
        for state, object_name in ((one, name), (other, new)):
            state.pop("config map")
            state["policy"]["status"] = world.reason(object_name)
    if (problem := difference(other, one, LASTING.get(str(case), LAST_SEEN))) is not None:
        return problem
    now = world.broker_state(name)
    expected = world.broker_state(new) if works else world.before[name]
    if (problem := difference(expected, now, LASTING.get(str(case)))) is None:
        world.before[name] = now
    return problem
