"""The topics of a Replay: settings that block it, schemas of messages, and the ledger."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pulsar
import pulsar.schema
import pytest

from redrive.auth.files import job_credentials
from redrive.auth.method import ACCESS_VARIABLE
from redrive.errors import RedriveError
from redrive.messages import schema_version
from redrive.policy.naming import TopicName
from redrive.reading.positions import EntryId
from redrive.reading.ranges import Range
from redrive.replay import ledger as ledger_module
from redrive.replay.job import run as runs
from redrive.replay.ledger import FencedError, Lease, Ledger, mounted_key, read
from redrive.replay.records import Header, Permit, RangeRecord, header_key, range_key
from redrive.replay.spec import Choice
from sandbox import builds
from sandbox.kubernetes import Cluster
from sandbox.pulsar import SUPERUSER
from tests.support.documented import AUDIT, ROOT, commands
from tests.support.engines import Local
from tests.support.local_runs import DiesAtLast, Notes, job_of, replay, wait_until_moved
from tests.support.topics import compact_topic, enforce_schemas

pytestmark = pytest.mark.usefixtures("replay_token", "pulsar_namespace")

ProvisionPolicy = Callable[..., Any]


def set_on_namespace(provisioned: Any, setting: str, value: object) -> None:  # noqa: ANN401
    path = f"/admin/v2/namespaces/{provisioned.policy.topic.namespace_name}/{setting}"
    provisioned.broker.request("POST", path, value).check(f"set {setting}")


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("encryptionRequired", True, "EncryptionRequired"),
        ("subscriptionTypesEnabled", ["Shared", "Key_Shared"], "SubscriptionTypeNotAllowed"),
        ("maxProducersPerTopic", 1, "LimitReached"),
        ("maxSubscriptionsPerTopic", 1, "LimitReached"),
    ],
)
def test_setting_that_refuses_a_replay_is_named_at_once(
    provision_policy: ProvisionPolicy, setting: str, value: object, reason: str
) -> None:
    provisioned = provision_policy()
    provisioned.bury(1)
    busy = provisioned.client.create_producer(str(provisioned.policy.retry_topic))
    set_on_namespace(provisioned, setting, value)
    begun = time.monotonic()

    with pytest.raises(RedriveError, match=setting) as failure:
        replay(provisioned)

    assert failure.value.reason == reason
    assert time.monotonic() - begun < 60
    busy.close()


@pytest.mark.parametrize(
    ("topic", "limit", "setting"),
    [
        ("retry_topic", "maxProducers", "maxProducersPerTopic"),
        ("dead_letter_topic", "maxConsumers", "maxConsumersPerTopic"),
        ("dead_letter_topic", "maxSubscriptionsPerTopic", "maxSubscriptionsPerTopic"),
        ("dead_letter_topic", "maxConsumersPerSubscription", "maxConsumersPerSubscription"),
    ],
)
def test_limit_of_a_topic_that_refuses_a_replay_is_named(
    provision_policy: ProvisionPolicy, topic: str, limit: str, setting: str
) -> None:
    provisioned = provision_policy()
    provisioned.bury(1)
    policy, client = provisioned.policy, provisioned.client
    busy = [
        client.create_producer(str(policy.retry_topic)),
        client.subscribe(
            str(policy.dead_letter_topic),
            policy.dead_letter_subscription,
            pulsar.ConsumerType.Shared,
        ),
    ]
    provisioned.change_policy("POST", getattr(policy, topic), limit, 1)
    begun = time.monotonic()

    with pytest.raises(RedriveError, match=setting):
        replay(provisioned)

    assert time.monotonic() - begun < 60
    for one in busy:
        one.close()


@pytest.mark.parametrize("role", ["retry_topic", "ledger_topic"])
def test_terminated_topic_ends_a_replay_with_its_name(
    provision_policy: ProvisionPolicy, role: str
) -> None:
    provisioned = provision_policy()
    provisioned.bury(1)
    topic = getattr(provisioned.policy, role)
    provisioned.admin("POST", topic, "terminate")

    with pytest.raises(RedriveError, match=topic.local) as failure:
        replay(provisioned)

    assert failure.value.reason == "TopicTerminated"


@pytest.mark.parametrize("role", ["retry_topic", "ledger_topic"])
def test_topic_terminated_under_a_replay_ends_it(
    provision_policy: ProvisionPolicy, role: str
) -> None:
    provisioned = provision_policy()
    provisioned.bury_many(600)
    topic = getattr(provisioned.policy, role)
    job = dataclasses.replace(job_of(provisioned), rate_limit=20.0)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(runs.run, job, Local(), Notes())
        wait_until_moved(provisioned, 20)
        provisioned.admin("POST", topic, "terminate")
        begun = time.monotonic()
        with pytest.raises(RedriveError, match=topic.local) as failure:
            running.result(120)

    assert failure.value.reason == "TopicTerminated"
    assert time.monotonic() - begun < 60


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
        enforce_schemas(provisioned.broker, provisioned.policy.topic)
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
        enforce_schemas(provisioned.broker, provisioned.policy.topic)
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


def test_compaction_leaves_nothing_of_a_removed_record(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    url, topic = provisioned.broker.service_url, provisioned.policy.ledger_topic
    with Ledger.open(url, topic, "first") as ledger:
        for uid in ("one", "two"):
            ledger.write(header_key(uid), Header("shop/again", 0).to_json())
        ledger.write(header_key("two"), None)
    assert compact_topic(provisioned.broker, topic) == 2
    with Ledger.open(url, topic, "second") as ledger:
        assert ledger.records.headers.keys() == {"one"}
        ledger.write(header_key("one"), None)
    assert compact_topic(provisioned.broker, topic) == 1
    # It ends, though the last record is gone.
    assert read(provisioned.client, topic, mounted_key()).owner == "second"
    with Ledger.open(url, topic, "third") as ledger:
        assert ledger.records.headers.keys() == set()
        assert ledger.records.owner == "third"


def test_ledger_is_owned_once_earlier_tasks_are_fenced(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task of an earlier run may send until the next run has read the ledger."""
    provisioned = provision_policy()
    url, topic, key = provisioned.broker.service_url, provisioned.policy.ledger_topic, mounted_key()
    source_range = Range(-1, 7, 0, 9_999)
    with Ledger.open(url, topic, "first") as first:
        stored = first.write(range_key(source_range), RangeRecord(1, leased=True).to_json())
        since = EntryId(stored.ledger_id(), stored.entry_id())
    lease = Lease(
        provisioned.client, topic, "first", key, [source_range], since, first.number, Permit()
    )
    read_ledger, checked = ledger_module._read, list[float]()  # noqa: SLF001  a step of `Ledger`

    def read_and_check(*arguments: Any) -> Any:  # noqa: ANN401
        reading = read_ledger(*arguments)
        lease.check()
        checked.append(time.monotonic())
        return reading

    monkeypatch.setattr(ledger_module, "_read", read_and_check)
    with closing(lease), Ledger.open(url, topic, "second") as second:
        assert second.owned_since >= checked[-1]
        with pytest.raises(FencedError):
            lease.check()


