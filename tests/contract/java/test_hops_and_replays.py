"""Java decodes messages after a hop of Python and after a Replay, which follows their outcomes."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pulsar
import pytest
from py4j.java_gateway import JavaObject

from redrive.auth.method import ACCESS_VARIABLE, BrokerAccess, Method
from redrive.delivery.reporting import Event, Name
from redrive.policy.envelope import CAUSE_TYPE
from redrive.policy.naming import LEDGER_SUBSCRIPTION, TopicName
from redrive.reading.positions import EntryId
from redrive.replay.account import Account
from redrive.replay.job import run as runs
from redrive.replay.job.outcomes import MessageOutcomes, follow
from redrive.replay.job.plan import DesiredState, Pause, Scanned
from redrive.replay.spec import ReplayJob
from sandbox.pulsar import SUPERUSER, Broker
from tests.contract.java.test_java import dead_letter_in_java
from tests.support.engines import Local
from tests.support.java import JavaClient
from tests.support.key_pairs import key_pair
from tests.support.provisioned_policy import ProvisionedPolicy
from tests.support.topics import enforce_schemas
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("java")

ProvisionPolicy = Callable[..., ProvisionedPolicy]
MakeClient = Callable[..., JavaClient]
SOON = timedelta(seconds=180)
YES, NO = (True,), (False,)  # positional arguments in Java
KINDS = "AVRO", "JSON", "PROTOBUF", "PROTOBUF_NATIVE", "STRING", "BYTES"
FIRST, SECOND, NUMBER = ("a", "b"), ("c", "b", "a"), 7


def definition(*fields: str) -> str:
    """Return the definition of a record of optional numbers: any two definitions are compatible."""
    numbers = [{"name": field, "type": "int", "default": 0} for field in fields]
    return json.dumps({"type": "record", "name": "Order", "fields": numbers})


def give_schema(
    provisioned: ProvisionedPolicy, topic: TopicName, kind: str, fields: Sequence[str] = FIRST
) -> None:
    """Upload a version of a schema for *topic*."""
    path = f"/admin/v2/schemas/{topic.namespace_name}/{topic.local}/schema"
    schema = {"type": kind, "schema": definition(*fields) if fields else "", "properties": {}}
    for _ in range(180):
        answer = provisioned.broker.request("POST", path, schema)
        # A busy broker fails to read a version while it writes the next one.
        if "recovering ledger" not in answer.body:
            break
        time.sleep(1)
    answer.check(f"give {topic} a schema")


def retry(provisioned: ProvisionedPolicy, times: int = 1) -> None:
    """Have a Python consumer send *times* messages to the retry topic."""
    consumer = provisioned.consumer()
    for _ in range(times):
        consumer.reconsume_later(consumer.receive(SOON))
    consumer.close()


def record(schema: Any, **fields: int) -> Any:  # noqa: ANN401 - Java
    builder = schema.newRecordBuilder()
    for name, value in fields.items():
        builder.set(name, value)
    return builder.build()


def duration(client: JavaClient) -> Any:  # noqa: ANN401 - Java
    return client.gateway.jvm.com.google.protobuf.Duration.newBuilder().setSeconds(NUMBER).build()


def typed(client: JavaClient, kind: str) -> tuple[Any, Any]:
    """Return a schema and a value of Java."""
    schema, jvm = client.api.Schema, client.gateway.jvm
    if kind in {"AVRO", "JSON"}:
        records = client.record(kind, definition(*FIRST))
        return records, record(records, a=NUMBER, b=1)
    if kind.startswith("PROTOBUF"):
        name = jvm.java.lang.Class.forName("com.google.protobuf.Duration")
        return getattr(schema, kind)(name), duration(client)
    return getattr(schema, kind), {"STRING": "seven", "INT32": NUMBER, "BYTES": b"7"}[kind]


def text(value: Any) -> str:  # noqa: ANN401 - an object of Java
    """Return the content of a decoded value as text."""
    if isinstance(value, JavaObject) and value.getClass().getSimpleName().startswith("Generic"):
        return str({field.getName(): value.getField(field) for field in value.getFields()})
    return str(value)


@pytest.mark.usefixtures("pulsar_namespace")  # which it changes or names
@pytest.mark.parametrize(("kind", "enforced"), [("AVRO", False), *((kind, True) for kind in KINDS)])
def test_java_reads_messages_sent_on_by_python(
    provision_policy: ProvisionPolicy, java_client: MakeClient, kind: str, *, enforced: bool
) -> None:
    provisioned = provision_policy(max_retries=3)
    if enforced:
        enforce_schemas(provisioned.broker, provisioned.policy.topic)
    producing, consuming = java_client(provisioned, SUPERUSER), java_client(provisioned)
    schema, value = typed(producing, kind)
    producing.send(str(provisioned.policy.topic), schema, value)
    retry(provisioned, times=2)
    in_java = consuming.retrying_consumer(provisioned.policy, schema=typed(consuming, kind)[0])
    message = in_java.receive()
    assert (text(message.value), message.properties["RECONSUMETIMES"]) == (text(value), "2")
    in_java.reconsume_later(message)
    in_java.close()
    retry(provisioned)

    dead = dead_letter_in_java(provisioned, producing, schema)
    assert (text(dead.value), dead.properties["RECONSUMETIMES"]) == (text(value), "4")
    provisioned.wait_until_settled()


@pytest.mark.usefixtures("pulsar_namespace")  # which it changes or names
def test_later_reader_decodes_retry_by_its_written_version(
    provision_policy: ProvisionPolicy, java_client: MakeClient
) -> None:
    provisioned = provision_policy(max_retries=1, partitions=2)
    enforce_schemas(provisioned.broker, provisioned.policy.topic)
    producing, consuming = java_client(provisioned, SUPERUSER), java_client(provisioned)
    old, value = typed(producing, "AVRO")
    producing.send(str(provisioned.policy.topic), old, value)
    for topic in (
        provisioned.policy.topic,
        provisioned.policy.retry_topic,
        provisioned.policy.dead_letter_topic,
    ):
        give_schema(
            provisioned, topic, "AVRO", SECOND
        )  # the operator was late, and copied only this
    new = producing.record("AVRO", definition(*SECOND))
    producing.send(str(provisioned.policy.topic), new, record(new, c=1, b=2, a=3))
    retry(provisioned, times=2)
    later = consuming.record("AVRO", definition(*SECOND))
    in_java = consuming.retrying_consumer(provisioned.policy, schema=later)
    read = {text(in_java.receive().value) for _ in range(2)}
    in_java.close()
    written = {"{'c': 0, 'b': 1, 'a': 7}", "{'c': 1, 'b': 2, 'a': 3}"}
    assert read == written

    retry(provisioned, times=2)
    dead = producing.consumer(str(provisioned.policy.dead_letter_topic), "redrive", new)
    assert {text(dead.receive().value) for _ in range(2)} == written


@pytest.mark.usefixtures("pulsar_namespace")  # which it changes or names
def test_versions_above_127_are_kept_too(
    provision_policy: ProvisionPolicy, java_client: MakeClient
) -> None:
    provisioned = provision_policy(max_retries=1)
    client = java_client(provisioned, SUPERUSER)
    names = [f"f{number}" for number in range(130)]
    for count in range(1, 131):
        give_schema(provisioned, provisioned.policy.topic, "AVRO", names[:count])
    latest = client.record("AVRO", definition(*names))
    client.send(str(provisioned.policy.topic), latest, record(latest, f129=NUMBER))
    retry(provisioned)
    consumer = provisioned.consumer()
    message = consumer.receive(SOON)
    assert message is not None
    assert message.properties()["REDRIVE_SCHEMA_VERSION"] == "129"
    consumer.reconsume_later(message)

    reader = client.record("AVRO", definition("f129", "f0"))
    assert text(dead_letter_in_java(provisioned, client, reader).value) == "{'f129': 7, 'f0': 0}"


@pytest.mark.usefixtures("pulsar_namespace")  # which it changes or names
def test_a_primitive_of_a_fixed_form_needs_no_version(
    provision_policy: ProvisionPolicy, java_client: MakeClient
) -> None:
    provisioned = provision_policy(max_retries=1)
    client = java_client(provisioned, SUPERUSER)
    for topic in (
        provisioned.policy.topic,
        provisioned.policy.retry_topic,
        provisioned.policy.dead_letter_topic,
    ):
        give_schema(provisioned, topic, "INT32", ())
    client.send(str(provisioned.policy.topic), *typed(client, "INT32"))
    retry(provisioned, times=2)
    dead = dead_letter_in_java(provisioned, client, client.api.Schema.INT32)
    assert dead.value == NUMBER


def unsent(provisioned: ProvisionedPolicy) -> set[str]:
    """Fail to send a message on; return the reported reasons, and check that it is not lost."""
    events: list[Event] = []
    consumer = provisioned.consumer(on_event=events.append)
    consumer.reconsume_later(consumer.receive(SOON))
    consumer.close()
    assert provisioned.unsettled() == 1
    return {event.reason for event in events if event.event == Name.UNSENT}


def refuses_plain_producers(provisioned: ProvisionedPolicy, topic: TopicName) -> bool:
    """Return True if *topic* refuses a producer without a schema."""
    try:
        provisioned.client(SUPERUSER).create_producer(str(topic)).close()
    except pulsar.IncompatibleSchema:
        return True
    return False


def not_copied(provisioned: ProvisionedPolicy) -> str:
    """Fail a message that can't be copied; return the reason that its dead letter records."""
    consumer = provisioned.consumer()
    consumer.reconsume_later(consumer.receive(SOON))
    consumer.close()
    assert provisioned.unsettled() == 0
    (dead_letter,) = provisioned.dead_letters(1)
    return str(dead_letter.properties()["REDRIVE_NOT_COPIED"])


