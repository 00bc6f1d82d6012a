"""A reader may give messages again, and what lies before its beginning; readings have each once."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import pulsar
import pytest

from redrive.policy.naming import TopicName
from redrive.replay.topic import reading
from redrive.replay.topic.position import EntryId
from redrive.replay.topic.reading import ReadableTopic, SourceSilentError


@dataclass
class Read:
    """A message with a place alone."""

    place: tuple[int, int, int]

    def message_id(self) -> pulsar.MessageId:
        ledger, entry, index = self.place
        return pulsar.MessageId(-1, ledger, entry, index)


@dataclass
class Repeating:
    """In the place of a client and its reader; gives these messages."""

    places: list[tuple[int, int, int]]
    closed: list[bool] = field(default_factory=list)

    def create_reader(self, *_: Any, **__: Any) -> Repeating:  # noqa: ANN401
        return self

    def read_next(self, _timeout: int) -> Read:
        return Read(self.places.pop(0))

    def close(self) -> None:
        self.closed.append(True)


def test_each_message_comes_once_in_the_order_they_were_written() -> None:
    batch = [(7, 3, 0), (7, 3, 1)]
    places = [(7, 2, 0), (7, 2, 1), *batch, (7, 4, -1), (7, 3, 1), (7, 4, -1), (8, 0, -1)]
    client = Repeating([*places, (8, 1, -1)])
    topic = ReadableTopic(
        cast("pulsar.Client", client), "http://p", TopicName("shop", "prod", "orders-DLQ")
    )
    found = reading.messages(topic, -1, (EntryId(7, 2), EntryId(8, 0)), 10)
    assert [cast("Read", each).place for each in found] == [*batch, (7, 4, -1), (8, 0, -1)]
    assert client.closed


class Silent(Repeating):
    """Gives no message; of what lies behind an open transaction it says that it is not there."""

    def read_next(self, _timeout: int) -> Read:
        raise pulsar.Timeout

    def has_message_available(self) -> bool:
        return False


@pytest.mark.parametrize(("sent", "ends"), [(EntryId(7, 9), True), (EntryId(7, 3), False)])
def test_a_reading_ends_where_the_broker_has_sent_all(
    monkeypatch: pytest.MonkeyPatch, sent: EntryId, *, ends: bool
) -> None:
    """Not where the client says that no more is available."""
    monkeypatch.setattr(reading, "SILENCE_SECONDS", 0.1)
    client = cast("pulsar.Client", Silent([]))
    name = TopicName("shop", "prod", "orders-DLQ")
    topic = ReadableTopic(client, "http://p", name, lambda *_: sent)
    found = reading.messages(topic, -1, (EntryId(7, 2), EntryId(7, 9)), 10)
    with nullcontext() if ends else pytest.raises(SourceSilentError):
        assert not list(found)
