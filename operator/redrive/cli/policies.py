"""Commands that show RetryPolicies: `status`, `history`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple, NoReturn

import click

from redrive.api import Body
from redrive.api.annotations import dead_letter_requests
from redrive.cli.cluster import Cluster, ClusterError, NotPermittedError, ObjectNotFoundError
from redrive.cli.documents import Attention, ConnectionStatus, PolicyStatus, ReplayRecord
from redrive.cli.frame import (
    HAS_FINDINGS,
    ClusterFlags,
    all_namespaces_option,
    cluster_options,
    names_of,
    policy_argument,
)
from redrive.cli.output import (
    FORMATS,
    MISSING,
    Live,
    TableColumn,
    age_of,
    counted,
    document,
    local_time,
    moment,
    now,
    output_option,
    pairs,
    print_document,
    style,
    table,
    time_until,
    utc_option,
    written,
)
from redrive.cli.policy_actions import refreshed
from redrive.errors import RedriveError
from redrive.kube import resources
from redrive.policy.values import parse_duration, size_text

DEAD_LETTERS = "DeadLetters"
"""Reason of `Attention` for a policy that has dead letters."""
BLOCKED_KEYS = "BlockedKeys"
"""Reason of `Attention` for a policy with keys that wait for a retry."""
READ_SECONDS = 10.0
"""Shortest time between two reads of connections and Replays by a watch."""
ENDED = frozenset({"Completed", "Failed"})
"""Phases of Replays that have ended."""

_COLUMNS = (
    TableColumn("NAMESPACE"),
    TableColumn("POLICY"),
    TableColumn("READY"),
    TableColumn("WAITING", right=True, dropped=2),
    TableColumn("DUE", right=True, dropped=5),
    TableColumn("DEAD", right=True),
    TableColumn("NEW/1H", right=True, dropped=3),
    TableColumn("OLDEST", right=True, dropped=4),
    TableColumn("EXPIRES", right=True, dropped=3),
    TableColumn("CONNECTION", wide=True),
    TableColumn("TOPIC", wide=True),
    TableColumn("FIGURES", right=True, wide=True),
    TableColumn("ATTENTION", wrapped=True),
)
_CONNECTION_COLUMNS = (
    TableColumn("CONNECTION"),
    TableColumn("BROKER", dropped=1),
    TableColumn("POLICIES", right=True, dropped=2),
    TableColumn("STATE", wrapped=True),
)
_HISTORY_COLUMNS = (
    TableColumn("REPLAY"),
    TableColumn("MODE", dropped=3),
    TableColumn("RESULT"),
    TableColumn("MOVED", right=True),
    TableColumn("REFUSED", right=True),
    TableColumn("DEAD AGAIN", right=True, dropped=4),
    TableColumn("ENDED", right=True),
    TableColumn("BY", dropped=1),
    TableColumn("APPROVED BY", wide=True),
    TableColumn("TICKET", dropped=2),
    TableColumn("REASON"),
)


class Overview(NamedTuple):
    """Objects that one display of `status` shows."""

    context: str
    policies: Sequence[PolicyStatus]
    connections: Sequence[ConnectionStatus]

    def document(self) -> dict[str, Any]:
        """Return the document for programs."""
        connections = list(self.connections)
        return document("StatusList", self.policies, context=self.context, connections=connections)

    @property
    def findings(self) -> int:
        """Return the number of policies and connections that need attention."""
        return sum(bool(item["attention"]) for item in self.policies) + sum(
            map(needs_attention, self.connections)
        )


@click.command()
@click.argument("policy", required=False, shell_complete=names_of("retrypolicies"))
@all_namespaces_option
@click.option("-l", "--selector", metavar="LABELS", default="", help="Label selector.")
@click.option("--all", "shows_all", is_flag=True, help="Those that need no attention as well.")
@click.option("-w", "--watch", is_flag=True, help="Show changes until interrupted.")
@click.option("--refresh", is_flag=True, help="Have the figures of one policy read now.")
@click.option("--exit-code", is_flag=True, help="Exit with 3 if anything needs attention.")
@output_option("wide", "json", "yaml", "jsonl", "name")
@utc_option
@cluster_options
def status(  # noqa: PLR0913  the options of the command
    policy: str | None,
    selector: str,
    output: str | None,
    flags: ClusterFlags,
    *,
    shows_all: bool,
    watch: bool,
    refresh: bool,
    exit_code: bool,
) -> int:
    """Show the connections and policies that need attention; with a name, one policy.

    Figures have an age. --refresh has the operator read those of one policy, and waits for up to 15
    seconds; it needs the right to patch the policy.
    """
    if policy is not None and flags.all_namespaces:
        raise click.UsageError("-A is not for one policy; choose its namespace with -n")
    if refresh and policy is None:
        raise click.UsageError("--refresh is for one policy; name it")
    cluster = Cluster(flags)
    view = View(cluster, flags, policy, output, shows_all=shows_all)
    bodies = (
        cluster.list(resources.POLICIES, cluster.scope, labels=selector)
        if policy is None
        else [cluster.get(resources.POLICIES, cluster.namespace, policy)]
    )
    if refresh:
        bodies = list(map(partial(refreshed, cluster), bodies))
    if watch:
        _watch(view, selector, bodies[0] if policy else None)
    overview = view.overview(bodies)
    if output in FORMATS:
        names = [f"retrypolicy.redrive.io/{item['name']}" for item in overview.policies]
        print_document(overview.document(), output, names)
    else:
        click.echo("\n".join(view.lines(overview)))
    return HAS_FINDINGS if exit_code and overview.findings else 0


def _watch(view: View, selector: str, one: Body | None) -> NoReturn:
    """Show *one* policy, else all, until interrupted; to a program a line for each that changed.

    Raises:
        KeyboardInterrupt: it was interrupted.
        RedriveError: the one policy was deleted.
    """
    live = Live(sys.stdout, report_seconds=0)
    printed: dict[str, PolicyStatus] = {}
    many = view.cluster.watch(resources.POLICIES, view.cluster.scope, labels=selector)
    for snapshot in view.cluster.states(resources.POLICIES, one) if one else many:
        overview = view.overview(snapshot.objects)
        if view.output in FORMATS:
            for item in overview.policies:
                name = f"{item['namespace']}/{item['name']}"
                if printed.get(name) != item:
                    printed[name] = item
                    form = "name" if view.output == "name" else "jsonl"
                    print_document(item, form, [f"retrypolicy.redrive.io/{item['name']}"])
        else:
            error = () if snapshot.error is None else (str(snapshot.error),)
            live.show((*view.lines(overview), *error))
    raise RedriveError(f"the policy {view.policy} was deleted", remedy="create it again")


@dataclass
class View:
    """Display of `status`, for one policy or for many."""

    cluster: Cluster
    flags: ClusterFlags
    policy: str | None
    output: str | None
    shows_all: bool = field(kw_only=True)
    _connections: Mapping[str, ConnectionStatus] = field(default_factory=dict, init=False)
    _replays: list[ReplayRecord] = field(default_factory=list, init=False)
    _read_at: float | None = field(default=None, init=False)

    def overview(self, bodies: Iterable[Body]) -> Overview:
        """Read the connections of policies, and the Replays of one policy, at most each 10 s.

        After a failed request the last ones are shown again.

        Raises:
            ClusterError: a request of the first call failed.
        """
        items = [policy_status(body) for body in bodies]
        named = items if self.policy else ()
        if self._read_at is None or time.monotonic() - self._read_at >= READ_SECONDS:
            try:
                self._connections = _connections(self.cluster, self.flags, items)
                for item in named:
                    self._replays = history_of(self.cluster, item["namespace"], item["name"])
            except ClusterError:
                if self._read_at is None:
                    raise
            self._read_at = time.monotonic()
        for item in named:
            item["replays"] = self._replays
        return Overview(self.cluster.context, items, list(self._connections.values()))

    def lines(self, overview: Overview) -> Iterator[str]:
        """Yield the lines for people."""
        if self.policy is None:
            yield from self._many(overview)
        else:
            for item in overview.policies:
                yield from self._one(item)

    def _many(self, overview: Overview) -> Iterator[str]:
        at, scope = now(), self.cluster.scope
        times = sorted(item["observedTime"] for item in overview.policies if item["observedTime"])
        versions = sorted({v for c in overview.connections if (v := c["operatorVersion"])})
        figures = [f"figures at most {age_of(times[0], at)} old"] if times else []
        operators = [f"operator {', '.join(versions) or 'unknown'}"] if overview.connections else []
        yield "   ".join([f"context {self.cluster.context}", *operators, *figures])
        connections = [c for c in overview.connections if self.shows_all or needs_attention(c)]
        is_wide = self.output == "wide"
        if connections:
            yield from table(_CONNECTION_COLUMNS, list(map(_connection_row, connections)), is_wide)
            yield ""
        shown = [item for item in overview.policies if self.shows_all or item["attention"]]
        if shown:
            skipped = 1 if scope else 0
            rows = [list(_row(item, at))[skipped:] for item in shown]
            yield from table(_COLUMNS[skipped:], rows, is_wide)
        needing = sum(bool(item["attention"]) for item in overview.policies)
        yield from self._summary(len(overview.policies), needing, scope)

    def _summary(self, count: int, needing: int, scope: str | None) -> Iterator[str]:
        place = f"in namespace {scope}" if scope else "in all namespaces"
        if not count:
            yield f"no RetryPolicies {place}"
            if scope:
                yield f"In all namespaces: {self.flags.hint('status', '-A')}"
            return
        yield f"{needing} of {count} policies need attention {place}"
        if not self.shows_all and needing < count:
            words = ("status", "--all") if scope else ("status", "-A", "--all")
            yield f"All of them: {self.flags.hint(*words)}"

    def _one(self, item: PolicyStatus) -> Iterator[str]:
        at = now()
        title = f"{item['topic']}, {item['subscription']}, {item['subscriptionType']}"
        yield f"{style(item['name'], 'cyan')}   {title}"
        yield from pairs([*self._state(item, at), *_replay_pairs(item["replays"], at)])
        if item["blockedKeys"]:
            yield f"Blocked keys: {self.flags.hint('keys', item['name'])}"
        if item["deadLetters"]:
            yield f"Causes: {self.flags.hint('causes', item['name'])}"
        yield f"Past Replays: {self.flags.hint('history', item['name'])}"

    def _state(self, item: PolicyStatus, at: datetime) -> Iterator[tuple[str, object]]:
        ready = {"True": "yes", "False": "no"}.get(item["ready"], "unknown")
        since = f", for {age_of(item['readySince'], at)}" if item["readySince"] else ""
        connection = self._connections.get(item["connection"])
        yield "ready", f"{ready}{since}"
        state = "not readable" if connection is None else _state_of(connection)
        yield "connection", f"{item['connection']}, {state}"
        yield "consumers", _consumers_text(item)
        due = f", of which {item['due']} are due" if item["waiting"] and item["due"] else ""
        yield "waiting", None if item["waiting"] is None else f"{item['waiting']}{due}"
        yield "dead", _dead_text(item, at)
        reconcile_now = self.flags.hint("status", item["name"], "--refresh")
        figures = f"{age_of(item['observedTime'], at)} old" if item["observedTime"] else "none yet"
        yield "figures", f"{figures}; read them now: {reconcile_now}"
        if keys := item["blockedKeys"]:
            longest, behind = keys[0], sum(key["behind"] for key in keys)
            since = age_of(longest["sinceTime"], at)
            text = f"{len(keys)} blocked, the longest for {since} by {longest['cause'] or '?'}"
            yield "keys", f"{text}; {counted(behind, 'message')} behind"
        for request in item["deadLetterNow"]:
            end = local_time(request["endTime"], at)
            yield "dead-letter", f"{request['origin']} at its next failure, until {end}"
        for attention in item["attention"]:
            is_above = connection is not None and attention["message"] == connection["message"]
            if attention["reason"] not in {BLOCKED_KEYS, DEAD_LETTERS} and not is_above:
                yield "attention", f"{attention['reason']}: {attention['message']}"


def _consumers_text(item: PolicyStatus) -> str | None:
    """Return the consumers of both topics; None before a first reading."""
    on_source, on_retry = item["sourceConsumers"], item["retryConsumers"]
    if on_retry is None:
        return None
    source = "unknown" if on_source is None else str(on_source)
    backlog = f"; backlog {item['unprocessed']}" if item["unprocessed"] is not None else ""
    return f"{source} on the source topic, {on_retry} on the retry topic{backlog}"


def _dead_text(item: PolicyStatus, at: datetime) -> str | None:
    if not item["deadLetters"]:
        return None if item["deadLetters"] is None else "0"
    new = item["deadLettersLastHour"]
    recent = f"; {new} came in the last hour" if new else ""
    oldest = f"{recent}; oldest {age_of(item['oldestDeadLetterTime'], at)}"
    expiry = item["expiryTime"] and f"; the first expires {local_time(item['expiryTime'], at)}"
    return f"{item['deadLetters']}{oldest}{expiry or ''}{_size_text(item)}"


def _size_text(item: PolicyStatus) -> str:
    """Return the size of dead letters, with the quota if there is one."""
    size, quota = item["deadLetterBytes"], item["deadLetterQuotaBytes"]
    if not size:
        return ""
    return f"; {size_text(size)}{f' of {size_text(quota)}' if quota else ''}"


def _replay_pairs(records: Sequence[ReplayRecord], at: datetime) -> Iterator[tuple[str, object]]:
    for record in records:
        if record["phase"] not in ENDED:
            yield "replay", " ".join(filter(None, (record["name"], record["phase"])))
    ended = [record for record in records if record["phase"] in ENDED and record["mode"] == "Run"]
    for record in ended[:1]:
        moved = f"{record['moved'] or 0} moved, {record['refused'] or 0} refused"
        moved += f", {record['deadAgain']} dead again" if record["deadAgain"] else ""
        time_ago = f"{age_of(record['completionTime'], at)} ago"
        parts = record["name"], record["result"], moved, time_ago
        yield (
            "last replay",
            "  ".join([*parts, *filter(None, (record["requestedBy"], record["ticket"]))]),
        )


def policy_status(body: Body) -> PolicyStatus:
    """Return the state of a RetryPolicy for `status`, without its Replays."""
    metadata, spec = body["metadata"], body["spec"]
    status = body.get("status") or {}
    backlog = status.get("backlog") or {}
    conditions = conditions_of(body)
    ready = conditions.get("Ready") or {}
    reference = spec["connectionRef"]
    return {
        "namespace": metadata["namespace"],
        "name": metadata["name"],
        "topic": spec["topic"],
        "subscription": spec["subscription"],
        "subscriptionType": spec.get("subscriptionType") or "Shared",
        "connection": f"{reference.get('namespace') or metadata['namespace']}/{reference['name']}",
        "ready": ready.get("status", "Unknown"),
        "reason": ready.get("reason", ""),
        "message": ready.get("message", ""),
        "readySince": ready.get("lastTransitionTime"),
        "unprocessed": backlog.get("source"),
        "sourceConsumers": backlog.get("sourceConsumers"),
        "retryConsumers": backlog.get("retryConsumers"),
        "waiting": backlog.get("retry"),
        "due": backlog.get("retryDue"),
        "deadLetters": backlog.get("deadLetter"),
        "deadLettersLastHour": backlog.get("deadLettersLastHour"),
        "deadLetterBytes": backlog.get("deadLetterBytes"),
        "deadLetterQuotaBytes": backlog.get("deadLetterQuotaBytes"),
        "oldestDeadLetterTime": backlog.get("oldestDeadLetterTime"),
        "expiryTime": _expiry(spec, backlog),
        "observedTime": backlog.get("observedTime"),
        "attention": list(_attention(status, conditions)),
        "blockedKeys": list(status.get("blockedKeys") or ()),
        "deadLetterNow": [
            {"origin": request.origin, "endTime": written(request.end)}
            for request in dead_letter_requests(
                (metadata.get("annotations") or {}).get(resources.DEAD_LETTER_NOW) or "", now()
            )
        ],
        "replays": [],
    }


def conditions_of(body: Body) -> Mapping[str, Body]:
    """Return the conditions of an object by type."""
    conditions = (body.get("status") or {}).get("conditions") or ()
    return {condition["type"]: condition for condition in conditions}


def _expiry(spec: Body, backlog: Body) -> str | None:
    """Return the time at which the oldest dead letter expires; None where it is not known."""
    ttl = (spec.get("deadLetter") or {}).get("messageTTL")
    oldest = moment(backlog.get("oldestDeadLetterTime"))
    if oldest is None or ttl in {None, "Unlimited"}:
        return None
    try:
        return written(oldest + parse_duration(str(ttl)))
    except OverflowError:  # producers choose the time of a message, up to the year 9999
        return None


def _attention(status: Body, conditions: Mapping[str, Body]) -> Iterator[Attention]:
    """Yield the reasons for which a policy needs attention, the most urgent first."""
    ready = conditions.get("Ready")
    if ready is None:
        yield {"reason": "NotReconciled", "message": "no operator has reconciled the policy"}
    elif ready["status"] != "True":
        yield {"reason": ready["reason"], "message": ready["message"]}
    for kind in dict.fromkeys([*(status.get("warnings") or ()), *({"Paused"} & set(conditions))]):
        yield {"reason": kind, "message": conditions.get(kind, {}).get("message", "")}
    if keys := status.get("blockedKeys"):
        yield {"reason": BLOCKED_KEYS, "message": counted(len(keys), "blocked key")}
    if dead := (status.get("backlog") or {}).get("deadLetter"):
        yield {"reason": DEAD_LETTERS, "message": counted(dead, "dead letter")}


def _connections(
    cluster: Cluster, flags: ClusterFlags, items: Sequence[PolicyStatus]
) -> dict[str, ConnectionStatus]:
    """Read all connections with `-A`, else those of *items*; one that may not be read is absent."""
    if flags.all_namespaces:
        states = map(connection_status, cluster.list(resources.CONNECTIONS, None))
        return {f"{state['namespace']}/{state['name']}": state for state in states}
    states_by_name = {}
    for name in sorted({item["connection"] for item in items}):
        with suppress(NotPermittedError, ObjectNotFoundError):
            states_by_name[name] = connection_status(
                cluster.get(resources.CONNECTIONS, *name.split("/", maxsplit=1))
            )
    return states_by_name


def connection_status(body: Body) -> ConnectionStatus:
    """Return the state of a BrokerConnection for `status`."""
    status = body.get("status") or {}
    ready = conditions_of(body).get("Ready") or {}
    return {
        "namespace": body["metadata"]["namespace"],
        "name": body["metadata"]["name"],
        "ready": ready.get("status", "Unknown"),
        "reason": ready.get("reason", "NotReconciled"),
        "message": ready.get("message", "no operator has reconciled the connection"),
        "brokerVersion": status.get("brokerVersion"),
        "operatorVersion": status.get("operatorVersion"),
        "policies": status.get("policies"),
        "warnings": list(status.get("warnings") or ()),
    }


def needs_attention(connection: ConnectionStatus) -> bool:
    """Return True if a connection is not ready, or has warnings."""
    return connection["ready"] != "True" or bool(connection["warnings"])


def _row(item: PolicyStatus, at: datetime) -> Iterator[object]:
    yield item["namespace"]
    yield item["name"]
    yield {"True": "yes", "False": "no"}.get(item["ready"], "?")
    yield from (item["waiting"], item["due"], item["deadLetters"], item["deadLettersLastHour"])
    yield age_of(item["oldestDeadLetterTime"], at)
    yield time_until(item["expiryTime"], at)
    yield item["connection"]
    yield item["topic"]
    yield age_of(item["observedTime"], at)
    yield "; ".join(map(_shortly, item["attention"])) or MISSING


def _shortly(attention: Attention) -> str:
    if attention["reason"] in {BLOCKED_KEYS, DEAD_LETTERS}:
        return attention["message"]
    if attention["reason"] in {"Paused", "NotReconciled", "BrokerUnreachable"}:
        return attention["reason"]
    return f"{attention['reason']}: {attention['message']}"


def _connection_row(connection: ConnectionStatus) -> list[object]:
    name = f"{connection['namespace']}/{connection['name']}"
    version = connection["brokerVersion"] or MISSING
    return [name, version, connection["policies"], _state_of(connection)]


def _state_of(connection: ConnectionStatus) -> str:
    ready = connection["ready"] == "True"
    state = "ready" if ready else f"{connection['reason']}: {connection['message']}"
    return "; ".join([state, *connection["warnings"]])


@click.command()
@policy_argument
@output_option("wide", "json", "yaml", "jsonl", "name")
@cluster_options
def history(policy: str, output: str | None, flags: ClusterFlags) -> None:
    """Show past and running Replays of a policy, the latest first.

    The status of the policy has the last ten results; they outlive the Replays.
    """
    cluster = Cluster(flags)
    records = history_of(cluster, cluster.namespace, policy)
    if output in FORMATS:
        names = [f"replay.redrive.io/{record['name']}" for record in records]
        print_document(document("ReplayHistory", records), output, names)
        return
    if not records:
        click.echo(f"policy {policy} has had no Replay")
        return
    at = now()
    rows = [
        [
            record["name"],
            record["mode"],
            record["result"] or record["phase"],
            record["moved"],
            record["refused"],
            record["deadAgain"],
            f"{age_of(record['completionTime'], at)} ago" if record["completionTime"] else None,
            record["requestedBy"] or MISSING,
            record["approvedBy"] or MISSING,
            record["ticket"] or MISSING,
            record["reason"] or "",
        ]
        for record in records
    ]
    click.echo("\n".join(table(_HISTORY_COLUMNS, rows, output == "wide")))


def history_of(cluster: Cluster, namespace: str, policy: str) -> list[ReplayRecord]:
    """Read the Replays of a policy, and the results of those that were deleted, latest first.

    Raises:
        ObjectNotFoundError: the policy does not exist.
    """
    owner = cluster.get(resources.POLICIES, namespace, policy)
    replays = cluster.list(resources.REPLAYS, namespace, fields=f"spec.policyRef.name={policy}")
    replays.sort(key=lambda replay: str(replay["metadata"]["creationTimestamp"]), reverse=True)
    uids, kind = {replay["metadata"]["uid"] for replay in replays}, resources.POLICIES.kind
    records = [replay_record(it) for it in replays if resources.PolicyKey.of(it).kind == kind]
    records += [
        _deleted_record(namespace, policy, result)
        for result in (owner.get("status") or {}).get("replays") or ()
        if result["uid"] not in uids
    ]
    # Running ones are the first: "~" is greater than any time.
    return sorted(records, key=lambda record: record["completionTime"] or "~", reverse=True)


def replay_record(replay: Body) -> ReplayRecord:
    """Return the state of a Replay for `history`."""
    metadata, spec, status = replay["metadata"], replay["spec"], replay.get("status") or {}
    run = status.get("run") or {}
    counts = run.get("counts") or {}
    return {
        "namespace": metadata["namespace"],
        "name": metadata["name"],
        "policy": spec["policyRef"]["name"],
        "mode": spec.get("mode") or "Run",
        "phase": status.get("phase") or "Pending",
        "result": conditions_of(replay).get("Ready", {}).get("reason", ""),
        "moved": counts.get("moved"),
        "refused": counts.get("refused"),
        "doubled": counts.get("doubled"),
        "deadAgain": (run.get("outcome") or {}).get("deadAgain"),
        "completionTime": status.get("completionTime"),
        "requestedBy": (metadata.get("annotations") or {}).get(resources.REQUESTED_BY),
        "approvedBy": (run.get("approval") or {}).get("approvedBy"),
        "reason": spec.get("reason"),
        "ticket": spec.get("ticket"),
    }


def _deleted_record(namespace: str, policy: str, result: Body) -> ReplayRecord:
    return {
        "namespace": namespace,
        "name": result["name"],
        "policy": policy,
        "mode": "Run",
        "phase": result["phase"],
        "result": result["result"],
        "moved": result.get("moved"),
        "refused": result.get("refused"),
        "doubled": result.get("doubled"),
        "deadAgain": result.get("deadAgain"),
        "completionTime": result["completionTime"],
        "requestedBy": result.get("author"),
        "approvedBy": result.get("approvedBy"),
        "reason": result.get("reason"),
        "ticket": result.get("ticket"),
    }
