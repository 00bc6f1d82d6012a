"""Decoded and masked payloads."""

from __future__ import annotations

import json
import struct
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.inspection.payloads import (
    MAX_DECODED,
    MAX_MASKED,
    AvroSchema,
    DataMap,
    ShownFields,
    decode_payload,
    mask,
    mask_text,
    mask_trace,
)
from redrive.policy.envelope import PAYLOAD_PREFIX
from redrive.reading.positions import encode_nested, encode_number

PERSONAL = st.sampled_from(
    [
        "ann.smith@example.com",
        "Ann Smith-Meyer",
        "Łukasz Żółć",
        "+49 170 1234567",
        "DE89 3704 0044 0532 0130 00",
        "4111-1111-1111-1111",
        "1984-05-13",
        "李小龙",
    ]
)
FIELDS = st.sampled_from(["items", "needs", "customer", "sha256", "first_name"])
VALUES = st.recursive(
    PERSONAL | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(FIELDS | PERSONAL, inner),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            {"items": [1, 2, 3], "customer": {"email": "ann@example.com"}, "express": True},
            '{"items": [number x3], "customer": {"email": string(15)}, "express": boolean}',
        ),
        ([1, "a", "b", None, 2.5, "c"], "[number, string(1) x2, null, number, ... x1]"),
        ({"ann@example.com": 1, "1234567": 2}, "{string(15): number, string(7): number}"),
        ([], "[]"),
        ("ann", "string(3)"),
    ],
)
def test_masked_value_has_types_and_lengths(value: object, text: str) -> None:
    assert mask(value) == text


@pytest.mark.parametrize(
    ("content", "form", "text"),
    [
        (b'{"a": 1}', "JSON", '{"a": number}'),
        (b"Ann Smith", "text", "bytes(9)"),
        (b"\xff\x00", "bytes", "bytes(2)"),
        (b"[" * 5_000, "text", "bytes(5000)"),
        (b"9" * 5_000, "text", "bytes(5000)"),
        (None, "null", "null"),
    ],
)
def test_payload_of_unknown_form_shows_its_size(
    content: bytes | None, form: str, text: str
) -> None:
    payload = decode_payload(content, {})
    assert (payload.form, payload.masked()) == (form, text)


NESTED = {
    "needs": "warehouse",
    "paid": True,
    "items": [{"sku": "A-7", "count": 2}, {"sku": "B-1", "count": 1}],
    "customer": {"needs": "rest", "sku": "Ann"},
}


@pytest.mark.parametrize(
    ("paths", "text"),
    [
        (
            ["$.needs", "$.paid", "$.items[*].sku"],
            (
                '{"needs": "warehouse", "paid": true, "items": [{"sku": "A-7", "count": number}, '
                '{"sku": "B-1", "count": number}], '
                '"customer": {"needs": string(4), "sku": string(3)}}'
            ),
        ),
        (
            ["$.items", "$.customer", "$[*].needs", "$.needs.more"],
            (
                '{"needs": string(9), "paid": boolean, '
                '"items": [{"sku": string(3), "count": number} x2], '
                '"customer": {"needs": string(4), "sku": string(3)}}'
            ),
        ),
    ],
    ids=["values", "structures"],
)
def test_only_values_of_shown_fields_are_readable(paths: list[str], text: str) -> None:
    payload = decode_payload(json.dumps(NESTED).encode(), {})
    assert payload.masked(ShownFields.of(paths)) == text


def test_data_as_a_name_is_masked_even_if_it_matches() -> None:
    fields = ShownFields.of(["$.ann", "$.tags[*]"])
    assert mask(DataMap(ann="Smith"), shown=fields) == "{string(3): string(5)}"
    assert mask({"tags": ["a", b"b", None]}, shown=fields) == '{"tags": ["a", bytes(1), null]}'
    assert mask({"tags": {"[*]": "a"}}, shown=fields) == '{"tags": {string(3): string(1)}}'
    assert mask({"n_20231": 1}, shown=ShownFields.of(["$.n_20231"])) == '{"n_20231": 1}'


