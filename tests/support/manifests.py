"""Invalid manifests, each with its refusal by admission, the reader of objects, or the operator.

`tests/unit/api/invalid_manifests.yaml` has the cases without a broker;
`tests/integration/bad_input` adds, by category, those for a whole installation. `changed` changes
the specs of BrokerConnections.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from redrive.api import API_VERSION
from redrive.api.connection import PulsarBroker

_TESTS = Path(__file__).parents[1]


class _Loader(yaml.CSafeLoader):
    """A loader with `!times [count, value]`: a string or a list, repeated."""


def _times(loader: _Loader, node: yaml.Node) -> Any:  # noqa: ANN401 - a string or a list
    assert isinstance(node, yaml.SequenceNode)
    count, value = loader.construct_sequence(node, deep=True)
    return value * count


_Loader.add_constructor("!times", _times)


def read(file: Path) -> Any:  # noqa: ANN401 - a list or a mapping
    """Read one file of cases."""
    return yaml.load(file.read_text(encoding="utf-8"), _Loader)  # noqa: S506 - a safe one


_TABLE = read(_TESTS / "unit/api/invalid_manifests.yaml")
VALID: dict[str, dict[str, Any]] = _TABLE["valid"]
"""Kind → the smallest valid spec."""
REFUSED: list[dict[str, Any]] = _TABLE["refused"]


def manifest(kind: str, name: str = "one", **fields: object) -> dict[str, Any]:
    """Return the smallest valid object of *kind* with *fields* in its spec."""
    if kind == "ReplayApproval":  # it has the name of its Replay
        fields = {"replayRef": VALID[kind]["replayRef"] | {"name": name}, **fields}
    return {
        "apiVersion": API_VERSION,
        "kind": kind,
        "metadata": {"name": name},
        "spec": VALID[kind] | fields,
    }


def bad_input() -> dict[str, list[dict[str, Any]]]:
    """The cases of `tests/integration/bad_input`, by category."""
    files = sorted((_TESTS / "integration/bad_input").glob("*.yaml"))
    return {file.stem: read(file) for file in files}


_OF_THE_BROKER = {field.alias or name for name, field in PulsarBroker.model_fields.items()} | {
    "redirectHosts"
}


def changed(spec: Mapping[str, Any], **changes: object) -> dict[str, Any]:
    """Return *spec* with *changes* of its fields, and of those of its broker (`adminURL`, …).

    A field that is changed to None is left out.
    """
    pulsar = {**spec["pulsar"], **{k: v for k, v in changes.items() if k in _OF_THE_BROKER}}
    others = {k: v for k, v in changes.items() if k not in _OF_THE_BROKER}
    fields = {**spec, **others, "pulsar": {k: v for k, v in pulsar.items() if v is not None}}
    return {k: v for k, v in fields.items() if v is not None}
