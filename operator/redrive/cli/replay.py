"""Commands `replay` and `follow`: select, plan, ask, move, follow.

A Replay in review (`mode: Review`) counts first, and moves what it has counted after a
confirmation. `planned` is the one place that knows this sequence.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, TextIO

import click

from redrive.api import Body
from redrive.cli.cluster import Cluster, NotPermittedError, ObjectNotFoundError, clean_up
from redrive.cli.frame import (
    HAS_FINDINGS,
    NOT_FINISHED,
    ClusterFlags,
    Seconds,
    WriteFlags,
    cluster_options,
    names_of,
    policy_argument,
    write_options,
)
from redrive.cli.output import (
    Live,
    age,
    clean,
    local_time,
    moment,
    now,
    output_option,
    pairs,
    say,
    utc_option,
    written,
)
from redrive.cli.policies import ENDED, conditions_of
from redrive.cli.replays import (
    Start,
    attach,
    confirmed,
    is_audit,
    is_plan,
    phase_of,
    progress,
    result_text,
    run_of,
)
from redrive.errors import InvalidSpecError, RedriveError
from redrive.inspection.payloads import NONE_RECORDED
from redrive.kube.resources import (
    POLICIES,
    POLICY_KINDS,
    REPLAYS,
    REQUESTED_BY,
    ROCKETMQ_POLICIES,
    PolicyKey,
    Resource,
)
from redrive.policy.values import parse_duration

FOLLOW_FOR = "15m"
"""Time for which a run reads the outcome of the messages that it has moved."""
PLAN_LIFETIME = {"deadline": "30m", "ttlAfterFinished": "5m"}
"""Fields by which a plan ends and is deleted, even if this program was killed."""
AUDIT_LIFETIME = {"deadline": "6h", "ttlAfterFinished": "1d"}
"""The same for an audit, which reads all messages of the targets."""
REVIEW_LIFETIME = {"deadline": "1h", "ttlAfterFinished": "1h"}
"""Fields by which a review ends and is deleted, likewise. A confirmation removes these values."""
LATEST_START = timedelta(hours=1)
"""Time in which a Replay must be launched, in the queue of its policy."""
_ROCKETMQ_WORDS = {"rmqpol", "rocketmqretrypolicy", "rocketmqretrypolicies"}
"""Names of the kind before the name of a policy, as those of kubectl."""
_INSPECTION_WORDS = {"inspection", "inspections", "inspection.redrive.io", "inspections.redrive.io"}
FINGERPRINT = re.compile(r"[0-9a-f]{16}")


class TimeOrAge(click.ParamType[str]):
    """A time (RFC 3339) or an age (`2h`), converted to the text of a time in UTC."""

    name = "time"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Read a time or an age."""
        text = str(value)
        try:
            return written(now() - parse_duration(text))
        except (InvalidSpecError, OverflowError):  # before the year 1
            instant = moment(text)
        if instant is None or instant.tzinfo is None:
            self.fail(f"{text!r} is no time; write 2h, or 2026-11-20T10:00:00Z", param, ctx)
        return text


def policy_reference(text: str) -> tuple[Resource, str]:
    """Return the kind and the name of a policy, which is `NAME` or `rmqpol/NAME`."""
    word, _, name = text.partition("/")
    return (ROCKETMQ_POLICIES, name) if name and word in _ROCKETMQ_WORDS else (POLICIES, text)


def selection_options(
    function: Any,  # noqa: ANN401  of any command
    *,
    where: str = "Condition over columns of dead letters.",
    limit: str = "Number of messages.",
    everything: str = "All dead letters.",
) -> Any:  # noqa: ANN401
    """Add the options that select dead letters; their help texts depend on the command."""
    many = partial(click.option, multiple=True)
    for option in reversed(
        (
            many(
                "--cause", "causes", metavar="CLASS|FINGERPRINT", help="Cause of death; repeatable."
            ),
            many("--id", "ids", metavar="ID", help="Message id; repeatable."),
            click.option(
                "--ids-from", type=click.File(), metavar="FILE|-", help="File with an id a line."
            ),
            many("--key", "keys", metavar="KEY", help="Message key; repeatable."),
            click.option("--since", type=TimeOrAge(), metavar="TIME", help="Dead since: 2h."),
            click.option("--until", type=TimeOrAge(), metavar="TIME", help="Dead before."),
            click.option("--where", metavar="SQL", help=where),
            click.option("--limit", type=click.IntRange(1), help=limit),
            click.option("--all", "selects_all", is_flag=True, help=everything),
        )
    ):
        function = option(function)
    return function


