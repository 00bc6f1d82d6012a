"""Runs of handlers at a real broker: order, rates, time-outs, workers, prefetch and asyncio."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import pairwise
from queue import Empty, SimpleQueue
from typing import Any

import pulsar
import pytest

from redrive import Event, FailureRules, RetryConsumer
from redrive.delivery.fetcher import ConsumerStoppedError
from redrive.policy.model import SubscriptionType
from sandbox.pulsar import SUPERUSER
from tests.support.consumers import StartProgram, handle_until_quiet, interrupted, start_program
from tests.support.waiting import wait_until

__all__ = ["start_program"]

ProvisionPolicy = Callable[..., Any]
SOON = timedelta(seconds=180)
SECOND = timedelta(seconds=1)


def test_close_waits_for_the_in_flight_message_of_run(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    provisioned.send(b"1", b"2")
    consumer = provisioned.consumer()
    began = threading.Event()
    finished = []

    def handle(message: Any) -> None:  # noqa: ANN401 - the client publishes no types
        consumer.pause()
        began.set()
        with pytest.raises(ConsumerStoppedError):  # as soon as it is being closed
            consumer.receive(SOON)
        time.sleep(0.5)
        finished.append(message.data())

    running = threading.Thread(target=consumer.run, args=(handle,))
    running.start()
    assert began.wait(180)
    consumer.close()

    assert finished == [b"1"]
    running.join(180)
    assert not running.is_alive()
    assert provisioned.backlog(provisioned.policy.topic) == 1


def test_stop_ends_all_waiting_receptions(provision_policy: ProvisionPolicy) -> None:
    consumer = provision_policy().consumer()
    ended = []

    def wait() -> None:
        with pytest.raises(ConsumerStoppedError):
            consumer.receive()
        ended.append(True)

    waiting = [threading.Thread(target=wait) for _ in range(3)]
    for thread in waiting:
        thread.start()
    consumer.stop()
    for thread in waiting:
        thread.join(180)
    assert len(ended) == 3


def test_source_and_retry_topic_alternate_under_load(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    provisioned.send(*[b"new"] * 200)
    provisioned.send(*[b"retried"] * 50, topic=provisioned.policy.retry_topic)
    client = provisioned.client(provisioned.role)
    with RetryConsumer(client, provisioned.policy, prefetch=100) as consumer:
        wait_until(lambda: provisioned.given_out(provisioned.policy.topic) >= 50)
        wait_until(lambda: provisioned.given_out(provisioned.policy.retry_topic) == 50)
        # From the broker's hands into the client's: this answer comes behind them …
        client.get_topic_partitions(str(provisioned.policy.topic))
        # … and into those of the consumer, which has no event for it.
        incoming: Any = consumer._processor.parts.incoming  # noqa: SLF001
        wait_until(lambda: len(incoming._flowing) == 2)  # noqa: SLF001

        served = [consumer.receive().topic_name() for _ in range(40)]

    assert all(former != latter for former, latter in pairwise(served))


def test_unretryable_exception_is_dead_lettered_at_once(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy(delays=["1h"], max_retries=1)
    provisioned.send(b"malformed", b"busy")
    consumer = provisioned.consumer()
    handled: list[bytes] = []

    def handle(message: Any) -> None:  # noqa: ANN401 - the client publishes no types
        handled.append(message.data())
        if len(handled) == 3:
            consumer.stop()
        raise UnicodeError if message.data() == b"malformed" else ConnectionError

    rules = FailureRules(
        dead_letter_on=(ValueError,), delays={ConnectionError: timedelta(seconds=2)}
    )
    consumer.run(handle, rules=rules)

    assert sorted(handled) == [b"busy", b"busy", b"malformed"]
    reasons = {
        dead.data(): (dead.properties()["REDRIVE_DEAD_REASON"], dead.properties()["RECONSUMETIMES"])
        for dead in provisioned.dead_letters(2)
    }
    assert reasons == {b"malformed": ("NotRetryable", "1"), b"busy": ("RetriesExhausted", "2")}


def test_a_deadline_bounds_all_attempts_together(provision_policy: ProvisionPolicy) -> None:
    provisioned = provision_policy(delays=["2s"], max_retries=100)
    provisioned.send(b"hopeless")
    consumer = provisioned.consumer()
    failing = threading.Thread(
        target=consumer.run,
        args=(_fail,),
        kwargs={"rules": FailureRules(deadline=timedelta(seconds=5))},
    )
    failing.start()

    (dead,) = provisioned.dead_letters(1)

    consumer.stop()
    failing.join(180)
    properties = dead.properties()
    assert properties["REDRIVE_DEAD_REASON"] == "DeadlineExceeded"
    first, last = (
        datetime.fromisoformat(properties[f"REDRIVE_{name}"])
        for name in ("FIRST_FAILED_AT", "FAILED_AT")
    )
    # The last retry was due by then; broker and consumer may be late. All 100 would take 200 s.
    assert timedelta(seconds=1) < last - first < timedelta(seconds=150)


def _fail(_message: object) -> None:
    raise LookupError


def test_timed_out_handler_fails_and_late_success_is_ignored(
    provision_policy: ProvisionPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    provisioned = provision_policy(max_retries=1)
    provisioned.send(b"slow")
    given_up = threading.Semaphore(0)

    def hear(event: Event) -> None:
        if event.event == "redrive.attempt_failed":
            given_up.release()

    consumer = provisioned.consumer(on_event=hear)
    attempts: list[str | None] = []

    def handle(message: Any) -> None:  # noqa: ANN401 - the client publishes no types
        attempts.append(message.properties().get("RECONSUMETIMES"))
        if len(attempts) == 2:
            consumer.stop()
        assert given_up.acquire(timeout=180)

    consumer.run(handle, timeout=timedelta(milliseconds=500))
    consumer.close()

    assert attempts == [None, "1"]
    events = [getattr(record, "event", "") for record in caplog.records]
    assert events.count("redrive.late_success") == 2
    (dead,) = provisioned.dead_letters(1)
    assert dead.properties()["REDRIVE_CAUSE_TYPE"] == "HandlerTimeoutError"
    provisioned.wait_until_settled()


def test_workers_share_the_messages_and_each_is_handled_once(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    sent = [f"{n}".encode() for n in range(200)]
    provisioned.send(*sent)
    consumer = provisioned.consumer()
    handled: list[bytes] = []
    threads = set()
    all_at_work = threading.Barrier(4)

    def handle(message: Any) -> None:  # noqa: ANN401 - the client publishes no types
        if threading.get_ident() not in threads:
            threads.add(threading.get_ident())
            all_at_work.wait(180)
        handled.append(message.data())
        if len(handled) == len(sent):
            consumer.stop()

    consumer.run(handle, workers=4)
    consumer.close()

    assert len(threads) == 4
    assert sorted(handled) == sorted(sent)
    wait_until(lambda: not provisioned.backlog(provisioned.policy.topic))


def test_max_rate_holds_for_all_workers_together(provision_policy: ProvisionPolicy) -> None:
    provisioned = provision_policy()
    provisioned.send(*[b"x"] * 30)
    consumer = provisioned.consumer()
    began = []

    def handle(_: object) -> None:
        began.append(time.monotonic())
        if len(began) >= 21:  # both may have counted before either looks
            consumer.stop()

    consumer.run(handle, workers=2, max_rate=10)
    consumer.close()

    # 2 s, unless the first or the last is delayed; without a rate they take no time.
    assert 1 < began[20] - began[0] < 60
    assert len(began) <= 22
    wait_until(lambda: provisioned.backlog(provisioned.policy.topic) == 30 - len(began))


def test_no_message_is_handled_between_pause_and_resume(provision_policy: ProvisionPolicy) -> None:
    provisioned = provision_policy()
    consumer = provisioned.consumer()
    arrived = SimpleQueue[bytes]()
    running = threading.Thread(
        target=consumer.run, args=(lambda message: arrived.put(message.data()),)
    )
    running.start()
    provisioned.send(b"before")
    assert arrived.get(timeout=180) == b"before"

    consumer.pause()
    consumer.pause()
    provisioned.send(b"meanwhile")
    with pytest.raises(Empty):
        arrived.get(timeout=1)
    assert consumer.receive(timedelta(seconds=0.1)) is None
    consumer.resume()
    assert arrived.get(timeout=180) == b"meanwhile"

    consumer.pause()
    consumer.stop()
    running.join(180)
    assert not running.is_alive()


@pytest.mark.parametrize("kind", [SubscriptionType.SHARED, SubscriptionType.KEY_SHARED])
def test_joining_consumer_gets_prefetch_of_a_busy_one(
    provision_policy: ProvisionPolicy, kind: SubscriptionType
) -> None:
    provisioned = provision_policy(kind=kind)
    busy, go_on = provisioned.consumer(prefetch=4), threading.Event()
    held: list[bytes] = []

    def hold(message: Any) -> None:  # noqa: ANN401 - the client publishes no types
        held.append(message.data())
        go_on.wait(180)

    running = threading.Thread(target=busy.run, args=(hold,), kwargs={"workers": 2})
    running.start()
    for number in range(200):
        provisioned.send(b"%d" % number, partition_key=f"{number}")
        if number == 0:
            wait_until(lambda: held)
    joined = provisioned.consumer()
    contents: list[bytes] = []
    while len(contents) <= 50:  # of a key-shared subscription, about half of the keys are another's
        message = joined.receive(timedelta(seconds=60))
        contents.append(message.data())
        joined.acknowledge(message)
    assert len(held) <= 2
    go_on.set()
    contents += handle_until_quiet(
        joined,
        (),
        quiet=timedelta(seconds=0.2),
        unsettled=lambda: provisioned.backlog(provisioned.policy.topic),
    )
    busy.close()
    running.join(180)
    assert sorted([*contents, *held]) == sorted(b"%d" % number for number in range(200))


def test_partitions_share_one_bound(provision_policy: ProvisionPolicy) -> None:
    provisioned = provision_policy(partitions=4)
    policy = provisioned.policy
    consumer = provisioned.consumer(prefetch=20)
    provisioned.send(*[b"%d" % number for number in range(200)])
    wait_until(lambda: provisioned.given_out(policy.topic) >= 20)
    time.sleep(2)  # long enough to exceed the bound, if it did
    contents = handle_until_quiet(
        provisioned.consumer(),
        (),
        quiet=timedelta(seconds=1),
        # The client has a queue of each partition and one of all.
        unsettled=lambda: provisioned.backlog(policy.topic) > 2 * 20,
    )
    assert 200 - 2 * 20 <= len(contents) <= 200 - 20
    consumer.close()


@pytest.mark.parametrize("prefetch", [1, 511, 512])
def test_messages_that_wait_in_a_consumer_are_limited(
    provision_policy: ProvisionPolicy, prefetch: int
) -> None:
    provisioned = provision_policy()
    producer = provisioned.client(SUPERUSER).create_producer(
        str(provisioned.policy.topic), batching_enabled=False, block_if_queue_full=True
    )
    for number in range(2_000):
        producer.send_async(b"%d" % number, lambda *_: None)
    producer.flush()
    producer.close()
    consumer = provisioned.consumer(prefetch=prefetch)
    taken = [consumer.receive() for _ in range(300)]
    topic = provisioned.policy.topic
    wait_until(lambda: provisioned.given_out(topic) > 300)
    assert max(provisioned.given_out(topic) for _ in range(10)) <= 300 + prefetch
    assert consumer.in_flight == len(taken) == 300
    consumer.close()
    assert provisioned.backlog(topic) == 2_000


async def test_a_cancelled_reception_loses_no_message(provision_policy: ProvisionPolicy) -> None:
    provisioned = await asyncio.to_thread(provision_policy)
    sent = [b"%d" % n for n in range(40)]
    async with provisioned.async_consumer() as consumer:
        for _ in range(20):  # more than there are threads
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await consumer.receive()
        sending = asyncio.create_task(asyncio.to_thread(provisioned.send, *sent))
        received: list[pulsar.Message] = []
        seconds = 0.002
        while len(received) < len(sent):
            try:
                async with asyncio.timeout(seconds):
                    received.append(await consumer.receive())
            except TimeoutError:
                seconds *= 1.1  # on a busy machine each reception takes longer
        await sending
        assert sorted(message.data() for message in received) == sorted(sent)
        for message in received:
            await consumer.acknowledge(message)
        assert await consumer.receive(SECOND) is None
    await asyncio.to_thread(wait_until, lambda: not provisioned.backlog(provisioned.policy.topic))


async def test_handlers_run_side_by_side(provision_policy: ProvisionPolicy) -> None:
    provisioned = await asyncio.to_thread(
        provision_policy, retry_rights=["consume"]
    )  # hops are refused
    await asyncio.to_thread(provisioned.send, *[b"%d" % n for n in range(20)])
    most = now = 0
    met = asyncio.Event()

    async def handle(_message: pulsar.Message) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        if now == 10:
            met.set()
        try:
            async with asyncio.timeout(30):
                await met.wait()
        finally:
            now -= 1
            consumer.stop()
        raise ConnectionError

    async with provisioned.async_consumer() as consumer:
        await consumer.run(handle, workers=10)
    assert most == 10
    assert now == 0
    assert await asyncio.to_thread(provisioned.backlog, provisioned.policy.topic) == 20


async def test_a_cancelled_run_leaves_its_message_to_the_next(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = await asyncio.to_thread(provision_policy)
    await asyncio.to_thread(provisioned.send, b"x")
    handling = asyncio.Event()

    async def hang(_message: pulsar.Message) -> None:
        handling.set()
        await asyncio.sleep(60)

    async with provisioned.async_consumer() as consumer:
        running = asyncio.create_task(consumer.run(hang))
        await handling.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    async with provisioned.async_consumer() as consumer:
        message = await consumer.receive(SOON)
        assert (message.data(), consumer.attempt_of(message).number) == (b"x", 1)


def test_sigterm_lets_run_finish_in_flight_messages(
    provision_policy: ProvisionPolicy, start_program: StartProgram
) -> None:
    provisioned = provision_policy()
    provisioned.send(b"in-flight", b"in-flight", b"next")
    process = start_program(
        provisioned,
        """
