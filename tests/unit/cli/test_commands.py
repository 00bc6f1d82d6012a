"""Commands without a cluster: help, usage, errors and tables; the reference of metrics."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from itertools import count, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import click
import pytest
import yaml
from click.testing import CliRunner

import redrive
from redrive import __version__
from redrive.api import Body
from redrive.api.replay import Confirmation
from redrive.cli import output, replays
from redrive.cli import replay as replay_command
from redrive.cli.cluster import ClusterError, role_with
from redrive.cli.frame import COMMAND_GROUP, ClusterFlags
from redrive.cli.main import COMMANDS, main
from redrive.cli.output import Live, TableColumn, age, clean, cut, local_time, table, utc_option
from redrive.cli.policies import policy_status
from redrive.cli.replay import TimeOrAge, _after, selection
from redrive.cli.replays import Start, attach, exit_code_of, progress, result_text
from redrive.errors import RedriveError
from redrive.kube.resources import POLICIES, REPLAYS, ROCKETMQ_POLICIES, Resource

KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: shop
contexts: [{name: shop, context: {cluster: shop, user: ann}}]
clusters: [{name: shop, cluster: {server: "http://127.0.0.1:9"}}]
users: [{name: ann, user: {}}]
"""
CLICK_COMMANDS = [name for name, command in COMMANDS.items() if command.extra == "cli"]


@pytest.mark.parametrize("name", CLICK_COMMANDS)
def test_command_of_the_table_shows_its_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"Usage: redrive {name} ")
    assert "--help" in shown


