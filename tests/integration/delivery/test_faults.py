"""Whatever breaks on the way of a message, it comes again; it is never lost."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pulsar
import pytest

from redrive import RetryConsumer
from redrive.delivery.connection import SubscribeError
from redrive.delivery.fetcher import SubscriptionLostError
from redrive.messages import id_text
from sandbox.pulsar import SUPERUSER
from tests.support.consumers import StartProgram, interrupted, start_program
from tests.support.provisioned_policy import ProvisionedPolicy
from tests.support.topics import path
from tests.support.waiting import awake_time, wait_until

__all__ = ["start_program"]


ProvisionPolicy = Callable[..., Any]


SOON = timedelta(seconds=180)


@pytest.mark.parametrize(
    ("boundary", "copies"), [("Producer.send", 0), ("Consumer.acknowledge", 1)]
)
@pytest.mark.parametrize("level", [0, -1])
def test_kill_during_a_hop_duplicates_at_most(
    provision_policy: ProvisionPolicy,
    start_program: StartProgram,
    boundary: str,
    copies: int,
    level: int,
) -> None:
    provisioned = provision_policy()
    provisioned.send(b"precious")
    process = start_program(
        provisioned,
        f"""
pulsar.{boundary} = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
consumer = RetryConsumer(client, load_policy())
consumer.reconsume_later(consumer.receive(), level={level})
""",
    )
    output, _ = process.communicate(timeout=180)
    assert process.returncode == -signal.SIGKILL, output

    consumer = provisioned.consumer()
    for _ in range(1 + copies if level == 0 else 1):
        again = consumer.receive(SOON)
        assert again.data() == b"precious"
        consumer.reconsume_later(again, level=-1)
    dead = provisioned.dead_letters(1 + copies)
    assert len({message.properties()["ORIGIN_MESSAGE_ID"] for message in dead}) == 1


def settle_retried(
    provisioned: ProvisionedPolicy, consumer: RetryConsumer, *, attempts: int
) -> None:
    """Acknowledge the one message, which came from the retry topic, and see that none is left."""
    again = consumer.receive(SOON)
    assert again
    assert (again.data(), again.topic_name()) == (b"x", str(provisioned.policy.retry_topic))
    assert again.properties()["RECONSUMETIMES"] == str(attempts)
    consumer.acknowledge(again)
    consumer.close()
    provisioned.wait_until_settled()


def test_refused_hop_is_handled_again_if_configured(
    provision_policy: ProvisionPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    provisioned = provision_policy(retry_rights=["consume"])
    provisioned.send(b"x")
    consumer = provisioned.consumer(handle_again_when_unsent=True)
    for _ in range(2):
        message = consumer.receive(SOON)
        refused = time.monotonic()
        consumer.reconsume_later(message)
        assert provisioned.backlog(provisioned.policy.topic) == 1
    assert "check that the RetryPolicy is Ready" in caplog.text
    assert "AuthorizationError" in caplog.text
    assert provisioned.broker.token(provisioned.role) not in caplog.text

    provisioned.grant(provisioned.policy.retry_topic, "consume", "produce")
    message = consumer.receive(SOON)
    assert time.monotonic() - refused >= 5
    consumer.reconsume_later(message)

    settle_retried(provisioned, consumer, attempts=3)  # it was handled, and failed, three times


def test_delay_refused_by_the_broker_blocks_no_other_message(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    retry = provisioned.policy.retry_topic
    url = f"{path(retry)}/delayedDelivery"
    bound = {"active": True, "tickTime": 1_000, "maxDeliveryDelayInMillis": 5_000}
    provisioned.broker.request("POST", url, bound).check("bound the delay")
    wait_until(lambda: provisioned.broker.request("GET", url).body)
    provisioned.send(b"1")
    consumer = provisioned.consumer()
    message = consumer.receive(SOON)
    with awake_time() as passed:
        consumer.reconsume_later(message, delay=timedelta(minutes=1))
        assert passed() < 25  # the client's own time-out is 30 s
    provisioned.send(b"2")

    # The broker has cut the connection, and redelivers the in-flight message: it is dropped.
    message = None
    while message is None or message.topic_name() != str(retry):
        message = consumer.receive(SOON)
        assert message.data() == b"2"
        if message.topic_name() != str(retry):
            consumer.reconsume_later(message, delay=timedelta(seconds=1))
    consumer.acknowledge(message)


# The broker delivers the retry of a clock that is behind at once, and the consumer keeps it.
@pytest.mark.parametrize(("seconds_ahead", "delay", "earliest"), [(-3600, "3s", 3), (3, "1s", 3)])
def test_wrong_clock_shortens_no_delay_and_loses_nothing(
    provision_policy: ProvisionPolicy,
    start_program: StartProgram,
    seconds_ahead: int,
    delay: str,
    earliest: int,
) -> None:
    provisioned = provision_policy(delays=[delay], max_retries=1)
    provisioned.send(b"x")
    process = start_program(
        provisioned,
        f"""
