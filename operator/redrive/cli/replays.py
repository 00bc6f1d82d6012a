"""Commands about one Replay: `suspend`, `resume`, `cancel`, `approve`, `refused`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import click

from redrive.api import Body
from redrive.cli.cluster import Cluster
from redrive.cli.documents import EntryRefusal
from redrive.cli.frame import (
    HAS_FINDINGS,
    NOT_FINISHED,
    ClusterFlags,
    WriteFlags,
    cluster_options,
    replay_argument,
    write_options,
)
from redrive.cli.main import INTERRUPTED
from redrive.cli.output import (
    FORMATS,
    Live,
    TableColumn,
    clean,
    document,
    output_option,
    pairs,
    print_document,
    print_object,
    say,
    table,
)
from redrive.cli.policies import ENDED, conditions_of
from redrive.errors import RedriveError
from redrive.kube.resources import APPROVALS, REPLAYS, REQUESTED_BY, Key
from redrive.reasons import Reason

SLOW_SECONDS = 5.0
"""Time after which a Replay that does not run shows why."""


START_SECONDS = 15.0
"""Time for which an object may wait for prerequisites that a user must create."""
UNSEEN_SECONDS = 60.0
"""Time within which an operator reconciles a new object."""
_QUEUED = {
    Reason.PROGRESSING,
    Reason.TOO_MANY_RUNS,
    Reason.REPLAY_IN_PROGRESS,
    Reason.SUSPENDED,
    Reason.APPROVAL_REQUIRED,
}
"""Reasons of a wait that a command shows, and does not end."""


class Start:
    """Start of a Replay or an Inspection, for which no command waits without end."""

    def __init__(self) -> None:
        self._reason: str | None = None
        self._since = time.monotonic()

    def problem(self, body: Body) -> str:
        """Return the reason for which *body* does not start; empty while it may start."""
        conditions = conditions_of(body)
        ready = conditions.get("Ready") or {}
        reason, at = ready.get("reason"), time.monotonic()
        if reason != self._reason:
            self._reason, self._since = reason, at
        if not ready:
            is_unseen = at - self._since > UNSEEN_SECONDS
            problem = "no operator has reconciled it; run `kubectl redrive doctor`"
            return problem if is_unseen else ""
        is_late = ready["status"] == "False" and at - self._since > START_SECONDS
        if "Stalled" in conditions or (is_late and reason not in _QUEUED):
            return f"{reason}: {clean(ready['message'])}"
        return ""


def wait_of(body: Body) -> str:
    """Return the reason for which a Replay or an Inspection waits; empty if it does not.

    Before its start only the reason of a prerequisite that a user must create is returned: `Start`
    ends the command soon, and shows the whole message.
    """
    ready = conditions_of(body).get("Ready") or {}
    if ready.get("status") != "False":
        return ""
    if run_of(body) or ready["reason"] in _QUEUED:
        return f"{ready['reason']}: {clean(ready['message'])}"
    return f"waits: {ready['reason']}"


def confirmed(question: str, *, yes: bool) -> bool:
    """Ask for a confirmation on standard error; no answer is a no.

    Raises:
        UsageError: there is no terminal to ask at, and *yes* is false.
    """
    if yes:
        return True
    if not sys.stdin.isatty():
        raise click.UsageError("there is no terminal to ask at; confirm with --yes")
    # Keys that were pressed before the question are no answer to it.
    import_module("termios").tcflush(sys.stdin, import_module("termios").TCIFLUSH)
    return click.confirm(question, default=False, err=True)


def run_of(replay: Body) -> Mapping[str, Any]:
    """Return the progress of a Replay, as its job reported it."""
    run: Mapping[str, Any] = (replay.get("status") or {}).get("run") or {}
    return run


def messages_to_approve(replay: Body) -> int | None:
    """Return the number of messages of a run, which its approval must have."""
    number: int | None = (run_of(replay).get("approval") or {}).get("messages")
    return number


def phase_of(replay: Body) -> str:
    """Return the phase of a Replay; `Pending` before the first reconcile."""
    return (replay.get("status") or {}).get("phase") or "Pending"


def progress(replay: Body, seconds: float = SLOW_SECONDS) -> Iterator[str]:
    """Yield the lines that show the state of a Replay.

    Args:
        replay: as it was read last.
        seconds: since the start of the command; at first a Replay that waits shows no reason.
    """
    phase, outcome = phase_of(replay), run_of(replay).get("outcome")
    yield f"  {'   '.join(_figures(replay))}"
    if outcome and phase not in ENDED:
        yield f"  {_outcome_text(outcome, '   ')}"
    if seconds < SLOW_SECONDS or phase in ENDED:
        return
    if not conditions_of(replay).get("Ready"):
        yield "  no operator has reconciled it"
    elif reason := wait_of(replay):
        yield f"  {reason}"


def _figures(replay: Body) -> Iterator[str]:
    """Yield the figures of a Replay; its phase while none are known."""
    run, phase = run_of(replay), phase_of(replay)
    counts = run.get("counts") or {}
    if is_audit(replay):
        messages = (run.get("audit") or {}).get("messages", 0)
        yield f"{phase.lower()}, {messages} messages of targets read"
        return
    if is_plan(replay) or "matched" not in counts:
        scanned = f", {counts['scanned']} dead letters read" if counts.get("scanned") else ""
        yield f"{phase.lower()}{scanned}"
        return
    yield f"moved    {counts.get('moved', 0)} of {counts['matched']}"
    if counts.get("refused"):
        yield f"refused {counts['refused']}"
    if counts.get("doubled"):
        yield f"perhaps twice {counts['doubled']}"
    if run.get("ratePerMinute") is not None and phase not in ENDED:
        yield f"{run['ratePerMinute'] / 60:.0f}/s"
    if run.get("remaining") and phase not in ENDED:
        yield f"about {run['remaining']} left"


def is_plan(replay: Body) -> bool:
    """Return True if the Replay moves nothing, or nothing yet."""
    return replay["spec"].get("mode") in {"Plan", "Review", "Audit"}


def is_audit(replay: Body) -> bool:
    """Return True if the Replay compares the topics."""
    return bool(replay["spec"].get("mode") == "Audit")


def has_expired(replay: Body) -> bool:
    """Return True if the review of the Replay ended unconfirmed."""
    ready = conditions_of(replay).get("Ready") or {}
    return bool(ready.get("reason") == "ReviewExpired")


def _outcome_text(outcome: Body, separator: str) -> str:
    names = (("handled", "handled"), ("waiting", "waiting"), ("deadAgain", "dead again"))
    return separator.join(f"{outcome[field]} {name}" for field, name in names)


def result_text(replay: Body) -> str:
    """Return the result of an ended Replay as a sentence."""
    run, counts = run_of(replay), run_of(replay).get("counts") or {}
    conditions = conditions_of(replay)
    if "Failed" in conditions:
        return f"Failed: {conditions['Failed']['reason']}: {clean(conditions['Failed']['message'])}"
    if has_expired(replay):
        return "Complete: the review was not confirmed in time; nothing was moved"
    if is_audit(replay):
        return f"Complete: {clean(conditions['Complete']['message'])}"
    if is_plan(replay):
        return f"Complete: a plan; {counts.get('left', 0)} would be moved"
    if counts.get("matched") == 0:
        return "Complete: no dead letter is selected; nothing was moved"
    moved = f"Complete: {counts.get('moved', 0)} moved, {counts.get('refused', 0)} refused"
    if counts.get("doubled"):
        moved += f", {counts['doubled']} perhaps twice"
    outcome = run.get("outcome")
    return f"{moved}; of the moved ones {_outcome_text(outcome, ', ')}" if outcome else moved


def exit_code_of(replay: Body) -> int:
    """Return the exit code for the result of an ended Replay."""
    run = run_of(replay)
    if "Failed" in conditions_of(replay) or has_expired(replay):
        return 1
    counts, outcome = run.get("counts") or {}, run.get("outcome") or {}
    audit = (run.get("audit") or {}) if is_audit(replay) else {}
    findings = (
        counts.get("refused"),
        counts.get("doubled"),
        outcome.get("deadAgain"),
        audit.get("doubled"),
        audit.get("unrecorded"),
    )
    return HAS_FINDINGS if any(findings) else 0


def attach(
    cluster: Cluster,
    flags: ClusterFlags,
    replay: Body,
    *,
    timeout: float | None,
    output: str | None,
) -> int:
    """Show the progress of a Replay until it ends; return the exit code.

    An interrupted command detaches, and the Replay continues. A Replay that waits for approval, or
    for what a person has to provide, ends the command.
    """
    name, namespace = replay["metadata"]["name"], replay["metadata"]["namespace"]
    hint = flags.hint("follow", name, namespace=namespace)
    live, start, since = Live(sys.stderr), Start(), time.monotonic()
    try:
        for snapshot in cluster.states(REPLAYS, replay):
            seconds = time.monotonic() - since
            (replay,) = snapshot.objects
            lines = [*progress(replay, seconds)]
            if snapshot.error is not None:
                lines.append(f"  the Replay continues; {snapshot.error}")
            ended = phase_of(replay) in ENDED
            live.show(lines, final=ended)
            if ended:
                return _end(replay, output)
            if is_plan(replay) and "InReview" in conditions_of(replay):
                messages = run_of(replay)["counts"]["left"]
                say(f"in review: {messages} messages to move; confirm it at a terminal: {hint}")
                return NOT_FINISHED
            if "ApprovalRequired" in conditions_of(replay):
                count = messages_to_approve(replay)
                approve = flags.hint("approve", name, namespace=namespace)
                say(f"waits for approval to move {count} messages: {approve}")
                say(f"then follow it: {hint}")
                return NOT_FINISHED
            if not run_of(replay) and (problem := start.problem(replay)):
                live.clear()
                say(f"{problem}\nthe Replay starts when this is fixed. Follow it: {hint}")
                say(f"Cancel it: {flags.hint('cancel', name, namespace=namespace)}")
                return NOT_FINISHED
            if timeout is not None and seconds >= timeout:
                say(f"not finished after {timeout:.0f} s; the Replay continues; follow it: {hint}")
                return NOT_FINISHED
    except KeyboardInterrupt:
        say(f"\nthe Replay continues. Follow it: {hint}")
        say(f"Suspend it: {flags.hint('suspend', name, namespace=namespace)}")
        say(f"Cancel it: {flags.hint('cancel', name, namespace=namespace)}")
        return INTERRUPTED
    raise RedriveError(f"the Replay {name} was deleted", remedy="create another one")


def _end(replay: Body, output: str | None) -> int:
    if output is None:
        click.echo(result_text(replay))
    else:
        print_object(replay, output, "")
    return exit_code_of(replay)


def _change(replay: str, change: Body, done: str, flags: WriteFlags) -> None:
    """Change the spec of a Replay that has not ended."""
    cluster = Cluster(flags)
    body = cluster.get(REPLAYS, cluster.namespace, replay)
    if phase_of(body) in ENDED:
        raise RedriveError(
            f"the Replay {replay} has ended", got=phase_of(body), remedy="create another one"
        )
    flags.show(cluster.patch(REPLAYS, body, {"spec": change}, dry_run=flags.dry_run), done)


@click.command()
@replay_argument
@write_options
def suspend(replay: str, flags: WriteFlags) -> None:
    """Suspend a Replay: in-flight messages are settled, and no more are sent."""
    _change(replay, {"suspend": True}, "suspended", flags)


@click.command()
@replay_argument
@write_options
def resume(replay: str, flags: WriteFlags) -> None:
    """Resume a suspended Replay."""
    _change(replay, {"suspend": False}, "resumed", flags)


@click.command()
@replay_argument
@write_options
def cancel(replay: str, flags: WriteFlags) -> None:
    """Cancel a Replay. Messages that were moved stay moved; this can't be undone."""
    _change(replay, {"cancel": True}, "canceled", flags)


