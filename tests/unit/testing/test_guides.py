"""Code blocks of the guides, and the examples, run in memory."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import logging
import sys
import types
from collections.abc import Callable
from datetime import datetime, timedelta
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pulsar
import pytest

import redrive
from redrive import CrashLog
from redrive.inspection.payloads import MessageRecord
from redrive.messages import id_text
from redrive.policy import codec
from redrive.policy.ladder import Ladder
from redrive.policy.naming import TopicName
from redrive.testing.broker import InMemoryBroker
from redrive.testing.consumers import (
    AsyncInMemoryConsumer,
    InMemoryConsumer,
    InMemorySimpleConsumer,
)
from tests.support.consumers import leave_notes
from tests.support.documented import (
    CONSUME,
    CONSUMER_METRICS,
    FIRST_CONSUMER,
    FORKS,
    HANDLE,
    OUTAGES,
    POISON_MESSAGES,
    PROBES,
    README,
    block,
    blocks,
)

GUIDES = (CONSUME, POISON_MESSAGES, FORKS, HANDLE, OUTAGES)
SECTIONS = {block.heading: block.text for block in blocks(*GUIDES, language="python")}
WHOLE = {
    page: block(page, heading, "python")
    for page, heading in ((README, "A consumer"), (FIRST_CONSUMER, "On a broker"))
}
AT_A_BROKER = "Broadcast"
FORKED = "Example"  # likewise
EXPORTED = "With a dead letter of production"
HOSTILE = (b"", b"{}", b"[]", b"null", b"\xff", b"{", b"[" * 100_000)
GOOD = b'{"needs": "nothing"}'
POLICY = redrive.Policy(
    TopicName("shop", "prod", "orders"), "fulfilment", ladder=Ladder.from_fixed("20m")
)


KINDS = {
    "RetryConsumer": InMemoryConsumer,
    "AsyncRetryConsumer": AsyncInMemoryConsumer,
    "SimpleConsumer": InMemorySimpleConsumer,
}


class Harness:
    """A broker in memory in place of the one that examples name."""

    def __init__(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file.write_text(codec.encode(POLICY))
        monkeypatch.setenv("REDRIVE_POLICY", str(file))
        self.broker = InMemoryBroker(POLICY)
        self.handled: list[bytes] = []
        for name, kind in KINDS.items():
            monkeypatch.setattr(redrive, name, functools.partial(self._consumer, kind))

    def _consumer(
        self,
        kind: Callable[..., Any],
        _client: object,
        policy: redrive.PolicyFile,
        **options: Any,  # noqa: ANN401 - as a consumer takes them
    ) -> Any:  # noqa: ANN401 - of that kind
        return kind(policy, broker=self.broker, **options)

    def send(self, *contents: bytes) -> list[pulsar.MessageId]:
        """Produce messages for an example."""
        producer = InMemoryConsumer(POLICY, broker=self.broker)
        return [producer.send(content) for content in contents]

    def run(self, section: str, **names: object) -> dict[str, Any]:
        """Run the example of *section* with *names*, and return all its names."""
        namespace = {"client": None, "handle": lambda m: self.handled.append(m.data())} | names
        return self.execute(SECTIONS[section], namespace)

    def execute(self, code: str, names: dict[str, Any]) -> dict[str, Any]:
        """Run the code of a page with *names*, and return all its names."""
        exec(compile(code, "page", "exec"), names)  # noqa: S102 - our own guide
        return names


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Harness:
    return Harness(tmp_path / "policy.json", monkeypatch)


def test_every_guide_example_is_listed() -> None:
    assert list(SECTIONS) == [
        "With asyncio",
        "Request messages",
        AT_A_BROKER,
        "Add a crash log",
        FORKED,
        "Classify exceptions",
        "Schemas",
        "Retry later or dead-letter from the handler",
        "Use the attempt number",
        "Redact personal data",
        "Encryption",
        "Batches",
        "Receive in a loop of your own",
        "Rate limit and pause",
        "Prefetch",
        "Middleware",
        "Test a handler",
        EXPORTED,
        "Enable it",
        "Separate dependencies and causes",
    ]


@pytest.mark.parametrize(
    "section",
    [
        "Classify exceptions",
        "Redact personal data",
        "Batches",
        "Receive in a loop of your own",
        "Rate limit and pause",
        "Prefetch",
    ],
)
def test_hostile_messages_do_not_end_an_example(harness: Harness, section: str) -> None:
    done: list[bytes] = []

    def handle(message: pulsar.Message) -> None:
        json.loads(message.data())["needs"]
        done.append(message.data())

    class Table:
        def insert(self, rows: list[bytes]) -> dict[int, Exception]:
            done.extend(row for row in rows if row == GOOD)
            return {n: ValueError("no order") for n, row in enumerate(rows) if row != GOOD}

    harness.send(*HOSTILE, GOOD)
    harness.run(section, handle=handle, work=handle, table=Table())
    assert done == [GOOD]
    assert sorted(letter.data() for letter in harness.broker.dead_letters) == sorted(HOSTILE)
    assert harness.broker.unsettled() == []


async def test_hostile_messages_do_not_end_the_asyncio_example(harness: Harness) -> None:
    done: list[bytes] = []

    async def handle(message: pulsar.Message) -> None:
        json.loads(message.data())["needs"]
        done.append(message.data())

    harness.send(*HOSTILE, GOOD)
    await harness.run("With asyncio", handle=handle)["main"]()
    assert done == [GOOD]
    assert sorted(letter.data() for letter in harness.broker.dead_letters) == sorted(HOSTILE)
    assert harness.broker.unsettled() == []


def test_hostile_messages_do_not_end_a_simple_consumer(harness: Harness) -> None:
    done: list[bytes] = []

    def size_of(message: pulsar.Message) -> int:
        return len(json.loads(message.data())["needs"])

    def has_room() -> bool:
        return bool(harness.broker.unsettled())

    harness.send(*HOSTILE, b'{"needs": "%s"}' % (b"x" * 1_001), GOOD)
    harness.run(
        "Request messages",
        has_room=has_room, size_of=size_of, work=lambda message: done.append(message.data()),
        log=logging.getLogger("job"),
    )  # fmt: skip
    assert (len(done), done[-1]) == (2, GOOD)
    assert sorted(letter.data() for letter in harness.broker.dead_letters) == sorted(HOSTILE)


def test_killer_message_is_dead_lettered_by_the_crash_log(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash_log(folder: str, max_redeliveries: int) -> redrive.CrashLog:
        assert folder == "/var/lib/redrive"
        return CrashLog(tmp_path, max_redeliveries)

    def handle(message: pulsar.Message) -> None:
        json.loads(message.data())["needs"]
        harness.handled.append(message.data())

    killer, *_ = harness.send(b"killer", *HOSTILE, GOOD)
    for _ in range(4):
        leave_notes(tmp_path, POLICY, id_text(killer))
    monkeypatch.setattr(redrive, "CrashLog", crash_log)
    harness.run("Add a crash log", handle=handle)
    assert harness.handled == [GOOD]
    reasons = {letter.data(): letter.properties() for letter in harness.broker.dead_letters}
    assert reasons.keys() == {b"killer", *HOSTILE}
    assert reasons[b"killer"]["REDRIVE_DEAD_REASON"] == "ConsumerCrash"


def test_rules_example_decides_by_exception(harness: Harness) -> None:
    attempts: dict[str, list[timedelta]] = {"away": [], "late": []}
    began = harness.broker.clock.now()

    def handle(message: pulsar.Message) -> None:
        order = json.loads(message.data())
        attempts[order].append(harness.broker.clock.now() - began)
        raise ConnectionError if order == "away" and len(attempts[order]) == 1 else RuntimeError

    harness.send(b"{", b'"away"', b'"late"')
    harness.run("Classify exceptions", handle=handle)
    broken, late, away = harness.broker.dead_letters
    reasons = [letter.properties()["REDRIVE_DEAD_REASON"] for letter in (broken, late, away)]
    assert reasons == ["NotRetryable", "DeadlineExceeded", "DeadlineExceeded"]
    minutes = {name: [at / timedelta(minutes=1) for at in ats] for name, ats in attempts.items()}
    assert minutes == {"away": [0, 0.5, 20.5, 40.5], "late": [0, 20, 40, 60]}


def test_schema_example_hands_over_decoded_values(harness: Harness) -> None:
    shipped: list[int] = []
    harness.send(b"{", b'{"number": 7}', b"[7]")
    harness.run("Schemas", ship=shipped.append)
    assert shipped == [7]
    assert [letter.data() for letter in harness.broker.dead_letters] == [b"{", b"[7]"]


def test_handler_example_requests_retry_or_dead_letter(harness: Harness) -> None:
    class Shop:
        status, retry_after = 0, 90
        requests: list[datetime] = []  # noqa: RUF012 - one for one test

        def order(self, content: bytes) -> Shop:
            self.requests.append(harness.broker.clock.now())
            self.status = 404 if content == b"unknown" else 429 if len(self.requests) == 1 else 200
            return self

    harness.send(b"busy", b"unknown")
    harness.run("Retry later or dead-letter from the handler", shop=Shop())
    seconds = [(at - Shop.requests[0]).total_seconds() for at in Shop.requests]
    assert seconds == [0, 0, 90]
    (dead,) = harness.broker.dead_letters
    assert dead.properties()["REDRIVE_DEAD_REASON"] == "Requested"
    assert dead.properties()["REDRIVE_CAUSE_MESSAGE"] == "the shop does not know this customer"
    assert harness.broker.unsettled() == []


def test_attempt_example_alerts_at_the_third_attempt(harness: Harness) -> None:
    alerts: list[str] = []

    def ship(message: pulsar.Message) -> None:
        if message.data() == b"bad":
            raise ConnectionError

    harness.send(b"good", b"bad")
    harness.run("Use the attempt number", ship=ship, alert=alerts.append)
    (dead,) = harness.broker.dead_letters
    origin = dead.properties()["ORIGIN_MESSAGE_ID"]
    assert alerts == [f"order {origin} is at its third attempt"]


@pytest.mark.parametrize("section", ["Enable it", "Separate dependencies and causes"])
def test_outage_example_uses_up_no_retry(harness: Harness, section: str) -> None:
    began = harness.broker.clock.now()

    def handle(message: pulsar.Message) -> None:
        if harness.broker.clock.now() - began < timedelta(hours=1):
            raise ConnectionError
        harness.handled.append(message.data())

    harness.send(*[b"x"] * 50)
    harness.run(section, handle=handle)
    assert (len(harness.handled), harness.broker.dead_letters) == (50, [])


def test_redaction_example_hides_personal_data(harness: Harness) -> None:
    def handle(_message: pulsar.Message) -> None:
        raise ValueError("ann@example.com paid with 1234567812345678")

    harness.send(b"x")
    harness.run("Redact personal data", handle=handle)
    (dead,) = harness.broker.dead_letters
    properties = dead.properties()
    assert properties["REDRIVE_CAUSE_MESSAGE"] == "[redacted] paid with [redacted]"


def test_batch_example_retries_only_failed_messages(harness: Harness) -> None:
    class Table:
        def insert(self, rows: list[bytes]) -> dict[int, Exception]:
            batches.append(rows)
            return {1: ValueError("full")} if len(batches) == 1 else {}

    batches: list[list[bytes]] = []
    harness.send(b"1", b"2", b"3")
    harness.run("Batches", table=Table())
    assert batches == [[b"1", b"2", b"3"], [b"2"]]
    assert harness.broker.unsettled() == []


def test_receive_example_gets_unsettled_messages_again(harness: Harness) -> None:
    seen: list[bytes] = []

    def work(message: pulsar.Message) -> None:
        seen.append(message.data())
        if seen == [b"slow"]:
            harness.broker.clock.advance(timedelta(minutes=10))
        if seen == [b"slow", b"away"]:
            raise ConnectionError

    harness.send(b"slow", b"away")
    harness.run("Receive in a loop of your own", work=work)
    assert seen == [b"slow", b"away", b"away", b"slow"]
    assert harness.broker.unsettled() == harness.broker.dead_letters == []


def test_rate_example_delays_messages(harness: Harness) -> None:
    harness.send(*[b"x"] * 101)
    began = harness.broker.clock.now()
    harness.run("Rate limit and pause")
    assert len(harness.handled) == 101
    assert (harness.broker.clock.now() - began).total_seconds() == pytest.approx(2, abs=0.05)


def test_middleware_example_reports_every_attempt(harness: Harness) -> None:
    def handle(message: pulsar.Message) -> None:
        if message.data() == b"bad" and not reported.count(("failure", 1)):
            raise ConnectionError

    reported: list[tuple[str, float]] = []
    harness.send(b"good", b"bad")
    harness.run(
        "Middleware",
        handle=handle, report=lambda *values: reported.append(values),
    )  # fmt: skip
    names = "seconds success seconds failure seconds success"
    assert [name for name, _ in reported] == names.split()


def test_test_example_passes_and_can_fail(harness: Harness) -> None:
    attempts: list[pulsar.Message] = []

    def handle(message: pulsar.Message) -> None:
        attempts.append(message)
        if len(attempts) < 3:
            raise ConnectionError

    test = "test_order_is_retried_until_the_warehouse_answers"
    harness.run("Test a handler", handle=handle)[test]()
    assert len(attempts) == 3
    with pytest.raises(AssertionError):
        harness.run("Test a handler")[test]()


def test_exported_dead_letter_is_handled_again(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = {"payload": GOOD.decode(), "properties": [{"name": "till", "value": "1"}]}
    assert record.keys() <= MessageRecord.__annotations__.keys()
    (tmp_path / "dead-letters.jsonl").write_text(f"{json.dumps(record)}\n")
    monkeypatch.chdir(tmp_path)
    handled: list[pulsar.Message] = []
    test = "test_exported_dead_letters_are_handled"
    harness.run(EXPORTED, handle=handled.append)[test]()
    assert [(message.data(), message.properties()["till"]) for message in handled] == [(GOOD, "1")]
    with pytest.raises(AssertionError):
        harness.run(EXPORTED, handle=lambda message: json.loads(message.data())["missing"])[test]()


@pytest.mark.parametrize("page", WHOLE)
def test_whole_program_of_a_page_handles_a_message(
    harness: Harness, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client does not connect: the broker is in memory."""
    names = {"token": "t", "handle": lambda message: harness.handled.append(message.data())}
    handler = types.ModuleType("handler")
    handler.__dict__.update(names)
    monkeypatch.setitem(sys.modules, "handler", handler)
    harness.send(GOOD)
    harness.execute(WHOLE[page], names)["client"].close()
    assert harness.handled == [GOOD]


