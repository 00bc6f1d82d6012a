"""Java and replays: Java decodes replayed messages, and a Replay follows their outcomes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from redrive.auth.method import ACCESS_VARIABLE, BrokerAccess, Method
from redrive.policy.envelope import CAUSE_TYPE
from redrive.policy.naming import LEDGER_SUBSCRIPTION
from redrive.reading.positions import EntryId
from redrive.replay.account import Account
from redrive.replay.job import run as runs
from redrive.replay.job.outcomes import MessageOutcomes, follow
from redrive.replay.job.plan import DesiredState, Pause, Scanned
from redrive.replay.spec import ReplayJob
from sandbox.pulsar import SUPERUSER, Broker
from tests.contract.java.test_schemas import (
    FIRST,
    KINDS,
    SECOND,
    definition,
    give_schema,
    record,
    text,
    typed,
)
from tests.support.java import JavaClient
from tests.support.local_engine import Local
from tests.support.provisioned_policy import ProvisionedPolicy

pytestmark = pytest.mark.xdist_group("java")
ProvisionPolicy = Callable[..., ProvisionedPolicy]
MakeClient = Callable[..., JavaClient]


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
