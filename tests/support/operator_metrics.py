"""The metrics of the operator of a sandbox."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from sandbox import installation
from sandbox.sandbox import Sandbox


def metric(sandbox: Sandbox, name: str, *, seconds: float = 60, **labels: str) -> float:
    """Return the sum of a metric's samples with these labels.

    Args:
        sandbox: of the operator.
        name: of the samples.
        seconds: the time that the operator has to answer.
        labels: those that samples must have, besides others.
    """
    url = f"{installation.endpoint(sandbox)}/metrics"
    with urllib.request.urlopen(url, timeout=seconds) as answer:  # noqa: S310 - our own
        families = list(text_string_to_metric_families(answer.read().decode()))
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
