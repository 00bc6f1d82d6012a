"""The memory of sequenced dead letters: which keys are dead, and whose turn it is."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.policy.sequences import Letter, Sequences, record_name

KEYS = st.sampled_from("ab")
ORIGINS = st.sampled_from(["1:0:-1", "1:1:-1", "1:2:-1"])


def add(sequences: Sequences, key: str, origin: str, replays: int = 0) -> None:
    letter = sequences.enter(key, origin, replays)
    sequences.apply(record_name(key, origin), letter.encode())


def test_the_first_letter_is_handled_when_it_was_replayed_and_the_others_after_it() -> None:
    sequences = Sequences()
    assert sequences.may_be_handled("k", "1:0:-1", 0)
    add(sequences, "k", "1:0:-1")
    add(sequences, "k", "1:1:-1")
    assert not sequences.may_be_handled("k", "1:0:-1", 0)  # it comes again: a crash
    assert not sequences.may_be_handled("k", "1:2:-1", 0)  # it comes later
    assert not sequences.may_be_handled("k", "1:1:-1", 1)  # replayed before the first
    assert sequences.may_be_handled("k", "1:0:-1", 1)
    assert sequences.may_be_handled("other", "1:9:-1", 0)
    sequences.apply(record_name("k", "1:0:-1"), b"")
    assert sequences.may_be_handled("k", "1:1:-1", 1)
    sequences.apply(record_name("k", "1:1:-1"), b"")
    assert sequences.may_be_handled("k", "1:2:-1", 0)
    assert (len(sequences), sequences.keys) == (0, 0)


def test_a_letter_that_dies_again_keeps_its_place() -> None:
    sequences = Sequences()
    for origin in ("1:0:-1", "1:1:-1"):
        add(sequences, "k", origin)
    add(sequences, "k", "1:0:-1", replays=1)
    assert sequences.find("k", "1:0:-1") == Letter(1, 1)
    assert not sequences.may_be_handled("k", "1:0:-1", 1)
    assert sequences.may_be_handled("k", "1:0:-1", 2)


@pytest.mark.parametrize(
    ("name", "content"),
    [("", b"[1, 0]"), ("k/1:0:-1", b"[1, 0]"), (record_name("k", "1"), b"{}"),
     (record_name("k", "1"), b"\xff"), (record_name("k", "1"), b'["1", 0]')],
)  # fmt: skip
def test_what_is_no_record_is_ignored(name: str, content: bytes) -> None:
    sequences = Sequences()
    sequences.apply(name, content)
    assert len(sequences) == 0


def test_a_record_does_not_tell_the_key() -> None:
    assert "customer" not in record_name("customer 42", "1:0:-1")


@given(st.lists(st.tuples(KEYS, ORIGINS, st.booleans())))
def test_what_compaction_leaves_says_the_same(
    records: list[tuple[str, str, bool]],
) -> None:
    sequences, stored = Sequences(), dict[str, bytes]()
    out = defaultdict[str, set[str]](set)
    for key, origin, enters in records:
        name = record_name(key, origin)
        content = sequences.enter(key, origin, 0).encode() if enters else b""
        sequences.apply(name, content)
        stored.pop(name, None)
        stored[name] = content
        (out[key].add if enters else out[key].discard)(origin)
    compacted = Sequences()
    for name, content in stored.items():
        if content:
            compacted.apply(name, content)
    assert len(compacted) == len(sequences) == sum(map(len, out.values()))
    for key in "ab":
        for origin in ("1:0:-1", "1:1:-1", "1:2:-1"):
            assert compacted.find(key, origin) == sequences.find(key, origin)
            for replays in (0, 1):
                assert compacted.may_be_handled(key, origin, replays) == sequences.may_be_handled(
                    key, origin, replays
                )
