"""How objects stand, counted from the tables when Prometheus asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from redrive.cluster.resources import Resource
from redrive.cluster.table import Table

OBJECTS = "redrive_objects"
_LABELS = ("kind", "condition", "status", "reason")


class Standing(Collector):
    """Objects by kind, and by each condition that they show.

    Args:
        tables: of the kinds that have conditions.
    """

    def __init__(self, tables: Mapping[Resource, Table]) -> None:
        self._tables = tables

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Count them, now."""
        family = GaugeMetricFamily(
            OBJECTS, "Objects of redrive, by each condition in their status.", labels=_LABELS
        )
        counts = Counter(
            (resource.kind, condition["type"], condition["status"], condition["reason"])
            for resource, table in self._tables.items()
            for body in table
            for condition in (body.get("status") or {}).get("conditions") or ()
        )
        for labels, count in counts.items():
            family.add_metric(labels, count)
        yield family


@contextmanager
def counting(tables: Mapping[Resource, Table]) -> Iterator[None]:
    """Have metrics tell how the objects of *tables* stand while the block runs."""
    standing = Standing(tables)
    REGISTRY.register(standing)
    try:
        yield
    finally:
        REGISTRY.unregister(standing)
