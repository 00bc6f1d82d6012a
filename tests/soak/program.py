"""A consumer of the soak, of one kind: `python -m tests.soak.program KIND JOURNAL`.

It handles each message by its plan, and records each start, each result and each event of
the library. It is killed and frozen from outside; SIGTERM stops it cleanly.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pulsar

from redrive import (
    AsyncRetryConsumer,
    Attempt,
    ConsumerStoppedError,
    DeadLetter,
    Event,
    PolicyFile,
    RetryConsumer,
    SimpleConsumer,
)
from redrive.delivery.consumers.simple import NotInFlightError
from redrive.messages import id_text
from tests.soak.journal import Journal, plan

WORKERS = 8
INVISIBLE_SECONDS = 30.0


class Program:
    """The common parts of all kinds."""

    def __init__(self, client: pulsar.Client, journal: Journal) -> None:
        self.client = client
        self.policy = PolicyFile()
        self.options: dict[str, Any] = {"on_event": self.report}
        self._journal = journal

    def report(self, event: Event) -> None:
        """Record an event of the library."""
        self._journal.write(
            "event", name=event.event, id=event.message_id, new=event.new_id, reason=event.reason
        )

    def record_requests(self) -> None:
        """Record each request for redelivery: messages that come meanwhile go to others, too."""
        request = pulsar.Consumer.redeliver_unacknowledged_messages

        def record(consumer: pulsar.Consumer) -> None:
            self._journal.write("request")
            request(consumer)

        pulsar.Consumer.redeliver_unacknowledged_messages = record

    def begin(self, message: pulsar.Message, attempt: Attempt) -> float:
        """Record the start of *message* and return the duration of its handling."""
        number = int(message.data())
        self._journal.write(
            "begin", id=id_text(message.message_id()), origin=attempt.origin,
            attempt=attempt.number, number=number, redeliveries=message.redelivery_count(),
        )  # fmt: skip
        return plan(number).seconds

    def end(self, message: pulsar.Message, attempt: Attempt) -> Exception | None:
        """Record the result of a handling; return its error."""
        its = plan(int(message.data()))
        fails = attempt.number <= its.failures
        self._journal.write("end", id=id_text(message.message_id()), ok=not fails)
        if not fails:
            return None
        return DeadLetter("poison") if its.poison else LookupError(f"attempt {attempt.number}")

    def threads(self) -> None:
        """Handle in several threads."""

        def handle(message: pulsar.Message, attempt: Attempt) -> None:
            time.sleep(self.begin(message, attempt))
            if error := self.end(message, attempt):
                raise error

        with RetryConsumer(self.client, self.policy, **self.options) as consumer:
            consumer.run(handle, workers=WORKERS)

    def batches(self) -> None:
        """Handle messages in batches."""
        with RetryConsumer(self.client, self.policy, **self.options) as consumer:

            def handle(messages: Any) -> list[Exception | None]:  # noqa: ANN401 - no types
                attempts = [consumer.attempt_of(message) for message in messages]
                both = list(zip(messages, attempts, strict=True))
                time.sleep(max([self.begin(*call) for call in both]))
                return [self.end(*call) for call in both]

            consumer.run_batches(handle, size=20, wait=0.2)

    def coroutines(self) -> None:
        """Handle on an event loop."""

        async def handle(message: pulsar.Message, attempt: Attempt) -> None:
            await asyncio.sleep(self.begin(message, attempt))
            if error := self.end(message, attempt):
                raise error

        async def run() -> None:
            async with AsyncRetryConsumer(self.client, self.policy, **self.options) as consumer:
                await consumer.run(handle, workers=WORKERS)

        asyncio.run(run())

    def simple(self) -> None:
        """Receive messages on request; a failed one is left until its invisible duration ends."""
        with SimpleConsumer(self.client, self.policy, **self.options) as consumer:
            signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
            while True:
                try:
                    messages = consumer.receive(5, INVISIBLE_SECONDS)
                except ConsumerStoppedError:
                    return
                attempts = [consumer.attempt_of(message) for message in messages]
                both = list(zip(messages, attempts, strict=True))
                time.sleep(max([self.begin(*call) for call in both]))
                for message, attempt in both:
                    if self.end(message, attempt) is None:
                        self._settle(consumer, message)

    def _settle(self, consumer: SimpleConsumer, message: pulsar.Message) -> None:
        try:
            consumer.acknowledge(message)
        except NotInFlightError:
            self._journal.write("late", id=id_text(message.message_id()))


def main(kind: str, journal: Path) -> None:
    """Consume until SIGTERM; SIGUSR1 prints the stacks of all threads."""
    faulthandler.register(signal.SIGUSR1)
    client = pulsar.Client(
        os.environ["URL"],
        authentication=pulsar.AuthenticationToken(os.environ["TOKEN"]),
        logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Warn),
    )
    program = Program(client, Journal(journal))
    program.record_requests()
    kinds: dict[str, Callable[[], None]] = {
        "threads": program.threads,
        "batches": program.batches,
        "coroutines": program.coroutines,
        "simple": program.simple,
    }
    kinds[kind]()
    # It says so if a producer is still being closed, as a slow broker has not answered.
    with contextlib.suppress(pulsar.AlreadyClosed):
        client.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