def test_probes_example_answers_while_it_consumes(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[int] = []

    class Server(ThreadingHTTPServer):
        def __init__(self, address: tuple[str, int], handler: Any) -> None:  # noqa: ANN401
            assert address == ("", 8080)
            super().__init__(("127.0.0.1", 0), handler)
            self.server_activate()
            ports.append(self.server_port)

    def handle(_message: pulsar.Message) -> None:
        with urlopen(f"http://127.0.0.1:{ports[0]}/", timeout=60) as answer:
            answers.append(answer.status)

    ports: list[int] = []
    monkeypatch.setattr(http.server, "ThreadingHTTPServer", Server)
    harness.send(GOOD)
    code = block(PROBES, "Serve probes", "python")
    harness.execute(code, {"client": None, "handle": handle})
    assert answers == [200]


@pytest.mark.parametrize(
    ("page", "heading"), [(CONSUMER_METRICS, "Metrics"), (CONSUMER_METRICS, "Traces")]
)
def test_observed_consumer_of_the_reference_handles(
    harness: Harness, page: str, heading: str
) -> None:
    handled: list[bytes] = []
    names = {
        "client": None,
        "handle": lambda message: handled.append(message.data()),
        "PolicyFile": redrive.PolicyFile,
        "RetryConsumer": redrive.RetryConsumer,
    }
    harness.send(GOOD)
    harness.execute(block(page, heading, "python"), names)
    assert handled == [GOOD]


ROOT = Path(__file__).parents[3]
HOSTILE_EXAMPLES = {
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
GOOD_EXAMPLE = b'{"items": [1], "needs": "nothing"}'
EXAMPLE_POLICY = redrive.Policy(
    TopicName("shop", "prod", "orders"),
    "fulfilment",
    max_retries=2,
    ladder=Ladder.from_fixed("20m"),
)


NOT_HANDLED = {
    "01-first-policy": {"nothing", "empty", "no such field", "no text", "too deep"},
    "02-deployment": {"no text"},
}
"""Contents that an example of a consumer of Pulsar has to refuse, by its folder."""
CONSUMERS = [ROOT / "examples" / folder / "consumer.py" for folder in NOT_HANDLED]


@pytest.mark.parametrize("file", CONSUMERS, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_example_program_dead_letters_hostile_messages(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = fed()
    run(file, broker, tmp_path, monkeypatch)
    dead = {letter.partition_key() for letter in broker.dead_letters}
    assert "good" not in dead
    assert NOT_HANDLED[file.parent.name] <= dead
    assert broker.unsettled() == []


def test_logging_example_handles_each_message_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = fed()
    log = run(ROOT / "examples/01-first-policy/consumer.py", broker, tmp_path, monkeypatch)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    done = {line["id"] for line in lines if line["outcome"] == "done"}
    dead = {letter.partition_key() for letter in broker.dead_letters}
    assert "good" in done
    assert len(lines) == len(done | dead) == len(HOSTILE_EXAMPLES) + 2


def fed() -> InMemoryBroker:
    """Return a broker with all hostile messages, and with a good one behind them."""
    broker = InMemoryBroker(EXAMPLE_POLICY)
    producer = InMemoryConsumer(EXAMPLE_POLICY, broker=broker)
    producer.send(None, partition_key="nothing")
    for name, content in HOSTILE_EXAMPLES.items():
        producer.send(content, partition_key=name)
    producer.send(GOOD_EXAMPLE, partition_key="good")
    return broker


def run(file: Path, broker: InMemoryBroker, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run the program on *broker* until no message remains; return its log file."""

    def consumer(_client: object, policy: redrive.PolicyFile, **options: Any) -> InMemoryConsumer:  # noqa: ANN401 - passed on
        return InMemoryConsumer(policy, broker=broker, **options)

    policy, token, log = folder / "policy.json", folder / "token", folder / "log"
    policy.write_text(codec.encode(EXAMPLE_POLICY))
    token.write_text("secret")
    monkeypatch.setattr(redrive, "RetryConsumer", consumer)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # that of the test run stays
    monkeypatch.setenv("REDRIVE_POLICY", str(policy))
    monkeypatch.setenv("PULSAR_URL", "pulsar://localhost:1")
    monkeypatch.setenv("PULSAR_TOKEN_FILE", str(token))
    monkeypatch.setattr("sys.argv", [str(file), f"--log={log}", f"--warehouse={folder / 'up'}"])
    spec = importlib.util.spec_from_file_location("example", file)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    program.main()
    return log
