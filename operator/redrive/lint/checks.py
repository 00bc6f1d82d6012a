"""All checks of `redrive lint`: each object alone, then all of them together.

No rule of the operator is written a second time: see `objects` and `references`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import datetime

from redrive.lint.manifests import Manifest, Manifests
from redrive.lint.objects import check_object, is_readable
from redrive.lint.references import check_references
from redrive.lint.rules import Finding, LintRule, finding_at


def lint(manifests: Manifests, now: datetime) -> list[Finding]:
    """Return the findings in *manifests*, in the order of files and lines."""
    findings = [
        Finding(LintRule.YAML_SYNTAX, position, "", _syntax(problem))
        for position, problem in manifests.unreadable
    ]
    for manifest in manifests.objects:
        findings += check_object(manifest)
    findings += _duplicate_objects(manifests)
    valid = [manifest for manifest in manifests.objects if is_readable(manifest)]
    findings += check_references(valid, manifests.namespaces, manifests.secrets, now)
    shown = [*manifests.objects, *manifests.secrets]
    enabled = [finding for finding in findings if not _is_disabled(finding, shown)]
    return sorted(dict.fromkeys(enabled), key=lambda finding: (finding.position, finding.rule.id))


def _syntax(problem: str) -> str:
    return (
        f"the document is not YAML: {problem}; correct it; render templates of Helm first: "
        "helm template CHART | redrive lint -"
    )


def _is_disabled(finding: Finding, manifests: Sequence[Manifest]) -> bool:
    return any(
        finding.rule.id in manifest.disabled.get(line, ())
        for manifest in manifests
        if manifest.document.contains(finding.position)
        for line in (0, finding.position.line)
    )


def _duplicate_objects(manifests: Manifests) -> Iterator[Finding]:
    """Yield each object that its folder has already; other folders may be other environments."""
    first: dict[tuple[str, str], Manifest] = {}
    folders: dict[str, set[str]] = defaultdict(set)
    for manifest in manifests.objects:
        if not manifest.name:
            continue
        folder, title = manifest.document.folder, manifest.title
        folders[title].add(folder)
        other = first.setdefault((folder, title), manifest)
        if other is not manifest:
            path = ("metadata", "name")
            problem = (
                f"another manifest is for the same object; got {title!r}; "
                "rename or remove one of the two"
            )
            yield finding_at(
                manifest, LintRule.DUPLICATE_OBJECT, path, problem, related=(other, path)
            )
    shared = [title for title, places in folders.items() if len(places) > 1]
    if shared:
        manifests.notes.append(
            f"{len(shared)} objects are in several folders, such as {shared[0]}: check each "
            "environment alone"
        )
