"""Readings by this program (`--direct`): it reads the broker with a token of the caller."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redrive.admin.errors import AdminNotFoundError
from redrive.api import Body
from redrive.cli.cluster_causes import print_causes
from redrive.cli.documents import MalformedEntryRecord, ReplayRecord
from redrive.cli.inspection_request import InspectionRequest
from redrive.cli.messages import print_messages
from redrive.cli.output import (
    FORMATS,
    REPORT_SECONDS,
    Live,
    age,
    clean,
    document,
    has_terminal,
    now,
    print_document,
    say,
)
from redrive.errors import RedriveError
from redrive.inspection.export import private_file, write_json_lines, write_parquet
from redrive.inspection.payloads import MAX_PAYLOAD
from redrive.inspection.reader import NEWEST, TopicReading
from redrive.inspection.record import MAX_RECORDED_BYTES, Recorder, newest_of
from redrive.inspection.report import ReportFacts, render_report
from redrive.inspection.summary import Summary, count_of
from redrive.reading.rows import DeadLetterRow

MAX_HELD_BYTES = 256 * 2**20
"""Payloads that a command with `--limit` holds in memory."""


def causes(request: InspectionRequest) -> None:
    """Count messages by cause, and print the causes."""
    reading = _planned(request)
    recorder = _recorder(request, reading)
    summary = _summarised(request, reading, recorder)
    items = list(map(count_of, summary.ordered))
    if request.output in FORMATS or items:
        shown = _document("CauseList", request, reading, items)
        print_causes(request, items, shown, _malformed_lines(reading))
    else:
        say("\n".join(_empty(request, reading)))


def peek(request: InspectionRequest, limit: int) -> None:
    """Print the newest selected messages."""
    reading = _planned(request)
    recorder = _recorder(request, reading)
    with _progress(request, reading, MAX_RECORDED_BYTES) as rows:
        records = list(map(recorder, rows))
    if request.output in FORMATS:
        names = [record["id"] for record in records]
        print_document(_document("MessageList", request, reading, records), request.output, names)
        return
    if not records:
        say("\n".join(_empty(request, reading)))
        return
    print_messages(request, records)
    _say_malformed(reading)
    if reading.matched > len(records):
        select = {name: value for name, value in request.select.items() if name != "limit"}
        all_messages = request.hint("export", "--to", "dead-letters.jsonl", select=select)
        is_cut = len(records) < min(limit, reading.matched)
        bound = f", {MAX_RECORDED_BYTES // 2**20} MiB together" if is_cut else ""
        say(f"newest {len(records)} of {reading.matched}{bound}; all: {all_messages}")
    if not request.reveals:
        say(f"Masked. Clear text: --reveal, by the right of your token on {reading.topic.name}")


def export(request: InspectionRequest, target: str) -> None:
    """Write all selected messages to a file.

    Raises:
        RedriveError: none is selected.
    """
    reading = _planned(request)
    recorder = _recorder(request, reading, max_payload=None)
    write = write_parquet if Path(target).suffix == ".parquet" else write_json_lines
    with _progress(request, reading) as rows, private_file(Path(target)) as file:
        count = write(map(recorder, rows), file)
        if not count:
            raise _nothing_selected(request, reading)
    _say_malformed(reading)
    say(f"wrote {count} messages to {target}{'' if request.reveals else ', masked'}")


def report(request: InspectionRequest, target: str) -> None:
    """Write the report of the selected messages to a file.

    Raises:
        RedriveError: none is selected.
    """
    reading = _planned(request)
    recorder = _recorder(request, reading)
    summary = _summarised(request, reading, recorder)
    if not summary.groups:
        raise _nothing_selected(request, reading)
    replays = list(map(_replay_row, request.past_replays()))
    facts = ReportFacts.of(reading, request.source, recorder, now(), replays)
    with private_file(Path(target)) as file:
        file.write(render_report(facts, summary).encode())
    _say_malformed(reading)
    say(f"wrote a report of {reading.matched} messages to {target}")


def _summarised(request: InspectionRequest, reading: TopicReading, recorder: Recorder) -> Summary:
    summary = Summary(recorder)
    with _progress(request, reading) as rows:
        for row in rows:
            summary.add(row)
    return summary


def _replay_row(record: ReplayRecord) -> tuple[str, ...]:
    counts = (record["moved"], record["refused"], record["deadAgain"])
    return (
        record["name"],
        record["mode"],
        record["result"] or record["phase"],
        *("" if count is None else str(count) for count in counts),
        record["completionTime"] or "",
    )


def _planned(request: InspectionRequest) -> TopicReading:
    topic, live = request.topic(), Live(sys.stderr)
    if has_terminal(sys.stderr):  # an address that does not answer takes half a minute
        live.show([f"reading {topic.admin_url}"])
    try:
        return topic.plan(request.choice, None if request.reads_all else NEWEST)
    except AdminNotFoundError as error:
        raise RedriveError(
            f"the topic {topic.name} does not exist",
            remedy="check --admin-url, and create it: wait until the policy is Ready, or run "
            "redrive provision",
        ) from error
    finally:
        live.clear()


def _recorder(
    request: InspectionRequest, reading: TopicReading, max_payload: int | None = MAX_PAYLOAD
) -> Recorder:
    return Recorder(
        reading.schema, request.reveals, max_payload=max_payload, waiting=request.waiting
    )


@contextmanager
def _progress(
    request: InspectionRequest, reading: TopicReading, max_bytes: int = MAX_HELD_BYTES
) -> Iterator[Iterable[DeadLetterRow]]:
    """Yield the selected messages; show the progress meanwhile, and the extent at the end."""
    live, start = Live(sys.stderr), time.monotonic()
    silence = 1.0 if has_terminal(sys.stderr) else REPORT_SECONDS

    def show() -> None:
        if time.monotonic() - start > silence:
            live.show([f"read {reading.entries} of {reading.planned} entries"])

    rows_of_limit: Iterable[DeadLetterRow] = reading.selected(show)
    if request.choice.limit is not None:
        rows_of_limit = newest_of(rows_of_limit, request.choice.limit, max_bytes)
    yield rows_of_limit
    live.clear()
    seconds = time.monotonic() - start
    matched = "" if reading.matched == reading.messages else f"; {reading.matched} are selected"
    say(f"read {reading.messages} {request.source.words} ({seconds:.1f} s){matched}")
    if reading.is_truncated:
        all_entries = request.repeated(reads_all=True)
        time_of_all = age(max(1.0, seconds * reading.total / max(reading.entries, 1)))
        extent = f"newest {reading.planned} of {reading.total} entries"
        say(f"{extent}; all, about {time_of_all}: {all_entries}")


def _document(
    kind: str, request: InspectionRequest, reading: TopicReading, items: Sequence[Mapping[str, Any]]
) -> Body:
    malformed: list[MalformedEntryRecord] = [
        {"id": f"{entry}:{partition}", "cause": cause}
        for partition, entry, cause in reading.malformed
    ]
    return document(
        kind,
        items,
        topic=str(reading.topic.name),
        source=request.source.value,
        totalEntries=reading.total,
        readEntries=reading.planned,
        read=reading.messages,
        matched=reading.matched,
        malformedEntries=malformed,
    )


def _say_malformed(reading: TopicReading) -> None:
    for line in _malformed_lines(reading):
        say(line)


def _malformed_lines(reading: TopicReading) -> Iterator[str]:
    if reading.malformed:
        partition, entry, cause = reading.malformed[0]
        entries = f"{reading.malformed_entries} entries that no client can show"
        yield f"{entries}, such as {entry}:{partition}: {clean(cause)}"


def _nothing_selected(request: InspectionRequest, reading: TopicReading) -> RedriveError:
    problem, *hints = _empty(request, reading)
    return RedriveError(problem, remedy="\n".join(["select others", *hints]))


def _empty(request: InspectionRequest, reading: TopicReading) -> Iterator[str]:
    """Yield the reason why nothing is shown."""
    words, topic = request.source.words, reading.topic
    if not reading.total:
        yield (
            f"no {words} in {topic.name}: none came, or the subscription {topic.subscription} "
            "has acknowledged all"
        )
        if not request.waiting:
            yield f"Those that wait for a retry: {request.hint('causes', select={}, waiting=True)}"
        return
    if reading.messages:
        yield f"none of the {reading.messages} {words} that were read is selected"
        yield f"All causes: {request.hint('causes', select={})}"
    elif request.choice.ids:
        yield f"no message of these ids is in {topic.name}: replayed, expired, or never there"
    else:
        yield f"the {reading.planned} entries hold no whole message"
    _say_malformed(reading)
