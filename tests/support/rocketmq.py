"""Calls to RocketMQ that only tests make: messages, consumers and `mqadmin`."""

from __future__ import annotations

import asyncio
import io
import json
import shlex
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from redrive.admin.errors import BrokerFailedError
from redrive.admin.rocketmq import Master, RocketMQSession
from sandbox import builds, toolchain
from sandbox.rocketmq import ADMIN, RocketMQ, call

_PULL, _HEARTBEAT, _SEND_BACK, _SEND = 11, 34, 36, 310


async def send(
    session: RocketMQSession, master: Master, topic: str, queue: int = 0, *, retries: int = 0
) -> None:
    """Send a message, with a number of earlier retries, and wait until its queue shows it."""
    properties = f"UNIQ_KEY\x01id-{retries}\x02"
    fields: dict[str, Any] = {
        "a": "tests",
        "b": topic,
        "c": "TBW102",
        "d": 1,
        "e": queue,
        "f": 0,
        "k": False,
    }
    fields |= {"g": time.time_ns() // 10**6, "h": 0, "i": properties, "j": retries, "m": False}
    for _ in range(100):
        try:
            reply = await call(session, master, _SEND, b"message", **fields)
        except BrokerFailedError:  # busy: a message waited in the queue of the broker
            continue
        end = int(reply.fields["queueOffset"]) + 1
        return await wait_until_shown(session, master, topic, end, queue)
    raise TimeoutError("the broker stays busy")


async def wait_until_shown(
    session: RocketMQSession, master: Master, topic: str, end: int, queue: int = 0
) -> None:
    """Wait until a queue shows the messages before the offset *end*.

    A broker confirms a message once it is in its log. The queue, an index of the log, shows it a
    moment later.
    """
    for _ in range(3_000):
        if (await session.offsets(master, topic, queue)).stop >= end:
            return
        await asyncio.sleep(0.01)
    raise TimeoutError(f"{topic} does not show offset {end - 1}")


class StoredMessage(NamedTuple):
    """A message as a broker stores it: its position in the log, and the number of its retries."""

    position: int
    retries: int
    properties: Mapping[str, str]


async def pull(
    session: RocketMQSession, master: Master, topic: str, group: str
) -> list[StoredMessage]:
    """Return up to 32 messages at the beginning of queue 0 of *topic*."""
    fields: dict[str, Any] = {
        "consumerGroup": group,
        "topic": topic,
        "queueId": 0,
        "queueOffset": 0,
    }
    fields |= {"maxMsgNums": 32, "sysFlag": 4, "commitOffset": 0, "suspendTimeoutMillis": 0}
    fields |= {"subscription": "*", "subVersion": 0, "expressionType": "TAG"}
    reply = await call(session, master, _PULL, **fields)
    stream, messages = io.BytesIO(reply.body), []
    while stream.tell() < len(reply.body):
        messages.append(_message(stream))
    return messages


def _message(stream: io.BytesIO) -> StoredMessage:
    """Parse a message whose hosts are of IPv4, in the first version of the format."""

    def read(pattern: str) -> tuple[Any, ...]:
        return struct.unpack(f">{pattern}", stream.read(struct.calcsize(f">{pattern}")))

    def content(length: str) -> bytes:
        return stream.read(read(length)[0])

    *_, position, _ = read("5i2qi")  # size, magic, checksum, queue, flag, offset, position, kind
    *_, retries, _ = read("q8sq8siq")  # times and hosts of birth and storage, transaction
    content("i"), content("b")  # body and topic
    parts = content("h").decode().split("\x02")
    properties = dict(part.split("\x01", 1) for part in parts if part)
    return StoredMessage(position, retries, properties)


async def send_back(
    session: RocketMQSession, master: Master, group: str, message: StoredMessage, level: int
) -> None:
    """Report a message as failed, as a remoting client with at most 16 retries does."""
    fields: dict[str, Any] = {
        "offset": message.position,
        "group": group,
        "delayLevel": level,
        "unitMode": False,
    }
    fields |= {"originMsgId": "", "originTopic": "", "maxReconsumeTimes": 16}
    await call(session, master, _SEND_BACK, **fields)


async def consume(session: RocketMQSession, master: Master, group: str) -> None:
    """Register a consumer of *group*, which is connected until the session ends."""
    consumer = {"groupName": group, "consumeType": "CONSUME_PASSIVELY", "unitMode": False}
    consumer |= {"messageModel": "CLUSTERING", "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET"}
    heartbeat = {"clientID": "test", "producerDataSet": [], "consumerDataSet": [
        {**consumer, "subscriptionDataSet": []}
    ]}  # fmt: skip
    await call(session, master, _HEARTBEAT, json.dumps(heartbeat).encode())


def install_mqadmin(cluster: RocketMQ, folder: Path) -> None:
    """Write the program `mqadmin` of a RocketMQ, which signs as the user `ADMIN`, into *folder*."""
    (folder / "conf").mkdir()
    (folder / "conf" / "tools.yml").write_text(f"accessKey: {ADMIN}\nsecretKey: {cluster.secret}\n")
    command = [str(toolchain.java_home() / "bin" / "java"), "-Xmx128m", "-XX:TieredStopAtLevel=1"]
    command += ["--add-opens=java.base/java.nio=ALL-UNNAMED", f"-Drocketmq.home.dir={folder}"]
    command += [f"-Duser.home={folder}", "-cp", f"{builds.rocketmq()}/*"]
    command += ["org.apache.rocketmq.tools.command.MQAdminStartup"]
    program = folder / "mqadmin"
    program.write_text(_MQADMIN.format(command=shlex.join(command)))
    program.chmod(0o755)


_MQADMIN = """\
#!/bin/sh
for attempt in 1 2 3 4 5; do
  output=$({command} "$@" 2>&1)
  case $output in *success.*) echo "$output"; exit 0;; esac
done
echo "$output"
exit 1
"""
"""A call has five seconds, too few on a busy machine, and the program returns 0 if it fails."""
