"""Keys of sequenced dead letters that move between killed consumers keep their order."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sandbox.pulsar import SUPERUSER
from tests.integration.delivery.test_sequenced import SEQUENCED, recorded
from tests.support.consumers import StartProgram, start_program
from tests.support.provisioned_policy import ProvisionedPolicy, provision_policy
from tests.support.waiting import wait_until

__all__ = ["provision_policy", "start_program"]
ProvisionPolicy = Callable[..., Any]
SEED = 13
KEYS, COUNT = "abcdef", 30
BAD = {"a": 7, "b": 0, "c": 15, "d": 29, "e": 12}
"""Key → the number of its message that fails."""
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
    provisioned.wait_until_settled()
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