@pytest.mark.usefixtures("pulsar_namespace")  # which it changes or names
def test_key_value_message_becomes_an_encoded_dead_letter(
    provision_policy: ProvisionPolicy, java_client: MakeClient
) -> None:
    provisioned = provision_policy()
    client = java_client(provisioned, SUPERUSER)
    common = client.gateway.jvm.org.apache.pulsar.common.schema
    schema = client.api.Schema
    pairs = schema.KeyValue(schema.STRING, schema.STRING, common.KeyValueEncodingType.SEPARATED)
    client.send(str(provisioned.policy.topic), pairs, common.KeyValue("key", "value"))
    assert not_copied(provisioned) == "SchemaUnsupported"


@pytest.mark.usefixtures("pulsar_namespace")  # which it changes or names
def test_deleted_schema_gives_an_encoded_dead_letter(
    provision_policy: ProvisionPolicy, java_client: MakeClient
) -> None:
    provisioned = provision_policy()
    client = java_client(provisioned, SUPERUSER)
    client.send(str(provisioned.policy.topic), *typed(client, "AVRO"))
    topic = provisioned.policy.topic
    provisioned.broker.request(
        "DELETE", f"/admin/v2/schemas/{topic.namespace_name}/{topic.local}/schema?force=true"
    ).check("delete the schema")
    assert not_copied(provisioned) == "SchemaNotFound"


