"""Entries with hostile metadata or content: refused, counted or moved, while others move."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from redrive import RetryConsumer
from redrive.admin.model import read_usage
from redrive.delivery.inspection import MALFORMED_ENTRY
from redrive.policy.envelope import CAUSE_TYPE
from redrive.policy.naming import DEAD_LETTER_SUBSCRIPTION
from redrive.reading import ranges, reader
from redrive.replay import harmful, mover
from redrive.replay.job import run as runs
from redrive.replay.spark import Spark
from redrive.replay.spec import Choice, ReplayJob
from tests.support.documented import original
from tests.support.engines import Local
from tests.support.hostile_metadata import metadata, single, written
from tests.support.local_runs import Notes, job_of, replay, selecting
from tests.support.raw_entries import (
    HARMFUL,
    RawEntry,
    chunk,
    in_batch,
    numbers,
    raw_producer,
    store,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("replay_token")

ProvisionPolicy = Callable[..., Any]
GOOD = 6
UNREADABLE = [
    RawEntry(numbers(compression=2, uncompressed=10), b"no zlib"),
    *(chunk("killed", part, 11, 110, b"0123456789") for part in range(10)),
    *HARMFUL.values(),
]
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


def bury(provisioned: Any) -> list[str]:  # noqa: ANN401
    """Lay unreadable entries among good dead letters; return the ids of these."""
    provisioned.bury(GOOD // 2)
    store(provisioned.broker, provisioned.policy.dead_letter_topic, UNREADABLE)
    provisioned.bury(GOOD // 2)
    letters = provisioned.read_all(provisioned.policy.dead_letter_topic)
    ids: list[str] = provisioned.ids(letter for letter in letters if "id" in letter.properties())
    return ids


def choosing(job: ReplayJob, **choice: Any) -> ReplayJob:  # noqa: ANN401  as a Choice takes it
    return dataclasses.replace(job, choice=Choice(**choice))


@pytest.mark.parametrize("reads_first", [False, True])
def test_backlog_after_a_replay_of_everything_is_refused(
    provision_policy: ProvisionPolicy, *, reads_first: bool
) -> None:
    provisioned = provision_policy()
    buried = bury(provisioned)
    job = dataclasses.replace(job_of(provisioned), approval_above=1_000 if reads_first else None)

    account = runs.run(job, Local(), Notes())

    assert provisioned.in_target() == buried
    assert (account.moved, account.left, account.discarded) == (GOOD, 0, 0)
    assert account.matched == account.moved + account.refused
    assert {refusal.cause for refusal in account.refusals} == {"NotDelivered"}
    assert account.refused == len(UNREADABLE)
    wait_until(lambda: provisioned.backlog_of_dead_letters() == account.refused)


@pytest.mark.parametrize("reads_first", [False, True])
def test_unreadable_entries_are_discarded_by_choice(
    provision_policy: ProvisionPolicy,
    monkeypatch: pytest.MonkeyPatch,
    *,
    reads_first: bool,
) -> None:
    monkeypatch.setattr(mover, "QUIET_SECONDS", 2.0)
    provisioned = provision_policy()
    buried = bury(provisioned)
    job = choosing(job_of(provisioned), discards=True)
    job = dataclasses.replace(job, approval_above=1_000 if reads_first else None)

    account = runs.run(job, Local(), Notes())

    assert provisioned.in_target() == buried
    assert (account.moved, account.refused, account.left) == (GOOD, 0, 0)
    assert account.discarded == len(UNREADABLE)
    assert account.matched == account.moved + account.discarded
    wait_until(lambda: provisioned.backlog_of_dead_letters() == 0)
    precise = provisioned.admin(
        "GET", provisioned.policy.dead_letter_topic, "stats?getPreciseBacklog=true"
    )
    usage = read_usage(json.loads(precise), DEAD_LETTER_SUBSCRIPTION)
    # The figures of an empty topic, which `deletionPolicy: DeleteIfEmpty` deletes.
    assert (usage.subscriptions[DEAD_LETTER_SUBSCRIPTION].backlog, usage.uncounted) == (0, 0)


def test_selection_by_content_leaves_unreadable_entries(
    provision_policy: ProvisionPolicy, spark: SparkSession
) -> None:
    """A selection can't be evaluated for them."""
    provisioned = provision_policy()
    bury(provisioned)
    everything = choosing(job_of(provisioned), since=0, discards=True)
    of_sql = dataclasses.replace(job_of(provisioned), where="size >= 0 or size < 0")
    for job, engine in ((everything, Local()), (of_sql, Spark(spark, of_sql))):
        account = runs.preview(job, engine, Notes()).account
        assert (account.matched, account.left, account.refused) == (GOOD, GOOD, 0)
        assert (account.unevaluated, account.scanned) == (len(UNREADABLE), GOOD + len(UNREADABLE))


