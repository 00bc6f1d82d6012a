from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import cast

import pulsar

from redrive.delivery.middleware.ack_timeouts import AckTimeouts
from redrive.policy.naming import TopicName
from redrive.testing.broker import InMemoryMessage, VirtualClock

NOW = datetime(2026, 11, 23, tzinfo=UTC)


def test_a_message_that_is_handed_out_again_and_again_delays_no_other_ones_end() -> None:
    clock = VirtualClock(NOW)
    ack_timeouts = AckTimeouts(timedelta(seconds=10), clock)
    topic = TopicName("shop", "prod", "orders")
    put_off, other = (
        cast("pulsar.Message", InMemoryMessage(topic, pulsar.MessageId(-1, 1, n), b"", NOW))
        for n in range(2)
    )
    ack_timeouts.begin(put_off)
    ack_timeouts.begin(other)
    clock.advance(timedelta(seconds=1))
    ack_timeouts.begin(put_off)
    assert ack_timeouts.next_end() == 10
    clock.advance(timedelta(seconds=9))
    assert ack_timeouts.expired() == [other]
    assert ack_timeouts.next_end() == 11
