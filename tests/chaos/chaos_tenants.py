"""Random attacks of a namespace, a consumer role, a broker and an API server on another tenant.

Names, numbers, sizes, statuses and answers are generated, while that tenant works. A round has a
seed, the number in its id. `make chaos CHAOS="-k tenants --rounds 20"` is the long form. The
systematic attacks are the tests that `docs/explanation/security-model.md` names, which
`make test TESTS="tests -m attack"` runs.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pulsar
import pytest

from redrive.policy.envelope import CAUSE_TYPE, REPLAY_PROOF, REPLAY_SOURCE
from redrive.policy.naming import TopicName
from sandbox import chart, installation
from sandbox.errors import SandboxError
from sandbox.sandbox import Sandbox
from tests.chaos import hostile_queues
from tests.chaos.hostile_queues import HostileQueueServer, QueueVictim
from tests.chaos.hostile_servers import FaultyApiServer, HostileBroker
from tests.integration.provision.conftest import MakeShop, redrive
from tests.integration.provision.conftest import Shop as Namespace
from tests.support.raw_entries import HARMFUL, RawEntry, store
from tests.support.replay_shop import SECONDS, Shop, check_no_token_leaked, shop

__all__ = ["shop"]

OBJECTS = 150
GENUINE = 30
"""Dead letters of the victim in each Replay."""
FORGED = "Forged"
FAULTY_SHARE = 1 / 8
"""Share of the requests of the operator that the API server answers wrongly."""
LONG_ROLES = [f"thief-{'x' * 55}-{number:02}" for number in range(32)]
"""As many and as long as a policy may have."""
MALFORMED = (
    "a" * 70_000,
    "\u0430\u202e\u2028",
    "../../" * 20,
    "$(id)${jndi:x}{{ .Release.Name }}",
    "9" * 40 + "s",
)
Body = dict[str, Any]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    rounds: int = metafunc.config.getoption("--rounds")
    metafunc.parametrize("seed", range(rounds))


@dataclass(frozen=True)
class Attacker:
    """A namespace that may use connections of the victim, and its random source.

    Attributes:
        queues: the victim's policy of RocketMQ.
        hostile_queues: address of a hostile server of RocketMQ.
    """

    namespace: Namespace
    victim: Shop
    queues: QueueVictim
    hostile_queues: str
    chosen: random.Random

    def value_like(self, value: object) -> object:
        """Return a hostile value, in most cases of the form of *value*: others are refused."""
        if self.chosen.random() < 1 / 8:
            return self.chosen.choice([None, [], {}, True, "", *MALFORMED])
        if isinstance(value, int):
            return self.chosen.choice([-1, 1, 255, 2**31 - 1, 2**63, 1e308])
        if isinstance(value, list):
            return [*value, *(self.value_like(held) for held in value * 3)]
        if isinstance(value, str):
            return self.chosen.choice(self._texts_like(value))
        return value

    def _texts_like(self, text: str) -> tuple[str, ...]:
        policy, namespace = self.victim.policy, f"persistent://{self.victim.name}/prod"
        if text.startswith("persistent:"):
            topics = policy.topic, policy.retry_topic, policy.dead_letter_topic, policy.ledger_topic
            new = f"{namespace}/new-{self.chosen.randrange(9)}"
            return (*map(str, topics), f"{policy.topic}-partition-0", f"{namespace}/*", new)
        if re.fullmatch("[0-9]+[smhd]", text):
            return ("0s", "1s", "1d1s", "99999999d", "10000d")
        if re.fullmatch("[-%_A-Za-z0-9]+", text):
            own = "orders", "main", "lent", "fulfilment", "replayer", "thief", "redrive"
            queues = *self.queues.names, "queues", "lent-queues", *hostile_queues.SYSTEM_NAMES
            return (*own, *queues, "a" * 63, "a" * 250, self.victim.name, *self.victim.tokens)
        return (text,)

    def originals(self) -> Iterator[Body]:
        """Valid objects of each kind; endlessly."""
        lent = {"name": "lent", "namespace": self.victim.name}
        own = f"persistent://{self.namespace.tenant}/prod/own"
        secret = {"secretRef": {"name": "pulsar-admin", "key": "token"}}
        while True:
            number = self.chosen.randrange(10**6)
            yield from hostile_queues.objects(self.queues, self.hostile_queues, self.chosen)
            yield redrive(
                "RetryPolicy",
                {
                    "connectionRef": self.chosen.choice([lent, {"name": "hostile"}]),
                    "topic": self.chosen.choice([own, str(self.victim.policy.topic)]),
                    "subscription": f"s{number}",
                    "consumerRoles": self.chosen.choice([["thief"], LONG_ROLES]),
                    "maxRetries": 3,
                    "delayLadder": {"delays": ["1s", "1m"]},
                    "naming": {
                        "retryTopic": f"{own}-r{number}",
                        "deadLetterTopic": f"{own}-d{number}",
                    },
                    "deadLetter": {"readerRoles": ["thief"], "messageTTL": "1h"},
                    "deletionPolicy": self.chosen.choice(["Delete", "Retain", "DeleteIfEmpty"]),
                    "adoption": "IfPresent",
                },
            )
            yield redrive(
                "Replay",
                {
                    "policyRef": {"name": f"p{self.chosen.randrange(OBJECTS)}"},
                    "engine": self.chosen.choice(["Job", "Spark", "Auto"]),
                    "select": {"causes": ["x"], "limit": 5},
                    "target": {"type": "Topic", "topic": str(self.victim.policy.retry_topic)},
                    "guarantee": "AtLeastOnce",
                    "rateLimit": {"messages": 10},
                    "deadline": "1h",
                },
            )
            yield redrive(
                "Inspection",
                {
                    "policyRef": {"name": f"p{self.chosen.randrange(OBJECTS)}"},
                    "from": self.chosen.choice(["DeadLetter", "Retry"]),
                    "select": {"causes": ["x"]},
                    "newest": 5,
                    "deadline": "1h",
                },
            )
            yield redrive(
                "BrokerConnection",
                {
                    "pulsar": {
                        "serviceURL": self.victim.sandbox.pulsar.service_url,
                        "adminURL": self.victim.sandbox.pulsar.admin_url,
                        "authentication": {"type": "Token", "token": secret},
                    },
                    "allow": [
                        {
                            "name": "all",
                            "topics": ["persistent://*/*/*"],
                            "roles": ["thief"],
                            "adoption": "Allowed",
                            "deletion": "Allowed",
                        }
                    ],
                    "replay": {
                        "role": "replayer",
                        "authentication": {"type": "Token", "token": secret},
                    },
                    "inspection": {
                        "role": "replayer",
                        "authentication": {"type": "Token", "token": secret},
                    },
                },
            )

    def mutated(self, body: Body) -> Body:
        """Return a copy with one or two fields of the spec replaced or removed."""
        written = copy.deepcopy(body)
        for _ in range(self.chosen.randint(1, 2)):
            owner, name = self.chosen.choice(list(fields(written["spec"])))
            if self.chosen.random() < 1 / 8:
                del owner[name]
            else:
                owner[name] = self.value_like(owner[name])
        return written

    def apply_objects(self) -> tuple[int, int]:
        """Create mutated objects with forged statuses; return how many passed and were refused."""
        passed = refused = 0
        for number, original in zip(range(OBJECTS), self.originals(), strict=False):
            annotations = {
                f"redrive.io/{key}": self.chosen.choice([f"{self.victim.name}/orders", "x" * 999])
                for key in ("take-over-from", "hand-over-to", "usable-by", "reconcile-requested-at")
                if self.chosen.random() < 1 / 4
            }
            body = self.mutated(original) | {
                "metadata": {"name": f"p{number}", "annotations": annotations}
            }
            try:
                self.namespace.cluster.objects.create(body, self.namespace.namespace)
            except SandboxError:
                refused += 1
                continue
            passed += 1
            if self.chosen.random() < 1 / 2:
                self._forge_status(body["kind"], f"p{number}")
        return passed, refused

    def _forge_status(self, kind: str, name: str) -> None:
        topic = str(self.victim.policy.retry_topic)
        status = {
            "phase": self.chosen.choice(["Completed", "Running", "Pending", "Approved"]),
            "retryTopic": topic,
            "deadLetterTopic": str(self.victim.policy.dead_letter_topic),
            "ledgerTopic": str(self.victim.policy.ledger_topic),
            "observedGeneration": self.chosen.choice([-1, 1, 2**31]),
            "run": {"fencingToken": "9223372036854775807:0", "fullTopic": topic},
        }
        owner, name_of_field = self.chosen.choice(list(fields(status)))
        owner[name_of_field] = self.value_like(owner[name_of_field])
        patch = f"--patch={json.dumps({'status': status})}"
        patching = ("patch", kind, name, "--subresource=status", "--type=merge")
        with suppress(SandboxError):  # the schema and the admission policies refuse most
            self.namespace.kubectl(*patching, patch)

    def send_entries(self, topic: TopicName, count: int) -> None:
        """Store entries that no client writes, and records that look like those of a ledger."""
        raw = self.chosen.sample(list(HARMFUL.values()), count)
        forged = {"moved": {"x": "AAAA"}, "state": "Completed", "drain": True, "rate": None}
        raw += [RawEntry(b"", json.dumps(forged)[: self.chosen.randint(0, 80)].encode())]
        store(self.victim.sandbox.pulsar, topic, raw)

    def forge_evidence(self, count: int) -> None:
        """Send messages to the retry topic as if Replays had moved them, by names of producers.

        Their causes are `FORGED`. One of a genuine message has its source and proof.
        """
        topic = f"{self.victim.policy.retry_topic}-partition-0"
        client = self.victim.client()
        with closing(client.create_reader(topic, pulsar.MessageId.earliest)) as reader:
            genuine = reader.read_next(30_000)
        proofs = genuine.properties()[REPLAY_PROOF], "0" * 32, "", "\u202e"
        source = genuine.properties()[REPLAY_SOURCE]
        sources = source, f"{source}9", source.replace(":0", ":1"), "x", ""
        names = genuine.producer_name(), f"redrive-replay-{'0' * 32}", "thief"
        for number in range(count):
            properties = {"id": f"forged-{number}", CAUSE_TYPE: FORGED}
            properties[REPLAY_SOURCE] = self.chosen.choice(sources)
            properties[REPLAY_PROOF] = self.chosen.choice(proofs)
            name = f"{self.chosen.choice(names)}{self.chosen.choice(['', number])}"
            sequence_id = self.chosen.choice([0, 1, 2**31, 2**63 - 2, 2**63 - 1])
            producer = client.create_producer(topic, producer_name=name, batching_enabled=False)
            with closing(producer), suppress(pulsar.PulsarException):  # the broker has the number
                producer.send(b"", properties=properties, sequence_id=sequence_id)
        client.close()


def fields(value: object) -> Iterator[tuple[Any, Any]]:
    """Yield the container and key of each value within a document, at all depths."""
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    for key, held in inner:
        yield value, key
        yield from fields(held)


def protected(victim: Shop) -> Body:
    """Return the victim's topics and rights at the broker, and the specs of its objects."""
    cluster = victim.sandbox.cluster
    own = Namespace(victim.sandbox.pulsar, cluster, tenant=victim.name, namespace=victim.name)
    broker = own.dump()
    for topic in broker["namespaces"][f"{victim.name}/prod"]["topics"].values():
        # A counter of the broker: each Replay is the next producer of its ledger.
        topic.get("properties", {}).pop("pulsar.topic.epoch", None)
    return {
        "broker": broker,
        "policy": own.get("retrypolicy", "orders")["spec"],
        "connection": own.get("brokerconnection", "main")["spec"],
        "secrets": [own.get("secret", name)["data"] for name in victim.tokens],
    }