@pytest.mark.usefixtures("pulsar_namespace")  # which it changes or names
def test_schema_enforcing_namespace_keeps_primitive_schemas(
    provision_policy: ProvisionPolicy, java_client: MakeClient
) -> None:
    provisioned = provision_policy()
    enforce_schemas(provisioned.broker, provisioned.policy.topic)
    client = java_client(provisioned, SUPERUSER)
    for topic in (provisioned.policy.topic, provisioned.policy.retry_topic):
        give_schema(provisioned, topic, "INT32", ())
    client.send(str(provisioned.policy.topic), *typed(client, "INT32"))
    # A topic that is loaded learns later of a change of its namespace.
    wait_until(lambda: refuses_plain_producers(provisioned, provisioned.policy.retry_topic))
    assert unsent(provisioned) == {"NotSent"}


class Silent:
    """A reporter that publishes nothing."""

    def rate_limit(self, job: ReplayJob) -> float | None:
        return job.rate_limit

    def take_over(self, _: EntryId) -> None:
        pass

    def report(self, account: Account, *, pause: Pause | None = None) -> DesiredState:
        """Publish nothing."""
        assert account.matched or pause is None
        return DesiredState.RUN

    def report_scan(self, scanned: Scanned) -> None:
        """Publish nothing."""

    def report_outcomes(self, aftermath: MessageOutcomes) -> None:
        """Keep the latest outcomes."""
        self.aftermath = aftermath

    def desired_state(self) -> DesiredState:
        """Continue the run."""
        return DesiredState.RUN