def test_shown_half_of_a_surrogate_pair_can_be_written() -> None:
    payload = decode_payload(rb'{"sku": "A\ud800\u00e4"}', {})
    shown = payload.masked(ShownFields.of(["$.sku"]))
    assert shown == '{"sku": "A\\ud800ä"}'
    assert shown.encode()


def test_prefix_and_encryption_are_recognized() -> None:
    assert decode_payload(b'{"x": 1}[2]', {PAYLOAD_PREFIX: "8"}).masked() == "[number]"
    payload = decode_payload(b"[2]", {}, encrypted=True)
    assert (payload.form, payload.masked(), payload.clear) == ("encrypted", "bytes(3)", "WzJd")


def test_masked_payload_is_bounded() -> None:
    content = json.dumps({f"field_{chr(97 + n % 26)}_{n % 999}": n for n in range(900)}).encode()
    assert len(decode_payload(content, {}).masked()) == MAX_MASKED


@given(value=VALUES, planted=PERSONAL, words=st.sampled_from(["unknown customer {}", "{} failed"]))
def test_masked_output_contains_no_personal_datum(value: Any, planted: str, words: str) -> None:  # noqa: ANN401
    payload = decode_payload(json.dumps({"customer": planted, "more": value}).encode(), {})
    message = words.format(planted)
    shown = payload.masked() + mask_text(message, payload.secrets)
    shown += mask_text(message[: len(message) - 2], payload.secrets)
    assert planted.casefold() not in shown.casefold()
    for part in planted.replace("-", " ").split():
        assert len(part) < 3 or part.casefold() not in shown.casefold()


@given(planted=PERSONAL)
def test_datum_of_a_text_payload_is_hidden(planted: str) -> None:
    payload = decode_payload(f"name={planted};".encode(), {})
    assert planted not in payload.masked() + mask_text(
        f"can't parse name={planted}", payload.secrets
    )


def test_repeated_texts_of_a_payload_do_not_delay_masking() -> None:
    start = time.thread_time()
    assert mask_text("no answer for Li Ng", ["li ng"] * 200_000) == "no answer for ?"
    assert time.thread_time() - start < 3


def test_many_phrases_of_a_payload_do_not_delay_masking() -> None:
    words = " ".join(chr(97 + n % 26) for n in range(1_000))
    start = time.thread_time()
    secrets = [words[at : at + size] for size in range(3, 30) for at in range(1_000)]
    assert set(mask_text(words, secrets)) == {"?"}
    assert time.thread_time() - start < 3


def test_folded_phrase_of_a_cause_is_hidden() -> None:
    assert mask_text("no such: Jo ẞ An", ["jo ss an"]) == "no such: ?"


def test_repeated_name_of_json_hides_both_values() -> None:
    payload = decode_payload(b'{"name": "Schmidt", "name": "Meyer"}', {})
    assert mask_text("no Schmidt, no Meyer", payload.secrets) == "no ?, no ?"


def test_bytes_of_avro_are_hidden_in_a_cause() -> None:
    payload = decode_payload(b"\x0eSchmidt", {}, AvroSchema(b'"bytes"'))
    assert (payload.form, mask_text("no Schmidt", payload.secrets)) == ("Avro", "no ?")


def test_fields_without_bytes_are_bounded() -> None:
    definition: dict[str, Any] = {"type": "record", "name": "r0", "fields": []}
    for level in range(1, 14):
        fields = [
            {"name": f"f{n}", "type": definition if n == 0 else f"r{level - 1}"} for n in range(10)
        ]
        definition = {"type": "record", "name": f"r{level}", "fields": fields}
    schema = AvroSchema(json.dumps(definition).encode())
    start = time.thread_time()
    assert decode_payload(b"", {}, schema).form == "bytes"
    assert time.thread_time() - start < 3


def test_text_of_a_cause_keeps_its_words() -> None:
    text = "no answer from the warehouse within 200 ms for 'order-17' of ann@example.com"
    shown = mask_text(text, ["acme"])
    assert shown == "no answer from the warehouse within ? ms for ? of ?"


