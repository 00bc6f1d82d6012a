"""Commands of pages for people on call, run as written; the outputs are those that pages show."""

from __future__ import annotations

import io
import os
import pty
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

import redrive
from redrive.api import API_VERSION, Body
from redrive.api.inspection import MAX_SEALED
from redrive.cli import replays
from redrive.cli.cluster import Cluster as Client
from redrive.cli.cluster import ClusterError, ObjectNotFoundError
from redrive.cli.frame import ClusterFlags
from redrive.cli.main import main
from redrive.cli.output import now, written
from redrive.inspection.payloads import CauseCount
from redrive.inspection.record import Recorder
from redrive.inspection.sealing import seal
from redrive.kube.resources import (
    APPROVALS,
    CONNECTIONS,
    INSPECTIONS,
    POLICIES,
    REPLAYS,
    Resource,
)
from sandbox import builds, chart
from sandbox.kubernetes import Cluster
from tests.integration.cli.conftest import Shop, condition, put
from tests.support.dead_letter_rows import of_the_page
from tests.support.documented import (
    AUDIT,
    BLOCKED_KEY,
    CHECK,
    DEVELOP,
    OUTAGES,
    READ,
    README,
    REPLAYS_PAGE,
    RESPOND,
    ROOT,
    RUNBOOKS,
    block,
    command_lines,
    commands,
    shows,
    steps,
)

pytestmark = pytest.mark.xdist_group("control plane")
READY = condition("Ready", "True", "Provisioned")
INLINE = re.compile(r"`(kubectl redrive [^`]*)`")
REDRAWN = re.compile(r"\x1b\[(\d+)F\x1b\[J")


@pytest.fixture(scope="module", autouse=True)
def _incident(api_server: Cluster, client: Client) -> None:
    """The state that the pages show: a storm of retries, dead letters, a blocked key."""
    api_server.objects.create_namespace("pay")
    other = Client(ClusterFlags(namespace="pay", kubeconfig=str(api_server.kubeconfig)))
    at = now()

    def ago(**length: float) -> str:
        return written(at - timedelta(**length))

    connected = {"conditions": [READY], "operatorVersion": redrive.__version__}
    observed = {"observedTime": ago(minutes=3.5)}
    for place in (client, other):
        put(place, CONNECTIONS, "main", connected)
    quiet = {"retry": 0, "retryDue": 0, "deadLetter": 0, **observed}
    put(client, POLICIES, "quiet", {"conditions": [READY], "backlog": quiet})
    text = "the source topic does not exist; got 'persistent://pay/prod/refunds'; create it"
    missing = condition("Ready", "False", "TopicNotFound", text)
    put(other, POLICIES, "refunds", {"conditions": [missing]})
    text = "61 % of 4120 deliveries in 10m were retries"
    dead = {"deadLetter": 140, "deadLettersLastHour": 9, "oldestDeadLetterTime": ago(hours=3.5)}
    blocked = {
        "keyHash": "9f31c2e07b1d",
        "sinceTime": ago(minutes=3.5),
        "messageID": "4711:3:0",
        "cause": "JSONDecodeError",
        "failures": 6,
        "behind": 800,
    }
    status = {
        "conditions": [READY, condition("RetryStorm", "True", "RetryStorm", text)],
        "warnings": ["RetryStorm"],
        "backlog": {"retry": 12, "retryDue": 3, **dead, **observed},
        "blockedKeys": [blocked],
        "retryTopic": "persistent://shop/prod/orders-fulfilment-RETRY",
    }
    put(client, POLICIES, "orders-fulfilment", status, deadLetter={"messageTTL": "30d"})


class Screen(io.StringIO):
    """A terminal of which the last picture counts."""

    def isatty(self) -> bool:
        return True

    def picture(self) -> str:
        text, *redrawn = REDRAWN.split(self.getvalue())
        for lines, rest in zip(redrawn[::2], redrawn[1::2], strict=True):
            kept = text.splitlines(keepends=True)[: -int(lines)]
            text = "".join(kept) + rest
        return text


