"""Queues of RocketMQ topics at all masters, by blocking calls, and the messages in them.

Pulls by offset change no offset of a group. Memory holds the messages of one pull. Nothing in an
answer is trusted: any producer writes what it likes, so each size is compared with the bytes.
"""

from __future__ import annotations

import asyncio
import struct
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import pyarrow as pa

from redrive.admin.rocketmq import Master, RocketMQAdmin, RocketMQSession
from redrive.api.rocketmq import RocketMQMessages
from redrive.auth.files import BrokerCredentials
from redrive.errors import RedriveError
from redrive.policy.envelope import RECONSUMETIMES
from redrive.reading.positions import Position
from redrive.reading.rows import DeadLetterRow
from redrive.reading.stored import MessagePlace


@dataclass(frozen=True)
class MessageQueue:
    """One queue of a topic at one master, and offsets of it.

    Attributes:
        number: index of the queue.
    """

    master: Master
    topic: str
    number: int
    offsets: range


def named(ids: Sequence[str], queues: Sequence[MessageQueue]) -> list[MessageQueue]:
    """Return the parts of *queues* that have the messages with these ids, each with one message."""
    offsets: dict[tuple[str, int], set[int]] = defaultdict(set)
    for master, number, offset in (written.rsplit(":", 2) for written in ids):
        offsets[master, int(number)].add(int(offset))
    return [
        replace(queue, offsets=range(offset, offset + 1))
        for queue in queues
        for offset in sorted(offsets[queue.master.name, queue.number])
        if offset in queue.offsets
    ]


