"""The session of the binary protocol, and its frames, with scripted brokers."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import count
from urllib.parse import urlsplit

import pytest
from google_crc32c import value as crc32c
from hypothesis import given
from hypothesis import strategies as st

from redrive.auth.method import ShownCredentials
from redrive.reading import frames
from redrive.reading import frames as reading_frames
from redrive.reading import session as reading_session
from redrive.reading.frames import Command, OutgoingMessage
from redrive.reading.positions import encode_nested, encode_number
from redrive.reading.session import MAX_REDIRECTS, ProtocolError, Session, _connected

TOPIC = "persistent://shop/prod/orders-RETRY"
HANG_UP = b"hang up"
CONNECTED = frames.frame(frames.CONNECTED, encode_nested(1, b"a broker"))
MESSAGE = OutgoingMessage(1, b"order", {}, None, None, None)


def producer_success(name: bytes = b"sender") -> bytes:
    return frames.frame(frames.PRODUCER_SUCCESS, encode_number(1, 2) + encode_nested(2, name))


def lookup_response(url: str, *, kind: int = 1, proxy: bool = False, tls: bool = False) -> bytes:
    body = (
        encode_nested(2 if tls else 1, url.encode()) + encode_number(3, kind) + encode_number(4, 1)
    )
    return frames.frame(frames.LOOKUP_RESPONSE, body + encode_number(8, proxy))


class ScriptedBroker:
    """Answers each connection with the next of its scripts: a list of frames, one per command."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"pulsar://127.0.0.1:{self.listener.getsockname()[1]}"

    def serve(self, *scripts: Sequence[bytes]) -> list[list[Command]]:
        """Return the commands of each connection, once all of them have ended."""
        with ThreadPoolExecutor() as pool:
            conversations = [
                pool.submit(converse, self.listener.accept()[0], answers) for answers in scripts
            ]
            return [came.result() for came in conversations]


def converse(client: socket.socket, answers: Sequence[bytes]) -> list[Command]:
    received, came, remaining = bytearray(), list[Command](), list(answers)
    with client:
        while data := client.recv(65_536):
            received += data
            for command in frames.take_frames(received):
                came.append(command)
                if remaining:
                    answer = remaining.pop(0)
                    client.sendall(answer.removesuffix(HANG_UP))
                    if answer.endswith(HANG_UP):
                        client.shutdown(socket.SHUT_WR)
    return came


@pytest.fixture
def broker() -> Iterator[ScriptedBroker]:
    scripted = ScriptedBroker()
    with closing(scripted.listener):
        yield scripted


@contextmanager
def serving(
    broker: ScriptedBroker, *scripts: Sequence[bytes]
) -> Iterator[Future[list[list[Command]]]]:
    with ThreadPoolExecutor() as pool:
        yield pool.submit(broker.serve, *scripts)


def dial(url: str) -> socket.socket:
    address = urlsplit(url)
    return socket.create_connection((address.hostname or "", address.port or 0))


def session(url: str, token: Callable[[], str] = lambda: "token") -> Session[str]:
    return Session(url, ShownCredentials("token", token))


def kinds(came: Sequence[Command]) -> list[int]:
    return [command.kind for command in came]


OPENING = [frames.CONNECT, frames.LOOKUP, frames.PRODUCER]


def test_producer_is_opened_at_broker_of_its_topic(broker: ScriptedBroker) -> None:
    with serving(broker, [CONNECTED, lookup_response(broker.url), producer_success()]) as came:
        with closing(session(broker.url)) as sending:
            assert sending.open(TOPIC, "sender").last_sequence_id == -1
        ((connect, lookup, producer),) = came.result()
    assert connect.nested[3] == b"token"
    assert lookup.nested[1] == producer.nested[1] == TOPIC.encode()
    assert producer.nested[4] == b"sender"


def test_tls_credentials_are_not_sent_without_tls(
    broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_session, "_connected", lambda _url, _shown: dial(broker.url))
    with (
        serving(broker, [CONNECTED, lookup_response(broker.url, tls=True)]) as came,
        closing(session(broker.url.replace("pulsar", "pulsar+ssl"))) as sending,
        pytest.raises(ProtocolError, match="command 24"),
    ):
        sending.open(TOPIC, "sender")
    assert [kinds(commands) for commands in came.result()] == [OPENING[:2]]


