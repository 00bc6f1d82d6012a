"""Commands that read dead letters, and messages that wait for a retry.

Nothing is consumed. With `--direct` this program reads the broker, with a token of the caller: the
broker decides who may read. A policy is a manifest, or the name of one in the cluster.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial, wraps
from pathlib import Path
from typing import Any, Literal

import click

from redrive.admin.errors import AdminNotFoundError
from redrive.api import Body
from redrive.api.model import parse, parse_spec
from redrive.api.replay import Selection, milliseconds
from redrive.api.retrypolicy import RetryPolicySpec
from redrive.auth.files import SourceCredentials
from redrive.auth.method import Plugin, SourceAuthentication
from redrive.cli.cluster import Cluster
from redrive.cli.develop import DEFAULT_NAMESPACE, ManifestsInvalidError, read_claims
from redrive.cli.documents import CauseCount, MalformedEntryRecord
from redrive.cli.frame import ClusterFlags, cluster_options, names_of
from redrive.cli.output import (
    FORMATS,
    REPORT_SECONDS,
    Live,
    TableColumn,
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
    table,
)
from redrive.cli.replay import selected, selection_options
from redrive.errors import RedriveError
from redrive.inspection.export import private_file, write_json_lines, write_parquet
from redrive.inspection.payloads import MessageRecord
from redrive.inspection.reader import NEWEST, InspectedTopic, TopicReading, plan_reading
from redrive.inspection.record import Recorder, newest_of, time_text
from redrive.inspection.report import ReportFacts, render_report
from redrive.inspection.summary import CauseGroup, Summary
from redrive.kube.resources import POLICIES
from redrive.policy.envelope import CAUSE_TYPE
from redrive.policy.naming import DEAD_LETTER_SUBSCRIPTION, TopicName
from redrive.reading.rows import DeadLetterRow
from redrive.replay.spec import Choice

PEEKED, MOST_PEEKED = 20, 500
"""Messages that `peek` shows by default, and at most."""
MAX_PAYLOAD = 64 * 2**10
"""Characters of a payload that `peek` shows in clear text."""
MAX_PEEKED_BYTES = 8 * 2**20
MAX_HELD_BYTES = 256 * 2**20
"""Payloads that a command with `--limit` holds in memory."""
_LONGEST_CAUSE = 40
_LONGEST_VALUE = 64
_FRAMES = 3
_FILE_ENDINGS = (".yaml", ".yml", ".json")
_WORDS = {"DeadLetter": "dead letters", "Retry": "messages that wait for a retry"}
_WITHOUT_CAUSE = f"""\
none recorded: clients for Java and Go write no cause. Lines that add one:
  Java  consumer.reconsumeLater(message, \
Map.of("{CAUSE_TYPE}", error.getClass().getSimpleName()), delay, unit);
  Go    consumer.ReconsumeLaterWithCustomProperties(message, \
map[string]string{{"{CAUSE_TYPE}": fmt.Sprintf("%T", err)}}, delay)"""
_CAUSE_COLUMNS = (
    TableColumn("N", right=True),
    TableColumn("CAUSE"),
    TableColumn("FINGERPRINT"),
    TableColumn("FIRST", right=True, dropped=1),
    TableColumn("LAST", right=True),
    TableColumn("REPLAYED", right=True, dropped=2),
    TableColumn("FOLLOWING", right=True, wide=True),
    TableColumn("CONSUMERS", dropped=3),
    TableColumn("EXAMPLE", dropped=4),
)


class TopicMissingError(RedriveError):
    """The topic of a policy does not exist, or the policy has none."""

    reason = "TopicMissing"


class NothingExportedError(RedriveError):
    """No message is selected, so no file is written."""

    reason = "NothingExported"


@dataclass(frozen=True)
class DirectAccess:
    """Addresses and credentials of `--direct`.

    Attributes:
        is_direct: False without `--direct`.
    """

    is_direct: bool
    service_url: str | None
    admin_url: str | None
    token_file: Path | None
    ca_file: Path | None

    def topic(self, name: TopicName, subscription: str) -> InspectedTopic:
        """Return the topic, to be read with the caller's token.

        Raises:
            UsageError: an address is missing.
        """
        if self.service_url is None or self.admin_url is None:
            raise click.UsageError("--direct needs --service-url and --admin-url")
        credentials = SourceCredentials(
            SourceAuthentication(
                plugin=Plugin.NONE if self.token_file is None else Plugin.TOKEN,
                files={} if self.token_file is None else {"token": str(self.token_file)},
                trusted=None if self.ca_file is None else str(self.ca_file),
            )
        )
        return InspectedTopic(name, subscription, self.service_url, self.admin_url, credentials)

    def words(self) -> list[str]:
        """Return the options as they were given, for hints."""
        options = {
            "--service-url": self.service_url,
            "--admin-url": self.admin_url,
            "--token-file": self.token_file,
            "--ca-file": self.ca_file,
        }
        pairs_of_options = [
            (name, str(value)) for name, value in options.items() if value is not None
        ]
        direct = ["--direct"] if self.is_direct else []
        return [*direct, *(word for pair in pairs_of_options for word in pair)]


@dataclass(frozen=True)
class InspectionRequest:
    """Arguments that the commands share.

    Attributes:
        policy: name, or file, of the policy.
        name: of one policy of the file.
        choice: selection; its limit counts the newest messages.
        reads_all: True to read more than the newest entries.
        waiting: True for messages that wait for a retry.
        reveals: True for clear text.
    """

    policy: str
    name: str | None
    flags: ClusterFlags
    access: DirectAccess
    choice: Choice
    reads_all: bool
    waiting: bool
    reveals: bool
    output: str | None = None

    @property
    def source(self) -> Literal["DeadLetter", "Retry"]:
        """Return the kind of the topic."""
        return "Retry" if self.waiting else "DeadLetter"

    def hint(self, command: str, *words: str) -> str:
        """Return a command line for the same messages that can be pasted."""
        policy = [self.policy] if self.name is None else [self.policy, self.name]
        more = ["--waiting"] if self.waiting else []
        return self.flags.hint(command, *policy, *words, *more, *self.access.words())

    def topic(self) -> InspectedTopic:
        """Return the topic of the policy.

        Raises:
            RedriveError: there is no such policy, or it has no such topic.
            UsageError: messages can't be reached.
        """
        name, subscription = self._of_file() if self._is_file else self._of_cluster()
        if not self.access.is_direct:
            raise click.UsageError(
                f"this program reads the broker only with --direct; the messages are in {name}\n"
                "with a token that may consume that topic, and addresses that this machine "
                "reaches:\n  "
                + self.hint("causes")
                + " --direct --service-url pulsar://localhost:6650 "
                "--admin-url http://localhost:8080 --token-file FILE"
            )
        return self.access.topic(name, subscription)

    @property
    def _is_file(self) -> bool:
        return self.policy == "-" or "/" in self.policy or self.policy.endswith(_FILE_ENDINGS)

    def _of_file(self) -> tuple[TopicName, str]:
        namespace = self.flags.namespace or DEFAULT_NAMESPACE
        claims = read_claims(self.policy, self.name, namespace)
        if len(claims) > 1:
            raise ManifestsInvalidError(
                "the manifests have several RetryPolicies",
                got=", ".join(claim.request.key.name for claim in claims),
                remedy="name one of them behind the file",
            )
        policy = claims[0].request.policy
        if self.waiting:
            return policy.retry_topic, policy.subscription
        if not policy.dead_letters:
            raise self._missing("the policy discards dead letters")
        return policy.dead_letter_topic, policy.dead_letter_subscription

    def _of_cluster(self) -> tuple[TopicName, str]:
        if self.name is not None:
            raise click.UsageError("a second name is for a file with several policies")
        cluster = Cluster(self.flags)
        body = cluster.get(POLICIES, cluster.namespace, self.policy)
        spec, status = parse_spec(RetryPolicySpec, body), body.get("status") or {}
        name = status.get("retryTopic" if self.waiting else "deadLetterTopic")
        if not self.waiting and not spec.dead_letter.keeps:
            raise self._missing("the policy discards dead letters")
        if name is None:
            raise self._missing(f"the status of {self.policy} names no topic of {self.source}")
        subscription = spec.dead_letter.subscription or DEAD_LETTER_SUBSCRIPTION
        return TopicName.parse_whole(name), spec.subscription if self.waiting else subscription

    def _missing(self, problem: str) -> TopicMissingError:
        remedy = (
            f"read those that wait for a retry: {self.hint('causes', '--waiting')}"
            if not self.waiting
            else "wait until the policy is Ready"
        )
        return TopicMissingError(problem, remedy=remedy)


def inspection_options(function: Callable[..., int]) -> Callable[..., Any]:
    """Add the arguments of a command that reads messages; it gets them as one request.

    Further options of the command stay arguments of their own.
    """

    @wraps(function)
    def command(policy: str, name: str | None, flags: ClusterFlags, **options: Any) -> int:  # noqa: ANN401
        reads_all = options.pop("selects_all")
        select = selected(options)
        if "where" in select:
            raise click.UsageError(
                "--where is evaluated by Spark, in a Replay; select by --cause, --id, --key, "
                "--since or --until"
            )
        direct = ("is_direct", "service_url", "admin_url", "token_file", "ca_file")
        access = DirectAccess(*(options.pop(option) for option in direct))
        choice = _choice(select)
        logging.getLogger("redrive").addHandler(logging.NullHandler())
        own = {n: options.pop(n) for n in ("waiting", "reveals", "output") if n in options}
        request = InspectionRequest(policy, name, flags, access, choice, reads_all, **own)
        return function(request, **options)

    file = click.Path(exists=True, dir_okay=False, path_type=Path)
    for option in reversed(
        (
            click.argument(
                "policy", metavar="POLICY|FILE", shell_complete=names_of("retrypolicies")
            ),
            click.argument("name", metavar="[NAME]", required=False),
            partial(
                selection_options,
                where="Refused: only Replays evaluate SQL.",
                limit="Number of messages, the newest ones.",
                everything="Read every entry, not the newest 10000.",
            ),
            click.option("--waiting", is_flag=True, help="Messages that wait for a retry."),
            click.option("--reveal", "reveals", is_flag=True, help="Clear text, not masked."),
            click.option("--direct", "is_direct", is_flag=True, help="Read in this program."),
            click.option("--service-url", metavar="URL", help="Such as pulsar://localhost:6650."),
            click.option("--admin-url", metavar="URL", help="Such as http://localhost:8080."),
            click.option("--token-file", type=file, metavar="FILE", help="Token of the caller."),
            click.option("--ca-file", type=file, metavar="FILE", help="Authorities, as PEM."),
            cluster_options,
        )
    ):
        command = option(command)
    return command


def _choice(select: Body) -> Choice:
    """Check a selection as the API does; return it.

    Raises:
        InvalidSpecError: a part of it is invalid.
    """
    selection = parse(Selection, select, "select")
    return Choice(
        ids=selection.ids or (),
        keys=selection.keys or (),
        since=milliseconds(selection.since),
        until=milliseconds(selection.until),
        limit=selection.limit,
        causes=selection.causes or (),
        fingerprints=selection.fingerprints or (),
    )


@click.command()
@output_option("wide", "json", "yaml", "jsonl", "name")
@inspection_options
def causes(request: InspectionRequest) -> int:
    """Count dead letters by the cause of their last failure.

    POLICY is the name of a RetryPolicy in the cluster. A FILE, whose name has a / or ends with
    .yaml or .json, has RetryPolicies; NAME is one of several. The newest 10000 entries of the topic
    are read. Nothing is consumed.

    Texts of causes are masked: quoted values, words with digits, and words of the message itself.
    --reveal shows clear text: with --direct your own token is the right to read it.
    """
    reading = _planned(request)
    recorder = _recorder(request, reading)
    summary = Summary(recorder.cause_text)
    with _progress(request, reading) as rows:
        for row in rows:
            summary.add(row)
    groups = summary.ordered
    items = list(map(_cause_count, groups))
    if request.output in FORMATS:
        names = [item["fingerprint"] or item["cause"] for item in items]
        print_document(_document("CauseList", request, reading, items), request.output, names)
        return 0
    if not items:
        say("\n".join(_empty(request, reading)))
        return 0
    click.echo("\n".join(table(_CAUSE_COLUMNS, list(map(_cause_row, groups)), _is_wide(request))))
    _say_malformed(reading)
    if any(not group.cause for group in groups):
        say(_WITHOUT_CAUSE)
    cause = groups[0].fingerprint or groups[0].cause
    selection = ["--cause", clean(cause), "--limit", "1"]
    say(f"Look at one: {request.hint('peek', *selection)}")
    return 0


@click.command()
@output_option("json", "yaml", "jsonl", "name")
@inspection_options
def peek(request: InspectionRequest) -> int:
    """Show single dead letters, the newest first; consumes nothing.

    Arguments are those of causes. At most 500 messages are shown, 20 by default, of 64 KiB each and
    8 MiB together. Keys and payloads are masked: values become type and length. --reveal shows
    clear text: with --direct your own token is the right to read it.
    """
    limit = request.choice.limit or PEEKED
    request = replace(request, choice=replace(request.choice, limit=limit))
    if limit > MOST_PEEKED:
        raise click.UsageError(f"--limit of peek is at most {MOST_PEEKED}; use export for more")
    reading = _planned(request)
    recorder = _recorder(request, reading)
    with _progress(request, reading, MAX_PEEKED_BYTES) as rows:
        records = list(map(recorder, rows))
    if request.output in FORMATS:
        names = [record["id"] for record in records]
        print_document(_document("MessageList", request, reading, records), request.output, names)
        return 0
    if not records:
        say("\n".join(_empty(request, reading)))
        return 0
    at = now()
    click.echo("\n\n".join("\n".join(_message_lines(r, request, at)) for r in records))
    _say_malformed(reading)
    if reading.matched > len(records):
        all_messages = request.hint("export", "--to", "dead-letters.jsonl")
        say(f"newest {len(records)} of {reading.matched}; all: {all_messages}")
    if not request.reveals:
        say(f"Masked. Clear text: --reveal, by the right of your token on {reading.topic.name}")
    return 0


@click.command()
@click.option(
    "--to",
    "target",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="JSON lines; Parquet if it ends with .parquet.",
)
@inspection_options
def export(request: InspectionRequest, target: Path) -> int:
    """Write dead letters to a file: all that are selected, the oldest of each partition first.

    Arguments are those of causes; every entry of the topic is read. The file replaces another one
    when it is complete, and only its owner may read it. Keys and payloads are masked; --reveal
    writes clear text. Exits with 1 and writes nothing if no message is selected.
    """
    request = replace(request, reads_all=True)
    reading = _planned(request)
    recorder = _recorder(request, reading, max_payload=None)
    write = write_parquet if target.suffix == ".parquet" else write_json_lines
    with _progress(request, reading) as rows, private_file(target) as file:
        count = write(map(recorder, rows), file)
        if not count:
            raise NothingExportedError("; ".join(_empty(request, reading)), remedy="select others")
    _say_malformed(reading)
    say(f"wrote {count} messages to {target}{'' if request.reveals else ', masked'}")
    return 0


@click.command()
@click.option(
    "--to",
    "target",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="HTML page to write.",
)
@inspection_options
def report(request: InspectionRequest, target: Path) -> int:
    """Write one HTML page with plots: causes, arrivals, age, keys, partitions, sizes, replays.

    Arguments are those of causes. The page needs no network and has no script. Only its owner may
    read it. Keys are hashes, and texts are masked; --reveal writes them in clear text. Payloads are
    not in it.
    """
    reading = _planned(request)
    recorder = _recorder(request, reading)
    summary = Summary(recorder.cause_text)
    with _progress(request, reading) as rows:
        for row in rows:
            summary.add(row)
    if not summary.groups:
        raise NothingExportedError("; ".join(_empty(request, reading)), remedy="select others")
    extent = f"{reading.planned} of {reading.total} entries were read, with {reading.messages}"
    facts = ReportFacts(
        title=_WORDS[request.source],
        topic=str(reading.topic.name),
        at=now(),
        lines=[
            f"{extent} messages; {reading.matched} of them are selected.",
            f"{reading.malformed_entries} entries can be shown by no client.",
            "Clear text: do not share." if request.reveals else "Keys and texts are masked.",
        ],
        show_key=str if request.reveals else recorder.hash_key,
    )
    with private_file(target) as file:
        file.write(render_report(facts, summary).encode())
    _say_malformed(reading)
    say(f"wrote a report of {reading.matched} messages to {target}")
    return 0


def _planned(request: InspectionRequest) -> TopicReading:
    topic = request.topic()
    try:
        return plan_reading(topic, request.choice, None if request.reads_all else NEWEST)
    except AdminNotFoundError as error:
        raise TopicMissingError(
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
    words = _WORDS[request.source]

    def rows() -> Iterator[DeadLetterRow]:
        for row in reading.selected():
            if time.monotonic() - start > silence:
                live.show([f"read {reading.entries} of {reading.planned} entries"])
            yield row

    rows_of_limit: Iterable[DeadLetterRow] = rows()
    if request.choice.limit is not None:
        rows_of_limit = newest_of(rows_of_limit, request.choice.limit, max_bytes)
    yield rows_of_limit
    live.clear()
    seconds = time.monotonic() - start
    matched = "" if reading.matched == reading.messages else f"; {reading.matched} are selected"
    say(f"read {reading.messages} {words} ({seconds:.1f} s){matched}")
    if reading.is_truncated:
        command = click.get_current_context().info_name or ""
        all_entries = request.hint(command, "--all")
        say(f"newest {reading.planned} of {reading.total} entries; all: {all_entries}")


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
        source=request.source,
        totalEntries=reading.total,
        readEntries=reading.planned,
        read=reading.messages,
        matched=reading.matched,
        malformedEntries=malformed,
    )


def _cause_count(group: CauseGroup) -> CauseCount:
    return {
        "cause": group.cause,
        "fingerprint": group.fingerprint,
        "messages": group.messages,
        "following": group.following,
        "replayed": group.replayed,
        "firstTime": time_text(group.first),
        "lastTime": time_text(group.last),
        "consumers": [name for name, _ in group.consumers.most_common()],
        "example": group.example,
    }


def _cause_row(group: CauseGroup) -> list[object]:
    at = now()
    consumers = group.consumers.most_common(1)
    return [
        group.messages,
        cut(clean(group.name), _LONGEST_CAUSE),
        group.fingerprint or "-",
        local_time(time_text(group.first), at),
        local_time(time_text(group.last), at),
        group.replayed,
        group.following,
        f"{consumers[0][0]} ({len(group.consumers)})" if consumers else "-",
        group.example,
    ]


def _is_wide(request: InspectionRequest) -> bool:
    return request.output == "wide"


def _say_malformed(reading: TopicReading) -> None:
    if reading.malformed:
        partition, entry, cause = reading.malformed[0]
        count = reading.malformed_entries
        say(f"{count} entries that no client can show, such as {entry}:{partition}: {clean(cause)}")


def _empty(request: InspectionRequest, reading: TopicReading) -> Iterator[str]:
    """Yield the reason why nothing is shown."""
    words, topic = _WORDS[request.source], reading.topic
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