def test_line_of_a_text_within_a_trace_is_hidden() -> None:
    text = "no customer\nat ann@example.com:1984\nat Schmidt:1984"
    assert mask_trace(f"at shop.work:7\ncaused by KeyError: {text}") == [
        "at shop.work:7",
        "caused by KeyError",
    ]


def test_trace_keeps_places_and_classes() -> None:
    trace = "at fulfil._fulfil:61\ncaused by ValueError: ann@example.com\nAnn Smith\nat a b:1"
    assert mask_trace(trace) == ["at fulfil._fulfil:61", "caused by ValueError"]


SCHEMA = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "email", "type": ["null", "string"]},
        {"name": "tags", "type": {"type": "map", "values": "int"}},
        {"name": "sizes", "type": {"type": "array", "items": "double"}},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["NEW", "OLD"]}},
        {"name": "hash", "type": {"type": "fixed", "name": "Hash", "size": 2}},
        {"name": "next", "type": ["null", "shop.Order"]},
        {"name": "paid", "type": "boolean"},
        {"name": "rate", "type": "float"},
        {"name": "raw", "type": "bytes"},
    ],
}
ORDER = (
    b"\x81\x01"  # -65
    b"\x02\x06ann"
    b"\x02\x06ann\x08\x00"
    b"\x01\x10" + struct.pack("<d", 1.5) + b"\x00"  # a block with its size
    b"\x02\xab\xcd\x00\x01" + struct.pack("<f", 0.5) + b"\x04\x01\x02"
)


def test_avro_payload_is_decoded_by_its_schema() -> None:
    protocol = encode_nested(1, b"") + encode_nested(3, json.dumps(SCHEMA).encode())
    schema = AvroSchema.of_protocol(protocol + encode_number(4, 4))
    assert schema is not None
    assert schema.decode(ORDER) == {
        "id": -65,
        "email": "ann",
        "tags": {"ann": 4},
        "sizes": [1.5],
        "kind": "OLD",
        "hash": b"\xab\xcd",
        "next": None,
        "paid": True,
        "rate": 0.5,
        "raw": b"\x01\x02",
    }
    payload = decode_payload(ORDER, {}, schema)
    assert payload.form == "Avro"
    assert "ann" not in payload.masked()
    assert '"tags": {string(3): number}, "sizes": [number]' in payload.masked()
    assert json.loads(payload.clear)["email"] == "ann"
    assert "ann" in set(payload.secrets)
    assert AvroSchema.of_protocol(protocol + encode_number(4, 2)) is None


@given(content=st.binary(max_size=40))
def test_any_bytes_are_decoded_or_shown_as_bytes(content: bytes) -> None:
    schema = AvroSchema(json.dumps(SCHEMA).encode())
    for payload in (decode_payload(content, {}, schema), decode_payload(content, {})):
        assert payload.masked()
        assert isinstance(payload.clear, str)
        assert isinstance(mask_text("no such order", payload.secrets), str)


@pytest.mark.parametrize("depth", [40, 900, 990, 5_000])
def test_deeply_nested_payload_is_masked(depth: int) -> None:
    payload = decode_payload(b'["Ann",' * depth + b"1" + b"]" * depth, {})
    assert "Ann" not in payload.masked()
    assert mask_text("unknown Ann", payload.secrets) == "unknown ?"


def test_large_payload_is_not_decoded() -> None:
    payload = decode_payload(b'"' + b"a" * MAX_DECODED + b'"', {})
    assert (payload.form, payload.masked()) == ("bytes", f"bytes({MAX_DECODED + 2})")


@pytest.mark.parametrize(
    "definition",
    [
        b'{"type": "array", "items": "null"}',
        b'{"type": "record", "name": "R", "fields": [{"name": "r", "type": "R"}]}',
        b'{"type": "enum"}',
        b'"unknown"',
    ],
)
def test_hostile_schema_shows_payload_as_bytes(definition: bytes) -> None:
    content = b"\xfe\xff\xff\xff\xff\xff\xff\xff\x7f"
    assert decode_payload(content, {}, AvroSchema(definition)).form == "bytes"
