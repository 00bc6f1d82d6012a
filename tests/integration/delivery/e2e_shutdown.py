"""Closing keeps its deadline, even if the broker does not answer, and loses nothing."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from redrive import (
    AsyncBroadcastConsumer,
    AsyncRetryConsumer,
    AsyncRetryProducer,
    AsyncSimpleConsumer,
    BroadcastConsumer,
    Event,
    RetryConsumer,
    RetryProducer,
    SimpleConsumer,
)
from redrive.messages import NotSentError
from tests.support.brokers import SEND, WithholdingProxy, proxy_of
from tests.support.consumers import StartProgram, interrupted, start_program
from tests.support.waiting import awake_time, wait_until

__all__ = ["start_program"]
ProvisionPolicy = Callable[..., Any]
SOON = timedelta(seconds=180)
LONG = 10.0
"""Seconds; the client alone waits for 30, and for 10 to connect."""


@pytest.fixture
def proxy(broker: Any) -> Iterator[WithholdingProxy]:  # noqa: ANN401 - see conftest
    with proxy_of(broker.port) as proxy:
        yield proxy


@pytest.fixture
def client(
    broker: Any,  # noqa: ANN401 - see conftest
    proxy: WithholdingProxy,
) -> Iterator[pulsar.Client]:
    """A client of the superuser that connects through the proxy."""
    client = pulsar.Client(
        f"pulsar://127.0.0.1:{proxy.port}",
        authentication=pulsar.AuthenticationToken(broker.token("superuser")),
        logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
    )
    yield client
    client.shutdown()


def leave(proxy: WithholdingProxy, how: str) -> None:
    """Disconnect or freeze the broker."""
    if how == "gone":
        proxy.refuses = True
        proxy.cut()
    else:
        proxy.frozen = True


@pytest.mark.parametrize("how", ["gone", "frozen"])
def test_workers_failing_without_broker_keep_the_deadline(
    provision_policy: ProvisionPolicy, proxy: WithholdingProxy, client: pulsar.Client, how: str
) -> None:
    provisioned = provision_policy()
    provisioned.send(b"1", b"2", b"3", b"4")
    in_hand, away = threading.Barrier(5), threading.Event()
    events: list[Event] = []

    def fail(_message: pulsar.Message) -> None:
        in_hand.wait(180)
        away.wait(180)
        raise ConnectionError

    consumer = RetryConsumer(client, provisioned.policy, on_event=events.append)
    running = threading.Thread(target=consumer.run, args=(fail,), kwargs={"workers": 4})
    running.start()
    in_hand.wait(180)
    leave(proxy, how)
    away.set()
    with awake_time() as passed:
        consumer.close(timeout=2)
        assert passed() < LONG
    unsettled = [event for event in events if event.event == "redrive.left_unsettled"]
    assert [event.count for event in unsettled] == [4]

    proxy.cut()
    again = provisioned.consumer()
    contents = [again.receive(SOON).data() for _ in range(4)]
    assert sorted(contents) == [b"1", b"2", b"3", b"4"]
    with awake_time() as passed:
        running.join(120)
        assert not running.is_alive()
        assert passed() < 30  # one wait for the opening of a producer, not one for each worker


def test_stopped_run_waits_for_one_send_to_a_gone_broker(
    provision_policy: ProvisionPolicy, proxy: WithholdingProxy, client: pulsar.Client
) -> None:
    provisioned = provision_policy()
    provisioned.send(*[b"%d" % number for number in range(6)])
    taken: list[int] = []
    consumer = RetryConsumer(client, provisioned.policy)

    def fail(messages: Sequence[pulsar.Message]) -> None:
        taken.append(len(messages))
        leave(proxy, "gone")
        consumer.stop()
        raise ConnectionError

    with awake_time() as passed:
        with consumer:
            consumer.run_batches(fail, size=6, wait=SOON)
        assert passed() < 3 * LONG  # six sends would take six times 12 s
    assert taken == [6]


@pytest.mark.parametrize("how", ["gone", "frozen"])
def test_each_kind_closes_within_its_deadline(
    provision_policy: ProvisionPolicy, proxy: WithholdingProxy, client: pulsar.Client, how: str
) -> None:
    policy = provision_policy().policy
    opened: list[Any] = [
        RetryConsumer(client, policy),
        SimpleConsumer(client, policy),
        BroadcastConsumer(client, str(policy.topic)),
        RetryProducer(client, str(policy.topic)),
    ]
    leave(proxy, how)
    for one in opened:
        with awake_time() as passed:
            one.close(timedelta(seconds=1))
            assert passed() < LONG


@pytest.mark.parametrize("how", ["gone", "frozen"])
async def test_each_asynchronous_kind_closes_within_its_deadline(
    provision_policy: ProvisionPolicy, proxy: WithholdingProxy, client: pulsar.Client, how: str
) -> None:
    policy = (await asyncio.to_thread(provision_policy)).policy
    async with (
        AsyncRetryConsumer(client, policy) as consumer,
        AsyncSimpleConsumer(client, policy) as simple,
        AsyncBroadcastConsumer(client, str(policy.topic)) as broadcast,
        AsyncRetryProducer(client, str(policy.topic)) as producer,
    ):
        leave(proxy, how)
        opened: list[Any] = [consumer, simple, broadcast, producer]
        for one in opened:
            with awake_time() as passed:
                await one.close(timeout=1)
                assert passed() < LONG


def test_a_send_under_way_ends_when_its_producer_is_closed(
    provision_policy: ProvisionPolicy, proxy: WithholdingProxy, client: pulsar.Client
) -> None:
    policy = provision_policy().policy
    producer = RetryProducer(client, str(policy.topic), timeout=timedelta(minutes=5))
    refused: list[NotSentError] = []

    def send() -> None:
        try:
            producer.send(b"x")
        except NotSentError as error:
            refused.append(error)

    proxy.frozen = True
    sending = threading.Thread(target=send)
    sending.start()
    wait_until(lambda: proxy.seen[SEND])
    with awake_time() as passed:
        producer.close(timeout=1)
        sending.join()
        assert passed() < LONG
    assert len(refused) == 1


def test_in_flight_messages_at_close_are_reported_and_return(
    provision_policy: ProvisionPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    provisioned = provision_policy()
    provisioned.send(b"1", b"2", b"3")
    consumer = provisioned.consumer()
    in_hand = [consumer.receive(SOON) for _ in range(3)]
    consumer.acknowledge(in_hand.pop())
    consumer.close()
    assert "closed with 2 in-flight messages" in caplog.text
    caplog.clear()
    again = provisioned.consumer()
    for _ in in_hand:
        again.acknowledge(again.receive(SOON))
    again.close()
    assert "in-flight messages" not in caplog.text


def test_program_ends_though_the_broker_does_not_answer(
    provision_policy: ProvisionPolicy, proxy: WithholdingProxy, start_program: StartProgram
) -> None:
    process = start_program(
        provision_policy(),
        f"""
