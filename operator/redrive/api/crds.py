"""The CustomResourceDefinitions, generated from the models.

`python -m redrive.api.crds DIRECTORY` writes them; a test fails when `crds/` differs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from redrive.api import API_VERSION, GROUP, VERSION
from redrive.api.kinds import KINDS, Column, Kind
from redrive.api.rules import VALIDATIONS
from redrive.api.schema import structural


def crds() -> list[dict[str, Any]]:
    """Return one CustomResourceDefinition per kind."""
    return [_crd(kind) for kind in KINDS]


def write(directory: Path) -> None:
    """Write each CRD into *directory*, as `redrive.io_<plural>.yaml`."""
    for crd in crds():
        path = directory / f"{GROUP}_{crd['spec']['names']['plural']}.yaml"
        path.write_text(
            "# Generated from redrive.api by `python -m redrive.api.crds`; do not edit.\n"
            + yaml.safe_dump(crd, sort_keys=False, allow_unicode=True, width=100),
            encoding="utf-8",
        )


def _crd(kind: Kind) -> dict[str, Any]:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind.kind,
                "listKind": f"{kind.kind}List",
                "plural": kind.plural,
                "singular": kind.kind.lower(),
                "shortNames": list(kind.short_names),
                "categories": ["redrive"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [_column(column) for column in kind.columns],
                    "schema": {"openAPIV3Schema": _schema(kind)},
                }
            ],
        },
    }


def _schema(kind: Kind) -> dict[str, Any]:
    rules = [rule.to_schema() for rule in kind.rules]
    return {
        "type": "object",
        "description": kind.description,
        **({VALIDATIONS: rules} if rules else {}),
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"Always `{API_VERSION}`."},
            "kind": {"type": "string", "description": f"Always `{kind.kind}`."},
            "metadata": {"type": "object"},
            "spec": structural(kind.spec),
            "status": structural(kind.status),
        },
    }


def _column(column: Column) -> dict[str, Any]:
    return {
        "name": column.name,
        "type": column.type,
        "description": column.description,
        "jsonPath": column.path,
        "priority": int(column.wide),
    }


def main(arguments: Sequence[str]) -> None:
    """Write the CRDs into the directory that the one argument names."""
    (directory,) = arguments
    write(Path(directory))


if __name__ == "__main__":
    main(sys.argv[1:])
