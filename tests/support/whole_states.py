"""The whole states of RetryPolicies and BrokerConnections, comparable between objects."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from redrive.reasons import Reason
from tests.integration.provision.conftest import Shop, rest_path

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
