"""Commands that read dead letters, and messages that wait for a retry.

Nothing is consumed. With `--direct` this program reads the broker, with a token of the caller: the
broker decides who may read. A policy is a manifest, or the name of one in the cluster.
"""

from __future__ import annotations

from dataclasses import replace

import click

from redrive.api.inspection import MAX_RETURNED, RETURNED, ExportFormat
from redrive.cli.cluster_causes import count_causes
from redrive.cli.inspection_request import InspectionRequest, inspection_options
from redrive.cli.inspection_run import extent_of, returned, summary_of, write_file
from redrive.cli.messages import print_messages
from redrive.cli.output import FORMATS, document, output_option, print_document, say, utc_option
from redrive.cli.replays import run_of
from redrive.inspection.payloads import MessageRecord

_target_option = click.option(
    "--to",
    "target",
    required=True,
    metavar="DESTINATION|FILE",
    help="Name of a destination of the connection; with --direct a file.",
)


@click.command()
@output_option("wide", "json", "yaml", "jsonl", "name")
@click.option("--refresh", is_flag=True, help="Count again, even within a minute.")
@utc_option
@inspection_options
def causes(request: InspectionRequest, *, refresh: bool) -> None:
    """Count dead letters by the cause of their last failure. Nothing is consumed.

    POLICY is the name of a RetryPolicy in the cluster, or rmqpol/NAME for a RocketMQRetryPolicy. An
    Inspection reads the newest 10000 entries there, and encrypts consumers and examples for this
    call. For Pulsar with --all or --where, or if you may not create Inspections, a Replay that
    moves nothing counts all dead letters, many of them by Spark. It shows no consumers and
    examples. At a terminal, a count of the last minute by an Inspection of the same messages is
    shown again, with its age. It may be that of another person, and no Replay has run since.

    With --direct this program reads the broker. A FILE, whose name has a / or ends with .yaml or
    .json, has RetryPolicies; NAME is one of several. Texts of causes are masked: quoted values,
    words with digits, and words of the message itself. --reveal shows clear text: the right is the
    verb reveal on inspections, and with --direct your own token.
    """
    if request.is_in_cluster:
        count_causes(request, refresh=refresh)
        return
    from redrive.cli import direct  # noqa: PLC0415 - its clients take most of a start

    direct.causes(request)


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
    from redrive.cli import direct  # noqa: PLC0415 - its clients take most of a start

    direct.peek(request, limit)


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
        print_messages(request, records)
    matched = run_of(body)["matched"]
    say("\n".join(summary_of(request, run_of(body))))
    if len(records) < min(limit, matched):
        extent = f"{len(records)} of the newest {min(limit, matched)}"
        say(f"{extent}: more do not fit; select fewer, such as by --id, or read with --direct")
    elif len(records) < matched:
        more = request.repeated(select={**request.select, "limit": MAX_RETURNED})
        say(f"newest {len(records)} of {matched}; more: {more}")
    if records and not request.reveals:
        say("Masked. Clear text: --reveal, by the role redrive-revealer")


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
    from redrive.cli import direct  # noqa: PLC0415 - its clients take most of a start

    direct.export(request, target)


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
    from redrive.cli import direct  # noqa: PLC0415 - its clients take most of a start

    direct.report(request, target)
