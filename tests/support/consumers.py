"""Consumers as tests run them.

The module receives messages until none comes, makes asyncio consumers blocking, starts consumers
as processes, and leaves the notes of a crash.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Container, Coroutine, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Self, TypeVar

import pulsar
import pytest

from redrive import (
    AsyncBroadcastConsumer,
    AsyncRetryConsumer,
    AsyncSimpleConsumer,
    Policy,
    RetryConsumer,
)
from redrive.delivery.middleware.poison_guard import CrashLogFile
from redrive.policy import codec

SECONDS = 120
NO_TEXT = b"\xff\x00\xfe"
AS_BASE64 = base64.b64encode(NO_TEXT).decode()


def message_with(**fields: Any) -> pulsar.Message:  # noqa: ANN401 - as in the client's builder
    """Return a message as if received from a broker."""
    builder = pulsar._pulsar.MessageBuilder()  # noqa: SLF001 - no public API
    builder.content(b"x")
    for name, value in fields.items():
        getattr(builder, name)(*value if isinstance(value, tuple) else [value])
    return pulsar.Message._wrap(builder.build())  # noqa: SLF001


def receive_until_quiet(
    consumer: RetryConsumer, *, quiet: timedelta, unsettled: Callable[[], int]
) -> Iterator[pulsar.Message]:
    """Yield all messages until no more come.

    Args:
        unsettled: returns the number of messages that the caller or the consumer must settle.
    """
    deadline = time.monotonic() + SECONDS
    while (message := consumer.receive(quiet)) is not None or unsettled():
        assert time.monotonic() < deadline, unsettled()
        if message is not None:
            yield message


def handle_until_quiet(
    consumer: RetryConsumer,
    bad: Container[bytes],
    *,
    quiet: timedelta,
    unsettled: Callable[[], int],
) -> list[bytes]:
    """Handle all of `receive_until_quiet`, and return it; *bad* ones fail."""
    handled: list[bytes] = []
    for message in receive_until_quiet(consumer, quiet=quiet, unsettled=unsettled):
        if message.data() in bad:
            consumer.reconsume_later(message, cause=ValueError("bad"))
        else:
            handled.append(message.data())
            consumer.acknowledge(message)
    return handled


_T = TypeVar("_T")


class SynchronousAdapter:
    """Awaits each call on an event loop in another thread; handlers run on that loop."""

    def __init__(
        self, consumer: AsyncRetryConsumer | AsyncSimpleConsumer | AsyncBroadcastConsumer
    ) -> None:
        self._consumer: Any = consumer
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._wait(consumer.__aenter__())

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute of the consumer
        attribute = getattr(self._consumer, name)
        if not inspect.iscoroutinefunction(attribute):
            return attribute
        return lambda *args, **named: self._wait(attribute(*args, **named))

    def run(self, handler: Callable[..., Any], **choices: Any) -> None:  # noqa: ANN401
        self._wait(self._consumer.run(_asynchronous(handler), **choices))

    def run_batches(self, handler: Callable[..., Any], **choices: Any) -> None:  # noqa: ANN401
        self._wait(self._consumer.run_batches(_asynchronous(handler), **choices))

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._wait(self._consumer.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, call: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()


def _asynchronous(handler: Callable[..., _T]) -> Callable[..., Coroutine[Any, Any, _T]]:
    @functools.wraps(handler)
    async def handle(argument: Any) -> _T:  # noqa: ANN401 - a message, or several
        await asyncio.sleep(0)
        return handler(argument)

    return handle


SOURCES = Path(__file__).parents[2] / "operator"
PROGRAM = """
import os, signal, pulsar
from redrive import RetryConsumer, load_policy

client = pulsar.Client(
    os.environ["URL"],
    authentication=pulsar.AuthenticationToken(os.environ["TOKEN"]),
    logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
)
"""


StartProgram = Callable[[Any, str], subprocess.Popen[str]]


@pytest.fixture
def start_program(tmp_path: Path) -> StartProgram:
    """Start a Python process that consumes as the policy's role; `PROGRAM` is its beginning."""

    def start_program(provisioned: Any, program: str) -> subprocess.Popen[str]:  # noqa: ANN401 - see conftest
        file = tmp_path / "policy.json"
        new = file.with_suffix(".new")
        new.write_text(codec.encode(provisioned.policy), encoding="utf-8")
        new.replace(file)  # another program may be reading it
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM + program],
            env=os.environ
            | {
                "PYTHONPATH": str(SOURCES),
                "PYTHONUNBUFFERED": "1",
                "URL": provisioned.broker.service_url,
                "TOKEN": provisioned.broker.token(provisioned.role),
                "REDRIVE_POLICY": str(file),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start_program


def interrupted(process: subprocess.Popen[str], sent: signal.Signals, workers: int = 1) -> str:
    """Send a signal after each worker has printed "handling", and return the output."""
    assert process.stdout is not None
    for _ in range(workers):
        assert process.stdout.readline() == "handling\n"
    process.send_signal(sent)
    output, _ = process.communicate(timeout=180)
    return output


def leave_notes(folder: Path, policy: Policy, *keys: str) -> None:
    """Write notes of *keys* in flight, added to earlier ones, as a kill leaves them."""
    log_file = CrashLogFile(folder, policy)
    for key in keys:
        log_file.begin(key)
    (file,) = folder.glob("*.notes")
    notes = file.read_text()
    log_file.close()
    file.write_text(notes)
