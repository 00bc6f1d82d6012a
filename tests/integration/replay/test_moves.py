"""What is done to each dead letter, on the real broker: the data source's halves without Spark."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pulsar
import pyarrow as pa
import pytest

from redrive.errors import RedriveError
from redrive.policy.naming import DEAD_LETTER_SUBSCRIPTION
from redrive.policy.properties import CAUSE_TYPE
from redrive.replay import rows, sink
from redrive.replay.broker import AlreadyRunningError, ReplayRoleRefusedError, TokenMissingError
from redrive.replay.move import OutOfOrderError, Tally
from redrive.replay.producer import DeduplicationOffError
from redrive.replay.rows import DeadLetter
from redrive.replay.sink import PulsarWriter
from redrive.replay.source import PulsarReader
from redrive.replay.spec import TOKEN_VARIABLE

SetStage = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("replay_token")


def reading(stage: Any) -> dict[str, str]:  # noqa: ANN401 - a Stage of conftest.py
    """Return the options of the source."""
    return {
        "serviceUrl": stage.broker.service_url,
        "adminUrl": stage.broker.admin_url,
        "topic": str(stage.policy.dead_letter_topic),
        "subscription": DEAD_LETTER_SUBSCRIPTION,
    }


def writing(stage: Any, folder: Path, run: str = "run-1", partitions: int = 0) -> dict[str, str]:  # noqa: ANN401
    """Return the options of the sink; *run* identifies a run and its repetitions."""
    return {
        "serviceUrl": stage.broker.service_url,
        "source": str(stage.policy.dead_letter_topic),
        "subscription": DEAD_LETTER_SUBSCRIPTION,
        "target": str(stage.policy.retry_topic),
        "targetPartitions": str(partitions),
        "producer": run,
        "replay": f"tests/{run}",
        "tally": str(folder / "tally.json"),
    }


def read(stage: Any) -> list[DeadLetter]:  # noqa: ANN401
    """Read all that rests, as the source gives it."""
    reader = PulsarReader(reading(stage))
    batches = (batch for part in reader.partitions() for batch in reader.read(part))
    return [letter for batch in batches for letter in rows.from_batch(batch)]


def write(options: dict[str, str], letters: list[DeadLetter]) -> Tally:
    """Move *letters*, as one task of the sink does."""
    writer = PulsarWriter(options)
    writer.commit([writer.write(one_by_one(letters)), None])
    return sink.read_tally(Path(options["tally"]))


def one_by_one(letters: list[DeadLetter]) -> Iterator[pa.RecordBatch]:
    return (rows.to_batch([letter]) for letter in letters)


CRASHING = """
import json, os, signal, sys
import pulsar
from redrive.replay.sink import PulsarWriter
from redrive.replay.source import PulsarReader

reading, writing, crash_at = json.loads(sys.argv[1])
acknowledge, count = pulsar.Consumer.acknowledge, 0

def crash(consumer, message):
    global count
    count += 1
    if count == crash_at:
        os.kill(os.getpid(), signal.SIGKILL)
    acknowledge(consumer, message)

pulsar.Consumer.acknowledge = crash
reader = PulsarReader(reading)
for partition in reader.partitions():
    PulsarWriter(writing).write(reader.read(partition))
