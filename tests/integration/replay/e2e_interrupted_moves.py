"""Replays of one process whose broker, sends, tasks, target or producer names are disturbed."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pulsar
import pytest

from redrive.policy.naming import TopicName
from redrive.reading import broker, session
from redrive.reading.session import ProtocolConnection
from redrive.replay import lookup, sending
from redrive.replay.job import run as runs
from redrive.replay.ledger import FencedError
from redrive.replay.transport import OpenProducer, ProtocolTransport, SchemaAt, StalledError
from tests.chaos.proxy import Proxy, answering
from tests.integration.replay.test_forgery import producer_of
from tests.support.brokers import PRODUCER_SUCCESS, SUCCESS, proxy_of
from tests.support.engines import Local
from tests.support.local_runs import (
    Notes,
    job_of,
    kill_at,
    numbers,
    process,
    replay,
    selecting,
    wait_until_moved,
)
from tests.support.topics import tell
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("replay_token")

ProvisionPolicy = Callable[..., Any]
COUNT = 2_000
UNLOADS = 30


def test_refusals_are_recorded_before_a_task_gives_up(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each refusal uses up attempts of its task; the next task resumes behind it."""
    monkeypatch.setattr(sending, "MAX_ATTEMPTS", 5)
    monkeypatch.setattr(sending, "STALL_SECONDS", 1.0)
    monkeypatch.setattr(sending, "ALONE_SECONDS", 1.5)
    provisioned = provision_policy()
    provisioned.bury(1, content=b"0" * 20_000)  # as it is compressed it is smaller than the others
    for _ in range(3):
        provisioned.bury(1, content=secrets.token_bytes(5_000))
    provisioned.bury(5)
    provisioned.change_policy("POST", provisioned.policy.retry_topic, "maxMessageSize", 1_000)

    account = replay(provisioned)

    assert (account.matched, account.moved, account.refused, account.left) == (9, 6, 3, 0)


def test_message_refused_by_the_broker_is_never_skipped(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "STALL_SECONDS", 1.0)
    monkeypatch.setattr(sending, "ALONE_SECONDS", 1.5)
    provisioned = provision_policy()
    provisioned.bury(10)
    provisioned.bury(1, content=secrets.token_bytes(5_000))
    provisioned.bury(10)
    buried = provisioned.ids(provisioned.unacknowledged())
    provisioned.change_policy("POST", provisioned.policy.retry_topic, "maxMessageSize", 1_000)

    account = replay(provisioned)

    assert (account.matched, account.moved, account.refused, account.left) == (21, 20, 1, 0)
    assert [refusal.cause for refusal in account.refusals] == ["NotAccepted"]
    assert len(provisioned.unacknowledged()) == 1
    provisioned.change_policy("DELETE", provisioned.policy.retry_topic, "maxMessageSize")
    assert replay(provisioned).moved == 1
    assert provisioned.in_target() == buried


@pytest.mark.parametrize("batch", [False, True])
def test_run_woken_after_a_stop_stores_nothing(
    provision_policy: ProvisionPolicy,
    batch: bool,  # noqa: FBT001
) -> None:
    count = 600
    provisioned = provision_policy()
    provisioned.bury_in_ranges(count)
    with process(job_of(provisioned, batch=batch), count) as stopped:
        wait_until_moved(provisioned, 200, run=stopped)
        stopped.send_signal(signal.SIGSTOP)
        account = replay(provisioned)
        assert 0 < account.moved < count
        stopped.send_signal(signal.SIGCONT)
        _, log = stopped.communicate(timeout=180)
    assert stopped.returncode != 0
    assert FencedError.__name__ in log
    assert provisioned.in_target() == numbers(count)
    provisioned.check_audit()


