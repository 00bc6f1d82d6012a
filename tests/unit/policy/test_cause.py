from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.errors import InvalidSpecError
from redrive.policy.envelope import Cause, Redaction

NOW = datetime(2026, 11, 21, 9, 0, tzinfo=UTC)
FINGERPRINT = "d885816048568ce0"  # stored with dead letters: it must never change
causes = st.builds(
    Cause, st.text(), st.text(), st.just(NOW), st.text(), st.integers(1, 1_000), trace=st.text()
)
words = st.text(st.characters(categories=["Ll"]), min_size=1, max_size=7).filter(
    lambda word: not re.search("[0-9a-f]{8}", word)
)
identifiers = (
    st.uuids().map(str)
    | st.integers(0).map(str)
    | st.integers(0, 2**64).map(hex)
    | st.from_regex(r"[a-z]{2,5}-[0-9]{1,9}", fullmatch=True)
    | st.text(st.characters(categories=["Ll", "Nd"]), max_size=20).map(lambda text: f"'{text}'")
)


def describe(error: BaseException, redact: Callable[[str], str] = str) -> Cause:
    return Cause.from_error(error, failed_at=NOW, consumer="c-1", attempt=2, redact=redact)


def raised(source: str, module: str = "shop") -> BaseException:
    """Run *source* as the module *module*, and return what it raised."""
    try:
        exec(compile(source, "shop.py", "exec"), {"__name__": module})  # noqa: S102 - a test's own
    except Exception as error:  # noqa: BLE001 - whatever it is
        return error
    pytest.fail("nothing was raised")


SHOP = """
class Till:
    def pay(self, order):
        raise LookupError(f"no account for {order}")
def handle(order):
    try:
        Till().pay(order)
    except LookupError as error:
        raise RuntimeError("not paid") from error
handle("o-17")
"""


@given(causes)
def test_no_part_of_a_cause_takes_more_than_its_bound(cause: Cause) -> None:
    written = cause.to_properties()
    assert len(written.pop("REDRIVE_CAUSE_TRACE").encode("utf-8")) <= 4_096
    for value in written.values():
        assert len(value.encode("utf-8")) <= 1_024


@pytest.mark.parametrize("character", ["x", "é", "語", "🚀", "\ud800"])
def test_a_long_cause_keeps_as_much_as_fits(character: str) -> None:
    written = Cause("E", character * 2_000, NOW, "c", 1).to_properties()["REDRIVE_CAUSE_MESSAGE"]
    assert 1_024 - 4 < len(written.encode("utf-8")) <= 1_024
    assert (character * 2_000).startswith(written) or character == "\ud800"


def test_a_short_cause_is_kept_word_for_word() -> None:
    written = describe(ValueError("größer als 0")).to_properties()
    assert re.fullmatch("[0-9a-f]{16}", written.pop("REDRIVE_CAUSE_FINGERPRINT"))
    assert written == {
        "REDRIVE_CAUSE_TYPE": "ValueError",
        "REDRIVE_CAUSE_MESSAGE": "größer als 0",
        "REDRIVE_CAUSE_TRACE": "",
        "REDRIVE_FAILED_AT": "2026-11-21T09:00:00+00:00",
        "REDRIVE_CONSUMER": "c-1",
        "REDRIVE_ATTEMPT": "2",
    }


def test_the_trace_begins_where_it_was_raised_and_goes_on_with_what_caused_it() -> None:
    lines = describe(raised(SHOP)).trace.splitlines()
    assert "test_cause.raised:" in lines.pop(2)
    assert lines == [
        "at shop.handle:9",
        "at shop.<module>:10",
        "caused by LookupError: no account for o-17",
        "at shop.Till.pay:4",
        "at shop.handle:7",
    ]


def test_a_trace_of_any_depth_keeps_its_innermost_calls() -> None:
    source = "def f(n):\n    return f(n - 1) if n else 1 / 0\nf(500)"
    cause = describe(raised(source))
    assert cause.trace.splitlines() == ["at shop.f:2"] * 50
    assert cause.fingerprint == describe(raised(source.replace("500", "300"))).fingerprint


@given(st.lists(words, min_size=1, max_size=4), identifiers, identifiers)
def test_ids_and_numbers_do_not_change_the_fingerprint(
    text: list[str], one: str, other: str
) -> None:
    first, second = (
        describe(ValueError(" ".join([*text, identifier, *text]))).fingerprint
        for identifier in (one, other)
    )
    assert first == second


@given(st.integers(0, 30))
def test_the_lines_where_the_code_stands_do_not_change_the_fingerprint(lines: int) -> None:
    moved = SHOP.replace("def handle", "\n" * lines + "def handle").replace("o-17", "o-18")
    assert describe(raised("\n" * lines + moved)).fingerprint == describe(raised(SHOP)).fingerprint


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LookupError", "ValueError"),
        ("no account", "no card"),
        ("def pay", "def charge"),
        ("class Till", "class Terminal"),
        (" from error", " from None"),
    ],
)
def test_failures_of_another_kind_have_another_fingerprint(old: str, new: str) -> None:
    other = SHOP.replace(old, new).replace(".pay(", f".{'charge' if 'charge' in new else 'pay'}(")
    other = other.replace("Till()", "Terminal()" if "Terminal" in new else "Till()")
    assert describe(raised(other)).fingerprint != describe(raised(SHOP)).fingerprint