"""


@pytest.mark.parametrize("partitions", [0, 3])
@pytest.mark.parametrize("crash_at", [1, 20])
def test_a_run_killed_between_receipt_and_acknowledgement_stores_nothing_twice(
    set_stage: SetStage, tmp_path: Path, partitions: int, crash_at: int
) -> None:
    stage = set_stage(partitions=partitions)
    stage.bury(40)
    buried = stage.ids(stage.resting())
    options = writing(stage, tmp_path, partitions=partitions)
    arguments = json.dumps([reading(stage), options, crash_at])
    source_root = str(Path(rows.__file__).parents[2])
    killed = subprocess.run(
        [sys.executable, "-c", CRASHING, arguments],
        env=os.environ | {"PYTHONPATH": source_root},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL

    tally = write(options, read(stage))

    # Acknowledgements are on their way for a moment: some may have died with the process.
    assert len(buried) - (crash_at - 1) <= tally.replayed <= len(buried)
    assert tally.duplicates > 0
    assert stage.ids(stage.replayed()) == buried
    assert stage.resting() == []


def test_what_was_acknowledged_out_of_order_is_not_read_again(set_stage: SetStage) -> None:
    stage = set_stage()
    stage.bury(10)
    consumer = stage.client.subscribe(
        str(stage.policy.dead_letter_topic),
        DEAD_LETTER_SUBSCRIPTION,
        consumer_type=pulsar.ConsumerType.Shared,
    )
    messages = [consumer.receive(30_000) for _ in range(10)]
    for index in (0, 3, 4, 9):
        consumer.acknowledge(messages[index])
    consumer.close()
    rest = [messages[index].properties()["id"] for index in (1, 2, 5, 6, 7, 8)]
    assert [letter.properties["id"] for letter in read(stage)] == rest


def test_a_target_that_does_not_deduplicate_is_left_before_anything_can_be_stored_twice(
    set_stage: SetStage, tmp_path: Path
) -> None:
    stage = set_stage(deduplicate=False)
    stage.bury(5)
    buried = stage.ids(stage.resting())
    for _ in range(2):  # as Spark tries a failed task again
        with pytest.raises(DeduplicationOffError, match="deduplication is off"):
            write(writing(stage, tmp_path), read(stage))
    moved, resting = stage.ids(stage.replayed()), stage.ids(stage.resting())
    assert (len(moved), len(resting)) == (2, 3)
    assert sorted(moved + resting) == buried


def test_an_entry_is_moved_whole_or_not_at_all(set_stage: SetStage, tmp_path: Path) -> None:
    stage = set_stage()
    stage.bury_batch("A", "B", "A")
    stage.bury_batch("A", "A")
    stage.bury(1, "A")
    letters = read(stage)
    assert [(letter.position.batch_index, letter.batch_size) for letter in letters] == [
        (0, 3), (1, 3), (2, 3), (0, 2), (1, 2), (0, 1),
    ]  # fmt: skip

    selected = [x for x in letters if x.properties[CAUSE_TYPE] == "A"]
    tally = write(writing(stage, tmp_path), selected)

    assert tally == Tally(replayed=3, duplicates=0, kept=2)
    assert len(stage.replayed()) == 3
    assert len(stage.resting()) == 3
    assert len(read(stage)) == 3


def test_a_message_cut_into_chunks_stays_where_it_is(set_stage: SetStage, tmp_path: Path) -> None:
    stage = set_stage()
    producer = stage.client.create_producer(
        str(stage.policy.dead_letter_topic), batching_enabled=False, chunking_enabled=True
    )
    producer.send(b"x" * 6_000_000, properties={"id": "big"})
    producer.close()
    stage.bury(1)
    letters = read(stage)
    assert [letter.chunked for letter in letters] == [True, False]

    tally = write(writing(stage, tmp_path), letters)

    assert tally == Tally(replayed=1, duplicates=0, kept=1)
    assert [letter.properties["id"] for letter in read(stage)] == ["big"]


def test_messages_that_are_not_in_order_are_refused_before_they_are_sent(
    set_stage: SetStage, tmp_path: Path
) -> None:
    stage = set_stage()
    stage.bury(3)
    first, second, third = read(stage)
    with pytest.raises(OutOfOrderError, match="do not sort or repartition"):
        write(writing(stage, tmp_path), [first, third, second])
    assert len(stage.replayed()) == 2


def test_a_second_copy_of_a_task_finds_its_producer_taken(
    set_stage: SetStage, tmp_path: Path
) -> None:
    stage = set_stage()
    stage.bury(1)
    stage.client.create_producer(str(stage.policy.retry_topic), producer_name="run-1--1--1")
    with pytest.raises(AlreadyRunningError, match="another process holds the producer run-1"):
        write(writing(stage, tmp_path), read(stage))
    assert len(stage.resting()) == 1


def test_a_role_that_may_not_produce_moves_nothing(set_stage: SetStage, tmp_path: Path) -> None:
    stage = set_stage(retry_rights=("consume",))
    stage.bury(2)
    with pytest.raises(ReplayRoleRefusedError, match="the replay role may produce there"):
        write(writing(stage, tmp_path), read(stage))
    assert len(stage.resting()) == 2


def test_a_task_without_token_says_which_variable_is_missing(
    set_stage: SetStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = set_stage()
    monkeypatch.delenv(TOKEN_VARIABLE)
    with pytest.raises(TokenMissingError, match="REDRIVE_PULSAR_TOKEN is not set"):
        read(stage)


def test_no_error_tells_the_token(
    set_stage: SetStage, replay_token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = set_stage()
    monkeypatch.setenv(TOKEN_VARIABLE, replay_token + "forged")
    with pytest.raises(RedriveError) as refused:
        read(stage)
    assert replay_token[-20:] not in str(refused.value)
