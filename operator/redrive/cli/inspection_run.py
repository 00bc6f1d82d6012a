"""One run of an Inspection by a command: create it, wait for its end, delete it if interrupted."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import click

from redrive.api import Body
from redrive.api.inspection import MAX_NEWEST, ExportFormat
from redrive.cli.cluster import Cluster, ClusterError, NotPermittedError, clean_up
from redrive.cli.documents import PlannedCause
from redrive.cli.inspection_request import InspectionRequest
from redrive.cli.output import Live, age, clean, now, say, written
from redrive.cli.policies import ENDED, conditions_of
from redrive.cli.replay import object_of
from redrive.cli.replays import Start, is_plan, phase_of, run_of, wait_of
from redrive.errors import RedriveError
from redrive.inspection.payloads import NONE_RECORDED, OTHERS, CauseCount
from redrive.inspection.sealing import Recipient
from redrive.kube.resources import INSPECTIONS, POLICIES, REPLAYS
from redrive.replay.spec import FOLLOWER

_DESTINATION = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_TTL = "5m"
"""Time after its end when an Inspection of a command is deleted."""
_YOUNG = timedelta(minutes=1)
"""Time after its end when a summary is shown again."""


def inspected(request: InspectionRequest, command: str, **result: Body) -> Body:
    """Run an Inspection, and return it.

    Args:
        request: policy and selection.
        command: its reason, for later readers.
        result: `messages`, `causes` or `export` of its spec, without `payload`.

    Raises:
        RedriveError: the Inspection can't be created, or it failed.
    """
    cluster = Cluster(request.flags)
    policy = cluster.get(request.kind, cluster.namespace, request.policy)
    spec = {**_reading(request), "ttlAfterFinished": _TTL, "reason": command}
    payload = {"payload": "Clear"} if request.reveals else {}
    spec |= {name: {**fields, **payload} for name, fields in result.items()}
    created = cluster.create(
        INSPECTIONS, object_of(INSPECTIONS, policy, cluster.user, spec, request.kind)
    )
    say(f"inspection.redrive.io/{created['metadata']['name']} reads, and consumes nothing")
    return _ended(request, cluster, created)


def _reading(request: InspectionRequest) -> dict[str, Any]:
    """Return the fields of a spec that decide which messages are read; None for absent ones."""
    select = {name: value for name, value in request.select.items() if name != "limit"}
    kind = {} if request.kind is POLICIES else {"kind": request.kind.kind}
    return {
        "policyRef": {**kind, "name": request.policy},
        "from": request.source.value,
        "select": select or None,
        "newest": MAX_NEWEST if request.reads_all else None,
    }


def young_summary(request: InspectionRequest) -> Body | None:
    """Return an Inspection that has counted the same messages within the last minute.

    None if there is none, if a Replay of the policy may have moved messages since it began, or if
    the caller may not look for them. A summary without messages is not shown again: people wait for
    the first.
    """
    cluster, reading = Cluster(request.flags), _reading(request)
    of_policy = f"spec.policyRef.name={request.policy}"
    is_completed = f"{of_policy},status.phase=Completed"
    try:
        inspections = cluster.list(INSPECTIONS, cluster.namespace, fields=is_completed)
        replays = cluster.list(REPLAYS, cluster.namespace, fields=of_policy)
    except NotPermittedError:
        return None
    at = now()
    ends = [_end_of(replay) or written(at) for replay in replays if not is_plan(replay)]
    same = [
        inspection
        for inspection in inspections
        if {name: inspection["spec"].get(name) for name in reading} == reading
        and run_of(inspection).get("matched")
        and _end_of(inspection) > written(at - _YOUNG)
        and inspection["metadata"]["creationTimestamp"] > max(ends, default="")
    ]
    return max(same, key=_end_of, default=None)


def _end_of(run: Body) -> str:
    """Return the end of a Replay or an Inspection; empty before it."""
    return (run.get("status") or {}).get("completionTime") or ""


def returned(
    request: InspectionRequest, command: str, result: str, record: type, **own: object
) -> tuple[Body, list[Any]]:
    """Run an Inspection; return it, and the records that it has encrypted for this call.

    Args:
        request: policy and selection.
        command: its reason, for later readers.
        result: field of its spec, with the further fields *own*.
        record: TypedDict of the records.

    Raises:
        RedriveError: the Inspection can't be created, or it failed.
    """
    recipient = Recipient()
    body = inspected(request, command, **{result: {"recipient": recipient.public_key, **own}})
    if not run_of(body)["matched"]:
        return body, []
    sealed, uid = run_of(body).get("sealed", ""), body["metadata"]["uid"]
    return body, recipient.open(sealed, uid, record)


def write_file(request: InspectionRequest, destination: str, form: ExportFormat) -> None:
    """Run an Inspection that writes a file.

    Raises:
        RedriveError: the Inspection can't be created, it failed, or no message is selected.
        UsageError: only a reader in this program can write so.
    """
    request.check_evaluated()
    if not _DESTINATION.fullmatch(destination):
        raise click.UsageError(
            f"in the cluster --to names a destination of the connection, such as archive; got "
            f"{destination}; a file needs a reader in this program\n{request.direct_hint()}"
        )
    if request.choice.limit is not None:
        raise click.UsageError("--limit is for files of --direct; leave it out")
    export = {"destination": destination, "format": form.value}
    body = inspected(request, click.get_current_context().info_name or "", export=export)
    summary = "\n".join(summary_of(request, run_of(body)))
    if "file" not in run_of(body):
        raise RedriveError(summary, remedy="select others")
    masked = "" if request.reveals else ", masked"
    say(f"{summary}\nwrote {run_of(body)['matched']} messages to {run_of(body)['file']}{masked}")


def extent_of(inspection: Body) -> dict[str, object]:
    """Return the fields of a document that an Inspection has read."""
    run, figures = run_of(inspection), ("totalEntries", "readEntries", "messages", "matched")
    return {"inspection": inspection["metadata"]["name"]} | {name: run[name] for name in figures}


def one_of(request: InspectionRequest, counts: Iterable[PlannedCause | CauseCount]) -> str:
    """Return the command that shows a message of the first cause that can be selected."""
    causes = (count["fingerprint"] or count["cause"] or NONE_RECORDED for count in counts)
    selectable = (c for c in causes if c == clean(c) and c not in {FOLLOWER.cause, OTHERS})
    cause = next((["--cause", cause] for cause in selectable), [])
    replaced = {"where", "limit", *(("causes", "fingerprints") if cause else ())}
    select = {name: value for name, value in request.select.items() if name not in replaced}
    reads_all = request.reads_all or "where" in request.select
    return request.hint("peek", *cause, "--limit", "1", select=select, reads_all=reads_all)


def summary_of(request: InspectionRequest, run: Body) -> Iterator[str]:
    """Yield the extent of an Inspection."""
    words = request.source.words
    if not run["totalEntries"]:
        yield f"no {words}: none came, or all are acknowledged"
    elif not run["messages"] and request.choice.ids:
        yield f"no {words} with these ids: replayed, expired, or never there"
    elif not run["matched"]:
        yield f"none of the {run['messages']} {words} that were read is selected"
    else:
        yield f"read {run['messages']} {words}; {run['matched']} are selected"
    if run.get("truncated"):
        read, total = run["readEntries"], run["totalEntries"]
        seconds = run.get("readSeconds")
        time_of_all = seconds and f", about {age(seconds * min(total, MAX_NEWEST) / max(read, 1))}"
        yield f"newest {read} of {total} entries; --all reads more{time_of_all or ''}"


def progress_of(inspection: Body, error: ClusterError | None) -> list[str]:
    """Return the progress of an Inspection as lines, with the *error* of the last request."""
    run = run_of(inspection)
    read = f"read {run.get('readEntries', 0)} of {run.get('plannedEntries', '?')} entries"
    silence = () if error is None else (f"  {error}",)
    return [read if run else wait_of(inspection) or "starts", *silence]


def _ended(request: InspectionRequest, cluster: Cluster, inspection: Body) -> Body:
    """Wait for the end of an Inspection, and return it.

    Raises:
        RedriveError: it failed, or can't start.
        KeyboardInterrupt, SystemExit: the command was interrupted; the Inspection is deleted.
    """
    live, start = Live(sys.stderr), Start()
    try:
        for snapshot in cluster.states(INSPECTIONS, inspection):
            (inspection,) = snapshot.objects
            if phase_of(inspection) == "Completed":
                return inspection
            if problem := start.problem(inspection):
                ready = conditions_of(inspection).get("Ready") or {}
                error = RedriveError(
                    "the Inspection can't read the messages",
                    got=problem,
                    remedy="correct it, and repeat the command",
                    reason=ready.get("reason"),
                )
                error.add_note(f"Or read {request.direct_hint()}")
                raise error
            live.show(progress_of(inspection, snapshot.error))
    finally:
        live.clear()
        if phase_of(inspection) not in ENDED:
            clean_up(cluster, INSPECTIONS, inspection)
    raise RedriveError("the Inspection was deleted", remedy="repeat the command")
