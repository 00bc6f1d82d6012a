"""Messages of a topic, each read once, and the rows they become."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import pulsar
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.policy.envelope import (
    CAUSE_TYPE,
    ORIGIN_MESSAGE_ID,
    REAL_TOPIC,
    RECONSUMETIMES,
    REPLAYS,
)
from redrive.policy.naming import TopicName
from redrive.reading import broker, reader, rows
from redrive.reading.positions import EntryId, Position, encode_nested, encode_number
from redrive.reading.ranges import LOOK_BACK, Span
from redrive.reading.reader import ReadableTopic
from redrive.reading.rows import DeadLetterRow
from redrive.reading.stored import MessagePlace
from tests.support.consumers import AS_BASE64, NO_TEXT
from tests.support.dead_letter_rows import dead_letter
from tests.support.raw_entries import in_batch, numbers, read_alone
from tests.support.reasons import raises

NAME = TopicName("shop", "prod", "orders-DLQ")
Place = tuple[int, int, int]
"""Ledger, entry and index in a batch; of a message in chunks the entry of the first in its stead,
as a negative number."""


@dataclass
class Read:
    """A message with a place alone."""

    key: Place

    @property
    def place(self) -> MessagePlace:
        ledger, entry, index = self.key
        if index >= -1:
            return MessagePlace(-1, ((ledger, entry),), index, 2)
        return MessagePlace(-1, ((ledger, -index), (ledger, entry)))


@dataclass
class Readers:
    """In the place of a client and its readers, one after the other; they give these messages."""

    places: list[list[Place]]
    begun: list[Place] = field(default_factory=list)
    closed: int = 0

    def open_entry_reader(
        self,
        _topic: TopicName,
        _index: int,
        after: EntryId,
        **__: Any,  # noqa: ANN401
    ) -> Readers:
        self.begun.append((*after, -1))
        return self

    def read_next(self, _timeout: int) -> Read:
        if not self.places[0]:
            raise pulsar.Timeout
        return Read(self.places[0].pop(0))

    def close(self) -> None:
        self.places.pop(0)
        self.closed += 1

    def read(self, after: EntryId, *wanted: Span) -> list[Place]:
        topic = ReadableTopic(cast("broker.ReadingClient", self), "http://p", NAME, lambda *_: FAR)
        messages = reader.read_messages(topic, -1, after, wanted, 10)
        return [cast("Read", message).key for message in messages]


FAR = EntryId(99, 0)


@pytest.mark.parametrize(
    ("average", "ahead"),
    [
        pytest.param(0.0, 1_000, id="empty"),
        pytest.param(300.0, 1_000, id="small"),
        pytest.param(20_000.0, 838, id="16 MiB in all"),
        pytest.param(1e6, 16, id="large"),
        pytest.param(5e6, 10, id="chunks, of which a client has to have room for some"),
    ],
)
def test_prefetch_of_large_messages_is_small(average: float, ahead: int) -> None:
    assert reader.prefetch(average) == ahead


def test_reader_yields_each_message_once_in_order() -> None:
    batch = [(7, 3, 0), (7, 3, 1)]
    places = [(7, 2, 0), (7, 2, 1), *batch, (7, 4, -1), (7, 3, 1), (7, 4, -1), (8, 0, -1)]
    readers = Readers([[*places, (8, 1, -1)]])
    messages = readers.read(EntryId(7, 2), Span(7, 3, 4), Span(8, 0, 0))
    assert messages == [*batch, (7, 4, -1), (8, 0, -1)]
    assert readers.closed == 1


@pytest.mark.parametrize(
    ("first", "again", "begins"),
    [
        pytest.param([1, 2, 3, 4], [], [], id="all came"),
        pytest.param([1, 2, (4, 3)], [], [], id="two chunks"),
        pytest.param([1, 3, 4], [1, 2, 3], [0], id="one came late"),
        pytest.param([1, 2], [3, 4], [0], id="the last came late"),
        pytest.param([1, 2, (4, 3), 5, 6], [], [], id="more than was asked for"),
        # Another message may lie between its chunks, and be lost.
        pytest.param([1, (4, 2)], [3, 4], [0], id="three chunks, and one in their midst"),
        pytest.param([1, 3, (4, 2)], [], [0], id="three chunks"),
        pytest.param([1, 4], [], [0], id="nothing else is there"),
        pytest.param([], [1, 2, 3, 4], [0], id="none came"),
    ],
)
def test_missing_entries_are_read_once_more(
    first: list[int | tuple[int, int]], again: list[int | tuple[int, int]], begins: list[int]
) -> None:
    """A client loses messages in chunks when it is connected again in the midst of one."""

    def places(entries: list[int | tuple[int, int]]) -> list[Place]:
        return [
            (7, entry, -1) if isinstance(entry, int) else (7, entry[0], -entry[1])
            for entry in entries
        ]

    readers = Readers([places(first), places(again)])
    messages = readers.read(EntryId(7, 0), Span(7, 1, 4))
    seen = {entry for _, entry, _ in places(first)}
    late = [place for place in places(again) if place[1] not in seen]
    assert messages == [place for place in places(first) if place[1] < 5] + late
    assert [entry for _, entry, _ in readers.begun[1:]] == begins
    assert readers.closed == 1 + len(begins)


def test_second_read_reaches_back_for_missing_chunks_only() -> None:
    stored_places = [(7, entry, -1) for entry in range(1_000) if entry != 500]
    readers = Readers([list(stored_places), [(7, 500, -1), (7, 501, -1)]])
    assert readers.read(EntryId(6, 9), Span(7, 0, 999)) == [*stored_places, (7, 500, -1)]
    assert readers.begun[1] == (7, 500 - LOOK_BACK - 1, -1)


class Silent(Readers):
    """Yields no message, and reports none available, as behind an open transaction."""

    def read_next(self, _timeout: int) -> Read:
        raise pulsar.Timeout

    def has_message_available(self) -> bool:
        return False


@pytest.mark.parametrize(("sent", "ends"), [(EntryId(7, 9), True), (EntryId(7, 3), False)])
def test_read_ends_where_the_broker_has_sent_all(
    monkeypatch: pytest.MonkeyPatch, sent: EntryId, *, ends: bool
) -> None:
    """Not where the client says that no more is available."""
    monkeypatch.setattr(reader, "SILENCE_SECONDS", 0.1)
    client = cast("broker.ReadingClient", Silent([[], []]))
    topic = ReadableTopic(client, "http://p", NAME, lambda *_: sent)
    messages = reader.read_messages(topic, -1, EntryId(7, 2), [Span(7, 3, 9)], 10)
    with nullcontext() if ends else raises("TransactionOpen"):
        assert not list(messages)


class Stalled(Readers):
    """Yields no message until it connects again."""

    renewed = False

    def read_next(self, timeout: int) -> Read:
        if not self.renewed:
            raise pulsar.Timeout
        return super().read_next(timeout)

    def has_message_available(self) -> bool:
        return True

    def renew(self) -> None:
        self.renewed = True


def test_reader_that_delivers_nothing_connects_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "RENEW_SECONDS", 0.0)
    readers = Stalled([[(7, 3, -1), (99, 1, -1)], []])
    topic = ReadableTopic(cast("broker.ReadingClient", readers), "http://p", NAME, lambda *_: None)
    (message,) = reader.read_messages(topic, -1, EntryId(7, 2), [Span(7, 3, 3)], 10)
    assert cast("Read", message).key == (7, 3, -1)


text = st.text(max_size=20)
moments = st.integers(1, 2**64 - 1)  # a program may mean nanoseconds
letters = st.builds(
    DeadLetterRow,
    partition=st.integers(-1, 100),
    position=st.builds(
        Position, st.integers(0, 2**62), st.integers(0, 2**31), st.integers(0, 2**20)
    ),
    batch_size=st.integers(1, 1_000),
    place=st.just(MessagePlace(-1, ((1, 2),))),
    first_chunk=st.none() | st.builds(EntryId, st.integers(0, 2**62), st.integers(0, 2**31)),
    encrypted=st.booleans(),
    unreadable=st.booleans(),
    schema_version=st.none() | st.integers(0, 2**130),
    key=st.none() | text.filter(bool),
    ordering_key=st.none() | text.filter(bool),
    value=st.none() | st.binary(max_size=50),
    properties=st.dictionaries(text, text, max_size=5),
    publish_time=moments,
    event_time=st.none() | moments,
)


def spark_time(milliseconds: int) -> int:
    """Return the time in the range of Spark, which compares with written moments as the time."""
    return min(milliseconds * 1_000, 2**63 - 1)


@given(st.lists(letters, max_size=5))
def test_row_has_all_columns_of_a_selection(some: list[DeadLetterRow]) -> None:
    batch = rows.to_batch(some, rows.COLUMNS)
    # Python's own moments end with the year 9999.
    table = batch.drop_columns(["publish_time", "event_time"]).to_pylist()
    assert [Position(r["ledger"], r["entry"], r["batch_index"]) for r in table] == [
        letter.position for letter in some
    ]
    for name in ("key", "ordering_key", "value", "encrypted", "unreadable"):
        assert [row[name] for row in table] == [getattr(letter, name) for letter in some]
    assert [row["first_chunk"] for row in table] == [
        letter.first_chunk and str(letter.first_chunk) for letter in some
    ]
    assert [row["schema_version"] for row in table] == [
        None if letter.schema_version is None else min(letter.schema_version, 2**63 - 1)
        for letter in some
    ]
    assert [row["published"] for row in table] == [
        min(letter.publish_time, 2**63 - 1) for letter in some
    ]
    assert [dict(row["properties"]) for row in table] == [letter.properties for letter in some]
    published = batch["publish_time"].cast(pa.int64()).to_pylist()
    assert published == [spark_time(letter.publish_time) for letter in some]
    assert [row["size"] for row in table] == [len(letter.value or b"") for letter in some]


def test_row_has_only_requested_columns() -> None:
    carried = {CAUSE_TYPE: "TimeoutError", REPLAYS: "2", RECONSUMETIMES: "not a number"}
    letter = DeadLetterRow.of(read_alone(), -1)._replace(properties=carried)
    names = ("replays", "cause_type", "reconsume_times")
    assert rows.to_batch([letter], names).to_pylist() == [
        {"replays": 2, "cause_type": "TimeoutError", "reconsume_times": 0}
    ]
    assert rows.ddl(names) == "replays INT, cause_type STRING, reconsume_times INT"


def test_binary_keys_are_read_as_base64() -> None:
    letter = DeadLetterRow.of(
        read_alone(encode_nested(6, NO_TEXT) + encode_nested(18, NO_TEXT)), -1
    )
    assert (letter.key, letter.ordering_key) == (AS_BASE64, AS_BASE64)
    assert letter.binary_key
    fields = encode_nested(2, b"AP8B") + encode_number(6, 1)
    letter = DeadLetterRow.of(read_alone(numbers(in_batch=1), in_batch(b"x", fields)), -1)
    assert (letter.key, letter.binary_key) == ("AP8B", True)
    letter = DeadLetterRow.of(read_alone(encode_nested(6, "größe".encode())), -1)
    assert (letter.key, letter.ordering_key) == ("größe", None)
    assert not letter.binary_key


def test_binary_properties_make_the_row_unreadable() -> None:
    letter = DeadLetterRow.of(
        read_alone(encode_nested(4, encode_nested(1, b"a") + encode_nested(2, NO_TEXT))), -1
    )
    assert letter.unreadable
    assert letter.properties == {}
    letter = DeadLetterRow.of(
        read_alone(encode_nested(4, encode_nested(1, b"a") + encode_nested(2, "ä".encode()))), -1
    )
    assert not letter.unreadable
    assert letter.properties == {"a": "ä"}


@pytest.mark.parametrize(
    ("origin", "key", "expected"),
    [
        ("7:3:3:-1", "b", 3),
        ("7:3:4:-1", "b", 2),  # the topic has had more partitions
        ("", "b", 2),  # 98, the hash of Java's client
        ("", "ab", 1),  # 31 * 97 + 98
    ],
)
def test_source_partition_without_usable_origin_follows_the_key(
    origin: str, key: str, expected: int
) -> None:
    source = TopicName("shop", "prod", "orders")
    properties = {REAL_TOPIC: str(source.partition(0)), ORIGIN_MESSAGE_ID: origin}
    assert dead_letter(0, key=key, properties=properties).partition_in(source, 4) == expected
