"""The Java client of RocketMQ at a real broker: handlers that fail, and broadcasts."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from py4j.java_gateway import JavaGateway

from redrive.admin.rocketmq import Master, RocketMQSession
from redrive.reading.queues import QueueMessage, parse_stored
from sandbox import builds
from sandbox.java import virtual_machine
from sandbox.rocketmq import ADMIN, RocketMQ
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("rocketmq")

FAILING = """
import java.util.*;
import org.apache.rocketmq.acl.common.*;
import org.apache.rocketmq.client.consumer.*;
import org.apache.rocketmq.client.consumer.listener.*;
import org.apache.rocketmq.client.consumer.rebalance.*;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.remoting.protocol.heartbeat.MessageModel;

public class Failing implements MessageListenerConcurrently {
  private final List delivered = Collections.synchronizedList(new ArrayList());
  private DefaultMQPushConsumer consumer;

  public void start(String server, String user, String secret, String group, String topic,
      String name, boolean broadcast) throws Exception {
    consumer = new DefaultMQPushConsumer(group,
        new AclClientRPCHook(new SessionCredentials(user, secret)),
        new AllocateMessageQueueAveragely());
    consumer.setNamesrvAddr(server);
    consumer.setInstanceName(name);
    consumer.setMaxReconsumeTimes(1);
    consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
    if (broadcast) consumer.setMessageModel(MessageModel.BROADCASTING);
    consumer.subscribe(topic, "*");
    consumer.registerMessageListener(this);
    consumer.start();
  }

  public ConsumeConcurrentlyStatus consumeMessage(
      List messages, ConsumeConcurrentlyContext context) {
    MessageExt message = (MessageExt) messages.get(0);
    String body = new String(message.getBody());
    delivered.add(System.currentTimeMillis() + " " + message.getReconsumeTimes() + " " + body);
    if (body.equals("throws")) throw new IllegalStateException(body);
    return body.equals("null") ? null : ConsumeConcurrentlyStatus.RECONSUME_LATER;
  }

  public String deliveries() {
    synchronized (delivered) { return String.join("\\n", delivered); }
  }

  public void stop() { consumer.shutdown(); }
}
"""
BODIES = ["later", "null", "throws"]


class Java(NamedTuple):
    """A Java with the class of consumers, which py4j knows by its name: it is loaded once."""

    gateway: JavaGateway
    failing: Any


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Java]:
    with virtual_machine(jars=builds.rocketmq()) as gateway:
        home = str(tmp_path_factory.mktemp("java"))  # of logs and offsets of broadcasts
        gateway.jvm.System.setProperty("user.home", home)
        gateway.jvm.System.setProperty("rocketmq.client.localOffsetStoreDir", home)
        compiler = gateway.jvm.org.codehaus.janino.SimpleCompiler()
        compiler.cook(FAILING)
        yield Java(gateway, compiler.getClassLoader().loadClass("Failing"))


class Consumer:
    """A push consumer whose handler fails for each message, and which permits one retry."""

    def __init__(self, java: Java, cluster: RocketMQ, group: str, name: str) -> None:
        array, jvm = java.gateway.new_array, java.gateway.jvm
        constructor = java.failing.getDeclaredConstructor(array(jvm.Class, 0))
        self._failing: Any = constructor.newInstance(array(jvm.Object, 0))
        self._arguments = cluster.name_server, ADMIN, cluster.secret, group, group, name

    def start(self, *, broadcast: bool) -> None:
        self._failing.start(*self._arguments, broadcast)

    def stop(self) -> None:
        self._failing.stop()

    def deliveries(self) -> list[tuple[int, int, str]]:
        """Return the time in milliseconds, the earlier retries and the body of each delivery."""
        lines = [line.split() for line in self._failing.deliveries().splitlines()]
        return [(int(time), int(retries), body) for time, retries, body in lines]

    def handled(self) -> list[tuple[int, str]]:
        return sorted(delivery[1:] for delivery in self.deliveries())


async def prepare(session: RocketMQSession, master: Master) -> str:
    """Create a group, and a topic of its name with three messages."""
    group = f"t-{secrets.token_hex(4)}"
    for topic in (group, f"%RETRY%{group}", f"%DLQ%{group}"):
        await session.put_topic(master, topic, 1)
    await session.put_group(master, {"groupName": group, "retryQueueNums": 1})
    for body in BODIES:
        await session.send(master, group, 0, body.encode(), f"UNIQ_KEY\x01id-{body}\x02")
    return group


async def stored(session: RocketMQSession, master: Master, topic: str) -> list[QueueMessage]:
    content, _ = await session.pull(master, topic, 0, 0, topic.rpartition("%")[2])
    return list(parse_stored(content))


async def test_failures_of_the_java_client_are_retried_and_die(
    java: Java, rocketmq: RocketMQ
) -> None:
    """RECONSUME_LATER, null and an exception are failures; retry 1 has level 3, of 10 s."""
    async with rocketmq.admin.session() as session:
        (master,) = await session.masters()
        group = await prepare(session, master)
        consumer = Consumer(java, rocketmq, group, "one")
        await asyncio.to_thread(consumer.start, broadcast=False)
        twice = sorted((retries, body) for retries in (0, 1) for body in BODIES)
        await asyncio.to_thread(wait_until, lambda: consumer.handled() == twice, 120)
        times: dict[str, list[int]] = {}
        for time, _, body in consumer.deliveries():
            times.setdefault(body, []).append(time)
        assert all(later - earlier >= 10_000 for earlier, later in times.values())
        for _ in range(60):
            if len(dead := await stored(session, master, f"%DLQ%{group}")) == len(BODIES):
                break
            await asyncio.sleep(1)
        await asyncio.to_thread(consumer.stop)
        assert consumer.handled() == twice
    properties = {m.content.decode(): m.properties or {} for m in dead}
    assert {body: names["UNIQ_KEY"] for body, names in properties.items()} == {
        body: f"id-{body}" for body in BODIES
    }
    assert all(names["ORIGIN_MESSAGE_ID"] for names in properties.values())
    assert {names["RETRY_TOPIC"] for names in properties.values()} == {group}


async def test_broadcast_of_rocketmq_is_not_retried(java: Java, rocketmq: RocketMQ) -> None:
    async with rocketmq.admin.session() as session:
        (master,) = await session.masters()
        group = await prepare(session, master)
        consumers = [Consumer(java, rocketmq, group, name) for name in ("one", "two")]
        for consumer in consumers:
            await asyncio.to_thread(consumer.start, broadcast=True)
        once = [(0, body) for body in BODIES]
        for consumer in consumers:
            await asyncio.to_thread(wait_until, lambda: consumer.handled() == once, 60)  # noqa: B023
        await asyncio.sleep(15)  # a retry would come after ten seconds
        for consumer in consumers:
            await asyncio.to_thread(consumer.stop)
            assert consumer.handled() == once
        for topic in (f"%RETRY%{group}", f"%DLQ%{group}"):
            assert not await session.messages(master, topic)
