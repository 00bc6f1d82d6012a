"""Entry ids, sources and routing; ranges, spans and acknowledged entries of a partition."""

from __future__ import annotations

import itertools
import string
from typing import Any
from urllib.parse import unquote_plus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redrive.reading import bitmap, ranges
from redrive.reading.positions import (
    MAX_BATCH,
    NOWHERE,
    EntryId,
    Position,
    SendAttempt,
    Source,
    Tail,
    decode_fields,
    encode_nested,
    encode_number,
    offset_of,
    sequence_id,
    target_partition,
    to_signed,
)
from redrive.reading.ranges import (
    RANGE_ENTRIES,
    Acknowledged,
    Partition,
    Range,
    Span,
    spans_hold,
    spans_of_entries,
    spans_without,
)
from tests.support.reasons import raises

sizes = st.sampled_from([1, 2, RANGE_ENTRIES - 1, RANGE_ENTRIES, RANGE_ENTRIES + 1, 25_000])
ledgers = st.dictionaries(st.integers(1, 9), sizes, min_size=1, max_size=4).map(
    lambda sizes: tuple(sorted(sizes.items()))
)


@settings(max_examples=25)  # each of up to 100 000 entries
@given(ledgers, st.data())
def test_unacknowledged_entries_are_in_exactly_one_range(
    held: tuple[tuple[int, int], ...], data: st.DataObject
) -> None:
    entries = [EntryId(ledger, entry) for ledger, count in held for entry in range(count)]
    end = data.draw(st.sampled_from(entries))
    through = data.draw(st.sampled_from([EntryId(0, -1), *entries]))
    partition = Partition(0, held, Acknowledged(through))

    resting = [
        piece.range.entry_id(offset)
        for piece in ranges.cut(partition, end)
        for offset in bitmap.members(piece.pending)
    ]

    assert resting == [entry for entry in entries if through < entry <= end]


@given(ledgers)
def test_grown_topic_is_cut_at_the_same_places(
    held: tuple[tuple[int, int], ...],
) -> None:
    before = Partition(0, held)
    grown = Partition(0, (*held[:-1], (held[-1][0], held[-1][1] + 30_000)))
    pieces = [piece.range for piece in ranges.cut(before, before.end)]
    assert [piece.range for piece in ranges.cut(grown, grown.end)][: len(pieces)] == pieces


@given(st.integers(-1, 5), st.integers(0, 2**40), st.integers(0, 60_000))
def test_message_position_has_its_range(partition: int, ledger: int, entry: int) -> None:
    message_range = Range.of(partition, Position(ledger, entry, 0))
    assert message_range.holds(Position(ledger, entry, 0))
    assert message_range.first % RANGE_ENTRIES == 0
    assert message_range.size == RANGE_ENTRIES
    assert Range.parse(str(message_range)) == message_range


@given(st.sets(st.integers(0, 500)), st.sets(st.integers(0, 500)))
def test_bitmap_behaves_as_a_set(one: set[int], other: set[int]) -> None:
    bits, others = bitmap.of(one, 501), bitmap.of(other, 501)
    assert set(bitmap.members(bits | others)) == one | other
    assert set(bitmap.members(bits & ~others)) == one - other
    assert bits.bit_count() == len(one)
    assert all(bitmap.contains(bits, number) == (number in one) for number in range(502))
    assert bitmap.decode(bitmap.encode(bits)) == bits
    assert set(bitmap.members(bitmap.span(3, 7))) == {3, 4, 5, 6, 7}
    assert bitmap.span(7, 6) == bitmap.EMPTY


entry_sets = st.sets(st.builds(EntryId, st.integers(0, 2), st.integers(0, 15)))


def spans_of(these: set[EntryId]) -> list[Span]:
    return [
        span
        for ledger in (0, 1, 2)
        for span in spans_of_entries(
            ledger, sorted(entry.entry for entry in these if entry.ledger == ledger)
        )
    ]


def entries_of(these: list[Span]) -> list[EntryId]:
    return [
        EntryId(ledger, entry) for ledger, first, last in these for entry in range(first, last + 1)
    ]


