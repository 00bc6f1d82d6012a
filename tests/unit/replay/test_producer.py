"""A receipt is believed only where it can be true."""

from __future__ import annotations

from concurrent.futures import Future

import pulsar
import pytest

from redrive.replay.position import Position
from redrive.replay.producer import SendFailedError, Sent, UnexpectedDuplicateError
from redrive.replay.rows import DeadLetter

STORED, DROPPED = pulsar.MessageId(0, 5, 6, -1), pulsar.MessageId(-1, -1, -1, -1)
LETTER = DeadLetter(
    -1, Position(3, 4, 0), 1, chunked=False, unreadable=False, key=None, ordering_key=None,
    value=b"", properties={}, publish_time=1, event_time=None,
)  # fmt: skip


def sent(result: pulsar.Result, stored_as: pulsar.MessageId, *, resumed_at: int) -> Sent:
    outcome: Future[tuple[pulsar.Result, pulsar.MessageId]] = Future()
    outcome.set_result((result, stored_as))
    return Sent(LETTER, 100, resumed_at, outcome)


@pytest.mark.parametrize("resumed_at", [-1, 99, 100, 500])
def test_a_message_that_was_stored_is_no_duplicate(resumed_at: int) -> None:
    assert not sent(pulsar.Result.Ok, STORED, resumed_at=resumed_at).is_duplicate()


@pytest.mark.parametrize("resumed_at", [100, 500])
def test_a_message_known_before_the_producer_was_opened_may_be_dropped(resumed_at: int) -> None:
    assert sent(pulsar.Result.Ok, DROPPED, resumed_at=resumed_at).is_duplicate()


@pytest.mark.parametrize("resumed_at", [-1, 99])
def test_any_other_message_that_is_dropped_is_an_error(resumed_at: int) -> None:
    with pytest.raises(UnexpectedDuplicateError, match=f"known up to {resumed_at}"):
        sent(pulsar.Result.Ok, DROPPED, resumed_at=resumed_at).is_duplicate()


def test_a_message_without_receipt_is_an_error() -> None:
    with pytest.raises(SendFailedError, match="MessageTooBig"):
        sent(pulsar.Result.MessageTooBig, DROPPED, resumed_at=500).is_duplicate()
