"""The schemas that messages were written with; called by whatever sends copies.

A producer that is opened with such a schema stamps its messages with the version that the schema
has on its topic, and adds the schema there where it is missing. So a consumer of any version
decodes a copy as it decodes the message. Contents pass as the bytes they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pulsar
import pulsar.schema

from redrive.copying.errors import (
    NotSentError,
    SchemaNotFoundError,
    SchemaUnsupportedError,
)
from redrive.policy.naming import TopicName

BYTES = pulsar.schema.BytesSchema()
"""The schema of messages that are not decoded."""
LATEST = -1
"""Stands for the version that a topic's schema has now."""

_KEY_VALUE = 15
_Ask = Callable[[Callable[[], Any]], Any]  # the client has no types


class WriterSchema(pulsar.schema.Schema):  # type: ignore[misc]  # the client has no types
    """A schema as its topic has it, for contents that are encoded already.

    Equal to another of the same type and definition, whatever their versions and topics.
    """

    def __init__(self, info: pulsar.schema.SchemaInfo) -> None:
        self._schema_info = info  # what Schema.schema_info() returns
        self._identity = (int(info.schema_type()), info.schema())

    def encode(self, content: bytes) -> bytes:
        """Return *content*."""
        return content

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WriterSchema) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)


class WriterSchemas:
    """Finds the schema of each message, and asks the broker once for each version.

    May be used by several threads. Any role may read schemas.

    Args:
        client: asks the broker.
        ask: makes such a call, and may raise TimeoutError; by default it is waited for as long as
            the client does.
    """

    def __init__(self, client: pulsar.Client, ask: _Ask = lambda read: read()) -> None:
        self._client = client
        self._ask = ask
        self._found: dict[tuple[TopicName, int], WriterSchema] = {}

    def get(self, topic: TopicName, version: int) -> WriterSchema:
        """Return one version of the schema of *topic*, such as its `LATEST`.

        Raises:
            SchemaNotFoundError: the topic has no such version: it was deleted.
            SchemaUnsupportedError: it is one of keys and values.
            NotSentError: the broker did not answer.
        """
        found = self._found.get((topic, version))
        if found is None:
            found = self._found[topic, version] = self._read(topic, version)
        return found

    def _read(self, topic: TopicName, version: int) -> WriterSchema:
        try:
            # The client has it for consumers with an Avro schema, and nowhere else.
            read = functools.partial(self._client._client.get_schema_info, str(topic), version)  # noqa: SLF001
            info = self._ask(read)
        except pulsar.Interrupted:
            raise  # the client's word for KeyboardInterrupt
        except pulsar.TopicNotFound as error:
            raise SchemaNotFoundError(
                "a message can't be sent on without the schema it was written with",
                got=f"no version {version} of the schema of {topic}",
                remedy="restore the schema; without it no consumer can decode the message",
            ) from error
        except (TimeoutError, pulsar.exceptions.PulsarException) as error:
            raise NotSentError(
                f"version {version} of the schema of {topic} could not be read",
                got=str(error) or "no answer",
                remedy="check that the broker answers",
            ) from error
        if int(info.schema_type()) == _KEY_VALUE:
            # The client crashes the process at such a send, and has no way to send a binary key.
            raise SchemaUnsupportedError(
                "the Python client can't send messages with a KeyValue schema",
                got=f"version {version} of the schema of {topic}",
                remedy="consume this topic with Java, or handle these messages without failing",
            )
        return WriterSchema(info)
