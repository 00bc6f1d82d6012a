"""Poison messages: the crash log file, access of inspections, and suspects one at a time."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import certifi
import pulsar
import pytest

from redrive import CrashLog, Crypto, Policy
from redrive.delivery.inspection import access
from redrive.delivery.middleware.chain import DONE, Settlement
from redrive.delivery.middleware.poison_guard import (
    CrashLogFile,
    PoisonGuard,
    crashes_in,
    deaths_in,
)
from redrive.delivery.parts import Incoming, Parts, Subscribing
from redrive.errors import InvalidSpecError
from redrive.messages import id_text
from redrive.policy.naming import TopicName
from redrive.testing.broker import InMemoryBroker
from redrive.testing.connection import InMemoryConnection
from redrive.testing.consumers import InMemoryConsumer
from tests.support.consumers import leave_notes

POLICY = Policy(TopicName("shop", "prod", "orders"), "billing")
SLICE = 0.25
"""The slices in which an asynchronous consumer waits."""


SUBSCRIBING = Subscribing("in-memory", timedelta(), 1_000)


class Guarded:
    """Messages that pass a guard."""

    def __init__(self, guard: PoisonGuard, parts: Parts) -> None:
        self.take = guard.receive(parts.incoming.take)
        self._settle = guard.settle(lambda _: None)

    def end(self, message: object) -> None:
        """Settle *message* as handled."""
        self._settle(Settlement(message, DONE))


class Harness:
    """Messages 0, 1, 2 …, some of them in flight when a process was killed."""

    def __init__(self, notes: Path) -> None:
        self.broker = InMemoryBroker(POLICY)
        self.clock = self.broker.clock
        self.ending = ExitStack()
        self.notes = notes
        self._producer = InMemoryConsumer(POLICY, broker=self.broker)
        self.ids = [id_text(self._producer.send(f"{n}".encode())) for n in range(4)]

    def poison_guard(self, *numbers: int, parts: Parts | None = None) -> Guarded:
        """Return a guard that hands them out, *numbers* being suspects."""
        leave_notes(self.notes, POLICY, *(self.ids[number] for number in numbers))
        parts = parts or InMemoryConnection(self.broker).open(POLICY, SUBSCRIBING)
        guard = PoisonGuard(parts, CrashLogFile(self.notes, POLICY), 3, self.bury)
        self.ending.callback(guard.close)
        return Guarded(guard, parts)

    def bury(self, message: object, error: Exception) -> bool:
        pytest.fail(f"{message} {error}")

    def seconds_until(self, poison_guard: Guarded, content: bytes) -> float:
        """Receive in slices until *content* comes; return the seconds."""
        began = self.clock.monotonic()
        while (message := poison_guard.take(SLICE)) is None:
            assert self.clock.monotonic() - began < 600
        assert message.data() == content
        return self.clock.monotonic() - began


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(tmp_path)
    with harness.ending:
        yield harness


def take(poison_guard: Guarded) -> Any:  # noqa: ANN401 - the client publishes no types
    message = poison_guard.take(SLICE)
    assert message is not None
    return message


def test_suspect_is_handled_alone(harness: Harness) -> None:
    poison_guard = harness.poison_guard(1)
    first = take(poison_guard)
    assert poison_guard.take(SLICE) is None  # the suspect waits for it
    poison_guard.end(first)
    suspect = take(poison_guard)
    assert suspect.data() == b"1"
    assert poison_guard.take(SLICE) is None
    poison_guard.end(suspect)
    assert [take(poison_guard).data() for _ in range(2)] == [b"2", b"3"]


@pytest.mark.parametrize(("crashes", "buried"), [(3, []), (4, [b"0"])])
def test_message_is_dead_lettered_after_too_many_crashes(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, crashes: int, buried: list[bytes]
) -> None:
    for _ in range(crashes):
        leave_notes(harness.notes, POLICY, harness.ids[0])
    dead: list[bytes] = []
    monkeypatch.setattr(harness, "bury", lambda message, _: dead.append(message.data()))
    first = take(harness.poison_guard())
    assert first.data() == (b"1" if buried else b"0")
    assert dead == buried


def test_suspect_blocks_receives_for_at_most_a_minute(
    harness: Harness,
) -> None:
    poison_guard = harness.poison_guard(0)
    take(poison_guard)
    assert 60 <= harness.seconds_until(poison_guard, b"1") < 61
    assert harness.seconds_until(poison_guard, b"2") == 0  # nothing was settled: the wait is over


def test_suspect_waits_for_others_at_most_a_minute(
    harness: Harness,
) -> None:
    poison_guard = harness.poison_guard(1)
    take(poison_guard)
    assert 60 <= harness.seconds_until(poison_guard, b"1") < 61


def test_settlement_restarts_the_wait_of_a_suspect(harness: Harness) -> None:
    poison_guard = harness.poison_guard(2)
    first = take(poison_guard)
    take(poison_guard)
    assert poison_guard.take(50) is None
    poison_guard.end(first)
    assert 60 <= harness.seconds_until(poison_guard, b"2") < 61


class Held:
    """An incoming whose `sleep` lasts until a test ends it."""

    def __init__(self, incoming: Incoming) -> None:
        self._incoming = incoming
        self.sleeps = threading.Event()
        self.goes_on = threading.Event()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as the real one has it
        return getattr(self._incoming, name)

    def sleep(self, seconds: float) -> None:
        self.sleeps.set()
        assert self.goes_on.wait(30)
        self._incoming.sleep(seconds)


def test_waiting_suspect_blocks_other_workers(harness: Harness) -> None:
    parts = InMemoryConnection(harness.broker).open(POLICY, SUBSCRIBING)
    incoming: Any = Held(parts.incoming)
    poison_guard = harness.poison_guard(1, parts=replace(parts, incoming=incoming))
    first = take(poison_guard)
    worker = ThreadPoolExecutor(1)
    taken = worker.submit(poison_guard.take, 30)
    assert incoming.sleeps.wait(30)
    assert poison_guard.take(SLICE) is None  # others wait in the topic
    poison_guard.end(first)
    incoming.goes_on.set()
    suspect = taken.result(30)
    worker.shutdown()
    assert suspect is not None
    assert suspect.data() == b"1"
    assert poison_guard.take(SLICE) is None
    poison_guard.end(suspect)
    assert take(poison_guard).data() == b"2"


DIES = """
import os, pathlib, signal, sys
from redrive import Policy
from redrive.delivery.middleware.poison_guard import CrashLogFile
from redrive.policy.naming import TopicName