def _ids_of(file: TextIO | None) -> list[str]:
    """Read the ids of `--ids-from`.

    Raises:
        UsageError: the file has none.
    """
    if file is None:
        return []
    ids = [*filter(None, map(str.strip, file))]
    if not ids:  # other options alone would select other messages
        raise click.UsageError(
            "the file of --ids-from has no id; check the command that wrote it, or leave it out"
        )
    return ids


def selected(options: dict[str, Any]) -> Body:
    """Take the options of `selection_options` but `--all`; return `spec.select`.

    Raises:
        UsageError: an option is empty, such as one from an unset variable of a shell.
    """
    causes: Sequence[str] = options.pop("causes")
    ids = [*options.pop("ids"), *_ids_of(options.pop("ids_from"))]
    if "" in causes:
        raise click.UsageError(
            "--cause is empty; leave it out, or name a cause: dead letters without one have "
            f"{NONE_RECORDED!r}"
        )
    select = {
        "causes": [
            "" if cause == NONE_RECORDED else cause
            for cause in causes
            if not FINGERPRINT.fullmatch(cause)
        ],
        "fingerprints": [cause for cause in causes if FINGERPRINT.fullmatch(cause)],
        "ids": list(dict.fromkeys(ids)),
        "keys": list(options.pop("keys")),
        **{name: options.pop(name) for name in ("since", "until", "where", "limit")},
    }
    return {name: value for name, value in select.items() if value not in (None, [])}


def selection(options: dict[str, Any]) -> Body:
    """Take the options of `selection_options`; return `spec.select`, empty with `--all`.

    Raises:
        UsageError: nothing is selected, or `--all` stands beside another selection.
    """
    select = selected(options)
    selects_all = options.pop("selects_all")
    if selects_all and select:
        raise click.UsageError(f"--all excludes other selections: {', '.join(select)}")
    if not selects_all and not select:
        raise click.UsageError(
            "nothing is selected; use --cause, --id, --ids-from, --key, --since, --until, --where, "
            "--limit, or --all for all dead letters"
        )
    return select


@click.command()
@policy_argument
@selection_options
@click.option("--target", metavar="Retry|Source|TOPIC", default="Retry", show_default=True)
@click.option("--reason", metavar="TEXT", help="Reason, for later readers.")
@click.option("--ticket", metavar="ID", help="Ticket of the decision.")
@click.option("--rate", type=click.IntRange(1), metavar="N", help="Messages in a second, at most.")
@click.option("--max-replays", type=click.IntRange(1), help="Refuse messages replayed as often.")
@click.option(
    "--confirm",
    "confirmations",
    type=click.Choice(["Reconciled", "DiscardUnreadable", "UnprovenHandled"]),
    multiple=True,
    help="Fact or action that the policy or the messages require; repeatable.",
)
@click.option("--plan", "is_plan", is_flag=True, help="Show the numbers and move nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not plan and ask first.")
@click.option("--detach", is_flag=True, help="Do not follow the Replay.")
@click.option("--timeout", type=Seconds(), metavar="TIME", help="Stop to follow: exit 4.")
@utc_option
@write_options
def replay(policy: str, flags: WriteFlags, **options: Any) -> int:  # noqa: ANN401
    """Move dead letters of a policy back to be processed again.

    First a plan shows how many messages would be moved. Dead letters that arrive after the plan
    are not moved. What was typed before the question is no answer to it; scripts use --yes.

    POLICY is the name of a RetryPolicy, or rmqpol/NAME for a RocketMQRetryPolicy.
    """
    select, (kind, policy) = dict(selection(options)), policy_reference(policy)
    asks = not options["is_plan"] and not options["yes"]
    mode = "Plan" if options["is_plan"] else "Run" if options["yes"] else "Review"
    if mode == "Run" and "ids" not in select:
        select.setdefault("until", _after(now()))  # the Replay may wait for others
    if asks and flags.dry_run is None and not sys.stdin.isatty():
        raise click.UsageError("there is no terminal to ask at; confirm with --yes, or use --plan")
    cluster = Cluster(flags)
    owner = cluster.get(kind, cluster.namespace, policy)
    body = manifest(owner, select, cluster.user, mode, options=options, kind=kind)
    created = cluster.create(REPLAYS, body, dry_run=flags.dry_run)
    if flags.dry_run is not None:
        flags.show(created, "")
        return 0
    name = created["metadata"]["name"]
    if mode == "Run":
        say(f"replay.redrive.io/{name} created by {cluster.user}")
        return _attached(cluster, flags, created, options)
    if mode == "Review":
        say(f"replay.redrive.io/{name} created by {cluster.user}, in review")
    plan = planned(cluster, created)
    say("\n".join(pairs(plan_fields(plan, owner))))
    if phase_of(plan) in ENDED:
        return _plan_code(plan, flags)
    if not run_of(plan)["counts"]["left"]:
        _end_plan(cluster, plan)
        return _plan_code(plan, flags)
    try:
        moving = _confirmed(cluster, plan)
    except (KeyboardInterrupt, SystemExit, click.Abort):
        _end_plan(cluster, plan)
        raise
    if moving is None:
        _end_plan(cluster, plan)
        _print_plan(plan, flags)
        say("nothing was moved")
        return 1
    return _attached(cluster, flags, moving, options)


