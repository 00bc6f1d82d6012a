from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from redrive.admin.model import SubscriptionStats, read_producers, read_stats


def said(**changes: object) -> dict[str, Any]:
    """What a broker says of a subscription that nothing was ever sent to."""
    return {
        "msgBacklog": 0,
        "msgOutCounter": 0,
        "consumers": [],
        "isDurable": True,
        "nonContiguousDeletedMessagesRanges": 0,
        "earliestMsgPublishTimeInBacklog": -1,
        **changes,
    }


def test_the_subscriptions_of_a_topic_are_read() -> None:
    answer = {
        "subscriptions": {
            "s": said(
                msgBacklog=3,
                msgOutCounter=7,
                consumers=[{}, {}],
                nonContiguousDeletedMessagesRanges=2,
                earliestMsgPublishTimeInBacklog=1_500,
            ),
            "reader": said(isDurable=False),
        }
    }
    at = datetime(1970, 1, 1, 0, 0, 1, 500_000, tzinfo=UTC)
    assert read_stats(answer) == {
        "s": SubscriptionStats(3, 7, 2, durable=True, ack_holes=2, oldest=at),
        "reader": SubscriptionStats(0, 0, 0, durable=False, ack_holes=0, oldest=None),
    }


def test_the_metadata_of_producers_is_read_of_each_partition() -> None:
    producers: list[dict[str, Any]] = [{"metadata": {"a": "1"}}, {"metadata": {}}, {}]
    assert read_producers({"publishers": producers}) == [{"a": "1"}, {}, {}]
    parts = {"p-0": {"publishers": producers[:1]}, "p-1": {"publishers": []}}
    assert read_producers({"publishers": producers, "partitions": parts}) == [{"a": "1"}]


def test_partitions_are_put_together_whichever_of_them_is_empty() -> None:
    one = said(
        msgBacklog=3,
        msgOutCounter=7,
        consumers=[{}, {}],
        nonContiguousDeletedMessagesRanges=4_000,
        earliestMsgPublishTimeInBacklog=3_000,
    )
    two = {**one, "earliestMsgPublishTimeInBacklog": 2_000}
    answer = {
        "subscriptions": {"s": said()},  # what the broker itself makes of them is not looked at
        "partitions": {
            f"p-{index}": {"subscriptions": {"s": found}}
            for index, found in enumerate([one, said(), two])
        },
    }
    at = datetime(1970, 1, 1, 0, 0, 2, tzinfo=UTC)
    [found] = read_stats(answer).values()
    assert found == SubscriptionStats(6, 14, 2, durable=True, ack_holes=4_000, oldest=at)


@pytest.mark.parametrize("answer", [{}, {"subscriptions": {"s": {}}}, {"subscriptions": []}])
def test_what_no_broker_says_is_an_error(answer: dict[str, Any]) -> None:
    with pytest.raises((AttributeError, KeyError)):
        read_stats(answer)
