"""A hop of Python keeps the schema of a message: Java decodes it as it does without the hop."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from py4j.java_gateway import JavaObject

from redrive.delivery.reporting import Event, Name
from redrive.policy.naming import TopicName
from sandbox.pulsar import SUPERUSER
from tests.contract.java.test_java import dead_letter_in_java
from tests.support.java import JavaClient
from tests.support.provisioned_policy import ProvisionedPolicy
from tests.support.schemas import enforce

pytestmark = [
    pytest.mark.xdist_group("java"),
    pytest.mark.usefixtures("pulsar_namespace"),  # which they change or name
]
ProvisionPolicy = Callable[..., ProvisionedPolicy]
MakeClient = Callable[..., JavaClient]
SOON = timedelta(seconds=180)

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


@pytest.mark.parametrize(("kind", "enforced"), [("AVRO", False), *((kind, True) for kind in KINDS)])
def test_java_reads_messages_sent_on_by_python(
    provision_policy: ProvisionPolicy, java_client: MakeClient, kind: str, *, enforced: bool
) -> None:
    provisioned = provision_policy(max_retries=3)
    if enforced:
        enforce(provisioned.broker, provisioned.policy.topic)
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


def test_later_reader_decodes_retry_by_its_written_version(
    provision_policy: ProvisionPolicy, java_client: MakeClient
) -> None:
    provisioned = provision_policy(max_retries=1, partitions=2)
    enforce(provisioned.broker, provisioned.policy.topic)
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


def not_copied(provisioned: ProvisionedPolicy) -> str:
    """Fail a message that can't be copied; return the reason that its dead letter records."""
    consumer = provisioned.consumer()
    consumer.reconsume_later(consumer.receive(SOON))
    consumer.close()
    assert provisioned.unsettled() == 0
    (dead_letter,) = provisioned.dead_letters(1)
    return str(dead_letter.properties()["REDRIVE_NOT_COPIED"])


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


def test_schema_enforcing_namespace_keeps_primitive_schemas(
    provision_policy: ProvisionPolicy, java_client: MakeClient
) -> None:
    provisioned = provision_policy()
    enforce(provisioned.broker, provisioned.policy.topic)
    client = java_client(provisioned, SUPERUSER)
    for topic in (provisioned.policy.topic, provisioned.policy.retry_topic):
        give_schema(provisioned, topic, "INT32", ())
    client.send(str(provisioned.policy.topic), *typed(client, "INT32"))
    assert unsent(provisioned) == {"NotSent"}
