from __future__ import annotations

import builtins
import inspect
import re
import subprocess
import sys
from importlib import resources
from typing import get_type_hints

import pytest

import redrive
from redrive.delivery.assembly import Options, RetryOptions
from redrive.delivery.consumers.broadcast import BroadcastOptions

OPTIONAL = {
    "aiohttp", "kopf", "kubernetes", "opentelemetry", "prometheus_client", "pydantic", "pyspark",
    "yaml", "redrive.admin", "redrive.api", "redrive.delivery.consumers.asynchronous",
    "redrive.delivery.consumers.broadcast", "redrive.delivery.middleware.ack_timeouts",
    "redrive.delivery.middleware.outage_breaker", "redrive.delivery.middleware.poison_guard",
    "redrive.policy.codec", "redrive.reasons",
    "redrive.opentelemetry", "redrive.prometheus", "redrive.delivery.retry_producer",
    "redrive.delivery.consumers.simple", "redrive.testing",
}  # fmt: skip
MOST_MODULES = 31
"""Modules of redrive that importing a consumer loads. A change that lowers it lowers the bound."""
SLOW = {
    "asyncio", "concurrent.futures", "hashlib", "multiprocessing", "pathlib", "platform", "socket",
    "ssl", "subprocess", "urllib.parse", "uuid",
}  # fmt: skip
"""Modules that a consumer may import only if the client or Python itself imports them."""


def imported_by(program: str) -> set[str]:
    """Return the modules that a fresh interpreter has at the end of *program*."""
    return set(
        subprocess.run(
            [sys.executable, "-c", f"{program}; import sys; print(*sys.modules)"],
            env={"PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
    )


def test_public_names_are_exactly_the_listed_ones() -> None:
    for name in redrive.__all__:
        assert getattr(redrive, name).__name__ == name
    unknown = "Consumer"
    with pytest.raises(AttributeError, match="no attribute 'Consumer'"):
        getattr(redrive, unknown)


def test_directory_of_the_package_lists_its_public_names() -> None:
    assert [name for name in dir(redrive) if not name.startswith("__")] == sorted(redrive.__all__)


@pytest.mark.parametrize(
    ("consumer", "options"),
    [
        (redrive.RetryConsumer, RetryOptions),
        (redrive.AsyncRetryConsumer, RetryOptions),
        (redrive.SimpleConsumer, Options),
        (redrive.AsyncSimpleConsumer, Options),
        (redrive.BroadcastConsumer, BroadcastOptions),
        (redrive.AsyncBroadcastConsumer, BroadcastOptions),
    ],
)
def test_help_of_a_consumer_lists_its_options(consumer: type, options: type) -> None:
    listed = set(re.findall(r"\w+", inspect.getdoc(consumer) or ""))
    assert set(get_type_hints(options)) <= listed


def test_documented_errors_are_public_names() -> None:
    documented = set()
    for name in redrive.__all__:
        public = getattr(redrive, name)
        shown = [
            getattr(public, member, None) for member in dir(public) if not member.startswith("_")
        ]
        for member in [public, *shown]:
            documented |= set(re.findall(r"^\s+(\w+Error): ", member.__doc__ or "", re.MULTILINE))
    assert "NotInFlightError" in documented
    assert documented <= {*redrive.__all__, *vars(builtins)}


def test_operator_imports_no_pulsar_client() -> None:
    assert "pulsar" not in imported_by("import redrive, redrive.policy.codec")


def test_consumer_imports_no_optional_module() -> None:
    """`make bench` measures the import time; these modules would increase it unnoticed."""
    ours = imported_by("from redrive import PolicyFile, RetryConsumer")
    assert len([name for name in ours if name.split(".")[0] == "redrive"]) <= MOST_MODULES
    assert "redrive.delivery.consumers.consumer" in ours
    assert not ours & (OPTIONAL | SLOW - imported_by("import pulsar"))


def test_package_is_marked_as_typed() -> None:
    assert resources.files(redrive).joinpath("py.typed").is_file()