def lend(victim: Shop, attacker: Namespace) -> None:
    """Give the attacker's namespace all topics of both tenants, within a connection."""
    roles = {"adminRoles": [attacker.role, f"{victim.name}-admin"]}
    victim.rest("POST", f"tenants/{attacker.tenant}", {**roles, "allowedClusters": ["standalone"]})
    attacker.create_topic(attacker.topic("own"))
    spec = victim.sandbox.cluster.objects.get("brokerconnection", "main", victim.name)["spec"]
    rule = {
        "name": "attacker",
        "namespaces": {"names": [attacker.namespace]},
        "topics": [f"persistent://{victim.name}/*/*", f"persistent://{attacker.tenant}/*/*"],
        "roles": ["thief*"],
        "adoption": "Allowed",
        "deletion": "Allowed",
    }
    victim.apply("redrive.io/v1beta1", "BrokerConnection", "lent", spec=spec | {"allow": [rule]})


def use_hostile_servers(attacker: Namespace, broker: HostileBroker, queues: str) -> None:
    """Give the attacker's namespace connections of its own, to hostile servers."""
    every = {"name": "all", "topics": ["*"], "groups": ["*"], "deletion": "Allowed"}
    cluster = {"nameServers": [queues], "authentication": {"type": "None"}, "allow": [every]}
    body = redrive("BrokerConnection", {"rocketmq": cluster})
    attacker.apply({"hostile-queues": body})
    attacker.connection(
        "hostile",
        adminURL=broker.url,
        allow=[attacker.rule("thief*") | {"topics": ["persistent://*/*/*"]}],
    )


