"""Commands about an installation: `version`, `doctor`, `completion`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Literal

import click

from redrive import __version__
from redrive.api import GROUP, VERSION, Body
from redrive.cli.cluster import KINDS, Cluster, ClusterError, NotPermittedError, role_with
from redrive.cli.documents import CheckResult, ComponentVersion
from redrive.cli.frame import (
    COMMAND_GROUP,
    HAS_FINDINGS,
    ClusterFlags,
    all_namespaces_option,
    cluster_options,
)
from redrive.cli.main import COMPLETION_VARIABLE
from redrive.cli.output import (
    FORMATS,
    TableColumn,
    clean,
    document,
    output_option,
    print_document,
    table,
)
from redrive.cli.policies import connection_status, needs_attention, policy_status
from redrive.kube.resources import APPROVALS, CONNECTIONS, INSPECTIONS, POLICIES, REPLAYS, Resource

OLDEST_KUBERNETES = (1, 32)
_RIGHTS = (
    (POLICIES, "list"),
    (POLICIES, "patch"),
    (REPLAYS, "create"),
    (REPLAYS, "patch"),
    (APPROVALS, "create"),
    (INSPECTIONS, "create"),
)
"""Rights that the commands use, beside those of `status`."""
_COMPLETE_PLUGIN = """\
#!/usr/bin/env sh
# Completes `kubectl redrive`: put it, executable, as kubectl_complete-redrive on PATH.
exec kubectl-redrive __complete "$@"
"""
Result = Literal["ok", "warning", "failed"]


@click.command()
@click.option("--client", "is_client", is_flag=True, help="Of this program alone.")
@output_option("json", "yaml", "jsonl")
@cluster_options
def version(output: str | None, flags: ClusterFlags, *, is_client: bool) -> int:
    """Show the versions of this program, the operators, the brokers and Kubernetes.

    Exits with 3 if a version differs from that of this program, or is not supported. Without a
    cluster it shows that of this program, and fails.
    """
    items, error = [_component("redrive", __version__)], None
    if not is_client:
        try:
            items += _components(Cluster(flags))
        except ClusterError as failure:
            error = failure
    if output in FORMATS:
        print_document(document("VersionList", items), output)
    else:
        columns = TableColumn("COMPONENT"), TableColumn("VERSION"), TableColumn("PROBLEM")
        click.echo("\n".join(table(columns, [list(item.values()) for item in items])))
    if error is not None:
        raise error
    return HAS_FINDINGS if any(item["problem"] for item in items) else 0


def _component(component: str, version: str, problem: str = "") -> ComponentVersion:
    return {"component": component, "version": version, "problem": problem}


def _components(cluster: Cluster) -> Iterator[ComponentVersion]:
    """Yield the components of the cluster, operators and brokers by their connections."""
    answer = cluster.request("GET", "/version")
    numbers = tuple(int("".join(filter(str.isdigit, answer[n]))) for n in ("major", "minor"))
    oldest = ".".join(map(str, OLDEST_KUBERNETES))
    problem = "" if numbers >= OLDEST_KUBERNETES else f"older than {oldest}"
    yield _component("Kubernetes", answer["gitVersion"], problem)
    try:
        connections = cluster.list(CONNECTIONS, None)
    except NotPermittedError:
        connections = cluster.list(CONNECTIONS, cluster.namespace)
    states = list(map(connection_status, connections))
    for operator in sorted({v for state in states if (v := state["operatorVersion"])}):
        differs = f"this program is {__version__}: install that release of it"
        yield _component("operator", operator, "" if operator == __version__ else differs)
    for state in states:
        name = f"broker of {state['namespace']}/{state['name']}"
        unsupported = "BrokerNotSupported" in state["warnings"]
        problem = "not tested with redrive" if unsupported else ""
        yield _component(name, state["brokerVersion"] or "unknown", problem)


@click.command()
@all_namespaces_option
@click.option("--exit-code", is_flag=True, help="Exit with 3 if a check failed or warns.")
@output_option("json", "yaml", "jsonl")
@cluster_options
def doctor(output: str | None, flags: ClusterFlags, *, exit_code: bool) -> int:
    """Check the installation: definitions, versions, connections, policies, and your rights."""
    findings = list(_findings(Cluster(flags), flags))
    if output in FORMATS:
        print_document(document("CheckResultList", findings), output)
    else:
        columns = TableColumn("CHECK"), TableColumn("RESULT"), TableColumn("MESSAGE")
        click.echo("\n".join(table(columns, [list(finding.values()) for finding in findings])))
    is_healthy = all(finding["result"] == "ok" for finding in findings)
    return HAS_FINDINGS if exit_code and not is_healthy else 0


def _finding(check: str, result: Result, message: str) -> CheckResult:
    return {"check": check, "result": result, "message": message}


def _findings(cluster: Cluster, flags: ClusterFlags) -> Iterator[CheckResult]:
    """Yield the result of each check; after a failed one those that need it are left out."""
    try:
        user = cluster.user
    except ClusterError as error:
        yield _finding("API server", "failed", str(error))
        return
    yield _finding("API server", "ok", f"context {cluster.context}, you are {user}")
    try:
        served = {
            r["name"] for r in cluster.request("GET", f"/apis/{GROUP}/{VERSION}")["resources"]
        }
    except ClusterError as error:  # the group is not served, or the API server refuses
        yield _finding("definitions", "failed", str(error))
        return
    missing = [kind.kind for kind in KINDS if kind.plural not in served]
    if missing:
        message = f"not installed: {', '.join(missing)}; install the chart"
        yield _finding("definitions", "failed", message)
        return
    yield _finding("definitions", "ok", f"{GROUP}/{VERSION} has all kinds")
    try:
        for component in _components(cluster):
            text = f"{component['version']} {component['problem']}".strip()
            result: Result = "warning" if component["problem"] else "ok"
            yield _finding(component["component"], result, text)
    except NotPermittedError as error:
        yield _finding("versions", "warning", str(error))
    yield from _object_findings(cluster, flags)
    for kind, verb in _RIGHTS:
        yield _right(cluster, kind, verb)


def _object_findings(cluster: Cluster, flags: ClusterFlags) -> Iterator[CheckResult]:
    """Yield a finding for connections and one for policies, as far as the caller may read them."""
    checks: tuple[tuple[str, Resource, Callable[[Body], str]], ...] = (
        ("connections", CONNECTIONS, _connection_problem),
        ("policies", POLICIES, _policy_problem),
    )
    scope = cluster.scope
    place = "in all namespaces" if scope is None else f"in namespace {scope}"
    for name, kind, problem_of in checks:
        try:
            bodies = cluster.list(kind, cluster.scope)
        except NotPermittedError as error:
            yield _finding(name, "warning", str(error))
            continue
        problems = list(filter(None, map(problem_of, bodies)))
        if problems:
            more = f"; all: {flags.hint('status', *(['-A'] if flags.all_namespaces else []))}"
            message = f"{len(problems)} of {len(bodies)}: {problems[0]}{more}"
            yield _finding(name, "failed", clean(message))
        else:
            yield _finding(name, "ok", f"{len(bodies)} ready {place}")


def _connection_problem(body: Body) -> str:
    state = connection_status(body)
    if not needs_attention(state):
        return ""
    reason = ", ".join([state["reason"]] if state["ready"] != "True" else state["warnings"])
    return f"{state['namespace']}/{state['name']}: {reason}"


def _policy_problem(body: Body) -> str:
    state = policy_status(body)
    if state["ready"] == "True":
        return ""
    return f"{state['namespace']}/{state['name']}: {state['reason'] or 'NotReconciled'}"


def _right(cluster: Cluster, kind: Resource, verb: str) -> CheckResult:
    attributes = {
        "verb": verb,
        "group": kind.group,
        "resource": kind.plural,
        "namespace": cluster.namespace,
    }
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    is_allowed = cluster.request("POST", path, review)["status"]["allowed"]
    text = f"{verb} {kind.plural} in namespace {cluster.namespace}"
    if is_allowed:
        return _finding("rights", "ok", text)
    return _finding("rights", "warning", f"not: {text}; role {role_with(verb, kind.plural)}")


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish", "kubectl"]))
def completion(shell: str) -> None:
    """Print the completion of a shell, or the program by which kubectl completes the plugin.

    For bash: `source <(redrive completion bash)`. For kubectl: write the output of `redrive
    completion kubectl` to a file kubectl_complete-redrive on PATH, and make it executable.
    """
    if shell == "kubectl":
        click.echo(_COMPLETE_PLUGIN, nl=False)
        return
    completer = import_module("click.shell_completion").get_completion_class(shell)
    click.echo(completer(COMMAND_GROUP, {}, "redrive", COMPLETION_VARIABLE).source())


def complete(arguments: list[str]) -> int:
    """Print completions as kubectl reads them, and its directive: no file names.

    Args:
        arguments: words after the name of the program, the last one incomplete.
    """
    shell = import_module("click.shell_completion")
    completer = shell.ShellComplete(COMMAND_GROUP, {}, "redrive", COMPLETION_VARIABLE)
    *words, incomplete = arguments or [""]
    for item in completer.get_completions(words, incomplete):
        click.echo(f"{item.value}\t{item.help}" if item.help else item.value)
    click.echo(":4")
    return 0
