"""`redrive causes` and `peek` at a real broker: they read everything and consume nothing."""

from __future__ import annotations

import json
import shlex
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pulsar
import pytest
from pyarrow import parquet

from redrive.auth.files import job_credentials
from redrive.auth.method import ShownCredentials
from redrive.cli.main import main
from redrive.inspection import reader as inspection_reader
from redrive.policy.envelope import CAUSE_FINGERPRINT, CAUSE_MESSAGE, CAUSE_TYPE, REPLAYS
from redrive.policy.naming import TopicName
from redrive.reading import reader as reading_reader
from redrive.reading.frames import OutgoingMessage
from redrive.reading.positions import encode_nested
from redrive.reading.session import Session
from redrive.replay.job import run as runs
from redrive.replay.spec import Choice
from sandbox.pulsar import SUPERUSER, Broker
from tests.support.documented import READ, commands
from tests.support.engines import Local
from tests.support.local_runs import Notes, job_of, numbers
from tests.support.raw_entries import HARMFUL, RawEntry, chunk, store
from tests.support.reasons import raises
from tests.support.topics import stats
from tests.support.waiting import wait_until

ProvisionPolicy = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("replay_token")
POLICY = """\
apiVersion: redrive.io/v1beta1
kind: RetryPolicy
metadata: {{name: orders}}
spec:
  connectionRef: {{name: main}}
  topic: {topic}
  subscription: {subscription}
"""
AVRO = {
    "type": "record",
    "name": "Order",
    "fields": [{"name": "id", "type": "long"}, {"name": "mail", "type": "string"}],
}
ANN = "ann@example.com"
CAUSE = {CAUSE_TYPE: "WarehouseDown", CAUSE_FINGERPRINT: "9f31c2aa00112233"}


