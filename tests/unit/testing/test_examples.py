"""No message, whatever it holds, ends an example or keeps it from the messages behind."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

import redrive
from redrive.policy import codec
from redrive.policy.ladder import Ladder
from redrive.policy.naming import TopicName
from redrive.testing.broker import InMemoryBroker
from redrive.testing.consumers import InMemoryConsumer

ROOT = Path(__file__).parents[3]
CONSUMERS = sorted((ROOT / "examples").glob("*/consumer*.py"))
HOSTILE = {
    "empty": b"",
    "null": b"null",
    "no object": b"[]",
    "no such field": b"{}",
    "field of another type": b'{"needs": []}',
    "cut": b'{"needs": ',
    "no text": b"\xff\xfe\x00",
    "too deep": b"[" * 100_000,
    "number too long": b"9" * 10_000,
    "megabyte": b'"' + b"x" * 2**20 + b'"',
}
GOOD = b'{"items": [1], "needs": "nothing"}'
POLICY = redrive.Policy(
    TopicName("shop", "prod", "orders"),
    "fulfilment",
    max_retries=2,
    ladder=Ladder.from_fixed("20m"),
)


NOT_HANDLED = {
    "01-first-policy": {"nothing", "empty", "no such field", "no text", "too deep"},
    "02-deployment": {"no text"},
}
"""What an example has to refuse, by its folder."""


@pytest.mark.parametrize("file", CONSUMERS, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_hostile_messages_end_as_dead_letters_and_the_others_are_handled(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = fed()
    run(file, broker, tmp_path, monkeypatch)
    dead = {letter.partition_key() for letter in broker.dead_letters}
    assert "good" not in dead
    assert NOT_HANDLED[file.parent.name] <= dead
    assert broker.unsettled() == []


def test_the_example_that_logs_handles_each_message_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = fed()
    log = run(ROOT / "examples/01-first-policy/consumer.py", broker, tmp_path, monkeypatch)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    done = {line["id"] for line in lines if line["outcome"] == "done"}
    dead = {letter.partition_key() for letter in broker.dead_letters}
    assert "good" in done
    assert len(lines) == len(done | dead) == len(HOSTILE) + 2


def fed() -> InMemoryBroker:
    """Return a broker with all hostile messages, and with a good one behind them."""
    broker = InMemoryBroker(POLICY)
    producer = InMemoryConsumer(POLICY, broker=broker)
    producer.send(None, partition_key="nothing")
    for name, content in HOSTILE.items():
        producer.send(content, partition_key=name)
    producer.send(GOOD, partition_key="good")
    return broker


def run(file: Path, broker: InMemoryBroker, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run the program on *broker* until nothing is left to be handled; return where it may log."""

    def consumer(_client: object, policy: redrive.PolicyFile, **options: Any) -> InMemoryConsumer:  # noqa: ANN401 - passed on
        return InMemoryConsumer(policy, broker=broker, **options)

    policy, token, log = folder / "policy.json", folder / "token", folder / "log"
    policy.write_text(codec.encode(POLICY))
    token.write_text("secret")
    monkeypatch.setattr(redrive, "RetryConsumer", consumer)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # that of the test run stays
    monkeypatch.setenv("REDRIVE_POLICY", str(policy))
    monkeypatch.setenv("PULSAR_URL", "pulsar://localhost:1")
    monkeypatch.setenv("PULSAR_TOKEN_FILE", str(token))
    monkeypatch.setattr("sys.argv", [str(file), f"--log={log}", f"--warehouse={folder / 'up'}"])
    found = importlib.util.spec_from_file_location("example", file)
    assert found is not None
    assert found.loader is not None
    program = importlib.util.module_from_spec(found)
    found.loader.exec_module(program)
    program.main()
    return log
