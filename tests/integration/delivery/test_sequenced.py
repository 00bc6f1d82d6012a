"""Sequenced dead letters at a broker: kills at each step, keys that move, compacted records."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from redrive.delivery.middleware import sequencing
from redrive.delivery.middleware.sequencing import SequenceTopic
from redrive.messages import NotSentError
from redrive.policy.model import SubscriptionType
from redrive.policy.sequences import Entry, record_name
from sandbox.pulsar import SUPERUSER
from tests.support import compaction
from tests.support.messages import handle_until_quiet
from tests.support.provisioned_policy import ProvisionedPolicy
from tests.support.user_programs import StartProgram, start_program
from tests.support.waiting import wait_until

__all__ = ["start_program"]
ProvisionPolicy = Callable[..., Any]
QUIET = timedelta(seconds=1)
SECONDS = 180
SEED = 13
SEQUENCED = {
    "max_retries": 0, "ordered": True, "sequenced": True, "kind": SubscriptionType.KEY_SHARED
}  # fmt: skip
KEYS, COUNT = "abcdef", 30
BAD = {"a": 7, "b": 0, "c": 15, "d": 29, "e": 12}
"""Key → the number of its message that fails."""
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
CONSUMER = """
import time
from redrive.delivery.middleware import sequencing
sequencing.STILL_SECONDS = 4.0
journal = os.open({journal!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def handle(message):
    time.sleep(0.02)
    if os.path.exists({bad!r} + message.data().decode()):
        raise ValueError("bad")
    os.write(journal, message.data() + b"\\n")  # the effect, before it is acknowledged
with RetryConsumer(client, load_policy(), prefetch=20) as consumer:
    consumer.run(handle, workers=3)
"""


@pytest.fixture
def sequenced(provision_policy: ProvisionPolicy) -> ProvisionedPolicy:
    """A policy whose messages die at their first failure."""
    made: ProvisionedPolicy = provision_policy(**SEQUENCED)
    return made


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequencing, "STILL_SECONDS", 2.0)


def handled(provisioned: ProvisionedPolicy, *bad: bytes) -> list[bytes]:
    """Handle all messages, of which *bad* ones fail; return the contents of the others."""
    with provisioned.consumer() as consumer:
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


def test_keys_moving_between_killed_consumers_keep_order(
    provision_policy: ProvisionPolicy, start_program: StartProgram, tmp_path: Path
) -> None:
    """Tried twice for the order: a broker may break it after a kill (docs/design/outages.md)."""
    assert any(
        keeps_order(provision_policy(topic=name, **SEQUENCED), start_program, tmp_path / name)
        for name in ("first", "second")
    )


def keeps_order(sequenced: ProvisionedPolicy, start_program: StartProgram, folder: Path) -> bool:
    """Check the handled messages and dead letters; return True if all were handled in order."""
    folder.mkdir()
    for key, number in BAD.items():
        (folder / f"bad-{key}{number}").touch()
    journal, bad = folder / "journal", str(folder / "bad-")
    journal.touch()
    program = CONSUMER.format(journal=str(journal), bad=bad)

    def consume(kills: int) -> None:
        consume_and_kill(lambda: start_program(sequenced, program), sequenced, journal, kills)

    send_all(sequenced)
    consume(kills=2)
    dead = {key: BAD.get(key, COUNT) for key in KEYS}
    handled = done(journal)
    assert {key: sorted(handled[key]) for key in KEYS} == {key: [*range(dead[key])] for key in KEYS}
    for key, buried in dead_letters(sequenced).items():
        # A message that a killed consumer handled and did not acknowledge may be buried too.
        assert {*range(dead[key], COUNT)} <= buried <= {*range(COUNT)}

    for file in folder.glob("bad-*"):
        file.unlink()
    assert sequenced.replay()
    consume(kills=2)
    while sequenced.replay():  # copies after a kill, and messages that waited too long
        consume(kills=0)
    handled, whole = done(journal), {key: [*range(COUNT)] for key in KEYS}
    assert {key: sorted(handled[key]) for key in KEYS} == whole
    assert recorded(sequenced) == 0
    return handled == whole


def send_all(provisioned: ProvisionedPolicy) -> None:
    """Send the messages of all keys, their numbers in order."""
    producer = provisioned.client(SUPERUSER).create_producer(
        str(provisioned.policy.topic), batching_enabled=False
    )
    for number, key in itertools.product(range(COUNT), KEYS):
        producer.send_async(f"{key}{number}".encode(), None, partition_key=key)
    producer.flush()


def consume_and_kill(
    start: Callable[[], subprocess.Popen[str]],
    provisioned: ProvisionedPolicy,
    journal: Path,
    kills: int,
) -> None:
    """Have three consumers handle all messages, and meanwhile kill one of them *kills* times."""
    chosen, processes = random.Random(SEED), [start() for _ in range(3)]  # noqa: S311
    for _ in range(kills):
        wait_until(grown(journal, provisioned))
        killed = processes.pop(chosen.randrange(3))
        killed.kill()
        killed.communicate()
        processes.append(start())
    wait_until(lambda: not provisioned.unsettled())
    for process in processes:
        process.terminate()
        output, _ = process.communicate(timeout=180)
        # One that began last may not have got so far as to be stopped.
        assert process.returncode in {0, -signal.SIGTERM}, output
    assert provisioned.unsettled() == 0


def grown(journal: Path, provisioned: ProvisionedPolicy) -> Callable[[], bool]:
    """Return a condition: twenty more messages were handled, or all are settled.

    On a slow machine some messages of a replay may wait too long, and be buried again.
    """
    enough = journal.stat().st_size + 20 * len("a10\n")
    return lambda: journal.stat().st_size >= enough or not provisioned.unsettled()


def done(journal: Path) -> dict[str, list[int]]:
    """Return for each key its numbers, in the order of their first handling."""
    handled = dict.fromkeys(journal.read_text("utf-8").split())
    return {key: [int(content[1:]) for content in handled if content[0] == key] for key in KEYS}


def dead_letters(provisioned: ProvisionedPolicy) -> dict[str, set[int]]:
    """Return for each key the numbers of its dead letters; do not remove them."""
    numbers: dict[str, set[int]] = {key: set() for key in KEYS}
    for message in provisioned.drain_dead_letters(provisioned.client(SUPERUSER)):
        content = message.data().decode()
        numbers[content[0]].add(int(content[1:]))
    return numbers


def compact(provisioned: ProvisionedPolicy) -> int:
    """Compact the records, and return the number that remains."""
    return compaction.compact(provisioned.broker, provisioned.policy.sequences_topic)


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
    write(busy, [1] * 1_100, record)  # more than wait in a client
    write(busy, [0], b"")
    write(busy, [1], record)
    assert compact(sequenced) == 1
    monkeypatch.setattr(sequencing, "STALE_SECONDS", 0.0)
    idle.read()
    assert len(idle.sequences) == 1
