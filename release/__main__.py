"""`python -m release`: write the generated files that are kept in the repository."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from release import (
    CHART,
    CHECKOUT,
    api_reference,
    chart_file,
    chart_readme,
    cli_reference,
    dashboard,
    gitops,
    json_schemas,
    ladders,
    lint_rules,
    reasons,
    values_schema,
)

DEFINITIONS = CHART / "definitions"
"""Copies of `crds/`, not a link: Flux and `git archive` drop symbolic links."""
GENERATED: Mapping[Path, Callable[[], str]] = {
    chart_readme.README: chart_readme.render,
    **dashboard.FILES,
    **cli_reference.FILES,
    values_schema.SCHEMA: values_schema.render,
    chart_file.CHART_FILE: chart_file.render,
    **{page: partial(api_reference.render, kind) for page, kind in api_reference.GENERATED.items()},
    **{file: partial(json_schemas.render, kind) for file, kind in json_schemas.GENERATED.items()},
    ladders.PLOT: ladders.render,
    lint_rules.PAGE: lint_rules.render,
    reasons.PAGE: reasons.render,
    **gitops.GENERATED,
    CHART / "LICENSE": partial((CHECKOUT / "LICENSE").read_text, "utf-8"),
    **{
        DEFINITIONS / crd.name: partial(crd.read_text, "utf-8")
        for crd in (CHECKOUT / "crds").glob("*.yaml")
    },
}


def write() -> None:
    """Write all generated files, and remove definitions of kinds that no longer exist."""
    for file, render in GENERATED.items():
        file.write_text(render(), "utf-8")
    for file in set(DEFINITIONS.iterdir()) - GENERATED.keys():
        file.unlink()


if __name__ == "__main__":
    write()
