"""Dead letters that the masters of a RocketMQ cluster keep, by queue and offset.

A reading has the offsets of the moment of its plan. Pulls by offset change no offset of a group.
Memory holds the messages of one pull. Nothing in an answer is trusted: any producer writes what it
likes, so each size is compared with the bytes.
"""

from __future__ import annotations

import asyncio
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pyarrow as pa

from redrive.admin.rocketmq import Master, RocketMQAdmin, RocketMQSession
from redrive.auth.files import BrokerCredentials
from redrive.errors import RedriveError
from redrive.inspection.job import RocketMQMessages
from redrive.inspection.payloads import AvroSchema
from redrive.inspection.reader import SILENCE_SECONDS, MessageReading, even_shares
from redrive.policy.envelope import RECONSUMETIMES
from redrive.reading.positions import Position
from redrive.reading.rows import DeadLetterRow
from redrive.reading.stored import MessagePlace
from redrive.replay.spec import Choice, Chooser, FailureCause


@dataclass(frozen=True)
class DeadLetterQueues:
    """Queues of a dead-letter topic of RocketMQ at all masters, and the caller's access to them.

    Attributes:
        messages: address of the topic.
    """

    messages: RocketMQMessages
    credentials: BrokerCredentials = field(repr=False)

    @property
    def name(self) -> str:
        """Return the name of the topic."""
        return self.messages.topic

    def plan(self, choice: Choice, newest: int | None, max_bytes: int | None) -> MessageReading:  # noqa: ARG002
        """Plan a reading, see `MessageSource`. Masters show no size of a message."""
        if choice.ids:
            raise RedriveError(
                "messages of RocketMQ can't be selected by id",
                got=choice.ids[0],
                remedy="select by keys, since and until",
                reason="InvalidSpec",
            )
        queues = asyncio.run(self._queues())
        sizes = [len(queue.offsets) for queue in queues]
        total = sum(sizes)
        shares = sizes if newest is None else even_shares(sizes, newest)
        planned = [
            replace(queue, offsets=queue.offsets[len(queue.offsets) - share :])
            for queue, share in zip(queues, shares, strict=True)
        ]
        count = sum(shares)
        return QueueReading(self, total, count, count < total, queues=planned, choice=choice)

    def session(self) -> RocketMQSession:
        """Return a session, which the caller has to close."""
        return RocketMQSession(self._admin())

    def _admin(self) -> RocketMQAdmin:
        messages = self.messages
        return RocketMQAdmin(
            messages.name_servers,
            self.credentials.access(),
            cluster=messages.cluster,
            broker_hosts=messages.broker_hosts,
        )

    async def _queues(self) -> list[DeadLetterQueue]:
        """Return the queues of each master, with the offsets of this moment."""
        with closing(self.session()) as session:
            queues = []
            for master in await session.masters():
                counts = await session.topic(master, self.name)
                for queue in range(0 if counts is None else counts.read):
                    offsets = await session.offsets(master, self.name, queue)
                    queues.append(DeadLetterQueue(master, queue, offsets))
            return queues


@dataclass(frozen=True)
class DeadLetterQueue:
    """One queue at one master, and the offsets that are read."""

    master: Master
    number: int
    offsets: range


@dataclass
class QueueReading(MessageReading):
    """One reading of a topic of RocketMQ. The masters are read one after the other."""

    topic: DeadLetterQueues
    queues: Sequence[DeadLetterQueue] = field(default=(), repr=False)
    choice: Choice = field(default_factory=Choice, repr=False)

    def schema(self, version: int | None) -> AvroSchema | None:  # noqa: ARG002
        """Return None: RocketMQ has no schemas."""
        return None

    def selected(self, on_read: Callable[[], object]) -> Iterator[DeadLetterRow]:
        """Yield the selected messages, see `MessageReading`."""
        chooser = Chooser(self.choice)
        with asyncio.Runner() as runner, closing(self.topic.session()) as session:
            for queue in self.queues:
                for row in self._of_queue(queue, session, runner):
                    on_read()
                    cause = FailureCause.of(row.properties)
                    if chooser.takes(row.position, row.key, row.publish_time, cause):
                        self.matched += 1
                        yield row

    def _of_queue(
        self, queue: DeadLetterQueue, session: RocketMQSession, runner: asyncio.Runner
    ) -> Iterator[DeadLetterRow]:
        offset, progress = queue.offsets.start, time.monotonic()
        topic, group = self.topic.name, self.topic.messages.group
        while offset < queue.offsets.stop:
            content, following = runner.run(
                session.pull(queue.master, topic, queue.number, offset, group)
            )
            try:
                messages = list(parse_stored(content))
            except ValueError as error:
                raise self._stopped(queue, str(error)) from error
            for message in messages:
                if offset <= message.offset < queue.offsets.stop:
                    self.messages += 1
                    yield message.row(queue.master, queue.number)
            if following > offset:
                self.entries += min(following, queue.offsets.stop) - offset
                offset, progress = following, time.monotonic()
            elif time.monotonic() - progress > SILENCE_SECONDS:
                raise self._stopped(queue, f"nothing for {SILENCE_SECONDS:g} s")
            else:
                time.sleep(_PULL_PAUSE_SECONDS)

    def _stopped(self, queue: DeadLetterQueue, got: str) -> RedriveError:
        return RedriveError(
            f"{queue.master} does not deliver messages of {self.topic.name}",
            got=got,
            remedy="check the topic and the master, and repeat the command",
            reason="TopicUnreadable",
        )


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
        offset: in its queue.
        flags: of its storage, such as the kind of compression.
        born: time of its production in milliseconds since 1970.
        stored: time at which the master stored it.
        retries: number of its retries.
        content: as it was sent.
        properties: names and values; None if they are not UTF-8.
    """

    offset: int
    flags: int
    born: int
    stored: int
    retries: int
    content: bytes
    properties: dict[str, str] | None

    def row(self, master: Master, queue: int) -> DeadLetterRow:
        """Return the row of the message; undecodable content is like that of an unknown size."""
        properties = dict(self.properties or {})
        key = properties.pop("KEYS", None)
        properties[RECONSUMETIMES] = str(max(0, self.retries))
        value = self._value()
        return DeadLetterRow(
            partition=queue,
            position=Position(0, self.offset, 0),
            batch_size=1,
            place=MessagePlace(queue, ((0, self.offset),)),
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
            id=f"{master.name}:{queue}:{self.offset}",
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
    _, kind, _, _, _, offset, _, flags, born = _HEAD.unpack_from(frame)
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
        offset, flags, born, stored, retries, body, _properties(frame[at + 2 : at + 2 + length])
    )


def _properties(text: bytes) -> dict[str, str] | None:
    try:
        pairs = (part.partition("\x01") for part in text.decode().split("\x02") if part)
        return {name: value for name, _, value in pairs}
    except UnicodeDecodeError:
        return None
