"""A broker besides the one of the session, for tests with other settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from sandbox import pulsar as brokers
from sandbox.process import Processes
from sandbox.pulsar import Broker


@contextmanager
def own_broker(version: str, state: Path, settings: Mapping[str, object]) -> Iterator[Broker]:
    """Run a broker of a release in `versions.PULSARS` with *settings* and its data in *state*."""
    processes = Processes(state)
    try:
        made = brokers.launch(state, processes, version, settings=settings)
        brokers.wait(made, processes)
        yield made
    finally:
        processes.stop_all()
