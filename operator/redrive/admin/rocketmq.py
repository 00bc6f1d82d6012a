"""Administration of a RocketMQ 5 cluster by its remoting protocol.

A frame is its length, the length of its header, the header as JSON, and a body. ACL 2.0 requires a
signature of each call: HMAC-SHA1 over the values of the header in the order of their names, then
the body.

A session opens a connection to a server at its first call, and closes all at its end. So a server
that restarts costs at most one failed reconcile. All sizes and numbers in answers are bounded,
because any program may answer at an address.
"""

from __future__ import annotations

import asyncio
import base64
import enum
import hashlib
import hmac
import itertools
import json
import re
import ssl
import struct
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

from redrive.admin import errors
from redrive.admin.access import Access, Credentials
from redrive.admin.connector import Dialer
from redrive.admin.guards import Fence
from redrive.admin.http import parse_answer
from redrive.admin.shares import Shares
from redrive.policy.values import Patterns
from redrive.reasons import Reason

CALL_SECONDS = 10.0
"""Time-out of a connection attempt, and of a call."""
SESSION_SECONDS = 300.0
"""Time-out of a session: a cluster may list many masters that do not answer."""
_IDLE_SECONDS = 60.0  # a server closes a connection without calls after 120 s
MAX_LINKS = 4
"""Connections of a session that stay open."""
MAX_FRAME = 2**18
MAX_PULLED = 2**25
"""Maximum size of an answer with messages. A broker sends one message of any size that it permits,
or several of 256 KiB together."""
MAX_HEADER = 2**16
MAX_FRAMES = 16
"""Maximum frames before the answer to a call: their parsing blocks the event loop."""
MAX_MASTERS = 64
MAX_QUEUES, MAX_OFFSET = 1_024, 2**47 - 1
"""The sum over all queues of all masters is below 2^63."""
_WITH_SUBSCRIPTION = 4
"""Flag of a pull that has its filter of tags, and waits for no messages."""
_VERSION = 505
"""Version of the protocol that calls name: RocketMQ 5.5."""
_INTEGER_KEY = re.compile(rb"(?<=[{,])(\d{1,19})(?=:)")
"""A key of an object that is an integer: the broker's JSON library writes it without quotes."""


class _Call(enum.IntEnum):
    """Codes of calls."""

    PULL = 11
    PUT_TOPIC = 17
    BROKER_CONFIG = 26
    RUNTIME_INFO = 28
    MAX_OFFSET = 30
    MIN_OFFSET = 31
    CLUSTER_INFO = 106
    PUT_GROUP = 200
    DELETE_GROUP = 207
    DELETE_TOPIC = 215
    TOPIC = 351
    GROUP = 352
    CONSUMERS = 203
    SEND = 310


_WRITES = frozenset({_Call.PUT_TOPIC, _Call.PUT_GROUP, _Call.DELETE_GROUP, _Call.DELETE_TOPIC})
_SUCCESSFUL = {_Call.PULL: frozenset({0, 19, 20, 21}), _Call.SEND: frozenset({0, 10, 11, 12})}
"""Codes of successful answers beside 0. A pull has none at the offset, none there yet, or an offset
that the broker has deleted; each has the next offset. A sent message is stored, but not yet on disk
or at a replica."""


class Master(NamedTuple):
    """The broker of a replica group that accepts writes.

    A name server has no name. A master that no name server lists has no address.
    """

    name: str
    address: str

    def __str__(self) -> str:
        return f"master {self.name} at {self.address}" if self.name else self.address


@dataclass(frozen=True)
class QueueCounts:
    """A topic at one broker: its queues for readers and writers, and its permissions."""

    read: int
    write: int
    permissions: int


class RocketMQReply(NamedTuple):
    """A successful answer: the fields of its header, and its body."""

    fields: Mapping[str, Any]
    body: bytes