def _followed(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a Replay, or of an Inspection behind its kind."""
    prefix = "inspection/"
    replays = names_of("replays")(ctx, param, incomplete) if "/" not in incomplete else []
    inspections: list[str] = []
    if prefix.startswith(incomplete) or incomplete.startswith(prefix):
        start = incomplete[len(prefix) :]
        inspections = names_of("inspections")(ctx, param, start)
    return [*replays, *(prefix + name for name in inspections)]


@click.command()
@click.argument("name", metavar="[inspection/]NAME", shell_complete=_followed)
@click.option("--timeout", type=Seconds(), metavar="TIME", help="Give up after this time: exit 4.")
@output_option("json", "yaml", "name")
@utc_option
@cluster_options
def follow(name: str, timeout: float | None, output: str | None, flags: ClusterFlags) -> int:
    """Show the progress of a Replay until it ends; at a terminal, confirm one in review.

    With inspection/NAME it follows an Inspection, and shows the causes that it has counted.
    Interrupted, it detaches: the Replay or the Inspection continues.
    """
    cluster = Cluster(flags)
    kind, _, inspection = name.partition("/")
    if kind in _INSPECTION_WORDS and inspection:
        # Most of its modules are not needed for a Replay.
        from redrive.cli.cluster_causes import follow_inspection  # noqa: PLC0415

        return follow_inspection(cluster, flags, inspection, timeout=timeout, output=output)
    body = cluster.get(REPLAYS, cluster.namespace, name)
    if is_plan(body) and "InReview" in conditions_of(body) and sys.stdin.isatty():
        policy = PolicyKey.of(body)
        try:
            owner = cluster.get(POLICY_KINDS[policy.kind], policy.namespace, policy.name)
        except (NotPermittedError, ObjectNotFoundError):
            owner = {}  # the names of its topics are not shown then
        say("\n".join(pairs(plan_fields(body, owner))))
        confirmed_body = _confirmed(cluster, body)
        if confirmed_body is None:
            say(f"not confirmed; cancel it: {flags.hint('cancel', name)}")
            return NOT_FINISHED
        body = confirmed_body
    return attach(cluster, flags, body, timeout=timeout, output=output)


def _attached(cluster: Cluster, flags: WriteFlags, body: Body, options: dict[str, Any]) -> int:
    """Follow a Replay that moves messages, or print it; return the exit code."""
    if options["detach"]:
        flags.show(body, "created")
        return 0
    return attach(cluster, flags, body, timeout=options["timeout"], output=flags.output)


def _confirmed(cluster: Cluster, review: Body) -> Body | None:
    """Ask whether to move what a review has shown; return the confirmed Replay."""
    place = f"Context {cluster.context}, namespace {cluster.namespace}."
    count = run_of(review)["counts"]["left"]
    if not confirmed(f"{place} Move these {count} messages?", yes=False):
        return None
    spec = review["spec"]  # others may have created it, with times of their own
    own = [name for name, time in REVIEW_LIFETIME.items() if spec.get(name) == time]
    return cluster.patch(REPLAYS, review, {"spec": {**dict.fromkeys(own), "mode": "Run"}})


def _after(instant: datetime) -> str:
    """Return the next millisecond: dead letters of the current second are selected as well."""
    end = instant.astimezone(UTC) + timedelta(milliseconds=1)
    return f"{end.replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"


def manifest(  # noqa: PLR0913  parts of one object
    policy: Body,
    select: Body,
    user: str,
    mode: str,
    *,
    options: dict[str, Any],
    kind: Resource = POLICIES,
) -> Body:
    """Return the Replay that moves the selected messages; the policy of *kind* owns it."""
    metadata, target = policy["metadata"], options["target"]
    is_topic = target not in {"Retry", "Source"}
    rate, has_outcome = options["rate"], kind is POLICIES and not is_topic
    reference = {} if kind is POLICIES else {"kind": kind.kind}
    spec = {
        "policyRef": {"name": metadata["name"], **reference},
        "mode": None if mode == "Run" else mode,
        "select": select or None,
        "target": {"type": "Topic", "topic": target} if is_topic else {"type": target},
        "startBefore": written(now() + LATEST_START),
        "maxReplays": options["max_replays"],
        "rateLimit": None if rate is None else {"messages": rate, "per": "1s"},
        "confirmations": list(options["confirmations"]) or None,
        "followFor": FOLLOW_FOR if has_outcome and mode in {"Run", "Review"} else None,
        "reason": options["reason"],
        "ticket": options["ticket"],
        **_LIFETIMES.get(mode, {}),
    }
    return object_of(REPLAYS, policy, user, spec, kind)


def object_of(
    resource: Resource, policy: Body, user: str, spec: Body, kind: Resource = POLICIES
) -> Body:
    """Return an object that a policy of *kind* owns, created by *user*, without None in *spec*."""
    metadata = policy["metadata"]
    return {
        **resource.typed,
        "metadata": {
            "generateName": f"{metadata['name']}-",
            "namespace": metadata["namespace"],
            "annotations": {REQUESTED_BY: user},
            "ownerReferences": [
                {**kind.typed, "name": metadata["name"], "uid": metadata["uid"]},
            ],
        },
        "spec": {name: value for name, value in spec.items() if value is not None},
    }


def planned(cluster: Cluster, plan: Body) -> Body:
    """Wait for the numbers of a plan, an audit or a Replay in review; return it as it is then.

    Raises:
        RedriveError: it failed.
        KeyboardInterrupt: the command was interrupted; the Replay is deleted or canceled.
    """
    live, start, since = Live(sys.stderr), Start(), time.monotonic()
    run, doing = ("audit", "reads targets") if is_audit(plan) else ("plan", "plans")
    live.show([f"{doing}; nothing is moved"])
    has_numbers = False
    try:
        for snapshot in cluster.states(REPLAYS, plan):
            (plan,) = snapshot.objects
            has_numbers = phase_of(plan) in ENDED or "InReview" in conditions_of(plan)
            error = () if snapshot.error is None else (f"  {snapshot.error}",)
            lines = progress(plan, time.monotonic() - since)
            if has_numbers:
                break
            if problem := start.problem(plan):
                raise RedriveError(
                    f"the {run} can't start",
                    got=problem,
                    remedy="resolve this, and repeat the command",
                )
            live.show([f"{doing}; nothing is moved", *lines, *error])
        else:
            raise RedriveError(
                f"the {run} {plan['metadata']['name']} was deleted", remedy="repeat the command"
            )
    finally:
        live.clear()
        if not has_numbers:
            _end_plan(cluster, plan)
    if phase_of(plan) == "Failed":
        raise RedriveError(
            f"the {run} has failed",
            got=result_text(plan),
            remedy="resolve this, and repeat the command",
        )
    return plan


def _end_plan(cluster: Cluster, plan: Body) -> None:
    """Delete a plan or an audit, or cancel a review: it names who has asked."""
    cancels = plan["spec"]["mode"] == "Review"
    clean_up(cluster, REPLAYS, plan, {"spec": {"cancel": True}} if cancels else None)


_LIFETIMES = {"Plan": PLAN_LIFETIME, "Audit": AUDIT_LIFETIME, "Review": REVIEW_LIFETIME}


def _shown_count(count: Body) -> str:
    words = (count["messages"], clean(count["cause"]) or NONE_RECORDED, count.get("fingerprint"))
    return " ".join(str(word) for word in words if word is not None)


def _shown_history(counts: Sequence[Body]) -> str:
    """Return the times at which messages to move died, and how many were replayed before."""
    first, last = (
        local_time(choose(times), now()) if (times := [c[n] for c in counts if c.get(n)]) else "?"
        for n, choose in (("firstTime", min), ("lastTime", max))
    )
    replayed = sum(count.get("replayed") or 0 for count in counts)
    return f"since {first}, the last at {last}; {replayed or 'none'} replayed before"


def _destination(target: Body, policy: Body) -> str:
    """Return the target of a plan, with the name of its topic."""
    kind = target.get("type") or "Retry"
    topics = {
        "Retry": (policy.get("status") or {}).get("retryTopic"),
        "Source": (policy.get("spec") or {}).get("topic"),
        "Topic": target.get("topic"),
    }
    return "   ".join(filter(None, (kind, topics[kind])))


def plan_fields(plan: Body, policy: Body) -> Iterator[tuple[str, object]]:
    """Yield the numbers of a plan for people."""
    run, spec = run_of(plan), plan["spec"]
    counts, preview = run.get("counts") or {}, run.get("preview") or {}
    causes, refusals = (
        ", ".join(map(_shown_count, preview.get(n) or ())) for n in ("causes", "refused")
    )
    select = spec.get("select") or {}
    yield "to move", "   ".join(filter(None, (str(counts.get("left", 0)), causes)))
    if shown := preview.get("causes"):
        yield "dead", _shown_history(shown)
    others = str(max(counts.get("scanned", 0) - counts.get("matched", 0), 0))
    if following := preview.get("following"):
        others += f", of which {following} follow a dead letter of their key; use --key"
    yield "not selected", others
    yield "refused", "   ".join(filter(None, (str(counts.get("refused", 0)), refusals)))
    if counts.get("unevaluated"):
        yield "unevaluated", f"{counts['unevaluated']}; the selection can't be computed for them"
    if counts.get("batched"):
        yield "in batches", f"{counts['batched']}; those acknowledged one by one are moved again"
    if "until" in select:
        yield "dead before", local_time(select["until"], now())
    seconds = preview.get("estimatedSeconds")
    time_needed = "" if seconds is None else f"   about {age(seconds)}"
    limit = spec.get("rateLimit")
    rate = "unlimited" if limit is None else f"at most {limit['messages']} in {limit['per']}"
    yield "target", _destination(spec.get("target") or {}, policy)
    if policy.get("kind") == POLICIES.kind:
        yield "safety", (policy["spec"].get("replay") or {}).get("safety") or "Idempotent"
    yield "rate", f"{rate}{time_needed}"
    if review := run.get("review"):
        yield "in review", f"ends at {local_time(review['expiryTime'], now())}"


def _print_plan(plan: Body, flags: WriteFlags) -> None:
    """Print a plan in the format of `-o`; without one, people have its numbers."""
    if flags.output is not None:
        flags.show(plan, "")


def _plan_code(plan: Body, flags: WriteFlags) -> int:
    """Print a plan with which a command ends; return the exit code."""
    _print_plan(plan, flags)
    counts = run_of(plan).get("counts") or {}
    if not counts.get("left"):
        say("nothing to move: no dead letter that can be moved is selected")
    return HAS_FINDINGS if counts.get("refused") else 0
