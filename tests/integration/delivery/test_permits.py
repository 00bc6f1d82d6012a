"""Entries that take the permits of a consumer: it is renewed, and receives all others."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pulsar
import pytest

from redrive.delivery import connection, fetcher
from redrive.policy.envelope import ENCODED, NOT_COPIED
from redrive.policy.model import SubscriptionType
from redrive.reading.positions import encode_nested
from tests.support.raw_entries import RawEntry, numbers, store
from tests.support.waiting import wait_until

ProvisionPolicy = Callable[..., Any]
ENCRYPTED = encode_nested(13, encode_nested(1, b"key") + encode_nested(2, b"value"))
UNDECOMPRESSED = RawEntry(numbers(in_batch=60_000, compression=2, uncompressed=10), b"no zlib")
UNDECRYPTED = RawEntry(ENCRYPTED + numbers(in_batch=60_000), b"secret")
LARGEST = RawEntry(ENCRYPTED + numbers(in_batch=2**31 - 1), b"secret")
OTHERS = [b"%d" % number for number in range(20)]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a second instead of a minute."""
    monkeypatch.setattr(fetcher, "_RECOVER_AFTER_SECONDS", (1.0, 1.0, 1.0))
    monkeypatch.setattr(connection, "_FIRST_PAUSE", 1.0)


@pytest.mark.parametrize(
    ("kind", "partitions", "entry"),
    [
        (SubscriptionType.SHARED, 2, UNDECOMPRESSED),
        (SubscriptionType.KEY_SHARED, 0, UNDECRYPTED),
        (SubscriptionType.EXCLUSIVE, 0, LARGEST),
    ],
)
def test_entry_that_takes_all_permits_stops_no_consumer(
    provision_policy: ProvisionPolicy, kind: SubscriptionType, partitions: int, entry: RawEntry
) -> None:
    provisioned = provision_policy(kind=kind, partitions=partitions)
    topic = provisioned.policy.topic.partition(0) if partitions else provisioned.policy.topic
    provisioned.send(b"first", topic=topic, partition_key="key")
    store(provisioned.broker, topic, [entry])
    provisioned.send(*OTHERS, topic=topic, partition_key="key")
    consumer = provisioned.consumer(prefetch=1)
    handled: list[bytes] = []

    def handle(message: pulsar.Message) -> None:
        handled.append(message.data())
        if handled[-1] == OTHERS[-1]:
            consumer.stop()

    stopping = threading.Timer(120, consumer.stop)
    stopping.start()
    consumer.run(handle)
    stopping.cancel()
    assert handled == [b"first", *OTHERS]
    wait_until(lambda: provisioned.backlog(topic) == 0)
    for dead_letter in provisioned.dead_letters(int(entry is not UNDECOMPRESSED)):
        properties = dead_letter.properties()
        assert dead_letter.data() == entry.content
        assert properties[NOT_COPIED] == "Undecryptable"
        assert json.loads(properties[ENCODED])["encryption"] == {
            "keys": [["key", "dmFsdWU="]], "algorithm": "", "param": "",
            "compression": 0, "uncompressedSize": 0,
            "batchSize": 60_000 if entry is UNDECRYPTED else 2**31 - 1,
        }  # fmt: skip


def test_entries_of_another_key_stay_and_stop_no_consumer(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    one, batch = RawEntry(ENCRYPTED), RawEntry(ENCRYPTED + numbers(in_batch=1_000))
    store(provisioned.broker, provisioned.policy.topic, [one, one, batch, batch])
    provisioned.send(*OTHERS)
    consumer = provisioned.simple_consumer()
    handled: list[bytes] = []
    while len(handled) < len(OTHERS):
        for message in consumer.receive(10, 60, timeout=120):
            handled.append(message.data())
            consumer.acknowledge(message)
    assert handled == OTHERS
    wait_until(lambda: provisioned.backlog(provisioned.policy.topic) == 4)
    assert provisioned.dead_letters(0) == []
