"""A message as a record, masked or in clear text, and the newest messages of a reading."""

from __future__ import annotations

import heapq
import itertools
import re
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from redrive.inspection import payloads
from redrive.policy import envelope
from redrive.policy.envelope import (
    CAUSE_MESSAGE,
    CAUSE_PROPERTIES,
    CAUSE_TRACE,
    CONSUMER,
    DEAD_REASON,
    DELAY_TIME,
    MAX_TEXT_BYTES,
    MAX_TRACE_BYTES,
    ORIGIN_MESSAGE_ID,
)
from redrive.policy.values import time_text
from redrive.policy.verdict import DeadReason
from redrive.reading.rows import DeadLetterRow
from redrive.replay.spec import FailureCause

MAX_RECORDED_BYTES = 8 * 2**20
"""Payloads and properties of the messages that are shown one by one."""
_OWN = "REDRIVE_"
_OWN_OF_JAVA = {
    envelope.RECONSUMETIMES,
    envelope.DELAY_TIME,
    envelope.REAL_TOPIC,
    envelope.REAL_SUBSCRIPTION,
    envelope.RETRY_TOPIC,
    envelope.ORIGIN_MESSAGE_ID,
} | CAUSE_PROPERTIES
_REASON = re.compile("|".join(DeadReason))
_ORIGIN = re.compile(r"-?[0-9]+(:-?[0-9]+){1,3}|[0-9A-F]{32}([0-9A-F]{24})?")
"""Ids of Pulsar and of RocketMQ."""
_DELAY_DIGITS = 12
_LONGEST = 256


def id_of(row: DeadLetterRow) -> str:
    """Return the id of a message, as selections take it."""
    position = row.position
    return row.id or f"{position.ledger}:{position.entry}:{row.partition}:{position.batch_index}"


@dataclass(frozen=True)
class Recorder:
    """Makes records of messages.

    Attributes:
        schema: returns a version of the topic's schema, if it is Avro.
        reveals: True for clear text.
        max_payload: bytes of a payload in clear text; more are cut. None for any number.
        waiting: True if the messages wait for a retry.
        shown: fields of payloads whose values are shown, even if they are masked otherwise.
        shows_keys: True if keys are shown likewise.
    """

    schema: Callable[[int | None], payloads.AvroSchema | None]
    reveals: bool = False
    max_payload: int | None = None
    waiting: bool = False
    shown: payloads.ShownFields | None = None
    shows_keys: bool = False
    hash_key: payloads.KeyHasher = field(
        default_factory=lambda: payloads.KeyHasher(secrets.token_bytes(32))
    )

    def __call__(self, row: DeadLetterRow) -> payloads.MessageRecord:
        """Return the record of a message."""
        properties, payload, key = row.properties, self._payload(row), row.sequence_key
        shows_key = self.reveals or self.shows_keys
        cause, fingerprint = FailureCause.of(row.properties)
        trace = properties.get(CAUSE_TRACE, "")[:MAX_TRACE_BYTES]
        delay = properties.get(DELAY_TIME, "") if self.waiting else ""
        is_delayed = delay.isdecimal() and len(delay) <= _DELAY_DIGITS
        due = row.publish_time + int(delay) if is_delayed else None
        return {
            "id": id_of(row),
            "time": time_text(row.publish_time),
            "dueTime": None if due is None else time_text(due),
            "key": key if shows_key else None,
            "keyHash": None if shows_key or key is None else self.hash_key(key),
            "attempts": envelope.reconsume_times(properties),
            "replays": row.replays,
            "deadReason": self._own_text(properties, DEAD_REASON, _REASON),
            "cause": cause,
            "fingerprint": fingerprint,
            "causeMessage": self._cause_text(row, payload),
            "trace": trace.splitlines() if self.reveals else payloads.mask_trace(trace),
            "consumer": properties.get(CONSUMER, "")[:_LONGEST],
            "origin": self._own_text(properties, ORIGIN_MESSAGE_ID, _ORIGIN),
            "properties": [
                {
                    "name": name if self.reveals or payloads.is_name(name) else payloads.mask(name),
                    "value": value if self.reveals else payloads.mask(value),
                }
                for name, value in _of_user(properties)
            ],
            "payloadForm": payload.form,
            "payloadSize": len(payload.content),
            **self._shown(payload),
        }

    def cause_text(self, row: DeadLetterRow) -> str:
        """Return the text of the cause of a message, masked unless this reveals."""
        return self._cause_text(row, None)

    def _cause_text(self, row: DeadLetterRow, payload: payloads.Payload | None) -> str:
        text = row.properties.get(CAUSE_MESSAGE, "")[:MAX_TEXT_BYTES]
        if self.reveals or not text:
            return text
        payload = payload or self._payload(row)
        if (
            payload.form in {"encrypted", "oversized"}
            or len(payload.content) > payloads.MAX_DECODED
        ):
            return payloads.HIDDEN  # it may hold any of the words
        values = (value for _, value in _of_user(row.properties))
        return payloads.mask_text(
            text, itertools.chain(payload.secrets, values, filter(None, row.keys))
        )

    def _own_text(self, properties: Mapping[str, str], name: str, form: re.Pattern[str]) -> str:
        """Return a property of redrive; masked if it lacks its form, as any producer may write."""
        text = properties.get(name, "")[:_LONGEST]
        return text if self.reveals or not text or form.fullmatch(text) else payloads.mask(text)

    def _payload(self, row: DeadLetterRow) -> payloads.Payload:
        schema = self.schema(row.schema_version)
        return payloads.decode_payload(
            row.value, row.properties, schema, encrypted=row.encrypted, oversized=row.oversized
        )

    def _shown(self, payload: payloads.Payload) -> payloads.ShownPayload:
        if not self.reveals:
            return {"payloadEncoding": "masked", "payload": payload.masked(self.shown)}
        text = payload.clear
        if self.max_payload is not None:
            text = text[: self.max_payload]
        return {"payloadEncoding": "text" if payload.is_text else "base64", "payload": text}


def _of_user(properties: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the properties that redrive and Pulsar's clients did not write."""
    for name, value in properties.items():
        if not name.startswith(_OWN) and name not in _OWN_OF_JAVA:
            yield name, value


class _Dated(NamedTuple):
    time: int
    number: int
    row: DeadLetterRow


def newest_of(rows: Iterable[DeadLetterRow], limit: int, max_bytes: int) -> list[DeadLetterRow]:
    """Return the newest messages by publish time, the newest first.

    Args:
        rows: in any order; read to their end.
        limit: number of messages, which may be 0.
        max_bytes: of their payloads and properties together; older messages are left out, but at
            least one is kept.
    """
    if not limit:
        deque(rows, maxlen=0)
        return []
    newest: list[_Dated] = []
    size = 0
    for number, row in enumerate(rows):
        heapq.heappush(newest, _Dated(row.publish_time, number, row))
        size += _size(row)
        while len(newest) > limit or (size > max_bytes and len(newest) > 1):
            size -= _size(heapq.heappop(newest).row)
    return [dated.row for dated in sorted(newest, reverse=True)]


def _size(row: DeadLetterRow) -> int:
    return row.size + sum(len(name) + len(value) for name, value in row.properties.items())
