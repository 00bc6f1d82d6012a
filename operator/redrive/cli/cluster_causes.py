"""Causes that are counted in the cluster, for callers without access to the broker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import click

from redrive.api import Body
from redrive.cli.cluster import Cluster, NotPermittedError
from redrive.cli.documents import PlannedCause
from redrive.cli.inspection_request import InspectionRequest
from redrive.cli.inspection_run import extent_of, inspected, one_of, summary_of
from redrive.cli.output import (
    FORMATS,
    TableColumn,
    clean,
    cut,
    document,
    local_time,
    now,
    print_document,
    say,
    table,
)
from redrive.cli.replay import manifest, planned
from redrive.cli.replays import run_of
from redrive.inspection.summary import NONE_RECORDED
from redrive.kube.resources import POLICIES, REPLAYS

LONGEST_CAUSE = 40
PLANNED_COLUMNS = (
    TableColumn("N", right=True),
    TableColumn("CAUSE"),
    TableColumn("FINGERPRINT"),
    TableColumn("FIRST", right=True, dropped=1),
    TableColumn("LAST", right=True),
    TableColumn("REPLAYED", right=True, dropped=2),
)
_PLAN_OPTIONS = {
    "target": "Retry",
    "max_replays": None,
    "rate": None,
    "confirmations": (),
    "reason": "causes",
    "ticket": None,
}
"""Options of a Replay that counts; the reason is for later readers of the history."""


def count_causes(request: InspectionRequest) -> None:
    """Count causes by a Replay that moves nothing, or by an Inspection, and print them.

    Raises:
        RedriveError: neither can be created, or it failed.
        UsageError: only a reader in this program can count so.
    """
    _check_counted(request)
    if request.waiting:
        _count_by_inspection(request)
    else:
        _count_by_replay(request)


def _count_by_replay(request: InspectionRequest) -> None:
    """Count the causes of dead letters by a Replay, and print them.

    Raises:
        RedriveError: the Replay can't be created, or it failed.
    """
    cluster = Cluster(request.flags)
    policy = cluster.get(POLICIES, cluster.namespace, request.policy)
    body = manifest(policy, request.select, cluster.user, "Plan", _PLAN_OPTIONS)
    try:
        created = cluster.create(REPLAYS, body)
    except NotPermittedError as error:
        if "where" in request.select:
            raise
        say(f"an Inspection counts instead of a Replay: {error}")
        _count_by_inspection(request)
        return
    say(f"replay.redrive.io/{created['metadata']['name']} counts, and moves nothing")
    plan = planned(cluster, created)
    counts = run_of(plan).get("counts") or {}
    causes = (run_of(plan).get("preview") or {}).get("causes") or ()
    items = list(_planned_causes(causes, counts.get("left", 0)))
    figures = {name: counts.get(name, 0) for name in ("scanned", "matched", "refused")}
    fields = {"replay": plan["metadata"]["name"], **figures}
    _print_planned(request, "PlannedCauseList", items, fields, _plan_summary(plan, counts))


def _count_by_inspection(request: InspectionRequest) -> None:
    """Count causes by an Inspection, and print them.

    Raises:
        RedriveError: the Inspection can't be created, or it failed.
    """
    body = inspected(request, "causes")
    run = run_of(body)
    items = list(_planned_causes(run.get("causes") or (), run["matched"]))
    summary = summary_of(request, run)
    _print_planned(request, "InspectedCauseList", items, extent_of(body), summary)


def _print_planned(
    request: InspectionRequest,
    kind: str,
    items: Sequence[PlannedCause],
    fields: Mapping[str, object],
    summary: Iterable[str],
) -> None:
    """Print causes that were counted in the cluster: a document of *kind*, or a table."""
    if request.output in FORMATS:
        names = [item["cause"] for item in items]
        print_document(document(kind, items, **fields), request.output, names)
        return
    lines = list(summary)
    if items:
        click.echo("\n".join(table(PLANNED_COLUMNS, list(map(_planned_row, items)))))
        lines.append(f"Look at one: {one_of(request, items[0]['fingerprint'], items[0]['cause'])}")
    say("\n".join([*lines, f"Consumers and examples: {request.direct_hint()}"]))


def _check_counted(request: InspectionRequest) -> None:
    options = {
        "--reveal": request.reveals,
        "--limit": "limit" in request.select,
        "--where with --waiting": request.waiting and "where" in request.select,
    }
    if names := [name for name, is_set in options.items() if is_set]:
        raise click.UsageError(
            f"{', '.join(names)} of causes is for --direct: in the cluster all messages are "
            f"counted, and no text is shown\n{request.direct_hint()}"
        )


def _planned_causes(causes: Iterable[Body], total: int) -> Iterator[PlannedCause]:
    """Yield the causes of messages, and the number of those that the status does not list."""
    listed = 0
    for count in causes:
        listed += count["messages"]
        yield {
            "cause": count["cause"],
            "messages": count["messages"],
            "fingerprint": count.get("fingerprint", ""),
            "replayed": count.get("replayed"),
            "firstTime": count.get("firstTime"),
            "lastTime": count.get("lastTime"),
        }
    if listed < total:
        yield {
            "cause": "(others)", "messages": total - listed, "fingerprint": "",
            "replayed": None, "firstTime": None, "lastTime": None,
        }  # fmt: skip


def _planned_row(count: PlannedCause) -> list[object]:
    at = now()
    times = (count["firstTime"], count["lastTime"])
    return [
        count["messages"],
        cut(clean(count["cause"] or NONE_RECORDED), LONGEST_CAUSE),
        count["fingerprint"] or "-",
        *("-" if time is None else local_time(time, at) for time in times),
        "-" if count["replayed"] is None else count["replayed"],
    ]


def _plan_summary(plan: Body, counts: Body) -> Iterator[str]:
    """Yield the extent of the count."""
    scanned, matched = counts.get("scanned", 0), counts.get("matched", 0)
    if not scanned:
        yield "no dead letters: none came, or all are acknowledged"
    elif not matched:
        yield f"none of the {scanned} dead letters is selected"
    else:
        yield f"read {scanned} dead letters; {matched} are selected"
    refused = (run_of(plan).get("preview") or {}).get("refused") or ()
    if refused:
        kinds = ", ".join(f"{count['messages']} {count['cause']}" for count in refused)
        yield f"not counted above, because no Replay can move them: {kinds}"
    if counts.get("unevaluated"):
        yield f"{counts['unevaluated']} can't be evaluated by the selection"
