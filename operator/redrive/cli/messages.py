"""Single messages as `peek` shows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

import click

from redrive.cli.inspection_request import InspectionRequest
from redrive.cli.output import clean, cut, local_time, now, style
from redrive.inspection.payloads import MAX_PAYLOAD, MessageRecord

_LONGEST_VALUE = 64
_FRAMES = 3


def print_messages(request: InspectionRequest, records: Iterable[MessageRecord]) -> None:
    """Print records of messages for people."""
    at = now()
    click.echo("\n\n".join("\n".join(_message_lines(r, request, at)) for r in records))


def _message_lines(
    record: MessageRecord, request: InspectionRequest, at: datetime
) -> Iterator[str]:
    key = record["key"] or record["keyHash"]
    verb, attempts = ("failed", "retries") if request.waiting else ("died", "attempts")
    due = f"due {local_time(record['dueTime'], at)}" if record["dueTime"] else ""
    facts = (f"key {_short(key)}" if key else "no key", f"{verb} {local_time(record['time'], at)}")
    counts = (f"{attempts} {record['attempts']}", f"replays {record['replays']}")
    head = f"id         {record['id']}"
    line = cut(f"{head}   {_joined(*facts, due)}")
    yield f"id         {style(record['id'], 'cyan')}{line[len(head) :]}"
    yield cut(f"           {_joined(*counts, record['deadReason'])}")
    cause = record["cause"] or "none recorded"
    text = f"{cause}: {record['causeMessage']}" if record["causeMessage"] else cause
    lines = [("cause", text), ("", _place(record)), ("origin", record["origin"])]
    properties = ", ".join(f"{p['name']}={_short(p['value'])}" for p in record["properties"])
    lines += [("properties", properties), ("payload", _payload(record))]
    for title, value in lines:
        if value:
            yield cut(f"{title:<11}{clean(value)}", None if not request.reveals else MAX_PAYLOAD)


def _joined(*facts: str) -> str:
    return "   ".join(map(clean, filter(None, facts)))


def _short(text: str) -> str:
    return cut(text, _LONGEST_VALUE)


def _place(record: MessageRecord) -> str:
    frames = [line.removeprefix("at ") for line in record["trace"] if line.startswith("at ")]
    place = " < ".join(frames[:_FRAMES])
    consumer = f"consumer {record['consumer']}" if record["consumer"] else ""
    return _joined(place, consumer)


def _payload(record: MessageRecord) -> str:
    form, size = record["payloadForm"], record["payloadSize"]
    if record["payloadEncoding"] == "base64":
        return f"{record['payload']} (base64 of {size} bytes, {form})"
    return record["payload"] if form == "JSON" else f"{record['payload']} ({form})"
