"""Entries of a dead-letter topic: which can be moved, and what those hold that no plan has read."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import pulsar

from redrive.copying.errors import SchemaError
from redrive.copying.writer_schemas import WriterSchemas
from redrive.policy.naming import TopicName
from redrive.replay.moving.outcome import RangeOutcome
from redrive.replay.topic import bitmap, broker
from redrive.replay.topic.position import MAX_BATCH, Position
from redrive.replay.topic.rows import DeadLetterRow


class SeenMessage(Protocol):
    """What decides whether a message can be moved; see `DeadLetterRow`."""

    @property
    def position(self) -> Position:
        """Return where it lies."""

    @property
    def delivered(self) -> bool:
        """Return whether a client can show it."""

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


_Seen = TypeVar("_Seen", bound=SeenMessage)


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
    if not first.delivered:
        return "NotDelivered"
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
                broker.waited(lambda: schemas.get(topic, version))
        except SchemaError as error:
            return error.reason
        return ""

    return refusal


def by_entry(messages: Iterable[_Seen]) -> Iterator[list[_Seen]]:
    """Put the messages of each entry together."""
    # As `entry_id`, which would make a named tuple for each.
    for _, entry in itertools.groupby(messages, key=lambda message: message.position[:2]):
        yield list(entry)


def read_first(
    entry: Sequence[DeadLetterRow],
    offset: int,
    outcome: RangeOutcome,
    acknowledged: int,
    cause_of: Callable[[Sequence[DeadLetterRow]], str],
) -> bool:
    """Take note of an entry that is read for the first time, and return whether to send it.

    Args:
        entry: all its messages.
        offset: of the entry.
        outcome: takes in what it holds, and why it can't be moved.
        acknowledged: what is not to be sent, a bitmap.
        cause_of: says why an entry can't be moved; nothing if it can.
    """
    outcome.read(offset, len(entry), entry[0].first_chunk)
    if bitmap.contains(acknowledged, offset):
        return False
    cause = cause_of(entry)
    if cause:
        outcome.refuse((offset, 0), cause)
    return not cause