def test_the_records_stay_in_their_cluster(provision_policy: ProvisionPolicy) -> None:
    """They tell of entries by ids that those of another cluster have, too."""
    provisioned = provision_policy()
    broker, topic = provisioned.broker, provisioned.policy.ledger_topic
    with Ledger.open(broker.service_url, topic, "first") as ledger:
        stored = ledger.write(header_key("one"), Header("shop/again", 0).to_json())
    path = str(topic).replace("://", "/")
    entry = f"{path}/ledger/{stored.ledger_id()}/entry/{stored.entry_id()}"
    bearer = {"Authorization": f"Bearer {broker.token(SUPERUSER)}"}
    with closing(HTTPConnection(broker.address, broker.admin_port, timeout=30)) as connection:
        connection.request("GET", f"/admin/v2/{entry}", headers=bearer)
        assert connection.getresponse().headers["X-Pulsar-replicated-to"] == "__local__"


def test_documented_audit_commands_list_refused_messages(
    provision_policy: ProvisionPolicy,
    cluster: Cluster,
    kube_namespace: str,
    replay_token: str,
    tmp_path: Path,
) -> None:
    provisioned = provision_policy()
    provisioned.bury(3)
    provisioned.bury(2, replays=1)
    job = dataclasses.replace(job_of(provisioned), choice=Choice(max_replays=1))
    assert runs.run(job, Local(), Notes()).refused == 2
    cluster.kubectl(
        "--namespace", kube_namespace, "create", "secret", "generic", "pulsar-replayer",
        f"--from-literal=token={replay_token}",
    )  # fmt: skip
    cluster.kubectl(
        "--namespace", kube_namespace, "create", "secret", "generic", "orders-ledger",
        f"--from-literal=key={job_credentials().ledger_key().hex()}",
    )  # fmt: skip
    cluster.kubectl(
        "--namespace", kube_namespace, "label", "secret", "orders-ledger",
        "redrive.io/policy=orders-fulfilment",
    )  # fmt: skip

    shown = pasted(provisioned, cluster, kube_namespace, tmp_path)

    ids = [message.message_id() for message in provisioned.unacknowledged()]
    assert shown.splitlines() == [
        *(f"{at.ledger_id()}:{at.entry_id()}:-1 1 ReplayedTooOften tests/again" for at in ids),
    ]


def pasted(provisioned: Any, cluster: Cluster, namespace: str, folder: Path) -> str:  # noqa: ANN401
    """Run all commands of the page with the places of the test, and return their output."""
    script = "\n".join(block.text for block in commands(AUDIT))
    for written, here in (
        ("pulsar://pulsar:6650", provisioned.broker.service_url),
        ("http://pulsar:8080", provisioned.broker.admin_url),
        ("persistent://shop/prod", f"persistent://{provisioned.policy.topic.namespace_name}"),
        ("-n shop", f"-n {namespace}"),
    ):
        assert written in script
        script = script.replace(written, here)
    path = [str(Path(sys.executable).parent), str(builds.kubernetes()), os.environ["PATH"]]
    environment = os.environ | {
        "KUBECONFIG": str(cluster.kubeconfig),
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": str(ROOT / "operator"),
    }
    environment.pop(ACCESS_VARIABLE)
    run = subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", script],
        cwd=folder, env=environment, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout
