"""Sequenced dead letters at a broker: kills at each step, and compacted records."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from redrive import CrashLog
from redrive.delivery.middleware import sequencing
from redrive.delivery.middleware.sequencing import SequenceTopic
from redrive.messages import NotSentError
from redrive.policy.model import SubscriptionType
from redrive.policy.sequences import Entry, record_name
from redrive.reading.positions import encode_nested
from tests.support.consumers import StartProgram, handle_until_quiet, start_program
from tests.support.provisioned_policy import ProvisionedPolicy
from tests.support.raw_entries import HARMFUL, RawEntry, store
from tests.support.topics import compact_topic

__all__ = ["start_program"]
ProvisionPolicy = Callable[..., Any]
QUIET = timedelta(seconds=1)
SECONDS = 180
SEQUENCED = {
    "max_retries": 0, "ordered": True, "sequenced": True, "kind": SubscriptionType.KEY_SHARED
}  # fmt: skip
DIE = """
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
send = pulsar.Producer.send
def send_no_dead_letter(producer, *content, **fields):
    return die() if producer.topic().endswith("-DLQ") else send(producer, *content, **fields)
"""
AT_STEP = {
    "the record": "pulsar.Producer.send = die",
    "the dead letter": "pulsar.Producer.send = send_no_dead_letter",
    "the acknowledgement": "pulsar.Consumer.acknowledge = die",
}


@pytest.fixture
def sequenced(provision_policy: ProvisionPolicy) -> ProvisionedPolicy:
    """A policy whose messages die at their first failure."""
    made: ProvisionedPolicy = provision_policy(**SEQUENCED)
    return made


def handled(
    provisioned: ProvisionedPolicy, *bad: bytes, crash_log: CrashLog | None = None
) -> list[bytes]:
    """Handle all messages, of which *bad* ones fail; return the contents of the others."""
    with provisioned.consumer(crash_log=crash_log) as consumer:
        contents = handle_until_quiet(consumer, bad, quiet=QUIET, unsettled=provisioned.unsettled)
    assert provisioned.unsettled() == 0
    return contents


def recorded(provisioned: ProvisionedPolicy) -> int:
    """Return the number of dead letters on record."""
    topic = SequenceTopic(provisioned.client(provisioned.role), provisioned.policy.sequences_topic)
    topic.read()
    return len(topic.sequences)


@pytest.mark.parametrize("step", AT_STEP)
def test_kill_while_a_key_dies_keeps_messages_and_order(
    sequenced: ProvisionedPolicy, start_program: StartProgram, step: str
) -> None:
    sequenced.send(b"a1", b"a2", b"a3", partition_key="a")
    process = start_program(
        sequenced,
        f"""
{DIE}
{AT_STEP[step]}
consumer = RetryConsumer(client, load_policy())
bad = consumer.receive()
consumer.reconsume_later(bad, cause=ValueError("bad"))
""",
    )
    output, _ = process.communicate(timeout=180)
    assert process.returncode == -signal.SIGKILL, output
    assert recorded(sequenced) == (0 if step == "the record" else 1)

    # A dead letter that was sent and not acknowledged at the source is sent again.
    copies = [b"a1"] if step == "the acknowledgement" else []
    assert handled(sequenced, b"a1") == []
    assert sequenced.replay() == [*copies, b"a1", b"a2", b"a3"]
    assert handled(sequenced) == [b"a1", b"a2", b"a3"]
    sequenced.send(b"a4", partition_key="a")
    if copies:  # it has become the last of its sequence
        assert handled(sequenced) == []
        assert sequenced.replay() == [b"a1", b"a4"]
    assert handled(sequenced) == [*copies, b"a4"]
    assert sequenced.replay() == []
    assert recorded(sequenced) == 0


@pytest.mark.parametrize("step", ["Producer.send", "Consumer.acknowledge"])
def test_kill_while_replayed_dead_letter_is_acked_keeps_order(
    sequenced: ProvisionedPolicy, start_program: StartProgram, step: str
) -> None:
    sequenced.send(b"a1", b"a2", b"a3", partition_key="a")
    assert handled(sequenced, b"a1") == []
    assert sequenced.replay() == [b"a1", b"a2", b"a3"]
    process = start_program(
        sequenced,
        f"""
pulsar.{step} = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
consumer = RetryConsumer(client, load_policy())
first = consumer.receive()
assert first.data() == b"a1"
consumer.acknowledge(first)
""",
    )
    output, _ = process.communicate(timeout=180)
    assert process.returncode == -signal.SIGKILL, output
    if step == "Producer.send":  # its record is there: it is handled again, before the others
        assert handled(sequenced) == [b"a1", b"a2", b"a3"]
    else:  # its record is removed: the redelivered copy is ordered after the others
        assert handled(sequenced) == [b"a2", b"a3"]
        assert sequenced.replay() == [b"a1"]
        assert handled(sequenced) == [b"a1"]
    assert sequenced.replay() == []
    assert recorded(sequenced) == 0


def compact(provisioned: ProvisionedPolicy) -> int:
    """Compact the records, and return the number that remains."""
    return compact_topic(provisioned.broker, provisioned.policy.sequences_topic)


def write(topic: SequenceTopic, origins: Iterable[int], content: bytes) -> None:
    """Write a record for each of *origins*, again if the broker is slow to answer."""
    deadline = time.monotonic() + SECONDS
    for origin in origins:
        while True:
            try:
                topic.write(record_name("k", f"1:{origin}:-1"), content)
            except NotSentError:
                assert time.monotonic() < deadline
            else:
                break


def test_compacted_records_block_no_message(sequenced: ProvisionedPolicy) -> None:
    name, record = sequenced.policy.sequences_topic, Entry(1, 0).encode()
    writing = SequenceTopic(sequenced.client(sequenced.role), name)
    write(writing, range(3), record)
    write(writing, [0, 1], b"")
    assert compact(sequenced) == 1
    assert recorded(sequenced) == 1
    write(writing, [2], b"")
    assert compact(sequenced) == 0
    assert recorded(sequenced) == 0  # and it ends, though the last record is gone
    writing.read()
    assert len(writing.sequences) == 0
    write(writing, [5], record)
    assert recorded(sequenced) == 1


def test_removal_compacted_away_meanwhile_is_noticed(
    sequenced: ProvisionedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, record = sequenced.policy.sequences_topic, Entry(1, 0).encode()
    idle, busy = (SequenceTopic(sequenced.client(sequenced.role), name) for _ in range(2))
    write(busy, [0, 1], record)
    idle.read()
    assert len(idle.sequences) == 2
    producer = sequenced.client(sequenced.role).create_producer(
        str(name), batching_enabled=False, block_if_queue_full=True
    )
    for _ in range(1_100):  # more than wait in a client
        producer.send_async(record, None, partition_key=record_name("k", "1:1:-1"))
    producer.flush()
    write(busy, [0], b"")
    write(busy, [1], record)
    assert compact(sequenced) == 1
    monkeypatch.setattr(sequencing, "STALE_SECONDS", 0.0)
    idle.read()
    assert len(idle.sequences) == 1


KEY_IS_NO_TEXT = RawEntry(encode_nested(6, b"\xff"), b"[1, 0]")
UNDECODABLE = HARMFUL["zlib that is none"]


def test_records_that_cannot_be_read_stop_no_message(
    sequenced: ProvisionedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequencing, "_READ_MILLISECONDS", 500)
    sequenced.send(b"a1", b"a2", partition_key="a")
    assert handled(sequenced, b"a1") == []
    topic = sequenced.policy.sequences_topic
    store(sequenced.broker, topic, [KEY_IS_NO_TEXT, UNDECODABLE])
    sequenced.send(b"b1", partition_key="b")
    assert handled(sequenced) == [b"b1"]
    assert recorded(sequenced) == 2


def test_crash_log_has_malformed_records_skipped(
    sequenced: ProvisionedPolicy, tmp_path: Path
) -> None:
    store(sequenced.broker, sequenced.policy.sequences_topic, [KEY_IS_NO_TEXT, *HARMFUL.values()])
    sequenced.send(b"a1", partition_key="a")
    token = sequenced.broker.token(sequenced.role)
    assert handled(sequenced, crash_log=CrashLog(tmp_path, token=token)) == [b"a1"]
