"""Isolation of tenants: the objects of a namespace cannot change the topics of another one.

A generator creates the policies of the attacker: names that lead to each topic of the victim in
each role, with each annotation that changes the owner of a topic.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.integration.provision.conftest import (
    SECONDS,
    UNREACHABLE,
    MakeShop,
    Shop,
    redrive,
    rest_path,
)
from tests.integration.provision.test_lifecycle import send
from tests.integration.provision.test_ownership import whole
from tests.support.waiting import wait_until

REMAINING = ("live", "off", "adopted")
VICTIMS = (*REMAINING, "gone")
BYSTANDERS = ("bystander", "payslips-LEDGER", "wages-SEQUENCES")
SEQUENCED = {
    "subscriptionType": "KeyShared",
    "ordering": "PerKey",
    "deadLetter": {"sequenced": True},
}
NOT_YET = frozenset({"PolicyNotFound", "PolicyNotReady"})
"""Reasons of a Replay whose policy is not Ready yet."""
RUNS = (
    "job.batch",
    "sparkapplication.sparkoperator.k8s.io",
    "sparkapplication.spark.apache.org",
)
"""The kinds of runs of Replays."""
SEED = 10
EARLIEST = {"ledgerId": -1, "entryId": -1}


@dataclass(frozen=True)
class Tenants:
    """Two Kubernetes namespaces that share a connection, which gives the attacker many rights.

    Attributes:
        topics: of the victim.
    """

    victim: Shop
    attacker: Shop
    topics: tuple[str, ...]

    def snapshot(self) -> dict[str, Any]:
        """The topics of the victim at the broker, its policies, ConfigMaps and Replay."""
        policies = {name: self.victim.get("retrypolicy", name) for name in REMAINING}
        config_maps = {name: self.victim.get("configmap", f"{name}-redrive") for name in policies}
        return {
            "topics": {
                topic: (
                    whole(self.victim, topic),
                    self.victim.request("GET", f"{rest_path(topic)}/partitions")["partitions"],
                    self.backlogs(topic),
                )
                for topic in self.topics
            },
            "specs": {name: body["spec"] for name, body in policies.items()},
            "config maps": {name: body["data"] for name, body in config_maps.items()},
            "replay": self._replay(),
        }

    def states(self) -> dict[str, Any]:
        """The conditions of the policies and connections of the victim."""
        ready = {name: self.victim.condition(name, "Ready") for name in REMAINING}
        return {
            "since": {name: c.pop("lastTransitionTime") for name, c in ready.items()},
            "ready": ready,
            "connections": {name: self._connection(name) for name in ("main", "lent")},
        }

    def assert_unchanged(self, snapshot: dict[str, Any], states: dict[str, Any]) -> None:
        """Check that nothing has changed; times of transitions may, if the broker was slow."""
        assert self.snapshot() == snapshot
        wait_until(lambda: self._comparable_states(states) == states)

    def _comparable_states(self, before: dict[str, Any]) -> dict[str, Any]:
        reasons = {reason for name in REMAINING for _, reason, _ in self.victim.events(name)}
        since = {"since": before["since"]} if UNREACHABLE in reasons else {}
        return self.states() | since

    def _connection(self, name: str) -> dict[str, Any]:
        """A connection without the numbers of its policies, which the attacker changes.

        Times of transitions are left out too: one call to a slow broker changes them.
        """
        body = self.victim.get("brokerconnection", name)
        del body["status"]["policies"], body["status"]["allow"]
        for condition in body["status"]["conditions"]:
            del condition["lastTransitionTime"]
        return {part: body[part] for part in ("spec", "status")}

    def _replay(self) -> dict[str, Any]:
        """The victim's Replay, which is suspended."""
        body = self.victim.get("replay", "resting")
        return {part: body[part] for part in ("spec", "status")}

    def backlogs(self, topic: str) -> dict[str, int]:
        """The backlog of each subscription of a topic without partitions, in messages."""
        stats = self.victim.request("GET", f"{rest_path(topic)}/stats?getPreciseBacklog=true")
        return {name: cursor["msgBacklog"] for name, cursor in stats["subscriptions"].items()}

    def named_in_conditions(self) -> list[str]:
        """The policies of the victim that statuses and Events of the attacker name."""
        kinds = ("retrypolicy", "replay", "event")
        objects = self.attacker.cluster.objects
        bodies = [body for kind in kinds for body in objects.list(kind, self.attacker.namespace)]
        shown = json.dumps([(body.get("status"), body.get("message")) for body in bodies])
        return [name for name in VICTIMS if f"{self.victim.namespace}/{name}" in shown]

    def conditions(self) -> dict[str, set[str]]:
        """The types of conditions of the victim's policies, without `ForeignSubscription`.

        The adopted topic has the subscription of an application from the beginning.
        """
        return {
            name: {c["type"] for c in self.victim.get("retrypolicy", name)["status"]["conditions"]}
            - {"ForeignSubscription"}
            for name in REMAINING
        }


