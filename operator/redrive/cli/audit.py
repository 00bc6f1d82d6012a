"""The command `audit`: a Replay that compares the topics of a policy; nothing is moved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from redrive.cli.cluster import Cluster
from redrive.cli.documents import AuditFinding, AuditFindingName
from redrive.cli.frame import HAS_FINDINGS, ClusterFlags, cluster_options, policy_argument
from redrive.cli.output import (
    FORMATS,
    TableColumn,
    clean,
    document,
    output_option,
    print_document,
    say,
    table,
)
from redrive.cli.replay import manifest, planned
from redrive.cli.replays import exit_code_of, run_of
from redrive.kube.resources import POLICIES, REPLAYS

_COLUMNS = TableColumn("FINDING"), TableColumn("COUNT", right=True), TableColumn("MEANING")
_MEANINGS: Mapping[AuditFindingName, str] = {
    "doubled": "messages that the targets have more than once",
    "unrecorded": "entries in a target that the next Replay would send again",
    "missing": "moved entries that no target contains; normal once consumed",
    "returned": "moved entries that the next Replay acknowledges again",
    "open": "ranges for which the next Replay searches the target",
}


@click.command()
@policy_argument
@click.option(
    "--target",
    metavar="Source|TOPIC",
    default="Retry",
    help="Additional topic to read: a target whose Replays were deleted.",
)
@click.option(
    "--complete",
    "is_complete",
    is_flag=True,
    help="Exit with 3 if entries are missing, too; for targets that retain consumed messages.",
)
@click.option("--rate", type=click.IntRange(1), metavar="N", help="Messages to read in a second.")
@click.option("--reason", metavar="TEXT", help="Reason, for later readers.")
@output_option("json", "yaml", "jsonl")
@cluster_options
def audit(
    policy: str,
    output: str | None,
    flags: ClusterFlags,
    *,
    is_complete: bool,
    **options: Any,  # noqa: ANN401  of a Replay
) -> int:
    """Compare dead-letter topic, ledger and targets of Replays, message by message.

    For RetryPolicies. A Replay that moves nothing reads all messages of the retry topic, and of the
    targets of other Replays of the policy. Other Replays may run at the same time. Entries whose
    messages were consumed count as missing if the target does not retain them. Exits with 3 if
    messages are doubled or entries unrecorded; with --complete also if entries are missing. An
    audit that runs longer than six hours fails. The Replay is deleted one day after its end.
    """
    cluster = Cluster(flags)
    owner = cluster.get(POLICIES, cluster.namespace, policy)
    body = manifest(owner, {}, cluster.user, "Audit", options={**_OPTIONS, **options})
    created = cluster.create(REPLAYS, body)
    name = created["metadata"]["name"]
    say(f"replay.redrive.io/{name} reads the targets; nothing is moved")
    ended = planned(cluster, created)
    result = run_of(ended)["audit"]
    topics: list[str] = result.get("topics") or []
    fields = ("doubledExamples", "unrecordedExamples")
    examples = {field: result.get(field) or [] for field in fields}
    items: list[AuditFinding] = [{"finding": f, "count": result[f]} for f in _MEANINGS]
    if output in FORMATS:
        extent = {"replay": name, "messages": result["messages"], "topics": topics, **examples}
        print_document(document("AuditFindingList", items, **extent), output)
    else:
        rows = [[item["finding"], item["count"], _MEANINGS[item["finding"]]] for item in items]
        click.echo("\n".join(table(_COLUMNS, rows)))
        say(f"read {result['messages']} messages of {', '.join(map(clean, topics))}")
        for field, ids in examples.items():
            if ids:
                say(f"{field.removesuffix('Examples')}, such as {', '.join(ids)}")
    return HAS_FINDINGS if is_complete and result["missing"] else exit_code_of(ended)


_OPTIONS = {"max_replays": None, "confirmations": (), "ticket": None}
"""Options of a Replay that an audit does not have."""
