"""Checks of manifests: `redrive lint`, without a cluster, or with the objects of one."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain

import click
import yaml

from redrive.api import Body
from redrive.cli.cluster import Cluster, NotPermittedError, ObjectNotFoundError
from redrive.cli.frame import ClusterFlags, cluster_options
from redrive.cli.output import counted, document, now, print_document
from redrive.errors import RedriveError
from redrive.kube.resources import CONNECTIONS, NAMESPACES, POLICIES, Resource
from redrive.lint import report
from redrive.lint.checks import lint as find
from redrive.lint.manifests import Manifest, Manifests
from redrive.lint.rules import IDS, Severity

FINDINGS = 1
UNREADABLE = 2
LIVE = "cluster/"
"""Folder in the positions of objects of the cluster."""


@click.command()
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "json", "sarif"]),
    default="text",
    show_default=True,
    help="Form of the findings.",
)
@click.option(
    "--disable",
    multiple=True,
    metavar="RULE",
    type=click.Choice(sorted(IDS)),
    help="Leave out a rule; may be repeated.",
)
@click.option("--live", "is_live", is_flag=True, help="Check together with those of the cluster.")
@cluster_options
def lint(
    paths: tuple[str, ...],
    output: str,
    disable: tuple[str, ...],
    flags: ClusterFlags,
    *,
    is_live: bool,
) -> int:
    """Check manifests as the API server and the operator would, without either.

    PATH is a file, a folder, or - for standard input, such as the output of helm template or
    kubectl kustomize. Objects of other kinds are ignored. A comment `# redrive-lint: disable=RULE`
    disables a rule for its line, on a line of its own for the next one, and before the first field
    for the whole document. -n is the namespace of manifests that name none.

    With --live RetryPolicies and BrokerConnections of the cluster take part, as far as you may read
    them: each manifest is checked as the successor of its object. Nothing is written.

    Exit code: 0 without findings, 1 with findings, 2 if a path or the cluster can't be read.
    """
    begin = time.monotonic()
    others = "Policies of other repositories are not seen; --live reads the cluster."
    try:
        if is_live:
            manifests, others = _read_live(paths, flags)
        else:
            manifests = Manifests.read(paths, flags.namespace or "")
    except RedriveError as error:
        click.echo(f"error: {error}", err=True)
        return UNREADABLE
    findings = [
        finding
        for finding in find(manifests, now())
        if finding.rule.id not in disable
        and not all(p.file.startswith(LIVE) for p in (finding.position, *finding.related))
    ]
    match output:
        case "json":
            fields = {
                "files": len(manifests.files),
                "errors": report.count(findings, Severity.ERROR),
                "warnings": report.count(findings, Severity.WARNING),
            }
            print_document(document("FindingList", report.items(findings), **fields), output)
        case "sarif":
            click.echo(report.to_sarif(findings), nl=False)
        case _:
            click.echo(report.to_text(findings), nl=False)
    for note in manifests.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(
        f"{counted(report.count(findings, Severity.ERROR), 'error')}, "
        f"{counted(report.count(findings, Severity.WARNING), 'warning')} in "
        f"{counted(len(manifests.files), 'file')} ({time.monotonic() - begin:.1f} s). {others}",
        err=True,
    )
    return FINDINGS if findings else 0


def _read_live(paths: tuple[str, ...], flags: ClusterFlags) -> tuple[Manifests, str]:
    """Read manifests, and the objects that the cluster has beside them; return both, and a summary.

    Raises:
        RedriveError: a path can't be read, or the cluster.
    """
    cluster = Cluster(flags)
    manifests = Manifests.read(paths, cluster.namespace)
    names = sorted({name for manifest in manifests.objects for name in _namespaces(manifest)})
    connections, _ = _live_objects(cluster, CONNECTIONS, names)
    policies, sees_all = _live_objects(cluster, POLICIES, names)
    _add_live(manifests, [*connections, *policies])
    _add_namespaces(manifests, cluster, names)
    place = "all namespaces" if sees_all else f"the namespaces {', '.join(names)} alone"
    return manifests, f"Checked with the RetryPolicies of the cluster: {len(policies)} in {place}."


def _namespaces(manifest: Manifest) -> Iterator[str]:
    """Yield the namespaces of a manifest and of its connection."""
    yield manifest.namespace
    spec = manifest.body.get("spec")
    reference = spec.get("connectionRef") if isinstance(spec, dict) else None
    namespace = reference.get("namespace") if isinstance(reference, dict) else None
    if isinstance(namespace, str):
        yield namespace


def _live_objects(
    cluster: Cluster, kind: Resource, namespaces: Iterable[str]
) -> tuple[list[Body], bool]:
    """Return the objects of all namespaces and True, else those that the caller may read."""
    try:
        return cluster.list(kind, None), True
    except NotPermittedError:
        bodies: list[Body] = []
        for namespace in namespaces:
            with suppress(NotPermittedError):
                bodies += cluster.list(kind, namespace)
        return bodies, False


def _add_live(manifests: Manifests, bodies: Iterable[Body]) -> None:
    """Add objects of the cluster, the oldest first, as they have priority.

    The manifest of an object takes its place.
    """
    live = Manifests()
    for body in sorted(bodies, key=lambda body: str(body["metadata"]["creationTimestamp"])):
        metadata = {n: body["metadata"][n] for n in ("namespace", "name")}
        content = {**body, "metadata": metadata}
        content.pop("status", None)
        file = f"{LIVE}{body['kind']}/{metadata['namespace']}/{metadata['name']}"
        live.add(file, yaml.safe_dump(content).encode())
    own: dict[str, list[Manifest]] = defaultdict(list)
    for manifest in manifests.objects:
        own[manifest.title].append(manifest)
    ordered: list[Manifest] = []
    for manifest in live.objects:
        ordered += own.pop(manifest.title, [manifest])
    manifests.objects = [*ordered, *chain.from_iterable(own.values())]


def _add_namespaces(manifests: Manifests, cluster: Cluster, names: Iterable[str]) -> None:
    """Add the Namespaces of the manifests, whose labels connections select."""
    live = Manifests()
    for name in set(names) - {manifest.name for manifest in manifests.namespaces}:
        with suppress(NotPermittedError, ObjectNotFoundError):
            body = cluster.get(NAMESPACES, None, name)
            metadata = {"name": name, "labels": body["metadata"].get("labels") or {}}
            content = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
            live.add(f"{LIVE}Namespace/{name}", yaml.safe_dump(content).encode())
    manifests.namespaces += live.namespaces
