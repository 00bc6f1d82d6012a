"""Entries that are sent to a real broker by its protocol."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pulsar
import pytest

from redrive.auth.method import ShownCredentials
from redrive.messages import read_properties, schema_version
from redrive.reading.frames import OutgoingMessage
from redrive.reading.session import BATCH_MESSAGES, ProtocolError, Sent, Session
from sandbox.pulsar import SUPERUSER, Broker

SECONDS, MILLIS = 60.0, 60_000
EACH_WAY = pytest.mark.parametrize("batches", [False, True], ids=["alone", "in batches"])


def message(
    sequence_id: int,
    value: bytes | None = b"order",
    **fields: Any,  # noqa: ANN401  those of `OutgoingMessage`
) -> OutgoingMessage:
    plain = OutgoingMessage(sequence_id, value, {}, None, None, None)
    return plain._replace(**fields)


@dataclass(frozen=True)
class Topic:
    """A topic whose namespace deduplicates."""

    broker: Broker
    name: str

    @contextmanager
    def session(self, *, batches: bool = False, role: str = SUPERUSER) -> Iterator[Session[int]]:
        shown = ShownCredentials("token", lambda: self.broker.token(role))
        with closing(Session[int](self.broker.service_url, shown, batches=batches)) as session:
            yield session

    @contextmanager
    def client(self) -> Iterator[pulsar.Client]:
        authentication = pulsar.AuthenticationToken(self.broker.token(SUPERUSER))
        quiet = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
        client = pulsar.Client(self.broker.service_url, authentication=authentication, logger=quiet)
        with closing(client):
            yield client

    def read(self) -> list[pulsar.Message]:
        """Return all messages, as the client has them."""
        with self.client() as client:
            reader = client.create_reader(self.name, pulsar.MessageId.earliest)
            messages = []
            while reader.has_message_available():
                messages.append(reader.read_next(MILLIS))
            return messages

    def ask(self, method: str, path: str, body: object = None) -> None:
        self.broker.request(method, f"{path_of(self.name)}/{path}", body).check(path)


@pytest.fixture
def topic(broker: Broker, pulsar_namespace: str) -> Topic:
    namespace = f"/admin/v2/namespaces/{pulsar_namespace}"
    broker.request("POST", f"{namespace}/deduplication", True).check("deduplicate")  # noqa: FBT003
    name = f"persistent://{pulsar_namespace}/orders"
    create(broker, name)
    return Topic(broker, name)


def path_of(topic: str) -> str:
    return f"/admin/v2/{topic.replace('://', '/')}"


def create(broker: Broker, topic: str) -> None:
    broker.request("PUT", path_of(topic)).check(f"create {topic}")


def answered(session: Session[int], count: int) -> list[Sent[int]]:
    """Return receipts until so many messages are answered."""
    receipts: list[Sent[int]] = []
    while sum(len(receipt.tags) for receipt in receipts) < count:
        came = session.receive(SECONDS)
        assert came
        receipts += came
    return receipts


def send(topic: Topic, sent: Sequence[OutgoingMessage], *, batches: bool) -> list[Sent[int]]:
    with topic.session(batches=batches) as session:
        producer = session.open(topic.name, "sender")
        for tag, message in enumerate(sent):
            producer.send(message, tag)
        return answered(session, len(sent))


@EACH_WAY
def test_a_message_arrives_with_all_it_has(topic: Topic, *, batches: bool) -> None:
    properties = {"id": "1", "ключ": "значение" * 40, "empty": ""}
    sent = [
        message(1, b"order", properties=properties, key="k", ordering_key="o", event_time=1_700),
        message(2, b""),
        message(3, None, key="gone"),
        message(4, b"long " * 1_000),
    ]
    receipts = send(topic, sent, batches=batches)
    assert [tag for receipt in receipts for tag in receipt.tags] == [0, 1, 2, 3]
    assert all(receipt.stored for receipt in receipts)
    messages = topic.read()
    first, empty, null, long = messages
    assert (first.data(), read_properties(first)) == (b"order", properties)
    assert (first.partition_key(), first.ordering_key()) == ("k", "o")
    assert first.event_timestamp() == 1_700
    assert first.producer_name() == "sender"
    assert not first.schema_version()
    assert (empty.data(), empty.has_null_value(), read_properties(empty)) == (b"", False, {})
    assert (null.has_null_value(), null.partition_key()) == (True, "gone")
    assert long.data() == b"long " * 1_000
    assert abs(first.publish_timestamp() - long.publish_timestamp()) < 60_000
    entries = {
        (message.message_id().ledger_id(), message.message_id().entry_id()) for message in messages
    }
    assert len(entries) == (1 if batches else 4)


@EACH_WAY
def test_stored_messages_are_recognized(topic: Topic, *, batches: bool) -> None:
    sent = [message(number) for number in range(1, 401)]
    assert all(receipt.stored for receipt in send(topic, sent, batches=batches))
    again = send(topic, sent, batches=batches)
    assert not any(receipt.stored for receipt in again)
    assert sum(len(receipt.tags) for receipt in again) == 400
    with topic.session(batches=batches) as session:
        producer = session.open(topic.name, "sender")
        assert producer.last_sequence_id == 400
        producer.send(message(401), 0)
        assert [receipt.stored for receipt in answered(session, 1)] == [True]
    assert len(topic.read()) == 401


def test_a_producer_that_has_sent_nothing_has_no_last_id(topic: Topic) -> None:
    with topic.session() as session:
        assert session.open(topic.name, "sender").last_sequence_id == -1


def test_batches_are_bounded(topic: Topic) -> None:
    count = 2 * BATCH_MESSAGES + 1
    receipts = send(topic, [message(number + 1, b"") for number in range(count)], batches=True)
    assert [len(receipt.tags) for receipt in receipts] == [BATCH_MESSAGES, BATCH_MESSAGES, 1]
    large = [message(count + number, bytes(50_000)) for number in range(1, 6)]
    assert [len(receipt.tags) for receipt in send(topic, large, batches=True)] == [2, 2, 1]
    assert len(topic.read()) == count + 5


@EACH_WAY
def test_messages_name_the_schema_they_were_written_with(topic: Topic, *, batches: bool) -> None:
    class Order(pulsar.schema.Record):  # type: ignore[misc]  # the client has no types
        number = pulsar.schema.Integer()

    source = f"{topic.name}-source"
    create(topic.broker, source)
    with topic.client() as client:
        schema = pulsar.schema.JsonSchema(Order)
        client.create_producer(source, schema=schema).send(Order(number=7))
        for version in (0, None):
            with topic.session(batches=batches) as session:
                producer = session.open(topic.name, "sender", (source, version))
                ids = producer.last_sequence_id + 2
                producer.send(message(ids, schema.encode(Order(number=7))), 0)
                answered(session, 1)
        reader = client.create_reader(topic.name, pulsar.MessageId.earliest, schema=schema)
        assert [reader.read_next(MILLIS).value().number for _ in range(2)] == [7, 7]
    assert [schema_version(message) for message in topic.read()] == [0, 0]


def test_missing_schema_is_refused(topic: Topic) -> None:
    with topic.session() as session, pytest.raises(ProtocolError, match="command 35"):
        session.open(topic.name, "sender", (topic.name, 3))


def test_a_closed_producer_gives_its_name_back(topic: Topic) -> None:
    with topic.session() as session:
        producer = session.open(topic.name, "sender")
        producer.send(message(1), 0)
        answered(session, 1)
        session.close_producer(producer)
        with topic.session() as other:
            assert other.open(topic.name, "sender").last_sequence_id == 1


def test_a_name_is_kept_while_receipts_are_asked_for(topic: Topic) -> None:
    """The broker asks the connection that has it whether it is alive: within 5 s it must say so.

    For so long this process may be held up, but not each time.
    """

    def is_kept(name: str) -> bool:
        with topic.session() as session, topic.session() as other, ThreadPoolExecutor() as pool:
            session.open(topic.name, name)
            opening = pool.submit(other.open, topic.name, name)
            with suppress(ProtocolError):  # it has lost its name
                while not opening.done():
                    assert session.receive(0.05) == []
            error = opening.exception()
        return isinstance(error, ProtocolError) and name in str(error)

    assert any(map(is_kept, ("sender-1", "sender-2", "sender-3")))


def test_stopped_session_lost_its_name_and_stores_nothing(topic: Topic) -> None:
    with topic.session() as session, topic.session() as other:
        producer = session.open(topic.name, "sender")
        other.open(topic.name, "sender")
        with pytest.raises(ProtocolError):  # noqa: PT012  whichever notices
            producer.send(message(1), 0)
            session.receive(SECONDS)
    assert topic.read() == []


def test_a_role_without_rights_sends_nothing(topic: Topic) -> None:
    with topic.session(role="stranger") as session, pytest.raises(ProtocolError):
        session.open(topic.name, "sender")
    assert topic.read() == []


def test_credentials_that_are_none_are_refused_and_not_shown(topic: Topic) -> None:
    shown = ShownCredentials("token", lambda: "no-such-token")
    with (
        closing(Session[int](topic.broker.service_url, shown)) as session,
        pytest.raises(ProtocolError) as refused,
    ):
        session.open(topic.name, "sender")
    assert "no-such-token" not in f"{refused.value} {shown}"


def test_message_too_large_without_chunks_is_not_sent(topic: Topic) -> None:
    with topic.session() as session:
        producer = session.open(topic.name, "sender")
        with pytest.raises(ProtocolError, match="too large"):
            producer.send(message(1, secrets.token_bytes(6 * 2**20)), 0)
    assert topic.read() == []


def _unload(topic: Topic) -> None:
    topic.ask("PUT", "unload")


def _limit(topic: Topic) -> None:
    topic.ask("POST", "maxMessageSize", 1_000)


@pytest.mark.parametrize("trouble", [_unload, _limit])
def test_trouble_ends_a_session(topic: Topic, trouble: Callable[[Topic], None]) -> None:
    with topic.session() as session:
        producer = session.open(topic.name, "sender")
        producer.send(message(1), 0)
        answered(session, 1)
        trouble(topic)
        ids = iter(range(2, 10_000))

        def resume() -> None:
            while True:
                producer.send(message(next(ids), secrets.token_bytes(1_500)), 0)
                assert session.receive(SECONDS)

        with pytest.raises(ProtocolError):
            resume()


def test_an_address_where_no_broker_answers_is_no_crash(topic: Topic) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"pulsar://127.0.0.1:{closed.getsockname()[1]}"
    with (
        closing(Session[int](address, ShownCredentials())) as session,
        pytest.raises(ProtocolError, match="is unreachable"),
    ):
        session.open(topic.name, "sender")