class Commands:
    """The commands, for one provisioned policy, with the token of a role that may consume."""

    def __init__(
        self,
        provisioned: Any,  # noqa: ANN401
        token: str,
        folder: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        policy, broker = provisioned.policy, provisioned.broker
        self._file, token_file = folder / "policy.yaml", folder / "token"
        manifest = POLICY.format(topic=policy.topic, subscription=policy.subscription)
        self._file.write_text(manifest, "utf-8")
        token_file.write_text(token, "utf-8")
        urls = ["--service-url", broker.service_url, "--admin-url", broker.admin_url]
        self._direct = ["--direct", *urls, "--token-file", str(token_file)]
        self._capsys = capsys

    def run(self, command: str, *arguments: str, code: int = 0) -> str:
        assert main([command, str(self._file), *self._direct, *arguments]) == code
        captured = self._capsys.readouterr()
        return captured.err if code else captured.out

    def read(self, command: str, *arguments: str) -> Any:  # noqa: ANN401  JSON
        return json.loads(self.run(command, *arguments, "-o", "json"))


@pytest.fixture
def provision(
    provision_policy: ProvisionPolicy,
    replay_token: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[Any, Commands]]:
    def provision_one(**options: int) -> tuple[Any, Commands]:
        provisioned = provision_policy(**options)
        return provisioned, Commands(provisioned, replay_token, tmp_path, capsys)

    return provision_one


def bury_avro(broker: Broker, topic: TopicName) -> None:
    """Store a message that has an Avro schema."""
    path = f"/admin/v2/schemas/{topic.namespace_name}/{topic.local}/schema"
    schema = {"type": "AVRO", "schema": json.dumps(AVRO), "properties": {}}
    broker.request("POST", path, schema).check("put the schema")
    shown = ShownCredentials("token", lambda: broker.token(SUPERUSER))
    with closing(Session[None](broker.service_url, shown)) as session:
        producer = session.open(str(topic), "avro", (str(topic), None))
        value = b"\x22" + bytes([2 * len(ANN)]) + ANN.encode()
        producer.send(OutgoingMessage(1, value, CAUSE, ANN, None, None), None)
        assert [sent.stored for sent in session.receive(60)] == [True]


def bury_mixed(provisioned: Any) -> None:  # noqa: ANN401
    """Store dead letters of each form; all but one hold the address of a person."""
    topic = provisioned.policy.dead_letter_topic
    personal = {**CAUSE, CAUSE_MESSAGE: f"no customer {ANN}", "reply-to": ANN}
    content = json.dumps({"customer": {"mail": ANN}, "items": [1, 2]}).encode()
    producer = provisioned.client.create_producer(
        str(topic), batching_enabled=False, compression_type=pulsar.CompressionType.ZSTD
    )
    producer.send(content, properties=personal, partition_key=ANN)
    producer.send(ANN.encode() + b"\xff", properties=CAUSE)
    producer.send(None, properties={**CAUSE, REPLAYS: "2"})
    producer.send(b"from Java")
    provisioned.bury_batch("JSONDecodeError", "WarehouseDown", "JSONDecodeError")
    hostile = encode_nested(4, encode_nested(1, b"\xff") + encode_nested(2, b"\xfe"))
    parts = [chunk("whole", n, 2, 8, content) for n, content in enumerate((b'{"a"', b": 1}"))]
    total = [part._replace(metadata=part.metadata) for part in parts]
    entries = [RawEntry(hostile), *total, HARMFUL["a batch of 2 that holds 1"]]
    store(provisioned.broker, topic, entries)
    bury_avro(provisioned.broker, topic)


def state(provisioned: Any) -> Any:  # noqa: ANN401
    """Return the subscriptions of the dead-letter topic, with their backlogs and positions."""
    internal = json.loads(
        provisioned.admin("GET", provisioned.policy.dead_letter_topic, "internalStats")
    )
    backlog = stats(provisioned.broker, provisioned.policy.dead_letter_topic, "redrive")[
        "msgBacklog"
    ]
    positions = {
        name: (cursor["markDeletePosition"], cursor["individuallyDeletedMessages"])
        for name, cursor in internal["cursors"].items()
    }
    return backlog, positions


def test_each_form_of_dead_letter_is_read_and_masked(
    provision: Callable[..., tuple[Any, Commands]],
) -> None:
    provisioned, shell = provision()
    bury_mixed(provisioned)
    before = state(provisioned)

    summary = shell.read("causes")
    counts = {(item["cause"], item["fingerprint"]): item for item in summary["items"]}
    assert {cause: item["messages"] for cause, item in counts.items()} == {
        ("WarehouseDown", "9f31c2aa00112233"): 4,
        ("", ""): 3,  # of Java, hostile, and in chunks
        ("JSONDecodeError", ""): 2,
        ("WarehouseDown", ""): 1,
    }
    assert counts["WarehouseDown", "9f31c2aa00112233"]["replayed"] == 1
    assert counts["WarehouseDown", "9f31c2aa00112233"]["example"] == "no customer ?"
    assert (summary["read"], len(summary["malformedEntries"])) == (10, 1)

    masked = shell.run("peek", "-o", "json")
    assert ANN not in masked + shell.run("peek") + shell.run("causes")
    payloads = {(r["payloadForm"], r["payload"]) for r in json.loads(masked)["items"]}
    assert payloads == {
        ("JSON", '{"customer": {"mail": string(15)}, "items": [number x2]}'),
        ("JSON", '{"a": number}'),
        ("Avro", '{"id": number, "mail": string(15)}'),
        ("bytes", "bytes(16)"),
        ("text", "bytes(9)"),
        ("text", "bytes(3)"),
        ("text", "bytes(0)"),
        ("null", "null"),
    }
    clear = shell.read("peek", "--reveal", "--key", ANN)["items"]
    assert [json.loads(record["payload"]) for record in clear] == [
        {"id": 17, "mail": ANN},
        {"customer": {"mail": ANN}, "items": [1, 2]},
    ]
    (one,) = shell.read("peek", "--id", clear[1]["id"])["items"]
    assert one["id"] == clear[1]["id"]
    # The broker forgets a reader a moment after its connection has ended.
    wait_until(lambda: state(provisioned) == before, seconds=60)


def test_reading_disturbs_no_consumer_and_no_replay(
    provision: Callable[..., tuple[Any, Commands]],
) -> None:
    provisioned, shell = provision(dead_partitions=2)
    provisioned.bury_many(400)
    ended, readings = threading.Event(), []

    def read_often() -> None:
        while not ended.is_set():
            readings.append(shell.read("causes")["read"])
            readings.append(shell.read("peek", "--waiting", "--limit", "1")["read"])

    reader = threading.Thread(target=read_often)
    reader.start()
    try:
        assert runs.run(job_of(provisioned), Local(), Notes()).moved == 400
        messages = provisioned.replayed()
    finally:
        ended.set()
        reader.join()
    assert provisioned.ids(messages) == numbers(400)
    assert len(readings) >= 2
    policy = provisioned.policy
    waiting = stats(provisioned.broker, policy.retry_topic, policy.subscription)["msgBacklog"]
    assert (provisioned.backlog_of_dead_letters(), waiting) == (0, 0)
    assert shell.read("causes")["items"] == []
    provisioned.check_audit()


def test_commands_of_the_page_show_the_dead_letters(
    provision: Callable[..., tuple[Any, Commands]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    provisioned, _ = provision()
    provisioned.bury(2, "WarehouseDown", ANN.encode())
    script = "".join(b.text for b in commands(READ) if b.heading != "By pulsar-admin")
    for written, here in (
        ("pulsar://localhost:6650", provisioned.broker.service_url),
        ("http://localhost:8080", provisioned.broker.admin_url),
        ("reader.token", "token"),
    ):
        assert written in script
        script = script.replace(written, here)
    options, *lines = script.splitlines()
    monkeypatch.chdir(tmp_path)
    for line in lines:
        program, *arguments = shlex.split(line.replace("$direct", options.split("'")[1]))
        assert (program, main(arguments)) == ("redrive", 0)
    captured = capsys.readouterr()
    assert "WarehouseDown" in captured.out
    assert "no messages that wait for a retry" in captured.err
    exported = (tmp_path / "dead-letters.jsonl").read_text("utf-8")
    assert [json.loads(line)["payload"] for line in exported.splitlines()] == ["bytes(15)"] * 2
    assert parquet.read_table(tmp_path / "dead-letters.parquet").num_rows == 2
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "WarehouseDown" in page
    assert ANN not in captured.out + captured.err + exported + page


def test_topic_deleted_while_it_is_read_ends_the_command(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    provisioned = provision_policy()
    provisioned.bury_many(20)
    monkeypatch.setattr(inspection_reader, "SILENCE_SECONDS", 2.0)
    monkeypatch.setattr(reading_reader, "prefetch", lambda _: 2)
    policy, broker = provisioned.policy, provisioned.broker
    topic = inspection_reader.InspectedTopic(
        policy.dead_letter_topic,
        policy.dead_letter_subscription,
        broker.service_url,
        broker.admin_url,
        job_credentials(),
    )
    rows = topic.plan(Choice()).selected(list)
    next(rows)
    provisioned.delete(policy.dead_letter_topic)
    with raises("TopicUnreadable", match="nothing for 2 s"):
        list(rows)


def test_refused_token_is_named(
    provision: Callable[..., tuple[Any, Commands]], broker: Broker, tmp_path: Path
) -> None:
    provisioned, shell = provision()
    provisioned.bury(1)
    (tmp_path / "token").write_text(broker.token("stranger"), "utf-8")
    error = shell.run("causes", code=1)
    topic = provisioned.policy.dead_letter_topic
    assert error.startswith(f"error: {topic} can't be read; got ")
    assert "use the token of a role that administers the tenant" in error
    (tmp_path / "token").write_text("none", "utf-8")
    assert "use credentials that are valid and not expired" in shell.run("causes", code=1)