@dataclass(frozen=True)
class RocketMQAdmin:
    """A RocketMQ cluster.

    Args:
        name_servers: addresses, as `host:port`.
        credentials: sign each call, except for brokers without authentication.
        cluster: its name; None for the only cluster of the name servers.
        broker_hosts: hosts of brokers beside those of the name servers, as patterns in which `*`
            stands for any characters but a dot. Without a port a pattern covers all ports.
        fence: must be open for each write; None allows all writes.
        dialer: connects within the share of the connection's Kubernetes namespace.
        namespace: that namespace.
        name: name of the connection.
    """

    name_servers: Sequence[str]
    credentials: Credentials
    cluster: str | None = None
    broker_hosts: Sequence[str] = ()
    fence: Fence | None = None
    dialer: Dialer = field(default_factory=Dialer)
    namespace: str = ""
    name: str = ""

    @asynccontextmanager
    async def session(self) -> AsyncIterator[RocketMQSession]:
        """Yield a session; its connections are closed at the end of the block.

        Raises:
            BrokerUnreachableError: the block takes too long.
        """
        async with self.dialer.slot(self.namespace, self.name):
            session = RocketMQSession(self)
            try:
                async with asyncio.timeout(SESSION_SECONDS) as limit:
                    yield session
            except TimeoutError as error:
                if not limit.expired():
                    raise
                raise errors.BrokerUnreachableError(
                    "the cluster does not answer all calls in time",
                    got=f"more than {SESSION_SECONDS:g} s",
                    remedy="check the network and the servers",
                ) from error
            finally:
                session.close()

    def check_address(self, address: str) -> None:
        """Check that signed calls may go to a broker at *address*.

        Raises:
            AdminError: the connection does not name its host.
        """
        hosts = [server.rpartition(":")[0] for server in self.name_servers]
        patterns = tuple(host.lower() for host in (*hosts, *self.broker_hosts))
        allowed = Patterns(patterns, but=".")
        host, _, port = address.lower().rpartition(":")
        is_address = port.isascii() and port.isdecimal() and len(port) <= 5  # noqa: PLR2004
        if (
            not host
            or not host.isprintable()
            or not is_address
            or not (allowed.match(host) or allowed.match(address))
        ):
            raise errors.AdminError(
                "a name server lists a broker at an address that the connection does not name",
                got=errors.one_line(address),
                remedy="add its host to rocketmq.brokerHosts",
                reason=Reason.REDIRECT_REFUSED,
            )