import datetime, logging, time, _pulsar
logging.getLogger("redrive").setLevel(logging.ERROR)
from redrive.delivery.parts import SystemClock
ahead = datetime.timedelta(seconds={seconds_ahead})
now = lambda *_: datetime.datetime.now(datetime.UTC) + ahead
SystemClock.now = now
# The implementation of the client, with another clock.
_pulsar.MessageBuilder.deliver_after = lambda builder, delay: builder.deliver_at(
    int((now() + delay).timestamp() * 1000)
)
with RetryConsumer(client, load_policy()) as consumer:
    message = consumer.receive()
    failed = time.monotonic()
    consumer.reconsume_later(message, cause=ValueError())
    message = consumer.receive()
    print(time.monotonic() - failed)
    print(consumer.attempt_of(message).number)
    consumer.reconsume_later(message, cause=ValueError())
client.close()
""",
    )
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    waited, attempt = output.split()
    assert float(waited) >= earliest
    assert attempt == "2"
    (dead,) = provisioned.dead_letters(1)
    assert dead.properties()["RECONSUMETIMES"] == "2"


def test_receive_from_closed_client_names_the_mistake(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    client = provisioned.client(provisioned.role)
    consumer = type(provisioned.consumer())(client, provisioned.policy)

    client.close()

    for _ in range(2):
        with pytest.raises(SubscriptionLostError, match="keep the client open"):
            consumer.receive(SOON)
    consumer.close()


def test_client_closed_at_any_moment_blocks_no_thread(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    for _ in range(20):  # the result depends on the moment at which a thread enters the client
        client = provisioned.client(provisioned.role)
        consumer = RetryConsumer(client, provisioned.policy)
        client.close()
        with pytest.raises(SubscriptionLostError):
            consumer.receive(SOON)
        consumer.close()


@pytest.mark.usefixtures("pulsar_namespace")  # which it changes
def test_refused_subscription_type_names_the_setting(provision_policy: ProvisionPolicy) -> None:
    provisioned = provision_policy()
    namespace = provisioned.policy.topic.namespace_name
    path = f"/admin/v2/namespaces/{namespace}/subscriptionTypesEnabled"
    provisioned.broker.request("POST", path, ["Exclusive"]).check("allow one type only")

    with pytest.raises(SubscribeError, match="set-subscription-types-enabled"):
        provisioned.consumer()


def test_limit_of_consumers_of_a_topic_is_named(provision_policy: ProvisionPolicy) -> None:
    provisioned = provision_policy()
    retry = provisioned.policy.retry_topic
    provisioned.broker.request("POST", f"{path(retry)}/maxConsumers", 1).check("limit")

    client = provisioned.client(SUPERUSER)
    provisioned.consumer()

    def is_limited() -> bool:
        try:
            client.subscribe(str(retry), "fulfilment", pulsar.ConsumerType.Shared).close()
        except pulsar.ConsumerBusy:
            return True
        return False

    wait_until(is_limited)
    with pytest.raises(SubscribeError, match="raise maxConsumersPerTopic"):
        provisioned.consumer()


def test_refused_subscription_error_has_name_and_remedy(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy(retry_rights=["produce"])

    with pytest.raises(SubscribeError) as refused:
        provisioned.consumer()

    for words in (
        str(provisioned.policy.retry_topic),
        "AuthorizationError",
        "lists this consumer's role",
    ):
        assert words in str(refused.value)


def test_program_that_does_not_close_ends(
    provision_policy: ProvisionPolicy, start_program: StartProgram
) -> None:
    provisioned = provision_policy()
    provisioned.send(b"x")
    process = start_program(
        provisioned,
        """
