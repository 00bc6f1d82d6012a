"""Dead letters on the real broker, and a replay role with exactly the rights it needs.

The environment says from the start where the token of that role lies, as in a job: Spark and its
Python workers read it there.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import Any

import pulsar
import pytest
from pyspark.sql import SparkSession

from redrive.admin.http import subscription_path, topic_path
from redrive.api.crds import crds
from redrive.auth.method import ACCESS_VARIABLE, BrokerAccess, Method, ShownCredentials
from redrive.policy.envelope import CAUSE_FINGERPRINT, CAUSE_TYPE, REPLAYS
from redrive.policy.model import Policy
from redrive.policy.naming import DEAD_LETTER_SUBSCRIPTION, LEDGER_SUBSCRIPTION, TopicName
from redrive.reading import broker, reader
from redrive.reading.broker import ReadingClient
from redrive.reading.positions import NOWHERE
from redrive.reading.stored import ReadMessage
from redrive.replay import audit
from redrive.replay import spark as replay_spark
from redrive.replay.evidence import LedgerKey
from redrive.replay.job import dispatch
from redrive.replay.job.progress import Progress
from redrive.replay.spec import ReplayJob
from redrive.spark.datasource import PUSHDOWN, register
from sandbox import chart
from sandbox import spark as spark_of_sandbox
from sandbox.kubernetes import Cluster
from sandbox.pulsar import SUPERUSER, Broker
from sandbox.sandbox import Sandbox
from tests.conftest import stack_of_group
from tests.support.namespaces import PolicyNamespace, grant_all
from tests.support.topics import (
    await_deduplication,
    deduplicate,
    drain,
    enable_deduplication,
    stats,
)
from tests.support.waiting import wait_until

ROLE = "replayer"
KEY = LedgerKey(b"key of the ledgers of these tests")


@dataclass(frozen=True)
class ProvisionedPolicy:
    """A policy whose topics are there, for the replay role to work on."""

    broker: Broker
    client: ReadingClient
    policy: Policy

    def bury(
        self,
        count: int,
        cause: str = "TimeoutError",
        content: bytes | None = b"order",
        replays: int = 0,
        fingerprint: str = "",
        **fields: Any,  # noqa: ANN401 - as the client takes them
    ) -> None:
        """Lay *count* messages into the dead-letter topic, each with an id in its properties."""
        producer = self.client.create_producer(
            str(self.policy.dead_letter_topic), batching_enabled=False
        )
        for _ in range(count):
            properties = {"id": secrets.token_hex(4), CAUSE_TYPE: cause}
            properties |= {REPLAYS: str(replays)} if replays else {}
            properties |= {CAUSE_FINGERPRINT: fingerprint} if fingerprint else {}
            producer.send(content, properties=properties, **fields)
        producer.close()

    def bury_many(
        self,
        count: int,
        first: int = 0,
        more: Mapping[str, str] = MappingProxyType({}),
        **sent: Any,  # noqa: ANN401 - as the client takes it
    ) -> None:
        """Lay *count* small messages, whose ids are their numbers, from *first* on.

        *more* are further properties of each.
        """
        options = {"batching_enabled": False, "block_if_queue_full": True, **sent}
        producer = self.client.create_producer(str(self.policy.dead_letter_topic), **options)
        results: list[pulsar.Result] = []
        for number in range(first, first + count):
            properties = {"id": f"{number:07}", **more}
            producer.send_async(b"order", lambda r, _: results.append(r), properties=properties)
        producer.flush()
        producer.close()
        assert results == [pulsar.Result.Ok] * count

    def bury_in_ranges(self, count: int, **sent: Any) -> None:  # noqa: ANN401 - likewise
        """Lay them into two ledgers, of which each is a range at least."""
        half = count // 2
        self.bury_many(half, **sent)
        self.admin("PUT", self.policy.dead_letter_topic, "unload")
        self.bury_many(count - half, half, **sent)

    def in_target(self, target: TopicName | None = None) -> list[str]:
        """Return the ids of all that was ever stored in the retry topic, in alphabetical order.

        Or in another *target*.
        """
        return self.ids(self.read_all(target or self.policy.retry_topic))

    def read_all(self, target: TopicName) -> Iterator[ReadMessage]:
        """Read all that *target* holds, partition by partition."""
        for partition in broker.read_partitions(self.broker.admin_url, target):
            topic = reader.ReadableTopic(self.client, self.broker.admin_url, target)
            yield from reader.read_messages(
                topic,
                partition.index,
                NOWHERE,
                partition.behind(NOWHERE),
                reader.MAX_PREFETCH,
            )

    def check_audit(self, *targets: TopicName) -> None:
        """Check that dead-letter topic, ledger and targets agree, message by message.

        The target is the retry topic, or *targets* are all that Replays have moved to.
        """
        urls = self.broker.service_url, self.broker.admin_url
        dead_letters = self.policy.dead_letter_topic, self.policy.dead_letter_subscription
        findings = audit.audit(urls, *dead_letters, *(targets or (self.policy.retry_topic,)))
        differences = findings.doubled, findings.unrecorded, findings.missing
        assert differences == ({}, {}, {})

    def admin(self, method: str, topic: TopicName, subject: str, body: object = None) -> str:
        """Ask the broker as its super-user, below *topic*."""
        path = f"/admin/v2/{topic_path(topic)}/{subject}"
        answer = self.broker.request(method, path, body)
        answer.check(f"{method} {subject} of {topic}")
        return answer.body

    def change_policy(self, method: str, topic: TopicName, name: str, value: object = None) -> None:
        """Set, or delete, a policy of *topic*, and wait until the broker goes by it."""
        shown = {"backlogQuota": "backlogQuotaMap"}.get(name, name)
        before = self.admin("GET", topic, shown)
        self.admin(method, topic, name, value)
        wait_until(lambda: self.admin("GET", topic, shown) != before, seconds=60)
        time.sleep(0.5)  # it is shown, and goes to the topic

    @staticmethod
    def ids(messages: Iterable[pulsar.Message | ReadMessage]) -> list[str]:
        """Return the ids that `bury` gave, in alphabetical order."""
        return sorted(message.properties()["id"] for message in messages)

    def bury_batch(self, *causes: str) -> None:
        """Lay one entry that holds a message for each of *causes*."""
        producer = self.client.create_producer(
            str(self.policy.dead_letter_topic),
            batching_enabled=True,
            batching_max_publish_delay_ms=60_000,
        )
        results: list[pulsar.Result] = []
        for cause in causes:
            properties = {"id": secrets.token_hex(4), CAUSE_TYPE: cause}
            producer.send_async(b"", lambda r, _: results.append(r), properties=properties)
        producer.flush()
        producer.close()
        assert results == [pulsar.Result.Ok] * len(causes)

    def unacknowledged(self) -> list[pulsar.Message]:
        """Return the dead letters that `redrive` has not acknowledged; they stay there."""
        topic, subscription = self.policy.dead_letter_topic, self.policy.dead_letter_subscription
        return list(drain(self.broker, self.client, topic, subscription))

    def replayed(self) -> list[pulsar.Message]:
        """Return the messages that came to the retry topic since the last call."""
        topic, subscription = self.policy.retry_topic, self.policy.subscription
        return list(drain(self.broker, self.client, topic, subscription, acknowledge=True))

    def grant(self, topic: TopicName, *actions: str) -> None:
        """Let the replay role do *actions* on *topic*, and nothing else there."""
        grant_all(self.broker, ROLE, {topic: actions})

    def create(self, topic: TopicName, subscription: str, partitions: int) -> None:
        """Create *topic* with a subscription from its first message."""
        at = f"/admin/v2/{topic_path(topic)}"
        kind = "/partitions" if partitions else ""
        self.broker.request("PUT", f"{at}{kind}", partitions or None).check(f"create {topic}")
        earliest = {"ledgerId": -1, "entryId": -1}
        path = f"/admin/v2/{subscription_path(topic, subscription)}"
        self.broker.request("PUT", path, earliest).check("subscribe")

    def delete(self, topic: TopicName) -> None:
        """Delete *topic*, which has no partitions, whoever uses it."""
        at = f"/admin/v2/persistent/{topic.namespace_name}/{topic.local}?force=true"
        self.broker.request("DELETE", at).check(f"delete {topic}")

    def make_again(self, ledger: TopicName) -> None:
        """Delete a ledger, and make it as the operator does then."""
        self.delete(ledger)
        self.create(ledger, LEDGER_SUBSCRIPTION, 0)
        self.grant(ledger, "produce", "consume")

    def deduplicate(self, topic: TopicName) -> None:
        """Have the broker drop messages that a producer sends again."""
        deduplicate(self.broker, topic)

    def skip(self, count: int) -> None:
        """Acknowledge the oldest dead letters, as by hand."""
        topic, at = self.policy.dead_letter_topic, f"subscription/{DEAD_LETTER_SUBSCRIPTION}/skip"
        self.admin("POST", topic, f"{at}/{count}")

    def backlog_of_dead_letters(self) -> int:
        """Return how many dead letters are not acknowledged, as the broker counts."""
        return self._backlog(self.policy.dead_letter_topic, DEAD_LETTER_SUBSCRIPTION)

    def unsettled(self) -> int:
        """Return how many messages of the source and the retry topic are not acknowledged."""
        topics = self.policy.topic, self.policy.retry_topic
        return sum(self._backlog(topic, self.policy.subscription) for topic in topics)

    def _backlog(self, topic: TopicName, subscription: str) -> int:
        backlog: int = stats(self.broker, topic, subscription)["msgBacklog"]
        return backlog


ProvisionPolicy = Callable[..., Any]
MakeJob = Callable[..., Any]


@pytest.fixture(autouse=True)
def _report_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have runs of this process report, and resume postponed work, several times a second.

    A run whose tasks all wait sleeps between its reports.
    """
    monkeypatch.setattr(dispatch, "REPORT_SECONDS", 0.2)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests that use Spark into one group: one worker starts the Spark that serves them all."""
    for item in items:
        if isinstance(item, pytest.Function) and "spark" in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group("spark"))


@pytest.fixture
def provision_policy(
    broker: Broker, policy_namespace: PolicyNamespace
) -> Iterator[ProvisionPolicy]:
    """Make a policy's topics, subscriptions and rights, as the operator does."""
    token = pulsar.AuthenticationToken(broker.token(SUPERUSER))
    quiet = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)

    def provision_policy(  # noqa: PLR0913  each of another topic or subscription
        *, partitions: int = 0, dead_partitions: int = 0, deduplicate: bool = True,
        retry_rights: tuple[str, ...] = ("produce", "consume"), topic: str = "orders",
        subscription: str = "fulfilment", dead_letter_subscription: str = DEAD_LETTER_SUBSCRIPTION,
    ) -> ProvisionedPolicy:  # fmt: skip
        shown = ShownCredentials("token", lambda: broker.token(SUPERUSER))
        client = ReadingClient(
            broker.service_url, lambda: shown, authentication=token, logger=quiet
        )
        closing.callback(client.close)
        policy = Policy(
            policy_namespace.source(topic),
            subscription,
            dead_letter_subscription=dead_letter_subscription,
        )
        provisioned = ProvisionedPolicy(broker, client, policy)
        provisioned.create(policy.retry_topic, policy.subscription, partitions)
        provisioned.create(
            policy.dead_letter_topic, policy.dead_letter_subscription, dead_partitions
        )
        if deduplicate:
            enable_deduplication(broker, policy.retry_topic)
        provisioned.create(policy.ledger_topic, LEDGER_SUBSCRIPTION, 0)
        rights = {
            policy.retry_topic: retry_rights,
            policy.dead_letter_topic: ("consume",),
            policy.ledger_topic: ("produce", "consume"),
        }
        policy_namespace.topics.extend(rights)
        grant_all(broker, ROLE, rights)
        if deduplicate:
            await_deduplication(broker, policy.retry_topic, partitions)
        return provisioned

    with ExitStack() as closing:
        yield provision_policy


