"""Entries of a partition that follow on each other: what is to be read, and what came. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from redrive.replay.topic.position import EntryId


class Span(NamedTuple):
    """Entries of one ledger, from *first* to *last*, both included."""

    ledger: int
    first: int
    last: int

    @property
    def end(self) -> EntryId:
        """Return the last of them."""
        return EntryId(self.ledger, self.last)

    @property
    def size(self) -> int:
        """Return how many there are."""
        return self.last - self.first + 1


def of_entries(ledger: int, entries: Iterable[int]) -> list[Span]:
    """Put *entries* of a ledger, in order, together."""
    spans: list[Span] = []
    for entry in entries:
        first = entry
        if spans and spans[-1].last + 1 == entry:
            first = spans.pop().first
        spans.append(Span(ledger, first, entry))
    return spans


def without(wanted: Iterable[Span], seen: Sequence[Span]) -> list[Span]:
    """Return what of *wanted* is not in *seen*; all of them in order, and apart."""
    left: list[Span] = []
    for span in wanted:
        first = span.first
        at = bisect.bisect_left(seen, (span.ledger, first), key=lambda each: each.end)
        while at < len(seen) and (seen[at].ledger, seen[at].first) <= span.end:
            if first < seen[at].first:
                left.append(Span(span.ledger, first, seen[at].first - 1))
            first = seen[at].last + 1
            at += 1
        if first <= span.last:
            left.append(Span(span.ledger, first, span.last))
    return left


def hold(spans: Sequence[Span], entry: EntryId) -> bool:
    """Whether *entry* lies in one of *spans*, which are in order and apart."""
    at = bisect.bisect_left(spans, entry, key=lambda each: each.end)
    return at < len(spans) and (spans[at].ledger, spans[at].first) <= entry
