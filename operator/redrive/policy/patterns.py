"""Names by patterns in which `*` stands for any characters but one: topics, roles, images, hosts.

Not by regular expressions, which try for each `*` what is left for all the others: eight of them,
against 255 characters, take longer than anything waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_Segments = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Patterns:
    """Some patterns, taken apart once: what has no `*` is looked up, the others are compared.

    A comparison takes at most as many steps as the pattern is long, times the name.

    Attributes:
        patterns: any of them is enough.
        but: the character that no `*` stands for.
    """

    patterns: tuple[str, ...]
    but: str
    _exact: frozenset[str] = field(init=False, repr=False, compare=False)
    _begins: tuple[str, ...] = field(init=False, repr=False, compare=False)
    _segments: tuple[_Segments, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Take the patterns apart."""
        starred = [pattern for pattern in self.patterns if "*" in pattern]
        segments = (
            tuple(tuple(segment.split("*")) for segment in pattern.split(self.but))
            for pattern in starred
        )
        object.__setattr__(self, "_exact", frozenset(self.patterns).difference(starred))
        object.__setattr__(self, "_begins", tuple(p.partition("*")[0] for p in starred))
        object.__setattr__(self, "_segments", tuple(segments))

    def match(self, name: str) -> bool:
        """Whether one of them stands for *name*, as a whole."""
        if name in self._exact:
            return True
        if not name.startswith(self._begins):
            return False
        parts = name.split(self.but)
        return any(
            len(segments) == len(parts) and all(map(_matches, segments, parts))
            for segments in self._segments
        )


def _matches(pieces: tuple[str, ...], text: str) -> bool:
    """Whether *text* is made of *pieces*, with anything between them.

    The first place where a piece is found leaves most for those after it, so no other is tried.
    """
    if len(pieces) == 1:
        return pieces[0] == text
    first, *middle, last = pieces
    at, end = len(first), len(text) - len(last)
    if at > end or not (text.startswith(first) and text.endswith(last)):
        return False
    for piece in middle:
        found = text.find(piece, at, end)
        if found < 0:
            return False
        at = found + len(piece)
    return True
