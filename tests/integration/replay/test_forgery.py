"""Messages of other roles in the ledger and in the target of a Replay.

Applications may produce to the retry topic, and a role with rights on the whole namespace may
produce to the ledger.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pulsar
import pytest

from redrive.policy.envelope import REPLAY_SOURCE
from redrive.reading import bitmap, broker, ranges
from redrive.reading.positions import Position, Source
from redrive.reading.ranges import Range
from redrive.replay import mover, transport
from redrive.replay.job import run as runs
from redrive.replay.outcome import RangeResult
from redrive.replay.records import PERMIT, RangeRecord, range_key
from redrive.replay.task import RangeTask
from tests.support.engines import Local
from tests.support.local_runs import Notes, job_of, kill_at, numbers, replay
from tests.support.raw_entries import HARMFUL, store

ProvisionPolicy = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("replay_token")

HIGHEST = 2**63 - 1
"""The highest sequence id: with it a producer name takes no other message."""


FLOOD = 3_000
"""More than a reader asks the broker for ahead."""


class DiesAtFirst(Local):
    """Loses each task before it sends a message."""

    def move(self, task: RangeTask) -> RangeResult:
        msg = f"range {task.range} is lost"
        raise RuntimeError(msg)


def first_range(provisioned: Any) -> Range:  # noqa: ANN401
    """Return the range of the dead letters."""
    topic = provisioned.policy.dead_letter_topic
    partitions = broker.read_partitions(
        provisioned.broker.admin_url, topic, provisioned.policy.dead_letter_subscription
    )
    (piece,) = ranges.all_pieces(partitions)
    return piece.range


@contextmanager
def producer_of(
    provisioned: Any,  # noqa: ANN401
    topic: object,
    **options: Any,  # noqa: ANN401 - as the client takes them
) -> Iterator[pulsar.Producer]:
    """Open a producer of another role."""
    options = {"batching_enabled": False, **options}
    with closing(provisioned.client.create_producer(str(topic), **options)) as producer:
        yield producer


def test_forged_ledger_records_hide_no_dead_letter(provision_policy: ProvisionPolicy) -> None:
    provisioned = provision_policy()
    provisioned.bury_many(20)
    within = first_range(provisioned)
    forged = RangeRecord(3, moved={"other": bitmap.span(0, within.size - 1)}).to_json()
    with producer_of(provisioned, provisioned.policy.ledger_topic) as producer:
        for key, value in ((range_key(within), forged), (PERMIT, {"rate": None, "drain": True})):
            producer.send(json.dumps(value).encode(), partition_key=key)

    account = replay(provisioned)

    assert (account.moved, account.left) == (20, 0)
    assert provisioned.in_target() == numbers(20)
    provisioned.check_audit()


def test_forged_sources_in_the_target_hide_no_dead_letter(
    provision_policy: ProvisionPolicy,
) -> None:
    """The lease of a killed run is open, so the next run searches the target."""
    provisioned = provision_policy()
    provisioned.bury_many(20)
    within, job = first_range(provisioned), job_of(provisioned)
    with pytest.raises(RuntimeError, match="is lost"):
        runs.run(job, DiesAtFirst(), Notes())
    with producer_of(provisioned, job.policy.retry_topic) as producer:
        for number in range(20):
            source = Source(job.uid, within.partition, Position(*within.entry_id(number), 0))
            properties = {"id": f"forged-{number:02}", REPLAY_SOURCE: str(source)}
            producer.send(b"forged", properties=properties)

    account = runs.run(job, Local(), Notes())

    assert (account.moved, account.left) == (20, 0)
    assert provisioned.in_target() == [*numbers(20), *(f"forged-{n:02}" for n in range(20))]
    provisioned.check_audit()


def name_of_producer(provisioned: Any) -> str:  # noqa: ANN401
    """Return the name of the producer of the first message in the target, as a consumer sees it."""
    topic = str(provisioned.policy.retry_topic)
    with closing(provisioned.client.create_reader(topic, pulsar.MessageId.earliest)) as reader:
        return str(reader.read_next(30_000).producer_name())


@pytest.mark.parametrize("is_held", [True, False], ids=["held", "highest-sequence-id"])
def test_blocked_producer_name_is_replaced(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch, *, is_held: bool
) -> None:
    """A consumer of the target has the name from the messages that a killed run has sent."""
    monkeypatch.setattr(transport, "NAME_SECONDS", 2.0)
    monkeypatch.setattr(mover, "QUIET_SECONDS", 3.0)
    count = 400
    provisioned = provision_policy()
    provisioned.bury_many(count)
    job, notes = job_of(provisioned), Notes()
    kill_at(provisioned, job, count // 2, count)
    name = name_of_producer(provisioned)
    with producer_of(provisioned, job.policy.retry_topic, producer_name=name) as producer:
        producer.send(b"", sequence_id=HIGHEST, properties={"id": "blocking"})
        if is_held:
            account = runs.run(job, Local(), notes)
    if not is_held:
        account = runs.run(job, Local(), notes)

    assert (account.moved, account.left, account.refused) == (count, 0, 0)
    assert provisioned.in_target() == [*numbers(count), "blocking"]
    assert replay(provisioned).matched == 0
    provisioned.check_audit()


def test_flood_of_foreign_messages_in_the_ledger_is_skipped(
    provision_policy: ProvisionPolicy,
) -> None:
    """Malformed entries among them would end a process that reads them by the client."""
    provisioned = provision_policy()
    provisioned.bury_many(20)
    ledger, notes = provisioned.policy.ledger_topic, Notes()
    store(provisioned.broker, ledger, HARMFUL.values())
    results: list[pulsar.Result] = []
    with producer_of(provisioned, ledger, block_if_queue_full=True) as producer:
        for number in range(FLOOD):
            producer.send_async(
                b"{}", lambda result, _: results.append(result), partition_key=f"range/{number}"
            )
        producer.flush()
    assert results == [pulsar.Result.Ok] * FLOOD

    account = runs.run(job_of(provisioned), Local(), notes)

    assert (account.moved, account.left) == (20, 0)
    assert provisioned.in_target() == numbers(20)