def delete_all(attacker: Namespace) -> None:
    """Delete the objects of the attacker; hostile servers permit no cleanup."""
    for kind in ("retrypolicy", "rocketmqretrypolicy"):
        for body in attacker.objects(kind):
            if body["spec"]["connectionRef"]["name"].startswith("hostile"):
                attacker.annotate(body["metadata"]["name"], kind, skip_cleanup="true")
    kinds = "retrypolicy,rocketmqretrypolicy,replay,inspection"
    attacker.kubectl("delete", kinds, "--all", f"--timeout={SECONDS}s")


def move_dead_letters(victim: Shop, name: str) -> None:
    """Bury dead letters, and check that a Replay moves each of them once."""
    victim.bury(GENUINE, "WarehouseDown")
    victim.replay(name, engine="Job", select={"causes": ["WarehouseDown"]})
    counts = victim.reaches(name, "Completed")["run"]["counts"]
    assert (counts["matched"], counts["moved"], counts["left"]) == (GENUINE, GENUINE, 0)


@pytest.fixture
def queues(shop: Shop, tmp_path: Path) -> Iterator[QueueVictim]:
    """The victim's policy of RocketMQ, and its cluster."""
    with QueueVictim.working(shop, tmp_path) as victim:
        yield victim


@pytest.mark.timeout(6 * SECONDS)
def test_random_attacks_change_nothing_of_another_tenant(
    shop: Shop, make_shop: MakeShop, queues: QueueVictim, operator_process: Path, seed: int
) -> None:
    chosen, namespace = random.Random(seed), make_shop()  # noqa: S311
    chart.prepare_replays(shop.sandbox.cluster, namespace.namespace)
    shop.declare()
    lend(shop, namespace)
    queues.lend(namespace.namespace)
    move_dead_letters(shop, "before")
    queues.move_dead_letters("before")
    before = protected(shop), queues.protected()
    operator = shop.sandbox.processes.pid(installation.OPERATOR)

    elsewhere = shop.sandbox.pulsar.admin_url
    with (
        HostileBroker.serving(random.Random(seed), elsewhere) as broker,  # noqa: S311
        HostileQueueServer.serving(random.Random(seed)) as server,  # noqa: S311
    ):
        use_hostile_servers(namespace, broker, server.address)
        attacker = Attacker(namespace, shop, queues, server.address, chosen)
        passed, refused = attacker.apply_objects()
        attacker.send_entries(shop.policy.ledger_topic, 4)
        attacker.send_entries(shop.policy.dead_letter_topic, 2)
        attacker.forge_evidence(12)
        queues.write_forged(chosen)
        move_dead_letters(shop, "meanwhile")
        queues.move_dead_letters("meanwhile")

        genuine = [cause for cause in shop.replayed() if cause != FORGED]
        assert genuine == ["WarehouseDown"] * 2 * GENUINE
        queues.check_copies()
        delete_all(namespace)
    # Few: the operator pauses the calls to a failing connection.
    assert min(broker.answers, server.answers)
    assert broker.credentials <= {f"Bearer {token}" for token in namespace.tokens}
    assert (protected(shop), queues.protected()) == before
    assert min(passed, refused) > OBJECTS // 8
    assert shop.sandbox.processes.pid(installation.OPERATOR) == operator
    assert "Traceback" not in operator_process.read_text()
    check_no_token_leaked(shop)


