"""Which messages of which keys are dead letters, for policies that keep sequences; pure.

A record for each letter that is out: key and first id of a message → its place in the sequence. A
key is dead as long as it has one. Records are set and removed by name, so that they may be
repeated, and one that is written later wins: a compacted topic keeps what is needed.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import NamedTuple

MAX_LETTERS = 100_000
"""So many letters of a policy are remembered; beyond, what would be one waits in its consumer."""

_NAME = re.compile(r"[0-9a-f]{32}/.{1,128}")


class Letter(NamedTuple):
    """A dead letter.

    Attributes:
        place: in the sequence of its key; from 1, with gaps.
        replays: how often it had been replayed when it became a letter.
    """

    place: int
    replays: int

    def encode(self) -> bytes:
        """Write it as the content of a record."""
        return json.dumps([self.place, self.replays]).encode()


class Sequences:
    """The letters of each key that are out."""

    def __init__(self) -> None:
        self._letters: dict[str, dict[str, Letter]] = {}
        self._count = 0

    def __len__(self) -> int:
        """Return how many letters are out."""
        return self._count

    @property
    def keys(self) -> int:
        """Return how many keys are dead."""
        return len(self._letters)

    def apply(self, name: str, content: bytes) -> None:
        """Follow a record; what is none is ignored."""
        letter = _decode(content)
        if not _NAME.fullmatch(name) or (content and letter is None):
            return
        key, first_id = name.split("/", 1)
        letters = self._letters.setdefault(key, {})
        if letter is None:
            self._count -= letters.pop(first_id, None) is not None
        else:
            self._count += first_id not in letters
            letters[first_id] = letter  # in one step: other threads look meanwhile
        if not letters:
            del self._letters[key]

    def find(self, key: str, first_id: str) -> Letter | None:
        """Return the letter that a message is, or was before it was replayed."""
        return self._letters.get(_digest(key), {}).get(first_id)

    def first(self, key: str) -> Letter | None:
        """Return the first letter of *key* that is out; None if it is not dead."""
        return min(self._letters.get(_digest(key), {}).values(), default=None)

    def enter(self, key: str, first_id: str, replays: int) -> Letter:
        """Return the letter that a message becomes: one that was replayed keeps its place."""
        letters = self._letters.get(_digest(key), {})
        before = letters.get(first_id)
        last = max(letters.values(), default=Letter(0, 0))
        return Letter(last.place + 1 if before is None else before.place, replays)

    def may_be_handled(self, key: str, first_id: str, replays: int) -> bool:
        """Whether a message is not behind a dead letter of its key.

        If it was replayed, it is handled when it is the first of those that are out. If it was not
        since it became a letter, it is one: a crash kept it from being acknowledged.
        """
        letters = self._letters.get(_digest(key))
        if letters is None:
            return True
        own = letters.get(first_id)
        return own is not None and replays > own.replays and own == min(letters.values())


def record_name(key: str, first_id: str) -> str:
    """Name the record of a letter; it does not tell the key."""
    return f"{_digest(key)}/{first_id}"


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def _decode(content: bytes) -> Letter | None:
    try:
        place, replays = json.loads(content)
    except (ValueError, TypeError, RecursionError):
        return None
    return Letter(place, replays) if type(place) is int and type(replays) is int else None
