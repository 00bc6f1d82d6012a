"""A broker beside that of the session, for tests that need other settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from sandbox import pulsar as brokers
from sandbox.process import Processes
from sandbox.pulsar import Broker


@contextmanager
def own_broker(version: str, state: Path, settings: Mapping[str, object]) -> Iterator[Broker]:
    """Run a broker with *settings*, of a release in `versions.PULSARS`; its data are in *state*."""
    processes = Processes(state)
    try:
        made = brokers.launch(state, processes, version, settings=settings)
        brokers.wait(made, processes)
        yield made
    finally:
        processes.stop_all()
