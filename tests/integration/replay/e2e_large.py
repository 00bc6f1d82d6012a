"""Messages that were compressed, or sent in chunks, are replayed like others."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pulsar
import pytest

from redrive.policy.naming import TopicName
from redrive.reading import ranges, stored
from redrive.replay import sending
from redrive.replay.job import run as runs
from redrive.replay.mover import RangeMover
from redrive.replay.outcome import RangeResult
from redrive.replay.task import RangeTask
from sandbox.pulsar import SUPERUSER
from tests.support.engines import PEAK, SILENT, Local
from tests.support.local_runs import (
    Notes,
    job_of,
    kill_at,
    numbers,
    replay,
    selecting,
    wait_until_moved,
)
from tests.support.waiting import wait_until

ProvisionPolicy = Callable[..., Any]


pytestmark = pytest.mark.usefixtures("replay_token")


IN_CHUNKS = 11_000_000
"""Size in bytes of a message that takes three entries."""


def noise(size: int) -> bytes:
    """Return bytes that no compression makes smaller."""
    return random.Random(size).randbytes(size)  # noqa: S311 - the same in each run, no secret


@contextlib.contextmanager
def producer(provisioned: Any) -> Iterator[pulsar.Producer]:  # noqa: ANN401
    """Yield a producer with which a hop sends large messages to the dead-letter topic."""
    made = provisioned.client.create_producer(
        str(provisioned.policy.dead_letter_topic),
        batching_enabled=False,
        chunking_enabled=True,
        compression_type=pulsar.CompressionType.ZSTD,
        block_if_queue_full=True,
    )
    yield made
    made.close()


def bury(provisioned: Any, *payloads: bytes) -> None:  # noqa: ANN401
    """Lay each payload into the dead-letter topic; its size is its id."""
    with producer(provisioned) as made:
        for payload in payloads:
            made.send(payload, properties={"id": str(len(payload))})


def fingerprints(payloads: Iterable[bytes]) -> list[tuple[int, int]]:
    """The size and a checksum of each: megabytes in a failed comparison say nothing."""
    return sorted((len(payload), zlib.crc32(payload)) for payload in payloads)


def contents(messages: Iterable[pulsar.Message]) -> list[tuple[int, int]]:
    return fingerprints(message.data() for message in messages)


def test_compressed_and_cut_messages_arrive_whole(provision_policy: ProvisionPolicy) -> None:
    provisioned = provision_policy(partitions=2)
    payloads = [b"", b"0123456789" * 896_000, noise(IN_CHUNKS), noise(5 * 2**20 - 200)]
    bury(provisioned, *payloads)

    account = replay(provisioned)

    assert (account.matched, account.moved, account.refused) == (4, 4, 0)
    assert contents(provisioned.replayed()) == fingerprints(payloads)
    assert provisioned.backlog_of_dead_letters() == 0
    provisioned.check_audit()


def test_content_above_the_limit_is_refused(provision_policy: ProvisionPolicy) -> None:
    provisioned = provision_policy()
    bury(provisioned, b"small", bytes(stored.MAX_READ_CONTENT + 1))

    account = replay(provisioned)

    assert (account.matched, account.moved, account.refused) == (2, 1, 1)
    assert [refusal.cause for refusal in account.refusals] == ["ContentTooLarge"]
    assert provisioned.backlog_of_dead_letters() == 1


def test_message_too_large_for_a_batch_is_sent_alone(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "STALL_SECONDS", 5.0)
    provisioned = provision_policy()
    payloads = [b"0", noise(IN_CHUNKS), b"01", noise(200 * 2**10), b"012"]
    bury(provisioned, *payloads)

    account = runs.run(job_of(provisioned, batch=True), Local(), Notes())

    assert (account.matched, account.moved, account.refused) == (5, 5, 0)
    assert contents(provisioned.replayed()) == fingerprints(payloads)
    assert provisioned.backlog_of_dead_letters() == 0
    provisioned.check_audit()


def test_batches_may_be_too_large_by_their_properties(provision_policy: ProvisionPolicy) -> None:
    """The client counts the values when it closes a batch; it must not block when it fails."""
    provisioned = provision_policy()
    with producer(provisioned) as made:
        for number in range(1_000):
            properties = {"id": f"{number:07}", "trace": noise(6_000 + number).hex()}
            made.send_async(b"", lambda *_: None, properties=properties)
        made.flush()

    account = runs.run(job_of(provisioned, batch=True), Local(), Notes())

    assert (account.matched, account.moved, account.refused) == (1_000, 1_000, 0)
    assert provisioned.in_target() == numbers(1_000)


def test_chunks_may_lie_between_each_other_and_across_ranges(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "RANGE_ENTRIES", 4)
    provisioned = provision_policy()
    payloads = [noise(IN_CHUNKS + number) for number in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda payload: bury(provisioned, payload, payload[:10]), payloads))

    account = replay(provisioned)

    assert (account.matched, account.moved, account.refused) == (8, 8, 0)
    assert contents(provisioned.replayed())[4:] == fingerprints(payloads)
    assert provisioned.backlog_of_dead_letters() == 0


def test_lost_acknowledgements_of_all_chunks_are_repeated(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    provisioned = provision_policy()
    bury(provisioned, b"small", noise(IN_CHUNKS))
    with monkeypatch.context() as patch:
        patch.setattr(RangeMover, "_acknowledge", lambda *_: None)
        patch.setattr(runs, "_ensure_acknowledged", lambda *_: None)
        assert replay(provisioned).moved == 2

    account = replay(provisioned)

    assert account.moved == 0
    assert provisioned.in_target() == [str(IN_CHUNKS), "5"]
    assert provisioned.backlog_of_dead_letters() == 0


def test_run_killed_between_chunks_is_resumed(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    sizes = [IN_CHUNKS + number for number in range(6)]
    bury(provisioned, *map(noise, sizes))
    job = job_of(provisioned)
    kill_at(provisioned, job, 4, len(sizes))  # four entries

    account = replay(provisioned, uid=job.uid)

    assert (account.scanned, account.matched, account.moved) == (len(sizes),) * 3
    assert provisioned.in_target() == list(map(str, sizes))
    assert provisioned.backlog_of_dead_letters() == 0
    provisioned.check_audit()


@pytest.mark.parametrize("planned", ["unread", "read"])
def test_chunks_that_a_reader_loses_are_read_again(
    provision_policy: ProvisionPolicy, planned: str
) -> None:
    """A reader that is connected again in the midst of a message never delivers it."""
    provisioned = provision_policy()
    sizes = [IN_CHUNKS + number for number in range(4)]
    bury(provisioned, *map(noise, sizes))
    job = dataclasses.replace(job_of(provisioned), rate_limit=1)
    job = selecting(job) if planned == "read" else job
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(runs.run, job, Local(), Notes())
        for moved in range(1, 4):
            wait_until_moved(provisioned, 3 * moved)  # entries
            provisioned.admin("PUT", provisioned.policy.dead_letter_topic, "unload")
        account = run.result(120)

    assert (account.matched, account.moved, account.left) == (len(sizes), len(sizes), 0)
    assert provisioned.in_target() == list(map(str, sizes))
    assert provisioned.backlog_of_dead_letters() == 0
    provisioned.check_audit()


def test_reading_cut_off_amid_chunks_loses_nothing(provision_policy: ProvisionPolicy) -> None:
    """As the search of a target, a plan that is read, and the data source."""
    provisioned = provision_policy()
    sizes = [IN_CHUNKS + number for number in range(4)]
    bury(provisioned, *map(noise, sizes))

    for _ in range(2):
        topic = provisioned.policy.dead_letter_topic
        read = []
        for message in provisioned.read_all(topic):
            read.append(len(message.data()))
            if len(read) in {1, 3}:
                provisioned.admin("PUT", topic, "unload")
        assert read == sizes


CUT_OFF = """
import sys
import pulsar
client = pulsar.Client(sys.argv[1], authentication=pulsar.AuthenticationToken(sys.argv[2]))
producer = client.create_producer(sys.argv[3], batching_enabled=False, chunking_enabled=True)
producer.send(bytes(100_000_000))
"""


def cut_off(provisioned: Any, topic: TopicName) -> None:  # noqa: ANN401
    """Leave some of many chunks at the end of *topic*, as a producer does that is killed."""
    broker = provisioned.broker
    slow = {"publishThrottlingRateInMsg": -1, "publishThrottlingRateInByte": 10_000_000}
    provisioned.change_policy("POST", topic, "publishRate", slow)  # not through before the kill
    before = entries(provisioned, topic)
    arguments = [broker.service_url, broker.token(SUPERUSER), str(topic)]
    sending = subprocess.Popen([sys.executable, "-c", CUT_OFF, *arguments], env=os.environ)
    try:
        wait_until(lambda: entries(provisioned, topic) > before)
    finally:
        sending.kill()
    assert sending.wait() == -signal.SIGKILL


def entries(provisioned: Any, topic: TopicName) -> int:  # noqa: ANN401
    """Return how many entries were ever stored."""
    count: int = json.loads(provisioned.admin("GET", topic, "stats"))["msgInCounter"]
    return count


class Dies(Local):
    """Is killed once a range is leased."""

    def move(self, task: RangeTask) -> RangeResult:
        raise RuntimeError(str(task.range))


def test_incomplete_chunked_message_does_not_block_a_run(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    bury(provisioned, b"one")
    cut_off(provisioned, provisioned.policy.dead_letter_topic)
    with pytest.raises(RuntimeError):
        runs.run(job_of(provisioned), Dies(), Notes())
    cut_off(provisioned, provisioned.policy.retry_topic)  # where the next run looks for it

    account = replay(provisioned)

    assert (account.moved, account.left) == (1, 0)
    wait_until(lambda: provisioned.backlog_of_dead_letters() == account.refused > 0)
    assert {refusal.cause for refusal in account.refusals} == {"NotDelivered"}
    assert provisioned.in_target() == ["3"]


def test_properties_that_are_too_big_are_refused(provision_policy: ProvisionPolicy) -> None:
    provisioned = provision_policy()
    with producer(provisioned) as made:
        made.send(b"x", properties={"user": "y" * (5 * 2**20 - 200)})
    bury(provisioned, b"one")

    account = replay(provisioned)

    assert (account.matched, account.moved, account.refused) == (2, 1, 1)
    assert [refusal.cause for refusal in account.refusals] == ["TooBig"]


COUNT, BYTES = 300, 1_000_000


MOST_MEBIBYTES = 200
"""Limit of the memory that a run adds to its process. It takes 130; 430 if a run moved no message
before all are read, and 230 if it asked the broker for more than 16 MiB ahead."""


RUN = f"""{SILENT}{PEAK}
import sys
from tests.support.engines import Local
from redrive.replay.job.run import run
from redrive.replay.spec import ReplayJob

before = peak()
account = run(ReplayJob.decode(sys.argv[1]), Local(), Silent())
print(account.moved, peak() - before)
"""


def test_large_messages_are_never_in_memory_together(provision_policy: ProvisionPolicy) -> None:
    provisioned = provision_policy()
    for _ in range(2):  # ranges, which are moved at the same time
        provisioned.bury(COUNT // 2, content=noise(BYTES))
        provisioned.admin("PUT", provisioned.policy.dead_letter_topic, "unload")
    done = subprocess.run(
        [sys.executable, "-c", RUN, job_of(provisioned).encode()],
        env=os.environ | {"PYTHONPATH": str(Path(runs.__file__).parents[3])},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    moved, mebibytes = map(int, done.stdout.split())
    assert moved == COUNT
    assert mebibytes < MOST_MEBIBYTES
