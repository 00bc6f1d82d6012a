"""Interruption and closing: exceptions of handlers that are no `Exception`, and time to close."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pulsar
import pytest

import redrive
from redrive import CrashLog, Event, FailureRules, Policy, Redaction
from redrive.delivery.middleware.chain import (
    Handle,
    Middleware,
    Outcome,
    Receive,
    Settle,
    Settlement,
)
from redrive.delivery.middleware.outage_breaker import OutageBreaker
from redrive.delivery.reporting import Name
from redrive.errors import InvalidSpecError
from redrive.policy.ladder import Ladder
from redrive.policy.naming import TopicName
from redrive.testing.broker import InMemoryBroker, InMemoryMessage
from redrive.testing.consumers import (
    AsyncInMemoryConsumer,
    InMemoryConsumer,
    InMemorySimpleConsumer,
)
from tests.support.memory_brokers import BlockingBroker

POLICY = Policy(
    TopicName("shop", "prod", "orders"), "billing", max_retries=1, ladder=Ladder.from_fixed("5s")
)


class Panic(BaseException):
    """A panic in Rust, as PyO3 raises it."""


def broken(*_: object) -> bool:
    raise Panic


def hostile(name: str, base: type[BaseException] = Exception) -> BaseException:
    """Return an exception with an attribute or a method of this *name* that raises."""
    is_method = name in {"__bool__", "__getattribute__", "__str__", "__reduce__", "__eq__"}
    kind = type("HostileError", (base,), {name: broken if is_method else property(broken)})
    arguments = ("two", [ValueError()]) if issubclass(base, BaseExceptionGroup) else ("one",)
    error: BaseException = kind(*arguments)
    return error


class EmptyError(LookupError):
    """An exception that is false."""

    def __len__(self) -> int:
        return 0


HOSTILE = [
    *((name, Exception) for name in ("__class__", "__traceback__", "__bool__", "__str__")),
    *((name, BaseException) for name in ("__getattribute__", "__reduce__", "__eq__")),
    ("exceptions", ExceptionGroup),
]
FAILURES = [
    EmptyError(),
    Panic("index out of bounds"),
    asyncio.CancelledError(),
    BaseExceptionGroup("two", [asyncio.CancelledError(), ValueError()]),
]
ENDINGS = [
    KeyboardInterrupt(),
    GeneratorExit(),
    SystemExit(3),
    pulsar.Interrupted(),
    BaseExceptionGroup("two", [ValueError(), KeyboardInterrupt()]),
    ExceptionGroup("one", [pulsar.Interrupted()]),
]


def name(error: BaseException) -> str:
    return type(error).__name__


def causes(consumer: Any) -> dict[bytes, str]:  # noqa: ANN401 - of any kind
    return {
        letter.data(): letter.properties()["REDRIVE_CAUSE_TYPE"] for letter in consumer.dead_letters
    }


def fails(error: BaseException, handled: list[bytes]) -> Callable[[pulsar.Message], None]:
    """Return a handler of all messages but one."""

    def handle(message: pulsar.Message) -> None:
        if message.data() == b"bad":
            raise error
        handled.append(message.data())

    return handle


@pytest.mark.parametrize("error", FAILURES, ids=name)
def test_handler_failure_of_any_class_uses_up_retries(error: BaseException) -> None:
    consumer, handled = InMemoryConsumer(POLICY), list[bytes]()
    for content in (b"bad", b"good"):
        consumer.send(content)
    consumer.run(fails(error, handled))
    assert handled == [b"good"]
    assert causes(consumer) == {b"bad": type(error).__name__}
    assert consumer.broker.unsettled() == []


@pytest.mark.parametrize("error", FAILURES, ids=name)
async def test_async_handler_failure_of_any_class_uses_up_retries(error: BaseException) -> None:
    consumer, handled = AsyncInMemoryConsumer(POLICY), list[bytes]()
    for content in (b"bad", b"good"):
        consumer.send(content)
    handle = fails(error, handled)

    async def handle_async(message: pulsar.Message) -> None:
        await asyncio.sleep(0)
        handle(message)

    await consumer.run(handle_async)
    assert handled == [b"good"]
    cancelled = issubclass(type(error), asyncio.CancelledError)
    cause = "HandlerCancelledError" if cancelled else type(error).__name__
    assert causes(consumer) == {b"bad": cause}


@pytest.mark.parametrize(("attribute", "base"), HOSTILE)
async def test_exception_that_raises_itself_is_a_failure(
    attribute: str, base: type[BaseException]
) -> None:
    error = hostile(attribute, base)  # not a parameter: pytest asks it for attributes
    by_run, by_batches, by_loop = (
        InMemoryConsumer(POLICY), InMemoryConsumer(POLICY), AsyncInMemoryConsumer(POLICY)
    )  # fmt: skip
    for consumer in (by_run, by_batches, by_loop):
        for content in (b"bad", b"good"):
            consumer.send(content)
    handle = fails(error, [])

    async def handle_async(message: pulsar.Message) -> None:
        handle(message)

    by_run.run(handle)
    by_batches.run_batches(
        lambda messages: [error if message.data() == b"bad" else None for message in messages]
    )
    await by_loop.run(handle_async)
    for consumer in (by_run, by_batches, by_loop):
        assert causes(consumer) == {b"bad": "HostileError"}


@pytest.mark.parametrize("error", ENDINGS, ids=name)
def test_handler_error_of_the_process_ends_run(error: BaseException) -> None:
    consumer = InMemoryConsumer(replace(POLICY, max_retries=0))
    consumer.send(b"bad")
    with pytest.raises(type(error)) as raised:
        consumer.run(fails(error, []))
    assert raised.value is error
    assert [message.data() for message in consumer.broker.unsettled()] == [b"bad"]
    assert consumer.dead_letters == []


async def test_batch_answer_of_any_class_fails_its_message() -> None:
    consumer = AsyncInMemoryConsumer(POLICY)
    for content in (b"bad", b"good"):
        consumer.send(content)

    async def cancel(message: pulsar.Message) -> None:
        await asyncio.sleep(0)
        if message.data() == b"bad":
            raise asyncio.CancelledError

    async def handle(messages: Sequence[pulsar.Message]) -> list[BaseException | None]:
        return await asyncio.gather(*map(cancel, messages), return_exceptions=True)

    await consumer.run_batches(handle)
    assert causes(consumer) == {b"bad": "CancelledError"}


def test_error_that_equals_none_fails_its_batch_message() -> None:
    class EqualError(Exception):
        def __eq__(self, _other: object) -> bool:
            return True

        __hash__ = Exception.__hash__

    consumer = InMemoryConsumer(POLICY)
    for content in (b"good", b"bad"):
        consumer.send(content)
    consumer.run_batches(
        lambda messages: [EqualError() if m.data() == b"bad" else None for m in messages]
    )
    assert causes(consumer) == {b"bad": "EqualError"}


def test_batch_that_is_half_acknowledged_is_half_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = InMemoryConsumer(POLICY)
    contents = [b"%d" % number for number in range(4)]
    for content in contents:
        consumer.send(content)
    acknowledge = consumer.broker.acknowledge

    def close_at_third(message: InMemoryMessage) -> None:
        if message.data() == contents[2]:
            raise pulsar.AlreadyClosed
        acknowledge(message)

    taken: list[pulsar.Message] = []
    monkeypatch.setattr(consumer.broker, "acknowledge", close_at_third)
    with pytest.raises(pulsar.AlreadyClosed):
        consumer.run_batches(taken.extend)
    assert [message.data() for message in consumer.broker.unsettled()] == contents[2:]
    assert consumer.in_flight == 2


class Panics(Middleware):
    """Panics around the handler, or while a message is settled for the first time."""

    def __init__(self, *, settling: bool) -> None:
        self._pending = settling

    def handle(self, handle: Handle) -> Handle:
        def panic(messages: Sequence[pulsar.Message]) -> Sequence[Outcome]:
            handle(messages)
            raise Panic

        return panic

    def settle(self, settle: Settle) -> Settle:
        def panic_once(settlement: Settlement) -> pulsar.MessageId | None:
            if self._pending:
                self._pending = False
                raise Panic
            return settle(settlement)

        return panic_once


class InterruptsOnce(Middleware):
    """Interrupts the second reception."""

    def __init__(self) -> None:
        self._receptions = 0

    def receive(self, receive: Receive) -> Receive:
        def receive_or_interrupt(timeout: float | None) -> pulsar.Message | None:
            self._receptions += 1
            if self._receptions == 2:
                raise KeyboardInterrupt
            return receive(timeout)

        return receive_or_interrupt


def test_interrupted_batch_is_received_by_the_next_call() -> None:
    consumer = InMemoryConsumer(POLICY, middleware=[InterruptsOnce()])
    for content in (b"1", b"2"):
        consumer.send(content)
    with pytest.raises(KeyboardInterrupt):
        consumer.receive_batch(2, 10)
    batch = consumer.receive_batch(2, 10)
    assert sorted(message.data() for message in batch) == [b"1", b"2"]
    assert [consumer.attempt_of(message).number for message in batch] == [1, 1]


def test_middleware_panic_around_a_handler_fails_its_message() -> None:
    consumer = InMemoryConsumer(POLICY, middleware=[Panics(settling=False)])
    consumer.send(b"x")
    consumer.run(lambda _: None)
    assert causes(consumer) == {b"x": "Panic"}


@pytest.mark.parametrize("error", [Panic(), SystemExit(1)], ids=name)
def test_expired_message_is_moved_whatever_settling_raises(error: BaseException) -> None:
    class Raises(Panics):
        def settle(self, settle: Settle) -> Settle:
            def raise_once(settlement: Settlement) -> pulsar.MessageId | None:
                if self._pending:
                    self._pending = False
                    raise error
                return settle(settlement)

            return raise_once

    consumer = InMemorySimpleConsumer(POLICY, middleware=[Raises(settling=True)])
    consumer.send(b"x")
    (message,) = consumer.receive(1, 10)
    consumer.advance(11)
    (again,) = consumer.receive(1, 10, 10)
    assert again is message
    consumer.advance(11)
    (moved,) = consumer.receive(1, 10, 10)
    assert consumer.attempt_of(moved).number == 2


def test_hook_panic_changes_nothing_about_a_message(caplog: pytest.LogCaptureFixture) -> None:
    names: list[Name] = []

    def panic(event: Event) -> None:
        names.append(event.event)
        raise Panic

    def redact(_text: str) -> str:
        raise Panic("secret")

    consumer = InMemoryConsumer(POLICY, on_event=panic, redaction=Redaction(hook=redact))
    consumer.send(b"bad")
    consumer.run(fails(ValueError("secret"), []))
    assert names[-1] is Name.DEAD_LETTERED
    assert "the hook for events failed at redrive.dead_lettered" in caplog.text
    (letter,) = consumer.dead_letters
    shown = letter.properties()["REDRIVE_CAUSE_MESSAGE"]
    assert shown == "[redacted: the hook raised Panic]"


@pytest.mark.parametrize("error", [Panic(), KeyError("region")], ids=name)
def test_rule_that_raises_leaves_the_decision_to_the_policy(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def raise_error(_: object) -> bool:
        raise error

    rules = FailureRules(dead_letter_on=(raise_error,))
    consumer = InMemoryConsumer(POLICY)
    consumer.send(b"bad")
    with caplog.at_level(logging.ERROR, "redrive"):
        consumer.run(fails(ValueError(), []), rules=rules)
    (letter,) = consumer.dead_letters
    assert letter.properties()["REDRIVE_DEAD_REASON"] == "RetriesExhausted"
    assert "a failure rule raised" in caplog.text


@pytest.mark.parametrize("error", [Panic(), KeyError("region")], ids=name)
def test_outage_rule_that_raises_stops_no_consumer(error: BaseException) -> None:
    def raise_error(_: object) -> str:
        raise error

    breaker = OutageBreaker(dependency=raise_error, cause=raise_error)
    consumer, handled = InMemoryConsumer(POLICY, middleware=[breaker]), list[bytes]()
    for content in (b"bad", b"good"):
        consumer.send(content)
    consumer.run(fails(ValueError(), handled))
    assert handled == [b"good"]
    assert causes(consumer) == {b"bad": "ValueError"}


@pytest.mark.parametrize(
    "options",
    [
        {"rules": FailureRules(dead_letter_on=(lambda _: 1 / 0 > 0,))},
        {"middleware": [OutageBreaker(cause=lambda _: str(1 / 0))]},
        {"on_event": lambda _: 1 / 0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_log_that_raises_stops_no_consumer(
    options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    class NeedsEvent(logging.Handler):
        def filter(self, record: logging.LogRecord) -> bool:
            return bool(vars(record)["event"])

    rules = {"rules": options.pop("rules")} if "rules" in options else {}
    consumer, handled = InMemoryConsumer(POLICY, **options), list[bytes]()
    for content in (b"bad", b"good"):
        consumer.send(content)
    handler = NeedsEvent()
    logging.getLogger("redrive").addHandler(handler)
    try:
        consumer.run(fails(ValueError(), handled), **rules)
    finally:
        logging.getLogger("redrive").removeHandler(handler)
    assert handled == [b"good"]
    assert causes(consumer) == {b"bad": "ValueError"}
    assert "KeyError: 'event'" in capsys.readouterr().err


def test_outage_without_a_known_dependency_still_pauses() -> None:
    def raise_error(_: object) -> str:
        raise Panic

    consumer = InMemoryConsumer(POLICY, middleware=[OutageBreaker(dependency=raise_error)])
    for _ in range(100):
        consumer.send(b"bad")
    began, failing = consumer.broker.clock.now(), 0

    def handle(_message: pulsar.Message) -> None:
        nonlocal failing
        if (consumer.broker.clock.now() - began).total_seconds() < 3_600:
            failing += 1
            raise ConnectionError

    consumer.run(handle)
    assert failing < 300
    assert consumer.dead_letters == []


def test_rules_name_failures_that_are_no_exception() -> None:
    rules = FailureRules(dead_letter_on=(asyncio.CancelledError,))
    consumer = InMemoryConsumer(POLICY)
    consumer.send(b"bad")
    consumer.run(fails(asyncio.CancelledError(), []), rules=rules)
    (letter,) = consumer.dead_letters
    assert letter.properties()["REDRIVE_DEAD_REASON"] == "NotRetryable"
    for ending in (KeyboardInterrupt, SystemExit, GeneratorExit):
        with pytest.raises(InvalidSpecError, match="never fail a message"):
            FailureRules(retry_on=(ending,))


def exiting_runs(
    broker: InMemoryBroker, directory: Path, run: Callable[[CrashLog, list[bytes]], None]
) -> tuple[int, list[bytes]]:
    """Call *run* until it no longer ends with SystemExit; return how often it did."""
    handled: list[bytes] = []
    for exits in range(10):
        try:
            run(CrashLog(directory, max_redeliveries=3), handled)
        except SystemExit:
            continue
        return exits, handled
    pytest.fail(f"{broker.unsettled()} end each run")


@pytest.mark.parametrize("batches", [False, True], ids=["run", "run_batches"])
@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_message_that_exits_is_dead_lettered_by_the_crash_log(
    tmp_path: Path, kind: str, *, batches: bool
) -> None:
    broker = InMemoryBroker(POLICY)
    producer = InMemoryConsumer(POLICY, broker=broker)
    for content in (b"bad", b"good", b"better"):
        producer.send(content)

    def run(crash_log: CrashLog, handled: list[bytes]) -> None:
        handle = fails(SystemExit(1), handled)
        with InMemoryConsumer(POLICY, broker=broker, crash_log=crash_log) as consumer:
            if batches:
                consumer.run_batches(lambda messages: [*map(handle, messages)])
            else:
                consumer.run(handle)

    def run_async(crash_log: CrashLog, handled: list[bytes]) -> None:
        handle = fails(SystemExit(1), handled)

        async def handle_one(message: pulsar.Message) -> None:
            await asyncio.sleep(0)
            handle(message)

        async def handle_batch(messages: Sequence[pulsar.Message]) -> None:
            for message in messages:
                await handle_one(message)

        async def main() -> None:
            consumer = AsyncInMemoryConsumer(POLICY, broker=broker, crash_log=crash_log)
            try:
                if batches:
                    await consumer.run_batches(handle_batch)
                else:
                    await consumer.run(handle_one)
            finally:
                await consumer.close()

        asyncio.run(main())

    exits, handled = exiting_runs(broker, tmp_path, run if kind == "threads" else run_async)
    assert exits == 4
    assert sorted(handled) == [b"better", b"good"]
    (letter,) = broker.dead_letters
    assert letter.data() == b"bad"
    assert letter.properties()["REDRIVE_DEAD_REASON"] == "ConsumerCrash"
    assert broker.unsettled() == []


def test_loop_shutdown_uses_up_no_attempt() -> None:
    broker = InMemoryBroker(replace(POLICY, max_retries=0))
    InMemoryConsumer(POLICY, broker=broker).send(b"x")

    async def main() -> None:
        consumer = AsyncInMemoryConsumer(replace(POLICY, max_retries=0), broker=broker)
        handling = asyncio.Event()

        async def hang(_message: pulsar.Message) -> None:
            handling.set()
            await asyncio.sleep(60)

        running = asyncio.create_task(consumer.run(hang))
        await handling.wait()
        assert not running.done()

    asyncio.run(main())
    assert broker.dead_letters == []
    assert [message.data() for message in broker.unsettled()] == [b"x"]


async def test_timeout_around_run_uses_up_no_attempt() -> None:
    consumer = AsyncInMemoryConsumer(replace(POLICY, max_retries=0))
    consumer.send(b"x")

    async def hang(_message: pulsar.Message) -> None:
        await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await consumer.run(hang)
    assert consumer.dead_letters == []
    assert [message.data() for message in consumer.broker.unsettled()] == [b"x"]


def test_close_waits_for_settlements_of_other_threads() -> None:
    broker = BlockingBroker(POLICY, "store")
    consumer = InMemoryConsumer(POLICY, broker=broker)
    consumer.send(b"x")
    message = consumer.receive()
    with ThreadPoolExecutor() as threads:
        settling = threads.submit(consumer.reconsume_later, message)
        assert broker.blocked.wait(30)
        threading.Timer(0.3, broker.release.set).start()
        consumer.close(timeout=30)
        settling.result()
    assert [message.topic for message in broker.unsettled()] == [POLICY.retry_topic]


def test_close_waits_for_a_hung_settlement_until_its_timeout() -> None:
    broker = BlockingBroker(POLICY, "store")
    consumer = InMemoryConsumer(POLICY, broker=broker)
    consumer.send(b"x")
    message = consumer.receive()
    with ThreadPoolExecutor() as threads:
        settling = threads.submit(consumer.reconsume_later, message)
        assert broker.blocked.wait(30)
        consumer.close(timeout=0.2)
        assert not settling.done()
        broker.release.set()
        settling.result()
    assert [message.topic for message in broker.unsettled()] == [POLICY.topic, POLICY.retry_topic]


def test_hook_during_settlement_can_close_the_consumer() -> None:
    consumer = InMemoryConsumer(POLICY, on_event=lambda _: consumer.close(timedelta.max))
    consumer.send(b"x")
    consumer.reconsume_later(consumer.receive())
    assert [message.topic for message in consumer.broker.unsettled()] == [POLICY.retry_topic]


KINDS = [name for name in redrive.__all__ if name.endswith(("Consumer", "Producer"))]


@pytest.mark.parametrize("kind", KINDS)
def test_close_has_fifteen_seconds_by_default(kind: str) -> None:
    timeout = inspect.signature(getattr(redrive, kind).close).parameters["timeout"]
    assert timeout.default == timedelta(seconds=15)


def test_kinds_include_consumers_and_producers() -> None:
    assert {"AsyncBroadcastConsumer", "RetryConsumer", "RetryProducer"} <= set(KINDS)