import sys
client = pulsar.Client(
    "pulsar://127.0.0.1:{proxy.port}",
    authentication=pulsar.AuthenticationToken(os.environ["TOKEN"]),
    logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull),
)
consumer = RetryConsumer(client, load_policy())
print("open", flush=True)
sys.stdin.readline()
consumer.close(timeout=1)
print("closed", flush=True)
""",
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    proxy.frozen = True
    output, _ = process.communicate("go on\n", timeout=180)
    assert (process.returncode, output) == (0, "closed\n")


def test_a_handler_may_close_its_consumer(provision_policy: ProvisionPolicy) -> None:
    """Other workers are handling messages then; the contract tests one worker."""
    workers = 3
    provisioned = provision_policy()
    provisioned.send(b"1", b"2", b"3")
    consumer = provisioned.consumer()
    together = threading.Barrier(workers)
    handled: list[bytes] = []

    def handle(message: pulsar.Message) -> None:
        together.wait(180)
        consumer.close()
        handled.append(message.data())

    consumer.run(handle, workers=workers)
    assert len(handled) == workers
    assert provisioned.backlog(provisioned.policy.topic) == 3 - workers
    again = provisioned.consumer()
    contents = [again.receive(SOON).data() for _ in range(3 - workers)]
    assert sorted([*handled, *contents]) == [b"1", b"2", b"3"]


@pytest.mark.parametrize("end", ["loop.close()", "pass"])
def test_program_whose_loop_ends_with_handlers_running_ends(
    provision_policy: ProvisionPolicy, start_program: StartProgram, end: str
) -> None:
    provisioned = provision_policy()
    provisioned.send(b"x")
    process = start_program(
        provisioned,
        f"""