def test_unavailable_host_of_several_is_skipped(broker: ScriptedBroker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        away = f"127.0.0.1:{closed.getsockname()[1]}"
    urls = broker.url.replace("://", f"://{away},") + "/"
    with serving(broker, [CONNECTED, lookup_response(broker.url), producer_success()]) as came:
        with closing(session(urls)) as sending:
            sending.open(TOPIC, "sender")
        assert [kinds(commands) for commands in came.result()] == [OPENING]


def test_redirects_are_followed(broker: ScriptedBroker) -> None:
    other = broker.url.replace("127.0.0.1", "localhost")
    scripts = (
        [CONNECTED, lookup_response(other, kind=0)],
        [CONNECTED, lookup_response(other), producer_success()],
    )
    with serving(broker, *scripts) as came:
        with closing(session(broker.url)) as sending:
            sending.open(TOPIC, "sender")
        assert [kinds(commands) for commands in came.result()] == [OPENING[:2], OPENING]


def test_endless_redirects_are_refused(broker: ScriptedBroker) -> None:
    answers = [CONNECTED, *[lookup_response(broker.url, kind=0)] * MAX_REDIRECTS]
    with (
        serving(broker, answers),
        closing(session(broker.url)) as sending,
        pytest.raises(ProtocolError, match="redirect endlessly"),
    ):
        sending.open(TOPIC, "sender")


def test_proxy_connects_to_the_owning_broker(broker: ScriptedBroker) -> None:
    behind = lookup_response("pulsar://broker-1:6650", proxy=True)
    with serving(broker, [CONNECTED, behind], [CONNECTED, producer_success()]) as came:
        with closing(session(broker.url)) as sending:
            sending.open(TOPIC, "sender")
        first, (connect, producer) = came.result()
    assert kinds(first) == OPENING[:2]
    assert connect.nested[6] == b"broker-1:6650"
    assert producer.kind == frames.PRODUCER


@pytest.mark.parametrize(
    "answer",
    [
        lookup_response("", kind=2),
        lookup_response("http://127.0.0.1:80"),
        lookup_response("pulsar://"),
        lookup_response("pulsar://127.0.0.1:no"),
        lookup_response("pulsar://[bad"),
        lookup_response("pulsar+ssl://127.0.0.1:6651"),
        lookup_response("pulsar+ssl://127.0.0.1:6651", tls=True),  # to one who does not speak TLS
        frames.frame(frames.LOOKUP_RESPONSE),
        frames.frame(
            frames.ERROR, encode_number(1, 1) + encode_number(2, 5) + encode_nested(3, b"no")
        ),
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        frames.frame(frames.LOOKUP_RESPONSE)[:4] + b"\xff" * 20,
    ],
)
def test_invalid_lookup_ends_the_session(broker: ScriptedBroker, answer: bytes) -> None:
    with (
        serving(broker, [CONNECTED, answer]),
        closing(session(broker.url)) as sending,
        pytest.raises(ProtocolError),
    ):
        sending.open(TOPIC, "sender")


def test_missing_answer_ends_the_session(
    broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_session, "ANSWER_SECONDS", 0.2)
    with (
        serving(broker, [CONNECTED]),
        closing(session(broker.url)) as sending,
        pytest.raises(ProtocolError, match="no answer"),
    ):
        sending.open(TOPIC, "sender")


def test_read_of_bounded_size_leaves_the_rest_at_its_sender(broker: ScriptedBroker) -> None:
    large = frames.frame(frames.MESSAGE, encode_nested(15, bytes(2**20)))
    with (
        serving(broker, [CONNECTED, lookup_response(broker.url), 8 * large]),
        closing(session(broker.url)) as reading,
    ):
        connection = reading.connection_for(TOPIC)
        connection.write(frames.frame(frames.PING))
        reads: list[int] = []
        while sum(reads) < 8:
            reads.append(len(connection.read(60, 2 * 2**20)))
    assert max(reads) <= 3
    assert sum(reads) == 8


def test_ping_and_challenge_are_answered_while_waiting(broker: ScriptedBroker) -> None:
    asks = frames.frame(frames.PING) + frames.frame(frames.AUTH_CHALLENGE)
    tokens = count(1)
    with serving(
        broker, [CONNECTED, lookup_response(broker.url), producer_success() + asks]
    ) as came:
        with closing(session(broker.url, lambda: f"token {next(tokens)}")) as sending:
            sending.open(TOPIC, "sender")
            assert sending.receive(0.3) == []
        (all_came,) = came.result()
    assert kinds(all_came[3:]) == [frames.PONG, frames.AUTH_RESPONSE]
    assert all_came[0].nested[3] == b"token 1"
    assert b"token 2" in all_came[-1].nested[2]


@pytest.mark.parametrize(
    "answer",
    [
        frames.frame(frames.CLOSE_PRODUCER, encode_number(1, 1) + encode_number(2, 7)),
        frames.frame(
            frames.SEND_ERROR, encode_number(1, 1) + encode_number(2, 1) + encode_number(3, 22)
        ),
        frames.frame(frames.SEND_RECEIPT, encode_number(1, 1) + encode_number(2, 99)),
        frames.frame(frames.SEND_RECEIPT, encode_number(1, 9) + encode_number(2, 1)),
        frames.frame(68),
        b"\0" * 8,
    ],
)
def test_unexpected_answer_ends_the_session(broker: ScriptedBroker, answer: bytes) -> None:
    with (
        serving(broker, [CONNECTED, lookup_response(broker.url), producer_success(), answer]),
        closing(session(broker.url)) as sending,
    ):
        sending.open(TOPIC, "sender").send(MESSAGE, "a message")
        with pytest.raises(ProtocolError):
            sending.receive(10)


def receipt(number_of: int, sequence_id: int) -> bytes:
    stored_as = encode_nested(3, encode_number(1, 12) + encode_number(2, sequence_id))
    body = encode_number(1, number_of) + encode_number(2, sequence_id) + stored_as
    return frames.frame(frames.SEND_RECEIPT, body)


CLOSED = frames.frame(frames.CLOSE_PRODUCER, encode_number(1, 1) + encode_number(2, 7))


@pytest.mark.parametrize("end", [CLOSED, HANG_UP], ids=["producer closed", "hung up"])
@pytest.mark.parametrize("ping", [b"", frames.frame(frames.PING)], ids=["", "after a ping"])
def test_receipts_before_the_end_are_counted(
    broker: ScriptedBroker, ping: bytes, end: bytes
) -> None:
    answer = ping + receipt(1, 1) + receipt(1, 2) + end
    with (
        serving(broker, [CONNECTED, lookup_response(broker.url), producer_success(), answer]),
        closing(session(broker.url)) as sending,
    ):
        producer = sending.open(TOPIC, "sender")
        for sequence_id in range(1, 4):
            producer.send(MESSAGE._replace(sequence_id=sequence_id), str(sequence_id))
        came = list[str]()
        with pytest.raises(ProtocolError):  # noqa: PT012  after the receipts
            while sent := sending.receive(10):
                came += [tag for entry in sent for tag in entry.tags]
        assert came == ["1", "2"]
        with pytest.raises(ProtocolError):
            sending.open(TOPIC, "another")


def test_answer_has_one_deadline_despite_pings(
    broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_session, "ANSWER_SECONDS", 0.5)
    pings = [frames.frame(frames.PING)] * 100  # each comes for the answer to the one before
    with (
        serving(broker, [CONNECTED, *pings]),
        closing(session(broker.url)) as sending,
    ):
        begun = time.monotonic()
        with pytest.raises(ProtocolError, match="no answer"):
            sending.open(TOPIC, "sender")
        assert time.monotonic() - begun < 25  # 50 s if each ping began the time again


def test_producer_with_unsettled_sends_is_not_closed(broker: ScriptedBroker) -> None:
    """The broker would answer when all of them are stored."""
    with serving(broker, [CONNECTED, lookup_response(broker.url), producer_success()]) as came:
        with closing(session(broker.url)) as sending:
            producer = sending.open(TOPIC, "sender")
            producer.send(MESSAGE, "a message")
            with pytest.raises(ProtocolError, match="before its receipts"):
                sending.close_producer(producer)
        assert kinds(came.result()[0]) == OPENING


def test_unavailable_host_is_tried_once(
    broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = list[str]()
    monkeypatch.setattr(random, "shuffle", lambda _: None)
    dialled = _connected

    def note(url: str, shown: ShownCredentials) -> socket.socket:
        tried.append(url)
        if url != broker.url:
            raise ProtocolError("it is away")
        return dialled(url, shown)

    monkeypatch.setattr(reading_session, "_connected", note)
    answers = [
        CONNECTED,
        *[
            lookup_response(broker.url),
            producer_success(),
            lookup_response(broker.url),
            producer_success(),
        ],
    ]
    with serving(broker, answers), closing(session(broker.url.replace("://", "://away,"))) as two:
        two.open(TOPIC, "sender")
        two.open(f"{TOPIC}-1", "sender")
    assert tried == ["pulsar://away", broker.url]


def test_receipt_returns_tags_of_its_message(broker: ScriptedBroker) -> None:
    with serving(
        broker, [CONNECTED, lookup_response(broker.url), producer_success(), receipt(1, 1)]
    ) as came:
        with closing(session(broker.url)) as sending:
            producer = sending.open(TOPIC, "sender")
            producer.send(MESSAGE, "a message")
            ((tags, stored),) = sending.receive(10)
        assert (tags, stored) == (("a message",), True)
        assert kinds(came.result()[0]) == [*OPENING, frames.SEND]


@given(
    st.lists(st.integers(1, 60).filter(lambda kind: kind != reading_frames.MESSAGE), max_size=5),
    st.data(),
)
def test_frames_are_taken_once_they_are_complete(kinds: list[int], data: st.DataObject) -> None:
    frames = [
        reading_frames.frame(kind, encode_number(2, kind) + encode_nested(3, b"x" * kind))
        for kind in kinds
    ]
    written = b"".join(frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(written)), max_size=6)))
    received, taken = bytearray(), list[Command]()
    for begin, end in zip([0, *cuts], [*cuts, len(written)], strict=True):
        received += written[begin:end]
        taken += reading_frames.take_frames(received)
        assert sum(map(len, frames[: len(taken)])) + len(received) == end
    # Of a MESSAGE only the id is decoded, see below.
    assert taken == [Command(kind, {2: kind}, {3: b"x" * kind}) for kind in kinds]