class QueueCluster:
    """The masters of a RocketMQ cluster. A context, which closes the connections.

    Args:
        messages: address of the cluster, and the group that reads.
        credentials: of the caller.
    """

    def __init__(self, messages: RocketMQMessages, credentials: BrokerCredentials) -> None:
        self._group, self._recorded = messages.group, messages.masters
        self._runner = asyncio.Runner()
        self._session = RocketMQSession(
            RocketMQAdmin(
                messages.name_servers,
                credentials.access(),
                cluster=messages.cluster,
                broker_hosts=messages.broker_hosts,
            )
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()
        self._runner.close()

    def masters(self) -> tuple[Master, ...]:
        """Return the masters that a name server lists."""
        return tuple(master for master in self.all_masters() if master.address)

    def all_masters(self) -> tuple[Master, ...]:
        """Return the masters, also those that are down, see `RocketMQSession.masters`."""
        return self._runner.run(self._session.masters(self._recorded))

    def queues(self, master: Master, topic: str) -> list[MessageQueue]:
        """Return the queues of a topic at a master, with the offsets of the kept messages.

        The list is empty if the master has no such topic.
        """
        run, session = self._runner.run, self._session
        counts = run(session.topic(master, topic))
        return [
            MessageQueue(master, topic, queue, run(session.offsets(master, topic, queue)))
            for queue in range(0 if counts is None else counts.read)
        ]

    def send(
        self,
        queue: MessageQueue,
        content: bytes,
        properties: str = "",
        *,
        flags: int = 0,
        born: int | None = None,
    ) -> None:
        """Store a message, see `RocketMQSession.send`."""
        place = queue.master, queue.topic, queue.number
        send = self._session.send(*place, content, properties, flags=flags, born=born)
        self._runner.run(send)

    def pulls(self, queue: MessageQueue) -> Iterator[tuple[range, list[QueueMessage]]]:
        """Yield the messages of a queue, with the offsets that each pull covers, in order.

        The broker may have deleted messages of these offsets.

        Raises:
            RedriveError: the broker refuses, or delivers nothing for `SILENCE_SECONDS`.
        """
        offset, stop, progress = queue.offsets.start, queue.offsets.stop, time.monotonic()
        while offset < stop:
            place = queue.master, queue.topic, queue.number, offset
            pull = self._session.pull(*place, self._group, min(stop - offset, _MOST_PULLED))
            content, following = self._runner.run(pull)
            try:
                messages = list(parse_stored(content))
            except ValueError as error:
                raise _stopped(queue, str(error)) from error
            if following > offset:
                covered = range(offset, min(following, stop))
                yield covered, [message for message in messages if message.offset in covered]
                offset, progress = following, time.monotonic()
            elif time.monotonic() - progress > SILENCE_SECONDS:
                raise _stopped(queue, f"nothing for {SILENCE_SECONDS:g} s")
            else:
                time.sleep(_PULL_PAUSE_SECONDS)


def _stopped(queue: MessageQueue, got: str) -> RedriveError:
    return RedriveError(
        f"{queue.master} does not deliver messages of {queue.topic}",
        got=got,
        remedy="check the topic and the master, and repeat the command",
        reason="TopicUnreadable",
    )


_MOST_PULLED = 32
"""Maximum number of messages of a pull, which a broker limits likewise."""
SILENCE_SECONDS = 30.0
"""Time without progress after which a reading fails."""
_PULL_PAUSE_SECONDS = 0.2
"""Pause after a pull that has no messages and leads to no further offset."""
_MAX_CONTENT = 64 * 2**20
"""Size of a decompressed message above which its content is not read."""
_TOPIC_WIDTHS = {0xDAA320A7: 1, 0xDAA320AB: 2}
"""Number of bytes of the length of a topic, by the first word of a message behind its size."""
_HEAD, _TIME, _REST = struct.Struct(">II3iqqiq"), struct.Struct(">q"), struct.Struct(">iqi")
_BORN_IPV6, _STORED_IPV6, _COMPRESSED = 1 << 4, 1 << 5, 1
_HOST, _HOST_IPV6 = 8, 20
_CODECS = {1: "lz4", 2: "zstd"}
"""Compressions beside zlib."""


class QueueMessage(NamedTuple):
    """A message as a RocketMQ master stores it.

    Attributes:
        offset: in its queue. A topic that is created again begins with 0.
        log: position in the log of the master, which grows with each message of any topic.
        flags: of its storage, such as the kind of compression.
        born: time of its production in milliseconds since 1970.
        stored: time at which the master stored it.
        retries: number of its retries.
        content: as it was sent.
        properties: names and values; None if they are not UTF-8.
    """

    offset: int
    log: int
    flags: int
    born: int
    stored: int
    retries: int
    content: bytes
    properties: dict[str, str] | None

    def row(self, queue: MessageQueue) -> DeadLetterRow:
        """Return the row of the message; undecodable content is like that of an unknown size."""
        properties = dict(self.properties or {})
        key = properties.pop("KEYS", None)
        properties[RECONSUMETIMES] = str(max(0, self.retries))
        value = self._value()
        return DeadLetterRow(
            partition=queue.number,
            position=Position(self.log, self.offset, 0),
            batch_size=1,
            place=MessagePlace(queue.number, ((0, self.offset),)),
            first_chunk=None,
            encrypted=False,
            unreadable=self.properties is None,
            schema_version=None,
            key=key or None,
            ordering_key=None,
            value=value,
            properties=properties,
            publish_time=max(0, self.stored),
            event_time=max(0, self.born) or None,
            oversized=value is None,
            id=f"{queue.master.name}:{queue.number}:{self.offset}",
        )

    def _value(self) -> bytes | None:
        """Return the decompressed content; None if it is too large or of another form."""
        if not self.flags & _COMPRESSED:
            return self.content
        codec = _CODECS.get(self.flags >> 8 & 7)
        try:
            if codec is None:
                value = zlib.decompressobj().decompress(self.content, _MAX_CONTENT + 1)
            else:
                with pa.input_stream(pa.py_buffer(self.content), compression=codec) as stream:
                    value = stream.read(_MAX_CONTENT + 1)
        except (zlib.error, OSError, ValueError):
            return None
        return value if len(value) <= _MAX_CONTENT else None


def parse_stored(content: bytes) -> Iterator[QueueMessage]:
    """Yield the messages in the answer to a pull.

    Raises:
        ValueError: it has another form.
    """
    at = 0
    while at < len(content):
        size = int.from_bytes(content[at : at + 4])
        if not _HEAD.size <= size <= len(content) - at:
            raise ValueError(f"a message of {size} bytes in {len(content) - at} bytes")
        try:
            yield _parse_message(content[at : at + size])
        except struct.error:
            raise ValueError(f"a message that is shorter than its fields: {size} bytes") from None
        at += size


def _parse_message(frame: bytes) -> QueueMessage:
    _, kind, _, _, _, offset, log, flags, born = _HEAD.unpack_from(frame)
    at = _HEAD.size + (_HOST_IPV6 if flags & _BORN_IPV6 else _HOST)
    (stored,) = _TIME.unpack_from(frame, at)
    at += _TIME.size + (_HOST_IPV6 if flags & _STORED_IPV6 else _HOST)
    retries, _, size = _REST.unpack_from(frame, at)
    at += _REST.size
    if kind not in _TOPIC_WIDTHS or not 0 <= size <= len(frame) - at:
        raise ValueError(f"a message of kind {kind:#x} with {size} bytes of content")
    body, at = frame[at : at + size], at + size
    width = _TOPIC_WIDTHS[kind]
    at += width + int.from_bytes(frame[at : at + width])
    length = int.from_bytes(frame[at : at + 2])
    if at + 2 + length > len(frame):
        raise ValueError(f"{length} bytes of properties in {len(frame) - at} bytes")
    return QueueMessage(
        offset,
        log,
        flags,
        born,
        stored,
        retries,
        body,
        _properties(frame[at + 2 : at + 2 + length]),
    )


def _properties(text: bytes) -> dict[str, str] | None:
    try:
        pairs = (part.partition("\x01") for part in text.decode().split("\x02") if part)
        return {name: value for name, _, value in pairs}
    except UnicodeDecodeError:
        return None
