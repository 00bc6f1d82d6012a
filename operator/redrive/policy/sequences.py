"""Dead letters of each key, for policies that keep sequences; pure.

There is a record for each unresolved dead letter: key and first id of the message → its place in
the sequence. A key is blocked while it has one. Records are set and removed by name, so they may be
repeated and a later record wins: a compacted topic retains the current ones.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import NamedTuple

MAX_ENTRIES = 100_000
"""Maximum dead letters of a policy. Further failed messages wait in their consumers."""

_MAX_APPLIED = 2 * MAX_ENTRIES
"""Maximum records that are kept. Consumers that write at the same time exceed `MAX_ENTRIES` a
little; a role that exceeds it by more would fill their memory."""
_MAX_NUMBER = 2**53

_NAME = re.compile(r"[0-9a-f]{32}/.{1,128}")


class Entry(NamedTuple):
    """An unresolved dead letter.

    Attributes:
        place: place in the sequence of its key, from 1, with gaps.
        replays: number of its replays when it was dead-lettered.
    """

    place: int
    replays: int

    def encode(self) -> bytes:
        """Return the content of its record."""
        return json.dumps([self.place, self.replays]).encode()


class Sequences:
    """Unresolved dead letters of each key."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[str, Entry]] = {}
        self._count = 0

    def __len__(self) -> int:
        """Return the number of unresolved dead letters."""
        return self._count

    @property
    def keys(self) -> int:
        """Return the number of blocked keys."""
        return len(self._entries)

    def apply(self, name: str, content: bytes) -> None:
        """Apply a record; an invalid one is ignored, and one beyond `_MAX_APPLIED`."""
        entry = _decode(content)
        if not _NAME.fullmatch(name) or (content and entry is None):
            return
        key, first_id = name.split("/", 1)
        if self._count >= _MAX_APPLIED and first_id not in self._entries.get(key, {}):
            return
        entries = self._entries.setdefault(key, {})
        if entry is None:
            self._count -= entries.pop(first_id, None) is not None
        else:
            self._count += first_id not in entries
            entries[first_id] = entry  # in one step: other threads read meanwhile
        if not entries:
            del self._entries[key]

    def find(self, key: str, first_id: str) -> Entry | None:
        """Return the entry of a message, even if it was replayed since; None without one."""
        return self._entries.get(_digest(key), {}).get(first_id)

    def first(self, key: str) -> Entry | None:
        """Return the first unresolved dead letter of *key*; None without any."""
        return min(self._entries.get(_digest(key), {}).values(), default=None)

    def enter(self, key: str, first_id: str, replays: int) -> Entry:
        """Return the entry for a message to dead-letter; a replayed message keeps its place."""
        entries = self._entries.get(_digest(key), {})
        before = entries.get(first_id)
        last = max(entries.values(), default=Entry(0, 0))
        return Entry(last.place + 1 if before is None else before.place, replays)

    def may_be_handled(self, key: str, first_id: str, replays: int) -> bool:
        """Return True if no earlier dead letter of its key blocks a message.

        A replayed message may be handled when it is the first unresolved one. A message that has an
        entry and was not replayed since is a dead letter that a crash left unacknowledged.
        """
        entries = self._entries.get(_digest(key))
        if entries is None:
            return True
        own = entries.get(first_id)
        return own is not None and replays > own.replays and own == min(entries.values())


def record_name(key: str, first_id: str) -> str:
    """Return the name of an entry's record, which does not reveal the key."""
    return f"{_digest(key)}/{first_id}"


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def _decode(content: bytes) -> Entry | None:
    try:
        place, replays = json.loads(content)
    except (ValueError, TypeError, RecursionError):
        return None
    if type(place) is not int or type(replays) is not int:
        return None
    is_possible = 0 < place < _MAX_NUMBER and 0 <= replays < _MAX_NUMBER
    return Entry(place, replays) if is_possible else None