def test_command_with_entry_in_its_frame_keeps_its_bytes() -> None:
    entry = reading_frames.payload(encode_number(2, 7), b"metadata", b"content")
    received = bytearray(entry + reading_frames.frame(reading_frames.PING))
    stored = b"\x00\x00\x00\x08metadatacontent"
    checksum = crc32c(stored).to_bytes(4)
    assert reading_frames.take_frames(received) == [
        Command(reading_frames.SEND, {2: 7}, {}, b"\x0e\x01" + checksum + stored),
        Command(reading_frames.PING, {}, {}),
    ]


@pytest.mark.parametrize("sizes", ["0000000000000004", "7fffffff7ffffff0", "485454502f312e31"])
def test_invalid_frame_is_refused(sizes: str) -> None:
    """Such as the answer of a web server."""
    with pytest.raises(ValueError, match="a frame"):
        reading_frames.take_frames(bytearray(bytes.fromhex(sizes)))


def test_message_with_an_invalid_id_is_refused() -> None:
    broken = encode_nested(2, b"\x08")
    for fields in (broken, broken + encode_nested(15, bytes(200))):
        received = bytearray(reading_frames.frame(reading_frames.MESSAGE, fields))
        with pytest.raises(ValueError, match="no message of Protocol Buffers: 120108"):
            reading_frames.take_frames(received)


@pytest.mark.parametrize("more", [b"", encode_nested(15, bytes(200))])
def test_message_has_the_place_of_its_entry(more: bytes) -> None:
    place = encode_nested(2, encode_number(1, 2**64 - 1) + encode_number(2, 70_000))
    received = bytearray(reading_frames.frame(reading_frames.MESSAGE, place + more))
    (command,) = reading_frames.take_frames(received)
    assert (command.kind, command.place) == (reading_frames.MESSAGE, (-1, 70_000))


def test_connect_without_method_has_no_credentials() -> None:
    assert b"secret" in reading_frames.connect("token", b"secret")
    assert b"secret" not in reading_frames.connect("", b"secret")