@pytest.fixture
def faulty_api(installed: Sandbox, seed: int) -> Iterator[FaultyApiServer]:
    """A relay before the API server of the operator, which passes all requests on at first."""
    cluster, chosen = installed.cluster, random.Random(seed)  # noqa: S311
    installed.processes.stop(installation.OPERATOR)
    identity = cluster.kubeconfig.parent
    with FaultyApiServer.before(cluster.port, identity, chosen) as relay:
        beyond, processes = replace(cluster, port=relay.port), installed.processes
        installation.start_operator(Sandbox(installed.state, processes, installed.pulsar, beyond))
        yield relay
        installed.processes.stop(installation.OPERATOR)
    installation.start_operator(installed)


RUNS = "one", "two", "three", "four"


@pytest.mark.timeout(5 * SECONDS)
def test_random_faults_of_the_api_server_lose_and_repeat_nothing(
    shop: Shop, operator_process: Path, faulty_api: FaultyApiServer
) -> None:
    logged = len(operator_process.read_text())
    operator = shop.sandbox.processes.pid(installation.OPERATOR)
    # Before the faults: a malformed answer while kopf discovers the kinds ends the operator, which
    # a kubelet would start again.
    shop.declare()
    faulty_api.share = FAULTY_SHARE
    for name in RUNS:
        move_dead_letters(shop, name)
    faulty_api.share = 0
    assert shop.replayed() == ["WarehouseDown"] * len(RUNS) * GENUINE
    assert faulty_api.faults > len(RUNS)
    assert shop.sandbox.processes.pid(installation.OPERATOR) == operator
    assert "Traceback" not in operator_process.read_text()[logged:]
    check_no_token_leaked(shop)