policy = Policy(TopicName("shop", "prod", "orders"), "billing")
log_file = CrashLogFile(pathlib.Path(sys.argv[1]), policy)
for key in ("1:0:-1", "1:1:-1", "1:2:-1"):
    log_file.begin(key)
log_file.end("1:1:-1")
os.kill(os.getpid(), signal.SIGKILL)
"""


Open = Callable[..., CrashLogFile]


@pytest.fixture
def open_log(tmp_path: Path) -> Iterator[Open]:
    """Open crash logs in `tmp_path`, which are closed with the test."""
    with ExitStack() as ending:
        yield lambda policy=POLICY: ending.enter_context(closing(CrashLogFile(tmp_path, policy)))


def die(directory: Path, program: str = DIES, *arguments: str) -> None:
    """Run a process that is killed with two messages in flight, or as *program* does it."""
    process = subprocess.run(
        [sys.executable, "-c", program, str(directory), *arguments],
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
        check=False,
    )
    assert process.returncode == -9


def test_messages_in_flight_at_a_kill_count_as_crashed(tmp_path: Path, open_log: Open) -> None:
    for _ in range(2):
        die(tmp_path)
    log_file = open_log()
    keys = ("1:0:-1", "1:1:-1", "1:2:-1")
    assert [log_file.crashes(key) for key in keys] == [2, 0, 2]
    log_file.begin("1:0:-1")
    log_file.end("1:0:-1")
    log_file.begin("1:3:-1")
    log_file.begin("1:2:-1")
    log_file.let_go("1:2:-1")
    assert log_file.crashes("1:2:-1") == 2
    log_file.close()
    log_file.close()

    log_file = open_log()
    assert [log_file.crashes(key) for key in (*keys, "1:3:-1")] == [0, 0, 2, 0]
    log_file.begin("1:2:-1")
    log_file.end("1:2:-1")
    log_file.close()
    assert not list(tmp_path.glob("*.notes"))


def test_message_of_a_living_process_is_not_a_crash(open_log: Open) -> None:
    living = open_log()
    living.begin("1:0:-1")
    assert open_log().crashes("1:0:-1") == 0
    assert open_log(Policy(POLICY.topic, "other")).crashes("1:0:-1") == 0


def test_notes_do_not_grow_with_settled_messages(tmp_path: Path, open_log: Open) -> None:
    log_file = open_log()
    log_file.begin("kept")
    for number in range(60_000):
        log_file.begin(f"{number}:0:-1")
        log_file.end(f"{number}:0:-1")
    (file,) = tmp_path.glob("*.notes")
    assert file.stat().st_size < 1 << 20
    assert crashes_in(file.read_text()) == {"kept": 1}


@pytest.mark.parametrize(
    ("notes", "crashes"),
    [
        ("", {}),
        ("+ a\n- a\n", {}),
        ("= a 2\n+ a\n~ a\n+ b\n~ b\n", {"a": 2}),
        ("= a 2\n= b 1\n+ a\n- b\n", {"a": 3}),
        ("= a x\n+ b\n\x00\x00 + c d\n+", {"b": 1}),
    ],
)
def test_damaged_notes_are_read(notes: str, crashes: dict[str, int]) -> None:
    assert crashes_in(notes) == crashes


def test_processes_killed_in_a_row_are_counted(tmp_path: Path, open_log: Open) -> None:
    for _ in range(3):
        die(tmp_path)
    log_file = open_log()
    assert log_file.deaths == 3
    assert open_log().deaths == 0  # beside a living process
    log_file.close()
    assert open_log().deaths == 0  # its crashes are known, its predecessors' deaths are over


def test_inspection_that_removes_entries_clears_suspects(tmp_path: Path, open_log: Open) -> None:
    die(tmp_path)
    log_file = open_log()
    log_file.inspected(malformed=0)
    assert (log_file.deaths, log_file.crashes("1:0:-1")) == (0, 1)
    log_file.inspected(malformed=1)
    assert (log_file.deaths, log_file.crashes("1:0:-1")) == (0, 0)


@pytest.mark.parametrize(
    ("notes", "deaths"),
    [("", 1), ("+ a\n", 1), ("! 2\n+ a\n", 3), ("! x\n! 4\n", 5), ("! 2\n= a 1\n.\n", 0)],
)
def test_deaths_are_read_from_notes(notes: str, deaths: int) -> None:
    assert deaths_in(notes) == deaths


def test_crash_log_without_file_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """
import sys
sys.modules["fcntl"] = None  # as on Windows
from redrive import CrashLog, RetryConsumer
"""
    subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
        check=True,
    )
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with pytest.raises(InvalidSpecError, match="Windows is not supported"):
        CrashLogFile(tmp_path, POLICY)


def test_unusable_crash_log_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidSpecError, match="mount a writable volume there"):
        CrashLogFile(tmp_path / "file", POLICY)
    with pytest.raises(InvalidSpecError, match="whole number, at least 0; got -1"):
        CrashLog(tmp_path, max_redeliveries=-1)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"directory": None}, "directory"),
        ({"directory": 5}, "directory"),
        ({"token": 5}, "token"),
        ({"certificate": "cert.pem"}, "certificate"),
        ({"certificate": ("cert.pem", None)}, "a file of certificate"),
        ({"max_redeliveries": 1.5}, "max_redeliveries"),
        ({"max_redeliveries": "3"}, "max_redeliveries"),
    ],
    ids=str,
)
def test_crash_log_refuses_options_of_another_type(options: Any, name: str) -> None:  # noqa: ANN401
    with pytest.raises(InvalidSpecError, match=f"^{name} must be "):
        CrashLog(**{"directory": "/var/lib/redrive", **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": 5}, "key must be of the type str"),
        ({"public_key": None}, "public_key must be a path"),
        ({"private_key": 5}, "private_key must be a path"),
        ({"public_key": "/"}, "a key must be a readable file in PEM; got '/'"),
        ({"public_key": ""}, "a key must be a readable file in PEM; got ''"),
    ],
    ids=str,
)
def test_crypto_refuses_options_of_another_type(options: Any, message: str) -> None:  # noqa: ANN401
    with pytest.raises(InvalidSpecError, match=message):
        Crypto(**{"key": "orders", "public_key": __file__, **options})


DIES_WRITING = """
import os, pathlib, signal, sys
from redrive import Policy
from redrive.delivery.middleware import poison_guard
from redrive.policy.naming import TopicName