@given(entry_sets, entry_sets)
def test_missing_spans_are_wanted_and_not_seen(wanted: set[EntryId], seen: set[EntryId]) -> None:
    missing = spans_without(spans_of(wanted), spans_of(seen))
    assert entries_of(missing) == sorted(wanted - seen)
    for ledger in (0, 1, 2):
        for entry in range(17):
            place = EntryId(ledger, entry)
            assert spans_hold(missing, place) == (place in wanted - seen)


@given(entry_sets)
def test_adjacent_entries_form_one_span(these: set[EntryId]) -> None:
    together = spans_of(these)
    assert entries_of(together) == sorted(these)
    assert sum(span.size for span in together) == len(these)
    for one, other in itertools.pairwise(together):
        assert one.end.ledger < other.ledger or one.last + 1 < other.first


@given(
    st.lists(st.integers(1, 9), max_size=3),
    st.builds(EntryId, st.integers(0, 3), st.integers(-1, 9)),
)
def test_partition_yields_spans_behind_an_entry(counts: list[int], entry: EntryId) -> None:
    partition = Partition(0, tuple(enumerate(counts)))
    all_of_it = entries_of(partition.behind(NOWHERE))
    assert len(all_of_it) == sum(counts)
    assert entries_of(partition.behind(entry)) == [place for place in all_of_it if place > entry]


def cursor(through: str, ranges: str = "[]") -> dict[str, str]:
    return {"markDeletePosition": through, "individuallyDeletedMessages": ranges}


def stats(
    last: str, ledgers: dict[int, int], cursors: dict[str, Any] | None = None
) -> dict[str, Any]:
    """As a broker writes it: of the ledger it writes to, it lists no entries."""
    return {
        "lastConfirmedEntry": last,
        "ledgers": [{"ledgerId": i, "entries": n} for i, n in ledgers.items()],
        "cursors": cursors or {},
    }


def settled(seen: Acknowledged, ledger: int, entries: int) -> list[int]:
    """Return which of the first *entries* of a ledger are acknowledged."""
    partition = Partition(0, ((ledger, entries),), seen)
    return list(bitmap.members(ranges.settled(Range(0, ledger, 0, entries - 1), partition)))


def test_single_acknowledgements_exclude_first_entry_of_range() -> None:
    seen = Acknowledged.from_cursor(cursor("3:0", "[(3:2..3:3],(3:4..4:1]]"))
    assert settled(seen, 2, 3) == [0, 1, 2]
    assert settled(seen, 3, 7) == [0, 3, 5, 6]
    assert settled(seen, 4, 4) == [0, 1]
    assert settled(seen, 5, 4) == []


def test_subscription_at_beginning_acknowledges_nothing() -> None:
    assert settled(Acknowledged.from_cursor(cursor("3:-1")), 3, 5) == []


@given(st.sets(st.integers(0, 60)), st.integers(-1, 60), st.integers(0, 60), st.integers(0, 60))
def test_acknowledged_entries_match_the_cursor(
    acknowledged: set[int], through: int, first: int, last: int
) -> None:
    singles = sorted(entry for entry in acknowledged if entry > through)
    written = ",".join(f"(7:{entry - 1}..7:{entry}]" for entry in singles)
    seen = Acknowledged.from_cursor(cursor(f"7:{through}", f"[{written}]"))
    done = {*range(through + 1), *acknowledged}
    assert settled(seen, 7, 62) == sorted(done)
    part = ranges.settled(Range(0, 7, first, max(first, last)), Partition(0, ((7, 62),), seen))
    entries = range(first, max(first, last) + 1)
    assert list(bitmap.members(part)) == [number - first for number in entries if number in done]


def test_open_ledger_counts_to_last_confirmed_entry() -> None:
    partition = Partition.from_stats(0, stats("9:4", {3: 50, 9: 0}), "")
    assert partition.ledgers == ((3, 50), (9, 5))
    assert partition.end == EntryId(9, 4)


def test_restarted_broker_ends_in_an_older_ledger() -> None:
    partition = Partition.from_stats(0, stats("12:-1", {3: 50, 12: 0}), "")
    assert partition.end == EntryId(3, 49)


def test_trimmed_ledger_has_no_end() -> None:
    partition = Partition.from_stats(0, stats("3:49", {12: 0}), "")
    assert partition.end == NOWHERE


