from __future__ import annotations

import re
import subprocess
import sys
from importlib import resources

import pulsar
import pytest

import redrive
from redrive.messages import id_text

OPTIONAL = {
    "aiohttp", "kopf", "kubernetes", "opentelemetry", "prometheus_client", "pydantic", "pyspark",
    "yaml", "redrive.admin", "redrive.api", "redrive.delivery.consumers.asynchronous",
    "redrive.delivery.consumers.broadcast", "redrive.delivery.middleware.poison_guard",
    "redrive.opentelemetry", "redrive.prometheus", "redrive.delivery.retry_producer",
    "redrive.delivery.consumers.simple", "redrive.testing",
}  # fmt: skip
SLOW = {
    "asyncio", "concurrent.futures", "hashlib", "multiprocessing", "pathlib", "platform", "socket",
    "ssl", "subprocess", "urllib.parse", "uuid",
}  # fmt: skip
"""Of the standard library: a consumer may have them where the client or Python itself has them."""


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


def test_every_public_name_can_be_had_and_no_other() -> None:
    for name in redrive.__all__:
        assert getattr(redrive, name).__name__ == name
    unknown = "Consumer"
    with pytest.raises(AttributeError, match="no attribute 'Consumer'"):
        getattr(redrive, unknown)


def test_every_error_that_a_public_name_is_said_to_raise_can_be_caught_by_a_public_name() -> None:
    said = set()
    for name in redrive.__all__:
        public = getattr(redrive, name)
        shown = [
            getattr(public, member, None) for member in dir(public) if not member.startswith("_")
        ]
        for member in [public, *shown]:
            said |= set(re.findall(r"^\s+(\w+Error): ", member.__doc__ or "", re.MULTILINE))
    assert "NotInFlightError" in said
    assert said <= set(redrive.__all__)


def test_the_operator_does_not_pay_for_what_consumers_need() -> None:
    assert "pulsar" not in imported_by("import redrive, redrive.policy.codec")


def test_a_consumer_imports_nothing_that_it_may_never_use() -> None:
    """`make bench` measures what importing costs; this is what would raise it unseen."""
    ours = imported_by("from redrive import PolicyFile, RetryConsumer")
    assert "redrive.delivery.consumers.consumer" in ours
    assert not ours & (OPTIONAL | SLOW - imported_by("import pulsar"))


def test_the_package_says_that_it_is_typed() -> None:
    assert resources.files(redrive).joinpath("py.typed").is_file()


@pytest.mark.parametrize(
    ("message_id", "text"),
    [
        (pulsar.MessageId(-1, 5, 0), "5:0:-1"),
        (pulsar.MessageId(3, 5, 7), "5:7:3"),
        (pulsar.MessageId(3, 5, 7, 0), "5:7:3:0"),
    ],
)
def test_ids_are_written_as_java_writes_them(message_id: pulsar.MessageId, text: str) -> None:
    assert id_text(message_id) == text