import asyncio
from redrive import AsyncRetryConsumer

stopped = []

class Told(AsyncRetryConsumer):
    def stop(self):
        super().stop()
        stopped.append(True)

async def handle(message):
    os.write(1, b"handling\\n")
    while not stopped:
        await asyncio.sleep(0.01)

async def main():
    async with Told(client, load_policy()) as consumer:
        await consumer.run(handle, workers=2)
    print("ended")

asyncio.run(main())
client.close()
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
""",
    )
    output = interrupted(process, signal.SIGTERM, 2)
    assert (process.returncode, output) == (0, "ended\n")
    assert provisioned.backlog(provisioned.policy.topic) == 1
    assert provisioned.consumer().receive(SOON).data() == b"next"


def test_keyboard_interrupt_ends_program_and_keeps_message(
    provision_policy: ProvisionPolicy, start_program: StartProgram
) -> None:
    provisioned = provision_policy()
    provisioned.send(b"in-flight")
    process = start_program(
        provisioned,
        """
import asyncio
from redrive import AsyncRetryConsumer
signal.signal(signal.SIGINT, signal.default_int_handler)

async def handle(message):
    print("handling", flush=True)
    await asyncio.sleep(60)

async def main():
    async with AsyncRetryConsumer(client, load_policy()) as consumer:
        await consumer.run(handle)

try:
    asyncio.run(main())
finally:
    client.close()
""",
    )
    output = interrupted(process, signal.SIGINT)
    assert process.returncode in {1, -signal.SIGINT}, output
    assert "KeyboardInterrupt" in output
    assert provisioned.consumer().receive(SOON).data() == b"in-flight"
