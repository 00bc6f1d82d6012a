"""Checks of manifests without a cluster: `redrive lint`."""

from __future__ import annotations

import time

import click

from redrive.cli.output import document, print_document
from redrive.lint import report
from redrive.lint.checks import lint as find
from redrive.lint.manifests import Manifests, ManifestsUnreadableError
from redrive.lint.rules import IDS, Severity

FINDINGS = 1
UNREADABLE = 2


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
@click.option("-n", "--namespace", default="", metavar="NS", help="Of manifests that name none.")
@click.option(
    "--disable",
    multiple=True,
    metavar="RULE",
    type=click.Choice(sorted(IDS)),
    help="Leave out a rule; may be repeated.",
)
def lint(paths: tuple[str, ...], output: str, namespace: str, disable: tuple[str, ...]) -> int:
    """Check manifests as the API server and the operator would, without either.

    PATH is a file, a folder, or - for standard input, such as the output of helm template or
    kubectl kustomize. Objects of other kinds are ignored. A comment `# redrive-lint: disable=RULE`
    disables a rule for its line, on a line of its own for the next one, and before the first field
    for the whole document.

    Exit code: 0 without findings, 1 with findings, 2 if a path can't be read.
    """
    begin = time.monotonic()
    try:
        manifests = Manifests.read(paths, namespace)
    except ManifestsUnreadableError as error:
        click.echo(f"error: {error}", err=True)
        return UNREADABLE
    findings = [finding for finding in find(manifests) if finding.rule.id not in disable]
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
        f"{_number(report.count(findings, Severity.ERROR), 'error')}, "
        f"{_number(report.count(findings, Severity.WARNING), 'warning')} in "
        f"{_number(len(manifests.files), 'file')} ({time.monotonic() - begin:.1f} s). "
        "Policies of other repositories are not seen.",
        err=True,
    )
    return FINDINGS if findings else 0


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
