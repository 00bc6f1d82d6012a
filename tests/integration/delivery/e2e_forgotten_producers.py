"""A broker that forgets producer names stores a message in doubt again, and drops none."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pulsar
import pytest

from redrive import RetryConsumer
from redrive.policy.naming import TopicName
from sandbox.pulsar import SUPERUSER, Broker
from sandbox.sandbox import Sandbox
from tests.support.brokers import SEND_RECEIPT, own_broker, proxy_of
from tests.support.topics import path
from tests.support.waiting import wait_until

SETTINGS = {
    "brokerDeduplicationEnabled": "true",
    "brokerDeduplicationMaxNumberOfProducers": 0,
    "brokerDeduplicationEntriesInterval": 1,
}
"""A loaded topic knows no producer of the entries before its last snapshot, at most two entries
ago."""


@pytest.fixture(scope="module")
def broker(shared_sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    state = tmp_path_factory.mktemp("broker")
    with own_broker(shared_sandbox.pulsar.version, state, SETTINGS) as broker:
        yield broker


@pytest.mark.parametrize("max_retries", [16, 0], ids=["retry", "dead letter"])
def test_message_in_doubt_is_stored_again_and_none_dropped(
    provision_policy: Callable[..., Any], broker: Broker, max_retries: int
) -> None:
    provisioned = provision_policy(delays=("1h",), max_retries=max_retries)
    policy = provisioned.policy
    topic = policy.retry_topic if max_retries else policy.dead_letter_topic

    def fail(_: pulsar.Message) -> None:
        raise LookupError

    with proxy_of(broker.port) as proxy:
        client = pulsar.Client(
            f"pulsar://127.0.0.1:{proxy.port}",
            authentication=pulsar.AuthenticationToken(broker.token(provisioned.role)),
        )
        consumer = RetryConsumer(client, policy)
        running = threading.Thread(target=consumer.run, args=(fail,))
        running.start()
        proxy.withheld[SEND_RECEIPT] = 1
        provisioned.send(b"in doubt")
        wait_until(lambda: proxy.withheld[SEND_RECEIPT] == 0)

        others = provisioned.client(SUPERUSER).create_producer(str(topic), batching_enabled=False)
        first = others.send(b"other")

        def is_forgotten() -> bool:
            others.send(b"other")
            return snapshot_of(broker, topic) >= (first.ledger_id(), first.entry_id())

        wait_until(is_forgotten)
        others.close()
        broker.request("PUT", f"{path(topic)}/unload").check("unload")
        provisioned.send(*[b"%d" % number for number in range(5)])
        wait_until(lambda: provisioned.backlog(policy.topic) == 0)
        consumer.close()
        running.join()
        client.close()

    reader = provisioned.client(SUPERUSER).create_reader(str(topic), pulsar.MessageId.earliest)
    copies: Counter[bytes] = Counter()
    while reader.has_message_available():
        copies[reader.read_next(30_000).data()] += 1
    del copies[b"other"]
    assert copies == {b"in doubt": 2, **{b"%d" % number: 1 for number in range(5)}}


def snapshot_of(broker: Broker, topic: TopicName) -> tuple[int, int]:
    """Return the position of the last snapshot of producers."""
    answer = broker.request("GET", f"{path(topic)}/internalStats")
    answer.check("read the state of the topic")
    stats = json.loads(answer.body)
    ledger, entry = stats["cursors"]["pulsar.dedup"]["markDeletePosition"].split(":")
    return int(ledger), int(entry)
