"""Whatever becomes of its receipt, a message is stored once where the topic deduplicates."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pulsar
import pulsar.schema
import pytest

from redrive import AsyncRetryProducer, RetryProducer
from redrive.delivery import sender
from redrive.delivery.retry_producer import ProducerClosedError
from redrive.messages import NotSentError, TooBigError
from sandbox.pulsar import SUPERUSER
from tests.support.brokers import SEND, SEND_RECEIPT, WithholdingProxy, proxy_of
from tests.support.provisioned_policy import ProvisionedPolicy
from tests.support.topics import deduplicate, drain, path
from tests.support.waiting import awake_time, wait_until

ProvisionPolicy = Callable[..., Any]


SECOND = timedelta(seconds=1)


MANY = 60
"""Retries that outlast whatever holds the broker up."""


@pytest.fixture
def proxy(broker: Any) -> Iterator[WithholdingProxy]:  # noqa: ANN401 - see conftest
    with proxy_of(int(broker.service_url.rpartition(":")[2])) as proxy:
        yield proxy


def producing(provisioned: Any, proxy: WithholdingProxy | None = None) -> tuple[pulsar.Client, str]:  # noqa: ANN401
    """Deduplicate the source topic; return a client that may produce to it, and its name."""
    topic = provisioned.policy.topic
    deduplicate(provisioned.broker, topic)
    url = f"pulsar://127.0.0.1:{proxy.port}" if proxy else provisioned.broker.service_url
    token = provisioned.broker.token(SUPERUSER)
    client = pulsar.Client(
        url,
        authentication=pulsar.AuthenticationToken(token),
        logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
    )
    provisioned.closing.callback(client.close)
    return client, str(topic)


def stored(provisioned: Any, count: int) -> list[pulsar.Message]:  # noqa: ANN401
    """Return the messages of the source topic; check that there are *count* of them."""
    reader = provisioned.client(SUPERUSER).create_reader(
        str(provisioned.policy.topic), pulsar.MessageId.earliest
    )
    messages = [reader.read_next(60_000) for _ in range(count)]
    with pytest.raises(pulsar.Timeout):
        reader.read_next(300)
    reader.close()
    return messages


def contents(provisioned: Any, count: int) -> list[bytes]:  # noqa: ANN401
    return [message.data() for message in stored(provisioned, count)]


def send_on(producer: RetryProducer, content: bytes) -> None:
    """Send until there is a receipt, as a program may; where a broker is slow it stores copies."""
    for _ in range(MANY):
        with contextlib.suppress(NotSentError):
            producer.send(content)
            return
    raise AssertionError(content)


def with_copies(provisioned: Any) -> list[bytes]:  # noqa: ANN401
    """Return the contents of all messages in the source topic, with duplicates."""
    policy, client = provisioned.policy, provisioned.client(SUPERUSER)
    messages = drain(provisioned.broker, client, policy.topic, policy.subscription)
    return [message.data() for message in messages]


def test_message_arrives_with_all_its_fields(provision_policy: ProvisionPolicy) -> None:
    provisioned = provision_policy()
    client, topic = producing(provisioned)
    with RetryProducer(client, topic, name="till-1") as producer:
        message_id = producer.send(
            b"x",
            properties={"tenant": "größe"},
            partition_key="schlüssel",
            ordering_key="order",
            event_timestamp=1_700_000_000_123,
        )
        producer.send(None, partition_key="gone")
        later = producer.send(b"later", deliver_after=timedelta(hours=1))
    message, empty, delayed = stored(provisioned, 3)  # readers know no delay
    assert message.message_id() == message_id
    assert delayed.message_id() == later
    assert (message.data(), message.properties()) == (b"x", {"tenant": "größe"})
    assert (message.partition_key(), message.ordering_key()) == ("schlüssel", "order")
    assert message.event_timestamp() == 1_700_000_000_123
    assert empty.has_null_value()
    assert message.producer_name().startswith("till-1-")
    consumer = provisioned.consumer()
    assert [consumer.receive(60 * SECOND).data() for _ in range(2)] == [b"x", b""]
    assert consumer.receive(SECOND) is None


def test_a_lost_receipt_stores_nothing_twice(
    provision_policy: ProvisionPolicy, proxy: WithholdingProxy
) -> None:
    provisioned = provision_policy()
    client, topic = producing(provisioned, proxy)
    provisioned.send(b"1")  # past the proxy: of no other than "2" a receipt is withheld
    with RetryProducer(client, topic, timeout=SECOND, send_retries=MANY) as producer:
        proxy.withheld[SEND_RECEIPT] = 2
        began = time.monotonic()
        with awake_time() as passed:
            assert producer.send(b"2") is None  # stored by the first send, which told no id
            assert passed() < 30  # its time-outs, and not the client's own
        assert time.monotonic() - began >= 2
        producer.send(b"3")
    assert contents(provisioned, 3) == [b"1", b"2", b"3"]


def test_sends_without_receipts_are_repeated_then_an_error(
    provision_policy: ProvisionPolicy, proxy: WithholdingProxy
) -> None:
    provisioned = provision_policy()
    client, topic = producing(provisioned, proxy)
    with RetryProducer(client, topic, timeout=0.5 * SECOND) as producer:
        proxy.withheld[SEND_RECEIPT] = 4
        with pytest.raises(
            NotSentError,
            match=r"was sent to persistent://.* 4 times.*no answer, no answer, no answer, no answer"
            ".*may store it twice",
        ):
            producer.send(b"1")
        wait_until(lambda: proxy.seen[SEND] >= 4)
        proxy.withheld.clear()  # the broker may be slower than the time-out
        send_on(producer, b"2")
    first, *rest = with_copies(provisioned)
    assert (first, set(rest)) == (b"1", {b"2"})


def test_repeated_send_loses_no_concurrent_message(
    provision_policy: ProvisionPolicy, proxy: WithholdingProxy
) -> None:
    provisioned = provision_policy()
    client, topic = producing(provisioned, proxy)
    with RetryProducer(client, topic, timeout=SECOND, send_retries=MANY, in_flight=3) as producer:
        proxy.withheld[SEND_RECEIPT] = 5
        threads = [
            threading.Thread(target=producer.send, args=(f"{n}".encode(),)) for n in range(30)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(contents(provisioned, 30)) == sorted(f"{n}".encode() for n in range(30))


def test_send_waits_for_an_unreachable_broker(
    provision_policy: ProvisionPolicy, proxy: WithholdingProxy
) -> None:
    provisioned = provision_policy()
    client, topic = producing(provisioned, proxy)
    with RetryProducer(client, topic, timeout=2 * SECOND, send_retries=MANY) as producer:
        producer.send(b"1")
        proxy.refuses = True
        proxy.cut()
        back = threading.Timer(3, setattr, (proxy, "refuses", False))
        back.start()
        producer.send(b"2")
        back.join()
    assert contents(provisioned, 2) == [b"1", b"2"]


def test_a_topic_that_moves_gets_every_message_once(provision_policy: ProvisionPolicy) -> None:
    provisioned = provision_policy(partitions=3)
    client, topic = producing(provisioned)
    sent = [f"{n}".encode() for n in range(60)]
    with RetryProducer(client, topic) as producer:
        for number, content in enumerate(sent):
            if number % 20 == 10:
                provisioned.broker.request("PUT", f"{path(provisioned.policy.topic)}/unload").check(
                    "unload"
                )
            producer.send(content, partition_key=f"{number % 5}" if number % 2 else "")
    messages = stored(provisioned, 60)
    assert sorted(message.data() for message in messages) == sorted(sent)
    # Those without a key are spread; those of one key stay together.
    partitions = {
        key: {m.message_id().partition() for m in messages if m.partition_key() == key}
        for key in {message.partition_key() for message in messages}
    }
    assert partitions.pop("") == {0, 1, 2}
    assert all(len(of_key) == 1 for of_key in partitions.values())


def test_partitions_share_few_producers_and_lose_nothing(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "MAX_OPEN", 2)
    provisioned = provision_policy(partitions=5)
    client, topic = producing(provisioned)
    sent = [f"{n}".encode() for n in range(30)]
    with RetryProducer(client, topic) as producer:
        for content in sent:
            producer.send(content)
        stats = provisioned.broker.request(
            "GET", f"{path(provisioned.policy.topic)}/partitioned-stats"
        )
        publishers = [
            publisher
            for partition in json.loads(stats.body)["partitions"].values()
            for publisher in partition["publishers"]
        ]
        assert len(publishers) <= 2
    assert sorted(contents(provisioned, 30)) == sorted(sent)


def test_unsendable_message_is_refused_at_once(provision_policy: ProvisionPolicy) -> None:
    provisioned = provision_policy()
    client, topic = producing(provisioned)
    with RetryProducer(client, topic, timeout=timedelta(minutes=5)) as producer:
        with awake_time() as passed:
            with pytest.raises(TooBigError, match="keep messages well below it"):
                producer.send(b"x" * 6_000_000)
            assert passed() < 60  # no time-out was waited for
        producer.send(b"small")
    assert contents(provisioned, 1) == [b"small"]


def test_compressed_message_may_exceed_the_broker_limit(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    client, topic = producing(provisioned)
    content = b"0123456789" * 896_000
    with RetryProducer(client, topic, compression=pulsar.CompressionType.ZSTD) as producer:
        producer.send(content)
    assert contents(provisioned, 1) == [content]


def test_missing_produce_right_fails_before_the_first_message(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    with pytest.raises(NotSentError, match=r"AuthorizationError.*this role may produce there"):
        RetryProducer(provisioned.client(provisioned.role), str(provisioned.policy.topic))


def test_producer_refused_in_flight_resumes_when_allowed(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    topic = provisioned.policy.topic
    provisioned.grant(topic, "consume", "produce")
    with RetryProducer(
        provisioned.client(provisioned.role), str(topic), send_retries=1, timeout=SECOND
    ) as producer:
        send_on(producer, b"1")
        provisioned.grant(topic, "consume")
        provisioned.broker.request("PUT", f"{path(topic)}/unload").check("unload")
        with pytest.raises(NotSentError, match="2 times"):
            producer.send(b"2")
        provisioned.grant(topic, "consume", "produce")
        send_on(producer, b"3")
    assert list(dict.fromkeys(with_copies(provisioned))) == [b"1", b"3"]


def test_messages_with_a_schema_are_encoded_by_it(provision_policy: ProvisionPolicy) -> None:
    provisioned = provision_policy()
    client, topic = producing(provisioned)
    with RetryProducer(client, topic, schema=pulsar.schema.StringSchema()) as producer:
        producer.send("größe")
        with pytest.raises(TypeError):
            producer.send(5)
        producer.send("danach")
    assert [content.decode() for content in contents(provisioned, 2)] == ["größe", "danach"]


async def test_async_producer_keeps_call_order_and_a_free_loop(
    provision_policy: ProvisionPolicy, proxy: WithholdingProxy
) -> None:
    provisioned = provision_policy()
    client, topic = producing(provisioned, proxy)
    provisioned.send(b"first")  # past the proxy: the receipt that is withheld is of the next
    async with AsyncRetryProducer(client, topic, timeout=SECOND, send_retries=MANY) as producer:
        proxy.withheld[SEND_RECEIPT] = 1
        sending = asyncio.gather(*[producer.send(f"{n}".encode()) for n in range(5)])
        turns = 0
        while not sending.done():
            await asyncio.sleep(0.01)
            turns += 1
        ids = await sending
        assert turns > 5  # a loop that waits for the receipt turns once or twice
        assert ids[0] is None
        # But for others that were sent again, to a slow broker.
        without = sum(message_id is None for message_id in ids[1:])
        assert without <= proxy.seen[SEND] - len(ids) - 1
    assert await asyncio.to_thread(contents, provisioned, 6) == [
        b"first",
        *(b"%d" % n for n in range(5)),
    ]


async def test_send_after_close_is_refused_and_stores_nothing(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = await asyncio.to_thread(provision_policy)
    client, topic = producing(provisioned)
    producer = RetryProducer(client, topic)
    producer.close()
    producer.close()
    with pytest.raises(ProducerClosedError, match="make a new one"):
        producer.send(b"x")
    async with AsyncRetryProducer(client, topic) as asynchronous:
        calls = [asyncio.ensure_future(asynchronous.send(b"%d" % n)) for n in range(50)]
        await calls[0]
    ends = await asyncio.gather(*calls, return_exceptions=True)
    unsent = [n for n, end in enumerate(ends) if isinstance(end, ProducerClosedError)]
    sent = [b"%d" % n for n in range(50) if n not in unsent]
    assert await asyncio.to_thread(contents, provisioned, len(sent)) == sent


async def test_an_asynchronous_producer_is_refused_like_the_other(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    with pytest.raises(NotSentError, match="AuthorizationError"):
        async with AsyncRetryProducer(
            provisioned.client(provisioned.role), str(provisioned.policy.topic)
        ):
            raise AssertionError


PROGRAM = Path(__file__).parents[3] / "docs" / "design" / "numbered_twice.py"


ROUNDS = 30  # the first one as a rule; on a busy machine the producer may be back too early


@pytest.mark.usefixtures("pulsar_namespace")  # for its further topics
def test_client_has_receipts_for_messages_that_are_lost(
    provision_policy: Callable[..., ProvisionedPolicy],
) -> None:
    """Once it fails, the client is cured: say so on the page."""
    provisioned = provision_policy()
    broker = provisioned.broker
    lost = 0
    for number in range(ROUNDS):
        topic = provisioned.policy.topic.sibling(f"numbered-{number}")
        provisioned.create(topic, "fulfilment", 0)
        deduplicate(broker, topic)
        options = [broker.service_url, broker.admin_url, str(topic), broker.token(SUPERUSER)]
        program = subprocess.run(
            [sys.executable, PROGRAM, *options],
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        # The client may write errors about the closed connection to the same stream.
        match = re.search(r"^16 receipts, (\d+) stored$", program.stdout, re.MULTILINE)
        assert match is not None, program.stdout
        lost += 16 - int(match.group(1))
        if lost:
            return
    raise AssertionError(lost)