def test_cause_of_own_error_ignores_file_layout() -> None:
    source = SHOP.replace("class Till", "class Mine(Exception): pass\nclass Till")
    source = source.replace("RuntimeError", "Mine")
    old, new = (describe(raised(source, f"redrive.{name}")) for name in ("delivery.old", "new"))
    assert old.fingerprint == new.fingerprint
    assert [line for line in new.trace.splitlines() if "redrive" in line] == []
    assert old.fingerprint != describe(raised(source, "redrive_shop")).fingerprint


def test_user_code_keeps_its_module_in_the_fingerprint() -> None:
    prints = {describe(raised(SHOP, name)).fingerprint for name in ("shop", "till", "redriven")}
    assert len(prints) == 3


def test_stored_fingerprint_of_user_code_stays_the_same() -> None:
    error = ValueError("order 17 of 'ann' is not paid")
    assert describe(error).fingerprint == FINGERPRINT


def test_nothing_of_what_a_pattern_matches_is_told() -> None:
    source = SHOP.replace('"o-17"', '"ann@example.com"').replace('"not paid"', '"bob@example.com"')
    error = raised(source)
    cause = describe(error, Redaction([r"\S+@\S+"]))
    assert "@" not in "".join(cause.to_properties().values())
    assert cause.message == "[redacted]"
    assert "caused by LookupError: no account for [redacted]" in cause.trace
    assert cause.fingerprint != describe(error).fingerprint


def test_a_hook_sees_what_the_patterns_leave_and_has_the_last_word() -> None:
    redaction = Redaction([re.compile("secret", re.IGNORECASE)], hook=str.upper)
    assert redaction("a Secret plan") == "A [REDACTED] PLAN"


def test_where_a_hook_fails_nothing_is_told() -> None:
    assert Redaction(hook=lambda text: text[10_000])("secret") == (
        "[redacted, for the hook raised IndexError]"
    )


def test_an_exception_that_can_not_be_written_is_described_all_the_same() -> None:
    class BrokenError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert (describe(BrokenError()).type, describe(BrokenError()).message) == ("BrokenError", "")


def test_causes_that_go_round_in_a_circle_end() -> None:
    first, second = ValueError("a"), KeyError("b")
    first.__cause__, second.__cause__ = second, first
    assert describe(first).trace.count("caused by") == 4


@given(causes)
def test_a_cause_is_read_as_it_was_written(cause: Cause) -> None:
    written = cause.to_properties()
    read = Cause.read(written)
    assert read is not None
    assert read.to_properties() == written


@pytest.mark.parametrize("name", ["CAUSE_TYPE", "FAILED_AT", "CONSUMER", "ATTEMPT"])
@pytest.mark.parametrize("text", [None, "x" * 5_000, "2026-11-21T09:00:00"])
def test_what_no_consumer_of_ours_writes_is_no_cause(name: str, text: str | None) -> None:
    written = Cause("E", "m", NOW, "c", 1).to_properties()
    if text is None:
        del written[f"REDRIVE_{name}"]
    else:
        written[f"REDRIVE_{name}"] = text
    assert (Cause.read(written) is None) == (text is None or name in {"FAILED_AT", "ATTEMPT"})


@pytest.mark.parametrize("text", ["x", "é", "a.b:", "dead", "cafe-", "' \"", "word "])
def test_a_whole_payload_in_a_text_keeps_nobody_waiting(text: str) -> None:
    began = time.monotonic()
    describe(ValueError(f"cannot parse {text * (100_000 // len(text))}"))
    assert time.monotonic() - began < 5


def test_a_pattern_that_takes_the_square_of_a_texts_length_keeps_nobody_waiting() -> None:
    error = ValueError("x" * 40_000)
    error.__cause__ = LookupError("x" * 40_000)
    began = time.monotonic()
    cause = describe(error, Redaction([r"\S+@\S+"]))
    assert time.monotonic() - began < 5
    assert "x" * 1_024 in cause.message
    assert "x" * 1_024 in cause.trace


@given(st.integers(0, 8_000), st.integers(1, 3_000))
def test_a_cut_does_not_show_a_part_of_what_a_pattern_would_match(before: int, size: int) -> None:
    error = ValueError("." * before + "<" + "s" * size + ">" + "." * 10_000)
    error.__cause__ = LookupError(str(error))
    cause = describe(error, Redaction(["<s+>"]))
    shown = cause.message + cause.trace + "".join(cause.to_properties().values())
    assert "<s" not in shown


@pytest.mark.parametrize("pattern", ["(", b"x", re.compile(b"x"), 3])
def test_a_pattern_that_matches_no_text_is_refused_at_once(pattern: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidSpecError, match="no regular expression for text"):
        Redaction([r"\d+", pattern])


def test_a_string_is_no_list_of_patterns() -> None:
    with pytest.raises(InvalidSpecError, match="each character would be a pattern"):
        Redaction("secret")
