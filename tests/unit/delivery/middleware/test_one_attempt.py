"""Which messages wait for a handler that is still at work, and which do not."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pulsar
import pytest

from redrive import Policy, RetryConsumer
from redrive.delivery.decisions import Attempts
from redrive.delivery.middleware.chain import Outcome
from redrive.delivery.middleware.scheduling import OneAttempt
from redrive.policy.naming import TopicName
from redrive.testing.broker import InMemoryBroker, InMemoryMessage
from tests.support.fake_client import FakeClient

POLICY = Policy(TopicName("shop", "prod", "orders"), "billing")
GO = {"RECONSUMETIMES": "1", "ORIGIN_MESSAGE_ID": "12:34:0", "REAL_TOPIC": str(POLICY.topic)}
"""As the client in Go writes them, for all messages of a batch alike."""


class Again:
    """An incoming that notes which messages are to be handed out again."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def again(self, message: Any, _seconds: float) -> None:  # noqa: ANN401 - as the client has it
        self.messages.append(message)


class Desk:
    """Takes and handles messages one inside the other, as several threads do beside each other."""

    def __init__(self) -> None:
        self.broker = InMemoryBroker(POLICY)
        self.again = Again()
        incoming: Any = self.again
        self.one_attempt = OneAttempt(incoming, Attempts(lambda: POLICY, self.broker.clock))

    def message(self, **headers: str) -> Any:  # noqa: ANN401 - as the client has it
        """Store a message in the retry topic, and return it."""
        message = InMemoryMessage(
            POLICY.retry_topic, pulsar.MessageId.earliest, b"", self.broker.clock.now(),
            headers=GO | headers,
        )  # fmt: skip
        self.broker.store(POLICY.retry_topic, message)
        return self.broker.hand_out(self, None)

    def taken_beside(self, at_work: Any, *messages: Any, settled: bool) -> list[Any]:  # noqa: ANN401
        """Return what of *messages* is taken while a handler has *at_work*."""
        waiting, taken = list(messages), list[Any]()
        take = self.one_attempt.take(lambda: [waiting.pop(0)])

        def work(_messages: Sequence[pulsar.Message]) -> Sequence[Outcome]:
            if settled:
                self.one_attempt.note_settlement(at_work)
            while waiting:
                try:
                    taken.extend(take())
                except IndexError:  # the last was put off
                    break
            return [None]

        self.one_attempt.handle(work)([at_work])
        assert sorted([*taken, *self.again.messages], key=id) == sorted(messages, key=id)
        return taken


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_messages_with_one_origin_are_handled_beside_each_other(desk: Desk) -> None:
    first, second = desk.message(), desk.message()
    assert desk.taken_beside(first, second, settled=False) == [second]


def test_next_attempt_waits_for_late_handler_and_siblings_do_not(desk: Desk) -> None:
    slow, sibling = desk.message(), desk.message()
    following = desk.message(REDRIVE_FIRST_ID="1:2:3")
    retry = desk.message(REDRIVE_FIRST_ID=f"2:{slow.message_id().entry_id()}:-1")
    others = [sibling, following]
    assert desk.taken_beside(slow, retry, *others, settled=True) == others
    assert desk.again.messages == [retry]
    desk.again.messages.clear()
    assert desk.taken_beside(sibling, retry, settled=True) == [retry]


def test_message_at_work_is_not_taken_beside_itself(desk: Desk) -> None:
    message = desk.message()
    assert desk.taken_beside(message, message, settled=False) == []


def test_retries_of_one_batch_of_go_take_as_long_as_others() -> None:
    client, handled, done = FakeClient(), list[bytes](), threading.Event()
    contents = [b"%d" % number for number in range(40)]

    def handle(message: pulsar.Message) -> None:
        time.sleep(0.02)
        handled.append(message.data())
        if len(handled) == len(contents):
            consumer.stop()
            done.set()

    with RetryConsumer(client.as_pulsar(), POLICY) as consumer:
        client.deliver(POLICY.retry_topic, *contents, properties=GO)
        began = time.monotonic()
        consumer.run(handle, workers=8)
    assert done.is_set()
    assert sorted(handled) == sorted(contents)
    assert time.monotonic() - began < 10  # 0.1 s; with one a second 30 s