write, rewrites = os.write, int(sys.argv[2])

def write_or_die(file, notes):
    global rewrites
    if not notes or notes.count(b"\\n") > 1:
        rewrites -= 1
        if not rewrites:
            os.kill(os.getpid(), signal.SIGKILL)
    return write(file, notes)

os.write = write_or_die
poison_guard._COMPACT_BYTES = 20
notes = poison_guard.CrashLogFile(
    pathlib.Path(sys.argv[1]), Policy(TopicName("shop", "prod", "orders"), "billing")
)
for number in range(10):
    notes.begin(f"2:{number}:-1")
"""


@pytest.mark.parametrize("rewrites", [1, 2], ids=["taking over", "compacting"])
def test_kill_during_rewrite_loses_no_note(tmp_path: Path, open_log: Open, rewrites: int) -> None:
    die(tmp_path)
    die(tmp_path, DIES_WRITING, str(rewrites))
    log_file = open_log()
    assert [log_file.crashes(key) for key in ("1:0:-1", "1:2:-1")] == [1, 1]
    assert log_file.crashes("2:0:-1") == (1 if rewrites == 2 else 0)
    assert len(list(tmp_path.iterdir())) == 2  # its own file and the lock


def test_full_disk_loses_no_note(
    tmp_path: Path, open_log: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    die(tmp_path)
    log_file = open_log()
    monkeypatch.setattr("redrive.delivery.middleware.poison_guard._COMPACT_BYTES", 0)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        with pytest.raises(OSError, match="the disk is full"):
            log_file.begin("2:0:-1")
    (file,) = tmp_path.glob("*.notes")
    assert crashes_in(file.read_text()) == {"1:0:-1": 1, "1:2:-1": 1, "2:0:-1": 1}
    log_file.end("1:0:-1")
    assert crashes_in(file.read_text()) == {"1:2:-1": 1, "2:0:-1": 1}


FORKS = """
import os, pathlib, signal, sys
from redrive import Policy
from redrive.delivery.middleware.poison_guard import CrashLogFile
from redrive.policy.naming import TopicName

