"""Properties and causes that messages carry, and their reference page."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from redrive.errors import InvalidSpecError, class_name
from redrive.policy import envelope
from redrive.policy.envelope import (
    DEAD_REASON,
    DELAY_TIME,
    ENCODED,
    PAYLOAD_PREFIX,
    REPLAY,
    REPLAY_PROOF,
    REPLAY_SOURCE,
    REPLAYS,
    SOURCE_MESSAGE_ID,
    Attempt,
    Cause,
    Redaction,
)
from redrive.policy.ladder import MAX_DELAY
from redrive.policy.model import Policy
from redrive.policy.naming import MAX_NAME, TopicName
from redrive.policy.verdict import Dead, DeadReason, Retry

NOW = datetime(2026, 11, 21, 9, 0, tzinfo=UTC)
POLICY = Policy(TopicName("shop", "prod", "orders"), "billing")
OURS = {
    "RECONSUMETIMES", "REAL_TOPIC", "REAL_SUBSCRIPTION", "ORIGIN_MESSAGE_ID", "RETRY_TOPIC",
    "DELAY_TIME", "REDRIVE_CAUSE_TYPE", "REDRIVE_CAUSE_MESSAGE", "REDRIVE_FAILED_AT",
    "REDRIVE_CAUSE_FINGERPRINT", "REDRIVE_CAUSE_TRACE", "REDRIVE_ATTEMPT", "REDRIVE_SCHEMA_VERSION",
    "REDRIVE_CONSUMER", "REDRIVE_FIRST_FAILED_AT", "REDRIVE_DEAD_REASON", "REDRIVE_REPLAYS",
    "REDRIVE_REPLAY", "REDRIVE_FIRST_ID",
}  # fmt: skip

texts = st.text(max_size=30)
users = st.dictionaries(texts.filter(lambda key: key not in OURS), texts, max_size=5)
forged = st.dictionaries(st.sampled_from(sorted(OURS)), texts, max_size=5)
causes = st.builds(
    Cause, st.text(), st.text(), st.just(NOW), st.text(), st.integers(1, 1_000), trace=st.text()
)
retries = st.builds(
    Retry, st.timedeltas(timedelta(seconds=1), timedelta(days=10)), st.integers(1, 1_000)
)
verdicts = retries | st.builds(Dead, st.sampled_from(DeadReason), st.integers(1, 1_001))


def hop(
    properties: dict[str, str],
    verdict: Retry | Dead = Retry(timedelta(seconds=5), 1),  # noqa: B008 - a frozen value
    cause: Cause | None = None,
    message_id: str = "7:8:-1",
) -> dict[str, str]:
    attempt = Attempt.of(properties, message_id=message_id, retried=True)
    return envelope.for_hop(properties, attempt, policy=POLICY, verdict=verdict, cause=cause)


@given(users, forged, verdicts, causes | st.none())
def test_user_properties_survive_each_hop(
    user: dict[str, str], ours: dict[str, str], verdict: Retry | Dead, cause: Cause | None
) -> None:
    sent = hop(user | ours, verdict, cause)
    assert {key: value for key, value in sent.items() if key not in OURS} == user


@given(users, forged, verdicts)
def test_hop_does_not_change_its_input(
    user: dict[str, str], ours: dict[str, str], verdict: Retry | Dead
) -> None:
    properties = user | ours
    before = dict(properties)
    hop(properties, verdict)
    envelope.for_replay(properties, replay="shop/fix", source="u@0:1:2:0")
    assert properties == before


@given(forged, verdicts)
def test_hop_overwrites_forged_source_properties(
    ours: dict[str, str], verdict: Retry | Dead
) -> None:
    sent = hop(ours, verdict)
    assert sent["REAL_TOPIC"] == "persistent://shop/prod/orders"
    assert sent["REAL_SUBSCRIPTION"] == "billing"
    assert sent["RETRY_TOPIC"] == "persistent://shop/prod/orders-billing-RETRY"
    assert sent["RECONSUMETIMES"] == str(verdict.reconsume_times)


def test_origin_is_the_first_id_through_every_hop() -> None:
    first = hop({}, message_id="1:2:3")
    second = hop(first, message_id="4:5:6")
    assert first["ORIGIN_MESSAGE_ID"] == second["ORIGIN_MESSAGE_ID"] == "1:2:3"
    assert (
        envelope.for_replay(second, replay="shop/fix", source="u@0:1:2:0")["ORIGIN_MESSAGE_ID"]
        == "1:2:3"
    )


@given(retries)
def test_retry_delay_is_written_in_milliseconds(retry: Retry) -> None:
    sent = hop({}, retry)
    assert sent["DELAY_TIME"] == str(int(retry.delay / timedelta(milliseconds=1)))
    assert "REDRIVE_DEAD_REASON" not in sent


def test_dead_letter_has_a_reason_and_no_delay() -> None:
    sent = hop(hop({}), Dead(DeadReason.REQUESTED, 2))
    assert sent["REDRIVE_DEAD_REASON"] == "Requested"
    assert "DELAY_TIME" not in sent


@given(causes, causes)
def test_cause_is_replaced_by_each_hop(first: Cause, second: Cause) -> None:
    assert hop(hop({}, cause=first), cause=second) == hop({}, cause=second)


@given(causes)
def test_unknown_cause_removes_the_previous_one(cause: Cause) -> None:
    assert hop(hop({}, cause=cause)) == hop({}) | {"REDRIVE_FIRST_FAILED_AT": NOW.isoformat()}


def test_first_failure_time_survives_every_hop() -> None:
    first = hop({}, cause=Cause("E", "", NOW, "c", 1))
    later = hop(first, cause=Cause("E", "", NOW + timedelta(hours=2), "c", 2))
    attempt = Attempt.of(later, message_id="9:9:9", retried=True)
    assert attempt.first_failed_at == NOW
    assert attempt.failing_for(NOW + timedelta(hours=3)) == timedelta(hours=3)


def test_failing_time_with_late_clock_is_not_negative() -> None:
    attempt = Attempt(1, "1:2:3", NOW)
    assert attempt.failing_for(NOW - timedelta(hours=1)) == timedelta()
    assert Attempt(0, "1:2:3", None).failing_for(NOW) == timedelta()


@given(forged)
@example({"RECONSUMETIMES": "5", "REDRIVE_FIRST_FAILED_AT": NOW.isoformat()})
def test_source_message_with_forged_counts_has_attempt_one(
    ours: dict[str, str],
) -> None:
    attempt = Attempt.of(ours, message_id="1:2:3", retried=False)
    assert (attempt.number, attempt.reconsume_times, attempt.first_failed_at) == (1, 0, None)


@pytest.mark.parametrize(
    "origin", ["", "1:2:3\nmoved to nowhere", "x" * 129, "größe", "\x1b[2J", "a b"]
)
def test_invalid_origin_is_replaced(origin: str) -> None:
    assert hop({"ORIGIN_MESSAGE_ID": origin}, message_id="1:2:3")["ORIGIN_MESSAGE_ID"] == "1:2:3"


@pytest.mark.parametrize("origin", ["5:0:-1", "5:0:3:7", "(5,0,-1,-1)", "AC110001:00002A9F.7-x_"])
def test_origin_of_any_client_is_kept(origin: str) -> None:
    assert hop({"ORIGIN_MESSAGE_ID": origin})["ORIGIN_MESSAGE_ID"] == origin


@pytest.mark.parametrize("origin", ["5:0:-1", "7:8:-1"])
def test_first_id_distinguishes_messages_of_one_origin(origin: str) -> None:
    carried = {"ORIGIN_MESSAGE_ID": origin}
    one, other = (hop(carried, message_id=message_id) for message_id in ("7:8:-1", "7:9:-1"))
    assert one["ORIGIN_MESSAGE_ID"] == other["ORIGIN_MESSAGE_ID"] == origin
    assert (one["REDRIVE_FIRST_ID"], other["REDRIVE_FIRST_ID"]) == ("7:8:-1", "7:9:-1")
    assert hop(one, message_id="9:9:-1")["REDRIVE_FIRST_ID"] == "7:8:-1"
    replayed = envelope.for_replay(one, replay="shop/fix", source="u@0:1:2:0")
    assert hop(replayed, message_id="9:9:-1")["REDRIVE_FIRST_ID"] == "7:8:-1"


@pytest.mark.parametrize(("sequenced", "first_id"), [(False, "9:9:-1"), (True, "7:8:-1")])
def test_first_id_copied_to_source_topic_is_ignored(
    sequenced: bool,  # noqa: FBT001 - a parameter
    first_id: str,
) -> None:
    copied = hop({}, message_id="7:8:-1")

    def first_id_of(properties: dict[str, str]) -> str:
        return Attempt.of(
            properties, message_id="9:9:-1", retried=False, sequenced=sequenced
        ).first_id

    assert first_id_of(copied) == "9:9:-1"
    assert (
        first_id_of(envelope.for_replay(copied, replay="shop/fix", source="u@0:1:2:0")) == first_id
    )


@given(texts)
def test_forged_properties_are_not_an_error(text: str) -> None:
    names = ("REDRIVE_FIRST_FAILED_AT", "REDRIVE_SCHEMA_VERSION", "RECONSUMETIMES")
    attempt = Attempt.of(dict.fromkeys(names, text), message_id="1:2:3", retried=True)
    assert attempt.failing_for(NOW) >= timedelta()
    assert attempt.schema_version is None or attempt.schema_version >= 0
    assert envelope.reconsume_times({"RECONSUMETIMES": text}) >= 0


def test_first_failure_time_without_zone_is_ignored() -> None:
    written = {"REDRIVE_FIRST_FAILED_AT": "2026-11-21T09:00:00"}
    assert Attempt.of(written, message_id="1:2:3", retried=True).first_failed_at is None


@given(users, forged, causes)
def test_next_attempt_has_the_cause_of_this_one(
    user: dict[str, str], ours: dict[str, str], cause: Cause
) -> None:
    attempt = Attempt.of(hop(user | ours, cause=cause), message_id="9:9:9", retried=True)
    assert attempt.cause is not None
    assert attempt.cause.to_properties() == cause.to_properties()


def test_schema_version_of_source_survives_every_hop() -> None:
    first = Attempt.of({}, message_id="1:2:3", retried=False, schema_version=7)
    sent = envelope.for_hop(
        {}, first, policy=POLICY, verdict=Retry(timedelta(seconds=1), 1), cause=None
    )
    assert sent["REDRIVE_SCHEMA_VERSION"] == "7"
    # A Java consumer in between sends with the retry topic's own versions.
    assert Attempt.of(sent, message_id="4:5:6", retried=True, schema_version=0).schema_version == 7
    assert Attempt.of({}, message_id="4:5:6", retried=True, schema_version=0).schema_version is None
    replayed = envelope.for_replay(sent, replay="shop/fix", source="u@0:1:2:0")
    assert Attempt.of(replayed, message_id="7:8:9", retried=False).schema_version == 7


@given(st.integers(0, 999_999_999))
def test_retry_count_round_trips(count: int) -> None:
    assert envelope.reconsume_times({"RECONSUMETIMES": str(count)}) == count
    assert envelope.replays({"REDRIVE_REPLAYS": str(count)}) == count


@pytest.mark.parametrize("text", ["", "-1", "+1", " 1", "1 ", "1.0", "1e3", "٣", "x", "9" * 5_000])
def test_invalid_retry_count_is_zero(text: str) -> None:
    assert envelope.reconsume_times({"RECONSUMETIMES": text}) == 0
    assert envelope.replays({"REDRIVE_REPLAYS": text}) == 0


def test_missing_properties_count_no_retry_and_no_replay() -> None:
    assert envelope.reconsume_times({}) == envelope.replays({}) == 0


@given(users, forged, causes)
def test_replay_resets_counts_and_keeps_origin_and_cause(
    user: dict[str, str], ours: dict[str, str], cause: Cause
) -> None:
    dead = hop(user | ours, Dead(DeadReason.RETRIES_EXHAUSTED, 4), cause)
    sent = envelope.for_replay(dead, replay="shop/after-fix", source="u@0:1:2:0")
    assert envelope.reconsume_times(sent) == 0
    assert envelope.replays(sent) == envelope.replays(dead) + 1
    assert sent["REDRIVE_REPLAY"] == "shop/after-fix"
    assert sent.items() >= cause.to_properties().items()
    assert sent["ORIGIN_MESSAGE_ID"] == dead["ORIGIN_MESSAGE_ID"]
    assert sent.items() >= user.items()
    assert not {"DELAY_TIME", "REDRIVE_DEAD_REASON", "REDRIVE_FIRST_FAILED_AT"} & sent.keys()


def test_replay_count_survives_another_dead_letter() -> None:
    properties: dict[str, str] = {}
    for count in range(1, 4):
        dead = hop(properties, Dead(DeadReason.RETRIES_EXHAUSTED, 4))
        properties = envelope.for_replay(dead, replay=f"shop/run-{count}", source="u@0:1:2:0")
        assert envelope.replays(properties) == count


FINGERPRINT = "d885816048568ce0"  # stored with dead letters: it must never change
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
    """Run *source* as the module *module*, and return the exception that it raised."""
    try:
        exec(compile(source, "shop.py", "exec"), {"__name__": module})  # noqa: S102 - a test's own
    except Exception as error:  # noqa: BLE001 - any exception
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
def test_cause_properties_stay_within_their_limits(cause: Cause) -> None:
    written = cause.to_properties()
    assert len(written.pop("REDRIVE_CAUSE_TRACE").encode("utf-8")) <= 4_096
    for value in written.values():
        assert len(value.encode("utf-8")) <= 1_024


@pytest.mark.parametrize("character", ["x", "é", "語", "🚀", "\ud800"])
def test_long_cause_is_cut_at_its_limit(character: str) -> None:
    written = Cause("E", character * 2_000, NOW, "c", 1).to_properties()["REDRIVE_CAUSE_MESSAGE"]
    assert 1_024 - 4 < len(written.encode("utf-8")) <= 1_024
    assert (character * 2_000).startswith(written) or character == "\ud800"


def test_short_cause_is_kept_unchanged() -> None:
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


def test_trace_lists_the_raising_frames_then_the_cause() -> None:
    lines = describe(raised(SHOP)).trace.splitlines()
    assert "test_envelope.raised:" in lines.pop(2)
    assert lines == [
        "at shop.handle:9",
        "at shop.<module>:10",
        "caused by LookupError: no account for o-17",
        "at shop.Till.pay:4",
        "at shop.handle:7",
    ]


def test_deep_trace_keeps_its_innermost_calls() -> None:
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
def test_line_numbers_do_not_change_fingerprint(lines: int) -> None:
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
def test_different_failures_have_different_fingerprints(old: str, new: str) -> None:
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


def test_redaction_removes_every_match_from_the_cause() -> None:
    source = SHOP.replace('"o-17"', '"ann@example.com"').replace('"not paid"', '"bob@example.com"')
    error = raised(source)
    cause = describe(error, Redaction([r"\S+@\S+"]))
    assert "@" not in "".join(cause.to_properties().values())
    assert cause.message == "[redacted]"
    assert "caused by LookupError: no account for [redacted]" in cause.trace
    assert cause.fingerprint != describe(error).fingerprint


def test_redaction_covers_the_names_in_a_trace() -> None:
    cause = describe(raised(SHOP), Redaction(["Till|Lookup"]))
    assert "caused by [redacted]Error: no account for o-17" in cause.trace
    assert "at shop.[redacted].pay:4" in cause.trace


def test_redaction_hook_runs_after_the_patterns() -> None:
    redaction = Redaction([re.compile("secret", re.IGNORECASE)], hook=str.upper)
    assert redaction("a Secret plan") == "A [REDACTED] PLAN"


def test_redaction_hook_that_fails_hides_the_text() -> None:
    assert Redaction(hook=lambda text: text[10_000])("secret") == (
        "[redacted: the hook raised IndexError]"
    )


def test_redaction_hook_that_returns_a_hostile_text_is_read() -> None:
    class Hostile(str):
        __slots__ = ()

        def encode(self, *_: Any) -> bytes:  # noqa: ANN401
            raise ValueError

        __str__ = encode  # type: ignore[assignment]

    shown = Redaction(hook=lambda _: Hostile("shown"))("secret")
    assert (type(shown), shown) == (str, "shown")


def test_redaction_hook_that_returns_no_text_hides_it() -> None:
    hook: Any = {"secret": None}.get
    assert Redaction(hook=hook)("secret") == "[redacted: the hook returned NoneType]"


@pytest.mark.parametrize("hook", ["upper", 3, asyncio.sleep])
def test_redaction_hook_that_is_no_function_is_refused(hook: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidSpecError, match="hook of a redaction must be a function"):
        Redaction(hook=hook)


def test_exception_class_without_module_is_described() -> None:
    cause = describe(type("NamelessError", (Exception,), {"__module__": None})("broken"))
    assert (cause.type, cause.message) == ("NamelessError", "broken")


def test_exception_without_readable_text_is_described() -> None:
    class BrokenError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert (describe(BrokenError()).type, describe(BrokenError()).message) == ("BrokenError", "")


class Nameless(type):
    """A class without a readable name."""

    def __getattribute__(cls, name: str) -> object:
        if name == "__name__":
            raise RuntimeError
        return super().__getattribute__(name)


def test_exception_without_readable_parts_is_described() -> None:
    class HiddenError(Exception, metaclass=Nameless):
        pass

    class UntraceableError(Exception):
        @property
        def __traceback__(self) -> None:  # type: ignore[override]  # a broken class
            raise RuntimeError

    for error in (HiddenError("x"), UntraceableError("x")):
        cause = describe(error)
        assert (cause.type, cause.message, cause.trace) == (class_name(error), "", "")
        assert cause.fingerprint


def test_circular_causes_are_cut() -> None:
    first, second = ValueError("a"), KeyError("b")
    first.__cause__, second.__cause__ = second, first
    assert describe(first).trace.count("caused by") == 4


@given(causes)
def test_cause_round_trips(cause: Cause) -> None:
    written = cause.to_properties()
    read = Cause.read(written)
    assert read is not None
    assert read.to_properties() == written


@pytest.mark.parametrize("name", ["CAUSE_TYPE", "FAILED_AT", "CONSUMER", "ATTEMPT"])
@pytest.mark.parametrize("text", [None, "x" * 5_000, "2026-11-21T09:00:00"])
def test_invalid_cause_properties_are_ignored(name: str, text: str | None) -> None:
    written = Cause("E", "m", NOW, "c", 1).to_properties()
    if text is None:
        del written[f"REDRIVE_{name}"]
    else:
        written[f"REDRIVE_{name}"] = text
    assert (Cause.read(written) is None) == (text is None or name in {"FAILED_AT", "ATTEMPT"})


@pytest.mark.parametrize("text", ["x", "é", "a.b:", "dead", "cafe-", "' \"", "word "])
def test_cause_of_a_long_text_is_described_in_time(text: str) -> None:
    began = time.thread_time()
    describe(ValueError(f"cannot parse {text * (100_000 // len(text))}"))
    assert time.thread_time() - began < 5


def test_quadratic_pattern_on_a_long_text_ends_in_time() -> None:
    error = ValueError("x" * 40_000)
    error.__cause__ = LookupError("x" * 40_000)
    began = time.thread_time()
    cause = describe(error, Redaction([r"\S+@\S+"]))
    assert time.thread_time() - began < 5
    assert "x" * 1_024 in cause.message
    assert "x" * 1_024 in cause.trace


@given(st.integers(0, 8_000), st.integers(1, 3_000))
def test_cut_cause_shows_no_part_of_a_redacted_match(before: int, size: int) -> None:
    error = ValueError("." * before + "<" + "s" * size + ">" + "." * 10_000)
    error.__cause__ = LookupError(str(error))
    cause = describe(error, Redaction(["<s+>"]))
    shown = cause.message + cause.trace + "".join(cause.to_properties().values())
    assert "<s" not in shown


@pytest.mark.parametrize("pattern", ["(", b"x", re.compile(b"x"), 3])
def test_invalid_redaction_pattern_is_refused(pattern: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidSpecError, match="must be a regular expression for text"):
        Redaction([r"\d+", pattern])


@pytest.mark.parametrize("patterns", ["secret", None, 5])
def test_redaction_without_a_list_is_refused(patterns: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidSpecError, match="would be a pattern"):
        Redaction(patterns)


def test_redaction_keeps_the_patterns_of_an_iterator() -> None:
    redaction = Redaction(iter(["secret"]))  # type: ignore[arg-type]
    assert redaction("a secret") == redaction("a secret") == "a [redacted]"


REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "properties.md"
NAMES = {v for k, v in vars(envelope).items() if k.isupper() and isinstance(v, str)}
LONG_POLICY = Policy(TopicName("shop", "prod", "orders"), "s" * (MAX_NAME - len("orders--RETRY")))
LONG = "ä" * 5_000
MANY = 999_999_999  # the highest number that is read from a property
LATE = datetime(2026, 11, 21, 9, 8, 7, 654_321, tzinfo=UTC)
ODD_ZONE = timezone(timedelta(hours=23, minutes=59, seconds=59, microseconds=999_999))
CAUSE = Cause(LONG, LONG, LATE, consumer=LONG, attempt=MANY + 1, fingerprint="f" * 16, trace=LONG)
ATTEMPT = Attempt(MANY, "1" * 128, LATE.replace(tzinfo=ODD_ZONE), schema_version=2**64 - 1)
NOT_COPIED = {
    envelope.NOT_COPIED: "SchemaNotFound,SchemaUnsupported,TooBig,Unreadable",
    SOURCE_MESSAGE_ID: "1:2:3:4",
    ENCODED: "{}",
    PAYLOAD_PREFIX: "7",
}
"""Written by `forwarder` on a dead letter that is no copy of its message."""
REPLAYED = {
    REPLAYS: str(MANY), REPLAY: "shop/again", REPLAY_SOURCE: "u@0:1:1:0", REPLAY_PROOF: "0f",
    **dict.fromkeys(NOT_COPIED, "0"),
}  # fmt: skip


def next_hop(verdict: Retry | Dead, before: dict[str, str]) -> dict[str, str]:
    return envelope.for_hop(before, ATTEMPT, policy=LONG_POLICY, verdict=verdict, cause=CAUSE)


RETRIED = next_hop(Retry(MAX_DELAY, 1_000), REPLAYED)
DEAD = [next_hop(Dead(reason, MANY + 1), RETRIED) | NOT_COPIED for reason in DeadReason]
AGAIN = envelope.for_replay(DEAD[0], replay="shop/more", source="u@0:1:2:0") | {
    REPLAY_PROOF: "4a"  # as a task writes it
}


@pytest.fixture(scope="module")
def rows() -> dict[str, list[str]]:
    """Cells of the reference by property: meaning, effect of retry, death and replay, limit."""
    cells = re.findall(r"^\| `(\w+)` \| (.*) \|$", REFERENCE.read_text("utf-8"), re.MULTILINE)
    table = {name: row.split(" | ") for name, row in cells}
    return {name: row for name, row in table.items() if len(row) == 5}


def test_every_property_is_documented_and_no_other(rows: dict[str, list[str]]) -> None:
    assert set(rows) == NAMES


@pytest.mark.parametrize(
    ("column", "before", "after"),
    [
        (1, REPLAYED, RETRIED),
        (2, REPLAYED | dict.fromkeys([DELAY_TIME], "1"), DEAD[0]),
        (3, DEAD[0], AGAIN),
    ],
    ids=["retry", "dead letter", "replay"],
)
def test_property_changes_per_hop_are_as_documented(
    rows: dict[str, list[str]], column: int, before: dict[str, str], after: dict[str, str]
) -> None:
    for name, row in rows.items():
        documented = row[column].partition(":")[0]
        observed = "kept" if after.get(name) == before.get(name) else "written"
        if name not in after:
            observed = "no"
        assert (name, documented) == (name, observed)


def test_property_sizes_are_as_documented(rows: dict[str, list[str]]) -> None:
    sizes = {
        name: max(len(sent.get(name, "").encode()) for sent in [RETRIED, *DEAD, AGAIN])
        for name in NAMES
    }
    limits = {name: row[-1].removesuffix(" bytes") for name, row in rows.items()}
    assert {name: size for name, size in sizes.items() if limits[name].isdigit()} == {
        name: int(limit) for name, limit in limits.items() if limit.isdigit()
    }


def test_every_dead_letter_reason_is_documented(rows: dict[str, list[str]]) -> None:
    listed = set(re.findall(r"`(\w+)`", rows[DEAD_REASON][0]))
    assert listed == set(DeadReason)