@pytest.mark.parametrize(("name", "cursor_name"), [("a:b", "a%3Ab"), ("über", "%C3%BCber")])
def test_encoded_subscription_is_found(name: str, cursor_name: str) -> None:
    cursors = {cursor_name: cursor("3:1")}
    partition = Partition.from_stats(0, stats("3:4", {3: 0}, cursors), name)
    assert entries_of(partition.behind(NOWHERE))
    with raises("SubscriptionMissing", match=f"got .'{name}'.; wait"):
        Partition.from_stats(0, stats("3:4", {3: 0}, cursors), "redrive")


NAMES = st.text(min_size=1, max_size=20) | st.text(
    "ab:/%+~*. _-&=?#\\\u00fc\u202e\U0001f600", min_size=1, max_size=9
)


def encoded(name: str) -> str:
    """Return the name of a cursor, as `java.net.URLEncoder` writes it."""
    kept = f"{string.ascii_letters}{string.digits}.-*_".encode()
    written = (chr(b) if b in kept else "+" if b == 32 else f"%{b:02X}" for b in name.encode())
    return "".join(written)


@given(NAMES, st.lists(NAMES, max_size=5))
def test_each_subscription_is_read_in_its_own_place(name: str, others: list[str]) -> None:
    """Others may have names that look encoded, like `a%3Ab` beside `a:b`."""
    others = [*others, encoded(name), unquote_plus(name), name.upper()]
    cursors = {encoded(other): cursor("3:4") for other in others if other != name}
    with raises("SubscriptionMissing"):
        Partition.from_stats(0, stats("3:4", {3: 0}, cursors), name)
    cursors[encoded(name)] = cursor("3:1")
    own = Partition.from_stats(0, stats("3:4", {3: 0}, cursors), name)
    assert entries_of(own.behind(NOWHERE))
    assert own.acknowledged == Acknowledged.from_cursor(cursor("3:1"))


def test_topic_without_subscription_is_refused() -> None:
    with raises("SubscriptionMissing", match="^orders has no subscription redrive; got"):
        Partition.from_stats(0, stats("3:4", {3: 0}, {"other": cursor("3:1")}), "redrive", "orders")


positions = st.builds(
    Position, st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, MAX_BATCH - 1)
)
attempts = st.builds(SendAttempt, st.integers(1, 2**28), st.integers(0, 255))
offsets = st.integers(0, RANGE_ENTRIES - 1)
indexes = st.integers(0, MAX_BATCH - 1)
sent = st.tuples(attempts, offsets, indexes)


@given(sent, sent)
def test_sequence_ids_rise_with_try_and_position(
    one: tuple[SendAttempt, int, int], other: tuple[SendAttempt, int, int]
) -> None:
    assert (one < other) == (sequence_id(*one) < sequence_id(*other))
    assert (one == other) == (sequence_id(*one) == sequence_id(*other))


@given(sent)
def test_sequence_id_contains_attempt_and_offset(one: tuple[SendAttempt, int, int]) -> None:
    assert (SendAttempt.of(sequence_id(*one)), offset_of(sequence_id(*one))) == one[:2]
    assert 0 < sequence_id(*one) < 2**63


def test_missing_sequence_id_belongs_to_no_try() -> None:
    assert SendAttempt.of(-1) == SendAttempt(0, 0)


@given(st.from_regex(r"[a-z0-9-]{1,36}", fullmatch=True), st.integers(-1, 99), positions)
def test_source_is_read_as_it_was_written(uid: str, partition: int, position: Position) -> None:
    source = Source(uid, partition, position)
    assert Source.parse(str(source)) == source


@given(st.text(max_size=40))
def test_text_that_is_no_source_is_none(text: str) -> None:
    source = Source.parse(text)
    assert source is None or str(source) == text


@pytest.mark.parametrize("forged", ["", "u@1:2:3", "u@a:1:2:3", "u@0:1:2:3 ", "@0:1:2:3"])
def test_forged_source_is_none(forged: str) -> None:
    assert Source.parse(forged) is None


