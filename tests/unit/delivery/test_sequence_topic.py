"""How threads share what a broker tells of dead letters; the rest is shown at a broker."""

from __future__ import annotations

import threading
from typing import cast

import pulsar
import pytest

from redrive.delivery.middleware.sequencing import SequenceTopic
from redrive.messages import NotSentError
from redrive.policy.naming import TopicName

THREADS = 20
LONG = 30.0


class Reader:
    """Says that nothing is new, when it is allowed to."""

    def __init__(self) -> None:
        self.asked = 0
        self.is_asked, self.may_answer = threading.Event(), threading.Event()
        self.error: pulsar.PulsarException | None = None

    def create_reader(self, *_args: object, **_options: object) -> Reader:
        return self

    def has_message_available(self) -> bool:
        self.asked += 1
        self.is_asked.set()
        assert self.may_answer.wait(LONG)
        if self.error is not None:
            raise self.error
        return False

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize("error", [None, pulsar.Timeout()])
def test_threads_that_wait_for_their_turn_share_one_answer(
    error: pulsar.PulsarException | None,
) -> None:
    reader = Reader()
    reader.error = error
    topic = SequenceTopic(cast("pulsar.Client", reader), TopicName("shop", "prod", "records"))
    answers: list[type[Exception] | None] = []

    def ask() -> None:
        try:
            topic.read()
        except NotSentError as refused:
            answers.append(type(refused))
        else:
            answers.append(None)

    first = threading.Thread(target=ask)
    first.start()
    assert reader.is_asked.wait(LONG)  # this question may be too old for the others
    others = [threading.Thread(target=ask) for _ in range(THREADS)]
    for other in others:
        other.start()
    reader.may_answer.set()
    for thread in (first, *others):
        thread.join(LONG)
    assert answers == [None if error is None else NotSentError] * (THREADS + 1)
    assert reader.asked < THREADS  # two, unless a thread begins late
