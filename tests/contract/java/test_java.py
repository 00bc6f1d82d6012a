"""Java and Python consumers share a subscription: each resumes where the other stopped.

All clients have only the rights that the operator grants, except those that read dead letters.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from redrive.messages import id_text
from redrive.policy.envelope import CAUSE_TYPE
from redrive.policy.naming import DEAD_LETTER_SUBSCRIPTION
from sandbox.pulsar import SUPERUSER
from tests.support.java import JavaClient, JavaRefusedError, Message
from tests.support.provisioned_policy import ProvisionedPolicy
from tests.support.topics import stats
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("java")
ProvisionPolicy = Callable[..., Any]
MakeClient = Callable[..., JavaClient]
SOON = timedelta(seconds=180)
CHUNKS = 2  # of the large message
KEY, ORDER, EVENT_TIME, PROPERTIES = "schlüssel", "order", 1_700_000_000_123, {"tenant": "größe"}


def send(provisioned: ProvisionedPolicy) -> str:
    """Produce a message with every field that a user can set; return its id."""
    (sent,) = provisioned.send(
        b"x",
        partition_key=KEY,
        ordering_key=ORDER,
        event_timestamp=EVENT_TIME,
        properties=PROPERTIES,
    )
    return id_text(sent)


def is_whole(message: Message) -> bool:
    """Return True if *message* has in Java each field that `send` has set."""
    return (
        message.value == b"x"
        and (message.key, message.ordering_key.decode()) == (KEY, ORDER)
        and message.event_time == EVENT_TIME
        and PROPERTIES.items() <= message.properties.items()
    )


def values(properties: dict[str, str], *, names: str) -> list[str | None]:
    return [properties.get(name) for name in names.split()]


def wait_until_chunks_are_dispatched(provisioned: ProvisionedPolicy) -> None:
    """Wait until all chunks of a retry are delayed or delivered, and nothing else is unsettled.

    It keeps those that a consumer has not acknowledged when it is closed, until an unload.
    """

    def are_dispatched() -> bool:
        policy = provisioned.policy
        statistics = stats(provisioned.broker, policy.retry_topic, policy.subscription)
        counts = statistics["msgBacklog"], statistics["msgDelayed"], statistics["unackedMessages"]
        backlog, delayed, delivered = map(int, counts)
        # Messages sent on are acknowledged a moment later: only the chunks remain.
        sent_on = provisioned.backlog(policy.topic) == 0
        return sent_on and backlog == CHUNKS == max(delayed, delivered)

    wait_until(are_dispatched)


def dead_letter_in_java(
    provisioned: ProvisionedPolicy, client: JavaClient, schema: object = None
) -> Message:
    return client.consumer(
        str(provisioned.policy.dead_letter_topic), DEAD_LETTER_SUBSCRIPTION, schema
    ).receive()


def test_java_retries_python_dead_letters_and_java_reads(
    provision_policy: ProvisionPolicy, java_client: MakeClient
) -> None:
    provisioned = provision_policy(max_retries=2, partitions=2)
    origin = send(provisioned)
    in_java = java_client(provisioned).retrying_consumer(provisioned.policy)
    for _ in range(2):
        in_java.reconsume_later(in_java.receive())
    in_java.close()

    consumer = provisioned.consumer()
    message = consumer.receive(SOON)
    attempt = consumer.attempt_of(message)
    assert (attempt.number, attempt.origin) == (3, origin)
    assert values(message.properties(), names="DELAY_TIME REAL_TOPIC REAL_SUBSCRIPTION") == [
        "1000",
        str(provisioned.policy.topic),  # without its partition, as we write it
        provisioned.policy.subscription,
    ]
    consumer.reconsume_later(message, cause=ValueError("enough"))

    dead = dead_letter_in_java(provisioned, java_client(provisioned, SUPERUSER))
    assert is_whole(dead)
    assert values(
        dead.properties, names="RECONSUMETIMES ORIGIN_MESSAGE_ID REAL_TOPIC REAL_SUBSCRIPTION"
    ) == ["3", origin, str(provisioned.policy.topic), provisioned.policy.subscription]
    consumer.close()
    wait_until(lambda: provisioned.unsettled(2) == 0)


def test_cause_that_java_adds_is_that_of_the_dead_letter(
    provision_policy: ProvisionPolicy, java_client: MakeClient
) -> None:
    provisioned = provision_policy(max_retries=1)
    send(provisioned)
    in_java = java_client(provisioned).retrying_consumer(provisioned.policy)
    for cause in ("TimeoutException", "IOException"):
        in_java.reconsume_later(in_java.receive(), properties={CAUSE_TYPE: cause})
    in_java.close()
    (dead,) = provisioned.dead_letters(1)
    assert dead.properties()[CAUSE_TYPE] == "IOException"


def test_python_retries_java_dead_letters_and_python_reads(
    provision_policy: ProvisionPolicy, java_client: MakeClient
) -> None:
    provisioned = provision_policy(max_retries=2, partitions=2)
    origin = send(provisioned)
    consumer = provisioned.consumer()
    for _ in range(2):
        consumer.reconsume_later(consumer.receive(SOON), cause=ValueError("not yet"))
    consumer.close()

    in_java = java_client(provisioned).retrying_consumer(provisioned.policy)
    message = in_java.receive()
    assert is_whole(message)
    assert message.properties["RECONSUMETIMES"] == "2"
    in_java.reconsume_later(message)

    [dead] = provisioned.dead_letters(1)
    assert dead.data() == b"x"
    assert (dead.partition_key(), dead.ordering_key()) == (KEY, ORDER)
    assert dead.event_timestamp() == EVENT_TIME
    assert values(
        dead.properties(),
        names="RECONSUMETIMES ORIGIN_MESSAGE_ID REAL_TOPIC REAL_SUBSCRIPTION tenant",
    ) == ["3", origin, str(provisioned.policy.topic), provisioned.policy.subscription, "größe"]
    # Java records no cause. It copies the previous one, which names its attempt.
    assert values(dead.properties(), names="REDRIVE_ATTEMPT REDRIVE_DEAD_REASON") == ["2", None]
    in_java.close()
    wait_until(lambda: provisioned.unsettled(2) == 0)


def test_both_read_large_messages_that_the_other_has_sent_on(
    provision_policy: ProvisionPolicy, java_client: MakeClient
) -> None:
    provisioned = provision_policy(max_retries=2)
    payload = random.Random(1).randbytes(8_960_000)  # noqa: S311 - no secret
    producer = provisioned.client(SUPERUSER).create_producer(
        str(provisioned.policy.topic), batching_enabled=False, chunking_enabled=True
    )
    producer.send(payload)
    consumer = provisioned.consumer()
    consumer.reconsume_later(consumer.receive(SOON))
    wait_until_chunks_are_dispatched(provisioned)
    consumer.close()
    provisioned.unload()
    in_java = java_client(provisioned).retrying_consumer(provisioned.policy)
    message = in_java.receive()
    assert message.value == payload
    assert message.properties["RECONSUMETIMES"] == "1"
    in_java.reconsume_later(message)
    wait_until_chunks_are_dispatched(provisioned)
    in_java.close()
    provisioned.unload()
    consumer = provisioned.consumer()
    third = consumer.receive(SOON)
    assert consumer.attempt_of(third).number == 3
    consumer.reconsume_later(third)
    consumer.close()
    assert dead_letter_in_java(provisioned, java_client(provisioned, SUPERUSER)).value == payload
    provisioned.wait_until_settled()


def test_both_name_the_messages_of_a_batch_alike(
    provision_policy: ProvisionPolicy, java_client: MakeClient
) -> None:
    provisioned = provision_policy(max_retries=1)
    producer = provisioned.client(SUPERUSER).create_producer(
        str(provisioned.policy.topic), batching_enabled=True, batching_max_publish_delay_ms=60_000
    )
    for content in (b"0", b"1"):
        producer.send_async(content, lambda *_: None)
    producer.flush()
    in_java = java_client(provisioned).retrying_consumer(provisioned.policy)
    by_java, rest = in_java.receive(), in_java.receive()
    in_java.reconsume_later(by_java)
    in_java.close()
    consumer = provisioned.consumer()
    origins = set()
    for _ in range(3):  # the broker delivers the whole batch again, and the retry of Java
        message = consumer.receive(SOON)
        origins.add((message.data(), consumer.attempt_of(message).origin))
        consumer.acknowledge(message)

    assert origins == {(b"0", by_java.id), (b"1", rest.id)}


def test_java_with_json_schema_works_once_schema_is_copied(
    provision_policy: ProvisionPolicy, java_client: MakeClient
) -> None:
    provisioned = provision_policy(max_retries=2)
    client = java_client(provisioned)
    for topic in (
        provisioned.policy.topic,
        provisioned.policy.retry_topic,
        provisioned.policy.dead_letter_topic,
    ):
        _give_schema(provisioned, client, str(topic))
    provisioned.send(json.dumps({"retentionTimeInMinutes": 7, "retentionSizeInMB": 1}).encode())
    consumer = provisioned.consumer()
    consumer.reconsume_later(consumer.receive(SOON))
    consumer.close()

    in_java = client.retrying_consumer(provisioned.policy, schema=client.json())
    for count in ("1", "2"):
        message = in_java.receive()
        assert message.value.getRetentionTimeInMinutes() == 7
        assert message.properties["RECONSUMETIMES"] == count
        in_java.reconsume_later(message)

    reader = java_client(provisioned, SUPERUSER)
    dead = dead_letter_in_java(provisioned, reader, reader.json())
    assert dead.value.getRetentionTimeInMinutes() == 7
    assert dead.properties["RECONSUMETIMES"] == "3"
    in_java.close()
    provisioned.wait_until_settled()


def test_retry_topic_of_plain_bytes_refuses_java_json(
    provision_policy: ProvisionPolicy, java_client: MakeClient
) -> None:
    provisioned = provision_policy()
    client = java_client(provisioned)
    _give_schema(provisioned, client, str(provisioned.policy.topic))
    provisioned.send(b"{}")
    consumer = provisioned.consumer()
    consumer.reconsume_later(consumer.receive(SOON))

    with pytest.raises(JavaRefusedError, match="IncompatibleSchemaException"):
        client.retrying_consumer(provisioned.policy, schema=client.json())


@pytest.mark.parametrize("names", [[], ["retry"], ["dead-letter"]])
def test_java_consumers_with_default_names_are_refused(
    provision_policy: ProvisionPolicy, java_client: MakeClient, names: list[str]
) -> None:
    provisioned = provision_policy()
    with pytest.raises(JavaRefusedError, match=r"AuthorizationException.*Get Partition Metadata"):
        java_client(provisioned).retrying_consumer(provisioned.policy, names=names)


def _give_schema(provisioned: ProvisionedPolicy, client: JavaClient, topic: str) -> None:
    """Give *topic* the schema of `JavaClient.json`, as the operator copies that of the source."""
    info = client.json().getSchemaInfo()
    provisioned.broker.request(
        "POST",
        f"/admin/v2/schemas/{topic.removeprefix('persistent://')}/schema",
        {"type": "JSON", "schema": info.getSchemaDefinition(), "properties": {}},
    ).check(f"give {topic} a schema")