@pytest.fixture(scope="module")
def tenants(make_shop: MakeShop) -> Tenants:
    victim, attacker = make_shop(), make_shop()
    token = {"secretRef": {"name": "replayer", "key": "token"}}
    authentication = {"type": "Token", "token": token}
    # With a replay role each dead-letter topic has a ledger.
    replay = {"role": "replayer", "authentication": authentication}
    victim.connection(replay=replay)
    victim.connection(
        "lent",
        replay=replay,
        allow=[
            {
                "name": "attacker",
                "namespaces": {"names": [attacker.namespace]},
                "topics": [f"persistent://{victim.tenant}/*/*"],
                "roles": ["thief", "fulfilment"],
                "deletion": "Allowed",
            }
        ],
    )
    topics = []
    for name in VICTIMS:
        consumed_topic(victim, victim.topic(name))
        topics.append(victim.topic(name))
    consumed_topic(victim, victim.topic("payroll"))
    victim.request("POST", f"{rest_path(victim.topic('payroll'))}/messageTTL?messageTTL=3600")
    for name in BYSTANDERS:
        consumed_topic(victim, victim.topic(name))
        send(victim.broker, victim.topic(name))
    naming = {"retryTopic": victim.topic("payroll")}
    for name in VICTIMS:
        more = {"naming": naming, "adoption": "IfPresent"} if name == "adopted" else {}
        victim.policy(name, topic=victim.topic(name), **SEQUENCED, **more)
        status = victim.ready(name)["status"]
        for topic in (status["retryTopic"], status["deadLetterTopic"]):
            topics.append(topic)
            send(victim.broker, topic)
        topics += [status["ledgerTopic"], status["sequencesTopic"]]
    ordered = {**SEQUENCED, "deadLetter": {"mode": "Discard"}}
    victim.policy("off", topic=victim.topic("off"), **ordered)
    victim.ready("off")
    victim.delete("gone")
    for name in ("own", "other"):
        consumed_topic(victim, victim.topic(name))
    resting = {"policyRef": {"name": "live"}, "suspend": True}
    victim.apply({"resting": redrive("Replay", resting)})
    victim.reaches("resting", "Suspended", "replay")
    return Tenants(victim, attacker, (*topics, *map(victim.topic, BYSTANDERS)))


def consumed_topic(shop: Shop, topic: str) -> None:
    """Create a topic with a subscription: the broker deletes other topics after a minute."""
    shop.create_topic(topic)
    shop.request("PUT", f"{rest_path(topic)}/subscription/app", EARLIEST)


