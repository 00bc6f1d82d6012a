"""What a producer of a range is opened with, and what that tells."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextlib import nullcontext as does_not_raise
from typing import Any, cast

import pulsar
import pytest

from redrive.policy.naming import TopicName
from redrive.reading.positions import Try, sequence_id
from redrive.reading.ranges import Range
from redrive.replay.sending import DeduplicationOffError, Sender, SentBeforeError
from redrive.replay.transport import ByClient
from tests.unit.replay.test_window import letter

TARGET, SOURCE = TopicName("shop", "prod", "retry"), TopicName("shop", "prod", "dead")


class Producers:
    """A client that notes how its producers are opened.

    Args:
        last: the last sequence ids that one after the other is opened with.
    """

    def __init__(self, *last: int) -> None:
        self.opened: dict[str, Any] = {}
        self._last = iter(last or [-1])

    def create_producer(self, _topic: str, **options: object) -> Producers:
        self.opened = options
        return self

    def last_sequence_id(self) -> int:
        return next(self._last)

    def close(self) -> None:
        pass


def test_what_is_on_its_way_is_given_up_before_its_producer_loses_its_name() -> None:
    client = Producers()
    outlet = ByClient(cast("pulsar.Client", client))
    sender = Sender(outlet, (TARGET, 0), SOURCE, Range(-1, 7, 0, 9_999), Try(1, 0))
    sender.hold(-1, None)
    # keepAliveIntervalSeconds of a broker is 30: it drops a connection that is silent for two.
    assert 0 < client.opened["send_timeout_millis"] <= 30_000


TRY = Try(1, 0)


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        pytest.param(sequence_id(TRY, 0, 0), does_not_raise(), id="its own"),
        pytest.param(-1, pytest.raises(DeduplicationOffError), id="not kept"),
        pytest.param(sequence_id(TRY, 10, 0), pytest.raises(SentBeforeError), id="another's"),
    ],
)
def test_a_producer_that_is_opened_again_to_prove_itself_tells_whose_message_was_last(
    last: int, expected: AbstractContextManager[None]
) -> None:
    outlet = ByClient(cast("pulsar.Client", Producers(-1, last)))
    sender = Sender(outlet, (TARGET, 0), SOURCE, Range(-1, 7, 0, 9_999), TRY)
    sender.hold(-1, None)
    with expected:
        sender.prove(letter(0))
