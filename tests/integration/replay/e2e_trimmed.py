"""An attempt that ends while the broker trims the target knows which messages have a receipt."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pulsar
import pytest

from redrive.policy.naming import TopicName
from redrive.reading import session
from redrive.reading.session import ProtocolConnection
from redrive.replay import lookup
from redrive.replay.transport import OpenProducer, ProtocolTransport, SchemaAt, StalledError
from tests.support.local_runs import numbers, replay
from tests.support.waiting import wait_until

ProvisionPolicy = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("replay_token")


@contextmanager
def consumed(provisioned: Any) -> Iterator[list[str]]:  # noqa: ANN401 - see conftest
    """Acknowledge the messages of the retry topic; yields the ids, some twice after an unload."""
    policy, ids, ended = provisioned.policy, list[str](), threading.Event()
    consumer = provisioned.client.subscribe(
        str(policy.retry_topic), policy.subscription, consumer_type=pulsar.ConsumerType.Shared
    )

    def consume() -> None:
        while not ended.is_set():
            with suppress(pulsar.Timeout):
                message = consumer.receive(100)
                consumer.acknowledge(message)
                ids.append(message.properties().get("id", ""))

    thread = threading.Thread(target=consume)
    thread.start()
    try:
        yield ids
    finally:
        ended.set()
        thread.join()
        consumer.close()


def lose_sight_of(provisioned: Any) -> None:  # noqa: ANN401 - see conftest
    """Unload the retry topic and have the broker trim all that is consumed of it."""
    topic = provisioned.policy.retry_topic

    def first_ledger() -> int:
        ledgers = json.loads(provisioned.admin("GET", topic, "internalStats"))["ledgers"]
        return int(ledgers[0]["ledgerId"])

    def is_trimmed() -> bool:
        provisioned.admin("POST", topic, "trim")
        return first_ledger() > before

    before = first_ledger()
    provisioned.admin("PUT", topic, "unload")
    wait_until(is_trimmed)  # once consumers are back, and have acknowledged again


def test_receipt_counts_though_its_message_was_trimmed(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, flushes, sent = 600, itertools.count(), list[bytes]()
    send, flush = ProtocolConnection.send, ProtocolConnection.flush
    provisioned = provision_policy()
    provisioned.bury_many(count)

    def note_and_send(connection: ProtocolConnection, entry: bytes) -> None:
        sent.append(entry)
        send(connection, entry)

    def flush_and_lose(connection: ProtocolConnection) -> None:
        waiting = bool(connection._buffer)  # noqa: SLF001
        flush(connection)
        if waiting and next(flushes) == 3:
            wait_until(lambda: len(set(ids)) == len(sent))  # they are stored, and have a receipt
            lose_sight_of(provisioned)

    with consumed(provisioned) as ids:
        monkeypatch.setattr(session, "_BUFFER_BYTES", 8 * 1024)
        monkeypatch.setattr(ProtocolConnection, "send", note_and_send)
        monkeypatch.setattr(ProtocolConnection, "flush", flush_and_lose)
        account = replay(provisioned)
        wait_until(lambda: len(set(ids)) == count)

    assert next(flushes) > 3
    assert (account.moved, account.refused) == (count, 0)
    assert sorted(set(ids)) == numbers(count)


def test_unused_partition_holds_nothing_after_trimming(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, opened = 600, list[TopicName]()
    provisioned = provision_policy(partitions=3)
    provisioned.bury_many(count)
    open_ = ProtocolTransport.open

    def open_one_alone(
        sender: ProtocolTransport, topic: TopicName, name: str, schema: SchemaAt | None
    ) -> OpenProducer:
        opened.append(topic)
        if topic != opened[0]:
            raise StalledError
        return open_(sender, topic, name, schema)

    monkeypatch.setattr(ProtocolTransport, "open", open_one_alone)
    # A broker that deduplicates keeps messages after its last snapshot: it can't be made to trim.
    monkeypatch.setattr(lookup, "_holds_all_behind", lambda *_: False)
    with consumed(provisioned) as ids:
        account = replay(provisioned)
        wait_until(lambda: len(set(ids)) == count)

    assert len(set(opened)) == 2
    assert (account.moved, account.refused) == (count, 0)
    assert sorted(set(ids)) == numbers(count)
