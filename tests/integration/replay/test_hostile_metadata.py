"""Whatever metadata a producer writes, a Replay moves a dead letter, or refuses or counts it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from redrive.replay.job import run as runs
from tests.support.hostile_metadata import metadata, single, written
from tests.support.local_engine import Local
from tests.support.local_runs import Notes, job_of, selecting
from tests.support.raw_entries import RawEntry, in_batch, numbers, store
from tests.support.waiting import wait_until

ENTRIES = 25
any_number = st.integers(0, 5) | st.integers(0, 2**64 - 1)
readable = st.builds(
    lambda fields, singles: RawEntry(
        fields + numbers(in_batch=len(singles)),
        b"".join(in_batch(b"content", fields) for fields in singles),
    ),
    metadata,
    st.lists(single, min_size=1, max_size=3),
)
# Also fields that describe how content is encoded, delays, transactions and chunks.
fields_of_any_number = [written(field, any_number) for field in (8, 9, 11, 19, 22, 23, 27, 28, 29)]
unreadable = st.builds(
    lambda fields, more, content: RawEntry(fields + b"".join(more), content),
    metadata,
    st.tuples(*fields_of_any_number),
    st.binary(max_size=30),
)


@pytest.mark.usefixtures("replay_token")
def test_hostile_metadata_ends_no_replay(provision_policy: Callable[..., Any]) -> None:
    topics = map("orders-{}".format, itertools.count())

    @settings(max_examples=2, suppress_health_check=list(HealthCheck), deadline=None, database=None)
    @given(st.lists(readable | unreadable, min_size=ENTRIES, max_size=ENTRIES))
    def check(entries: list[RawEntry]) -> None:
        provisioned = provision_policy(topic=next(topics))
        store(provisioned.broker, provisioned.policy.dead_letter_topic, entries)
        account = runs.run(selecting(job_of(provisioned)), Local(), Notes())
        assert account.matched == account.moved + account.refused
        assert account.scanned == account.matched + account.unevaluated >= ENTRIES
        stored = list(provisioned.read_all(provisioned.policy.retry_topic))
        assert len(stored) == account.moved
        remaining = account.refused + account.unevaluated
        wait_until(lambda: provisioned.backlog_of_dead_letters() <= remaining)

    check()
