"""Sends a failed message to the retry or dead-letter topic; called by `processor`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import pulsar

from redrive.copying import reading
from redrive.copying.encoding import encode
from redrive.copying.errors import TooBigError, UnreadableError
from redrive.delivery.middleware.settlement import Failure, Hop
from redrive.delivery.parts import Outgoing
from redrive.policy import envelope
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.policy.properties import ENCODED, NOT_COPIED, PAYLOAD_PREFIX, SOURCE_MESSAGE_ID
from redrive.policy.verdict import Dead, Retry

_KEY, _ORDERING_KEY = "key", "orderingKey"
_MAX_KEY = 1_024
"""Longer keys of a message that is too big are encoded."""


def hop_of(message: pulsar.Message, verdict: Retry | Dead, failure: Failure) -> Hop:
    """Return the copy of *message* that carries out *verdict*; encoded where it can't be one.

    Raises:
        UnreadableError: the message has properties that can't be copied.
    """
    marks: dict[str, str] = {}
    if failure.not_copied:
        marks = {
            NOT_COPIED: ",".join(sorted(failure.not_copied)),
            SOURCE_MESSAGE_ID: reading.id_text(message.message_id()),
        }
        message, texts = _encoded(message, too_big=TooBigError.reason in failure.not_copied)
        marks |= {name: texts[name] for name in (ENCODED, PAYLOAD_PREFIX) if name in texts}
    else:
        texts = _properties(message)
    properties = envelope.for_hop(
        texts, failure.attempt,
        policy=failure.policy, verdict=verdict, cause=failure.cause,
    )  # fmt: skip
    delay = verdict.delay if isinstance(verdict, Retry) else None
    return Hop(message, destination(verdict, failure.policy), properties | marks, delay)


def destination(verdict: object, policy: Policy) -> TopicName:
    """Say where a failed message goes: the policy does, and never a property of the message."""
    return policy.retry_topic if isinstance(verdict, Retry) else policy.dead_letter_topic


def forward(outgoing: Outgoing, hop: Hop) -> pulsar.MessageId | None:
    """Send a copy, and return its id; None if the broker proves that it was stored before.

    Raises:
        NotSentError: no receipt came for it; it may have been stored anyway. The same message keeps
            its identity when it is sent again.
    """
    return outgoing.send(hop.topic, hop.message, dict(hop.properties), hop.deliver_after)


def _properties(message: pulsar.Message) -> dict[str, str]:
    found = reading.properties(message)
    if found is None:
        raise UnreadableError(
            "a message can't be copied to its next topic",
            got="a property that is not UTF-8",
            remedy="have its producer write text; this one becomes an encoded dead letter",
        )
    return found


class _EncodedMessage:
    """The content of an encoded dead letter, with the interface of its original.

    It has no schema: the bytes are those of the original, whatever can be decoded of them.
    """

    def __init__(self, message: pulsar.Message, prefix: bytes, keys: Mapping[str, str]) -> None:
        self._original = message
        self._prefix = prefix
        self._encoded_keys = keys

    def data(self) -> bytes:
        content: bytes = self._original.data()
        return self._prefix + content

    def has_null_value(self) -> bool:
        return not self._prefix and bool(self._original.has_null_value())

    def schema_version(self) -> str:
        return ""

    def partition_key(self) -> str:
        return "" if _KEY in self._encoded_keys else reading.partition_key(self._original)

    def ordering_key(self) -> str:
        return "" if _ORDERING_KEY in self._encoded_keys else reading.ordering_key(self._original)

    def __getattr__(self, name: str) -> object:
        return getattr(self._original, name)


def _encoded(message: pulsar.Message, *, too_big: bool) -> tuple[pulsar.Message, dict[str, str]]:
    """Return the content of the dead letter of *message*, and its properties."""
    keys = {_KEY: reading.partition_key(message), _ORDERING_KEY: reading.ordering_key(message)}
    large = {name: key for name, key in keys.items() if too_big and len(key) > _MAX_KEY}
    encoded = encode(
        reading.raw_properties(message), large, everything=too_big, null=message.has_null_value()
    )
    content = _EncodedMessage(message, encoded.prefix, large)
    return cast("pulsar.Message", content), encoded.properties