def hostile(tenants: Tenants) -> Iterator[tuple[str, dict[str, Any], dict[str, str]]]:
    """Yield name, spec and annotations of policies that attack each topic of the victim."""
    victim, chosen = tenants.victim, random.Random(SEED)  # noqa: S311
    numbers = itertools.count()

    def policy(**spec: object) -> tuple[str, dict[str, Any], dict[str, str]]:
        number = next(numbers)
        # Some have the names of the victim's own policies: a name is no identity.
        name = VICTIMS[number] if number < len(VICTIMS) else f"hostile-{number}"
        words = [
            {"take-over-from": ",".join(VICTIMS)},
            {"hand-over-to": "elsewhere"},
            {"take-over-from": f"{victim.namespace}/live"},
            {},
        ]
        return (
            name,
            {
                "connectionRef": {"name": "lent", "namespace": victim.namespace},
                "topic": victim.topic(chosen.choice(["own", "other"])),
                "subscription": f"s{number}",
                "consumerRoles": ["thief", "fulfilment"],
                "deadLetter": {"readerRoles": ["thief"], "messageTTL": "1s"},
                "deletionPolicy": chosen.choice(["Delete", "DeleteIfEmpty", "RevokeGrants"]),
                "adoption": chosen.choice(["IfPresent"] * 4 + ["Never"]),
                "chaining": chosen.choice(["Allowed"] * 4 + ["Forbidden"]),
                "managementPolicy": chosen.choice(["Manage", "Manage", "Manage", "Observe"]),
                **spec,
            },
            {f"redrive.io/{key}": value for key, value in chosen.choice(words).items()},
        )

    for topic, field in itertools.product(tenants.topics, ("retryTopic", "deadLetterTopic")):
        yield policy(naming={field: topic})
    yield policy(naming={"deadLetterTopic": victim.topic("payslips")}, adoption="IfPresent")
    yield policy(
        naming={"deadLetterTopic": victim.topic("wages")}, adoption="IfPresent", **SEQUENCED
    )
    for topic in tenants.topics:  # consumed with the victim's own subscription, and with another
        subscription = chosen.choice(["fulfilment", "redrive", "mine"])
        yield policy(
            topic=topic, subscription=subscription, chaining=chosen.choice(["Allowed", "Forbidden"])
        )
    for name in VICTIMS:  # derived names
        subscription = f"{name}-fulfilment"
        yield policy(subscription=subscription, naming={"scheme": "SubscriptionUpper"})
        yield policy(topic=victim.topic(name), subscription="fulfilment", adoption="IfPresent")


def forged_statuses(chosen: random.Random) -> Iterator[dict[str, Any]]:
    """Yield statuses of Replays such as a job without admission policies may write them."""
    topics = ("fullTopic", "unsubscribedTopic")
    times = ("2020-01-01T00:00:00Z", "9999-12-31T23:59:59Z", None)
    while True:
        run: dict[str, Any] = {"finished": chosen.choice([True, False])}
        run |= {name: chosen.choice(["persistent://a/b/c", "x" * 200]) for name in topics}
        run["fencingToken"] = chosen.choice(["9223372036854775807:0", "0:0"])
        counts = {name: chosen.choice([0, 1, 2**31 - 1]) for name in ("moved", "left", "matched")}
        yield {
            "phase": chosen.choice(["Pending", "Submitted", "Running", "Completed", "Failed"]),
            "sparkApplication": chosen.choice(["replay-forged", None]),
            "startTime": chosen.choice(times),
            "completionTime": chosen.choice(times),
            "run": run | {"counts": counts},
        }


def forge(shop: Shop, name: str, status: dict[str, Any]) -> None:
    """Write the status of a Replay."""
    change = {"status": status}
    shop.cluster.objects.patch("replay", name, change, shop.namespace, "status")