Replay = Callable[[ProvisionedPolicy], Account]


@pytest.fixture
def replay(tmp_path: Path, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Replay:
    """A function that runs a Replay of all dead letters in this process."""
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "key").write_text("5a" * 32)
    (tmp_path / "credentials").mkdir()
    (tmp_path / "credentials" / "token").write_text(broker.token(SUPERUSER))
    monkeypatch.setenv(ACCESS_VARIABLE, BrokerAccess(Method.TOKEN, str(tmp_path)).encode())
    return run_replay


def run_replay(provisioned: ProvisionedPolicy) -> Account:
    provisioned.create(provisioned.policy.ledger_topic, LEDGER_SUBSCRIPTION, 0)
    return runs.run(job_of(provisioned), Local(), Silent())


def job_of(provisioned: ProvisionedPolicy) -> ReplayJob:
    """Return a Replay of all dead letters that polls their outcomes once."""
    broker, policy = provisioned.broker, provisioned.policy
    urls = broker.service_url, broker.admin_url
    return ReplayJob("tests", "again", "uid", policy, *urls, where=None, follow_for=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_java_reads_replayed_messages(
    provision_policy: ProvisionPolicy,
    java_client: MakeClient,
    replay: Replay,
    kind: str,
) -> None:
    provisioned = provision_policy()
    producing, consuming = java_client(provisioned, SUPERUSER), java_client(provisioned)
    schema, value = typed(producing, kind)
    producing.send(str(provisioned.policy.dead_letter_topic), schema, value)

    assert replay(provisioned).moved == 1

    in_java = consuming.retrying_consumer(provisioned.policy, schema=typed(consuming, kind)[0])
    assert text(in_java.receive().value) == text(value)
    in_java.close()


def test_later_reader_decodes_replays_by_written_version(
    provision_policy: ProvisionPolicy, java_client: MakeClient, replay: Replay
) -> None:
    provisioned = provision_policy()
    producing, consuming = java_client(provisioned, SUPERUSER), java_client(provisioned)
    dead = str(provisioned.policy.dead_letter_topic)
    producing.send(dead, *typed(producing, "AVRO"))
    new = producing.record("AVRO", definition(*SECOND))
    producing.send(dead, new, record(new, c=1, b=2, a=3))
    producing.send(dead, *typed(producing, "AVRO"))
    # In an order other than that of the dead-letter topic.
    give_schema(provisioned, provisioned.policy.retry_topic, "AVRO", SECOND)
    give_schema(provisioned, provisioned.policy.retry_topic, "AVRO", FIRST)

    assert replay(provisioned).moved == 3

    later = consuming.record("AVRO", definition(*SECOND))
    in_java = consuming.retrying_consumer(provisioned.policy, schema=later)
    read = sorted(text(in_java.receive().value) for _ in range(3))
    in_java.close()
    first, second = "{'c': 0, 'b': 1, 'a': 7}", "{'c': 1, 'b': 2, 'a': 3}"
    assert read == [first, first, second]


def test_dead_letter_of_java_drops_the_cause_before(
    provision_policy: ProvisionPolicy, java_client: MakeClient, replay: Replay
) -> None:
    provisioned = provision_policy(max_retries=1)
    producer = provisioned.client(SUPERUSER).create_producer(
        str(provisioned.policy.dead_letter_topic)
    )
    for _ in range(2):
        producer.send(b"x", properties={CAUSE_TYPE: "OldError"})
    assert replay(provisioned).moved == 2
    in_java = java_client(provisioned).retrying_consumer(provisioned.policy)
    in_java.acknowledge(in_java.receive())
    for _ in range(2):
        in_java.reconsume_later(in_java.receive())
    in_java.close()

    shown = Silent()
    follow(job_of(provisioned), shown)

    aftermath = shown.aftermath
    assert (aftermath.handled, aftermath.waiting, aftermath.dead, aftermath.settled) == (
        1,
        0,
        1,
        True,
    )
    assert aftermath.causes == {"": 1}


def test_keys_and_values_are_refused_by_name(
    provision_policy: ProvisionPolicy, java_client: MakeClient, replay: Replay
) -> None:
    provisioned = provision_policy()
    client = java_client(provisioned, SUPERUSER)
    common = client.gateway.jvm.org.apache.pulsar.common.schema
    strings = client.api.Schema.STRING
    pairs = client.api.Schema.KeyValue(strings, strings, common.KeyValueEncodingType.SEPARATED)
    pair = common.KeyValue("key", "value")
    client.send(str(provisioned.policy.dead_letter_topic), pairs, pair)

    account = replay(provisioned)

    assert (account.matched, account.refused) == (1, 1)
    assert account.refusals[0].cause == "SchemaUnsupported"


@pytest.mark.usefixtures("pulsar_namespace")  # which it changes or names
def test_encrypted_dead_letters_stay_for_the_key(
    provision_policy: ProvisionPolicy, java_client: MakeClient, replay: Replay, tmp_path: Path
) -> None:
    """In batches, compressed and in chunks, among dead letters that are not encrypted."""
    provisioned = provision_policy()
    client, topic = java_client(provisioned, SUPERUSER), provisioned.policy.dead_letter_topic
    public, private = key_pair(tmp_path)
    plain = provisioned.client(SUPERUSER).create_producer(str(topic))
    plain.send(b"plain")
    compressions = "NONE", "LZ4", "ZSTD"
    large = random.Random(1).randbytes(6 * 2**20)  # noqa: S311  no secret
    for compression in compressions:
        producer = client.pulsar.newProducer(client.api.Schema.BYTES).topic(str(topic))
        producer = producer.compressionType(getattr(client.api.CompressionType, compression))
        producer = producer.addEncryptionKey("orders").defaultCryptoKeyReader(public.as_uri())
        seconds = client.gateway.jvm.java.util.concurrent.TimeUnit.SECONDS
        batches = producer.clone().batchingMaxPublishDelay(60, seconds).create()
        for number in range(3):
            message = batches.newMessage().value(b"batched").key("k")
            message.property("id", f"{compression}{number}").sendAsync()
        batches.flush()
        batches.close()
        chunks = producer.enableBatching(*NO).enableChunking(*YES).create()
        chunks.newMessage().value(large).key("c").property("id", compression).send()
        chunks.close()
    plain.send(b"plain")

    account = replay(provisioned)

    counts = account.matched, account.moved, account.refused, account.left
    assert counts == (8, 2, 6, 0)  # each batch is one message
    assert {refusal.cause for refusal in account.refusals} == {"Encrypted"}
    consumer = client.consumer(str(topic), "redrive", private_key=private)
    letters = [consumer.receive() for _ in range(12)]
    read = {letter.properties["id"]: (letter.key, bytes(letter.value)) for letter in letters}
    batched = {f"{name}{n}": ("k", b"batched") for name in compressions for n in range(3)}
    assert read == batched | dict.fromkeys(compressions, ("c", large))
