"""A client and its reader in memory."""

from __future__ import annotations

import pulsar

from redrive.reading.entries import OnMalformed
from redrive.reading.positions import encode_nested
from redrive.reading.stored import MAX_READ_CONTENT, ReadMessage, StoredEntry
from tests.support.raw_entries import RawEntry, bytes_of, numbers

LEDGER = 7


class StoredEntries:
    """Entries of one ledger that a reader delivers; afterwards none is available."""

    def __init__(self, *entries: RawEntry) -> None:
        self.on_malformed: OnMalformed | None = None
        self._entries = [StoredEntry.read(bytes_of(entry)) for entry in entries]
        self._next = self._max_content = 0

    def open_entry_reader(self, *_: object, max_content: int, **__: object) -> StoredEntries:
        self._next, self._max_content = 0, max_content
        return self

    def read_next(self, _timeout: int) -> ReadMessage:
        if self._next == len(self._entries):
            raise pulsar.Timeout
        number, self._next = self._next, self._next + 1
        entry = self._entries[number]
        (message,) = entry.of(entry.content, ((LEDGER, number),), -1, self._max_content)
        return message

    @staticmethod
    def has_message_available() -> bool:
        return False

    def close(self) -> None:
        pass


def oversized(name: str, value: str) -> RawEntry:
    """Return an entry whose content is too large to be read, with a property."""
    metadata = numbers(compression=3, uncompressed=MAX_READ_CONTENT + 1)
    pair = encode_nested(1, name.encode()) + encode_nested(2, value.encode())
    return RawEntry(encode_nested(4, pair) + metadata, b"")