@given(st.one_of(st.none(), st.text()), positions, st.integers(1, 100))
def test_message_is_always_routed_to_same_partition(
    key: str | None, position: Position, partitions: int
) -> None:
    chosen = target_partition(key, position, partitions)
    assert 0 <= chosen < partitions
    assert chosen == target_partition(key, position, partitions)


@given(st.text(min_size=1), positions, positions, st.integers(1, 100))
def test_messages_with_one_key_share_a_partition(
    key: str, one: Position, other: Position, partitions: int
) -> None:
    assert target_partition(key, one, partitions) == target_partition(key, other, partitions)


def test_messages_without_key_spread_over_partitions() -> None:
    chosen = [target_partition(None, Position(3, entry, 0), 4) for entry in range(400)]
    assert all(60 < chosen.count(partition) < 140 for partition in range(4))


def test_routing_is_the_same_in_every_version() -> None:
    # An interrupted run may resume with a newer image: it must route as before.
    assert [target_partition("order-1", Position(1, 2, 0), n) for n in (2, 3, 7)] == [0, 0, 3]
    assert [target_partition(None, Position(1, 2, 0), n) for n in (2, 3, 7)] == [0, 2, 3]


def test_entry_id_is_written_as_brokers_do() -> None:
    assert EntryId.parse("12:-1") == EntryId(12, -1)
    assert str(EntryId(12, 7)) == "12:7"


def test_tail_of_only_try_ends_at_its_last_id() -> None:
    behind = Tail(EntryId(7, 8), generation=2, partitions=3, entries=0b1_0101)
    only, last = SendAttempt(2, 0), sequence_id(SendAttempt(2, 0), 3, 1)
    assert behind.stored(last, only, 7) == 0b101
    assert behind.stored(last, SendAttempt(2, 1), 7) == 0b1_0101
    assert behind.stored(-1, only, 7) == 0b1_0101
    # The last lease sent less than the one before, whose ids are lower.
    earlier = behind._replace(generation=1)
    assert earlier.stored(last, only, 7) == 0b1_0101
    assert earlier._replace(entries=None).stored(last, only, 7) == 0b111_1111


def test_joined_tail_keeps_facts_common_to_all_leases() -> None:
    one = Tail(EntryId(7, 8), generation=1, partitions=3, entries=0b1010)
    assert one.joined(None) == one
    assert one.joined(Tail(EntryId(9, 0), 2, 3, 0b1_0010)) == one._replace(entries=0b1_1010)
    assert one.joined(Tail(EntryId(9, 0), 2, 4, 0b10)) == one._replace(partitions=None)
    assert one.joined(Tail(EntryId(9, 0))) == one._replace(partitions=None, entries=None)


NUMBERS = st.integers(0, 2**64 - 1)
FIELDS = st.integers(1, 2**29 - 1)


def test_protobuf_numbers_match_documented_bytes() -> None:
    # 150 and "testing" are the examples of its documentation.
    assert encode_number(1, 150) == bytes.fromhex("089601")
    assert encode_nested(2, b"testing") == bytes.fromhex("120774657374696e67")


@given(st.dictionaries(FIELDS, NUMBERS | st.binary(max_size=300)))
def test_protobuf_fields_are_read_as_written(values: dict[int, int | bytes]) -> None:
    written = b"".join(
        encode_number(field, value) if isinstance(value, int) else encode_nested(field, value)
        for field, value in values.items()
    )
    numbers, nested = decode_fields(written)
    assert {**numbers, **nested} == values


@given(st.integers(-(2**63), 2**63 - 1))
def test_protobuf_numbers_keep_their_sign(value: int) -> None:
    numbers, _ = decode_fields(encode_number(1, value % 2**64))
    assert to_signed(numbers[1]) == value


@pytest.mark.parametrize("broken", ["08", "08ff", "0d00000000", "1203abcd", "12ffffff7f"])
def test_broken_protobuf_is_refused(broken: str) -> None:
    with pytest.raises(ValueError, match="no message"):
        decode_fields(bytes.fromhex(broken))


@given(st.binary(max_size=64))
def test_random_protobuf_is_read_or_refused(data: bytes) -> None:
    try:
        numbers, nested = decode_fields(data)
    except ValueError:
        return
    assert all(value >= 0 for value in numbers.values())
    assert sum(map(len, nested.values())) <= len(data)