@click.command()
@replay_argument
@click.option("--messages", type=click.IntRange(1), help="Default: the number of its plan.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@write_options
def approve(replay: str, messages: int | None, flags: WriteFlags, *, yes: bool) -> int:
    """Approve a Replay that moves more messages than it may without approval."""
    cluster = Cluster(flags)
    body = cluster.get(REPLAYS, cluster.namespace, replay)
    planned = messages_to_approve(body)
    if "ApprovalRequired" not in conditions_of(body) or not planned:
        raise RedriveError(
            f"the Replay {replay} does not wait for approval",
            got=phase_of(body),
            remedy=f"see its state: {flags.hint('follow', replay)}",
        )
    count = messages or planned
    say("\n".join(pairs(_approval_fields(body, planned))))
    question = f"Context {cluster.context}: approve moving {count} messages?"
    if flags.dry_run is None and not confirmed(question, yes=yes):
        say("not approved")
        return 1
    approval = {
        **APPROVALS.typed,
        "metadata": {**Key.of(body)._asdict(), "annotations": {REQUESTED_BY: cluster.user}},
        "spec": {
            "replayRef": {"name": replay, "uid": body["metadata"]["uid"]},
            "messages": count,
        },
    }
    flags.show(cluster.create(APPROVALS, approval, dry_run=flags.dry_run), "created")
    return 0


def _approval_fields(replay: Body, planned: int) -> Iterator[tuple[str, object]]:
    spec = replay["spec"]
    yield "replay", f"{replay['metadata']['namespace']}/{replay['metadata']['name']}"
    yield "policy", spec["policyRef"]["name"]
    yield "to move", planned
    yield "selection", selection_text(spec.get("select") or {})
    target = spec.get("target") or {}
    yield "target", target.get("topic") or target.get("type")
    yield "by", (replay["metadata"].get("annotations") or {}).get(REQUESTED_BY)
    yield "reason", spec.get("reason")
    yield "ticket", spec.get("ticket")


def selection_text(select: Body) -> str:
    """Return a selection in one line."""
    parts = [
        f"{name} {', '.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in select.items()
    ]
    return "; ".join(parts) or "all dead letters"


@click.command()
@replay_argument
@output_option("json", "yaml", "jsonl")
@cluster_options
def refused(replay: str, output: str | None, flags: ClusterFlags) -> None:
    """Show the messages that a Replay did not move, and why: the first hundred entries."""
    cluster = Cluster(flags)
    body = cluster.get(REPLAYS, cluster.namespace, replay)
    run = run_of(body)
    total: int = (run.get("counts") or {}).get("refused") or 0
    entries: list[EntryRefusal] = list(run.get("refusals") or ())
    if output in FORMATS:
        print_document(document("RefusedEntryList", entries, replay=replay, total=total), output)
        return
    if not total:
        click.echo(f"the Replay {replay} ({phase_of(body)}) has refused no message")
        return
    columns = TableColumn("ID"), TableColumn("MESSAGES", right=True), TableColumn("CAUSE")
    rows = [(entry["entry"], entry["messages"], entry["cause"]) for entry in entries]
    click.echo("\n".join(table(columns, rows)))
    listed = sum(entry["messages"] for entry in entries)
    if listed < total:
        say(f"{listed} of {total} messages; to list all, see docs/howto/audit.md")
