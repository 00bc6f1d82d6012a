"""The asynchronous consumer beyond the contract: a free loop, cancellation, SIGTERM."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from tests.support.user_programs import StartProgram, interrupted, start_program
from tests.support.waiting import wait_until

__all__ = ["start_program"]
ProvisionPolicy = Callable[..., Any]
SECOND = timedelta(seconds=1)
SOON = 180 * SECOND


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
    provisioned.send(b"in hand", b"in hand", b"next")
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
    provisioned.send(b"in hand")
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
    assert provisioned.consumer().receive(SOON).data() == b"in hand"