class RocketMQSession:
    """Calls to the servers of a cluster over connections that last until the session ends.

    Args:
        admin: the cluster.
    """

    def __init__(self, admin: RocketMQAdmin) -> None:
        self._admin = admin
        self._links: dict[str, _Link] = {}

    def close(self) -> None:
        """Close all connections."""
        for link in self._links.values():
            link.close()

    async def _call(
        self, server: Master, code: _Call, doing: str, body: bytes = b"", **fields: object
    ) -> RocketMQReply:
        """Call a server; once more with new credentials if it refuses those of the first call.

        Raises:
            AdminError: the server does not answer, or refuses the call.
        """
        credentials = self._admin.credentials
        access = credentials.held
        call = partial(self._call_as, server, code, doing, body, fields)
        try:
            return await call(access)
        except errors.AuthenticationFailedError:
            renewed = await credentials.renewed(access)
            if renewed is None:
                raise
        return await call(renewed)

    async def _call_as(  # noqa: PLR0913, PLR0917  arguments of one call
        self,
        server: Master,
        code: _Call,
        doing: str,
        body: bytes,
        fields: Mapping[str, object],
        access: Access,
    ) -> RocketMQReply:
        if not server.address:
            raise errors.without_master(server.name, doing)
        header = {name: _text(value) for name, value in fields.items()}
        if access.signing_key is not None:
            header = _signed(header, body, *access.signing_key)
        try:
            async with asyncio.timeout(CALL_SECONDS):
                link = await self._link(server.address, access.tls)
                if self._admin.fence is not None and code in _WRITES:
                    self._admin.fence.check()
                most = MAX_PULLED if code is _Call.PULL else MAX_FRAME
                result, remark, answer = await link.call(code, header, body, most)
        except ssl.SSLCertVerificationError as error:
            raise errors.AdminError(
                f"the certificate of {server} is not trusted, or is for another host",
                got=error.verify_message,
                remedy="correct the address, or tls.caRef",
                reason=Reason.CERTIFICATE_REFUSED,
            ) from None
        except (OSError, EOFError) as error:  # a time-out is an OSError
            if (broken := self._links.pop(server.address, None)) is not None:
                broken.close()
            raise errors.BrokerUnreachableError(
                f"{server} does not answer, or not in time: {doing}",
                got=type(error).__name__,
                remedy="check the address, the network and the server",
            ) from error
        if result in _SUCCESSFUL.get(code, (0,)):
            return answer
        raise errors.rocketmq_refusal(f"{server} refused to {doing}", result, remark)

    async def _link(self, address: str, tls: ssl.SSLContext | None) -> _Link:
        if (link := self._links.get(address)) and time.monotonic() - link.used > _IDLE_SECONDS:
            self._links.pop(address).close()
        if address not in self._links:
            while len(self._links) >= MAX_LINKS:
                self._links.pop(next(iter(self._links))).close()
            dialer, namespace = self._admin.dialer, self._admin.namespace
            streams = await dialer.open(address, tls, namespace)
            self._links[address] = _Link(*streams, dialer.shares, namespace)
        return self._links[address]

    def _object(self, body: bytes) -> dict[str, Any]:
        with self._admin.dialer.shares.using(self._admin.namespace):
            return _object(body)

    async def masters(self, recorded: Collection[str] = ()) -> tuple[Master, ...]:
        """Return the masters, sorted by name, from the first name server that answers.

        Each call to a master without address fails: it is down, and still has its topics.

        Args:
            recorded: names of masters that the cluster had before.

        Raises:
            AdminError: no name server answers, or the cluster has no master there, or too many.
        """
        failure: errors.AdminError | None = None
        for address in self._admin.name_servers:
            server = Master("", address)
            try:
                answer = await self._call(server, _Call.CLUSTER_INFO, "list the brokers")
            except errors.BrokerUnreachableError as error:
                failure = failure or error
                continue
            return self._masters(self._object(answer.body), address, recorded)
        assert failure is not None  # noqa: S101  a connection has a name server
        raise failure

    def _masters(
        self, listed: Mapping[str, Any], address: str, recorded: Collection[str]
    ) -> tuple[Master, ...]:
        clusters, brokers = listed.get("clusterAddrTable"), listed.get("brokerAddrTable")
        if not isinstance(clusters, dict) or not isinstance(brokers, dict):
            got = "a list of brokers without clusters or addresses"
            raise errors.unexpected_answer(address, got)
        only = next(iter(clusters)) if len(clusters) == 1 else None
        names = clusters.get(self._admin.cluster or only)
        names = sorted(map(str, names if isinstance(names, list) else ()))
        if len(names) > MAX_MASTERS:
            raise errors.AdminError(
                "the cluster has more brokers than redrive serves",
                got=len(names),
                remedy=f"use a cluster of at most {MAX_MASTERS}",
                reason=Reason.LIMIT_EXCEEDED,
            )
        addresses = dict.fromkeys(recorded, "")
        for name in names:
            match brokers.get(name):
                case {"brokerAddrs": {"0": str(master)}}:
                    self._admin.check_address(master)
                case _:
                    master = ""
            addresses[errors.one_line(name)[:255]] = master
        if not any(addresses.values()):
            raise errors.BrokerUnreachableError(
                f"the name server {address} lists no master of the cluster",
                got=f"clusters {errors.one_line(', '.join(sorted(clusters))) or 'none'}",
                remedy="start a master, or set rocketmq.cluster to one of these clusters",
            )
        return tuple(Master(name, master) for name, master in sorted(addresses.items()))

    async def version(self, master: Master) -> tuple[int, ...]:
        """Return the release of a master; empty if it does not show it."""
        answer = await self._call(master, _Call.RUNTIME_INFO, "read its state")
        table = self._object(answer.body).get("table")
        text = str((table if isinstance(table, dict) else {}).get("brokerVersionDesc", ""))
        match = re.fullmatch(r"V(\d{1,4})_(\d{1,4})_(\d{1,4})", text)
        return () if match is None else tuple(map(int, match.groups()))

    async def retention(self, master: Master) -> timedelta | None:
        """Return the time for which a master keeps messages; None if it does not show it."""
        answer = await self._call(master, _Call.BROKER_CONFIG, "read its configuration")
        match = re.search(rb"^fileReservedTime=(\d{1,6})\s*$", answer.body, re.MULTILINE)
        return None if match is None else timedelta(hours=int(match[1]))

    async def group(self, master: Master, name: str) -> Mapping[str, Any] | None:
        """Return the settings of a consumer group; None if it does not exist."""
        try:
            answer = await self._call(master, _Call.GROUP, f"read group {name}", group=name)
        except errors.AdminNotFoundError:
            return None
        return self._object(answer.body)

    async def put_group(self, master: Master, settings: Mapping[str, Any]) -> None:
        """Create a consumer group, or replace its settings."""
        name = settings["groupName"]
        body = json.dumps(settings).encode()
        await self._call(master, _Call.PUT_GROUP, f"set group {name}", body)

    async def delete_group(self, master: Master, name: str) -> None:
        """Delete a consumer group and its offsets."""
        await self._call(
            master, _Call.DELETE_GROUP, f"delete group {name}", groupName=name, cleanOffset=True
        )

    async def has_consumers(self, master: Master, group: str) -> bool:
        """Return True if consumers of a group are connected to a master."""
        try:
            doing = f"list consumers of group {group}"
            await self._call(master, _Call.CONSUMERS, doing, consumerGroup=group)
        except errors.AdminNotFoundError:
            return False
        return True

    async def topic(self, master: Master, name: str) -> QueueCounts | None:
        """Return the queues of a topic; None if it does not exist."""
        try:
            answer = await self._call(master, _Call.TOPIC, f"read topic {name}", topic=name)
        except errors.AdminNotFoundError:
            return None
        config = self._object(answer.body)
        names = ("readQueueNums", "writeQueueNums", "perm")
        return QueueCounts(*(_number(config.get(n), MAX_QUEUES, master.address) for n in names))

    async def put_topic(self, master: Master, name: str, queues: int) -> None:
        """Create a topic with as many queues, or set them; messages in other queues are kept."""
        await self._call(
            master, _Call.PUT_TOPIC, f"set topic {name}", topic=name, defaultTopic="TBW102",
            readQueueNums=queues, writeQueueNums=queues, perm=6, topicFilterType="SINGLE_TAG",
            topicSysFlag=0, order=False,
        )  # fmt: skip

    async def delete_topic(self, master: Master, name: str) -> None:
        """Delete a topic and its messages."""
        await self._call(master, _Call.DELETE_TOPIC, f"delete topic {name}", topic=name)

    async def messages(self, master: Master, topic: str) -> int:
        """Return the number of messages that a master keeps of a topic; 0 without the topic."""
        counts = await self.topic(master, topic)
        return 0 if counts is None else await self.count(master, topic, counts.read)

    async def count(self, master: Master, topic: str, queues: int) -> int:
        """Return the number of messages that a master keeps of a topic."""
        offsets = [
            await self.offsets(master, topic, queue) for queue in range(min(queues, MAX_QUEUES))
        ]
        return sum(map(len, offsets))

    async def offsets(self, master: Master, topic: str, queue: int) -> range:
        """Return the offsets of the messages that a master keeps of a queue."""
        ends = []
        for code in (_Call.MIN_OFFSET, _Call.MAX_OFFSET):
            doing = f"read offsets of topic {topic}"
            answer = await self._call(master, code, doing, topic=topic, queueId=queue)
            ends.append(_number(answer.fields.get("offset"), MAX_OFFSET, master.address))
        return range(*ends)

    async def pull(  # noqa: PLR0913, PLR0917  a position, and a group that may read there
        self, master: Master, topic: str, queue: int, offset: int, group: str, count: int = 32
    ) -> tuple[bytes, int]:
        """Return stored messages of a queue from an offset on, and the offset that follows them.

        No offset of the group is changed. The broker may have deleted messages at the offset.

        Args:
            group: may read the topic.
            count: maximum number of messages.
        """
        answer = await self._call(
            master,
            _Call.PULL,
            f"read topic {topic}",
            consumerGroup=group,
            topic=topic,
            queueId=queue,
            queueOffset=offset,
            maxMsgNums=count,
            sysFlag=_WITH_SUBSCRIPTION,
            commitOffset=0,
            suspendTimeoutMillis=0,
            subscription="*",
            subVersion=0,
            expressionType="TAG",
        )
        following = _number(answer.fields.get("nextBeginOffset"), MAX_OFFSET, master.address)
        return answer.body, following

    async def send(  # noqa: PLR0913  a position, and the parts of a message
        self,
        master: Master,
        topic: str,
        queue: int,
        content: bytes,
        properties: str = "",
        *,
        flags: int = 0,
        born: int | None = None,
    ) -> None:
        """Store a message without retries. A call that is not answered may have stored it.

        Args:
            properties: as the broker stores them.
            flags: compression of the content.
            born: time of its production in milliseconds since 1970; None for now.

        Raises:
            BrokerRefusedError: the broker does not accept the message, for example a large one.
            BrokerFailedError: the broker is busy, and has not stored it.
        """
        fields = {"a": "redrive", "b": topic, "c": "TBW102", "d": 1, "e": queue, "f": flags}
        fields |= {"g": time.time_ns() // 10**6 if born is None else born, "h": 0, "i": properties}
        fields |= {"j": 0, "k": False, "m": False}
        await self._call(master, _Call.SEND, f"store a message in {topic}", content, **fields)


class _Link:
    """A connection to one server; one call at a time."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        shares: Shares,
        namespace: str,
    ) -> None:
        self._reader, self._writer = reader, writer
        self._shares, self._namespace = shares, namespace
        self._numbers = itertools.count(1)
        self._free, self.used = asyncio.Lock(), time.monotonic()

    def close(self) -> None:
        self._writer.close()

    async def call(
        self, code: _Call, fields: Mapping[str, str], body: bytes, most: int
    ) -> tuple[int, str, RocketMQReply]:
        """Send a call, and return the code, the remark and the content of the answer.

        Args:
            most: maximum size of the answer.

        Raises:
            OSError, EOFError: the connection failed, or the server does not speak this protocol.
        """
        async with self._free:
            number, self.used = next(self._numbers), time.monotonic()
            header = {"code": int(code), "language": "OTHER", "version": _VERSION, "flag": 0}
            header |= {"opaque": number, "extFields": fields, "serializeTypeCurrentRPC": "JSON"}
            self._writer.write(_frame(json.dumps(header).encode(), body))
            await self._writer.drain()
            for _ in range(MAX_FRAMES):  # a server may send calls of its own
                answer, content = await self._read(most)
                if answer.get("opaque") == number and _is_answer(answer):
                    extra = answer.get("extFields")
                    kept = RocketMQReply(extra if isinstance(extra, dict) else {}, content)
                    return answer["code"], str(answer.get("remark") or ""), kept
            raise ConnectionError("no answer among many frames")

    async def _read(self, most: int) -> tuple[Mapping[str, Any], bytes]:
        await self._shares.turn(self._namespace)
        length = int.from_bytes(await self._reader.readexactly(4), "big")
        if not 4 <= length <= most:  # noqa: PLR2004
            raise ConnectionError("no frame of RocketMQ")
        frame = await self._reader.readexactly(length)
        kind, size = frame[0], int.from_bytes(frame[1:4], "big")
        if kind != 0 or not 2 <= size <= min(MAX_HEADER, length - 4):  # noqa: PLR2004
            raise ConnectionError("no header of RocketMQ")
        try:
            with self._shares.using(self._namespace):
                header = parse_answer(frame[4 : 4 + size])
        except ValueError:
            raise ConnectionError("no header of RocketMQ") from None
        if not isinstance(header, dict):
            raise ConnectionError("no header of RocketMQ")
        return header, frame[4 + size :]


def _is_answer(header: Mapping[str, Any]) -> bool:
    flag, code = header.get("flag"), header.get("code")
    return isinstance(code, int) and isinstance(flag, int) and bool(flag & 1)


def _frame(header: bytes, body: bytes) -> bytes:
    return struct.pack(">II", 4 + len(header) + len(body), len(header)) + header + body


def _signed(fields: Mapping[str, str], body: bytes, name: str, secret: str) -> dict[str, str]:
    signed = {**fields, "AccessKey": name}
    content = "".join(signed[field] for field in sorted(signed)).encode() + body
    digest = hmac.digest(secret.encode(), content, hashlib.sha1)
    return {**signed, "Signature": base64.b64encode(digest).decode()}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _object(body: bytes) -> dict[str, Any]:
    """Parse an object of a broker, which may have integers as keys; empty for anything else."""
    try:
        document = parse_answer(_INTEGER_KEY.sub(rb'"\1"', body))
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _number(value: object, most: int, address: str) -> int:
    """Return a number of an answer, which may be written as text.

    Raises:
        AdminError: it is none from 0 to *most*.
    """
    text = str(value)
    if isinstance(value, bool) or not re.fullmatch(r"[0-9]{1,19}", text) or int(text) > most:
        raise errors.unexpected_answer(address, "a value that is not a number within its bounds")
    return int(text)
