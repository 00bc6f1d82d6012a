"""Messages of `PulsarApi.proto` that a reader decodes for each entry. Pure.

The library protobuf decodes them in C. Only the fields that a reader needs are declared: the
library skips others. Properties are declared as bytes, because a producer may write a text that is
not UTF-8, and because most dead letters share most of their properties; see `stored`.

Each function `decode_…` raises a ValueError if the bytes are no such message, and a MemoryError if
there is no memory for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

_PACKAGE = "redrive"
_NUMBER, _SIGNED = FieldDescriptorProto.TYPE_UINT64, FieldDescriptorProto.TYPE_INT64
_BYTES, _MESSAGE = FieldDescriptorProto.TYPE_BYTES, FieldDescriptorProto.TYPE_MESSAGE
_MESSAGES: Mapping[str, Mapping[str, tuple[int, int]]] = MappingProxyType({
    "MessageIdData": {"ledger": (1, _SIGNED), "entry": (2, _SIGNED)},
    "CommandMessage": {"message_id": (2, _MESSAGE)},
    "KeyValue": {"name": (1, _BYTES), "value": (2, _BYTES)},
    "MessageMetadata": {
        "publish_time": (3, _NUMBER), "properties": (4, _BYTES), "key": (6, _BYTES),
        "compression": (8, _NUMBER), "uncompressed_size": (9, _NUMBER), "in_batch": (11, _NUMBER),
        "event_time": (12, _NUMBER), "encryption_keys": (13, _BYTES),
        "schema_version": (16, _BYTES), "key_in_base64": (17, _NUMBER),
        "ordering_key": (18, _BYTES), "null_value": (25, _NUMBER), "uuid": (26, _BYTES),
        "chunks": (27, _NUMBER), "total_size": (28, _NUMBER), "chunk": (29, _NUMBER),
    },
    "SingleMessageMetadata": {
        "properties": (1, _BYTES), "key": (2, _BYTES), "payload_size": (3, _NUMBER),
        "event_time": (5, _NUMBER), "key_in_base64": (6, _NUMBER), "ordering_key": (7, _BYTES),
        "null_value": (9, _NUMBER),
    },
})  # fmt: skip
"""Number and type of each field. Numbers are unsigned unless all writers agree on a sign."""
_REPEATED = "properties"


class PlaceData(Protocol):
    """Ledger and entry."""

    ledger: int
    entry: int


class Delivery(Protocol):
    """A MESSAGE command."""

    message_id: PlaceData


class Pair(Protocol):
    """A property."""

    name: bytes
    value: bytes


class MessageFields(Protocol):
    """Fields that the metadata of an entry and of a message in a batch have in common."""

    properties: Sequence[bytes]
    key: bytes
    key_in_base64: int
    ordering_key: bytes
    event_time: int
    null_value: int


class EntryMetadata(MessageFields, Protocol):
    """Metadata of an entry."""

    publish_time: int
    compression: int
    uncompressed_size: int
    in_batch: int
    encryption_keys: bytes
    schema_version: bytes
    uuid: bytes
    chunks: int
    total_size: int
    chunk: int

    def HasField(self, name: str) -> bool:  # noqa: N802  as the library names it
        """Return True if a field is present."""


class SingleMetadata(MessageFields, Protocol):
    """Metadata of a message in a batch."""

    payload_size: int


def _file() -> FileDescriptorProto:
    # Fields of the older syntax have no default presence, and texts are not checked.
    file = FileDescriptorProto(name="redrive.proto", package=_PACKAGE, syntax="proto2")
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for name, (number, kind) in fields.items():
            is_repeated = name == _REPEATED
            field = described.field.add(name=name, number=number, type=kind)
            field.label = (
                FieldDescriptorProto.LABEL_REPEATED
                if is_repeated
                else FieldDescriptorProto.LABEL_OPTIONAL
            )
            if kind == _MESSAGE:
                field.type_name = f".{_PACKAGE}.MessageIdData"
    return file


_POOL = DescriptorPool()
_POOL.AddSerializedFile(_file().SerializeToString())


def _decoder(message: str) -> Callable[[bytes], object]:
    """Return a function that decodes a message.

    The library tells lack of memory by the text of its error alone. It is raised as a MemoryError:
    taken for a malformed message, a valid one would be skipped or discarded.
    """
    described = _POOL.FindMessageTypeByName(f"{_PACKAGE}.{message}")
    parse = GetMessageClass(described).FromString

    def decode(written: bytes) -> object:
        try:
            return parse(written)
        except DecodeError as error:
            if "alloc" in str(error):
                raise MemoryError(str(error)) from error
            raise ValueError(f"no message of Protocol Buffers: {written[:64].hex()}") from error

    return decode


decode_delivery: Callable[[bytes], Delivery] = _decoder("CommandMessage")  # type: ignore[assignment]
decode_pair: Callable[[bytes], Pair] = _decoder("KeyValue")  # type: ignore[assignment]
decode_entry: Callable[[bytes], EntryMetadata] = _decoder("MessageMetadata")  # type: ignore[assignment]
decode_single: Callable[[bytes], SingleMetadata] = _decoder("SingleMessageMetadata")  # type: ignore[assignment]
