"""Commands at an API server of the test: watches, errors, and objects that they show."""

from __future__ import annotations

import copy
import json
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest

from redrive.api import GROUP, VERSION, Body
from redrive.api.annotations import (
    DeadLetterRequest,
    dead_letter_annotation,
    dead_letter_requests,
)
from redrive.cli import cluster as cluster_module
from redrive.cli import diff, policies
from redrive.cli.cluster import SELF_REVIEWS, Cluster, ClusterError, clean_up
from redrive.cli.frame import ClusterFlags
from redrive.cli.main import main
from redrive.cli.output import now
from redrive.cli.policies import View, history_of
from redrive.kube.resources import CONNECTIONS, DEAD_LETTER_NOW, POLICIES, REPLAYS
from tests.support.http_servers import http_proxy
from tests.support.manifests import manifest
from tests.support.waiting import wait_until

AT = "2026-11-27T01:00:00Z"
CONTEXT = """\
apiVersion: v1
kind: Config
current-context: shop
contexts: [{{name: shop, context: {{cluster: shop, user: ann, namespace: shop}}}}]
clusters: [{{name: shop, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: ann, user: {{}}}}]
"""
POLICY: Body = {
    **POLICIES.typed,
    "metadata": {"name": "orders", "namespace": "shop", "uid": "p", "resourceVersion": "1"},
    "spec": {
        "connectionRef": {"name": "main"},
        "topic": "persistent://shop/prod/orders",
        "subscription": "s",
    },
}
Answer = tuple[int, Body]
CONFLICTING: Answer = 409, {"reason": "Conflict", "message": "modified"}


def listed(*items: Body) -> Answer:
    return 200, {"metadata": {"resourceVersion": "7"}, "items": list(items)}


