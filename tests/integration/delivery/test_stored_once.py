"""Copies in the retry and the dead-letter topic: each failed message has exactly one.

Receipts prove nothing here: the messages that the topics hold are counted.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pulsar
import pytest

from redrive import Event, RetryConsumer
from redrive.delivery import forwarder, processor
from redrive.messages import id_text
from redrive.policy.naming import TopicName
from sandbox.pulsar import SUPERUSER
from tests.support.provisioned_policy import ProvisionedPolicy
from tests.support.topics import path, sent_as
from tests.support.waiting import wait_until

ProvisionPolicy = Callable[..., ProvisionedPolicy]


def contents(count: int, prefix: str = "m") -> list[bytes]:
    return [f"{prefix}{number}".encode() for number in range(count)]


def copies(provisioned: ProvisionedPolicy, topic: TopicName, partitions: int = 0) -> Counter[bytes]:
    """Count the messages in *topic*, delayed or not, by content.

    Those of one producer name and sequence id count as one: a broker that loads a topic may recover
    its sequence ids twice, and then stores again what is sent again.
    """
    client, ids = (
        provisioned.client(SUPERUSER),
        defaultdict[bytes, list[tuple[TopicName, str]]](list),
    )
    for one in [topic.partition(index) for index in range(partitions)] or [topic]:
        reader = client.create_reader(str(one), pulsar.MessageId.earliest)
        while reader.has_message_available():
            message = reader.read_next(30_000)
            ids[message.data()].append((topic, id_text(message.message_id())))
        reader.close()
    return Counter(
        {
            content: len({sent_as(provisioned.broker, *id_) for id_ in same}) if same[1:] else 1
            for content, same in ids.items()
        }
    )


def once(sent: Sequence[bytes]) -> Counter[bytes]:
    return Counter(dict.fromkeys(sent, 1))


def fail(_: pulsar.Message) -> None:
    raise LookupError


def unload(provisioned: ProvisionedPolicy, topic: TopicName) -> None:
    provisioned.broker.request("PUT", f"{path(topic)}/unload").check("unload")


@contextmanager
def failing(
    provisioned: ProvisionedPolicy, workers: int, on_event: Callable[[Event], None] | None = None
) -> Iterator[RetryConsumer]:
    """Run a consumer whose handler fails each message, until the block ends."""
    consumer = provisioned.consumer(on_event=on_event)
    with running(consumer, fail, workers):
        yield consumer


@contextmanager
def running(
    consumer: RetryConsumer, handle: Callable[[pulsar.Message], None], workers: int
) -> Iterator[None]:
    """Run a consumer until the block ends."""
    thread = threading.Thread(target=consumer.run, args=(handle,), kwargs={"workers": workers})
    thread.start()
    try:
        yield
    finally:
        consumer.close()
        thread.join()


def wait_until_moved(provisioned: ProvisionedPolicy) -> None:
    """Wait until no message of the source topic is unacknowledged."""
    wait_until(lambda: provisioned.backlog(provisioned.policy.topic) == 0)


def fail_while_unloaded(
    provisioned: ProvisionedPolicy, topic: TopicName, workers: int
) -> Counter[bytes]:
    """Fail 200 messages while *topic* moves; the first one has opened the producers before.

    Most have not published yet. If the client numbers messages, it uses numbers twice then.
    """
    sent = contents(200)
    with failing(provisioned, workers):
        provisioned.send(sent[0])
        wait_until(lambda: sum(copies(provisioned, topic, partitions=4).values()) == 1)
        producing = threading.Thread(target=provisioned.send, args=sent[1:])
        producing.start()
        unload(provisioned, topic)
        producing.join()
        wait_until_moved(provisioned)
    return once(sent)


@pytest.mark.parametrize("workers", [1, 8])
def test_hops_to_an_unloaded_topic_are_stored_once(
    provision_policy: ProvisionPolicy, workers: int
) -> None:
    provisioned = provision_policy(retry_partitions=4, delays=("1h",))
    retry = provisioned.policy.retry_topic
    sent = fail_while_unloaded(provisioned, retry, workers)
    assert copies(provisioned, retry, partitions=4) == sent


def test_event_of_a_hop_has_the_id_that_consumers_read(provision_policy: ProvisionPolicy) -> None:
    provisioned = provision_policy(retry_partitions=4, delays=("1h",))
    ids: list[str] = []
    retry, sent = provisioned.policy.retry_topic, contents(12)
    earliest = {"ledgerId": -1, "entryId": -1}
    provisioned.broker.request("PUT", f"{path(retry)}/subscription/audit", earliest).check("keep")
    with failing(provisioned, 2, on_event=lambda event: ids.append(event.new_id)):
        provisioned.send(*sent)
        wait_until_moved(provisioned)
    reader = provisioned.client(SUPERUSER).subscribe(str(retry), "audit")
    stored = [id_text(reader.receive(30_000).message_id()) for _ in sent]
    assert sorted(filter(None, ids)) == sorted(stored)


def test_dead_letters_to_an_unloaded_topic_are_stored_once(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy(max_retries=0, dead_letter_partitions=4)
    dead = provisioned.policy.dead_letter_topic
    sent = fail_while_unloaded(provisioned, dead, workers=8)
    assert copies(provisioned, dead, partitions=4) == sent


def test_hops_to_a_topic_that_grows_are_stored_once(provision_policy: ProvisionPolicy) -> None:
    provisioned = provision_policy(retry_partitions=2, delays=("1h",))
    retry, sent = provisioned.policy.retry_topic, contents(120)
    with failing(provisioned, workers=8):
        provisioned.send(*sent[:40])
        provisioned.broker.request("POST", f"{path(retry)}/partitions", 6).check("grow")
        provisioned.send(*sent[40:])
        wait_until_moved(provisioned)
    assert copies(provisioned, retry, partitions=6) == once(sent)


def test_consumers_beyond_a_limit_of_producers_strand_nothing(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A producer that is idle makes room for that of the next consumer."""
    monkeypatch.setattr(forwarder, "IDLE_SECONDS", 0.5)
    monkeypatch.setattr(processor, "_FIRST_SECONDS", 0.5)
    monkeypatch.setattr(processor, "_LONGEST_SECONDS", 1.0)
    provisioned, sent = provision_policy(delays=("1h",)), contents(30)
    retry, consumers = provisioned.policy.retry_topic, 3
    provisioned.broker.request("POST", f"{path(retry)}/maxProducers", 1).check("limit")
    client = provisioned.client(SUPERUSER)
    first = client.create_producer(str(retry))

    def is_limited() -> bool:
        try:
            client.create_producer(str(retry)).close()
        except pulsar.ProducerBusy:
            return True
        return False

    wait_until(is_limited)
    first.close()
    events: list[str] = []
    each_has_one, waited = threading.Barrier(consumers), set[int]()

    def fail_together(message: pulsar.Message) -> None:
        if threading.get_ident() not in waited:
            waited.add(threading.get_ident())
            each_has_one.wait(180)
        fail(message)

    with ExitStack() as closing:
        for _ in range(consumers):
            consumer = provisioned.consumer(
                prefetch=1, on_event=lambda event: events.append(event.event)
            )
            closing.enter_context(running(consumer, fail_together, 1))
        provisioned.send(*sent)
        wait_until_moved(provisioned)
    assert "redrive.unsent" in events
    assert copies(provisioned, retry) == once(sent)


