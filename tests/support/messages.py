"""Messages of the real client's, made without a broker."""

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


def message_with(**given: Any) -> pulsar.Message:  # noqa: ANN401 - as the client's builder has it
    """Make a message as it would come from a broker."""
    builder = pulsar._pulsar.MessageBuilder()  # noqa: SLF001 - there is no public way
    builder.content(b"x")
    for name, value in given.items():
        getattr(builder, name)(*value if isinstance(value, tuple) else [value])
    return pulsar.Message._wrap(builder.build())  # noqa: SLF001


def receive_until_quiet(
    consumer: RetryConsumer, *, quiet: timedelta, left: Callable[[], int]
) -> Iterator[pulsar.Message]:
    """Yield all that comes, until nothing more does.

    Args:
        left: says how many messages are to be settled yet, by the caller or by the consumer.
    """
    deadline = time.monotonic() + SECONDS
    while (message := consumer.receive(quiet)) is not None or left():
        assert time.monotonic() < deadline, left()
        if message is not None:
            yield message


def handle_until_quiet(
    consumer: RetryConsumer, bad: Container[bytes], *, quiet: timedelta, left: Callable[[], int]
) -> list[bytes]:
    """Handle all of `receive_until_quiet`, and return it; *bad* ones fail."""
    handled: list[bytes] = []
    for message in receive_until_quiet(consumer, quiet=quiet, left=left):
        if message.data() in bad:
            consumer.reconsume_later(message, cause=ValueError("bad"))
        else:
            handled.append(message.data())
            consumer.acknowledge(message)
    return handled
