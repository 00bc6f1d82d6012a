"""A replayed message has the schema that it was written with."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pulsar
import pulsar.schema
import pytest

from redrive.messages import schema_version
from redrive.policy.naming import TopicName
from redrive.replay.job import run as runs
from tests.support.local_runs import DiesAtLast, Notes, job_of, replay
from tests.support.schemas import enforce

ProvisionPolicy = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("replay_token", "pulsar_namespace")


def record(**fields: pulsar.schema.Field) -> type[pulsar.schema.Record]:
    """A version of one type of record; any two are compatible."""
    made: type[pulsar.schema.Record] = type("Order", (pulsar.schema.Record,), fields)
    return made


NUMBER = pulsar.schema.Integer(required_default=True)
Before = record(number=NUMBER)
After = record(number=NUMBER, country=pulsar.schema.String(required_default=True))
FIRST, SECOND = pulsar.schema.JsonSchema(Before), pulsar.schema.JsonSchema(After)
VALUES = {FIRST: Before(number=7), SECOND: After(number=7, country="DE"), None: b"bytes"}


def bury(provisioned: Any, *schemas: pulsar.schema.Schema | None) -> None:  # noqa: ANN401
    """Lay a message for each schema into the dead-letter topic; None is plain bytes."""
    opened: dict[Any, pulsar.Producer] = {}
    for number, schema in enumerate(schemas):
        if schema not in opened:
            opened[schema] = provisioned.client.create_producer(
                str(provisioned.policy.dead_letter_topic),
                schema=schema or pulsar.schema.BytesSchema(),
                batching_enabled=False,
            )
        opened[schema].send(VALUES[schema], properties={"id": f"{number:04}"})
    for producer in opened.values():
        producer.close()


def definitions(provisioned: Any, topic: TopicName) -> list[str]:  # noqa: ANN401
    """All versions of the schema of *topic*."""
    path = f"/admin/v2/schemas/{topic.namespace_name}/{topic.local}/schemas"
    answer = provisioned.broker.request("GET", path)
    answer.check("read schemas")
    return [version["data"] for version in json.loads(answer.body)["getSchemaResponses"]]


def written(provisioned: Any, topic: TopicName, messages: list[pulsar.Message]) -> list[Any]:  # noqa: ANN401
    """Return of each message its id, its bytes, and the schema they are to be read by."""
    schemas = definitions(provisioned, topic)
    versions = [schema_version(message) for message in messages]
    return sorted(
        (message.properties()["id"], message.data(), "" if at is None else schemas[at])
        for message, at in zip(messages, versions, strict=True)
    )


@pytest.mark.parametrize("enforced", [False, True])
@pytest.mark.parametrize(("partitions", "batch"), [(0, False), (2, False), (2, True)])
def test_each_message_keeps_the_schema_it_was_written_with(
    provision_policy: ProvisionPolicy, partitions: int, *, batch: bool, enforced: bool
) -> None:
    provisioned = provision_policy(partitions=partitions)
    order = random.Random(partitions)  # noqa: S311 - no secret
    bury(provisioned, *order.choices([FIRST, SECOND] + [None] * (not enforced), k=60))
    if enforced:
        enforce(provisioned.broker, provisioned.policy.topic)
    dead = written(provisioned, provisioned.policy.dead_letter_topic, provisioned.unacknowledged())
    # The retry topic counts versions of its own.
    provisioned.client.create_producer(str(provisioned.policy.retry_topic), schema=SECOND).close()

    account = replay(provisioned, batch=batch)

    assert (account.matched, account.moved) == (60, 60)
    assert written(provisioned, provisioned.policy.retry_topic, provisioned.replayed()) == dead
    provisioned.check_audit()


@pytest.mark.parametrize("enforced", [False, True])
def test_message_sent_before_a_crash_is_found_by_any_schema(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch, *, enforced: bool
) -> None:
    provisioned = provision_policy()
    bury(provisioned, *[FIRST, SECOND if enforced else None, SECOND] * 20)
    if enforced:
        enforce(provisioned.broker, provisioned.policy.topic)
    job = job_of(provisioned)

    with monkeypatch.context() as patch:
        patch.setattr("redrive.replay.job.dispatch.MAX_LOSSES", 1)
        with pytest.raises(RuntimeError, match="on record"):
            runs.run(job, DiesAtLast(), Notes())

    replay(provisioned, uid=job.uid)

    assert provisioned.in_target() == [f"{number:04}" for number in range(60)]
    provisioned.check_audit()


def test_schema_refused_by_retry_topic_refuses_only_its_own(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    bury(provisioned, None, FIRST, None, FIRST)
    retry = provisioned.policy.retry_topic
    path = f"/admin/v2/schemas/{retry.namespace_name}/{retry.local}/schema"
    other = {"type": "STRING", "schema": "", "properties": {}}
    provisioned.broker.request("POST", path, other).check("give the retry topic a schema")

    account = replay(provisioned)

    assert (account.matched, account.moved, account.refused) == (4, 2, 2)
    assert {refusal.cause for refusal in account.refusals} == {"SchemaRefused"}


def test_deleted_schema_refuses_its_messages_only(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    bury(provisioned, None, FIRST, None, FIRST)
    dead = provisioned.policy.dead_letter_topic
    path = f"/admin/v2/schemas/{dead.namespace_name}/{dead.local}/schema?force=true"
    provisioned.broker.request("DELETE", path).check("delete the schema")

    account = replay(provisioned)

    assert (account.matched, account.moved, account.refused) == (4, 2, 2)
    assert {refusal.cause for refusal in account.refusals} == {"SchemaNotFound"}