def test_encoded_dead_letter_is_replayed_and_dies_again_whole(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    policy = dataclasses.replace(provisioned.policy, max_retries=0)
    provisioned.create(policy.topic, policy.subscription, 0)
    with raw_producer(provisioned.broker, policy.topic) as producer:
        producer.send(b"7", properties={b"customer": b"M\xfcller"}, key="k")
    with RetryConsumer(provisioned.client, policy) as consumer:
        for count in (1, 2):
            message = consumer.receive(60)
            assert message is not None
            consumer.reconsume_later(message, cause=LookupError(str(count)))
            letters = list(provisioned.read_all(policy.dead_letter_topic))
            assert len(letters) == count
            properties, key, payload = original(letters[-1])
            assert (properties[b"customer"], key, payload) == (b"M\xfcller", "k", b"7")
            assert letters[-1].properties()["REDRIVE_CAUSE_MESSAGE"] == str(count)
            if count == 1:
                account = runs.run(job_of(provisioned), Local(), Notes())
                assert (account.moved, account.refused, account.left) == (1, 0, 0)


def test_chunks_ending_in_the_next_range_count_once(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "RANGE_ENTRIES", 4)
    provisioned = provision_policy()
    whole = [chunk("whole", part, 3, 30, b"0123456789") for part in range(3)]
    partial = [chunk("partial", part, 3, 30, b"0123456789") for part in range(2)]
    provisioned.bury(2)
    topic = provisioned.policy.dead_letter_topic
    store(provisioned.broker, topic, [whole[0], partial[0], whole[1], partial[1], whole[2]])
    provisioned.bury(1)

    account = runs.run(job_of(provisioned), Local(), Notes())

    assert (account.matched, account.moved, account.refused) == (6, 4, 2)
    (moved,) = [
        message
        for message in provisioned.read_all(provisioned.policy.retry_topic)
        if len(message.data()) > 5
    ]
    assert moved.data() == b"0123456789" * 3
    wait_until(lambda: provisioned.backlog_of_dead_letters() == 2)


BETWEEN = 130
"""Entries between two chunks: more than a reader looks back at first."""


@pytest.fixture
def distant(provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401
    """A policy with a chunked dead letter, whose chunks lie in three ranges and far apart."""
    monkeypatch.setattr(ranges, "RANGE_ENTRIES", 100)
    monkeypatch.setattr(mover, "QUIET_SECONDS", 2.0)
    provisioned = provision_policy()
    for part in range(3):
        store(
            provisioned.broker,
            provisioned.policy.dead_letter_topic,
            [chunk("distant", part, 3, 30, b"0123456789")],
        )
        provisioned.bury(BETWEEN * (part < 2))
    return provisioned


def is_moved(provisioned: Any) -> bool:  # noqa: ANN401
    """Return True if the target contains the chunked message once."""
    moved = provisioned.read_all(provisioned.policy.retry_topic)
    return [m.data() for m in moved if len(m.data()) > 5] == [b"0123456789" * 3]


@pytest.mark.parametrize("reads_first", [False, True])
@pytest.mark.parametrize("discards", [False, True])
def test_message_of_distant_chunks_is_moved_once(
    distant: Any,  # noqa: ANN401
    *,
    reads_first: bool,
    discards: bool,
) -> None:
    job = choosing(job_of(distant), discards=discards)
    job = dataclasses.replace(job, approval_above=1_000 if reads_first else None)

    account = runs.run(job, Local(), Notes())

    assert (account.moved, account.refused, account.discarded) == (2 * BETWEEN + 1, 0, 0)
    assert is_moved(distant)
    wait_until(lambda: distant.backlog_of_dead_letters() == 0)


def test_named_message_of_distant_chunks_is_moved(distant: Any) -> None:  # noqa: ANN401
    *_, last = distant.read_all(distant.policy.dead_letter_topic)
    position = last.message_id()
    named = f"{position.ledger_id()}:{position.entry_id()}"

    account = runs.run(choosing(job_of(distant), ids=(named,), discards=True), Local(), Notes())

    assert (account.matched, account.moved, account.discarded) == (1, 1, 0)
    assert is_moved(distant)


@pytest.mark.parametrize("reads_first", [False, True])
def test_chunks_out_of_reach_are_not_discarded(
    distant: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
    *,
    reads_first: bool,
) -> None:
    """Other chunks of an incomplete message are."""
    monkeypatch.setattr(reader, "FAR", 110)
    topic = distant.policy.dead_letter_topic
    store(distant.broker, topic, [chunk("killed", 0, 2, 20, b"0123456789")])
    job = choosing(job_of(distant), discards=True)
    job = dataclasses.replace(job, approval_above=1_000 if reads_first else None)

    account = runs.run(job, Local(), Notes())

    assert (account.moved, account.refused, account.discarded) == (2 * BETWEEN, 3, 1)
    assert {refusal.cause for refusal in account.refusals} == {"NotDelivered"}
    wait_until(lambda: distant.backlog_of_dead_letters() == 3)
    monkeypatch.setattr(reader, "FAR", 10_000)
    assert replay(distant).moved == 1


OTHERS = 10


def bury_among_harmful(provisioned: Any) -> list[str]:  # noqa: ANN401
    """Lay good dead letters around each of the harmful ones, and return their ids."""
    topic = provisioned.policy.dead_letter_topic
    for entry in HARMFUL.values():
        provisioned.bury(1)
        store(provisioned.broker, topic, [entry])
    provisioned.bury(OTHERS)
    letters = provisioned.read_all(topic)
    ids: list[str] = provisioned.ids(letter for letter in letters if "id" in letter.properties())
    return ids


@pytest.mark.parametrize("selects", [False, True])
def test_harmful_dead_letters_stay_and_others_move(
    provision_policy: ProvisionPolicy, *, selects: bool
) -> None:
    provisioned = provision_policy()
    buried = bury_among_harmful(provisioned)
    assert len(buried) == len(HARMFUL) + OTHERS

    job = job_of(provisioned)
    account = runs.run(selecting(job) if selects else job, Local(), Notes())

    assert (account.moved, account.left) == (len(buried), 0)
    assert provisioned.in_target() == buried


def test_harmful_messages_in_a_target_block_no_search(provision_policy: ProvisionPolicy) -> None:
    provisioned = provision_policy()
    provisioned.bury(OTHERS)

    class Lost(Local):
        """Loses its task once some is moved, so that the next one looks for it."""

        lost = False

        def move(self, task: Any) -> Any:  # noqa: ANN401
            moved = super().move(task)
            if not self.lost:
                self.lost = True
                store(provisioned.broker, provisioned.policy.retry_topic, HARMFUL.values())
                raise RuntimeError("lost")
            return moved

    account = runs.run(job_of(provisioned), Lost(), Notes())

    assert (account.moved, account.left) == (OTHERS, 0)
    assert (
        len(
            provisioned.ids(
                message
                for message in provisioned.read_all(provisioned.policy.retry_topic)
                if "id" in message.properties()
            )
        )
        == OTHERS
    )


def test_harmful_dead_letters_fail_no_task_of_spark(
    provision_policy: ProvisionPolicy, spark: SparkSession
) -> None:
    provisioned = provision_policy()
    buried = bury_among_harmful(provisioned)

    job = dataclasses.replace(job_of(provisioned), where="size >= 0")
    account = runs.run(job, Spark(spark, job), Notes())

    assert (account.moved, account.left) == (len(buried), 0)
    assert provisioned.in_target() == buried
    assert replay(provisioned).left == 0


def test_harmful_entries_move_out_of_the_way_of_consumers(
    provision_policy: ProvisionPolicy,
) -> None:
    """The client in this process would end it at many of them."""
    provisioned = provision_policy()
    policy, broker = provisioned.policy, provisioned.broker
    buried = bury_among_harmful(provisioned)
    quarantine = provisioned.policy.retry_topic
    provisioned.grant(policy.dead_letter_topic, "consume")
    here = [broker.service_url, broker.admin_url, str(policy.dead_letter_topic)]

    assert harmful.main([*here, DEAD_LETTER_SUBSCRIPTION]) == 1
    assert harmful.main([*here, DEAD_LETTER_SUBSCRIPTION, "--dead-letter", str(quarantine)]) == 0
    assert harmful.main([*here, DEAD_LETTER_SUBSCRIPTION]) == 0

    moved = list(provisioned.read_all(quarantine))
    assert {message.properties()[CAUSE_TYPE] for message in moved} == {MALFORMED_ENTRY}
    stored = {entry.content for entry in HARMFUL.values()}
    assert all(any(message.data().endswith(content) for content in stored) for message in moved)
    remaining = provisioned.unacknowledged()
    assert provisioned.ids(letter for letter in remaining if "id" in letter.properties()) == buried
    # A remaining entry is harmless: one chunk that others are to follow.
    assert provisioned.backlog_of_dead_letters() == len(buried) + len(HARMFUL) - len(moved)
    assert len(HARMFUL) - len(moved) <= 1


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
