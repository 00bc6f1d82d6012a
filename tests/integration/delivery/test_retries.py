"""Hops of a failing message: delays, names, properties and counts at a real broker."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain, pairwise
from typing import Any

import pulsar
import pytest

from redrive import Attempt
from redrive.delivery import arrivals, connection
from redrive.delivery.connection import SubscribeError
from redrive.delivery.parts import SystemClock
from redrive.delivery.reporting import Event, Name
from redrive.errors import InvalidSpecError
from redrive.messages import id_text
from redrive.policy.model import SubscriptionType
from redrive.policy.naming import Scheme
from sandbox.pulsar import SUPERUSER
from tests.support.consumers import receive_until_quiet
from tests.support.provisioned_policy import ProvisionedPolicy
from tests.support.waiting import awake_time

ProvisionPolicy = Callable[..., Any]
TICK = timedelta(seconds=1)  # a broker may be early by this much
SOON = timedelta(seconds=180)
DELAYS = (1.0, 2.0)
EARLIER_SECONDS = 0.05
"""The client reads the time of a message a moment before it was sent."""


def elapsed(since: float) -> timedelta:
    return timedelta(seconds=time.monotonic() - since)


def test_failing_message_climbs_the_ladder_to_a_dead_letter(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy(delays=["1s", "2s"], max_retries=2)
    (origin,) = provisioned.send(b"bad", partition_key="k1")
    consumer = provisioned.consumer()

    delays, counts = [], []
    failed = time.monotonic()
    for attempt in range(3):
        message = consumer.receive(SOON)
        delays.append(elapsed(failed))
        counts.append(message.properties().get("RECONSUMETIMES"))
        failed = time.monotonic()
        consumer.reconsume_later(message, cause=ValueError(f"attempt {attempt + 1}"))

    assert counts == [None, "1", "2"]
    assert delays[2] >= timedelta(seconds=2) - TICK
    (dead,) = provisioned.dead_letters(1)
    properties = dead.properties()
    assert re.fullmatch(r"[0-9a-f]{16}", properties.pop("REDRIVE_CAUSE_FINGERPRINT"))
    failed_at = datetime.fromisoformat(properties.pop("REDRIVE_FAILED_AT"))
    assert abs(failed_at - datetime.now(UTC)) < timedelta(minutes=10)  # noqa: TID251 - a test
    first_failed_at = datetime.fromisoformat(properties.pop("REDRIVE_FIRST_FAILED_AT"))
    assert timedelta(seconds=3) - 2 * TICK <= failed_at - first_failed_at < 4 * SOON
    assert properties == {
        "RECONSUMETIMES": "3",
        "ORIGIN_MESSAGE_ID": id_text(origin),
        "REDRIVE_FIRST_ID": id_text(origin),
        "REAL_TOPIC": str(provisioned.policy.topic),
        "REAL_SUBSCRIPTION": "fulfilment",
        "RETRY_TOPIC": str(provisioned.policy.retry_topic),
        "REDRIVE_ATTEMPT": "3",
        "REDRIVE_CAUSE_TYPE": "ValueError",
        "REDRIVE_CAUSE_MESSAGE": "attempt 3",
        "REDRIVE_CAUSE_TRACE": "",  # it was made, not raised
        "REDRIVE_CONSUMER": consumer.name,
        "REDRIVE_DEAD_REASON": "RetriesExhausted",
    }
    consumer.close()
    provisioned.wait_until_settled()


def test_retry_waits_for_the_requested_delay(provision_policy: ProvisionPolicy) -> None:
    provisioned = provision_policy(delays=["1h"])
    provisioned.send(b"later")
    consumer = provisioned.consumer()
    message = consumer.receive(SOON)
    failed = time.monotonic()
    consumer.reconsume_later(message, delay=3)

    again = consumer.receive(SOON)

    waited = elapsed(failed)
    assert again.data() == b"later"
    assert again.properties()["DELAY_TIME"] == "3000"
    assert waited >= timedelta(seconds=3) - TICK


def test_messages_travel_under_the_names_of_another_scheme(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy(max_retries=1, scheme=Scheme.ROCKETMQ)
    provisioned.send(b"bad")
    consumer = provisioned.consumer()
    for _ in range(2):
        consumer.reconsume_later(consumer.receive(SOON))
    [dead] = provisioned.dead_letters(1)
    assert dead.properties()["RETRY_TOPIC"] == str(provisioned.policy.retry_topic)


def test_a_message_of_another_consumer_is_refused(provision_policy: ProvisionPolicy) -> None:
    provisioned = provision_policy()
    provisioned.send(b"x", topic=provisioned.policy.dead_letter_topic)
    (foreign,) = provisioned.dead_letters(1)
    consumer = provisioned.consumer()

    for settle in (consumer.acknowledge, consumer.reconsume_later):
        with pytest.raises(InvalidSpecError, match="by the consumer that received it"):
            settle(foreign)


def test_key_shared_source_keeps_key_order_and_retries(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy(kind=SubscriptionType.KEY_SHARED)
    sent = [f"{n}".encode() for n in range(20)]
    provisioned.send(*sent, partition_key="one")
    consumer = provisioned.consumer()
    first = [consumer.receive(SOON) for _ in sent]
    assert [message.data() for message in first] == sent

    provisioned.client(provisioned.role).subscribe(  # as the Java client does; types can't be mixed
        str(provisioned.policy.retry_topic),
        provisioned.policy.subscription,
        consumer_type=pulsar.ConsumerType.Shared,
    ).close()
    consumer.reconsume_later(first[0])
    again = consumer.receive(SOON)
    assert (again.data(), again.partition_key()) == (b"0", "one")
    assert again.topic_name() == str(provisioned.policy.retry_topic)


@pytest.mark.parametrize(
    ("kind", "partitions"), [(SubscriptionType.EXCLUSIVE, 0), (SubscriptionType.FAILOVER, 2)]
)
def test_exclusive_or_failover_source_has_shared_retries(
    provision_policy: ProvisionPolicy,
    kind: SubscriptionType,
    partitions: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    provisioned = provision_policy(kind=kind, partitions=partitions, delays=["2s"], max_retries=1)
    provisioned.send(*[f"{n}".encode() for n in range(4)], partition_key="one")
    with caplog.at_level(logging.WARNING, "redrive"):
        consumer = provisioned.consumer()
    [warning] = caplog.messages
    assert f"consumed as {kind}, its retries as Shared: their order is lost" in warning
    if kind == SubscriptionType.EXCLUSIVE:
        with pytest.raises(SubscribeError, match=r"ConsumerBusy.*change subscriptionType"):
            provisioned.consumer()

    failed = time.monotonic()
    for n in range(4):
        message = consumer.receive(SOON)
        assert message.data() == f"{n}".encode()
        consumer.reconsume_later(message)
    again = [consumer.receive(SOON) for _ in range(4)]
    assert elapsed(failed) >= timedelta(seconds=2) - TICK
    for message in again:
        assert message.topic_name().startswith(str(provisioned.policy.retry_topic))
        consumer.reconsume_later(message)
    provisioned.dead_letters(4)
    consumer.close()
    assert provisioned.consumer().receive(timedelta(seconds=1)) is None


def test_every_partition_of_source_and_retry_topic_is_consumed(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy(partitions=3, max_retries=1)
    sent = [f"{n}".encode() for n in range(30)]
    provisioned.send(*sent)
    consumer = provisioned.consumer()

    handled: dict[str, list[bytes]] = defaultdict(list)
    for _ in range(2 * len(sent)):
        message = consumer.receive(SOON)
        handled[message.topic_name()].append(message.data())
        consumer.reconsume_later(message)

    for topic in (provisioned.policy.topic, provisioned.policy.retry_topic):
        parts = [handled.pop(str(topic.partition(index))) for index in range(3)]
        assert sorted(chain(*parts)) == sorted(sent)
    assert not handled
    dead = provisioned.dead_letters(len(sent))
    assert sorted(message.data() for message in dead) == sorted(sent)
    assert {message.properties()["RETRY_TOPIC"] for message in dead} == {
        str(provisioned.policy.retry_topic)
    }


def test_each_message_of_a_batch_has_an_origin_of_its_own(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    producer = provisioned.client("superuser").create_producer(
        str(provisioned.policy.topic), batching_enabled=True, batching_max_publish_delay_ms=60_000
    )
    for n in range(5):
        producer.send_async(f"{n}".encode(), lambda *_: None)
    producer.flush()
    consumer = provisioned.consumer()

    for _ in range(5):
        consumer.reconsume_later(consumer.receive(SOON), level=-1)

    origins = [message.properties()["ORIGIN_MESSAGE_ID"] for message in provisioned.dead_letters(5)]
    assert [origin.rpartition(":")[2] for origin in origins] == ["0", "1", "2", "3", "4"]
    assert len({origin.rpartition(":")[0] for origin in origins}) == 1


GO_HOP = {
    "RECONSUMETIMES": "1", "DELAY_TIME": "1000", "ORIGIN_MESSAGE_ID": "12:34:0",
    "REAL_TOPIC": "persistent://shop/prod/orders", "RETRY_TOPIC": "orders-fulfilment-RETRY",
}  # fmt: skip
"""As the client in Go writes it for each message of a batch: the origin has no index."""


@pytest.mark.parametrize("fails", [False, True], ids=["handled", "failing"])
def test_retries_that_share_an_origin_take_as_long_as_others(
    provision_policy: ProvisionPolicy,
    fails: bool,  # noqa: FBT001 - a parameter
) -> None:
    provisioned = provision_policy(delays=["1s"])
    contents = [b"%d" % number for number in range(200)]
    provisioned.send(*contents, topic=provisioned.policy.retry_topic, properties=GO_HOP)
    handled: list[bytes] = []
    consumer = provisioned.consumer()

    def handle(message: Any, attempt: Attempt) -> None:  # noqa: ANN401 - the client has no types
        time.sleep(0.02)
        if fails and attempt.number == 2:
            raise ConnectionError
        handled.append(message.data())
        if len(handled) == len(contents):
            consumer.stop()

    with awake_time() as passed:
        consumer.run(handle, workers=8)
        assert passed() < 100  # 1.3 s and 3 s on an idle machine; one a second would be 190 s
    assert sorted(handled) == sorted(contents)


SECOND = timedelta(seconds=1)


def send_batch(provisioned: ProvisionedPolicy, *contents: bytes) -> None:
    producer = provisioned.client(SUPERUSER).create_producer(
        str(provisioned.policy.topic), batching_enabled=True, batching_max_publish_delay_ms=60_000
    )
    for content in contents:
        producer.send_async(content, lambda *_: None)
    producer.flush()
    producer.close()


def test_failures_of_a_batch_neighbour_are_not_counted(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy(max_retries=2)
    topic = provisioned.policy.topic
    send_batch(provisioned, b"bad", b"late", b"good")
    given_back: Counter[bytes] = Counter()
    before = {}
    with provisioned.consumer(nack_delay=timedelta(seconds=0.5)) as consumer:
        backlog = partial(provisioned.backlog, topic)
        for message in receive_until_quiet(consumer, quiet=SECOND, unsettled=backlog):
            content = message.data()
            failed_first = content == b"bad" and given_back[content] < 3
            if failed_first or (content == b"late" and given_back == {b"bad": 3}):
                before[content] = message.redelivery_count()
                given_back[content] += 1
                consumer.negative_acknowledge(message)
            elif content != b"late" or given_back[content]:
                # The broker redelivers it with the rest of the batch.
                consumer.acknowledge(message)

    assert given_back == {b"bad": 3, b"late": 1}
    assert before[b"late"] >= provisioned.policy.max_retries
    [dead] = provisioned.dead_letters(1)
    assert (dead.data(), dead.properties()["RECONSUMETIMES"]) == (b"bad", "3")
    assert provisioned.backlog(topic) == 0


def test_clock_ahead_of_the_broker_is_reported(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    provisioned = provision_policy(delays=["2s"], max_retries=100)  # of which the tick is one
    provisioned.send(b"bad")
    events: list[Event] = []

    class AnHourAhead(SystemClock):
        def now(self) -> datetime:
            return super().now() + timedelta(hours=1)

    monkeypatch.setattr(connection, "SystemClock", AnHourAhead)
    monkeypatch.setattr(arrivals, "APART_SECONDS", 0.0)
    consumer = provisioned.consumer(on_event=events.append)
    while not (ahead := [event for event in events if event.event is Name.CLOCK_AHEAD]):
        consumer.reconsume_later(consumer.receive(SOON))

    assert [event.topic for event in ahead] == [str(provisioned.policy.retry_topic)]


def test_ladder_is_kept_without_delayed_delivery(
    provision_policy: Callable[..., ProvisionedPolicy], pulsar_namespace: str
) -> None:
    provisioned: Any = provision_policy(delays=[f"{delay:g}s" for delay in DELAYS])
    provisioned.broker.request(
        "POST",
        f"/admin/v2/namespaces/{pulsar_namespace}/delayedDelivery",
        {"active": False, "tickTime": 1_000},
    ).check("switch delayed delivery off")
    consumer = provisioned.consumer()
    attempts, others = list[float](), list[float]()

    def handle(message: pulsar.Message) -> None:
        if message.data() == b"other":
            others.append(time.monotonic())
            return
        attempts.append(time.monotonic())
        if len(attempts) <= len(DELAYS):
            provisioned.send(b"other")
            raise ConnectionError
        consumer.stop()

    provisioned.send(b"failing")
    consumer.run(handle)
    waits = [second - first for first, second in pairwise(attempts)]
    assert all(delay - EARLIER_SECONDS <= wait for delay, wait in zip(DELAYS, waits, strict=True))
    assert len(others) == len(DELAYS)
    assert others[-1] < attempts[-1]  # the source topic waits for no retry
