"""Messages of the real client's, made without a broker."""

from __future__ import annotations

import base64
from collections.abc import Container
from datetime import timedelta
from typing import Any

import pulsar

from redrive import RetryConsumer

NO_TEXT = b"\xff\x00\xfe"
AS_BASE64 = base64.b64encode(NO_TEXT).decode()


def message_with(**given: Any) -> pulsar.Message:  # noqa: ANN401 - as the client's builder has it
    """Make a message as it would come from a broker."""
    builder = pulsar._pulsar.MessageBuilder()  # noqa: SLF001 - there is no public way
    builder.content(b"x")
    for name, value in given.items():
        getattr(builder, name)(*value if isinstance(value, tuple) else [value])
    return pulsar.Message._wrap(builder.build())  # noqa: SLF001


def handle_until_quiet(
    consumer: RetryConsumer,
    bad: Container[bytes],
    *,
    quiet: timedelta,
    soon: timedelta | None = None,
) -> list[bytes]:
    """Handle all that comes, the first within *soon*, and return it; *bad* ones fail."""
    handled = []
    wait = soon or quiet
    while (message := consumer.receive(wait)) is not None:
        wait = quiet
        if message.data() in bad:
            consumer.reconsume_later(message, cause=ValueError("bad"))
        else:
            handled.append(message.data())
            consumer.acknowledge(message)
    return handled
