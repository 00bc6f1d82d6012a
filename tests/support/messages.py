"""Messages of the real client's, made without a broker."""

from __future__ import annotations

import base64
from typing import Any

import pulsar

NO_TEXT = b"\xff\x00\xfe"
AS_BASE64 = base64.b64encode(NO_TEXT).decode()


def message_with(**given: Any) -> pulsar.Message:  # noqa: ANN401 - as the client's builder has it
    """Make a message as it would come from a broker."""
    builder = pulsar._pulsar.MessageBuilder()  # noqa: SLF001 - there is no public way
    builder.content(b"x")
    for name, value in given.items():
        getattr(builder, name)(*value if isinstance(value, tuple) else [value])
    return pulsar.Message._wrap(builder.build())  # noqa: SLF001
