"""Whatever becomes of its receipt, a message is stored once where the topic deduplicates."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pulsar
import pulsar.schema
import pytest

from redrive import AsyncRetryProducer, RetryProducer
from redrive.delivery.producing.retry_producer import ProducerClosedError
from redrive.delivery.retrying.errors import NotSentError, TooBigError
from sandbox.pulsar import SUPERUSER
from tests.support.mirror import SEND_RECEIPT, Mirror, mirror_of
from tests.support.stage import path

SetStage = Callable[..., Any]
SECOND = timedelta(seconds=1)


@pytest.fixture
def mirror(broker: Any) -> Iterator[Mirror]:  # noqa: ANN401 - see conftest
    with mirror_of(int(broker.service_url.rpartition(":")[2])) as mirror:
        yield mirror


def producing(stage: Any, mirror: Mirror | None = None) -> tuple[pulsar.Client, str]:  # noqa: ANN401
    """Deduplicate the source topic; return a client that may produce to it, and its name."""
    topic = stage.policy.topic
    stage.broker.request("POST", f"{path(topic)}/deduplicationEnabled", body=True).check("dedup")
    url = f"pulsar://127.0.0.1:{mirror.port}" if mirror else stage.broker.service_url
    token = stage.broker.token(SUPERUSER)
    client = pulsar.Client(
        url,
        authentication=pulsar.AuthenticationToken(token),
        logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
    )
    stage.closing.callback(client.close)
    return client, str(topic)


def stored(stage: Any, count: int) -> list[pulsar.Message]:  # noqa: ANN401
    """What lies in the source topic: *count* messages, and no more."""
    reader = stage.client(SUPERUSER).create_reader(
        str(stage.policy.topic), pulsar.MessageId.earliest
    )
    found = [reader.read_next(10_000) for _ in range(count)]
    with pytest.raises(pulsar.Timeout):
        reader.read_next(300)
    reader.close()
    return found


def contents(stage: Any, count: int) -> list[bytes]:  # noqa: ANN401
    return [message.data() for message in stored(stage, count)]


def test_a_message_arrives_as_it_was_given(set_stage: SetStage) -> None:
    stage = set_stage()
    client, topic = producing(stage)
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
    message, empty, delayed = stored(stage, 3)  # readers know no delay
    assert message.message_id() == message_id
    assert delayed.message_id() == later
    assert (message.data(), message.properties()) == (b"x", {"tenant": "größe"})
    assert (message.partition_key(), message.ordering_key()) == ("schlüssel", "order")
    assert message.event_timestamp() == 1_700_000_000_123
    assert empty.has_null_value()
    assert message.producer_name().startswith("till-1-")
    consumer = stage.consumer()
    assert [consumer.receive(10 * SECOND).data() for _ in range(2)] == [b"x", b""]
    assert consumer.receive(SECOND) is None


def test_a_lost_receipt_stores_nothing_twice(set_stage: SetStage, mirror: Mirror) -> None:
    stage = set_stage()
    client, topic = producing(stage, mirror)
    with RetryProducer(client, topic, timeout=SECOND) as producer:
        assert producer.send(b"1") is not None
        mirror.swallow[SEND_RECEIPT] = 2
        began = time.monotonic()
        assert producer.send(b"2") is None  # stored by the first send, which told no id
        assert 2 <= time.monotonic() - began < 10  # two of its time-outs, and not the default
        assert producer.send(b"3") is not None
    assert contents(stage, 3) == [b"1", b"2", b"3"]


def test_without_any_receipt_all_sends_are_made_and_the_error_says_so(
    set_stage: SetStage, mirror: Mirror
) -> None:
    stage = set_stage()
    client, topic = producing(stage, mirror)
    with RetryProducer(client, topic, timeout=0.5 * SECOND) as producer:
        mirror.swallow[SEND_RECEIPT] = 4
        with pytest.raises(
            NotSentError,
            match=r"was sent to persistent://.* 4 times.*Timeout, Timeout, Timeout, Timeout"
            ".*may store it twice",
        ):
            producer.send(b"1")
        deadline = time.monotonic() + 30
        while mirror.swallow[SEND_RECEIPT]:  # the broker may be slower than the time-out
            assert time.monotonic() < deadline, "it was sent less often"
            time.sleep(0.02)
        assert producer.send(b"2") is not None
    assert contents(stage, 2) == [b"1", b"2"]


def test_messages_sent_at_the_same_time_lose_no_other_when_one_is_sent_again(
    set_stage: SetStage, mirror: Mirror
) -> None:
    stage = set_stage()
    client, topic = producing(stage, mirror)
    with RetryProducer(client, topic, timeout=SECOND, in_flight=3) as producer:
        mirror.swallow[SEND_RECEIPT] = 5
        threads = [
            threading.Thread(target=producer.send, args=(f"{n}".encode(),)) for n in range(30)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(contents(stage, 30)) == sorted(f"{n}".encode() for n in range(30))


def test_a_broker_that_is_away_for_a_while_is_waited_for(
    set_stage: SetStage, mirror: Mirror
) -> None:
    stage = set_stage()
    client, topic = producing(stage, mirror)
    with RetryProducer(client, topic, timeout=2 * SECOND, send_retries=9) as producer:
        producer.send(b"1")
        mirror.deaf = True
        mirror.cut()
        back = threading.Timer(3, setattr, (mirror, "deaf", False))
        back.start()
        producer.send(b"2")
        back.join()
    assert contents(stage, 2) == [b"1", b"2"]


def test_a_topic_that_moves_gets_every_message_once(set_stage: SetStage) -> None:
    stage = set_stage(partitions=3)
    client, topic = producing(stage)
    sent = [f"{n}".encode() for n in range(60)]
    with RetryProducer(client, topic) as producer:
        for number, content in enumerate(sent):
            if number % 20 == 10:
                stage.broker.request("PUT", f"{path(stage.policy.topic)}/unload").check("unload")
            producer.send(content, partition_key=f"{number % 5}" if number % 2 else "")
    found = stored(stage, 60)
    assert sorted(message.data() for message in found) == sorted(sent)
    # Those without a key are spread; those of one key stay together.
    partitions = {
        key: {m.message_id().partition() for m in found if m.partition_key() == key}
        for key in {message.partition_key() for message in found}
    }
    assert partitions.pop("") == {0, 1, 2}
    assert all(len(of_key) == 1 for of_key in partitions.values())


def test_what_nobody_can_take_is_refused_at_once(set_stage: SetStage) -> None:
    stage = set_stage()
    client, topic = producing(stage)
    with RetryProducer(client, topic) as producer:
        began = time.monotonic()
        with pytest.raises(TooBigError, match="keep messages well below it"):
            producer.send(b"x" * 6_000_000)
        assert time.monotonic() - began < 8  # no time-out was waited for
        producer.send(b"small")
    assert contents(stage, 1) == [b"small"]


def test_a_compressed_message_may_be_bigger_than_the_broker_takes(set_stage: SetStage) -> None:
    stage = set_stage()
    client, topic = producing(stage)
    content = b"0123456789" * 896_000
    with RetryProducer(client, topic, compression=pulsar.CompressionType.ZSTD) as producer:
        producer.send(content)
    assert contents(stage, 1) == [content]


def test_who_may_not_produce_is_told_before_the_first_message(set_stage: SetStage) -> None:
    stage = set_stage()
    with pytest.raises(NotSentError, match=r"AuthorizationError.*this role may produce there"):
        RetryProducer(stage.client(stage.role), str(stage.policy.topic))


def test_a_producer_that_is_refused_in_flight_comes_back_when_it_may(set_stage: SetStage) -> None:
    stage = set_stage()
    topic = stage.policy.topic
    stage.grant(topic, "consume", "produce")
    with RetryProducer(
        stage.client(stage.role), str(topic), send_retries=1, timeout=SECOND
    ) as producer:
        producer.send(b"1")
        stage.grant(topic, "consume")
        stage.broker.request("PUT", f"{path(topic)}/unload").check("unload")
        with pytest.raises(NotSentError, match="2 times"):
            producer.send(b"2")
        stage.grant(topic, "consume", "produce")
        producer.send(b"3")
    assert [content for content in contents(stage, 2) if content != b"2"] == [b"1", b"3"]


def test_messages_with_a_schema_are_encoded_by_it(set_stage: SetStage) -> None:
    stage = set_stage()
    client, topic = producing(stage)
    with RetryProducer(client, topic, schema=pulsar.schema.StringSchema()) as producer:
        producer.send("größe")
        with pytest.raises(TypeError):
            producer.send(5)
        producer.send("danach")
    assert [content.decode() for content in contents(stage, 2)] == ["größe", "danach"]


async def test_an_asynchronous_producer_keeps_the_order_of_calls_and_the_loop_free(
    set_stage: SetStage, mirror: Mirror
) -> None:
    stage = set_stage()
    client, topic = producing(stage, mirror)
    async with AsyncRetryProducer(client, topic, timeout=SECOND) as producer:
        await producer.send(b"first")
        mirror.swallow[SEND_RECEIPT] = 1
        sending = asyncio.gather(*[producer.send(f"{n}".encode()) for n in range(5)])
        turns = 0
        while not sending.done():
            await asyncio.sleep(0.01)
            turns += 1
        ids = await sending
        assert turns > 5  # a loop that waits for the receipt turns once or twice
        assert ids[0] is None
        assert all(message_id is not None for message_id in ids[1:])
    assert await asyncio.to_thread(contents, stage, 6) == [b"first", *(b"%d" % n for n in range(5))]


async def test_what_is_sent_after_closing_is_refused_and_not_stored(set_stage: SetStage) -> None:
    stage = await asyncio.to_thread(set_stage)
    client, topic = producing(stage)
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
    assert await asyncio.to_thread(contents, stage, len(sent)) == sent


async def test_an_asynchronous_producer_is_refused_like_the_other(set_stage: SetStage) -> None:
    stage = set_stage()
    with pytest.raises(NotSentError, match="AuthorizationError"):
        async with AsyncRetryProducer(stage.client(stage.role), str(stage.policy.topic)):
            raise AssertionError