class Keyboard(io.TextIOBase):
    """A terminal at which each question is answered with y."""

    def __init__(self, terminal: int, screen: Screen) -> None:
        super().__init__()
        self._terminal, self._screen = terminal, screen

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._terminal

    def readline(self, _size: int = -1, /) -> str:  # type: ignore[override]  # of text
        self._screen.write("y\n")
        return "y\n"


@dataclass
class Person:
    """Someone who works by the pages at a terminal."""

    client: Client
    folder: Path
    monkeypatch: pytest.MonkeyPatch

    def run(self, command: str, *codes: int) -> str:
        """Run a command of redrive, and return the picture of the terminal."""
        arguments = shlex.split(command.removeprefix("kubectl ").removeprefix("redrive "))
        screen = Screen()
        primary, secondary = pty.openpty()
        self.monkeypatch.setattr(sys, "stdin", Keyboard(secondary, screen))
        with redirect_stdout(screen), redirect_stderr(screen):
            code = main(arguments)
        os.close(primary)
        os.close(secondary)
        assert code in (codes or (0,)), f"{command} ended with {code}: {screen.picture()}"
        return screen.picture()

    def paste(self, script: str, *codes: int) -> str:
        """Run commands in a shell, and return their output."""
        path = f"{self.folder}:{builds.kubernetes()}:{builds.helm()}:{os.environ['PATH']}"
        run = subprocess.run(
            ["/bin/bash", "-euo", "pipefail", "-c", script],
            env=os.environ | {"PATH": path},
            cwd=self.folder, check=False, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert run.returncode in (codes or (0,)), run.stdout
        return run.stdout


@pytest.fixture
def person(
    shop: Shop, api_server: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Person:
    monkeypatch.setattr(sys, "argv", ["kubectl-redrive"])
    for name, value in {"NO_COLOR": "1", "COLUMNS": "160", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    program = tmp_path / "redrive"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m redrive "$@"\n', "utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "operator"))
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_bytes(api_server.kubeconfig.read_bytes())
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    person = Person(shop.client, tmp_path, monkeypatch)
    person.paste("kubectl config set-context --current --namespace=shop")
    return person


@contextmanager
def jobs_run(
    client: Client, of_inspection: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
) -> Iterator[None]:
    """Show plans and the ends of Replays, as operator and jobs do.

    Args:
        client: of the namespace.
        of_inspection: returns the next status of an Inspection; defaults to its end.
    """
    following_of = {REPLAYS: next_status, INSPECTIONS: of_inspection or next_inspection}
    stopped = threading.Event()

    def run() -> None:
        while not stopped.wait(0.05):
            for kind, following in following_of.items():
                for body in client.list(kind, client.namespace):
                    show(client, kind, body, following(body))

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        try:
            yield
        finally:
            stopped.set()
            running.result()


def show(
    client: Client, kind: Resource, body: Mapping[str, Any], status: Mapping[str, Any]
) -> None:
    """Write the next status of a Replay or an Inspection, if it is not empty."""
    if status:
        path = f"{kind.path(client.namespace, body['metadata']['name'])}/status"
        try:
            client.request("PATCH", path, {"status": status})
        except ObjectNotFoundError:
            return
        except ClusterError:
            client.delete(kind, body)  # so that no command waits for it
            raise


def next_inspection(inspection: Mapping[str, Any]) -> dict[str, Any]:
    """Return the status of an Inspection that has ended, empty if it has it."""
    if inspection.get("status"):
        return {}
    spec, name = inspection["spec"], inspection["metadata"]["name"]
    selects = "cause" in str(spec.get("select"))
    figures: dict[str, Any] = dict.fromkeys(("totalEntries", "readEntries", "messages"), 140)
    run = figures | {"matched": 120 if selects else 132 if "select" in spec else 140}
    if "causes" in spec:
        run["sealed"] = sealed(inspection, causes_of_the_page(), spec["causes"])
    elif "messages" in spec:
        records = [Recorder(lambda _: None)(of_the_page(3))]
        run["sealed"] = sealed(inspection, records, spec["messages"])
    elif "export" in spec:
        form = {"HTML": "html"}.get(spec["export"]["format"], "parquet")
        run["file"] = f"s3://dead-letters/prod/shop/orders-fulfilment/{name}-8d1c2f0e.{form}"
    completed = condition("Ready", "True", "Completed")
    return {"phase": "Completed", "conditions": [completed], "run": run}


def sealed(inspection: Mapping[str, Any], records: list[Any], result: Mapping[str, Any]) -> str:
    """Encrypt records for the recipient of an Inspection."""
    return seal(records, result["recipient"], inspection["metadata"]["uid"], MAX_SEALED)


def causes_of_the_page() -> list[CauseCount]:
    """Return the causes that the pages show."""
    consumers = ["fulfilment-7d9c4", "fulfilment-b81f2"]
    at = written(now())
    return [
        {
            "cause": cause,
            "fingerprint": fingerprint,
            "messages": messages,
            "following": 0,
            "replayed": replayed,
            "consumers": consumers,
            "firstTime": at,
            "lastTime": at,
            "example": example,
        }
        for cause, fingerprint, messages, replayed, example in (
            ("WarehouseDown", "9f31c2e07b1d55a0", 120, 0, "no answer from the ? within ? ms"),
            ("JSONDecodeError", "02aa7144d0e31b6c", 20, 6, "Expecting property name"),
        )
    ]


def next_status(replay: Mapping[str, Any]) -> dict[str, Any]:
    """Return the next status of a Replay, empty if it keeps the one that it has."""
    mode, status = replay["spec"].get("mode"), replay.get("status") or {}
    if status.get("phase") == "Completed":
        return {}
    selects = bool(replay["spec"].get("select"))
    movable = 118 if selects else 138
    counts = {"scanned": 140, "matched": movable + 2, "left": movable, "refused": 2}
    times = dict.fromkeys(("firstTime", "lastTime"), written(now()))
    down = {"cause": "WarehouseDown", "fingerprint": "9f31c2e07b1d55a0", "messages": 118}
    causes = [{**down, "replayed": 0, **times}]
    if not selects:
        broken = {"cause": "JSONDecodeError", "fingerprint": "02aa7144d0e31b6c", "messages": 20}
        causes.append({**broken, "replayed": 6, **times})
    refused = [{"cause": "Encrypted", "messages": 2}]
    run: dict[str, Any] = {
        "counts": counts,
        "preview": {"causes": causes, "refused": refused, "estimatedSeconds": 4},
    }
    if mode == "Review":
        waits = condition("InReview", "True", "InReview")
        run["review"] = {"expiryTime": written(now() + timedelta(minutes=15))}
        review = {"phase": "Suspended", "conditions": [READY, waits], "run": run}
        return {} if status.get("phase") == "Suspended" else review
    if mode == "Audit":
        findings = dict.fromkeys(("doubled", "unrecorded", "returned", "open"), 0)
        topics = ["persistent://shop/prod/orders-fulfilment-RETRY"]
        run = {"audit": {"topics": topics, "messages": 310, "missing": 120, **findings}}
    elif mode != "Plan":
        counts |= {"moved": movable, "left": 0}
        seen = {"settled": False, "observedTime": written(now())}
        run["outcome"] = {"handled": movable - 8, "waiting": 2, "deadAgain": 6, **seen}
    complete = [condition(kind, "True", "CompletedWithRefusals") for kind in ("Ready", "Complete")]
    return {
        "phase": "Completed",
        "completionTime": written(now()),
        "conditions": complete,
        "run": run,
    }


@pytest.mark.parametrize(
    ("page", "heading", "codes"),
    [
        (RESPOND, "1. See the state", [0]),
        (RESPOND, "2. Find the cause, and count", [0]),
        (RESPOND, "3. Move", [3]),
        (READ, "Peek in the cluster", [0]),
        (READ, "Export and report in the cluster", [0, 0]),
        (README, "When messages have died", [0, 0, 3]),
        (BLOCKED_KEY, "Is a message retried, or is the key dead?", [0]),
        (BLOCKED_KEY, "Dead-letter the message", [0]),
        (AUDIT, "Compare", [0]),
    ],
)
def test_output_at_a_terminal_is_that_of_the_page(
    person: Person, page: str, heading: str, codes: list[int]
) -> None:
    with jobs_run(person.client):
        for step, code in zip(steps(page, heading), codes, strict=True):
            shown = step.output.replace("ann@example.com", "admin").replace("prod-eu", "sandbox")
            shown = shown.replace("6514df353468", "…")  # a hash of the key, another in each output
            output = person.run(step.command, code)
            assert shows(shown, output), f"{shown}\nis on the page, not:\n{output}"


def create_inspection(client: Client, policy: str) -> Body:
    """Create an Inspection of all dead letters, as `causes` does."""
    spec = {"policyRef": {"name": policy}, "from": "DeadLetter"}
    metadata = {"generateName": f"{policy}-", "namespace": client.namespace}
    body = {"apiVersion": API_VERSION, "kind": INSPECTIONS.kind, "metadata": metadata, "spec": spec}
    return client.create(INSPECTIONS, body)


def test_young_summary_is_shown_until_a_replay(person: Person) -> None:
    client = person.client
    young, other = (
        create_inspection(client, "quiet"),
        create_inspection(client, "orders-fulfilment"),
    )
    cause = {"cause": "WarehouseDown", "messages": 118, "replayed": 3}
    run = {"totalEntries": 140, "messages": 140, "matched": 120, "causes": [cause]}
    status = {"phase": "Completed", "completionTime": written(now()), "run": run}
    for body in (young, other):
        show(client, INSPECTIONS, body, status)
    count = len(client.list(INSPECTIONS, "shop"))
    rows = [line.split() for line in person.run("redrive causes quiet").splitlines()]
    assert ["118", "WarehouseDown", "-", "-", "-", "3"] in rows
    assert ["2", "(others)", "-", "-", "-", "-"] in rows
    (line,) = (line for line in rows if line[0] == "counted")
    assert line[2:] == ["ago", "by", f"inspection.redrive.io/{young['metadata']['name']}"]
    assert len(client.list(INSPECTIONS, "shop")) == count
    with jobs_run(client):
        for again in ("--refresh", "--cause WarehouseDown", "--waiting"):
            assert "consumes nothing" in person.run(f"redrive causes quiet {again}")
        person.run("redrive replay quiet --all --yes", 3)
        assert "consumes nothing" in person.run("redrive causes quiet")


def test_inspection_without_account_has_a_replay_count(
    person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replays, "START_SECONDS", 0.0)
    text = "the ServiceAccount that the job runs as does not exist"
    missing = {"conditions": [condition("Ready", "False", "ServiceAccountNotFound", text)]}
    with jobs_run(person.client, lambda _: missing):
        shown = person.run("redrive causes quiet --refresh")
    reason = f"the Inspection can't read the messages; got 'ServiceAccountNotFound: {text}'"
    assert f"a Replay counts instead, without consumers and examples: {reason}; correct it" in shown
    assert shown.count("ServiceAccountNotFound") == 1
    assert "118  WarehouseDown" in shown


def test_inspection_of_the_page_is_listed(person: Person) -> None:
    for body in person.client.list(INSPECTIONS, "shop"):
        person.client.delete(INSPECTIONS, body)
    manifest = block(READ, "With an Inspection", "yaml")
    (person.folder / "inspection.yaml").write_text(manifest, "utf-8")
    create, get = steps(READ, "With an Inspection")
    output = person.paste(create.command)
    assert shows(create.output, output), output
    name = output.split()[0]
    with jobs_run(person.client):
        person.paste(f"kubectl wait --for=condition=Ready {name} --timeout=60s")
    output = person.paste(get.command)
    assert shows(get.output.replace("12s", "…"), output), output


def inline(page: str) -> Iterator[str]:
    """Yield the commands of redrive in the text of a page that are complete."""
    for command in re.findall(r"`((?:kubectl )?redrive [^`]*)`", (ROOT / page).read_text("utf-8")):
        if not re.search(r"[A-Z]{2}|…|x7k2p|--direct", command):
            yield command


def test_commands_in_texts_of_pages_run(person: Person) -> None:
    pages = [f"docs/howto/{name}.md" for name in ("after-broker-outage", "blocked-key", "respond")]
    used = {command for page in pages for command in inline(page)}
    assert len(used) > 7
    waits = {command for command in used if " unload " in command}  # until an operator answers
    for command in sorted(used - waits):
        with jobs_run(person.client):
            person.run(command, 0, 3)
    for command in waits:
        assert "no result within 1s" in person.run(f"{command} --timeout 1s", 4)


def test_override_of_the_outage_breaker_is_set(person: Person) -> None:
    [override] = commands(OUTAGES, "Override the outage breaker")
    assert "ignores outages until 20" in person.run(override.text.partition("#")[0])


def test_replay_of_the_reference_is_awaited_and_approved(person: Person) -> None:
    """Conditions, results, review and approval, in the order of a Replay's life."""
    name, place = "orders-after-fix", person.client.namespace
    reviewed = block(REPLAYS_PAGE, "Replays", "yaml").replace("mode: Plan", "mode: Review")
    person.paste(f"kubectl create -f - <<'END'\n{reviewed}END")
    [review] = commands(REPLAYS_PAGE, "Review")
    [approval] = commands(REPLAYS_PAGE, "Approval")
    [waits] = commands(REPLAYS_PAGE, "Conditions")
    [results] = commands(REPLAYS_PAGE, "Results of ended Replays")
    person.paste(review.text + approval.text)
    replay = person.client.get(REPLAYS, place, name)
    assert replay["spec"]["mode"] == "Run"
    approved = person.client.get(APPROVALS, place, name)["spec"]
    assert approved == {
        "replayRef": {"name": name, "uid": replay["metadata"]["uid"]},
        "messages": 1200,
    }
    with jobs_run(person.client):
        assert person.paste(waits.text).count("condition met") == 2
    result = {"name": name, "uid": "u", "phase": "Completed", "moved": 4}
    result |= {"result": "Completed", "completionTime": "2026-11-27T01:00:00Z"}
    put(person.client, POLICIES, "orders-fulfilment", {"replays": [result]})
    assert person.paste(results.text) == f"2026-11-27T01:00:00Z {name} Completed 4\n"


PLACEHOLDERS = {
    "NAMESPACE": "shop",
    "POLICY": "orders-fulfilment",
    "CONNECTION": "main",
    "REPLAY": "orders-done",
    "CONSUMER": "fulfilment",
}


def deploy(cluster: Cluster, namespace: str, name: str) -> None:
    """Create a Deployment, and the pod that it would have."""
    labels = {"app": name}
    container = {"name": name, "image": "registry.example/image:1"}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    spec = {"replicas": 0, "selector": {"matchLabels": labels}, "template": pod}
    for body in (
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec},
        {"apiVersion": "v1", "kind": "Pod", **pod, "metadata": {"name": name, "labels": labels}},
    ):
        cluster.objects.create(body, namespace)


def test_commands_of_runbooks_run(person: Person, api_server: Cluster, tmp_path: Path) -> None:
    """Logs are empty: the pods wait for a node."""
    put(person.client, REPLAYS, "orders-done", {}, policyRef={"name": "orders-fulfilment"})
    (tmp_path / "Chart.yaml").write_text("apiVersion: v2\nname: redrive\nversion: 0.1.0\n")
    chart.install(api_server, "redrive", "redrive-system", {}, tmp_path)
    for namespace, name in (("redrive-system", "redrive"), ("shop", "fulfilment")):
        deploy(api_server, namespace, name)
    for line in sorted(
        line for line in command_lines(*RUNBOOKS) if not line.startswith("pulsar-admin ")
    ):
        command = re.sub(
            r"\b[A-Z]{4,}\b", lambda match: PLACEHOLDERS[match[0]], line.split(" | ")[0]
        )
        with jobs_run(person.client):
            if command.startswith("kubectl redrive "):
                person.run(command, 0, 3)
            else:
                person.paste(command)


POLICY = """\
apiVersion: redrive.io/v1beta1
kind: RetryPolicy
metadata: {{name: {name}, namespace: shop}}
spec:
  connectionRef: {{name: main}}
  topic: persistent://shop/prod/{topic}
  subscription: {subscription}
"""


@pytest.fixture
def manifests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Manifests in a folder, with the errors that the page on `lint` shows."""
    folder = tmp_path / "manifests"
    folder.mkdir()
    (folder / "a.yaml").write_text(
        POLICY.format(name="a", topic="orders", subscription="eu-billing")
    )
    (folder / "b.yaml").write_text(
        POLICY.format(name="b", topic="orders-eu", subscription="billing")
    )
    head = (
        "apiVersion: redrive.io/v1beta1\nkind: Replay\nmetadata: {name: again, namespace: shop}\n"
    )
    select = "spec:\n  policyRef: {name: a}\n  select:\n    where: cause = 'TimeoutError'\n"
    (folder / "replay.yaml").write_text(head + select)
    monkeypatch.chdir(tmp_path)
    return folder


def test_findings_in_manifests_are_those_of_the_page(person: Person, manifests: Path) -> None:
    [step] = steps(CHECK, "Check files and folders")
    output = person.run(step.command, 1)
    assert shows(re.sub(r"\(\d\.\d s\)", "…", step.output), output), output
    (manifests / "a.yaml").unlink()
    (manifests / "replay.yaml").unlink()
    [live] = commands(CHECK, "Check them together with the cluster")
    assert "0 errors" in person.paste(live.text)


def test_rendered_manifests_are_checked_by_the_page(person: Person, manifests: Path) -> None:
    text = (manifests / "a.yaml").read_text("utf-8")
    shop, overlay = person.folder / "charts/shop", person.folder / "overlays/prod"
    for folder in (shop / "templates", overlay):
        folder.mkdir(parents=True)
        (folder / "policy.yaml").write_text(text, "utf-8")
    (shop / "Chart.yaml").write_text("apiVersion: v2\nname: shop\nversion: 0.1.0\n", "utf-8")
    (overlay / "kustomization.yaml").write_text("resources: [policy.yaml]\n", "utf-8")
    [rendered] = commands(CHECK, "Check Helm charts and kustomizations")
    assert person.paste(rendered.text).count("0 errors, 0 warnings in 1 file ") == 2


def test_difference_of_a_manifest_is_that_of_the_page(person: Person, manifests: Path) -> None:
    manifest = yaml.safe_load((manifests / "a.yaml").read_text("utf-8"))
    manifest["metadata"]["name"] = "orders-fulfilment"
    manifest["spec"] |= {"topic": "persistent://shop/prod/orders", "subscription": "fulfilment"}
    body = person.client.get(POLICIES, "shop", "orders-fulfilment")
    person.client.delete(POLICIES, body)
    put(person.client, POLICIES, "orders-fulfilment", {}, **manifest["spec"], maxRetries=5)
    manifest["spec"] |= {"maxRetries": 3, "consumerRoles": ["fulfilment"]}
    (person.folder / "policy.yaml").write_text(yaml.safe_dump(manifest), "utf-8")
    [step] = steps(DEVELOP, "See the changes that a changed manifest makes")
    output = person.run(step.command, 1)
    assert shows(step.output, output), output
