"""Forked children: inherited consumers and producers refuse use, and the parent continues."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.consumers import StartProgram, start_program
from tests.support.provisioned_policy import ProvisionedPolicy
from tests.support.waiting import wait_until

__all__ = ["start_program"]
ProvisionPolicy = Callable[..., Any]

FORK = """
import asyncio, json, sys, time
from redrive import *
from redrive.errors import RedriveError

policy = load_policy()

def outcome(call):
    began = time.monotonic()
    try:
        call()
    except RedriveError as error:
        assert time.monotonic() - began < 60
        return error.reason
    return "done"

def in_child(*calls, end=sys.exit):
    pid = os.fork()
    if pid == 0:
        print(json.dumps([outcome(call) for call in calls]), flush=True)
        end(0)
    assert os.waitpid(pid, 0)[1] == 0
"""

CONSUMERS = {
    "RetryConsumer": """
consumer = RetryConsumer(client, PolicyFile())
first = consumer.receive(60)
time.sleep(2)  # the others wait in the consumer
in_child(
    lambda: consumer.receive(1), lambda: consumer.acknowledge(first), lambda: consumer.run(print),
    lambda: consumer.reconsume_later(first), lambda: consumer.negative_acknowledge(first),
    lambda: consumer.receive_batch(2, 1), lambda: consumer.policy, consumer.pause,
    lambda: RetryConsumer(client, policy), lambda: RetryProducer(client, str(policy.topic)),
    consumer.stop, consumer.close, consumer.close,
)
consumer.acknowledge(first)
handled = [first.data().decode()]
def handle(message):
    handled.append(message.data().decode())
    if len(handled) == 6:
        consumer.stop()
consumer.run(handle)
consumer.close()
""",
    "SimpleConsumer": """
consumer = SimpleConsumer(client, policy)
first, = consumer.receive(1, 600)
in_child(
    lambda: consumer.receive(1, 60, 1), lambda: consumer.acknowledge(first),
    lambda: consumer.change_invisible_duration(first, 60), lambda: consumer.hand_back(first),
    consumer.stop, consumer.close,
)
handled, messages = [], [first]
while messages or len(handled) < 6:
    for message in messages:
        consumer.acknowledge(message)
        handled.append(message.data().decode())
    messages = consumer.receive(10, 60, 3)
consumer.close()
""",
    "AsyncRetryConsumer": """
async def main():
    async with AsyncRetryConsumer(client, policy) as consumer:
        first = await consumer.receive()
        async def leave():
            async with consumer:
                pass
        in_child(*[
            lambda call=call: asyncio.new_event_loop().run_until_complete(call()) for call in (
                lambda: consumer.receive(1), lambda: consumer.acknowledge(first),
                lambda: consumer.run(print), leave, consumer.close,
            )
        ], end=os._exit)
        await consumer.acknowledge(first)
        handled = [first.data().decode()]
        while len(handled) < 6:
            message = await consumer.receive()
            handled.append(message.data().decode())
            await consumer.acknowledge(message)
        return handled
asyncio.set_event_loop_policy(None)
handled = asyncio.run(main())
""",
}
REFUSED = {
    "RetryConsumer": ["Inherited"] * 10 + ["done"] * 3,
    "SimpleConsumer": ["Inherited"] * 4 + ["done"] * 2,
    "AsyncRetryConsumer": ["Inherited"] * 4 + ["done"],
}


def outcomes(
    start_program: StartProgram, provisioned: ProvisionedPolicy, program: str
) -> list[Any]:
    """Run *program* to its end, and return its output."""
    process = start_program(provisioned, FORK + program)
    try:
        output, _ = process.communicate(timeout=180)
    finally:
        process.kill()
    assert process.returncode == 0, output
    return [json.loads(line) for line in output.splitlines() if line.startswith("[")]


@pytest.mark.parametrize("kind", CONSUMERS)
def test_forked_consumer_refuses_use_and_parent_continues(
    provision_policy: ProvisionPolicy, start_program: StartProgram, kind: str
) -> None:
    provisioned = provision_policy()
    contents = [f"{number}" for number in range(6)]
    provisioned.send(*[content.encode() for content in contents])
    program = CONSUMERS[kind] + "print(json.dumps(sorted(handled)), flush=True)\n"
    refused, handled = outcomes(start_program, provisioned, program)
    assert refused == REFUSED[kind]
    assert handled == contents
    provisioned.wait_until_settled()


def test_fork_beside_workers_ends_and_leaves_the_parent_alone(
    provision_policy: ProvisionPolicy, start_program: StartProgram
) -> None:
    provisioned = provision_policy(delays=["1h"])
    contents = [f"{number}" for number in range(40)]
    provisioned.send(*[content.encode() for content in contents])
    (refused, handled) = outcomes(
        start_program,
        provisioned,
        """
consumer, handled, children = RetryConsumer(client, policy), [], []
def handle(message):
    if message.data() == b"7" and not children:
        pid = os.fork()
        if pid == 0:
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            return  # into `run`, which settles nothing in a child
        children.append(pid)
    if message.data() == b"8":
        raise ConnectionError
    handled.append(message.data().decode())
    time.sleep(0.01)
    if len(set(handled)) == 39:
        consumer.stop()
parent = os.getpid()
try:
    consumer.run(handle, workers=1)
except RedriveError as error:
    assert os.getpid() != parent
    print(json.dumps([error.reason]), flush=True)
    sys.exit(0)
assert os.waitpid(children[0], 0)[1] == 0
consumer.close()
print(json.dumps(sorted(handled, key=int)), flush=True)
""",
    )
    assert refused == ["Inherited"]
    assert handled == [content for content in contents if content != "8"]
    wait_until(lambda: not provisioned.backlog(provisioned.policy.topic))
    wait_until(lambda: provisioned.backlog(provisioned.policy.retry_topic) == 1)


def test_forked_producer_refuses_use_and_parent_continues(
    provision_policy: ProvisionPolicy, start_program: StartProgram
) -> None:
    provisioned = provision_policy()
    provisioned.grant(provisioned.policy.topic, "consume", "produce")
    (refused, sent) = outcomes(
        start_program,
        provisioned,
        """
producer = RetryProducer(client, str(policy.topic))
producer.send(b"1")
in_child(lambda: producer.send(b"2"), producer.close)
producer.send(b"3")
producer.close()
print("[]", flush=True)
""",
    )
    assert (refused, sent) == (["Inherited", "done"], [])
    consumer = provisioned.consumer()
    assert [consumer.receive(180).data() for _ in range(2)] == [b"1", b"3"]
    assert consumer.receive(1) is None


def test_fork_of_a_client_that_was_used_otherwise_is_refused(
    provision_policy: ProvisionPolicy, start_program: StartProgram
) -> None:
    provisioned = provision_policy()
    (refused,) = outcomes(
        start_program,
        provisioned,
        """
client.get_topic_partitions(str(policy.topic))
in_child(lambda: RetryConsumer(client, policy))
""",
    )
    assert refused == ["Inherited"]