class ApiServer(ThreadingHTTPServer):
    """An API server with the answers of a test.

    Attributes:
        answers: by path, or `watch` or a method and a path; a function is called for each request.
        requests: methods and paths, oldest first.
        bodies: of these requests.
        impersonated: headers `Impersonate-*` of the last request.
        closed: number of closed connections.
    """

    daemon_threads = True

    def __init__(self, kubeconfig: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        kubeconfig.write_text(CONTEXT.format(port=self.server_port), "utf-8")
        self.flags = ClusterFlags(kubeconfig=str(kubeconfig))
        self.answers: dict[str, Answer | Callable[[], Answer]] = {}
        self.requests: list[str] = []
        self.bodies: list[Body] = []
        self.impersonated: set[tuple[str, bytes]] = set()
        self.closed = 0

    def add_user(self, user: Body) -> None:
        """Give the user of the kubeconfig these fields."""
        kubeconfig = Path(str(self.flags.kubeconfig))
        text = kubeconfig.read_text("utf-8")
        kubeconfig.write_text(text.replace("user: {}", f"user: {json.dumps(user)}"), "utf-8")

    def run(self, *arguments: str) -> int:
        """Run a command with this cluster; return its exit code."""
        return main([*arguments, "--kubeconfig", str(self.flags.kubeconfig)])


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ApiServer

    def _answer(self) -> None:
        path, _, query = self.path.partition("?")
        name = f"watch {path}" if "watch=true" in query else path
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append(f"{self.command} {name}")
        self.server.bodies.append(json.loads(content) if content else {})
        self.server.impersonated = {
            (name.removeprefix("Impersonate-"), value.encode("latin-1"))
            for name, value in self.headers.items()
            if name.startswith("Impersonate-")
        }
        answers = self.server.answers
        answer = answers.get(f"{self.command} {name}", answers.get(name, (404, {})))
        status, body = answer() if callable(answer) else answer
        content = json.dumps(body).encode() if body else b""
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PATCH = do_DELETE = _answer  # noqa: N815  of the base class

    def finish(self) -> None:
        super().finish()
        self.server.closed += 1

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    with ApiServer(tmp_path / "kubeconfig") as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_login_at_a_proxy_is_decoded(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers[POLICIES.path("shop")] = listed(POLICY)
    with http_proxy(tmp_path) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        monkeypatch.setenv("no_proxy", "")
        assert Cluster(server.flags).list(POLICIES, "shop") == [POLICY]


def test_watch_that_has_ended_can_be_closed(server: ApiServer) -> None:
    """The API server ends a watch; the command closes it while the objects are listed again."""
    path, listing, closed = POLICIES.path("shop"), Event(), Event()

    def list_again() -> Answer:
        listing.set()
        assert closed.wait(60)
        return listed()

    def list_first() -> Answer:
        server.answers[path] = list_again
        return listed(POLICY)

    server.answers |= {path: list_first, f"watch {path}": (200, {})}
    snapshots = Cluster(server.flags).watch(POLICIES, "shop")
    assert next(snapshots).objects == (POLICY,)
    assert listing.wait(60)
    snapshots.close()
    closed.set()


def test_first_snapshot_precedes_changes_of_the_watch(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of a watch replaces an object by deleting and inserting it."""

    def start(*, args: tuple[str, list[Body]], **_: object) -> Any:  # noqa: ANN401  a thread
        return SimpleNamespace(start=args[1].clear)

    monkeypatch.setattr(cluster_module, "Thread", start)
    server.answers[POLICIES.path("shop")] = listed(POLICY)
    snapshots = Cluster(server.flags).watch(POLICIES, "shop")
    assert next(snapshots).objects == (POLICY,)
    snapshots.close()


@pytest.mark.parametrize(("status", "is_repeated"), [(403, False), (500, False), (410, True)])
def test_refused_watch_is_repeated_after_a_pause(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, status: int, *, is_repeated: bool
) -> None:
    """An expired version, status 410, is listed again at once."""
    monkeypatch.setattr(cluster_module, "RENEW_SECONDS", 3_600.0)
    path = POLICIES.path("shop")
    server.answers |= {path: listed(POLICY), f"watch {path}": (status, {"message": "no"})}
    snapshots = Cluster(server.flags).watch(POLICIES, "shop")
    next(snapshots)
    wait_until(lambda: server.closed)
    if is_repeated:
        wait_until(lambda: server.requests.count(f"GET watch {path}") > 3)
    else:
        time.sleep(0.2)
        assert server.requests == [f"GET {path}", f"GET watch {path}"]
    snapshots.close()


@pytest.mark.parametrize(
    "content", [None, b"a: [", b"\xff", b"- a", b"text"],
    ids=["folder", "no YAML", "no text", "list", "string"],
)  # fmt: skip
def test_unreadable_kubeconfig_is_refused(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kubeconfig"
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    assert main(["status", "--kubeconfig", str(file)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: the kubeconfig can't be used; got ")
    assert error.endswith("; check it, and --context\n")


@pytest.mark.parametrize("flag", ["--kubeconfig", "--context"])
def test_pod_is_no_default_of_a_named_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert main(["status", flag, str(tmp_path / "typo.yaml")]) == 1
    assert capsys.readouterr().err.startswith("error: there is no kubeconfig; got ")


LIMITED = {
    "as": "Łukasz", "as-uid": "7", "as-groups": ["g", "h"], "as-user-extra": {"Scope/%": ["x", "y"]}
}  # fmt: skip
EXTRA = {("Extra-Scope%2F%25", b"x"), ("Extra-Scope%2F%25", b"y"), ("Uid", b"7")}
GROUPS = {("Group", b"g"), ("Group", b"h")}


@pytest.mark.parametrize(
    ("user", "flags", "headers"),
    [
        (LIMITED, [], {("User", "Łukasz".encode()), *GROUPS, *EXTRA}),
        (LIMITED, ["--as", "ann"], {("User", b"ann"), *GROUPS, *EXTRA}),
        (LIMITED, ["--as-group", "i"], {("User", "Łukasz".encode()), ("Group", b"i"), *EXTRA}),
        ({}, ["--as", "Łukasz"], {("User", "Łukasz".encode())}),
        ({}, ["--as", "\udcff"], {("User", b"\xff")}),
        ({}, ["--as", ""], set()),
    ],
)
def test_user_is_impersonated_as_by_kubectl(
    server: ApiServer, user: Body, flags: list[str], headers: set[tuple[str, bytes]]
) -> None:
    """A flag replaces its own field of the kubeconfig, and no other one."""
    server.add_user(user)
    server.answers[POLICIES.path("shop")] = listed()
    assert server.run("status", *flags) == 0
    assert server.impersonated == headers


@pytest.mark.parametrize(
    ("user", "problem"),
    [
        ({"as-groups": ["g"]}, "need a user"),
        ({"as": "a\nb"}, "without control characters"),
        ({"as": 7}, "must be text"),
        ({"as": "a", "as-user-extra": ["x"]}, "no attribute"),
    ],
)
def test_invalid_impersonation_is_refused(
    server: ApiServer, user: Body, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.add_user(user)
    assert server.run("status") == 1
    error = capsys.readouterr().err
    assert error.startswith("error: the kubeconfig can't be used; got ")
    assert problem in error
    assert not server.requests


@pytest.mark.parametrize("flag", ["--as", "--as-group"])
def test_name_with_a_line_break_is_wrong_usage(
    server: ApiServer, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert server.run("status", flag, "a\nb") == 2
    assert "has control characters" in capsys.readouterr().err
    assert not server.requests


@pytest.mark.parametrize("patch", [None, {"spec": {"cancel": True}}])
def test_printed_command_has_the_flags_of_its_cluster(
    server: ApiServer, patch: Body | None, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = replace(server.flags, context="shop", user="ann", groups=("g",))
    server.answers[REPLAYS.path("shop", "fix")] = 503, {}
    clean_up(Cluster(flags), REPLAYS, replay("fix", AT, None), patch)
    command = capsys.readouterr().err.rpartition("; run ")[2]
    options = ["-n", "shop", "--context", "shop", "--kubeconfig", str(flags.kubeconfig)]
    assert shlex.split(command)[4:14] == [*options, "--as", "ann", "--as-group", "g"]


BUSY = "the API server can't process the request now"
CORRECT = "correct the option or the object that the message names"


@pytest.mark.parametrize(
    ("status", "message", "problem", "remedy"),
    [
        (422, "spec is bad", "the API server refuses GET; got 'spec is bad'", CORRECT),
        (403, "quota is used up", "the API server refuses; got 'quota is used up'", CORRECT),
        (429, "", f"{BUSY}; got 'HTTP 429'", "check the API server if it persists"),
        (503, "", f"{BUSY}; got 'HTTP 503'", "check the API server if it persists"),
        (409, "stale", "; got 'stale'", "read the object again, and repeat the command"),
        (400, "strict decoding error: x", f"{GROUP} definitions of the cluster lack a", "upgrade"),
    ],
)
def test_refusal_names_the_remedy_of_its_status(
    server: ApiServer, status: int, message: str, problem: str, remedy: str
) -> None:
    server.answers[POLICIES.path("shop", "orders")] = status, {"message": message}
    with pytest.raises(ClusterError) as caught:
        Cluster(server.flags).get(POLICIES, "shop", "orders")
    error = str(caught.value)
    assert problem in error
    assert remedy in error.rpartition("; got ")[2]


@pytest.mark.parametrize(
    ("status", "message", "finding"),
    [
        (404, "", f"the cluster of context shop has no {GROUP} definitions"),
        (503, "not now", f"{BUSY}; got 'not now'"),
        (403, "forbidden", "the API server refuses; got 'forbidden'"),
    ],
)
def test_doctor_shows_why_it_found_no_definitions(
    server: ApiServer, status: int, message: str, finding: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers |= {
        SELF_REVIEWS: (201, {"status": {"userInfo": {"username": "ann"}}}),
        f"/apis/{GROUP}/{VERSION}": (status, {"message": message}),
    }
    assert server.run("doctor", "--exit-code") == 3
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("definitions  failed  ")
    assert finding in line


def replay(name: str, created: str, ended: str | None) -> Body:
    status = {"phase": "Completed", "completionTime": ended} if ended else {"phase": "Running"}
    metadata = {"name": name, "namespace": "shop", "uid": name, "creationTimestamp": created}
    return {"metadata": metadata, "spec": {"policyRef": {"name": "orders"}}, "status": status}


def test_history_shows_running_replays_then_the_latest(server: ApiServer) -> None:
    results = [
        {"name": name, "uid": name, "phase": "Completed", "result": "Completed", "moved": 1}
        | {"completionTime": f"2026-11-27T0{hour}:00:00Z"}
        for name, hour in (("deleted-2", 2), ("deleted-5", 5))
    ]
    replays = (
        replay("ended-6", "2026-11-27T00:00:00Z", "2026-11-27T06:00:00Z"),
        replay("running", "2026-11-27T01:00:00Z", None),
        replay("ended-4", "2026-11-27T02:00:00Z", "2026-11-27T04:00:00Z"),
        replay("pending", "2026-11-27T03:00:00Z", None),
    )
    server.answers[POLICIES.path("shop", "orders")] = (
        200,
        {**POLICY, "status": {"replays": results}},
    )
    server.answers[REPLAYS.path("shop")] = listed(*replays)
    names = [record["name"] for record in history_of(Cluster(server.flags), "shop", "orders")]
    assert names == ["pending", "running", "ended-6", "deleted-5", "ended-4", "deleted-2"]


def test_status_survives_a_failed_request(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = View(Cluster(server.flags), server.flags, "orders", None, shows_all=False)
    with pytest.raises(ClusterError):
        view.overview([POLICY])
    connection = {"metadata": {"name": "main", "namespace": "shop"}, "spec": {}}
    server.answers |= {
        CONNECTIONS.path("shop", "main"): (200, connection),
        POLICIES.path("shop", "orders"): (200, POLICY),
        REPLAYS.path("shop"): listed(replay("fix", AT, None)),
    }
    overview = view.overview([POLICY])
    assert [record["name"] for record in overview.policies[0]["replays"]] == ["fix"]
    requests = list(server.requests)
    assert view.overview([POLICY]) == overview
    assert server.requests == requests
    monkeypatch.setattr(policies, "READ_SECONDS", 0.0)
    server.answers = dict.fromkeys(server.answers, (503, {}))
    assert view.overview([POLICY]) == overview
    assert len(server.requests) > len(requests)


def test_watch_of_a_policy_ends_with_its_deletion(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster_module, "TICK_SECONDS", 0.01)
    lists = iter([listed(POLICY)])
    connection = {"metadata": {"name": "main", "namespace": "shop"}, "spec": {}}
    server.answers |= {
        CONNECTIONS.path("shop", "main"): (200, connection),
        POLICIES.path("shop", "orders"): (200, POLICY),
        POLICIES.path("shop"): lambda: next(lists, listed()),
        REPLAYS.path("shop"): listed(),
        f"watch {POLICIES.path('shop')}": (200, {}),
    }
    assert server.run("status", "orders", "--watch", "-o", "name") == 1
    captured = capsys.readouterr()
    assert captured.out == "retrypolicy.redrive.io/orders\n"
    assert "the policy orders was deleted" in captured.err


@pytest.mark.parametrize(
    ("annotations", "spec", "problem"),
    [
        ({"redrive.io/paused": "true"}, {}, "the policy is paused"),
        ({}, {"managementPolicy": "Observe"}, "the operator only observes the policy"),
    ],
)
def test_outage_is_not_ignored_without_the_operator(
    server: ApiServer, annotations: Body, spec: Body, problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The ConfigMap of consumers would not change; the end of a request is accepted."""
    metadata = {**POLICY["metadata"], "annotations": annotations}
    policy = {**POLICY, "metadata": metadata, "spec": POLICY["spec"] | spec}
    server.answers |= {
        SELF_REVIEWS: (201, {"status": {"userInfo": {"username": "ann"}}}),
        POLICIES.path("shop", "orders"): (200, policy),
    }
    assert server.run("ignore-outage", "orders", "--for", "1h") == 1
    assert problem in capsys.readouterr().err
    assert server.run("ignore-outage", "orders", "--stop") == 0
    assert server.requests[-1].startswith("PATCH ")


USER: Answer = 201, {"status": {"userInfo": {"username": "ann"}}}


class Stored:
    """The policy `orders`, as the API server stores it.

    Attributes:
        races: changes that others make, each just before a write.
    """

    def __init__(self, server: ApiServer, *races: Callable[[Body], object]) -> None:
        self.body: Body | None = copy.deepcopy(POLICY)
        self.races = list(races)
        self._server = server
        path = POLICIES.path("shop", "orders")
        server.answers |= {SELF_REVIEWS: USER, f"GET {path}": self._read}
        server.answers |= {f"PATCH {path}": self._patch, f"DELETE {path}": self._delete}

    def _read(self) -> Answer:
        return (404, {"details": {"name": "orders"}}) if self.body is None else (200, self.body)

    def _is_stale(self, version: str | None) -> bool:
        assert self.body is not None
        metadata = self.body["metadata"]
        if self.races:
            self.races.pop(0)(self.body)
            metadata["resourceVersion"] += "1"
        return version not in {None, metadata["resourceVersion"]}

    def _patch(self) -> Answer:
        patch = self._server.bodies[-1]
        if self._is_stale(patch["metadata"].get("resourceVersion")):
            return CONFLICTING
        assert self.body is not None
        self.body["metadata"].setdefault("annotations", {}).update(patch["metadata"]["annotations"])
        return 200, self.body

    def _delete(self) -> Answer:
        if self._is_stale(self._server.bodies[-1]["preconditions"].get("resourceVersion")):
            return CONFLICTING
        self.body = None
        return 200, {}


def requested(policy: Body) -> set[str]:
    text = policy["metadata"].get("annotations", {}).get(DEAD_LETTER_NOW, "")
    return {request.origin for request in dead_letter_requests(text, now())}


def requesting(*origins: str) -> Callable[[Body], object]:
    """Return another command that leaves these requests."""
    text = dead_letter_annotation(
        DeadLetterRequest(it, now() + timedelta(hours=1)) for it in origins
    )
    return lambda policy: policy["metadata"].update(annotations={DEAD_LETTER_NOW: text})


@pytest.mark.parametrize("races", [1, 3])
def test_concurrent_dead_letter_requests_are_kept(server: ApiServer, races: int) -> None:
    stored = Stored(server, *(requesting("1:1:0", "2:2:0") for _ in range(races)))
    assert server.run("dead-letter", "orders", "--origin", "3:3:0") == 0
    assert stored.body is not None
    assert requested(stored.body) == {"1:1:0", "2:2:0", "3:3:0"}
    stored.races = [requesting("1:1:0", "3:3:0", "4:4:0")]
    assert server.run("dead-letter", "orders", "--stop", "--origin", "3:3:0") == 0
    assert requested(stored.body) == {"1:1:0", "4:4:0"}


def test_policy_that_changes_all_the_time_is_an_error(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    Stored(server, *(requesting("1:1:0") for _ in range(99)))
    assert server.run("dead-letter", "orders", "--origin", "3:3:0") == 1
    assert "it changed meanwhile" in capsys.readouterr().err


def applied(policy: Body) -> None:
    policy["spec"]["managementPolicy"] = "Manage"
    policy["metadata"]["generation"] = 2


def labelled(policy: Body) -> None:
    policy["metadata"]["labels"] = {"argocd.argoproj.io/instance": "shop"}


def observed(policy: dict[str, Any]) -> None:
    """The operator writes the status."""
    policy["status"] = {"conditions": []}


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("race", [applied, labelled, observed])
def test_diff_keeps_a_policy_that_was_applied_meanwhile(
    server: ApiServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    race: Callable[[Any], object],
    *,
    is_early: bool,
) -> None:
    """It is applied while the operator observes it, or just before the deletion."""
    policy = copy.deepcopy(dict(POLICY))
    policy["metadata"]["generation"] = 1
    file = Path(str(server.flags.kubeconfig)).with_name("policy.yaml")
    file.write_text(json.dumps(policy), "utf-8")
    connection = manifest("BrokerConnection", "main")
    connection["metadata"]["namespace"] = "shop"
    stored = Stored(server, *(() if is_early else (race,)))
    stored.body = None

    def create() -> Answer:
        stored.body = policy
        return 201, policy

    server.answers[f"POST {POLICIES.path('shop')}"] = create
    server.answers[CONNECTIONS.path("shop", "main")] = 200, connection
    monkeypatch.setattr(diff, "awaited", lambda *_: race(policy) if is_early else None)
    assert server.run("diff", str(file), "--observe", "-n", "shop") == 2
    is_kept = race is not observed
    assert (stored.body is not None) == is_kept
    error = capsys.readouterr().err
    assert ("the RetryPolicy shop/orders was applied meanwhile, and is kept" in error) == is_kept
    assert "could not observe the RetryPolicy shop/orders" in error


def test_request_without_time_limit_is_sent(server: ApiServer) -> None:
    """As of kubectl, `--request-timeout 0` is no limit."""
    server.answers[POLICIES.path("shop")] = listed()
    assert server.run("status", "--request-timeout", "0") == 0