def test_plugin_prints_the_name_it_was_called_by(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/kubectl-redrive"])
    assert main(["status", "--help"]) == 0
    assert capsys.readouterr().out.startswith("Usage: kubectl redrive status ")
    flags = ClusterFlags("shop", "prod eu", user="ann", groups=("a", "b"))
    hint = flags.hint("follow", "x")
    options = "-n shop --context 'prod eu' --as ann --as-group a --as-group b"
    assert hint == f"kubectl redrive follow x {options}"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "nothing is selected; use --cause, --id,"),
        (["--all", "--limit", "3"], "--all excludes other selections: limit"),
        (["--since", "yesterday"], "'yesterday' is no time; write 2h, or 2026-11-20T10:00:00Z"),
        (["--since", "99999999d"], "'99999999d' is no time; write 2h, or"),
        (["--until", "99999999d"], "'99999999d' is no time; write 2h, or"),
        (["--since", "-1h"], "'-1h' is no time; write 2h, or"),
        (["--since", "0000-01-01T00:00:00Z"], "'0000-01-01T00:00:00Z' is no time; write 2h, or"),
        (["--since", ""], "'' is no time; write 2h, or 2026-11-20T10:00:00Z"),
        (["--cause", "", "--yes"], "--cause is empty; leave it out, or name a cause"),
        (["--cause", "E", "--cause", "", "--yes"], "--cause is empty; leave it out"),
        (["--ids-from", os.devnull, "--limit", "9", "--yes"], "the file of --ids-from has no id"),
        (["--ids-from", os.devnull, "--id", "1:2", "--yes"], "the file of --ids-from has no id"),
        (["--ids-from", os.devnull, "--all", "--yes"], "the file of --ids-from has no id"),
        (["--all"], "there is no terminal to ask at; confirm with --yes, or use --plan"),
    ],
)
def test_replay_without_valid_selection_exits_with_2(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", "orders", *arguments]) == 2
    captured = capsys.readouterr()
    assert problem in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("duration", ["inf", "nan", "1e18", "-1h", "soon", "1e9d"])
def test_impossible_duration_is_refused(duration: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ignore-outage", "orders", "--for", duration]) == 2
    problem = f"{duration!r} is no duration; write one like 30s, 2m or 1h"
    assert problem in capsys.readouterr().err


class PlanningCluster:
    """A cluster with a policy of each kind, whose plans and reviews have some messages left."""

    messages = 3
    context, namespace, user = "shop", "shop", "jan"

    def __init__(self, _: ClusterFlags) -> None:
        self.created: list[Body] = []
        self.patched: list[Body] = []

    def get(self, kind: Resource, namespace: str, name: str) -> Body:
        assert kind in (POLICIES, ROCKETMQ_POLICIES)
        return {"metadata": {"namespace": namespace, "name": name, "uid": "u"}, "spec": {}}

    def create(self, _: Resource, body: Body, *, dry_run: str | None = None) -> Body:
        assert dry_run is None
        name = f"orders-{len(self.created)}"
        run = {"counts": {"left": self.messages, "scanned": 3, "matched": 3}}
        phase = "Running" if body["spec"].get("mode") == "Review" else "Completed"
        status = {"phase": phase, "run": run}
        self.created.append({**body, "metadata": {"name": name}, "status": status})
        return self.created[-1]

    def patch(self, _: Resource, body: Body, fields: Body) -> Body:
        self.patched.append(fields["spec"])
        return body


def test_replay_of_rocketmq_moves_what_it_has_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = PlanningCluster(ClusterFlags())
    answers = [False, True]
    monkeypatch.setattr(replay_command, "Cluster", lambda _: cluster)
    monkeypatch.setattr(replay_command, "planned", lambda _, plan: plan)
    monkeypatch.setattr(replay_command, "confirmed", lambda *_, **__: answers.pop(0))
    monkeypatch.setattr(replay_command, "attach", lambda *_, **__: 0)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    arguments = ["replay", "rmqpol/orders", "--all", "--target", "Source"]
    assert main(arguments) == 1
    assert "nothing was moved" in capsys.readouterr().err
    assert main(arguments) == 0
    canceled, confirmed = cluster.patched
    assert (canceled, confirmed["mode"]) == ({"cancel": True}, "Run")
    (_, review) = cluster.created
    assert review["spec"]["mode"] == "Review"
    assert review["spec"]["policyRef"] == {"kind": "RocketMQRetryPolicy", "name": "orders"}
    assert "followFor" not in review["spec"]
    alone = ["replay", "rmqpol/orders", "--id", "broker-a:0:17", "--target", "repair", "--yes"]
    assert main(alone) == 0
    assert cluster.created[-1]["spec"]["select"] == {"ids": ["broker-a:0:17"]}
    assert cluster.created[-1]["spec"]["target"] == {"type": "Topic", "topic": "repair"}


@pytest.mark.parametrize(
    ("lifetime", "removed"),
    [
        (replay_command.REVIEW_LIFETIME, {"deadline": None, "ttlAfterFinished": None}),
        ({"ttlAfterFinished": "7d"}, {}),
        ({"deadline": "10m", "ttlAfterFinished": "1h"}, {"ttlAfterFinished": None}),
        ({}, {}),
    ],
    ids=["of the command", "of Argo CD", "of a manifest", "none"],
)
def test_confirmation_keeps_the_times_of_others(
    lifetime: dict[str, str], removed: dict[str, None], monkeypatch: pytest.MonkeyPatch
) -> None:
    review = {
        "metadata": {"namespace": "shop", "name": "fix"},
        "spec": {"policyRef": {"name": "orders"}, "mode": "Review", **lifetime},
        "status": {
            "conditions": [{"type": "InReview", "status": "True"}],
            "run": {"counts": {"left": 3}},
        },
    }

    class ReviewingCluster(PlanningCluster):
        def get(self, kind: Resource, namespace: str, name: str) -> Body:
            return review if kind is REPLAYS else super().get(kind, namespace, name)

    cluster = ReviewingCluster(ClusterFlags())
    monkeypatch.setattr(replay_command, "Cluster", lambda _: cluster)
    monkeypatch.setattr(replay_command, "confirmed", lambda *_, **__: True)
    monkeypatch.setattr(replay_command, "attach", lambda *_, **__: 0)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert main(["follow", "fix"]) == 0
    assert cluster.patched == [{**removed, "mode": "Run"}]


@pytest.mark.parametrize("policy", ["orders", "rmqpol/orders"])
@pytest.mark.parametrize("confirmation", [[], ["--yes"]])
def test_replay_with_plan_moves_nothing_even_with_yes(
    policy: str, confirmation: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = PlanningCluster(ClusterFlags())
    monkeypatch.setattr(replay_command, "Cluster", lambda _: cluster)
    monkeypatch.setattr(replay_command, "planned", lambda _, plan: plan)
    assert main(["replay", policy, "--all", "--target", "Source", "--plan", *confirmation]) == 0
    (plan,) = cluster.created
    assert plan["spec"]["mode"] == "Plan"


@pytest.mark.parametrize(
    ("arguments", "messages", "code"),
    [(["--plan"], 3, 0), (["--plan"], 0, 0), ([], 0, 0), ([], 3, 1)],
    ids=["plan", "empty plan", "empty review", "declined"],
)
def test_plan_is_printed_in_the_format_of_the_option(
    arguments: list[str], messages: int, code: int,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    cluster = PlanningCluster(ClusterFlags())
    cluster.messages = messages
    monkeypatch.setattr(replay_command, "Cluster", lambda _: cluster)
    monkeypatch.setattr(replay_command, "planned", lambda _, plan: plan)
    monkeypatch.setattr(replay_command, "confirmed", lambda *_, **__: False)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for form in ("json", "yaml"):
        assert main(["replay", "orders", "--all", *arguments, "-o", form]) == code
        assert yaml.safe_load(capsys.readouterr().out) == cluster.created[-1]
    assert main(["replay", "orders", "--all", *arguments, "-o", "name"]) == code
    assert capsys.readouterr().out == "replay.redrive.io/orders-2\n"


@pytest.mark.parametrize(
    ("mode", "command"),
    [
        ("Plan", "kubectl delete replay fix -n shop"),
        (
            "Review",
            """kubectl patch replay fix -n shop --type merge -p '{"spec": {"cancel": true}}'""",
        ),
    ],
)
def test_error_of_a_plan_is_kept_if_it_remains(
    mode: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise ClusterError("the API server does not answer", remedy="wait")

    stalled = {"type": "Stalled", "status": "True"}
    plan = waiting("ReplayIdentityMissing") | {"spec": {"mode": mode}}
    plan["status"]["conditions"].append(stalled)
    states = repeat(SimpleNamespace(objects=(plan,), error=None))
    calls = {"states": lambda *_: states, "delete": refuse, "patch": refuse}
    cluster = SimpleNamespace(flags=ClusterFlags(), **calls)
    with pytest.raises(RedriveError, match="the plan can't start; got 'ReplayIdentityMissing"):
        replay_command.planned(cast("Any", cluster), plan)
    error = capsys.readouterr().err
    assert "warning: the Replay shop/fix was not " in error
    assert error.endswith(f"; got the API server does not answer; wait; run {command}\n")


@pytest.mark.parametrize("spec", [{}, {"target": None}, {"target": {}}])
def test_plan_without_target_shows_the_default(spec: Body) -> None:
    """A Replay in review that came from Git may name none."""
    plan = {"spec": spec, "status": {"run": {"counts": {"left": 1}}}}
    fields = dict(replay_command.plan_fields(plan, {"status": {"retryTopic": "retries"}}))
    assert fields["target"] == "Retry   retries"
    assert dict(replay_command.plan_fields(plan, {}))["target"] == "Retry"


@pytest.mark.parametrize(
    ("replay", "safety"), [(None, "Idempotent"), ({"safety": "ReconcileFirst"}, "ReconcileFirst")]
)
def test_plan_shows_the_safety_of_the_policy(replay: Body | None, safety: str) -> None:
    plan = {"spec": {}, "status": {"run": {"counts": {"left": 1}}}}
    policy = {"kind": "RetryPolicy", "spec": {"replay": replay}}
    assert dict(replay_command.plan_fields(plan, policy))["safety"] == safety
    other = {"kind": "RocketMQRetryPolicy", "spec": {}}  # which has no such rule
    assert "safety" not in dict(replay_command.plan_fields(plan, other))


def test_replay_offers_all_confirmations_of_the_api() -> None:
    types = {option.name: option.type for option in replay_command.replay.params}
    offered = types["confirmations"]
    assert isinstance(offered, click.Choice)
    assert set(offered.choices) == set(Confirmation)


def test_bound_of_a_plan_includes_the_current_millisecond() -> None:
    """A bound in whole seconds would leave out dead letters of the last second."""
    instant = datetime(2026, 11, 27, 3, 0, 0, 999_500, tzinfo=UTC)
    assert _after(instant) == "2026-11-27T03:00:01.000Z"


@pytest.mark.parametrize("command", ["causes", "peek", "export", "report"])
def test_empty_list_of_ids_selects_no_other_messages(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The left side of a pipe has failed, or has found none."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n \n")))
    target = ["--to", "archive"] if command in {"export", "report"} else []
    arguments = ["--ids-from", "-", "--since", "2h", "--reveal", *target]
    assert main([command, "orders", *arguments]) == 2
    assert "the file of --ids-from has no id; check the command" in capsys.readouterr().err


def test_status_of_an_unset_variable_is_not_that_of_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kubeconfig = tmp_path / "config"
    kubeconfig.write_text(KUBECONFIG, "utf-8")
    assert main(["status", "", "--refresh", "--kubeconfig", str(kubeconfig)]) == 1
    assert "no RetryPolicy can have this name" in capsys.readouterr().err


def test_selection_takes_ids_of_a_file_and_fingerprints() -> None:
    options: dict[str, Any] = {
        "causes": ("WarehouseDown", "none recorded", "0f4a9c31d2be7755"),
        "ids": ("1:2",),
        "ids_from": io.StringIO("1:2\n\n3:4:0:0\n"),
        "keys": (),
        "since": None,
        "until": None,
        "where": None,
        "limit": 5,
        "selects_all": False,
    }
    assert selection(options) == {
        "causes": ["WarehouseDown", ""],
        "fingerprints": ["0f4a9c31d2be7755"],
        "ids": ["1:2", "3:4:0:0"],
        "limit": 5,
    }
    assert options == {}


def test_narrow_table_drops_columns_and_cuts_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = (
        TableColumn("NAME"),
        TableColumn("DEAD", right=True, dropped=1),
        TableColumn("OLDEST", right=True, dropped=2),
        TableColumn("TOPIC", wide=True),
        TableColumn("ATTENTION"),
    )
    rows = [["orders", 140, "3h", "t", "RetryStorm: \x1b[31m61 %\nof deliveries were retries"]]
    monkeypatch.setattr(output, "width", lambda: 46)
    assert table(columns, rows) == [
        "NAME    DEAD  OLDEST  ATTENTION",
        "orders   140      3h  RetryStorm:  [31m61 % o…",
    ]
    monkeypatch.setattr(output, "width", lambda: 38)
    assert table(columns, rows)[0] == "NAME    DEAD  ATTENTION"
    monkeypatch.setattr(output, "width", lambda: 33)
    assert table(columns, rows)[0] == "NAME    ATTENTION"
    assert table(columns, rows, wide=True)[0] == "NAME    DEAD  OLDEST  TOPIC  ATTENTION"


@pytest.mark.parametrize("width", [46, 40, 30])
def test_last_column_is_wrapped_and_never_cut(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    columns = (TableColumn("NAME"), TableColumn("ATTENTION", wrapped=True))
    message = "TopicNotFound: create persistent://shop/prod/refunds-DLQ, or let the operator do it"
    rows = [["orders", message], ["refunds", "none"]]
    monkeypatch.setattr(output, "width", lambda: width)
    lines = table(columns, rows)
    assert any("persistent://shop/prod/refunds-DLQ," in line for line in lines) is (width > 30)
    assert all(len(line) <= width for line in lines)
    assert "".join(lines[1:-1]).replace(" ", "") == f"orders{message}".replace(" ", "")
    assert lines[-1] == "refunds  none"
    indent = 9 if width == 46 else 4
    assert all(line[:indent].isspace() and line[indent] != " " for line in lines[2:-1])
    assert table(columns, rows, wide=True)[1] == f"orders   {message}"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59, "59s"), (60, "1m"), (41 * 60 + 5, "41m"), (7_200, "2h"), (90_000, "1d")],
)
def test_age_has_one_unit(seconds: float, text: str) -> None:
    assert age(seconds) == text


def test_time_of_another_day_has_its_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC-2")
    time.tzset()
    at = datetime(2026, 11, 27, 3, 0, tzinfo=UTC)
    assert local_time("2026-11-26T23:30:00Z", at) == "01:30:00"
    assert local_time("2026-11-26T21:30:00Z", at) == "2026-11-26 23:30"

    @click.command()
    @utc_option
    def command() -> None:
        click.echo(local_time("2026-11-26T23:30:00Z", at))

    assert CliRunner().invoke(command, []).output == "01:30:00\n"
    assert CliRunner().invoke(command, ["--utc"]).output == "2026-11-26 23:30Z\n"
    monkeypatch.undo()
    time.tzset()


def test_text_of_objects_loses_control_characters() -> None:
    assert clean("a\x1b[2J\r\nb\u202ec") == "a [2J  b c"


def test_output_without_terminal_has_changed_lines_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    live = Live(sys.stderr, report_seconds=0)
    live.show(["plans", "  submitted"])
    live.show(["plans", "  submitted"])
    live.show(["plans", "  running"], final=True)
    assert capsys.readouterr().err == "plans\n  submitted\n  running\n"


@pytest.mark.parametrize(
    ("verb", "resource", "role"),
    [
        ("list", "replays", "redrive-viewer"),
        ("create", "replays", "redrive-responder"),
        ("patch", "retrypolicies", "redrive-responder"),
        ("create", "retrypolicies", "redrive-editor"),
        ("create", "replayapprovals", "redrive-approver"),
        ("update", "brokerconnections", "redrive-admin"),
    ],
)
def test_role_of_a_verb_is_named(verb: str, resource: str, role: str) -> None:
    assert role_with(verb, resource) == role


def replay(phase: str, **status: Any) -> dict[str, Any]:  # noqa: ANN401  fields of the API
    ends = {"Completed": "Complete", "Failed": "Failed"}
    conditions = [{"type": "Ready", "status": "False", "reason": "TooManyRuns", "message": "wait"}]
    if phase in ends:
        conditions.append({"type": ends[phase], "status": "True", "reason": "R", "message": "m"})
    return {"spec": {}, "status": {"phase": phase, "conditions": conditions, **status}}


EXPIRED = {
    "phase": "Completed",
    "conditions": [
        {"type": "Ready", "status": "False", "reason": "ReviewExpired", "message": "late"}
    ],
}
COUNTS = {"matched": 120, "moved": 118, "refused": 2}
AFTERWARDS = "of the moved ones 110 handled, 2 waiting, 6 dead again"
OUTCOME = {"handled": 110, "waiting": 2, "deadAgain": 6}


@pytest.mark.parametrize(
    ("body", "text", "code"),
    [
        (replay("Completed", run={"counts": {"moved": 5}}), "Complete: 5 moved, 0 refused", 0),
        (replay("Completed", run={"counts": COUNTS}), "Complete: 118 moved, 2 refused", 3),
        (
            replay("Completed", run={"counts": {"moved": 9, "doubled": 4}}),
            "Complete: 9 moved, 0 refused, 4 perhaps twice",
            3,
        ),
        (
            replay("Completed", run={"counts": dict.fromkeys(COUNTS, 0), "outcome": {}}),
            "Complete: no dead letter is selected; nothing was moved",
            0,
        ),
        (replay("Failed", run={"counts": COUNTS}), "Failed: R: m", 1),
        (
            {"spec": {"mode": "Review"}, "status": EXPIRED},
            "Complete: the review was not confirmed in time; nothing was moved",
            1,
        ),
        (
            replay("Completed", run={"counts": {"moved": 118}, "outcome": OUTCOME}),
            f"Complete: 118 moved, 0 refused; {AFTERWARDS}",
            3,
        ),
    ],
)
def test_result_of_a_replay_decides_the_exit_code(
    body: dict[str, Any], text: str, code: int
) -> None:
    assert (result_text(body), exit_code_of(body)) == (text, code)


def waiting(reason: str) -> dict[str, Any]:
    """Return a Replay that is not launched for a reason."""
    ready = {"type": "Ready", "status": "False", "reason": reason, "message": "add it"}
    metadata, status = {"name": "fix", "namespace": "shop"}, {"conditions": [ready]}
    return {"metadata": metadata, "spec": {}, "status": status}


def test_object_that_can_not_start_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at = count(0, 10)
    monkeypatch.setattr(replays, "time", SimpleNamespace(monotonic=lambda: next(at)))
    missing, queued = waiting("ServiceAccountNotFound"), waiting("TooManyRuns")
    start = Start()
    assert [start.problem(body) for body in (missing, queued, missing, missing, missing)] == [
        *[""] * 4,
        "ServiceAccountNotFound: add it",
    ]
    start = Start()
    assert [start.problem(queued) for _ in range(99)] == [""] * 99
    unseen = [start.problem({}) for _ in range(8)]
    assert unseen[-2:] == ["", "no operator has reconciled it; run `kubectl redrive doctor`"]
    states = repeat(SimpleNamespace(objects=(missing,), error=None))
    cluster = cast("Any", SimpleNamespace(states=lambda *_: states))
    assert attach(cluster, ClusterFlags(), missing, timeout=None, output=None) == 4
    error = capsys.readouterr().err
    starts = "the Replay starts when this is fixed. Follow it: "
    assert f"ServiceAccountNotFound: add it\n{starts}" in error


def test_waiting_replay_shows_its_reason_after_5_s() -> None:
    assert list(progress(replay("Pending"), 1)) == ["  pending"]
    assert list(progress(replay("Pending"), 5)) == ["  pending", "  TooManyRuns: wait"]
    assert list(progress({"spec": {}}, 5)) == ["  pending", "  no operator has reconciled it"]
    running = replay("Running", run={"counts": COUNTS, "ratePerMinute": 1860, "remaining": "4s"})
    assert next(progress(running)) == "  moved    118 of 120   refused 2   31/s   about 4s left"
    running = replay("Running", run={"counts": {"matched": 9, "moved": 4, "doubled": 3}})
    assert next(progress(running)) == "  moved    4 of 9   perhaps twice 3"


def test_policy_that_was_not_reconciled_needs_attention() -> None:
    spec = {"connectionRef": {"name": "main"}, "topic": "t", "subscription": "s"}
    status = policy_status({"metadata": {"namespace": "shop", "name": "x"}, "spec": spec})
    assert [attention["reason"] for attention in status["attention"]] == ["NotReconciled"]
    assert status["connection"] == "shop/main"


def test_status_shows_times_of_any_producer_and_person() -> None:
    spec = {"connectionRef": {"name": "main"}, "topic": "t", "subscription": "s"}
    spec["deadLetter"] = {"messageTTL": "7d"}
    end = "4711:3:0@9999-12-31T23:59:59"
    annotations = {"redrive.io/dead-letter-now": f"{end}-23:59 {end}+23:59"}
    metadata = {"namespace": "shop", "name": "x", "annotations": annotations}
    backlog = {"oldestDeadLetterTime": "9999-12-31T00:00:00Z"}
    status = policy_status({"metadata": metadata, "spec": spec, "status": {"backlog": backlog}})
    assert status["expiryTime"] is None
    assert [one["endTime"] for one in status["deadLetterNow"]] == ["9999-12-31T00:00:59Z"]


def test_age_of_centuries_is_a_time_of_the_api() -> None:
    text = TimeOrAge().convert("730000d", None, None)
    assert re.fullmatch(r"00\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", text)


def test_wide_characters_take_two_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = TableColumn("KEY"), TableColumn("DEAD", right=True), TableColumn("CAUSE")
    rows = [["订单", 1, "超时错误"], ["e\u0301", 2, "x"]]
    assert table(columns, rows) == [
        "KEY   DEAD  CAUSE",
        "订单     1  超时错误",
        "e\u0301        2  x",
    ]
    monkeypatch.setattr(output, "width", lambda: 17)
    assert table(columns, rows)[1:] == ["订单     1  超时…", "e\u0301        2  x"]
    wrapped = [TableColumn("KEY"), TableColumn("CAUSE", wrapped=True)]
    monkeypatch.setattr(output, "width", lambda: 32)
    assert table(wrapped, [["订单", "超时错误 超时错误 超时错误 x"]]) == [
        "KEY   CAUSE",
        "订单  超时错误 超时错误 超时错误",
        "      x",
    ]
    assert cut("超时错误", 8) == "超时错误"
    assert cut("超时错误", 7) == "超时错…"
    assert cut("超时错误", 6) == "超时…"


def test_group_completes_the_names_of_commands() -> None:
    context = click.Context(COMMAND_GROUP)
    assert COMMAND_GROUP.list_commands(context) == CLICK_COMMANDS
    assert COMMAND_GROUP.get_command(context, "operator") is None


def test_version_of_the_program_needs_no_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["version", "--kubeconfig", str(tmp_path / "absent")]) == 1
    shown = capsys.readouterr()
    assert shown.out.splitlines()[1].split() == ["redrive", __version__]
    assert "absent" in shown.err


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does."""
    root = str(Path(redrive.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-m", "redrive", *arguments],
        env=os.environ | {"PYTHONPATH": root} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_user_error_prints_one_line_and_exits_with_1(tmp_path: Path) -> None:
    process = run("operator", KUBECONFIG=str(tmp_path / "absent"))
    assert process.returncode == 1
    line = process.stderr.splitlines()[-1]
    assert line.startswith("redrive: NoCluster: no Kubernetes cluster is configured; got ")
    assert line.endswith("; set KUBECONFIG, or run in a cluster")
    assert "Traceback" not in process.stderr


def test_operator_for_an_unset_namespace_serves_none(tmp_path: Path) -> None:
    process = run("operator", "--namespace", "", KUBECONFIG=str(tmp_path / "absent"))
    assert process.returncode == 2
    assert "argument --namespace: it is empty; leave it out to serve all" in process.stderr


@pytest.mark.parametrize("lease", ["redrive", "redrive/", "/operator"])
def test_incomplete_lease_name_is_refused(lease: str, tmp_path: Path) -> None:
    process = run("operator", "--lease", lease, KUBECONFIG=str(tmp_path / "absent"))
    assert process.returncode == 2
    assert f"argument --lease: not written NAMESPACE/NAME: {lease!r}" in process.stderr


def test_help_lists_the_subcommands() -> None:
    process = run("--help")
    assert process.returncode == 0
    assert "operator" in process.stdout


REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
# In a process of its own: here, other tests have loaded the metrics of consumers too.
SHOWN = """
import json
from prometheus_client import REGISTRY
from redrive.cli import operator
from redrive.kube.observability import counting_objects
from redrive.kube.cache import Cache
from redrive.kube.context import wall_clock
from redrive.provision.metrics import TopicMetrics
from redrive.replay.controller import metrics as replay_metrics
TopicMetrics(wall_clock)
with counting_objects({}), replay_metrics.counting(Cache(), {}):
    families = list(REGISTRY.collect())