def replays(tenants: Tenants) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield policies of the attacker that become Ready, each with a Replay that must be refused.

    There is one Replay for each policy: Replays of the same policy wait for each other.
    """
    specs: list[dict[str, Any]] = [
        {"target": {"type": "Source"}, "guarantee": "AtLeastOnce"},
        {"jobTemplate": {"executors": 1_000}},
        *(
            {"target": {"type": "Topic", "topic": topic}, "guarantee": "AtLeastOnce"}
            for topic in tenants.topics
        ),
    ]
    for number, spec in enumerate(specs):
        policy = {
            "connectionRef": {"name": "lent", "namespace": tenants.victim.namespace},
            "topic": tenants.victim.topic("own"),
            "subscription": f"replayed-{number}",
            "consumerRoles": ["thief"],
            "deletionPolicy": "Delete",
        }
        yield policy, spec


def test_replay_cannot_use_topics_of_another_namespace(
    tenants: Tenants,
) -> None:
    attacker, before = tenants.attacker, (tenants.snapshot(), tenants.states())
    attacks = {f"replayed-{number}": pair for number, pair in enumerate(replays(tenants))}
    policies = {name: redrive("RetryPolicy", policy) for name, (policy, _) in attacks.items()}
    attacker.apply(policies)
    attacker.apply(
        {
            f"of-{name}": redrive("Replay", {"policyRef": {"name": name}, **spec})
            for name, (_, spec) in attacks.items()
        }
    )
    for name in policies:
        attacker.ready(name)
    reasons = settled(attacker, len(attacks), "replay", but=NOT_YET)
    assert set(reasons) == {"TargetNotAllowed", "JobNotPermitted"}
    assert sum(reason == "JobNotPermitted" for reason in reasons) == 1
    forged = forged_statuses(random.Random(SEED))  # noqa: S311
    for name in list(attacks)[::4]:
        forge(attacker, f"of-{name}", next(forged))
    for name in attacks:
        attacker.annotate(f"of-{name}", "replay", reconcile_requested_at="now")
    wait_until(lambda: sorted(settled(attacker, len(attacks), "replay")) == sorted(reasons))
    for kind in RUNS:
        assert attacker.objects(kind) == []
    tenants.assert_unchanged(*before)
    attacker.delete_all("replay")
    attacker.delete_all()
    tenants.assert_unchanged(*before)


def test_policies_cannot_change_topics_of_another_namespace(tenants: Tenants) -> None:
    attacker, before = tenants.attacker, (tenants.snapshot(), tenants.states())
    conditions = tenants.conditions()
    applied = list(hostile(tenants))
    assert len(applied) > 40
    objects = [
        redrive("RetryPolicy", spec)
        | {"metadata": {"name": name, "namespace": attacker.namespace, "annotations": words}}
        for name, spec, words in applied
    ] + [
        redrive("Replay", {"policyRef": {"name": name}})
        | {"metadata": {"name": f"of-{name}", "namespace": attacker.namespace}}
        for name, _, _ in applied[:8]
    ]
    for body in objects:
        attacker.cluster.objects.apply(body)

    reasons = settled(attacker, len(applied))
    tenants.assert_unchanged(*before)
    # Most are refused, for reasons that protect the owner of a topic.
    assert set(reasons) >= {"OwnerConflict", "NameCollision", "ResourceConflict", "ChainedPolicy"}
    assert sum(reason not in {"Provisioned", "Observed"} for reason in reasons) > 25

    assert tenants.named_in_conditions() == []
    for name, _, _ in applied:
        attacker.annotate(name, reconcile_requested_at="again")
    attacker.delete_all("replay")
    attacker.delete_all()
    tenants.assert_unchanged(*before)
    deadline = time.monotonic() + SECONDS
    while tenants.conditions() != conditions:
        assert time.monotonic() < deadline, tenants.conditions()
        time.sleep(0.5)


def pre_empting(victim: Shop) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield fields of a policy with `Delete`, and the future topic of the victim that it takes."""
    fields = ("retryTopic", "deadLetterTopic")
    deletions, partitions = ("Delete", "DeleteIfEmpty"), (None, 2)
    for number, (field, deletion, count) in enumerate(
        itertools.product(fields, deletions, partitions)
    ):
        topic = victim.topic(f"future-{number}")
        part = field.removesuffix("Topic")
        more = {part: {"partitions": count}} if count else {}
        yield {"naming": {field: topic}, "deletionPolicy": deletion, **more}, topic
    # Names that the scheme of Pulsar derives for subscription `fulfilment` of topic `own-eu`.
    for end in ("RETRY", "DLQ"):
        spec = {"subscription": "eu-fulfilment", "deletionPolicy": "Delete"}
        yield spec, victim.topic(f"own-eu-fulfilment-{end}")


