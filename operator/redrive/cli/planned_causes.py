"""Causes of dead letters, counted in the cluster: a Replay of mode Plan, which moves nothing.

`causes` uses it without `--direct`: the job of the Replay reads the broker, so the caller needs
neither an address nor a token of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import click

from redrive.api import Body
from redrive.cli.cluster import Cluster
from redrive.cli.documents import PlannedCause
from redrive.cli.inspection_request import InspectionRequest
from redrive.cli.output import (
    FORMATS,
    TableColumn,
    document,
    print_document,
    say,
    table,
)
from redrive.cli.replay import manifest, planned
from redrive.cli.replays import run_of
from redrive.kube.resources import POLICIES, REPLAYS

REASON = "causes"
"""Reason of the Replays, for later readers of the history."""
_COLUMNS = TableColumn("N", right=True), TableColumn("CAUSE")
_OPTIONS = {
    "target": "Retry",
    "max_replays": None,
    "rate": None,
    "confirmations": (),
    "reason": REASON,
    "ticket": None,
}


def count_in_cluster(request: InspectionRequest) -> int:
    """Count the causes of dead letters by a Replay, and print them.

    Raises:
        UsageError: an option needs a reading of the broker.
        RedriveError: the Replay can't be created, or it failed.
    """
    _check(request)
    cluster = Cluster(request.flags)
    policy = cluster.get(POLICIES, cluster.namespace, request.policy)
    body = manifest(policy, request.select, cluster.user, "Plan", _OPTIONS)
    created = cluster.create(REPLAYS, body)
    say(f"replay.redrive.io/{created['metadata']['name']} counts, and moves nothing")
    plan = planned(cluster, created)
    counts = run_of(plan).get("counts") or {}
    items = list(_causes(plan, counts.get("left", 0)))
    if request.output in FORMATS:
        figures = {name: counts.get(name, 0) for name in ("scanned", "matched", "refused")}
        fields = {"replay": plan["metadata"]["name"], **figures}
        names = [item["cause"] for item in items]
        print_document(document("PlannedCauseList", items, **fields), request.output, names)
        return 0
    if items:
        rows = [(item["messages"], item["cause"] or "none recorded") for item in items]
        click.echo("\n".join(table(_COLUMNS, rows)))
    say("\n".join(_summary(request, plan, counts)))
    return 0


def _check(request: InspectionRequest) -> None:
    options = {
        "--waiting": request.waiting,
        "--reveal": request.reveals,
        "--limit": "limit" in request.select,
    }
    if names := [name for name, is_set in options.items() if is_set]:
        raise click.UsageError(
            f"{', '.join(names)} of causes is for --direct: in the cluster all dead letters are "
            f"counted, and no text is shown\n{request.direct_hint()}"
        )


def _causes(plan: Body, total: int) -> Iterator[PlannedCause]:
    """Yield the causes of messages that can be moved; the status has the 20 most frequent ones."""
    listed = 0
    for count in (run_of(plan).get("preview") or {}).get("causes") or ():
        listed += count["messages"]
        yield {"cause": count["cause"], "messages": count["messages"]}
    if listed < total:
        yield {"cause": "(others)", "messages": total - listed}


def _summary(request: InspectionRequest, plan: Body, counts: Body) -> Iterator[str]:
    """Yield the extent of the count, and the next steps."""
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
    yield f"Fingerprints, times and examples: {request.direct_hint()}"
