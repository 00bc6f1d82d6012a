"""Specs of BrokerConnections, with changes of their fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redrive.api.connection import PulsarBroker

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
