"""Entries of a dead-letter topic: which can be moved, and what those hold that no plan has read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import pulsar

from redrive.copying.errors import SchemaError
from redrive.copying.writer_schemas import WriterSchemas
from redrive.policy.naming import TopicName
from redrive.replay.moving.outcome import RangeOutcome
from redrive.replay.topic import bitmap
from redrive.replay.topic.position import MAX_BATCH
from redrive.replay.topic.rows import DeadLetterRow


class SeenMessage(Protocol):
    """What decides whether a message can be moved; see `DeadLetterRow`."""

    @property
    def encrypted(self) -> bool:
        """Return whether only its readers can decrypt it."""

    @property
    def unreadable(self) -> bool:
        """Return whether its properties can't be shown."""

    @property
    def batch_size(self) -> int:
        """Return how many messages its entry holds."""

    @property
    def replays(self) -> int:
        """Return how often it was replayed."""


def refusal(entry: Sequence[SeenMessage], selected: int, max_replays: int | None) -> str:
    """Say why an entry can't be moved; nothing if it can.

    A broker acknowledges entries, not messages: what is sent of an entry in part would be sent
    again by the next Replay.

    Args:
        entry: what was read of its messages.
        selected: how many of them are to be moved.
        max_replays: what was replayed so often stays; None for any number.
    """
    first = entry[0]
    if first.encrypted:
        return "Encrypted"
    if first.unreadable:
        return "UnreadableProperties"
    if first.batch_size > MAX_BATCH:
        return "BatchTooLarge"
    if not selected == len(entry) == first.batch_size:
        return "PartOfBatch"
    often = max_replays is not None and max_replays <= max(each.replays for each in entry)
    return "ReplayedTooOften" if often else ""


def schema_refusals(client: pulsar.Client, topic: TopicName) -> Callable[[int | None], str]:
    """Return what says of a version of the schema of *topic* why no message can be sent with it.

    It says nothing where one can.
    """
    schemas = WriterSchemas(client)

    @functools.cache
    def refusal(version: int | None) -> str:
        try:
            if version is not None:
                schemas.get(topic, version)
        except SchemaError as error:
            return error.reason
        return ""

    return refusal


def read_first(
    letters: Iterable[DeadLetterRow],
    outcome: RangeOutcome,
    begin: int,
    acknowledged: int,
    cause_of: Callable[[Sequence[DeadLetterRow]], str],
) -> Iterator[DeadLetterRow]:
    """Yield what is to be sent of entries that are read for the first time.

    Args:
        letters: all messages of some entries.
        outcome: takes in what the entries hold, and which can't be moved.
        begin: the first entry of their range.
        acknowledged: what is not to be sent, a bitmap.
        cause_of: says why an entry can't be moved; nothing if it can.
    """
    for entry in by_entry(letters):
        first = entry[0]
        offset = first.position.entry - begin
        outcome.read(offset, len(entry), first.first_chunk)
        if acknowledged and bitmap.contains(acknowledged, offset):
            continue
        cause = cause_of(entry)
        if cause:
            outcome.refuse((offset, 0), cause)
        else:
            yield from entry


def by_entry(letters: Iterable[DeadLetterRow]) -> Iterator[Sequence[DeadLetterRow]]:
    """Put the messages of each entry together."""
    batch: list[DeadLetterRow] = []
    for letter in letters:
        if batch and batch[0].position.entry_id != letter.position.entry_id:
            yield batch
            batch = []
        if letter.batch_size == 1:
            yield (letter,)
        else:
            batch.append(letter)
    if batch:
        yield batch
