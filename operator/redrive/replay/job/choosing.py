"""A `Choice` → which messages it takes, and which entries need not be read. Pure."""

from __future__ import annotations

from redrive.replay.spec import Choice
from redrive.replay.topic import bitmap
from redrive.replay.topic.position import EntryId, Position
from redrive.replay.topic.ranges import Range


class Chooser:
    """Tells what a choice takes, all but its limit, which is about many messages.

    The partition of an id says nothing: no two partitions share a ledger of BookKeeper.
    """

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._keys = frozenset(choice.keys)
        # Entry → the indexes that are named of it; -1 for all.
        self._named: dict[EntryId, set[int]] = {}
        for written in choice.ids:
            ledger, entry, _, index, *_ = (*map(int, written.split(":")), -1, -1)
            self._named.setdefault(EntryId(ledger, entry), set()).add(max(-1, index))

    def entries(self, of: Range) -> int:
        """Return which entries of a range to look at, a bitmap of offsets."""
        if not self._named:
            return bitmap.span(0, of.size - 1)
        named = (entry for entry in self._named if of.holds(Position(*entry, 0)))
        return bitmap.of((entry.entry - of.first for entry in named), of.size)

    def takes_undelivered(self, position: Position) -> bool | None:
        """Return whether an entry is taken of which only its position is known.

        None if it depends on what it holds.
        """
        if not self._is_named(position):
            return False
        choice = self._choice
        is_known = not choice.keys and choice.since is None and choice.until is None
        return True if is_known else None

    def takes(self, position: Position, key: str | None, published: int) -> bool:
        """Whether a message is taken.

        Args:
            position: where it lies.
            key: its own.
            published: when, in milliseconds since 1970.
        """
        choice = self._choice
        return (
            self._is_named(position)
            and (not self._keys or key in self._keys)
            and (choice.since is None or published >= choice.since)
            and (choice.until is None or published < choice.until)
        )

    def _is_named(self, position: Position) -> bool:
        if not self._named:
            return True
        indexes = self._named.get(position.entry_id, set[int]())
        return not indexes.isdisjoint({-1, position.batch_index})
