"""Inspections: operator, Job, one pod, status, and files in an object store."""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs, parquet

from redrive.inspection.export import destined_file
from redrive.inspection.payloads import MessageRecord
from redrive.inspection.sealing import Recipient
from redrive.policy.envelope import CAUSE_FINGERPRINT, CAUSE_MESSAGE, CAUSE_TYPE, REPLAYS
from redrive.policy.naming import TopicName
from sandbox import installation, process, toolchain, versions
from tests.support.reasons import raises
from tests.support.replay_shop import SECONDS, Shop, check_no_token_leaked, shop
from tests.support.topics import tell
from tests.support.waiting import wait_until

__all__ = ["shop"]

FINGERPRINT = "9f31c2aa00112233"
KEYS = {"access-key-id": "archivist", "secret-access-key": "of-the-archive"}


@contextmanager
def s3_server() -> Iterator[str]:
    """Start a server with the API of S3, as a process on a free port; yield its URL."""
    program = toolchain.python_environment(versions.MOTO_LOCK) / "bin" / "moto_server"
    port = process.free_port()
    command = [str(program), "--host=127.0.0.1", f"--port={port}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:

        def serves() -> bool:
            assert server.poll() is None
            with socket.socket() as client:
                return client.connect_ex(("127.0.0.1", port)) == 0

        try:
            wait_until(serves)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


class Planted:
    """Personal data in the messages of a topic, which no log and no object may contain."""

    def __init__(self) -> None:
        self.data: list[str] = []

    def text(self, kind: str) -> str:
        self.data.append(f"{kind}-{secrets.token_hex(6)}")
        return self.data[-1]

    def bury(self, shop: Shop, topic: TopicName, count: int, cause: str, **more: str) -> None:
        client = shop.client()
        producer = client.create_producer(str(topic))
        for _ in range(count):
            properties = {
                CAUSE_TYPE: cause,
                CAUSE_MESSAGE: f"no stock for {self.text('mail')}",
                "customer": self.text("customer"),
                **more,
            }
            producer.send(self.text("payload").encode(), properties, partition_key=self.text("key"))
        client.close()

    def leaks(self, shop: Shop) -> list[str]:
        """Return the texts with planted data, of all logs of the run and all of its objects."""
        logs = (shop.sandbox.state / "spark" / shop.name).glob("*.log")
        texts = [(path.name, path.read_text()) for path in logs]
        texts.append(("operator", operator_log(shop)))
        kinds = "insp,job,rpol,bconn,event,cm"
        texts.append((kinds, shop.kubectl("get", kinds, "-o", "yaml", "--show-managed-fields")))
        assert len(texts) >= 3
        return [name for name, text in texts if any(part in text for part in self.data)]


def operator_log(shop: Shop) -> str:
    return shop.sandbox.processes.log(installation.OPERATOR).read_text()


def audit_records(shop: Shop, name: str) -> list[dict[str, Any]]:
    lines = map(json.loads, operator_log(shop).splitlines())
    texts = (line["message"] for line in lines if line["logger"] == "redrive.audit")
    records = (json.loads(text.partition(": ")[2]) for text in texts)
    return [record for record in records if record.get("inspection") == f"{shop.name}/{name}"]


def backlogs(shop: Shop, topic: TopicName) -> dict[str, int]:
    subscriptions = tell(shop.sandbox.pulsar, topic, "stats")["subscriptions"]
    return {name: s["msgBacklog"] for name, s in subscriptions.items()}


@pytest.mark.timeout(2 * SECONDS + 60)
def test_inspection_counts_causes_and_consumes_nothing(shop: Shop, tmp_path: Path) -> None:
    planted = Planted()
    shop.declare_inspection(destinations=[{"name": "archive", "uri": f"file://{tmp_path}"}])
    topic = shop.policy.dead_letter_topic
    planted.bury(shop, topic, 5, "WarehouseDown", **{CAUSE_FINGERPRINT: FINGERPRINT, REPLAYS: "1"})
    planted.bury(shop, topic, 3, "JSONDecodeError")

    export = {"destination": "archive", "format": "JSONLines"}
    shop.inspect("morning", reason="the alert", ticket="OPS-1", export=export)
    status = shop.inspection("morning")
    recipient = Recipient()
    messages = {"recipient": recipient.public_key, "limit": 1}
    shop.inspect("narrow", select={"causes": ["JSONDecodeError"]}, newest=2, messages=messages)
    narrow = shop.inspection("narrow")

    assert (status["phase"], status["Complete"]["reason"]) == ("Completed", "Completed")
    run = status["run"]
    assert [run[n] for n in ("totalEntries", "messages", "matched", "distinctKeys")] == [8, 8, 8, 8]
    assert [(c["cause"], c["messages"], c["replayed"]) for c in run["causes"]] == [
        ("WarehouseDown", 5, 5),
        ("JSONDecodeError", 3, 0),
    ]
    assert run["causes"][0]["fingerprint"] == FINGERPRINT
    assert (narrow["run"]["plannedEntries"], narrow["run"]["truncated"]) == (2, True)
    uid = shop.kubectl("get", "inspection/narrow", "-o", "jsonpath={.metadata.uid}")
    (message,) = recipient.open(narrow["run"]["sealed"], uid, MessageRecord)
    assert (message["cause"], message["payloadEncoding"]) == ("JSONDecodeError", "masked")
    assert [part for part in planted.data if part in str(message)] == []
    (file,) = (tmp_path / shop.name / "orders").iterdir()
    assert run["file"] == f"file://{file}"
    assert len(file.read_text("utf-8").splitlines()) == 8
    assert [part for part in planted.data if part in file.read_text("utf-8")] == []
    jobs = {job["metadata"]["name"]: job for job in shop.applications("job")}
    pod = jobs[status["job"]]["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "redrive-inspection"
    assert "pulsar-replayer" not in str(jobs)
    wait_until(lambda: backlogs(shop, topic) == {"redrive": 8})  # without closed readers
    (record,) = audit_records(shop, "morning")
    assert (record["reason"], record["ticket"], record["result"]) == (
        "the alert",
        "OPS-1",
        "Completed",
    )
    assert (record["policy"], record["messages"]) == ("orders", 8)
    check_no_token_leaked(shop)
    assert planted.leaks(shop) == []


@pytest.mark.timeout(2 * SECONDS + 60)
def test_waiting_retries_need_permission_of_connection(shop: Shop) -> None:
    planted = Planted()
    shop.declare_inspection()
    planted.bury(shop, shop.policy.retry_topic, 2, "Throttled")
    recipient = Recipient()
    messages = {"recipient": recipient.public_key, "payload": "Clear"}
    shop.inspect("waiting", "admin", **{"from": "Retry", "messages": messages})
    shop.inspect("refused", "admin", messages=messages)
    waiting = shop.inspection("waiting", "RetriesNotInspected")
    refused = shop.inspection("refused")
    shop.declare_inspection(retryTopics="Allowed", clearPayloads="Allowed")

    status = shop.inspection("waiting")

    assert (waiting["phase"], refused["phase"]) == ("Pending", "Failed")
    assert refused["Failed"]["reason"] == "ClearTextNotPermitted"
    started, *_ = audit_records(shop, "waiting")
    assert (started["requestedBy"], started["reveals"]) == ("admin", True)
    uid = shop.kubectl("get", "inspection/waiting", "-o", "jsonpath={.metadata.uid}")
    opened = recipient.open(status["run"]["sealed"], uid, MessageRecord)
    assert all(part in str(opened) for part in planted.data)
    assert [(c["cause"], c["messages"]) for c in status["run"]["causes"]] == [("Throttled", 2)]
    assert planted.leaks(shop) == []


@pytest.mark.timeout(2 * SECONDS + 60)
def test_failed_inspection_shows_error_of_its_job(shop: Shop) -> None:
    shop.declare_inspection()
    token = shop.sandbox.pulsar.token("stranger")
    shop.lend("Secret", "pulsar-inspector", stringData={"token": token})
    shop.inspect("refused")

    status = shop.inspection("refused")

    assert status["Failed"]["reason"] == "InspectionFailed"
    assert "TopicUnreadable" in status["Failed"]["message"]
    assert status["run"]["failure"]["reason"] == "TopicUnreadable"
    assert not status["run"].get("causes")
    shop.inspect("refused", ttlAfterFinished="1s")
    shop.kubectl("wait", "--for=delete", "inspection/refused", f"--timeout={SECONDS}s")
    shop.kubectl("wait", "--for=delete", f"job/{status['job']}", f"--timeout={SECONDS}s")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture(scope="module")
def store(url: str) -> fs.S3FileSystem:
    """A client of the store, whose bucket `archive` exists."""
    access, secret = KEYS.values()
    store = fs.S3FileSystem(
        access_key=access,
        secret_key=secret,
        endpoint_override=url.removeprefix("http://"),
        scheme="http",
        allow_bucket_creation=True,
    )
    store.create_dir("archive")
    return store


def files(store: fs.S3FileSystem, folder: str) -> dict[str, int]:
    """Return the names of all files below a folder, with their sizes."""
    selector = fs.FileSelector(folder, recursive=True, allow_not_found=True)
    return {f.path: f.size for f in store.get_file_info(selector) if f.type is fs.FileType.File}


def test_file_of_many_parts_is_complete_or_absent(url: str, store: fs.S3FileSystem) -> None:
    name, part = "archive/shop/orders/now.jsonl", bytes(6 * 2**20)
    with destined_file(f"s3://{name}", url, KEYS) as file:
        for _ in range(4):
            file.write(part)
        assert name not in files(store, "archive/shop")
    assert files(store, "archive/shop") == {name: 4 * len(part)}
    with (
        pytest.raises(ValueError, match="invalid literal"),
        destined_file(f"s3://{name}", url, KEYS) as file,
    ):
        file.write(int("x").to_bytes())
    assert files(store, "archive/shop") == {name: 4 * len(part)}
    problem = "got 'NO_SUCH_BUCKET'; check the destination"
    with (
        raises("NotExported", match=problem),
        destined_file("s3://absent/now.jsonl", url, KEYS) as file,
    ):
        file.write(part)


@pytest.mark.timeout(2 * SECONDS)
def test_inspection_writes_parquet_to_store(shop: Shop, url: str, store: fs.S3FileSystem) -> None:
    shop.lend("Secret", "archive-keys", stringData=KEYS)
    archive = {"endpointURL": url, "secretRef": {"name": "archive-keys"}}
    shop.declare_inspection(
        destinations=[
            {"name": "archive", "uri": "s3://archive/prod", **archive},
            {"name": "absent", "uri": "s3://absent/prod", **archive},
        ]
    )
    shop.bury(5, "WarehouseDown")
    shop.inspect("kept", export={"destination": "archive", "format": "Parquet"})
    shop.inspect("lost", export={"destination": "absent", "format": "JSONLines"})

    kept, lost = shop.inspection("kept"), shop.inspection("lost")

    (name,) = files(store, f"archive/prod/{shop.name}")
    assert kept["run"]["file"] == f"s3://{name}"
    rows = parquet.read_table(name, filesystem=store).to_pylist()
    assert [row["cause"] for row in rows] == ["WarehouseDown"] * 5
    assert "NO_SUCH_BUCKET" in lost["Failed"]["message"]
    assert lost["run"]["failure"]["reason"] == "NotExported"
