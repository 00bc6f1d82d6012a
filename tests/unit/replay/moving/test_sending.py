"""What a producer of a range is opened with."""

from __future__ import annotations

from typing import Any, cast

import pulsar

from redrive.policy.naming import TopicName
from redrive.replay.moving.outlets import ByClient
from redrive.replay.moving.sending import Sender
from redrive.replay.topic.position import Try
from redrive.replay.topic.ranges import Range

TARGET, SOURCE = TopicName("shop", "prod", "retry"), TopicName("shop", "prod", "dead")


class Producers:
    """A client that notes how its producers are opened."""

    def __init__(self) -> None:
        self.opened: dict[str, Any] = {}

    def create_producer(self, _topic: str, **options: object) -> Producers:
        self.opened = options
        return self

    def last_sequence_id(self) -> int:
        return -1


def test_what_is_on_its_way_is_given_up_before_its_producer_loses_its_name() -> None:
    client = Producers()
    outlet = ByClient(cast("pulsar.Client", client))
    sender = Sender(outlet, (TARGET, 0), SOURCE, Range(-1, 7, 0, 9_999), Try(1, 0))
    sender.hold(-1, None)
    # keepAliveIntervalSeconds of a broker is 30: it drops a connection that is silent for two.
    assert 0 < client.opened["send_timeout_millis"] <= 30_000