policy = Policy(TopicName("shop", "prod", "orders"), "billing")
log_file = CrashLogFile(pathlib.Path(sys.argv[1]), policy)
log_file.begin("1:0:-1")
child = os.fork()
if not child:
    log_file.end("1:0:-1")
    sys.exit()  # which closes what its parent has open
os.waitpid(child, 0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_forked_child_keeps_the_notes_of_its_parent(tmp_path: Path, open_log: Open) -> None:
    die(tmp_path, FORKS)
    assert open_log().crashes("1:0:-1") == 1


def test_removed_directory_is_recreated_with_all_notes(
    tmp_path: Path, open_log: Open, caplog: pytest.LogCaptureFixture
) -> None:
    die(tmp_path)
    log_file = open_log()
    log_file.begin("2:0:-1")
    shutil.rmtree(tmp_path)
    for number in range(1, 4):
        log_file.begin(f"2:{number}:-1")
    (file,) = tmp_path.glob("*.notes")
    crashes = {"1:0:-1": 1, "1:2:-1": 1}
    assert crashes_in(file.read_text()) == crashes | {f"2:{number}:-1": 1 for number in range(4)}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    # The next process also sees that no message is in flight.
    shutil.rmtree(tmp_path)
    log_file.close()
    (file,) = tmp_path.glob("*.notes")
    assert crashes_in(file.read_text()) == crashes


ENDS = """
import pathlib, shutil, sys
from redrive import Policy
from redrive.delivery.middleware.poison_guard import CrashLogFile
from redrive.policy.naming import TopicName

directory = pathlib.Path(sys.argv[1])
log_file = CrashLogFile(directory, Policy(TopicName("shop", "prod", "orders"), "billing"))
assert log_file.crashes("1:0:-1") == 1
shutil.rmtree(directory)
if sys.argv[2] == "file":
    directory.write_text("")
"""


@pytest.mark.parametrize(("then", "logged"), [("gone", "removed"), ("file", "cannot be written")])
def test_exit_without_directory_logs_one_line(tmp_path: Path, then: str, logged: str) -> None:
    directory = tmp_path / "notes"
    die(directory)
    done = subprocess.run(
        [sys.executable, "-c", ENDS, str(directory), then],
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
        check=True,
        capture_output=True,
        text=True,
    )
    (line,) = done.stderr.splitlines()
    assert logged in line
    assert str(directory) in line


def test_close_that_fails_is_logged_and_raises_nothing(
    tmp_path: Path, open_log: Open, caplog: pytest.LogCaptureFixture
) -> None:
    die(tmp_path)
    log_file = open_log()
    shutil.rmtree(tmp_path)
    tmp_path.write_text("")
    log_file.close()
    log_file.close()
    (error,) = caplog.records
    assert error.levelno == logging.ERROR
    assert "2 messages" in error.getMessage()
    assert error.exc_info is None
    tmp_path.unlink()
    tmp_path.mkdir()


@pytest.mark.parametrize("token", ["secret", lambda: "secret"])
def test_access_has_the_address_of_the_client(
    token: str | Callable[[], str], tmp_path: Path
) -> None:
    with closing(pulsar.Client("pulsar://one:1,two:2")) as client:
        url, shown = access(client, CrashLog(tmp_path, token=token))
    assert (url, shown.method, shown.token(), shown.tls) == (
        "pulsar://one:1,two:2",
        "token",
        "secret",
        None,
    )


def fails_to_read() -> str:
    return {"TOKEN": ""}["PULSAR_TOKEN"]


@pytest.mark.parametrize(
    ("function", "message"),
    [(fails_to_read, "crash_log= raised KeyError"), (lambda: b"x", "crash_log= returned bytes")],
)
def test_failing_function_of_a_token_is_an_error_of_the_access(
    function: Any,  # noqa: ANN401 - as users pass it
    message: str,
    tmp_path: Path,
) -> None:
    with closing(pulsar.Client("pulsar://one:1")) as client:
        _, shown = access(client, CrashLog(tmp_path, token=function))
    with pytest.raises(OSError, match=message):
        shown.token()


def test_access_without_credentials_shows_none(tmp_path: Path) -> None:
    with closing(pulsar.Client("pulsar://one:1")) as client:
        _, shown = access(client, CrashLog(tmp_path))
    assert (shown.method, shown.token()) == ("", "")


def test_access_trusts_the_authorities_of_the_client(tmp_path: Path) -> None:
    with closing(
        pulsar.Client("pulsar+ssl://one:1", tls_trust_certs_file_path=certifi.where())
    ) as client:
        _, shown = access(client, CrashLog(tmp_path, token=str))
        assert shown.tls is not None
        assert shown.tls.check_hostname
        assert shown.tls.get_ca_certs()
        with pytest.raises(FileNotFoundError):
            access(client, CrashLog(tmp_path, certificate=(tmp_path / "none", tmp_path / "none")))


def test_crash_log_with_token_and_certificate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpecError, match="token= and certificate= may be set; got 'both'"):
        CrashLog(tmp_path, token=str, certificate=("crt", "key"))
