"""The broker fails or is changed under a consumer at work: every message comes through.

Topics are also unloaded while messages are handled at full speed, when they are received in bursts.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pulsar
import pytest

from redrive import Event, FailureRules, RetryConsumer
from redrive.policy.naming import DEAD_LETTER_SUBSCRIPTION, TopicName
from sandbox import pulsar as pulsar_part
from sandbox.pulsar import SUPERUSER
from sandbox.sandbox import Sandbox
from tests.support.provisioned_policy import ProvisionedPolicy, provision_policy
from tests.support.topics import path
from tests.support.waiting import pauses, wait_until

__all__ = ["provision_policy"]

ProvisionPolicy = Callable[..., Any]


class AtWork:
    """A consumer that fails each message once, and each time those that begin with ``bad``."""

    def __init__(self, provisioned: Any) -> None:  # noqa: ANN401 - see conftest
        self.events: Counter[str] = Counter()
        self.handled: Counter[bytes] = Counter()
        self._provisioned = provisioned
        self.consumer = RetryConsumer(
            provisioned.client(provisioned.role), provisioned.policy, on_event=self._count
        )

    def handle(self, message: Any) -> None:  # noqa: ANN401 - the client publishes no types
        if message.data().startswith(b"bad"):
            raise ValueError
        if message.topic_name() == str(self._provisioned.policy.topic):
            raise LookupError
        self.handled[message.data()] += 1

    def _count(self, event: Event) -> None:
        self.events[event.event] += 1

    def wait(self, reached: Callable[[], bool], seconds: float = 180) -> None:
        """Wait until *reached* returns True; at a time-out fail with the events so far."""
        for _ in pauses(seconds):
            if reached():
                return
        pytest.fail(f"{self.events}, {self.handled}")


@pytest.fixture
def at_work() -> Iterator[Callable[[Any], AtWork]]:
    """Have a consumer of a provisioned policy run until the test ends."""
    running: list[tuple[AtWork, threading.Thread]] = []

    def begin(provisioned: Any) -> AtWork:  # noqa: ANN401 - see conftest
        work = AtWork(provisioned)
        thread = threading.Thread(
            target=work.consumer.run,
            args=(work.handle,),
            kwargs={"workers": 2, "rules": FailureRules(dead_letter_on=(ValueError,))},
        )
        thread.start()
        running.append((work, thread))
        return work

    yield begin
    for work, thread in running:
        work.consumer.close()
        thread.join(120)
        assert not thread.is_alive()


Begin = Callable[[Any], AtWork]


def dead_letters(provisioned: Any) -> set[bytes]:  # noqa: ANN401 - see conftest
    """Return the contents of all dead letters; one whose receipt was lost is stored twice."""
    client = provisioned.client("superuser")
    return {message.data() for message in provisioned.drain_dead_letters(client)}


def attached(provisioned: Any, topic: TopicName) -> int:  # noqa: ANN401 - see conftest
    """Return the number of producers and consumers; the broker closes them after a revocation."""
    answer = provisioned.broker.request("GET", f"{path(topic)}/stats")
    answer.check(f"read statistics of {topic}")
    stats = json.loads(answer.body)
    consumers = stats["subscriptions"][provisioned.policy.subscription]["consumers"]
    return len(stats["publishers"]) + len(consumers)


def test_messages_wait_for_revoked_rights_and_deleted_topic(
    provision_policy: ProvisionPolicy, at_work: Begin
) -> None:
    provisioned = provision_policy()
    retry, dead = provisioned.policy.retry_topic, provisioned.policy.dead_letter_topic
    work = at_work(provisioned)
    provisioned.send(b"before", b"bad before")
    work.wait(lambda: work.handled[b"before"] >= 1 <= work.events["redrive.dead_lettered"])

    provisioned.broker.request("DELETE", f"{path(retry)}/permissions/{provisioned.role}").check(
        "revoke"
    )
    work.wait(lambda: attached(provisioned, retry) == 0)
    provisioned.broker.request("DELETE", f"{path(dead)}?force=true").check("delete the topic")
    provisioned.send(b"after", b"bad after")
    work.wait(lambda: work.events["redrive.unsent"] >= 2)
    assert provisioned.backlog(provisioned.policy.topic) == 2
    provisioned.create(dead, DEAD_LETTER_SUBSCRIPTION, 0)
    provisioned.grant(dead, "produce")
    provisioned.grant(retry, "consume", "produce")

    work.wait(lambda: work.handled[b"after"] >= 1)
    work.wait(lambda: provisioned.unsettled() == 0)
    assert dead_letters(provisioned) == {b"bad after"}


def test_revoked_and_restored_consume_right_loses_nothing(
    provision_policy: ProvisionPolicy, at_work: Begin
) -> None:
    provisioned = provision_policy()
    source = provisioned.policy.topic
    work = at_work(provisioned)
    provisioned.send(b"before")
    work.wait(lambda: work.handled[b"before"] >= 1)

    provisioned.broker.request("DELETE", f"{path(source)}/permissions/{provisioned.role}").check(
        "revoke"
    )
    work.wait(lambda: attached(provisioned, source) == 0)
    provisioned.send(b"meanwhile")
    time.sleep(1)
    assert work.handled[b"meanwhile"] == 0
    provisioned.grant(source, "consume")

    work.wait(lambda: work.handled[b"meanwhile"] >= 1)
    work.wait(lambda: provisioned.unsettled() == 0)


def test_topics_unloaded_repeatedly_lose_nothing(
    provision_policy: ProvisionPolicy, at_work: Begin
) -> None:
    provisioned = provision_policy()
    topics = (
        provisioned.policy.topic,
        provisioned.policy.retry_topic,
        provisioned.policy.dead_letter_topic,
    )
    sent = [f"{n}".encode() for n in range(60)]
    work = at_work(provisioned)
    for third in range(3):
        provisioned.send(*sent[third * 20 : (third + 1) * 20], b"bad %d" % third)
        for topic in topics:
            provisioned.broker.request("PUT", f"{path(topic)}/unload").check(f"unload {topic}")

    work.wait(lambda: set(sent) <= work.handled.keys())
    work.wait(lambda: work.events["redrive.dead_lettered"] >= 3)
    work.wait(lambda: provisioned.unsettled() == 0)
    assert dead_letters(provisioned) == {b"bad 0", b"bad 1", b"bad 2"}


def test_restart_of_a_killed_broker_loses_nothing(
    sandbox: Sandbox, provision_policy: ProvisionPolicy, at_work: Begin
) -> None:
    provisioned = provision_policy(delays=["3s"])
    work = at_work(provisioned)
    provisioned.send(b"before", b"bad before", b"waiting")
    work.wait(lambda: work.events["redrive.retried"] >= 2)
    sandbox.processes.stop(pulsar_part.NAME, grace=0.5)
    pulsar_part.start(sandbox.pulsar, sandbox.processes)
    pulsar_part.wait(sandbox.pulsar, sandbox.processes)
    provisioned.send(b"after", b"bad after")

    work.wait(lambda: {b"before", b"waiting", b"after"} <= work.handled.keys())
    work.wait(lambda: work.events["redrive.dead_lettered"] >= 2)
    work.wait(lambda: provisioned.unsettled() == 0)
    assert dead_letters(provisioned) == {b"bad before", b"bad after"}


MESSAGES = 60_000
UNLOADS = 6
MOST_HANDLED_AGAIN = 1_000


@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
@pytest.mark.parametrize("workers", [1, 8])
def test_unloads_at_full_speed_repeat_few_messages(
    provision_policy: Callable[..., ProvisionedPolicy], *, workers: int, batched: bool
) -> None:
    provisioned = provision_policy()
    fill(provisioned, batched=batched)
    consumer = provisioned.consumer()
    handled, numbers = Counter[int](), itertools.count(1)
    counted = 0

    def handle(message: pulsar.Message) -> None:
        nonlocal counted
        handled[int(message.data())] += 1  # each number has a single handler at a time
        counted = next(numbers)

    running = threading.Thread(target=consumer.run, args=(handle,), kwargs={"workers": workers})
    running.start()
    for unload in range(UNLOADS):
        wait_until(lambda at=unload * MESSAGES // UNLOADS + 1: counted >= at)  # type: ignore[misc]
        provisioned.unload()
    wait_until(lambda: len(handled) == MESSAGES and provisioned.unsettled() == 0)
    consumer.stop()
    running.join()
    again = sum(handled.values()) - MESSAGES
    assert again <= MOST_HANDLED_AGAIN


def fill(provisioned: ProvisionedPolicy, *, batched: bool) -> None:
    """Send numbered messages, which wait in the topic."""
    producer = provisioned.client(SUPERUSER).create_producer(
        str(provisioned.policy.topic), batching_enabled=batched, block_if_queue_full=True
    )
    for number in range(MESSAGES):
        producer.send_async(b"%d" % number, lambda *_: None)
    producer.flush()
    producer.close()
