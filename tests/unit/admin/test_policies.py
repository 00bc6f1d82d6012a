from __future__ import annotations

from typing import Any

import pytest

from redrive.admin.policies import Deduplicates, Holds, KeepsBacklog, TopicPolicy, Ttl, Write

STAYS = Holds("inactive", (("delete", False),), (("after", 60),))
EVICTS = {"limitSize": 5, "policy": "consumer_backlog_eviction"}
REFUSES = {"limitSize": 5, "policy": "producer_exception"}
HOLDS = {"limitSize": 5, "policy": "producer_request_hold"}


@pytest.mark.parametrize(
    ("policy", "found"),
    [
        (Deduplicates(), True),
        (Ttl(0), 0),
        (Ttl(60), 60),
        (STAYS, {"delete": False, "after": 5}),
        (KeepsBacklog(None), None),
        (KeepsBacklog(None), {"destination_storage": HOLDS, "message_age": REFUSES}),
        (KeepsBacklog(5), {"destination_storage": HOLDS}),
    ],
)
def test_what_is_as_it_should_be_is_not_written(
    policy: TopicPolicy,
    found: Any,  # noqa: ANN401 - the broker's JSON
) -> None:
    assert list(policy.writes(found)) == []


@pytest.mark.parametrize(
    ("policy", "found", "written"),
    [
        (Deduplicates(), None, Write("deduplicationEnabled", body=True)),
        (Deduplicates(), False, Write("deduplicationEnabled", body=True)),
        (Ttl(0), None, Write("messageTTL?messageTTL=0", None)),
        (Ttl(0), 60, Write("messageTTL?messageTTL=0", None)),
        (STAYS, None, Write("inactive", {"delete": False, "after": 60})),
        (STAYS, {"delete": True, "after": 5}, Write("inactive", {"delete": False, "after": 5})),
        (
            KeepsBacklog(None),
            {"destination_storage": HOLDS, "message_age": EVICTS},
            Write("backlogQuota?backlogQuotaType=message_age", REFUSES),
        ),
        (
            KeepsBacklog(5),
            {},
            Write("backlogQuota?backlogQuotaType=destination_storage", REFUSES),
        ),
        (
            KeepsBacklog(5),
            {"destination_storage": {"limit": 9, "limitSize": 9, "policy": "producer_exception"}},
            Write("backlogQuota?backlogQuotaType=destination_storage", REFUSES),
        ),
    ],
)
def test_what_is_not_is_written_and_the_rest_of_it_stays(
    policy: TopicPolicy,
    found: Any,  # noqa: ANN401 - the broker's JSON
    written: Write,
) -> None:
    assert list(policy.writes(found)) == [written]
