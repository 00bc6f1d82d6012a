"""Commands at a real API server, with real kubeconfigs and rights."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

import redrive
from redrive.cli import cluster as cluster_module
from redrive.cli import diff, policy_actions
from redrive.cli.cluster import CONFLICT, ClusterError
from redrive.cli.cluster import Cluster as Client
from redrive.cli.main import main
from redrive.kube.resources import CONNECTIONS, INSPECTIONS, POLICIES, REPLAYS
from sandbox import SOURCE_ROOT, builds
from tests.integration.cli.conftest import AT, Shop, condition, put
from tests.support.commands import SCHEMAS, check
from tests.support.manifests import manifest
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("control plane")
ROOT = Path(__file__).parents[3]
DEAD_LETTERS = "persistent://shop/prod/orders-fulfilment-DLQ"


READY = condition("Ready", "True", "Provisioned")
BLOCKED = {
    "keyHash": "9f31c2e07b1d",
    "sinceTime": AT,
    "messageID": "4802:11:1",
    "cause": "TimeoutError",
    "failures": 4,
    "behind": 800,
}


@pytest.fixture(scope="module", autouse=True)
def _objects(client: Client) -> None:
    status: dict[str, Any] = {
        "conditions": [READY],
        "operatorVersion": redrive.__version__,
        "policies": 2,
    }
    put(client, CONNECTIONS, "main", status | {"brokerVersion": "4.0.8"})
    backlog = {"retry": 12, "retryDue": 3, "deadLetter": 0, "observedTime": AT}
    put(client, POLICIES, "quiet", {"conditions": [READY], "backlog": backlog})
    storm = condition("RetryStorm", "True", "RetryStorm", "61 % were retries")
    result = {"name": "gone", "uid": "u", "phase": "Completed", "moved": 4, "author": "ann"}
    result["deadAgain"] = 3
    result |= {"result": "Completed", "completionTime": AT, "ticket": "OPS-1"}
    status = {
        "conditions": [READY, storm],
        "warnings": ["RetryStorm"],
        "backlog": backlog
        | {"deadLetter": 140, "deadLettersLastHour": 9, "oldestDeadLetterTime": AT}
        | {"source": 310, "sourceConsumers": 2, "retryConsumers": 1}
        | {"deadLetterBytes": 430 * 2**20, "deadLetterQuotaBytes": 10 * 2**30},
        "replays": [result],
    }
    status["blockedKeys"] = [BLOCKED, BLOCKED | {"keyHash": "a" * 12, "behind": 6}]
    topics = {"deadLetterTopic": DEAD_LETTERS}
    put(client, POLICIES, "orders", status | topics, deadLetter={"messageTTL": "30d"})


def test_status_shows_policies_that_need_attention(shop: Shop) -> None:
    lines = shop.run("status", "--exit-code", code=3).splitlines()
    assert lines[0].startswith(
        f"context sandbox   operator {redrive.__version__}   figures at most "
    )
    assert (
        lines[1].split() == "POLICY READY WAITING DUE DEAD NEW/1H OLDEST EXPIRES ATTENTION".split()
    )
    assert lines[2].startswith("orders  yes         12    3   140       9 ")
    assert lines[2].endswith("RetryStorm: 61 % were retries; 2 blocked keys; 140 dead letters")
    assert lines[3:] == [
        f"1 of 2 policies need attention in namespace {shop.name}",
        f"All of them: redrive status --all -n {shop.name}",
    ]
    assert "quiet" in shop.run("status", "--all")
    one = shop.run("status", "orders")
    assert "  connection   " in one
    assert "  consumers    2 on the source topic, 1 on the retry topic; backlog 310\n" in one
    assert "  waiting      12, of which 3 are due\n" in one
    assert "; 430 MiB of 10 GiB\n" in one
    assert "/main, ready" in one
    assert "last replay  gone  Completed  4 moved, 0 refused, 3 dead again  " in one
    assert f"Causes: redrive causes orders -n {shop.name}\n" in one
    assert "140; 9 came in the last hour; oldest " in one
    assert "2 blocked, the longest for " in one
    assert " by TimeoutError; 806 messages behind\n" in one
    assert f"Blocked keys: redrive keys orders -n {shop.name}\n" in one
    assert "Causes:" not in shop.run("status", "quiet")


def test_keys_show_the_message_that_blocks_them(shop: Shop) -> None:
    lines = shop.run("keys", "orders").splitlines()
    assert lines[0].split() == "KEY SINCE MESSAGE FAILED BEHIND CAUSE".split()
    row = lines[1].split()
    assert [row[0], *row[2:]] == ["9f31c2e07b1d", "4802:11:1", "4", "800", "TimeoutError"]
    free = f"redrive dead-letter orders --origin 4802:11:1 -n {shop.name}"
    assert lines[3:] == [f"Dead-letter one, which frees its key: {free}"]
    assert "keeps no order" in shop.run("keys", "quiet")
    ordered = {"subscriptionType": "KeyShared", "ordering": "PerKey"}
    shop.put(POLICIES, "ledger", {}, **ordered, deadLetter={"sequenced": True})
    assert f": redrive causes ledger -o wide -n {shop.name}\n" in shop.run("keys", "ledger")
    shop.client.delete(POLICIES, shop.client.get(POLICIES, shop.name, "ledger"))


def test_topic_of_a_policy_by_name_is_in_its_status(shop: Shop) -> None:
    error = shop.run("report", "orders", "--to", "absent.html", code=2)
    assert "--to names a destination of the connection, such as archive; got absent.html" in error
    assert f"redrive report orders --to absent.html -n {shop.name} --direct" in error
    error = shop.run("causes", "orders", "--where", "size > 1", "--reveal", code=2)
    assert "error: --where is evaluated by Spark, in a Replay" in error
    error = shop.run("causes", "orders", "--limit", "5", "--reveal", code=2)
    assert "error: --limit of causes is for --direct" in error
    assert f"redrive causes orders --limit 5 --reveal -n {shop.name} --direct" in error
    direct = "--direct --service-url pulsar://127.0.0.1:1 --admin-url http://127.0.0.1:1".split()
    assert "127.0.0.1:1" in shop.run("peek", "orders", *direct, code=1)
    assert "names no topic" in shop.run("causes", "quiet", *direct, code=1)
    assert "there is no RetryPolicy absent" in shop.run("causes", "absent", *direct, code=1)


def test_explain_reads_a_policy_and_its_connection(shop: Shop) -> None:
    lines = shop.run("explain", "orders").splitlines()
    assert lines[0] == f"RetryPolicy {shop.name}/orders"
    assert f"  defaults           of BrokerConnection {shop.name}/main" in lines
    assert any(line.endswith(", then dead-lettered") for line in lines)
    assert "there is no RetryPolicy absent" in shop.run("explain", "absent", code=1)
    assert "NAME selects one of several policies" in shop.run("explain", "orders", "other", code=2)
    assert shop.run("rights", "orders").startswith(f"RetryPolicy {shop.name}/orders\n")
    assert "there is no RetryPolicy absent" in shop.run("rights", "absent", code=1)


def test_status_in_empty_namespace_names_the_next_step(shop: Shop) -> None:
    assert main(["status", "-n", "kube-public"]) == 0
    assert shop.capsys.readouterr().out.splitlines()[-2:] == [
        "no RetryPolicies in namespace kube-public",
        "In all namespaces: redrive status -A",
    ]


def test_lists_are_read_in_pages(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "PAGE", 1)
    names = shop.run("status", "-o", "name", "--all").split()
    assert names == ["retrypolicy.redrive.io/orders", "retrypolicy.redrive.io/quiet"]


def test_verbose_command_shows_its_requests(shop: Shop) -> None:
    assert main(["reconcile", "orders", "--resume", "-v", "-n", shop.name]) == 0
    lines = shop.capsys.readouterr().err.splitlines()
    requests = [(line.split()[0], line.split()[2]) for line in lines]
    assert requests == [("GET", "200"), ("POST", "201"), ("PATCH", "200")]
    policy = f"/namespaces/{shop.name}/retrypolicies/orders?"
    assert policy in lines[0]
    assert "fieldValidation=Strict" in lines[-1]
    assert all(line.endswith(" ms") for line in lines)


def test_missing_right_names_verb_namespace_and_role(shop: Shop) -> None:
    problem = "error: not permitted to {} in namespace {}; you are bob; ask for the role {} there\n"
    assert shop.run("status", "--as", "bob", code=1) == problem.format(
        "list retrypolicies.redrive.io", shop.name, "redrive-viewer"
    )
    error = shop.run("replay", "orders", "--all", "--yes", "--as", "bob", code=1)
    assert error == problem.format("get retrypolicies.redrive.io", shop.name, "redrive-viewer")


def test_missing_object_and_context_are_named(shop: Shop) -> None:
    missing = shop.run("status", "absent", code=1)
    assert missing.startswith(f"error: there is no RetryPolicy absent in namespace {shop.name}; ")
    error = shop.run("status", "--context", "absent", code=1)
    assert error.startswith("error: the kubeconfig can't be used; got ")
    assert "absent" in error


def test_reconcile_annotates_the_policy_with_the_caller(shop: Shop) -> None:
    assert main(["reconcile", "orders", "-n", shop.name]) == 0
    printed = shop.capsys.readouterr()
    assert printed.out == "retrypolicy.redrive.io/orders reconcile requested\n"
    assert printed.err == f"See the result: redrive status orders --refresh -n {shop.name}\n"
    annotations = shop.annotations("orders")
    assert annotations["redrive.io/requested-by"] == "admin"
    assert annotations["redrive.io/reconcile-requested-at"].startswith("20")
    shop.run("reconcile", "orders", "--pause", "--dry-run", "server")
    assert "redrive.io/paused" not in shop.annotations("orders")
    shop.run("reconcile", "orders", "--pause")
    assert shop.annotations("orders")["redrive.io/paused"] == "true"
    assert "--resume" in shop.run("reconcile", "orders", code=1)
    shop.run("reconcile", "orders", "--resume")
    body = shop.client.get(POLICIES, shop.name, "orders")
    assert "redrive.io/paused" not in body["metadata"]["annotations"]
    assert "redrive" in {entry["manager"] for entry in body["metadata"]["managedFields"]}


def test_outages_are_ignored_until_a_time(shop: Shop) -> None:
    assert "choose one of --for and --stop" in shop.run("ignore-outage", "orders", code=2)
    shown = shop.run("ignore-outage", "orders", "--for", "1h")
    end = shop.annotations("orders")["redrive.io/ignore-outages-until"]
    assert shown == f"retrypolicy.redrive.io/orders ignores outages until {end}\n"
    assert 3_500 < datetime.fromisoformat(end).timestamp() - time.time() < 3_601
    shop.run("ignore-outage", "orders", "--stop")
    assert "redrive.io/ignore-outages-until" not in shop.annotations("orders")


def test_dead_letter_requests_end_and_are_withdrawn(shop: Shop) -> None:
    assert "with --origin" in shop.run("dead-letter", "orders", code=2)
    assert "no id of a message" in shop.run("dead-letter", "orders", "--origin", "a b", code=2)
    shown = shop.run("dead-letter", "orders", "--origin", "4711:3:0", "--for", "1h")
    assert shown == "retrypolicy.redrive.io/orders dead-letters 4711:3:0 at the next failure\n"
    shop.run("dead-letter", "orders", "--origin", "4711:4:0")
    (document,) = json.loads(shop.run("status", "orders", "-o", "json"))["items"]
    first, second = document["deadLetterNow"]
    assert [first["origin"], second["origin"]] == ["4711:3:0", "4711:4:0"]
    length = datetime.fromisoformat(first["endTime"]).timestamp() - time.time()
    assert 3_500 < length < 3_601
    assert "dead-letter  4711:4:0 at its next failure, until " in shop.run("status", "orders")
    shop.run("dead-letter", "orders", "--stop", "--origin", "4711:3:0")
    annotation = shop.annotations("orders")["redrive.io/dead-letter-now"]
    assert annotation == f"4711:4:0@{second['endTime']}"
    assert shop.run("dead-letter", "orders", "--stop").endswith(" no request is left\n")
    assert "redrive.io/dead-letter-now" not in shop.annotations("orders")


def test_dead_letter_without_effect_is_refused(shop: Shop) -> None:
    shop.put(POLICIES, "discards", {}, deadLetter={"mode": "Discard"})
    assert "  figures     none yet; read them now: " in shop.run("status", "discards")
    arguments = "dead-letter", "discards", "--origin", "4711:3:0"
    assert "the policy discards dead letters" in shop.run(*arguments, code=1)
    client, body = shop.client, shop.client.get(POLICIES, shop.name, "discards")
    client.patch(POLICIES, body, {"spec": {"deadLetter": None}})
    shop.run("reconcile", "discards", "--pause")
    assert f"redrive reconcile discards --resume -n {shop.name}" in shop.run(*arguments, code=1)
    client.delete(POLICIES, body)


def test_unload_waits_for_the_result_of_the_operator(shop: Shop) -> None:
    name = "redrive.io/unload-requested-at"
    with ThreadPoolExecutor() as pool:
        for error in (None, "the broker forbids it"):
            running = pool.submit(main, ["unload", "quiet", "-n", shop.name])
            wait_until(lambda: name in shop.annotations("quiet"))
            result = {"requestTime": shop.annotations("quiet")[name], "error": error}
            shop.put(POLICIES, "quiet", {"unload": result})
            assert running.result() == (1 if error else 0)
            captured = shop.capsys.readouterr()
            assert ("unloaded the retry topic" in captured.out) is (error is None)
            assert ("was not unloaded; got 'the broker forbids it'" in captured.err) is bool(error)
            body = shop.client.get(POLICIES, shop.name, "quiet")
            shop.client.patch(POLICIES, body, {"metadata": {"annotations": {name: None}}})
            shop.put(POLICIES, "quiet", {"unload": None})
    assert "no result within 1s" in shop.run("unload", "quiet", "--timeout", "1s", code=4)


def test_refreshed_status_has_the_next_figures(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--refresh is for one policy" in shop.run("status", "--refresh", code=2)
    name, later = "redrive.io/reconcile-requested-at", "2026-11-27T01:05:00Z"
    body = shop.client.get(POLICIES, shop.name, "quiet")
    shop.client.patch(POLICIES, body, {"metadata": {"annotations": {name: None}}})
    monkeypatch.setattr(policy_actions, "REFRESH_SECONDS", 180.0)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(main, ["status", "quiet", "--refresh", "-n", shop.name])
        wait_until(lambda: name in shop.annotations("quiet"))
        backlog = {"retry": 7, "deadLetter": 0, "observedTime": later}
        shop.put(POLICIES, "quiet", {"backlog": backlog})
        assert running.result() == 0
    assert "  waiting     7" in shop.capsys.readouterr().out
    shop.put(POLICIES, "quiet", {"backlog": backlog | {"retry": 12, "observedTime": AT}})
    monkeypatch.setattr(policy_actions, "REFRESH_SECONDS", 0.1)
    assert main(["status", "quiet", "--refresh", "-n", shop.name]) == 0
    assert "did not read the figures in time" in shop.capsys.readouterr().err


def test_causes_end_if_no_replay_can_start(shop: Shop) -> None:
    def created() -> list[dict[str, Any]]:
        replays = shop.client.list(REPLAYS, shop.name, fields="spec.policyRef.name=quiet")
        return [dict(replay) for replay in replays if replay["spec"].get("reason") == "causes"]

    with ThreadPoolExecutor() as pool:
        command = ["causes", "quiet", "--where", "size > 1", "-n", shop.name]
        running = pool.submit(main, command)
        wait_until(created)
        (replay,) = created()
        assert replay["spec"]["mode"] == "Plan"
        assert replay["metadata"]["annotations"]["redrive.io/requested-by"] == "admin"
        reason, text = "ReplayIdentityMissing", "no role for replays"
        conditions = [condition(kind, "False", reason, text) for kind in ("Ready", "Stalled")]
        conditions[1]["status"] = "True"
        status = {"phase": "Pending", "conditions": conditions}
        path = f"{REPLAYS.path(shop.name, replay['metadata']['name'])}/status"
        shop.client.request("PATCH", path, {"status": status})
        assert running.result() == 1
    error = shop.capsys.readouterr().err
    assert f"the plan can't start; got '{reason}: {text}'; " in error
    assert not created()


@pytest.mark.parametrize(
    ("options", "doubled", "unrecorded", "missing", "code"),
    [
        ([], 0, 0, 2, 0),
        (["--complete"], 0, 0, 2, 3),
        (["--complete"], 0, 0, 0, 0),
        ([], 1, 0, 0, 3),
        (["--rate", "100"], 0, 1, 0, 3),
    ],
)
def test_audit_exits_by_its_findings(  # noqa: PLR0913, PLR0917  one case
    shop: Shop, options: list[str], doubled: int, unrecorded: int, missing: int, code: int
) -> None:
    def created() -> list[dict[str, Any]]:
        replays = shop.client.list(REPLAYS, shop.name, fields="spec.policyRef.name=quiet")
        return [dict(replay) for replay in replays if replay["spec"].get("mode") == "Audit"]

    numbers = {"doubled": doubled, "unrecorded": unrecorded, "missing": missing}
    numbers |= {"returned": 4, "open": 0}
    examples = {
        "doubledExamples": ["4711:3:-1:0"] * doubled,
        "unrecordedExamples": ["4711:4:-1"] * unrecorded,
    }
    audited = {"topics": ["orders-RETRY", "orders"], "messages": 310, **examples, **numbers}
    run = {"audit": audited, "finished": True}
    complete = condition("Complete", "True", "Completed")
    with ThreadPoolExecutor() as pool:
        running = pool.submit(main, ["audit", "quiet", "-n", shop.name, *options])
        wait_until(created)
        (replay,) = created()
        status = {"phase": "Completed", "conditions": [READY, complete], "run": run}
        path = f"{REPLAYS.path(shop.name, replay['metadata']['name'])}/status"
        shop.client.request("PATCH", path, {"status": status})
        assert running.result() == code
    shop.client.delete(REPLAYS, replay)
    assert replay["spec"].keys().isdisjoint({"select", "followFor"})
    captured = shop.capsys.readouterr()
    rows = {row[0]: int(row[1]) for row in map(str.split, captured.out.splitlines()[1:])}
    assert rows == numbers
    assert "read 310 messages of orders-RETRY, orders\n" in captured.err
    assert ("doubled, such as 4711:3:-1:0\n" in captured.err) == bool(doubled)
    assert ("unrecorded, such as 4711:4:-1\n" in captured.err) == bool(unrecorded)


def test_lint_live_finds_rivals_of_the_cluster(shop: Shop, tmp_path: Path) -> None:
    file, topic = tmp_path / "policies.yaml", "persistent://shop/prod/claimed"
    shop.put(POLICIES, "claimer", {}, topic=topic)

    def lint(name: str, *options: str, code: int) -> tuple[str, str]:
        file.write_text(yaml.safe_dump(manifest("RetryPolicy", name, topic=topic)), "utf-8")
        assert main(["lint", str(file), "-n", shop.name, *options]) == code
        captured = shop.capsys.readouterr()
        return captured.out, captured.err

    lint("rival", code=0)
    out, error = lint("rival", "--live", code=1)
    (finding,) = out.splitlines()
    assert finding.startswith(f"{file}:")
    assert f", cluster/RetryPolicy/{shop.name}/claimer:" in finding
    assert finding.endswith("  [resource-conflict]")
    assert error.endswith("of the cluster: 3 in all namespaces.\n")
    lint("claimer", "--live", code=0)
    _, error = lint("rival", "--live", "--as", "bob", code=0)
    assert error.endswith(f": 0 in the namespaces {shop.name} alone.\n")
    shop.client.delete(POLICIES, shop.client.get(POLICIES, shop.name, "claimer"))


def test_diff_shows_why_a_policy_is_stalled_and_still_exists(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ClusterError("not permitted", got="delete", remedy="ask")

    file = tmp_path / "policy.yaml"
    file.write_text(yaml.safe_dump(manifest("RetryPolicy", "fresh")), "utf-8")
    monkeypatch.setattr(diff, "REFRESH_SECONDS", 3_600.0)
    monkeypatch.setattr(Client, "delete", refuse)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(main, ["diff", str(file), "--observe", "-n", shop.name])
        wait_until(lambda: shop.client.list(POLICIES, shop.name, fields="metadata.name=fresh"))
        reason, text = "TopicNotFound", "no such topic"
        conditions = [condition(kind, "False", reason, text) for kind in ("Ready", "Stalled")]
        conditions[1]["status"] = "True"
        shop.put(POLICIES, "fresh", {"conditions": conditions})
        assert running.result() == 2
    monkeypatch.undo()
    error = shop.capsys.readouterr().err
    assert f"run kubectl delete retrypolicy fresh -n {shop.name}\n" in error
    assert "could not observe the RetryPolicy shop/fresh; got 'no such topic'; " in error
    shop.client.delete(POLICIES, shop.client.get(POLICIES, shop.name, "fresh"))


def test_write_to_a_changed_object_is_a_conflict(shop: Shop) -> None:
    body = {
        **manifest("RetryPolicy", "raced"),
        "metadata": {"name": "raced", "namespace": shop.name},
    }
    before = shop.client.create(POLICIES, body)
    after = shop.client.patch(POLICIES, before, {"metadata": {"labels": {"team": "pay"}}})
    version = before["metadata"]["resourceVersion"]
    with pytest.raises(ClusterError) as patched:
        shop.client.patch(POLICIES, before, {"metadata": {"resourceVersion": version}})
    with pytest.raises(ClusterError) as deleted:
        shop.client.delete(POLICIES, before, only_as_read=True)
    assert patched.value.reason == deleted.value.reason == CONFLICT
    shop.client.delete(POLICIES, after, only_as_read=True)
    assert not shop.client.list(POLICIES, shop.name, fields="metadata.name=raced")


def test_user_with_any_characters_is_impersonated(shop: Shop) -> None:
    assert Client(replace(shop.client.flags, user="Łukasz")).user == "Łukasz"


def test_unknown_field_is_refused_and_never_dropped(shop: Shop) -> None:
    body = manifest("Replay") | {"metadata": {"name": "x", "namespace": shop.name}}
    body["spec"]["afterReview"] = True  # of a later release
    with pytest.raises(ClusterError, match="lack a field that this command sends"):
        shop.client.create(REPLAYS, body)


def test_documents_follow_their_published_schemas(shop: Shop, tmp_path: Path) -> None:
    shop.put(REPLAYS, "done", ENDED, policyRef={"name": "quiet"})
    kinds = {
        ("status", "--all"): "StatusList",
        ("status", "orders"): "StatusList",
        ("history", "orders"): "ReplayHistory",
        ("keys", "orders"): "BlockedKeyList",
        ("refused", "done"): "RefusedEntryList",
        ("version",): "VersionList",
        ("doctor",): "CheckResultList",
    }
    for command, kind in kinds.items():
        document = json.loads(shop.run(*command, "-o", "json"))
        assert document["kind"] == kind
        assert document["items"]
        check(document, SCHEMAS["$defs"][kind])
        lines = shop.run(*command, "-o", "jsonl").splitlines()
        assert json.loads(lines[0]).keys() == document["items"][0].keys()
        assert yaml.safe_load(shop.run(*command, "-o", "yaml")).keys() == document.keys()
    manifest = tmp_path / "policy.yaml"
    manifest.write_text("apiVersion: redrive.io/v1beta1\nkind: RetryPolicy\n", "utf-8")
    assert main(["lint", str(manifest), "-o", "json"]) == 1
    findings = json.loads(shop.capsys.readouterr().out)
    assert findings["items"]
    check(findings, SCHEMAS["$defs"][findings["kind"]])
    inspected = {  # of commands that read a broker
        "CauseList", "PlannedCauseList", "InspectedCauseList", "MessageList",
        "InspectedMessageList", "AuditFindingList",
    }  # fmt: skip
    assert {*kinds.values(), findings["kind"], *inspected} == {
        choice["$ref"].split("/")[-1] for choice in SCHEMAS["oneOf"]
    }


def test_doctor_names_missing_rights(shop: Shop) -> None:
    assert main(["doctor", "-n", shop.name, "--as", "bob", "--exit-code"]) == 3
    shown = shop.capsys.readouterr().out
    assert "API server   ok       context sandbox, you are bob" in shown
    assert f"not: create replays in namespace {shop.name}; role redrive-responder" in shown
    own = [line.split(maxsplit=2) for line in shop.run("doctor").splitlines()]
    assert ["connections", "ok", f"1 ready in namespace {shop.name}"] in own


def in_terminal(columns: int, shop: Shop, *arguments: str, **environment: str) -> str:
    """Return the output of a command in a terminal of so many columns."""
    code = "import sys; sys.argv[0] = 'redrive'; from redrive.cli import main; sys.exit(main())"
    primary, secondary = pty.openpty()
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    inherited = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments, "-n", shop.name],
        env=inherited | {"TERM": "xterm", "PYTHONPATH": str(SOURCE_ROOT)} | environment,
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
    )
    os.close(secondary)
    output = b""
    with suppress(OSError):  # the end of a terminal
        while part := os.read(primary, 65_536):
            output += part
    os.close(primary)
    assert process.wait() == 0
    return output.decode()


@pytest.mark.parametrize("columns", [80, 160])
def test_status_in_terminal_fits_its_columns(shop: Shop, columns: int) -> None:
    lines = in_terminal(columns, shop, "status", "--all").splitlines()
    table = [line for line in lines if line.startswith(("POLICY", "orders", "quiet"))]
    assert len(table) == 3
    assert all(len(line) <= columns for line in lines)
    at = next(index for index, line in enumerate(lines) if line.startswith("orders"))
    start = lines[at].index("RetryStorm")
    shown = [lines[at][start:], *(line.strip() for line in lines[at + 1 :] if line[0] == " ")]
    assert " ".join(shown) == "RetryStorm: 61 % were retries; 2 blocked keys; 140 dead letters"
    assert (len(shown) == 1) is (columns == 160)
    assert in_terminal(columns, shop, "status", "orders").startswith("\x1b[36morders\x1b[0m")
    assert "\x1b" not in in_terminal(columns, shop, "status", "orders", NO_COLOR="1")


def test_kubectl_runs_and_completes_the_plugin(shop: Shop, tmp_path: Path) -> None:
    program = tmp_path / "kubectl-redrive"
    start = "import sys\nfrom redrive.cli import main\nsys.exit(main())"
    program.write_text(f"#!{sys.executable}\n{start}\n", "utf-8")
    assert main(["completion", "kubectl"]) == 0
    completion = tmp_path / "kubectl_complete-redrive"
    completion.write_text(shop.capsys.readouterr().out, "utf-8")
    for file in (program, completion):
        file.chmod(0o700)

    def kubectl(*arguments: str) -> str:
        return subprocess.run(
            [str(builds.kubernetes() / "kubectl"), *arguments],
            env={
                "PATH": f"{tmp_path}:{os.environ['PATH']}",
                "PYTHONPATH": str(SOURCE_ROOT),
                "KUBECONFIG": os.environ["KUBECONFIG"],
            },
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    shown = kubectl("redrive", "status", "-n", shop.name)
    assert shown.endswith(f"All of them: kubectl redrive status --all -n {shop.name}\n")
    completed = kubectl("__complete", "redrive", "status", "-n", shop.name, "or")
    assert completed.splitlines() == ["orders", ":4"]
    shop.put(INSPECTIONS, "seen", {}, policyRef={"name": "quiet"})
    for begun in ("insp", "inspection/s"):
        followed = kubectl("__complete", "redrive", "follow", "-n", shop.name, begun)
        assert followed.splitlines() == ["inspection/seen", ":4"]
    shop.client.delete(INSPECTIONS, shop.client.get(INSPECTIONS, shop.name, "seen"))


def test_terminated_causes_deletes_its_inspection(shop: Shop) -> None:
    code = "import sys; from redrive.cli import main; sys.exit(main())"
    arguments = ("causes", "orders", "--waiting", "-n", shop.name)
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": str(SOURCE_ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        while "starts" not in (line := process.stderr.readline()):  # it waits for the operator
            assert line
        assert shop.client.list(INSPECTIONS, shop.name)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert shop.client.list(INSPECTIONS, shop.name) == []


def test_commands_import_no_heavy_package(shop: Shop) -> None:
    """Each of them would take as long as all the rest of the command."""
    code = (
        "import sys; from redrive.cli import main; main({!r}); "
        "import redrive.cli.inspection; print(*sys.modules)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code.format(["status", "-n", shop.name])],
        env=os.environ | {"PYTHONPATH": str(SOURCE_ROOT)},
        check=True,
        capture_output=True,
        text=True,
    )
    *table, modules = process.stdout.splitlines()
    assert "orders" in "\n".join(table)
    heavy = {"aiohttp", "kopf", "kubernetes.client", "pulsar", "pyarrow", "pyspark"}
    assert not heavy & set(modules.split())


RUNNING = {"phase": "Running", "conditions": [condition("Ready", "Unknown", "Running")]}
ENDED = {
    "phase": "Completed",
    "completionTime": AT,
    "conditions": [
        condition("Ready", "True", "CompletedWithRefusals"),
        condition("Complete", "True", "CompletedWithRefusals"),
    ],
    "run": {
        "counts": {"matched": 120, "moved": 118, "refused": 2},
        "approval": {"messages": 120, "approvedTime": AT, "approvedBy": "bob"},
        "refusals": [{"entry": "4711:8", "messages": 2, "cause": "TooBig"}],
    },
}


def test_replay_is_controlled_until_it_has_ended(shop: Shop) -> None:
    shop.put(REPLAYS, "run", RUNNING, policyRef={"name": "orders"}, reason="fixed")
    for command, field in (("suspend", "suspend"), ("resume", "suspend"), ("cancel", "cancel")):
        shop.run(command, "run")
        spec = shop.client.get(REPLAYS, shop.name, "run")["spec"]
        assert spec[field] is (command != "resume")
    shop.put(REPLAYS, "run", ENDED)
    assert "the Replay run has ended; got 'Completed'" in shop.run("suspend", "run", code=1)
    assert shop.run("refused", "run").splitlines()[1].split() == ["4711:8", "2", "TooBig"]
    history = [line.split() for line in shop.run("history", "orders").splitlines()]
    assert history[1][:5] == ["run", "Run", "CompletedWithRefusals", "118", "2"]
    assert history[2][:4] == ["gone", "Run", "Completed", "4"]
    assert history[2][-2:] == ["ann", "OPS-1"]
    wide = shop.run("history", "orders", "-o", "wide").splitlines()
    assert "APPROVED BY" in wide[0]
    assert "bob" in wide[1].split()


def test_follow_shows_progress_and_ends_with_3_after_refusals(shop: Shop) -> None:
    shop.put(REPLAYS, "seen", RUNNING, policyRef={"name": "quiet"})

    def end() -> None:
        wait_until(lambda: "running" in cast("io.StringIO", sys.stderr).getvalue())
        shop.put(REPLAYS, "seen", ENDED)

    thread = threading.Thread(target=end)
    thread.start()
    assert main(["follow", "seen", "-n", shop.name, "--timeout", "60s"]) == 3
    thread.join()
    captured = shop.capsys.readouterr()
    assert captured.out == "Complete: 118 moved, 2 refused\n"
    assert captured.err.splitlines() == ["  running", "  moved    118 of 120   refused 2"]


def test_closed_watch_ends_its_thread(shop: Shop) -> None:
    before = set(threading.enumerate())
    watch = shop.client.watch(REPLAYS, shop.name)
    next(watch)
    time.sleep(0.5)  # it waits for a change by then
    (thread,) = set(threading.enumerate()) - before
    watch.close()
    thread.join(60)
    assert not thread.is_alive()


def test_follow_of_waiting_replay_exits_with_4(shop: Shop) -> None:
    shop.put(REPLAYS, "big", RUNNING, policyRef={"name": "quiet"})
    error = shop.run("follow", "big", "--timeout", "1s", code=4)
    assert error.endswith(f"the Replay continues; follow it: redrive follow big -n {shop.name}\n")
    run = {"counts": {"matched": 1200, "left": 1200}, "approval": {"messages": 1200}}
    waiting = condition("ApprovalRequired", "True", "ApprovalRequired")
    status = {"phase": "Running", "conditions": [READY, waiting], "run": run}
    shop.put(REPLAYS, "big", status)
    error = shop.run("follow", "big", code=4)
    assert f"to move 1200 messages: redrive approve big -n {shop.name}\n" in error
    assert shop.run("approve", "big", "--yes") == "replayapproval.redrive.io/big created\n"
    approval = shop.cluster.objects.get("replayapproval", "big", shop.name)
    assert approval["spec"]["messages"] == 1200
    assert approval["metadata"]["annotations"] == {"redrive.io/requested-by": "admin"}
    uid = shop.client.get(REPLAYS, shop.name, "big")["metadata"]["uid"]
    assert approval["spec"]["replayRef"] == {"name": "big", "uid": uid}


def test_follow_shows_an_inspection_until_it_ends(shop: Shop) -> None:
    run: dict[str, Any] = {"plannedEntries": 140, "readEntries": 60}
    reading = {"phase": "Running", "conditions": [condition("Ready", "False", "Running")]}
    shop.put(INSPECTIONS, "seen", reading | {"run": run}, policyRef={"name": "quiet"})
    error = shop.run("follow", "inspection/seen", "--timeout", "1s", code=4)
    hint = f"redrive follow inspection/seen -n {shop.name}"
    assert error.startswith("read 60 of 140 entries\n")
    assert error.endswith(f"the Inspection continues; follow it: {hint}\n")
    cause = {"cause": "WarehouseDown", "messages": 120, "replayed": 0, "fingerprint": "9" * 16}
    run |= {"totalEntries": 140, "readEntries": 140, "messages": 140, "matched": 120}
    run |= {"causes": [cause], "finished": True, "file": "s3://archive/quiet.parquet"}
    complete = condition("Complete", "True", "Completed")
    ended = {"phase": "Completed", "conditions": [READY, complete], "run": run}
    ended["completionTime"] = AT

    def end() -> None:
        wait_until(lambda: "read 60" in cast("io.StringIO", sys.stderr).getvalue())
        shop.put(INSPECTIONS, "seen", ended)

    thread = threading.Thread(target=end)
    thread.start()
    words = ["follow", "inspection.redrive.io/seen", "-n", shop.name, "--timeout", "60s"]
    assert main(words) == 0
    thread.join()
    captured = shop.capsys.readouterr()
    assert [line.split()[:2] for line in captured.out.splitlines()[1:]] == [["120", cause["cause"]]]
    assert "read 140 dead letters; 120 are selected\n" in captured.err
    assert " ago by inspection.redrive.io/seen\nwrote s3://archive/quiet.parquet\n" in captured.err
    assert "Look at one: redrive peek quiet --cause 9999999999999999 " in captured.err
    assert shop.run("follow", "inspection/seen", "-o", "name") == "inspection.redrive.io/seen\n"
    failed = condition("Failed", "True", "TopicUnreadable", "no such topic\x1b[2J")
    shop.put(INSPECTIONS, "seen", {"phase": "Failed", "conditions": [failed], "run": {}})
    error = shop.run("follow", "inspection/seen", code=1)
    assert error == "Failed: TopicUnreadable: no such topic [2J\n"
    assert "inspection/gone" not in shop.run("follow", "inspection/gone", code=1)


@pytest.mark.parametrize("name", ["..", "../inspections/x", "x?watch=1", "x%2f..", "x\x1b[2J"])
def test_name_that_is_another_path_is_refused(shop: Shop, name: str) -> None:
    for words in (["status"], ["follow"], ["follow", "-o", "json"], ["keys"]):
        error = shop.run(*words, name, code=1)
        assert " can have this name; got " in error
        assert error.rstrip("\n").isprintable()
    assert main(["status", "-n", f"{shop.name}/{name}"]) == 1
    assert "no namespace can have this name" in shop.capsys.readouterr().err


def in_review(shop: Shop, name: str, movable: int) -> None:
    """Show a review of *movable* messages to move, as operator and job do."""
    review = {"expiryTime": "2100-01-01T00:00:00Z"}
    run = {"counts": {"scanned": 9, "matched": movable, "left": movable}, "review": review}
    waits = condition("InReview", "True", "InReview")
    status = {"phase": "Suspended", "conditions": [READY, waits], "run": run}
    path = f"{REPLAYS.path(shop.name, name)}/status"
    shop.client.request("PATCH", path, {"status": status})


def answers(shop: Shop, primary: int, answer: str, selection: dict[str, Any], movable: int) -> None:
    """Show the review of the Replay with a *selection*, and answer until it is changed."""
    while True:
        time.sleep(0.1)
        replays = shop.client.list(REPLAYS, shop.name)
        for replay in (body for body in replays if body["spec"].get("select") == selection):
            if replay["spec"].get("cancel") or replay["spec"]["mode"] == "Run":
                return
            in_review(shop, replay["metadata"]["name"], movable)
            os.write(primary, f"{answer}\n".encode())


@pytest.mark.parametrize(("answer", "movable", "code"), [("n", 7, 1), ("y", 7, 4), ("none", 0, 0)])
def test_review_is_confirmed_or_canceled_by_the_answer(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, answer: str, movable: int, code: int
) -> None:
    primary, secondary = pty.openpty()
    selection = {"keys": [f"order-{answer}"]}
    with os.fdopen(secondary) as terminal, ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(sys, "stdin", terminal)
        other = pool.submit(answers, shop, primary, answer, selection, movable)
        text = shop.run("replay", "quiet", "--key", f"order-{answer}", "--timeout", "1s", code=code)
        other.result()
    os.close(primary)
    assert ("Move these 7 messages?" in text) is (movable > 0)
    (replay,) = (
        r for r in shop.client.list(REPLAYS, shop.name) if r["spec"].get("select") == selection
    )
    spec = replay["spec"]
    if answer == "y":
        assert spec["mode"] == "Run"
        assert spec.keys().isdisjoint({"cancel", "deadline", "ttlAfterFinished"})
    else:
        assert (spec["mode"], spec["cancel"], spec["ttlAfterFinished"]) == ("Review", True, "1h")
    if answer == "n":
        assert "nothing was moved" in text
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        error = shop.run("follow", replay["metadata"]["name"], code=4)
        assert "in review: 7 messages to move; confirm it at a terminal: redrive follow" in error


def test_cluster_without_reviews_refuses_them(shop: Shop) -> None:
    """Definitions of another release must not run a Replay with an unknown field or value."""
    body = manifest("Replay", mode="Later") | {
        "metadata": {"name": "later", "namespace": shop.name}
    }
    with pytest.raises(ClusterError, match='Unsupported value: "Later"'):
        shop.client.create(REPLAYS, body)
    body = manifest("Replay", reviews=1) | {"metadata": {"name": "later", "namespace": shop.name}}
    with pytest.raises(ClusterError, match="lack a field that this command sends"):
        shop.client.create(REPLAYS, body)


def test_replay_without_questions_is_bounded_and_owned(shop: Shop) -> None:
    options = "--cause", "WarehouseDown", "--reason", "fixed", "--ticket", "OPS-1", "--yes"
    created = json.loads(shop.run("replay", "quiet", *options, "--detach", "-o", "json"))
    metadata, spec = created["metadata"], created["spec"]
    assert metadata["name"].startswith("quiet-")
    assert metadata["annotations"] == {"redrive.io/requested-by": "admin"}
    (owner,) = metadata["ownerReferences"]
    assert (owner["kind"], owner["name"]) == ("RetryPolicy", "quiet")
    assert spec["select"].keys() == {"causes", "until"}
    assert (spec["reason"], spec["ticket"]) == ("fixed", "OPS-1")
    assert spec["startBefore"] > spec["select"]["until"]