def test_pre_empted_names_keep_the_messages_of_others(tenants: Tenants) -> None:
    """The victim does not know that its topics were created by a policy of the attacker."""
    victim, attacker = tenants.victim, tenants.attacker
    consumed_topic(victim, victim.topic("own-eu"))
    victim.request("PUT", f"{rest_path(victim.topic('own-eu'))}/subscription/fulfilment", EARLIEST)
    variants = list(pre_empting(victim))
    specs: dict[str, dict[str, Any]] = {}
    for number, (fields, _) in enumerate(variants):
        name = "derived" if "subscription" in fields else f"pre-empts-{number}"
        specs[name] = {
            "connectionRef": {"name": "lent", "namespace": victim.namespace},
            "topic": victim.topic("own"),
            "subscription": f"s-{number}",
            "consumerRoles": ["thief"],
            **fields,
        }
    attacker.apply({name: redrive("RetryPolicy", spec) for name, spec in specs.items()})
    for name in specs:
        attacker.ready(name)
    topics = [topic for _, topic in variants]
    for number, topic in enumerate(topics):
        if number % 2 and "DLQ" not in topic:
            victim.request("PUT", f"{rest_path(topic)}/subscription/app", EARLIEST)
        send(victim.broker, topic)
    stored = {topic: messages_of(victim, topic) for topic in topics}
    assert set(stored.values()) == {1}
    attacker.delete_all()
    assert {topic: messages_of(victim, topic) for topic in topics} == stored


def messages_of(shop: Shop, topic: str) -> int:
    """The number of messages that a topic holds, in all of its partitions; -1 without the topic."""
    partitions = shop.request("GET", f"{rest_path(topic)}/partitions")["partitions"]
    parts = [f"{topic}-partition-{n}" for n in range(partitions)] if partitions else [topic]
    count = 0
    for part in parts:
        answer = shop.broker.request("GET", f"/admin/v2/{rest_path(part)}/internalStats")
        if answer.status != 200:
            return -1
        count += int(json.loads(answer.body)["numberOfEntries"])
    return count


def test_policies_without_a_working_connection_block_no_names(
    make_shop: MakeShop,
) -> None:
    """Connections with another tenant's address and topics, and a Secret that does not exist."""
    victim = make_shop()
    orders = victim.topic("orders")
    retry = f"{orders}-fulfilment-RETRY"
    missing = {"type": "Token", "token": {"secretRef": {"name": "missing", "key": "token"}}}
    claims: list[tuple[dict[str, Any], dict[str, str], str]] = [
        ({"topic": orders}, {}, "SecretNotFound"),
        ({"topic": retry, "chaining": "Allowed"}, {}, "SecretNotFound"),
        (
            {"topic": victim.topic("rest"), "naming": {"deadLetterTopic": retry}},
            {},
            "SecretNotFound",
        ),
        ({"topic": orders}, {"redrive.io/paused": "true"}, "Paused"),
    ]
    squatters = []
    for claim, words, reason in claims:  # in one namespace they would conflict with each other
        squatter = make_shop()
        squatter.connection(authentication=missing, allow=[victim.rule("fulfilment")])
        spec = {"connectionRef": {"name": "main"}, "subscription": "fulfilment", **claim}
        metadata = {"name": "old", "namespace": squatter.namespace, "annotations": words}
        squatter.cluster.objects.apply(redrive("RetryPolicy", spec) | {"metadata": metadata})
        squatter.reaches("old", reason)
        squatters.append(squatter)
    victim.let_a_second_pass()

    victim.create_topic(orders)
    victim.connection()
    victim.policy()
    provisioned = victim.ready()
    assert provisioned["status"]["retryTopic"] == retry
    victim.delete("orders")
    victim.policy()
    assert victim.ready()["metadata"]["uid"] != provisioned["metadata"]["uid"]
    for squatter in squatters:
        assert "retryTopic" not in squatter.get("retrypolicy", "old")["status"]


def settled(
    shop: Shop, count: int, kind: str = "retrypolicy", but: frozenset[str] = frozenset()
) -> list[str]:
    """Return the reasons of the Ready conditions of a namespace's objects, once all have one.

    Args:
        but: reasons that are temporary.
    """
    deadline = time.monotonic() + SECONDS
    passing = but | {"Progressing"}
    while True:
        bodies = shop.cluster.objects.list(kind, shop.namespace)
        reasons = [
            condition["reason"]
            for body in bodies
            for condition in body.get("status", {}).get("conditions", [])
            if condition["type"] == "Ready" and condition["reason"] not in passing
        ]
        if len(reasons) == count:
            return reasons
        assert time.monotonic() < deadline, f"{len(reasons)} of {count}"
        time.sleep(0.5)