import asyncio
from redrive import AsyncRetryConsumer
loop = asyncio.new_event_loop()
async def main():
    handling = asyncio.Event()
    async def handle(message):
        handling.set()
        await asyncio.sleep(3_600)
    consumer = AsyncRetryConsumer(client, load_policy())
    await consumer.__aenter__()
    tasks.add(loop.create_task(consumer.run(handle, workers=2)))
    await handling.wait()
tasks = set()
loop.run_until_complete(main())
{end}
print("ended", flush=True)
""",
    )
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    assert "ended" in output
    assert provisioned.backlog(provisioned.policy.topic) == 1


def test_dead_letters_without_operator_are_warned_of(
    provision_policy: ProvisionPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    provisioned = provision_policy()
    client = provisioned.client(provisioned.role)
    by_hand = replace(provisioned.policy, name="")
    RetryConsumer(client, provisioned.policy).close()
    RetryConsumer(client, replace(by_hand, dead_letters=False)).close()
    assert "create-subscription" not in caplog.text
    RetryConsumer(client, by_hand).close()
    assert f"{provisioned.policy.dead_letter_topic} keeps dead letters only if" in caplog.text


FAILING_PROGRAM = """
def handle(message):
    print("handling", flush=True)
    raise ConnectionError

with RetryConsumer(client, load_policy()) as consumer:
    consumer.run(handle)
client.close()
print("ended", flush=True)
"""


@pytest.mark.usefixtures("pulsar_namespace")  # which it changes
def test_program_that_can_open_no_producer_ends_without_abort(
    provision_policy: ProvisionPolicy, start_program: StartProgram
) -> None:
    """The client waits for a producer until the namespace no longer requires encryption."""
    provisioned = provision_policy()
    provisioned.send(b"order")
    path = f"/admin/v2/namespaces/{provisioned.policy.topic.namespace_name}/encryptionRequired"
    provisioned.broker.request("POST", path, body=True).check("require encryption")
    program = start_program(provisioned, FAILING_PROGRAM)
    output = interrupted(program, signal.SIGTERM)
    assert program.returncode == 0, output
    assert output.endswith("ended\n")


SENDING_PROGRAM = """
import sys, threading, time
from redrive import NotSentError, RetryProducer
client = pulsar.Client(
    "pulsar://127.0.0.1:{port}",
    authentication=pulsar.AuthenticationToken({token!r}),
    logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull),
)
producer = RetryProducer(client, {topic!r}, in_flight=4, timeout=60)

def send():
    while True:
        try:
            producer.send(b"x")
        except NotSentError:
            time.sleep(0.01)

class EndsSlowly:
    def __del__(self, sleep=time.sleep):
        sleep(1)  # threads return from the client meanwhile

ends_slowly = EndsSlowly()
for _ in range(4):
    threading.Thread(target=send, daemon=True).start()
print("sending", flush=True)
sys.stdin.readline()
print("ended", flush=True)
"""


def test_program_whose_threads_send_ends_without_abort(
    provision_policy: ProvisionPolicy, proxy: WithholdingProxy, start_program: StartProgram
) -> None:
    provisioned = provision_policy()
    source = SENDING_PROGRAM.format(
        port=proxy.port,
        token=provisioned.broker.token("superuser"),
        topic=str(provisioned.policy.topic),
    )
    program = start_program(provisioned, source)
    assert program.stdout is not None
    assert program.stdout.readline() == "sending\n"
    proxy.frozen = True  # before some producers are open
    output, _ = program.communicate("end\n", timeout=180)
    assert program.returncode == 0, output
    assert output.startswith("ended\n")