import logging, time
logging.getLogger("redrive").setLevel(logging.ERROR)
class Leisurely:
    def __del__(self, sleep=time.sleep):
        sleep(0.5)  # long enough for each thread of ours to look up while Python goes away
leisurely = Leisurely()
consumer = RetryConsumer(client, load_policy())
consumer.reconsume_later(consumer.receive(), level=-1)
""",
    )
    output, _ = process.communicate(timeout=180)
    assert (process.returncode, output) == (0, "")


@pytest.mark.parametrize("workers", [1, 3])
def test_sigterm_lets_run_finish_in_flight_messages(
    provision_policy: ProvisionPolicy, start_program: StartProgram, workers: int
) -> None:
    provisioned = provision_policy()
    provisioned.send(*[b"in hand"] * workers, b"next")
    process = start_program(
        provisioned,
        f"""
import time
stopped = []
class StopRecorder(RetryConsumer):
    def stop(self):
        super().stop()
        stopped.append(True)
def handle(message):
    os.write(1, b"handling\\n")  # in one piece, from any thread
    while not stopped:
        time.sleep(0.01)
with StopRecorder(client, load_policy()) as consumer:
    consumer.run(handle, workers={workers})
client.close()
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
print("ended")
""",
    )
    output = interrupted(process, signal.SIGTERM, workers)
    assert (process.returncode, output) == (0, "ended\n")
    assert provisioned.backlog(provisioned.policy.topic) == 1
    assert provisioned.consumer().receive(SOON).data() == b"next"


def test_program_with_a_sigterm_handler_may_stop_its_consumer(
    provision_policy: ProvisionPolicy, start_program: StartProgram
) -> None:
    provisioned = provision_policy()
    provisioned.send(b"in hand", b"next")
    process = start_program(
        provisioned,
        """
import time
stopped = []
def stop(*_):
    consumer.stop()
    stopped.append(True)
def handle(message):
    print("handling", flush=True)
    while not stopped:
        time.sleep(0.01)
with RetryConsumer(client, load_policy()) as consumer:
    signal.signal(signal.SIGTERM, stop)
    consumer.run(handle)
client.close()
print("ended")
""",
    )
    output = interrupted(process, signal.SIGTERM)
    assert (process.returncode, output) == (0, "ended\n")
    assert provisioned.backlog(provisioned.policy.topic) == 1
    assert provisioned.consumer().receive(SOON).data() == b"next"


@pytest.mark.parametrize("where", ["time.sleep(30)", "quiet.receive()"])
def test_a_keyboard_interrupt_ends_run_and_leaves_the_message(
    provision_policy: ProvisionPolicy, start_program: StartProgram, where: str
) -> None:
    provisioned = provision_policy()
    provisioned.send(b"in hand")
    process = start_program(
        provisioned,
        f"""
import signal, time
# A shell that starts its jobs in the background has them ignore the signal, and so would we.
signal.signal(signal.SIGINT, signal.default_int_handler)
policy = load_policy()
quiet = client.subscribe(
    str(policy.retry_topic), policy.subscription, consumer_type=pulsar.ConsumerType.Shared
)
def handle(message):
    print("handling", flush=True)
    {where}
