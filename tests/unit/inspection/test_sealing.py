"""Messages of an Inspection, encrypted for one call."""

from __future__ import annotations

import base64
import hashlib

import pytest

from redrive.errors import InvalidSpecError, RedriveError
from redrive.inspection.payloads import MessageRecord
from redrive.inspection.record import Recorder
from redrive.inspection.sealing import Recipient, seal
from tests.support.dead_letter_rows import dead_letter

UID = "6f1c"
RECORD = Recorder(lambda _: None)
REVEALED = Recorder(lambda _: None, reveals=True)


def records(count: int) -> list[MessageRecord]:
    """Return different records, which compression makes hardly smaller."""
    return [RECORD(dead_letter(n, hashlib.sha256(bytes([n])).hexdigest())) for n in range(count)]


def test_recipient_opens_the_records_of_its_inspection() -> None:
    recipient, sent = Recipient(), records(3)
    sealed = seal(sent, recipient.public_key, UID, 2**18)
    assert recipient.open(sealed, UID, MessageRecord) == sent
    assert b"keyHash" not in base64.b64decode(sealed)


def test_sealed_records_differ_each_time() -> None:
    recipient = Recipient()
    assert seal([], recipient.public_key, UID, 200) != seal([], recipient.public_key, UID, 200)


@pytest.mark.parametrize("part", ["sender", "content", "empty", "text"])
def test_changed_records_are_refused(part: str) -> None:
    recipient = Recipient()
    sealed = bytearray(base64.b64decode(seal(records(1), recipient.public_key, UID, 2**18)))
    sealed[0 if part == "sender" else 40] ^= 1
    text = {"empty": "", "text": "?"}.get(part, base64.b64encode(sealed).decode())
    with pytest.raises(RedriveError, match="can't be decrypted"):
        recipient.open(text, UID, MessageRecord)


def test_records_for_others_are_refused() -> None:
    recipient = Recipient()
    sealed = seal(records(1), recipient.public_key, UID, 2**18)
    with pytest.raises(RedriveError, match="can't be decrypted"):
        Recipient().open(sealed, UID, MessageRecord)
    with pytest.raises(RedriveError, match="can't be decrypted"):
        recipient.open(sealed, "another", MessageRecord)


def test_records_of_another_version_are_refused() -> None:
    recipient = Recipient()
    (record,) = records(1)
    del record["origin"]  # type: ignore[misc]  # as a job of another version
    sealed = seal([record], recipient.public_key, UID, 2**18)
    with pytest.raises(RedriveError, match="see redrive version"):
        recipient.open(sealed, UID, MessageRecord)


@pytest.mark.parametrize("share", [0.9, 0.5, 0.1])
def test_first_records_that_fit_are_sealed(share: float) -> None:
    recipient, sent = Recipient(), records(50)
    length = len(seal(sent, recipient.public_key, UID, 2**18))
    most = int(length * share)
    sealed = seal(sent, recipient.public_key, UID, most)
    opened = recipient.open(sealed, UID, MessageRecord)
    assert len(sealed) <= most
    assert opened == sent[: len(opened)]
    assert len(opened) > 50 * share - 10


def test_record_that_does_not_fit_leaves_none() -> None:
    recipient = Recipient()
    sealed = seal(records(1), recipient.public_key, UID, 90)
    assert recipient.open(sealed, UID, MessageRecord) == []


def test_record_that_does_not_fit_alone_is_left_out() -> None:
    recipient, (*sent, last) = Recipient(), records(4)
    values = {str(n): hashlib.sha256(bytes([n])).hexdigest() for n in range(200)}
    long = REVEALED(dead_letter(9, properties=values))
    sealed = seal([long, *sent, long, last], recipient.public_key, UID, 4_000)
    assert recipient.open(sealed, UID, MessageRecord) == [*sent, last]


def test_first_record_that_fits_alone_is_kept() -> None:
    recipient, (first, second, third) = Recipient(), records(3)
    first["trace"] = [hashlib.sha256(bytes([n])).hexdigest() for n in range(100)]
    length = len(seal([first], recipient.public_key, UID, 2**18))
    sealed = seal([first, second, third], recipient.public_key, UID, length)
    assert recipient.open(sealed, UID, MessageRecord) == [first]


def test_sealed_records_are_never_too_long_to_open() -> None:
    recipient = Recipient()
    # JSON writes six characters for each: 6 MiB of a record, and 36 MiB of the one left out.
    sent = [REVEALED(dead_letter(n, properties={"x": "\x01" * 2**20})) for n in range(6)]
    long = REVEALED(dead_letter(9, properties={"x": "\x01" * 6 * 2**20}))
    sealed = seal([long, *sent], recipient.public_key, UID, 2**18)
    assert recipient.open(sealed, UID, MessageRecord) == sent[:5]


def test_recipient_without_order_is_refused() -> None:
    with pytest.raises(InvalidSpecError, match="must be a public key of X25519"):
        seal([], base64.b64encode(bytes(32)).decode(), UID, 200)