SLOW = {"publishThrottlingRateInMsg": 10, "publishThrottlingRateInByte": -1}


@pytest.mark.usefixtures("pulsar_namespace")  # which it changes
@pytest.mark.parametrize("whole_namespace", [False, True])
def test_hops_to_a_slow_topic_are_stored_once(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch, *, whole_namespace: bool
) -> None:
    """The broker stores received messages long after their sends have timed out."""
    monkeypatch.setattr(forwarder, "_SEND_SECONDS", 1.0)
    monkeypatch.setattr(processor, "_FIRST_SECONDS", 1.0)
    provisioned = provision_policy(delays=("1s",), max_retries=1)
    policy, sent = provisioned.policy, contents(40)
    provisioned.send(*sent)
    namespace = f"/admin/v2/namespaces/{policy.topic.namespace_name}"
    limited = namespace if whole_namespace else path(policy.retry_topic)
    provisioned.broker.request("POST", f"{limited}/publishRate", SLOW).check("limit")
    with failing(provisioned, workers=24) as consumer:
        wait_until_moved(provisioned)
        wait_until(lambda: provisioned.backlog(policy.retry_topic) == 0)
        assert consumer is not None
    assert copies(provisioned, policy.retry_topic) == once(sent)
    assert copies(provisioned, policy.dead_letter_topic) == once(sent)