try:
    with RetryConsumer(client, policy) as consumer:
        consumer.run(handle)
finally:
    client.close()
""",
    )
    output = interrupted(process, signal.SIGINT)
    assert process.returncode in {1, -signal.SIGINT}, output
    assert "Interrupt" in output
    assert provisioned.backlog(provisioned.policy.topic) == 1
    assert provisioned.consumer().receive(SOON).data() == b"in hand"


def test_message_that_kills_its_process_again_is_dead_lettered(
    provision_policy: ProvisionPolicy, start_program: StartProgram, tmp_path: Path
) -> None:
    provisioned = provision_policy(delays=["1h"])
    (_, poison, *_) = provisioned.send(b"1", b"poison", b"2", b"3", b"4")
    notes = tmp_path / "notes"
    program = f"""
import time
from redrive import CrashLog
def handle(message):
    os.write(1, message.data() + b"\\n")  # in one piece, from any thread
    time.sleep(0.3)  # so that others are in flight at the kill
    if message.data() == b"poison":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.7)
with RetryConsumer(
    client, load_policy(), crash_log=CrashLog({str(notes)!r}, max_redeliveries=1)
) as consumer:
    consumer.run(handle, workers=3)
client.close()
"""
    for _ in range(2):
        process = start_program(provisioned, program)
        output, _ = process.communicate(timeout=180)
        assert process.returncode == -signal.SIGKILL, output
        assert "poison" in output
    process = start_program(provisioned, program)

    (dead,) = provisioned.dead_letters(1)

    assert dead.data() == b"poison"
    assert dead.properties()["REDRIVE_DEAD_REASON"] == "ConsumerCrash"
    assert dead.properties()["REDRIVE_CAUSE_TYPE"] == "ConsumerCrashError"
    assert "got '2 times'" in dead.properties()["REDRIVE_CAUSE_MESSAGE"]
    assert dead.properties()["ORIGIN_MESSAGE_ID"] == id_text(poison)
    wait_until(lambda: not provisioned.backlog(provisioned.policy.topic))
    process.terminate()
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    assert "poison" not in output
    assert provisioned.backlog(provisioned.policy.topic) == 0
    assert not list(notes.glob("*.notes"))  # no record remains


MINUTE = timedelta(minutes=1)


@pytest.mark.parametrize(
    ("boundary", "attempts"),
    [
        ("SimpleConsumer.attempt_of", [1]),  # with the message in flight
        ("pulsar.Producer.send", [1]),
        ("pulsar.Consumer.acknowledge", [1, 2]),  # it was sent on, and is there twice
    ],
)
def test_a_process_killed_with_a_message_in_flight_loses_nothing(
    provision_policy: ProvisionPolicy,
    start_program: StartProgram,
    boundary: str,
    attempts: list[int],
) -> None:
    provisioned = provision_policy()
    provisioned.send(b"precious")
    process = start_program(
        provisioned,
        f"""
import time
from datetime import timedelta
from redrive import SimpleConsumer
from redrive.delivery.consumers import simple
simple.MIN_INVISIBLE = timedelta(seconds=1)
{boundary} = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
consumer = SimpleConsumer(client, load_policy())
for message in consumer.receive(1, timedelta(seconds=1)):
    if "attempt_of" in "{boundary}":
        consumer.attempt_of(message)
time.sleep(170)
""",
    )
    output, _ = process.communicate(timeout=180)
    assert process.returncode == -signal.SIGKILL, output

    with provisioned.simple_consumer() as consumer:
        again = [consumer.receive(1, MINUTE, MINUTE)[0] for _ in attempts]
        assert sorted(consumer.attempt_of(message).number for message in again) == attempts
        assert len({consumer.attempt_of(message).origin for message in again}) == 1
        for message in again:
            consumer.acknowledge(message)
        assert consumer.receive(1, MINUTE, timedelta(seconds=0.5)) == []
    provisioned.wait_until_settled()