print(json.dumps([family.name + "_info" * (family.type == "info") for family in families]))
"""


def test_every_metric_of_the_operator_is_documented() -> None:
    environment = {"PYTHONPATH": str(Path(redrive.__file__).parents[1])}
    output = subprocess.run(
        [sys.executable, "-c", SHOWN], env=environment, check=True, text=True, capture_output=True
    ).stdout
    shown = {name for name in json.loads(output) if name.startswith("redrive_")}
    rows = re.findall(r"^\| `(redrive_\w+)` \|", REFERENCE.read_text("utf-8"), re.MULTILINE)
    assert {name.removesuffix("_total") for name in rows} == shown


def test_missing_extra_names_the_installation(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise ModuleNotFoundError(name='click')", "utf-8")
    root = Path(redrive.__file__).parents[1]
    process = run("status", PYTHONPATH=f"{tmp_path}:{root}")
    assert (process.returncode, process.stdout) == (1, "")
    (line,) = process.stderr.splitlines()
    assert line.startswith("redrive: MissingExtra: `redrive status` needs redrive[cli]: ")
    assert line.endswith("; pip install 'redrive[cli]'")


def test_unknown_command_exits_with_2() -> None:
    process = run("stats")
    assert process.returncode == 2
    assert process.stderr == "error: No such command 'stats'.\nhelp: redrive --help\n"


def test_closed_reader_ends_the_command_without_a_message() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "redrive", "--help"]
    ended = subprocess.run(command, check=False, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, "")
