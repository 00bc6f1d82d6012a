"""Features of in-memory consumers that no broker offers."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any, get_type_hints

import pulsar
import pytest

from redrive import (
    AsyncBroadcastConsumer,
    AsyncRetryConsumer,
    AsyncRetryProducer,
    BroadcastConsumer,
    ConsumerStoppedError,
    Crypto,
    Event,
    NotSentError,
    Policy,
    Redaction,
    RetryConsumer,
    RetryProducer,
    SimpleConsumer,
    TooBigError,
)
from redrive.delivery.assembly import (
    CLIENT_OPTIONS,
    REFUSED_OPTIONS,
    Options,
    RetryOptions,
)
from redrive.delivery.consumers.broadcast import BroadcastOptions
from redrive.errors import InvalidSpecError
from redrive.messages import id_text
from redrive.middleware import OutageBreaker
from redrive.policy.ladder import Ladder
from redrive.policy.naming import TopicName
from redrive.testing.broker import InMemoryBroker, InMemoryMessage
from redrive.testing.connection import InMemoryClient, NothingLeftError
from redrive.testing.consumers import (
    AsyncInMemoryConsumer,
    AsyncInMemorySimpleConsumer,
    InMemoryConsumer,
    InMemorySimpleConsumer,
)
from tests.support.consumers import message_with
from tests.support.fake_client import FakeClient

POLICY = Policy(TopicName("shop", "prod", "orders"), "fulfilment", ladder=Ladder.from_fixed("2h"))


def fail(_message: object) -> None:
    raise LookupError


def test_retries_take_virtual_time_only() -> None:
    consumer = InMemoryConsumer(POLICY)
    consumer.send(b"x")
    began = consumer.broker.clock.now()

    consumer.run(fail)

    (dead,) = consumer.dead_letters
    assert dead.properties()["RECONSUMETIMES"] == "17"
    assert consumer.broker.clock.now() - began == timedelta(hours=32)
    assert dead.properties()["REDRIVE_FIRST_FAILED_AT"] == began.isoformat()
    assert dead.properties()["REDRIVE_FAILED_AT"] == (began + timedelta(hours=32)).isoformat()


def test_log_and_hook_report_every_retry_of_a_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events: list[Event] = []
    consumer = InMemoryConsumer(replace(POLICY, generation=4), on_event=events.append)
    origin = id_text(consumer.send(b"x"))
    with caplog.at_level(logging.INFO, "redrive"):
        consumer.run(fail)

    names = ["redrive.attempt_failed", "redrive.retried"] * 16
    names += ["redrive.attempt_failed", "redrive.dead_lettered"]
    assert [event.event for event in events] == names
    assert [event.attempt for event in events] == [n for n in range(1, 18) for _ in range(2)]
    assert {(event.origin, event.generation) for event in events} == {(origin, 4)}
    hops = events[1::2]
    assert hops[0].message_id == origin
    assert [event.message_id for event in hops[1:]] == [event.new_id for event in hops[:-1]]
    (dead,) = consumer.dead_letters
    assert (hops[-1].new_id, hops[-1].reason) == (id_text(dead.message_id()), "RetriesExhausted")
    assert hops[-1].topic == str(POLICY.dead_letter_topic)
    assert {event.reason for event in events[::2]} == {"LookupError"}
    logged = [
        {field.name: getattr(record, field.name) for field in fields(Event)}
        for record in caplog.records
    ]
    assert logged == [asdict(event) for event in events]


def test_log_names_hops_and_causes(caplog: pytest.LogCaptureFixture) -> None:
    events: list[Event] = []
    consumer = InMemoryConsumer(replace(POLICY, max_retries=1), on_event=events.append)
    origin = id_text(consumer.send(b"x"))

    def handle(_message: pulsar.Message) -> None:
        raise LookupError("out of order")

    with caplog.at_level(logging.INFO, "redrive"):
        consumer.run(handle)
    texts = [record.getMessage() for record in caplog.records]
    assert texts[1::2] == [
        f"moved to {topic}: origin {origin}, previous id {event.message_id}, "
        f"new id {event.new_id}, failed attempts {number}"
        for number, topic, event in zip(
            (1, 2), (POLICY.retry_topic, POLICY.dead_letter_topic), events[1::2], strict=True
        )
    ]
    assert texts[2].startswith("attempt 2 failed of ")
    assert "LookupError: out of order\nat " in texts[2]


@pytest.mark.parametrize(("level", "reason"), [(None, "RetriesExhausted"), (-1, "Requested")])
def test_discarding_policy_acknowledges_exhausted_messages(
    level: int | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = InMemoryConsumer(replace(POLICY, max_retries=0, dead_letters=False))
    origin = id_text(consumer.send(b"lost"))
    consumer.reconsume_later(consumer.receive(), level=level)
    assert caplog.messages == [
        f"discarded ({reason}), as the policy asks: origin {origin}, id {origin}, failed attempts 1"
    ]
    assert consumer.broker.unsettled() == []
    assert consumer.dead_letters == []


def test_attempt_has_the_redacted_cause_of_the_one_before() -> None:
    consumer = InMemoryConsumer(POLICY, redaction=Redaction([r"\S+@\S+"]))
    forged = {"RECONSUMETIMES": "7", "REDRIVE_ATTEMPT": "8"}
    origin = id_text(consumer.send(b"x", properties=forged))
    message = consumer.receive()
    first = consumer.attempt_of(message)
    assert (first.number, first.origin, first.cause) == (1, origin, None)
    consumer.reconsume_later(message, cause=ValueError("no account for ann@example.com"))
    second = consumer.attempt_of(consumer.receive())
    assert (second.number, second.reconsume_times, second.origin) == (2, 1, origin)
    assert second.cause is not None
    assert second.cause.message == "no account for [redacted]"
    assert (second.cause.attempt, second.cause.consumer) == (1, consumer.name)
    assert second.first_failed_at == second.cause.failed_at


def test_discarded_late_and_unsent_messages_have_own_events() -> None:
    events: list[Event] = []
    policy = replace(POLICY, max_retries=0, dead_letters=False)
    consumer = InMemoryConsumer(policy, on_event=events.append)
    consumer.send(b"slow")
    consumer.run(lambda _: consumer.advance(timedelta(seconds=61)))
    consumer = InMemoryConsumer(POLICY, on_event=events.append)
    consumer.broker.refused.add(POLICY.retry_topic)
    consumer.send(b"x")
    consumer.reconsume_later(consumer.receive())
    assert [(event.event, event.reason) for event in events] == [
        ("redrive.attempt_failed", "HandlerTimeoutError"),
        ("redrive.discarded", "RetriesExhausted"),
        ("redrive.late_success", ""),
        ("redrive.unsent", "NotSent"),
    ]


def test_run_ends_without_messages_and_can_be_repeated() -> None:
    consumer = InMemoryConsumer(POLICY)
    seen: list[bytes] = []
    for content in (b"a", b"b"):
        consumer.send(content)
        consumer.run(lambda message: seen.append(message.data()), workers=4)
    assert seen == [b"a", b"b"]


def test_receive_that_would_never_end_is_an_error() -> None:
    consumer = InMemoryConsumer(POLICY)
    with pytest.raises(NothingLeftError, match="no message will ever come; got 'empty topics'"):
        consumer.receive()
    consumer.send(b"x")
    consumer.pause()
    with pytest.raises(NothingLeftError, match="got 'paused'"):
        consumer.receive()


def test_rate_takes_virtual_time() -> None:
    consumer = InMemoryConsumer(POLICY)
    for _ in range(11):
        consumer.send(b"x")
    began: list[float] = []
    consumer.run(lambda _: began.append(consumer.broker.clock.monotonic()), max_rate=0.5)
    assert began == [2.0 * n for n in range(11)]


def test_batch_size_0_is_refused() -> None:
    consumer = InMemoryConsumer(POLICY)
    with pytest.raises(InvalidSpecError, match="size must be a whole number"):
        consumer.run_batches(lambda _: None, size=0)


def test_unsent_message_is_handled_again_if_requested() -> None:
    consumer = InMemoryConsumer(POLICY, handle_again_when_unsent=True)
    consumer.broker.refused.add(POLICY.retry_topic)
    consumer.send(b"x")
    consumer.reconsume_later(consumer.receive())
    refused = consumer.broker.clock.now()
    again = consumer.receive()
    assert again.topic_name() == str(POLICY.topic)
    assert consumer.attempt_of(again).number == 2
    assert consumer.broker.clock.now() - refused == timedelta(seconds=5)

    consumer.broker.refused.clear()
    consumer.reconsume_later(again)
    retried = consumer.receive()
    assert (retried.topic_name(), consumer.attempt_of(retried).number) == (
        str(POLICY.retry_topic),
        3,
    )


def test_negative_acknowledgements_are_counted_as_redeliveries() -> None:
    consumer = InMemoryConsumer(replace(POLICY, max_retries=2), nack_delay=5)
    consumer.send(b"x")
    counts: list[int] = []
    while (message := consumer.receive(60)) is not None and len(counts) < 5:
        counts.append(message.redelivery_count())
        consumer.negative_acknowledge(message)
    assert counts == [0, 1, 2]
    (dead,) = consumer.dead_letters
    assert dead.properties()["REDRIVE_DEAD_REASON"] == "RetriesExhausted"


def test_success_after_unsent_retry_resets_the_attempt() -> None:
    consumer = InMemoryConsumer(POLICY, handle_again_when_unsent=True)
    consumer.broker.refused.add(POLICY.retry_topic)
    consumer.send(b"x")
    message = consumer.receive()
    consumer.reconsume_later(message)
    consumer.acknowledge(consumer.receive())
    assert consumer.attempt_of(message).number == 1
    assert consumer.broker.unsettled() == []


def test_consumers_of_one_broker_share_its_messages() -> None:
    broker = InMemoryBroker(POLICY)
    one, other = (InMemoryConsumer(POLICY, broker=broker, name=name) for name in ("a", "b"))
    one.send(b"1")
    one.send(b"2")
    first, second = one.receive(), other.receive()
    assert (first.data(), second.data()) == (b"1", b"2")
    one.close()
    assert other.receive().data() == b"1"
    other.acknowledge(second)
    assert [message.data() for message in broker.unsettled()] == [b"1"]


def test_in_memory_message_has_all_methods_of_the_client() -> None:
    methods = {name for name in vars(pulsar.Message) if not name.startswith("_")}
    assert methods <= set(vars(InMemoryMessage))
    broker = InMemoryBroker(POLICY, start=datetime(2026, 5, 1, tzinfo=UTC))
    consumer = InMemoryConsumer(POLICY, broker=broker)
    consumer.send(None)
    message = consumer.receive(timedelta())
    assert message is not None
    assert message.publish_timestamp() == 1_777_593_600_000
    assert (message.value(), message.has_null_value()) == (b"", True)


def test_in_memory_consumer_is_a_retry_consumer() -> None:
    assert isinstance(InMemoryConsumer(POLICY), RetryConsumer)


def test_failing_log_filter_does_not_affect_the_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(_record: logging.LogRecord) -> bool:
        raise RuntimeError("broken filter")

    events: list[Event] = []
    consumer = InMemoryConsumer(replace(POLICY, max_retries=0), on_event=events.append)
    consumer.send(b"x")
    logger = logging.getLogger("redrive.delivery.events")
    logger.addFilter(broken)
    try:
        consumer.run(fail)
    finally:
        logger.removeFilter(broken)
    assert len(consumer.dead_letters) == 1
    assert [event.event for event in events] == ["redrive.attempt_failed", "redrive.dead_lettered"]
    assert "RuntimeError: broken filter" in capsys.readouterr().err


def test_unlimited_wait_takes_no_time() -> None:
    consumer = InMemoryConsumer(POLICY, ack_timeout=timedelta.max)
    consumer.send(b"x")
    message = consumer.receive(timedelta.max)
    assert message is not None
    consumer.acknowledge(message)
    assert consumer.receive_batch(2, timedelta.max) == []


def memory() -> Any:  # noqa: ANN401
    """Return a client of a broker in memory."""
    return InMemoryClient(InMemoryConsumer(POLICY).broker)


WRONG_OPTIONS: list[dict[str, Any]] = [
    {"name": 5}, {"name": "\ud800"}, {"schema": "json"}, {"crypto": 5},
    {"crypto": Crypto("key", __file__)},
    {"crash_log": "notes"}, {"max_in_flight_bytes": "1"}, {"prefetch": 2.5}, {"prefetch": True},
    {"handle_again_when_unsent": "no"}, {"tracing": 5}, {"middleware": None},
    {"middleware": OutageBreaker()}, {"middleware": [OutageBreaker]},
    {"middleware": iter([OutageBreaker()])},
]  # fmt: skip


@pytest.mark.parametrize("options", WRONG_OPTIONS, ids=lambda options: next(iter(options)))
def test_option_of_another_type_is_refused_in_memory_too(options: dict[str, Any]) -> None:
    (name,) = options
    makers: list[Callable[..., object]] = [
        functools.partial(InMemoryConsumer, POLICY),
        functools.partial(RetryConsumer, FakeClient().as_pulsar(), POLICY),
    ]
    if name in BroadcastOptions.__annotations__:
        makers.append(functools.partial(BroadcastConsumer, memory(), str(POLICY.topic)))
    for make in makers:
        with pytest.raises(InvalidSpecError, match=f"^{name} must be |private key"):
            make(**options)


@pytest.mark.parametrize("topic", [None, 5, b"orders"])
def test_topic_of_another_type_is_refused(topic: Any) -> None:  # noqa: ANN401
    for make in (BroadcastConsumer, RetryProducer):
        with pytest.raises(InvalidSpecError, match="topic must be of the type str"):
            make(memory(), topic)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: InMemoryConsumer(POLICY, broker=memory()), "broker"),
        (lambda: InMemoryClient(memory()), "broker"),
        (lambda: InMemoryBroker(str(POLICY.topic)), "policy"),  # type: ignore[arg-type]
        (lambda: InMemoryBroker(POLICY, start=datetime(2026, 1, 1)), "start"),  # noqa: DTZ001
    ],
)
def test_double_refuses_arguments_of_another_type(make: Callable[[], object], name: str) -> None:
    with pytest.raises(InvalidSpecError, match=f"^{name} must be"):
        make()


@pytest.mark.parametrize(
    "options",
    [
        {"name": 5}, {"name": "\ud800"}, {"schema": "json"}, {"crypto": 5}, {"compression": "LZ4"},
        {"send_retries": 0.5}, {"in_flight": "2"},
    ],
    ids=str,
)  # fmt: skip
def test_producer_refuses_options_of_another_type(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(InvalidSpecError, match=name):
        RetryProducer(memory(), str(POLICY.topic), **options)


@pytest.mark.parametrize(
    "options",
    [{"rules": (ValueError,)}, {"workers": "3"}, {"max_rate": "3"}, {"explicit": "no"}],
    ids=str,
)
def test_run_refuses_options_of_another_type(options: dict[str, Any]) -> None:
    consumer = InMemoryConsumer(POLICY)
    (name,) = options
    for run in (consumer.run, consumer.run_batches):
        with pytest.raises(InvalidSpecError, match=name):
            run(fail, **options)
    with pytest.raises(InvalidSpecError, match="size"):
        consumer.receive_batch("3", 1)  # type: ignore[arg-type]


def test_wait_for_a_batch_is_checked_before_a_message_is_taken() -> None:
    consumer = InMemoryConsumer(POLICY)
    with pytest.raises(InvalidSpecError, match="a number of seconds"):
        consumer.run_batches(fail, wait="1s")  # type: ignore[arg-type]


def test_rate_other_than_positive_is_refused() -> None:
    for rate in (0, -1, float("nan")):
        with pytest.raises(InvalidSpecError, match="positive number of messages"):
            InMemoryConsumer(POLICY).run(fail, max_rate=rate)


def test_consumer_durations_are_seconds_or_timedeltas() -> None:
    consumer = InMemoryConsumer(POLICY, ack_timeout=60, nack_delay=5)
    consumer.send(b"x")
    message = consumer.receive(0.5)
    assert message is not None
    consumer.reconsume_later(message, delay=30)
    consumer.advance(29)
    assert consumer.receive_batch(10, 0.5) == []
    consumer.advance(1)
    (again,) = consumer.receive_batch(10, 0)
    assert consumer.attempt_of(again).number == 2
    consumer.run(lambda _: None, timeout=0.5)
    simple = InMemorySimpleConsumer(POLICY)
    simple.send(b"x")
    (held,) = simple.receive(1, 10, 0.5)
    simple.change_invisible_duration(held, 20)
    simple.advance(15)
    simple.acknowledge(held)


def test_redelivered_copy_is_reported_as_dropped() -> None:
    events: list[Event] = []
    consumer = InMemoryConsumer(POLICY, on_event=events.append)
    origin = consumer.send(b"x")
    message = consumer.receive()
    consumer.broker.unload()
    assert consumer.receive(1) is None
    consumer.acknowledge(message)
    assert [(event.event, event.origin) for event in events] == [
        ("redrive.copy_dropped", id_text(origin))
    ]


@pytest.mark.parametrize("wrong", ["60s", float("nan"), True, -1])
def test_invalid_consumer_duration_is_refused(
    wrong: Any,  # noqa: ANN401
) -> None:
    for option in ("ack_timeout", "nack_delay"):
        with pytest.raises(InvalidSpecError, match="; got "):
            InMemoryConsumer(POLICY, **{option: wrong})
    with pytest.raises(InvalidSpecError, match="; got "):
        InMemoryConsumer(POLICY).run(lambda _: None, timeout=wrong)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"redaction": str.upper}, "must be a Redaction"),
        ({"on_event": "log"}, "a function of an"),
        ({"on_event": asyncio.sleep}, "no coroutine function"),
    ],
)
def test_consumer_hook_of_another_type_is_refused(option: Any, message: str) -> None:  # noqa: ANN401
    with pytest.raises(InvalidSpecError, match=message):
        InMemoryConsumer(POLICY, **option)


@pytest.mark.parametrize(
    "consumer",
    [InMemoryConsumer, InMemorySimpleConsumer, AsyncInMemoryConsumer, AsyncInMemorySimpleConsumer],
)
def test_path_instead_of_a_policy_is_refused(consumer: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidSpecError, match=r"got 'policy\.json'; pass PolicyFile"):
        consumer("policy.json")


@pytest.mark.parametrize(
    "wrong", [None, "id", b"content", pulsar.MessageId(-1, 0, 0), message_with().message_id()]
)
def test_settling_what_is_no_message_is_refused(wrong: Any) -> None:  # noqa: ANN401
    consumer, simple = InMemoryConsumer(POLICY), InMemorySimpleConsumer(POLICY)
    for settle in (
        consumer.acknowledge, consumer.negative_acknowledge, consumer.reconsume_later,
        consumer.hand_back, consumer.attempt_of, simple.acknowledge, simple.hand_back,
        simple.attempt_of, lambda message: simple.change_invisible_duration(message, 10),
    ):  # fmt: skip
        with pytest.raises(InvalidSpecError, match=r"only a message .*; got .*not its id"):
            settle(wrong)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"cause": "oops"}, "cause must be of the type BaseException; got 'str'"),
        ({"cause": ValueError}, "cause must be of the type BaseException; got 'type'"),
        ({"level": "1"}, "level must be of the type int; got 'str'"),
        ({"level": 1.5}, "level must be of the type int; got 'float'"),
        ({"level": True}, "level must be of the type int; got 'bool'"),
    ],
    ids=str,
)
async def test_settlement_argument_of_another_type_is_refused(
    argument: dict[str, Any], message: str
) -> None:
    consumer, asynchronous = InMemoryConsumer(POLICY), AsyncInMemoryConsumer(POLICY)
    simple, on_request = InMemorySimpleConsumer(POLICY), AsyncInMemorySimpleConsumer(POLICY)
    receivers = (consumer, asynchronous, simple, on_request)
    for receiver in receivers:
        receiver.send(b"x")
    first, second = consumer.receive(), await asynchronous.receive()
    ((third,), (fourth,)) = simple.receive(1, 10), await on_request.receive(1, 10)
    with pytest.raises(InvalidSpecError, match=message):
        consumer.reconsume_later(first, **argument)
    with pytest.raises(InvalidSpecError, match=message):
        await asynchronous.reconsume_later(second, **argument)
    if "cause" in argument:
        with pytest.raises(InvalidSpecError, match=message):
            consumer.negative_acknowledge(first, **argument)
        with pytest.raises(InvalidSpecError, match=message):
            await asynchronous.negative_acknowledge(second, **argument)
        with pytest.raises(InvalidSpecError, match=message):
            simple.fail(third, **argument)
        with pytest.raises(InvalidSpecError, match=message):
            await on_request.fail(fourth, **argument)
    consumer.acknowledge(first)
    await asynchronous.acknowledge(second)
    simple.acknowledge(third)
    await on_request.acknowledge(fourth)
    assert [receiver.broker.unsettled() for receiver in receivers] == [[]] * len(receivers)


def test_run_of_a_closed_consumer_is_refused() -> None:
    consumer = InMemoryConsumer(POLICY)
    consumer.send(b"x")
    consumer.close()
    with pytest.raises(ConsumerStoppedError, match="was closed"):
        consumer.run(fail)
    with pytest.raises(ConsumerStoppedError, match="was closed"):
        consumer.run_batches(fail)


async def test_async_run_of_a_closed_consumer_is_refused() -> None:
    consumer = AsyncInMemoryConsumer(POLICY)
    await consumer.close()
    with pytest.raises(ConsumerStoppedError, match="was closed"):
        await consumer.run(asyncio.sleep)


@pytest.mark.parametrize(
    "consumer",
    [InMemoryConsumer, InMemorySimpleConsumer, AsyncInMemoryConsumer, AsyncInMemorySimpleConsumer],
)
@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("middlewares", "use middleware; the options are .*broker, .*crash_log, .*tracing"),
        ("borker", "use broker; "),
        ("onEvent", "use on_event; "),
        ("max_inflight_bytes", "use max_in_flight_bytes; "),
        ("orders", "the options are .*crash_log"),
        ("consumer_name", "use name; the options are .*crash_log"),
        ("subscription_name", "it is part of the policy"),
        ("topics_pattern", "a policy is for one topic"),
        ("initial_position", "create the subscription at that position"),
        ("priority_level", "the Python client has no priority"),
        ("key_shared_policy", "the broker divides the keys"),
        ("replicate_subscription_state_enabled", "another cluster has no copy"),
        ("max_retries", "it is part of the policy"),
        ("ladder", "it is part of the policy"),
        ("subscription", "it is part of the policy"),
        ("retries", "the options are .*crash_log"),
        ("workers", "it is an option of run of a RetryConsumer or BroadcastConsumer; "),
        ("explicit", "it is an option of run"),
        ("max_rate", "it is an option of run"),
        ("rules", "it is an option of run"),
        ("timeout", "it is an option of run .*, and of receive of a SimpleConsumer"),
    ],
)
def test_unknown_option_is_refused_with_the_nearest(
    consumer: Any,  # noqa: ANN401
    option: str,
    remedy: str,
) -> None:
    with pytest.raises(InvalidSpecError, match=f"no such option .*got '{option}'; {remedy}"):
        consumer(POLICY, **{option: ()})


@pytest.mark.parametrize(
    "option", ["ack_timeout", "unacked_messages_timeout_ms", "nack_delay", "receiver_queue_size"]
)
def test_option_that_a_simple_consumer_lacks_has_a_reason(option: str) -> None:
    wrong: dict[str, Any] = {option: 5}
    with pytest.raises(InvalidSpecError, match=f"got '{option}'; (a|at .*) .*SimpleConsumer"):
        InMemorySimpleConsumer(POLICY, **wrong)


@pytest.mark.parametrize("kind", [RetryOptions, Options])
def test_each_option_of_the_client_has_a_name_or_a_reason(kind: type) -> None:
    """A later client may have more of them."""
    names = get_type_hints(kind).keys()
    renamed = {option for option, name in CLIENT_OPTIONS.items() if name in names}
    options = inspect.signature(pulsar.Client.subscribe).parameters.keys() - {"self"}
    assert options - names - renamed - REFUSED_OPTIONS.keys() == set()
    assert "crypto_failure_action" in options


@pytest.mark.parametrize(
    ("option", "remedy"),
    [("sendretries", "use send_retries"), ("producer_name", "use name"), ("keys", "the options")],
)
def test_unknown_producer_option_is_refused_with_the_nearest(option: str, remedy: str) -> None:
    makers: list[Callable[..., object]] = [RetryProducer, AsyncRetryProducer]
    for make in makers:
        with pytest.raises(InvalidSpecError, match=f"a producer; got '{option}'; {remedy}.*schema"):
            make(memory(), str(POLICY.topic), **{option: ()})


@pytest.mark.parametrize("make", [BroadcastConsumer, AsyncBroadcastConsumer])
@pytest.mark.parametrize(
    ("option", "remedy"),
    [("prefetchs", "use prefetch"), ("workers", "it is an option of run"), ("ladder", "the opti")],
)
def test_unknown_option_of_a_broadcast_is_refused(make: Any, option: str, remedy: str) -> None:  # noqa: ANN401
    with pytest.raises(InvalidSpecError, match=f"no such option .*got '{option}'; {remedy}"):
        make(memory(), str(POLICY.topic), **{option: ()})


@pytest.mark.parametrize("consumer", [RetryConsumer, SimpleConsumer])
def test_object_other_than_a_client_is_refused(consumer: Any) -> None:  # noqa: ANN401
    for client in (None, "pulsar://localhost:6650", pulsar.Client):
        with pytest.raises(InvalidSpecError, match=r"client must be a pulsar\.Client"):
            consumer(client, POLICY)


@pytest.mark.parametrize("prefetch", [0, -1])
@pytest.mark.parametrize(
    ("consumer", "subject"), [(RetryConsumer, POLICY), (BroadcastConsumer, str(POLICY.topic))]
)
def test_prefetch_below_1_is_refused(consumer: Any, subject: object, prefetch: int) -> None:  # noqa: ANN401
    with pytest.raises(InvalidSpecError, match="prefetch must be a whole number, at least 1"):
        consumer(FakeClient().as_pulsar(), subject, prefetch=prefetch)


@pytest.mark.parametrize(
    ("consumer", "subject"), [(RetryConsumer, POLICY), (BroadcastConsumer, str(POLICY.topic))]
)
def test_prefetch_beyond_the_client_is_refused(consumer: Any, subject: object) -> None:  # noqa: ANN401
    with pytest.raises(InvalidSpecError, match="prefetch must be at most 1000000; got 1000001"):
        consumer(FakeClient().as_pulsar(), subject, prefetch=1_000_001)


@pytest.mark.parametrize("handler", [None, b"m"])
def test_handler_that_is_no_function_is_refused(handler: Any) -> None:  # noqa: ANN401
    consumer = InMemoryConsumer(POLICY)
    for run in (consumer.run, consumer.run_batches):
        with pytest.raises(InvalidSpecError, match="a handler must be a function; got"):
            run(handler)


def test_client_is_not_asked_when_an_option_is_unknown() -> None:
    client: Any = None
    with pytest.raises(InvalidSpecError, match="use prefetch; "):
        AsyncBroadcastConsumer(client, "orders", prefetchs=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidSpecError, match="use ack_timeout; "):
        AsyncRetryConsumer(client, POLICY, acktimeout=3)  # type: ignore[call-arg]


async def test_timeout_none_sets_no_limit() -> None:
    consumer = InMemoryConsumer(POLICY, ack_timeout=None, disconnect_timeout=None)
    consumer.send(b"x")
    consumer.run(lambda _: consumer.advance(timedelta(days=3_650)), timeout=None)
    consumer.send(b"x")
    consumer.run_batches(lambda _: consumer.advance(timedelta(days=3_650)), timeout=None)
    assert consumer.dead_letters == []
    asynchronous = AsyncInMemoryConsumer(POLICY)
    asynchronous.send(b"x")
    bodies: list[bytes] = []

    async def handle(message: pulsar.Message) -> None:
        await asyncio.sleep(0.01)
        bodies.append(message.data())

    await asynchronous.run(handle, timeout=None)
    assert bodies == [b"x"]
    consumer.close(None)
    await asynchronous.close(None)


def test_handler_that_closes_without_limit_closes_its_consumer() -> None:
    consumer = InMemoryConsumer(POLICY)
    consumer.send(b"x")
    consumer.run(lambda _: consumer.close(timeout=None))
    with pytest.raises(ConsumerStoppedError, match="was closed"):
        consumer.run(fail)


def test_dead_letter_is_a_warning_and_retry_an_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "redrive.delivery.events")
    consumer = InMemoryConsumer(replace(POLICY, max_retries=1))
    consumer.send(b"x")
    consumer.run(fail)
    levels = {vars(record)["event"]: record.levelname for record in caplog.records}
    assert levels["redrive.retried"] == "INFO"
    assert levels["redrive.dead_lettered"] == "WARNING"


@pytest.mark.parametrize(("error", "later"), [(3_600, 3_600), (-60, -60), (-86_400, -7_200)])
def test_clock_error_shifts_the_retry(error: int, later: int) -> None:
    consumer = InMemoryConsumer(POLICY)
    consumer.send(b"x")
    consumer.broker.clock_error = timedelta(seconds=error)
    consumer.reconsume_later(consumer.receive(), cause=ValueError())
    before = consumer.broker.clock.monotonic()
    message = consumer.receive()
    assert consumer.broker.clock.monotonic() - before == 7_200 + later
    cause = consumer.attempt_of(message).cause
    assert cause is not None
    assert cause.failed_at == datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=error)


@pytest.mark.parametrize(
    ("content", "fields", "error"),
    [
        ("text", {}, TypeError),
        (b"", {"properties": {"number": 1}}, TypeError),
        (b"", {"partition_key": b"key"}, ValueError),
        (b"", {"ordering_key": 1}, ValueError),
        (b"", {"event_timestamp": 1.5}, ValueError),
        (b"x" * (5 * 1024 * 1024 + 1), {}, pulsar.MessageTooBig),
    ],
)
def test_message_that_the_client_refuses_is_refused(
    content: Any,  # noqa: ANN401 - a type checker refuses some
    fields: dict[str, Any],
    error: type[Exception],
) -> None:
    consumer = InMemoryConsumer(POLICY)
    with pytest.raises(error):
        consumer.send(content, **fields)
    assert consumer.broker.unsettled() == []


async def test_producers_and_broadcasts_use_a_client_in_memory() -> None:
    consumer = InMemoryConsumer(POLICY)
    client: Any = InMemoryClient(consumer.broker)
    topic = str(POLICY.topic)
    received = []
    with RetryProducer(client, topic) as producer, BroadcastConsumer(client, topic) as readers:
        producer.send(b"1", properties={"kind": "order"}, partition_key="key")
        async with AsyncRetryProducer(client, topic) as asynchronous:
            await asynchronous.send(b"2")
        received = [readers.receive(30), readers.receive(30)]
        with pytest.raises(TooBigError):
            producer.send(b"x" * (5 * 1024 * 1024 + 1))
    assert [message.data() for message in received if message] == [b"1", b"2"]
    first, second = consumer.broker.unsettled()
    assert (first.data(), first.properties(), first.partition_key()) == (
        b"1", {"kind": "order"}, "key",
    )  # fmt: skip
    assert second.data() == b"2"


def test_client_in_memory_refuses_topics_that_are_refused() -> None:
    broker = InMemoryBroker(POLICY)
    client: Any = InMemoryClient(broker)
    with RetryProducer(client, str(POLICY.topic)) as producer:
        broker.refused.add(POLICY.topic)
        with pytest.raises(NotSentError):
            producer.send(b"x")
    with pytest.raises(NotSentError):
        RetryProducer(client, str(POLICY.topic))


def test_message_is_equal_to_itself_only() -> None:
    consumer, handled = InMemoryConsumer(POLICY), set[pulsar.Message]()
    consumer.send(b"x")
    consumer.send(b"x")
    consumer.run(lambda message: handled.add(message))  # noqa: PLW0108 - it has a signature
    assert len(handled) == 2
    assert consumer.dead_letters == []


@pytest.mark.parametrize("level", [0, -1])
def test_settlement_after_close_sends_nothing(level: int) -> None:
    consumer = InMemoryConsumer(POLICY)
    consumer.send(b"x")
    message = consumer.receive()
    consumer.close()
    consumer.reconsume_later(message, level=level)
    consumer.advance(timedelta(days=1))
    assert consumer.dead_letters == []
    (again,) = consumer.broker.unsettled()
    assert again.topic_name() == str(POLICY.topic)
    assert InMemoryConsumer(POLICY, broker=consumer.broker).receive().data() == b"x"


@pytest.mark.parametrize("consumer", [RetryConsumer, SimpleConsumer])
def test_client_in_memory_names_the_consumers_in_memory(consumer: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidSpecError, match="use InMemoryConsumer or"):
        consumer(memory(), POLICY)


@pytest.mark.parametrize("name", ["orders", "public/default/orders"])
def test_client_in_memory_accepts_short_topic_names(name: str) -> None:
    policy = Policy(TopicName("public", "default", "orders"), "fulfilment")
    consumer = InMemoryConsumer(policy)
    client: Any = InMemoryClient(consumer.broker)
    with BroadcastConsumer(client, name) as reader, RetryProducer(client, name) as producer:
        producer.send(b"x", partition_key="key")
        message = reader.receive(30)
    assert message is not None
    assert message.topic_name() == str(policy.topic)
    assert consumer.receive().data() == b"x"
