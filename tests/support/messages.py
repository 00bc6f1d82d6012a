"""Messages of the real client, created without a broker."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Container, Iterator
from datetime import timedelta
from typing import Any

import pulsar

from redrive import RetryConsumer

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
