"""Commands that read dead letters, and messages that wait for a retry.

Nothing is consumed. With `--direct` this program reads the broker, with a token of the caller: the
broker decides who may read. A policy is a manifest, or the name of one in the cluster.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from redrive.admin.errors import AdminNotFoundError
from redrive.api import Body
from redrive.api.inspection import MAX_RETURNED, RETURNED, ExportFormat
from redrive.cli.cluster_causes import count_causes, print_causes
from redrive.cli.documents import MalformedEntryRecord, ReplayRecord
from redrive.cli.inspection_request import InspectionRequest, inspection_options
from redrive.cli.inspection_run import extent_of, returned, summary_of, write_file
from redrive.cli.output import (
    FORMATS,
    REPORT_SECONDS,
    Live,
    age,
    clean,
    cut,
    document,
    has_terminal,
    local_time,
    now,
    output_option,
    print_document,
    say,
    style,
    utc_option,
)
from redrive.cli.replays import run_of
from redrive.errors import RedriveError
from redrive.inspection.export import private_file, write_json_lines, write_parquet
from redrive.inspection.payloads import MessageRecord
from redrive.inspection.reader import NEWEST, TopicReading
from redrive.inspection.record import MAX_PAYLOAD, MAX_RECORDED_BYTES, Recorder, newest_of
from redrive.inspection.report import ReportFacts, render_report
from redrive.inspection.summary import Summary, count_of
from redrive.reading.rows import DeadLetterRow

MAX_HELD_BYTES = 256 * 2**20
"""Payloads that a command with `--limit` holds in memory."""
_LONGEST_VALUE = 64
_FRAMES = 3
_target_option = click.option(
    "--to",
    "target",
    required=True,
    metavar="DESTINATION|FILE",
    help="Name of a destination of the connection; with --direct a file.",
)


@click.command()
@output_option("wide", "json", "yaml", "jsonl", "name")
@click.option("--refresh", is_flag=True, help="Count again within a minute.")
@utc_option
@inspection_options
def causes(request: InspectionRequest, *, refresh: bool) -> None:
    """Count dead letters by the cause of their last failure. Nothing is consumed.

    POLICY is the name of a RetryPolicy in the cluster, or rmqpol/NAME for a RocketMQRetryPolicy. An
    Inspection reads the newest 10000 entries there, and encrypts consumers and examples for this
    call. For Pulsar with --all or --where, or if you may not create Inspections, a Replay that
    moves nothing counts all dead letters, many of them by Spark. It shows no consumers and
    examples. At a terminal, the same command within a minute shows the same counts again, with
    their age, unless a Replay of the policy ran meanwhile.

    With --direct this program reads the broker. A FILE, whose name has a / or ends with .yaml or
    .json, has RetryPolicies; NAME is one of several. Texts of causes are masked: quoted values,
    words with digits, and words of the message itself. --reveal shows clear text: the right is the
    verb reveal on inspections, and with --direct your own token.
    """
    if request.is_in_cluster:
        count_causes(request, refresh=refresh)
        return
    reading = _planned(request)
    recorder = _recorder(request, reading)
    summary = _summarised(request, reading, recorder)
    items = list(map(count_of, summary.ordered))
    if request.output in FORMATS or items:
        shown = _document("CauseList", request, reading, items)
        print_causes(request, items, shown, _malformed_lines(reading))
    else:
        say("\n".join(_empty(request, reading)))


@click.command()
@output_option("json", "yaml", "jsonl", "name")
@utc_option
@inspection_options
def peek(request: InspectionRequest) -> None:
    """Show single dead letters, the newest first; consumes nothing.

    Arguments are those of causes. A policy of the cluster is read there, by an Inspection, which
    encrypts the messages for this call. At most 500 messages are shown, 20 by default, of 64 KiB
    each and 8 MiB together; of an Inspection 256 KiB, compressed. Keys and payloads are masked:
    values become type and length. --reveal shows clear text: the right is the verb reveal on
    inspections, and with --direct your own token.
    """
    limit = request.choice.limit or RETURNED
    request = replace(request, choice=replace(request.choice, limit=limit))
    if limit > MAX_RETURNED:
        raise click.UsageError(f"--limit of peek is at most {MAX_RETURNED}; use export for more")
    if request.is_in_cluster:
        _peek_in_cluster(request, limit)
        return
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
    _print_messages(request, records)
    _say_malformed(reading)
    if reading.matched > len(records):
        all_messages = request.hint("export", "--to", "dead-letters.jsonl")
        is_cut = len(records) < min(limit, reading.matched)
        bound = f", {MAX_RECORDED_BYTES // 2**20} MiB together" if is_cut else ""
        say(f"newest {len(records)} of {reading.matched}{bound}; all: {all_messages}")
    if not request.reveals:
        say(f"Masked. Clear text: --reveal, by the right of your token on {reading.topic.name}")


def _peek_in_cluster(request: InspectionRequest, limit: int) -> None:
    """Show the newest selected messages, which an Inspection reads.

    Raises:
        RedriveError: the Inspection can't be created, or it failed.
    """
    request.check_evaluated()
    body, records = returned(request, "peek", "messages", MessageRecord, limit=limit)
    if request.output in FORMATS:
        names = [record["id"] for record in records]
        shown = document("InspectedMessageList", records, **extent_of(body))
        print_document(shown, request.output, names)
        return
    if records:
        _print_messages(request, records)
    matched = run_of(body)["matched"]
    say("\n".join(summary_of(request, run_of(body))))
    if len(records) < min(limit, matched):
        extent = f"{len(records)} of the newest {min(limit, matched)}"
        say(f"{extent}: more do not fit; select fewer, such as by --id, or read with --direct")
    elif len(records) < matched:
        more = request.hint("peek", "--limit", str(MAX_RETURNED))
        say(f"newest {len(records)} of {matched}; more: {more}")
    if records and not request.reveals:
        say("Masked. Clear text: --reveal, by the role redrive-revealer")


def _print_messages(request: InspectionRequest, records: Iterable[MessageRecord]) -> None:
    at = now()
    click.echo("\n\n".join("\n".join(_message_lines(r, request, at)) for r in records))


@click.command()
@_target_option
@click.option(
    "--format",
    "form",
    type=click.Choice(["Parquet", "JSONLines"]),
    help="Form of a file at a destination; defaults to Parquet.",
)
@inspection_options
def export(request: InspectionRequest, target: str, form: str | None) -> None:
    """Write dead letters to a file: all that are selected, the oldest of each partition first.

    Arguments are those of causes; every entry of the topic is read, by an Inspection at most
    1000000. It writes to a destination that the connection of the policy names, such as an object
    store. With --direct this program writes a FILE, as JSON lines, or as Parquet if it ends with
    .parquet: it replaces another one when it is complete, and only its owner may read it. Keys and
    payloads are masked; --reveal writes clear text. Exits with 1 and writes nothing if no message
    is selected.
    """
    request = replace(request, reads_all=True)
    if request.is_in_cluster:
        write_file(request, target, ExportFormat(form or "Parquet"))
        return
    if form is not None:
        raise click.UsageError("the name of FILE decides about its format; leave --format out")
    reading = _planned(request)
    recorder = _recorder(request, reading, max_payload=None)
    write = write_parquet if Path(target).suffix == ".parquet" else write_json_lines
    with _progress(request, reading) as rows, private_file(Path(target)) as file:
        count = write(map(recorder, rows), file)
        if not count:
            raise _nothing_selected(request, reading)
    _say_malformed(reading)
    say(f"wrote {count} messages to {target}{'' if request.reveals else ', masked'}")


@click.command()
@_target_option
@inspection_options
def report(request: InspectionRequest, target: str) -> None:
    """Write one HTML page with plots: causes, arrivals, age, keys, partitions, sizes, replays.

    Arguments are those of causes. An Inspection writes the page to a destination that the
    connection of the policy names. With --direct this program writes a FILE that only its owner may
    read; for a policy by name it has its Replays, as history shows them. The page needs no network
    and has no script. Keys are hashes, and texts are masked; --reveal writes them in clear text.
    Payloads are not in it.
    """
    if request.is_in_cluster:
        write_file(request, target, ExportFormat.HTML)
        return
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
    topic = request.topic()
    try:
        return topic.plan(request.choice, None if request.reads_all else NEWEST)
    except AdminNotFoundError as error:
        raise RedriveError(
            f"the topic {topic.name} does not exist",
            remedy="check --admin-url, and create it: wait until the policy is Ready, or run "
            "redrive provision",
        ) from error


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
        command = click.get_current_context().info_name or ""
        all_entries = request.hint(command, "--all")
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
            yield f"Those that wait for a retry: {request.hint('causes', '--waiting')}"
        return
    if reading.messages:
        yield f"none of the {reading.messages} {words} that were read is selected"
        yield f"All causes: {request.hint('causes')}"
    elif request.choice.ids:
        yield f"no message of these ids is in {topic.name}: replayed, expired, or never there"
    else:
        yield f"the {reading.planned} entries hold no whole message"
    _say_malformed(reading)


def _message_lines(
    record: MessageRecord, request: InspectionRequest, at: datetime
) -> Iterator[str]:
    key = record["key"] if request.reveals else record["keyHash"]
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
