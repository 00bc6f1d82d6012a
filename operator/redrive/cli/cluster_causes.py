"""Causes that are counted in the cluster, and how causes are printed.

`follow` waits for an Inspection that others have created, and never deletes it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence

import click

from redrive.api import Body
from redrive.api.inspection import MAX_NEWEST, NEWEST, InspectedMessages
from redrive.cli.cluster import Cluster, NotPermittedError
from redrive.cli.documents import PlannedCause
from redrive.cli.frame import NOT_FINISHED, ClusterFlags
from redrive.cli.inspection_request import DirectAccess, InspectionRequest
from redrive.cli.inspection_run import (
    extent_of,
    one_of,
    progress_of,
    returned,
    summary_of,
    young_summary,
)
from redrive.cli.main import INTERRUPTED
from redrive.cli.output import (
    FORMATS,
    Live,
    TableColumn,
    age_of,
    clean,
    cut,
    document,
    has_terminal,
    local_time,
    now,
    print_document,
    print_object,
    say,
    table,
)
from redrive.cli.policies import ENDED, conditions_of
from redrive.cli.replay import manifest, planned
from redrive.cli.replays import Start, phase_of, run_of
from redrive.errors import RedriveError
from redrive.inspection.payloads import NONE_RECORDED, OTHERS, CauseCount
from redrive.kube.resources import (
    INSPECTIONS,
    POLICIES,
    POLICY_KINDS,
    REPLAYS,
    REQUESTED_BY,
    PolicyKey,
)
from redrive.policy.envelope import CAUSE_TYPE
from redrive.reasons import Reason
from redrive.replay.spec import Choice

_LONGEST_CAUSE = 40
_PLANNED_COLUMNS = (
    TableColumn("N", right=True),
    TableColumn("CAUSE"),
    TableColumn("FINGERPRINT"),
    TableColumn("FIRST", right=True, dropped=1),
    TableColumn("LAST", right=True),
    TableColumn("REPLAYED", right=True, dropped=2),
)
_WITHOUT_CAUSE = f"""\
none recorded: clients for Java and Go write no cause. Lines that add one:
  Java  consumer.reconsumeLater(message, \
Map.of("{CAUSE_TYPE}", error.getClass().getSimpleName()), delay, unit);
  Go    consumer.ReconsumeLaterWithCustomProperties(message, \
map[string]string{{"{CAUSE_TYPE}": fmt.Sprintf("%T", err)}}, delay)"""
_WITHOUT_PROPERTIES = "none recorded: a client of RocketMQ can't add a cause to a failed message"
_CAUSE_COLUMNS = (
    *_PLANNED_COLUMNS,
    TableColumn("FOLLOWING", right=True, wide=True),
    TableColumn("CONSUMERS", dropped=3),
    TableColumn("EXAMPLE", dropped=4),
)
_NOT_INSPECTED = {Reason.INSPECTION_IDENTITY_MISSING, Reason.SERVICE_ACCOUNT_NOT_FOUND}
"""Reasons that concern Inspections alone: a Replay has a role and a ServiceAccount of its own."""
_PLAN_OPTIONS = {
    "target": "Retry",
    "max_replays": None,
    "rate": None,
    "confirmations": (),
    "reason": "causes",
    "ticket": None,
}
"""Options of a Replay that counts; the reason is for later readers of the history."""


def count_causes(request: InspectionRequest, *, refresh: bool) -> None:
    """Count causes by an Inspection, or by a Replay that moves nothing, and print them.

    At a terminal a young summary of the same messages is printed again, whoever asked for it,
    unless *refresh*.

    Raises:
        RedriveError: neither can be created, or it failed.
        UsageError: only a reader in this program can count so.
    """
    _check_counted(request)
    is_inspected = request.waiting or request.reveals
    counts_all = "where" in request.select or (request.reads_all and not is_inspected)
    by_replay = counts_all and request.kind is POLICIES
    is_for_person = request.output is None and has_terminal(sys.stdout)
    if is_for_person and not (refresh or request.reveals or by_replay):
        summary = young_summary(request)
        if summary is not None:
            repeat = "Count again, with consumers and examples: repeat it with --refresh"
            _print_summary(request, summary, repeat)
            return
    if request.kind is not POLICIES:
        request.check_evaluated()
        _count_by_inspection(request)
        return
    ways = (_count_by_inspection, _count_by_replay)
    first, other = ways[::-1] if by_replay else ways
    try:
        first(request)
    except RedriveError as error:
        may_not = isinstance(error, NotPermittedError)
        is_impossible = may_not or error.reason in _NOT_INSPECTED
        if is_inspected or "where" in request.select or not is_impossible:
            raise
        say(f"{_LIMITS[other]}: {error}")
        try:
            other(request)
        except RedriveError as second_error:
            second_error.add_note(f"Or read {request.direct_hint()}")
            raise


def _count_by_inspection(request: InspectionRequest) -> None:
    """Count causes by an Inspection, and print them.

    Raises:
        RedriveError: the Inspection can't be created, or it failed.
    """
    body, items = returned(request, "causes", "causes", CauseCount)
    shown = document("InspectedCauseList", items, **extent_of(body))
    uncounted = run_of(body)["matched"] - sum(item["messages"] for item in items)
    others = [f"{uncounted} messages of less frequent causes are not shown"] if uncounted else []
    print_causes(request, items, shown, [*summary_of(request, run_of(body)), *others])


def follow_inspection(
    cluster: Cluster, flags: ClusterFlags, name: str, *, timeout: float | None, output: str | None
) -> int:
    """Show the progress of an Inspection until it ends, and then its causes; return the exit code.

    An interrupted command detaches, and the Inspection continues.
    """
    inspection = cluster.get(INSPECTIONS, cluster.namespace, name)
    hint = flags.hint("follow", f"inspection/{name}")
    live, start, since = Live(sys.stderr), Start(), time.monotonic()
    try:
        for snapshot in cluster.states(INSPECTIONS, inspection):
            (inspection,) = snapshot.objects
            if phase_of(inspection) in ENDED:
                live.clear()
                return _show_end(flags, inspection, output)
            live.show(progress_of(inspection, snapshot.error))
            if not run_of(inspection) and (problem := start.problem(inspection)):
                live.clear()
                say(f"{problem}\nthe Inspection waits for it. Follow it: {hint}")
                return NOT_FINISHED
            if timeout is not None and time.monotonic() - since >= timeout:
                live.clear()
                state = f"not finished after {timeout:.0f} s; the Inspection continues"
                say(f"{state}; follow it: {hint}")
                return NOT_FINISHED
    except KeyboardInterrupt:
        say(f"\nthe Inspection continues. Follow it: {hint}")
        return INTERRUPTED
    raise RedriveError(f"the Inspection {name} was deleted", remedy="create another one")


def _show_end(flags: ClusterFlags, inspection: Body, output: str | None) -> int:
    failure = conditions_of(inspection).get("Failed")
    if output is not None:
        print_object(inspection, output, "")
    elif failure:
        say(f"Failed: {failure['reason']}: {clean(failure['message'])}")
    else:
        _print_summary(_request_of(flags, inspection), inspection)
    return 0 if failure is None else 1


def _request_of(flags: ClusterFlags, inspection: Body) -> InspectionRequest:
    """Return the request that makes the same Inspection."""
    spec, reference = inspection["spec"], inspection["spec"]["policyRef"]
    return InspectionRequest(
        policy=reference["name"],
        name=None,
        flags=flags,
        access=DirectAccess(
            is_direct=False, service_url=None, admin_url=None, token_file=None, ca_file=None
        ),
        select=spec.get("select") or {},
        choice=Choice(ids=tuple((spec.get("select") or {}).get("ids") or ())),
        reads_all=spec.get("newest", NEWEST) > NEWEST,
        waiting=spec.get("from") == InspectedMessages.RETRY,
        reveals=False,
        kind=POLICY_KINDS[PolicyKey.of(inspection).kind],
    )


def _print_summary(request: InspectionRequest, inspection: Body, *more: str) -> None:
    """Print the causes in the status of an ended Inspection, with their age, and *more* notes."""
    metadata, run = inspection["metadata"], run_of(inspection)
    items = list(_planned_causes(run.get("causes") or (), run["matched"]))
    person = (metadata.get("annotations") or {}).get(REQUESTED_BY)
    author = f" of {clean(person)}" if person else ""
    age = age_of(inspection["status"]["completionTime"], now())
    notes = [
        *summary_of(request, run),
        f"counted {age} ago by inspection.redrive.io/{metadata['name']}{author}",
        *([f"wrote {clean(run['file'])}"] if "file" in run else []),
        *more,
    ]
    _print_table(request, _PLANNED_COLUMNS, items, list(map(_planned_row, items)), notes)


def print_causes(
    request: InspectionRequest, items: Sequence[CauseCount], shown: Body, notes: Iterable[str]
) -> None:
    """Print the document *shown*, or its items as a table with *notes*."""
    if request.output in FORMATS:
        names = [item["fingerprint"] or clean(item["cause"]) or NONE_RECORDED for item in items]
        print_document(shown, request.output, names)
        return
    _print_table(request, _CAUSE_COLUMNS, items, list(map(_cause_row, items)), notes)


def _print_table(
    request: InspectionRequest,
    columns: Sequence[TableColumn],
    items: Sequence[PlannedCause | CauseCount],
    rows: Sequence[Sequence[object]],
    notes: Iterable[str],
) -> None:
    """Print the *rows* of *items*, with *notes* and hints for people."""
    lines = list(notes)
    if items:
        click.echo("\n".join(table(columns, rows, request.output == "wide")))
        is_pulsar, has_none = request.kind is POLICIES, any(not item["cause"] for item in items)
        lines += [_WITHOUT_CAUSE if is_pulsar else _WITHOUT_PROPERTIES] if has_none else []
        lines.append(f"Look at one: {one_of(request, items)}")
    say("\n".join(lines))


def _cause_row(count: CauseCount) -> list[object]:
    consumers = count["consumers"]
    return [
        *_planned_row(count),
        count["following"],
        f"{cut(clean(consumers[0]), _LONGEST_CAUSE)} ({len(consumers)})" if consumers else "-",
        count["example"],
    ]


def _count_by_replay(request: InspectionRequest) -> None:
    """Count the causes of dead letters by a Replay, and print them.

    Raises:
        RedriveError: the Replay can't be created, or it failed.
    """
    cluster = Cluster(request.flags)
    policy = cluster.get(POLICIES, cluster.namespace, request.policy)
    body = manifest(policy, request.select, cluster.user, "Plan", options=_PLAN_OPTIONS)
    created = cluster.create(REPLAYS, body)
    say(f"replay.redrive.io/{created['metadata']['name']} counts, and moves nothing")
    plan = planned(cluster, created)
    counts = run_of(plan).get("counts") or {}
    causes = (run_of(plan).get("preview") or {}).get("causes") or ()
    items = list(_planned_causes(causes, counts.get("left", 0)))
    if request.output in FORMATS:
        figures = {name: counts.get(name, 0) for name in ("scanned", "matched", "refused")}
        shown = document("PlannedCauseList", items, replay=plan["metadata"]["name"], **figures)
        names = [clean(item["cause"]) or NONE_RECORDED for item in items]
        print_document(shown, request.output, names)
        return
    notes = _plan_summary(request, plan, counts)
    _print_table(request, _PLANNED_COLUMNS, items, list(map(_planned_row, items)), notes)


_LIMITS = {
    _count_by_inspection: f"an Inspection counts instead, of at most {MAX_NEWEST} entries",
    _count_by_replay: "a Replay counts instead, without consumers and examples",
}


def _check_counted(request: InspectionRequest) -> None:
    is_limited = "limit" in request.select
    if request.reveals or request.waiting or is_limited:  # no Replay counts these
        request.check_evaluated()
    if is_limited:
        raise click.UsageError(
            "--limit of causes is for --direct: in the cluster all messages are "
            f"counted\n{request.direct_hint()}"
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
            "cause": OTHERS, "messages": total - listed, "fingerprint": "",
            "replayed": None, "firstTime": None, "lastTime": None,
        }  # fmt: skip


def _planned_row(count: PlannedCause | CauseCount) -> list[object]:
    at = now()
    times = (count["firstTime"], count["lastTime"])
    return [
        count["messages"],
        cut(clean(count["cause"] or NONE_RECORDED), _LONGEST_CAUSE),
        count["fingerprint"] or "-",
        *("-" if time is None else local_time(time, at) for time in times),
        "-" if count["replayed"] is None else count["replayed"],
    ]


def _plan_summary(request: InspectionRequest, plan: Body, counts: Body) -> Iterator[str]:
    """Yield the extent of the count."""
    scanned, matched = counts.get("scanned", 0), counts.get("matched", 0)
    run = {"totalEntries": scanned, "messages": scanned, "matched": matched}
    yield from summary_of(request, run)
    refused = (run_of(plan).get("preview") or {}).get("refused") or ()
    if refused:
        kinds = ", ".join(f"{count['messages']} {count['cause']}" for count in refused)
        yield f"not counted above, because no Replay can move them: {kinds}"
    if counts.get("unevaluated"):
        yield f"{counts['unevaluated']} can't be evaluated by the selection"