@contextmanager
def token_for_jobs(broker: Broker, folder: Path) -> Iterator[str]:
    """Put the replay role's token, and a key of ledgers, where a job finds them."""
    token = broker.token(ROLE)
    (folder / "ledger").mkdir()
    (folder / "ledger" / "key").write_text(KEY.secret.hex())
    (folder / "credentials").mkdir()
    (folder / "credentials" / "token").write_text(token)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ACCESS_VARIABLE, BrokerAccess(Method.TOKEN, str(folder)).encode())
        yield token


@pytest.fixture(scope="module")
def replay_token(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with token_for_jobs(broker, tmp_path_factory.mktemp("access")) as token:
        yield token


@pytest.fixture(scope="session")
def spark(
    request: pytest.FixtureRequest,
    shared_sandbox: Sandbox,
    tmp_path_factory: pytest.TempPathFactory,
) -> SparkSession:
    """The one Spark of the worker that runs the group `spark`; two tasks at a time."""
    broker = shared_sandbox.pulsar
    policy = Policy(TopicName("none", "none", "none"), "none")
    job = ReplayJob("tests", "all", "none", policy, broker.service_url, broker.admin_url, None)
    image = spark_of_sandbox.image()
    stack = stack_of_group(request, "spark")
    stack.enter_context(token_for_jobs(broker, tmp_path_factory.mktemp("access-of-spark")))
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    for variable in ("JAVA_HOME", "PYSPARK_PYTHON", "SPARK_SUBMIT_OPTS"):
        patch.setenv(variable, image[variable])
    patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    arguments = "--master local[2] --conf spark.ui.enabled=false pyspark-shell"
    patch.setenv("PYSPARK_SUBMIT_ARGS", arguments)
    patch.setenv("PYTHONPATH", str(Path(replay_spark.__file__).parents[2]))
    session = stack.enter_context(replay_spark.spark_session(job))
    session.sparkContext.setLogLevel("ERROR")
    return session


class _Clerk(BaseHTTPRequestHandler):
    token = ""

    def do_GET(self) -> None:
        self._answer(200, {"token_endpoint": f"http://{self.headers['Host']}/token"})

    def do_POST(self) -> None:
        form = self.rfile.read(int(self.headers["Content-Length"])).decode()
        is_known = "client_secret=right" in form
        self._answer(200, {"access_token": self.token}) if is_known else self._answer(401, {})

    def _answer(self, status: int, body: dict[str, str]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def issuer(broker: Broker) -> Iterator[str]:
    """An issuer that gives the replay role's token to whoever knows the secret."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Clerk) as server:
        _Clerk.token = broker.token(ROLE)
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def notebook(spark: SparkSession) -> Iterator[SparkSession]:
    """A session as notebooks have it."""
    register(spark)
    yield spark
    spark.conf.unset(PUSHDOWN)


@pytest.fixture(scope="module")
def replay_api(cluster: Cluster) -> Cluster:
    """A cluster that knows Replays."""
    cluster.define(crds())
    return cluster


@pytest.fixture
def make_job(replay_api: Cluster, kube_namespace: str, monkeypatch: pytest.MonkeyPatch) -> MakeJob:
    """Apply a Replay, and return the job for it with the rights of its ServiceAccount."""
    chart.prepare_replays(replay_api, kube_namespace)
    account = replay_api.service_account_kubeconfig(kube_namespace, "redrive-replay")
    monkeypatch.setenv("KUBECONFIG", str(account))

    def make(
        provisioned: ProvisionedPolicy, where: str | None = None, **spec: object
    ) -> tuple[ReplayJob, Progress]:
        name = f"replay-{secrets.token_hex(3)}"
        select = {} if where is None else {"select": {"where": where}}
        manifest = {
            "apiVersion": "redrive.io/v1beta1",
            "kind": "Replay",
            "metadata": {"name": name, "namespace": kube_namespace},
            "spec": {"policyRef": {"name": "orders"}, **select, **spec},
        }
        uid = replay_api.objects.create(manifest)["metadata"]["uid"]
        broker = provisioned.broker
        job = ReplayJob(
            kube_namespace,
            name,
            uid,
            provisioned.policy,
            broker.service_url,
            broker.admin_url,
            where,
        )
        return job, Progress(job)

    return make
