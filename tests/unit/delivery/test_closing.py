"""Every consumer and producer has as long to close; what it does then runs against a broker."""

from __future__ import annotations

import inspect
from datetime import timedelta

import pytest

import redrive

KINDS = [name for name in redrive.__all__ if name.endswith(("Consumer", "Producer"))]


@pytest.mark.parametrize("kind", KINDS)
def test_closing_has_fifteen_seconds_by_default(kind: str) -> None:
    timeout = inspect.signature(getattr(redrive, kind).close).parameters["timeout"]
    assert timeout.default == timedelta(seconds=15)


def test_there_are_consumers_and_producers() -> None:
    assert {"AsyncBroadcastConsumer", "RetryConsumer", "RetryProducer"} <= set(KINDS)
