"""The examples of the guides that need a broker work unchanged, with any message."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pulsar
import pytest

import redrive
from redrive import BroadcastConsumer, RetryProducer
from tests.support.consumers import StartProgram, start_program
from tests.support.documented import CONSUME, FORKS, PROBES, PRODUCE, block
from tests.support.provisioned_policy import ProvisionedPolicy

__all__ = ["start_program"]

HOSTILE = (b"", b"{}", b"[]", b"null", b"\xff", b"{", b"[" * 100_000)
GOOD = b'{"price": 7}'


def test_broadcast_example_survives_a_hostile_message(
    provision_policy: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    provisioned: ProvisionedPolicy = provision_policy()
    made: list[BroadcastConsumer] = []
    opened = threading.Event()
    prices: list[int] = []

    def open_(client: pulsar.Client, topic: str) -> BroadcastConsumer:
        assert topic == "persistent://shop/prod/prices"
        made.append(BroadcastConsumer(client, str(provisioned.policy.topic)))
        opened.set()
        return made[-1]

    def forget_price(message: pulsar.Message) -> None:
        prices.append(json.loads(message.data())["price"])
        made[-1].stop()

    monkeypatch.setattr(redrive, "BroadcastConsumer", open_)
    code = compile(block(CONSUME, "Broadcast", "python"), "Broadcast", "exec")
    names = {"client": provisioned.client(provisioned.role), "forget_price": forget_price}
    running = threading.Thread(target=exec, args=(code, names))
    running.start()
    assert opened.wait(180)
    provisioned.send(*HOSTILE, GOOD)
    running.join(180)
    assert not running.is_alive()
    assert prices == [7]


def test_forked_example_consumes_in_each_child_until_sigterm(
    provision_policy: Callable[..., Any], start_program: StartProgram
) -> None:
    provisioned: ProvisionedPolicy = provision_policy()
    provisioned.send(b"1", b"2", b"3")
    names = """
url, token = os.environ["URL"], os.environ["TOKEN"]
def handle(message):
    print(message.data().decode(), flush=True)
"""
    process = start_program(provisioned, names + block(FORKS, "Example", "python"))
    assert process.stdout is not None
    handled = [process.stdout.readline() for _ in range(3)]
    assert sorted(handled) == ["1\n", "2\n", "3\n"]
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    for child in children:
        os.kill(int(child), signal.SIGTERM)
    output, _ = process.communicate(timeout=180)
    assert (process.returncode, output) == (0, "")
    provisioned.wait_until_settled()


def test_the_example_of_producing_sends_its_message(
    provision_policy: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    provisioned: ProvisionedPolicy = provision_policy()

    def open_(client: pulsar.Client, topic: str) -> RetryProducer:
        assert topic == "persistent://shop/prod/orders"
        return RetryProducer(client, str(provisioned.policy.topic))

    monkeypatch.setattr(redrive, "RetryProducer", open_)
    heading = "Send messages again that may be lost"
    code = compile(block(PRODUCE, heading, "python"), heading, "exec")
    exec(code, {"client": provisioned.client("superuser")})  # noqa: S102 - our own guide
    message = provisioned.consumer().receive(180)
    assert message is not None
    assert json.loads(message.data()) == {"items": [1]}
    assert message.partition_key() == "customer-7"


def test_client_of_the_page_reads_its_token_from_a_file(
    provision_policy: Callable[..., Any], tmp_path: Path
) -> None:
    provisioned: ProvisionedPolicy = provision_policy()
    token = tmp_path / "token"
    token.write_text(provisioned.broker.token("superuser") + "\n", "ascii")
    code = block(PROBES, "Renew tokens", "python")
    for shown, real in (
        ("/etc/pulsar/token", str(token)),
        ("pulsar://pulsar:6650", provisioned.broker.service_url),
    ):
        assert shown in code
        code = code.replace(shown, real)
    names: dict[str, Any] = {}
    exec(compile(code, "page", "exec"), names)  # noqa: S102 - our own guide
    names["client"].create_producer(str(provisioned.policy.topic)).send(b"x")
    names["client"].close()
    assert provisioned.unsettled() == 1