def test_requests_with_lost_answers_are_repeated(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A topic that is unloaded meanwhile answers none of those who were about to use it."""
    provisioned = provision_policy(partitions=2)
    provisioned.bury(10)
    buried = provisioned.ids(provisioned.unacknowledged())
    impatient = functools.partial(broker.ReadingClient, operation_timeout_seconds=1)
    monkeypatch.setattr(broker, "ReadingClient", impatient)
    monkeypatch.setattr(session, "ANSWER_SECONDS", 1.0)
    with proxy_of(provisioned.broker.port) as proxy:
        proxy.halved = frozenset({SUCCESS, PRODUCER_SUCCESS})
        service_url = f"pulsar://127.0.0.1:{proxy.port}"
        job = dataclasses.replace(selecting(job_of(provisioned)), service_url=service_url)
        account = runs.run(job, Local(), Notes())

    assert (account.matched, account.moved) == (10, 10)
    assert provisioned.in_target() == buried
    provisioned.check_audit()


def test_failed_lookup_requests_are_repeated(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy(partitions=2)
    provisioned.bury(10)
    buried = provisioned.ids(provisioned.unacknowledged())
    with ExitStack() as stack:
        proxy = stack.enter_context(Proxy.before(provisioned.broker.admin_url))
        for number in range(1, 60, 3):  # a lookup makes two calls at most
            trap = proxy.trap("internalStats", number, answering(503))
            last = stack.enter_context(trap)
        job = dataclasses.replace(selecting(job_of(provisioned)), admin_url=proxy.url)
        account = runs.run(job, Local(), Notes())
        assert last.count > 10

    assert (account.matched, account.moved) == (10, 10)
    assert provisioned.in_target() == buried


def test_run_killed_among_batches_keeps_its_message_count(
    provision_policy: ProvisionPolicy,
) -> None:
    """They were not read before the first was moved."""
    count = 1_200
    provisioned = provision_policy()
    provisioned.bury_in_ranges(count, batching_enabled=True, batching_max_messages=10)
    job = job_of(provisioned)
    kill_at(provisioned, job, 200, count)
    assert 0 < len(provisioned.in_target()) < count

    account = replay(provisioned, uid=job.uid)

    assert (account.scanned, account.matched, account.moved, account.left) == (*[count] * 3, 0)
    assert provisioned.in_target() == numbers(count)
    provisioned.check_audit()


@pytest.mark.parametrize("batch", [False, True])
def test_topics_may_be_unloaded_meanwhile(
    provision_policy: ProvisionPolicy,
    batch: bool,  # noqa: FBT001
) -> None:
    count = 1_200
    provisioned = provision_policy()
    provisioned.bury_in_ranges(count)
    with process(job_of(provisioned, batch=batch), count) as running:
        for _ in range(2):
            wait_until_moved(provisioned, 200, run=running)  # since the last time
            provisioned.admin("PUT", provisioned.policy.retry_topic, "unload")
            provisioned.admin("PUT", provisioned.policy.dead_letter_topic, "unload")
            running.send_signal(signal.SIGCONT)
            time.sleep(1)
        _, log = running.communicate(timeout=180)
        assert running.returncode == 0, log
    provisioned.check_audit()
    assert provisioned.in_target() == numbers(count)


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


@contextmanager
def forged_names(provisioned: Any, target: TopicName) -> Iterator[list[int]]:  # noqa: ANN401
    """Send the next sequence id of each disconnected producer of a Replay; yield these ids."""
    forged: list[int] = []
    names: set[str] = set()
    stop = threading.Event()

    def forge() -> None:
        while not stop.wait(0.01):
            publishers = tell(provisioned.broker, target, "stats")["publishers"]
            shown = {publisher["producerName"] for publisher in publishers}
            names.update(name for name in shown if name.startswith("redrive-replay-"))
            for name in names:
                try:
                    with producer_of(provisioned, target, producer_name=name) as producer:
                        number = producer.last_sequence_id() + 1
                        producer.send(b"", properties={"id": "forged"}, sequence_id=number)
                except pulsar.PulsarException:
                    continue  # the Replay has the name, or the target moves
                forged.append(number)

    forging = threading.Thread(target=forge)
    forging.start()
    try:
        yield forged
    finally:
        stop.set()
        forging.join()


def test_taken_producer_names_lose_and_double_nothing(provision_policy: ProvisionPolicy) -> None:
    """Each unload of an empty target deletes the ledger that proves what was stored."""
    provisioned = provision_policy()
    provisioned.bury_in_ranges(COUNT)
    target = provisioned.policy.retry_topic
    with forged_names(provisioned, target) as forged, process(job_of(provisioned), COUNT) as run:
        for _ in range(UNLOADS):
            run.send_signal(signal.SIGCONT)
            provisioned.admin("PUT", target, "unload")
            count = len(forged)
            wait_until(lambda: len(forged) > count or run.poll() is not None)  # noqa: B023
        wait_until(lambda: run.poll() is not None, seconds=180)
        assert run.returncode == 0, run.communicate()[1]

    account = replay(provisioned)

    moved = [number for number in provisioned.in_target() if number != "forged"]
    assert len(moved) == len(set(moved)) == COUNT - account.refused
    assert set(moved) <= set(numbers(COUNT))
    assert {entry.cause for entry in account.refusals} <= {"Unproven"}
    provisioned.check_audit()
