"""Forked children: refused use, permitted use, and the share of the parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from prometheus_client import REGISTRY, generate_latest

from redrive import InheritedError, Policy, PolicyFile, prometheus
from redrive.delivery.middleware.poison_guard import CrashLogFile
from redrive.policy import codec
from redrive.policy.naming import TopicName
from redrive.testing.consumers import InMemoryConsumer

POLICY = Policy(TopicName("shop", "prod", "orders"), "billing")


def check_in_child(check: Callable[[], None]) -> None:
    """Fork, and have the child *check*."""
    process = os.fork()
    if process == 0:
        try:
            check()
        except BaseException:  # noqa: BLE001 - the child must not return into the tests
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0


def test_inherited_consumer_is_refused_and_closes_quietly() -> None:
    consumer = InMemoryConsumer(POLICY)
    consumer.send(b"x")
    message = consumer.receive()
    prometheus.follow(consumer)

    def check() -> None:
        for use in (consumer.receive, lambda: consumer.acknowledge(message)):
            with pytest.raises(InheritedError, match="create the client"):
                use()
        with consumer:
            consumer.stop()
        consumer.close()
        assert b"redrive_consumer" in generate_latest(REGISTRY)

    check_in_child(check)
    consumer.acknowledge(message)
    assert consumer.broker.unsettled() == []


def test_consumer_made_in_a_child_works_there() -> None:
    def check() -> None:
        consumer = InMemoryConsumer(POLICY)
        consumer.send(b"x")
        consumer.run(lambda _: None)
        assert consumer.broker.unsettled() == []

    check_in_child(check)


def test_inherited_policy_file_works_while_parent_reads(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_text(codec.encode(POLICY))
    file = PolicyFile(path)

    def check() -> None:
        signal.alarm(30)  # ends a child that waits permanently
        assert file.current(0.0) == POLICY

    with file._looking:  # noqa: SLF001 - as another thread has it
        check_in_child(check)


DIES = """
import os, pathlib, sys, time
from redrive import Policy
from redrive.delivery.middleware.poison_guard import CrashLogFile
from redrive.policy.naming import TopicName

policy = Policy(TopicName("shop", "prod", "orders"), "billing")
log_file = CrashLogFile(pathlib.Path(sys.argv[1]), policy)
log_file.begin("1:0:-1")
if os.fork() == 0:
    print(os.getpid(), flush=True)  # what was inherited is closed by now
time.sleep(60)
os._exit(0)
"""


def test_crash_is_counted_while_a_forked_child_lives(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DIES, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            process.kill()
            process.wait(30)
            with closing(CrashLogFile(tmp_path, POLICY)) as log_file:
                assert log_file.crashes("1:0:-1") == 1
        finally:
            os.kill(child, signal.SIGKILL)
