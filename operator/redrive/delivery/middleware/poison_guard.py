"""Poison messages: messages that end their process, counted in a crash log.

Messages that were in-flight when a process was killed, or ended by `sys.exit`, are suspects. A
suspect is handled alone: no other message is in-flight meanwhile. So the next kill identifies the
poison message, and the other suspects are cleared when they are settled.

The crash log is notes in files. They also count the processes that were killed in a row, for
`inspection`. The broker cannot identify such a message: it redelivers all in-flight messages of a
dead consumer with the same redelivery count as before.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pulsar

from redrive.delivery.concurrency import exits, log_of
from redrive.delivery.forking import call_in_children
from redrive.delivery.middleware.chain import (
    HandBack,
    Handle,
    Middleware,
    Outcome,
    Receive,
    Settle,
    Settlement,
)
from redrive.delivery.parts import Parts
from redrive.errors import InvalidSpecError, RedriveError
from redrive.messages import id_text
from redrive.policy.model import Policy
from redrive.policy.verdict import is_a

_LOOK_EVERY_SECONDS = 0.05
_GIVE_UP_SECONDS = 60.0
"""Longest time that a suspect and other messages wait for each other without a settlement: a
program that receives several messages before it settles one must not wait permanently."""


class ConsumerCrashError(RedriveError):
    """A message was in-flight at more ends of processes than allowed."""

    reason = "ConsumerCrash"


class PoisonGuard(Middleware):
    """Delivers suspects one by one, and dead-letters poison messages.

    May be used by several threads.

    Args:
        log_file: closed with the guard.
        max_redeliveries: see `CrashLog`.
        dead_letter: settles a message, for a reason.
    """

    def __init__(
        self,
        parts: Parts,
        log_file: CrashLogFile,
        max_redeliveries: int,
        dead_letter: Callable[[pulsar.Message, ConsumerCrashError], object],
    ) -> None:
        self._incoming = parts.incoming
        self._clock = parts.clock
        self._log_file = log_file
        self._max_redeliveries = max_redeliveries
        self._dead_letter = dead_letter
        self._in_flight: dict[str, bool] = {}  # by key; True for a suspect
        # Shared by all calls, so that frequent short calls wait no longer than a long one.
        self._waiting_since: float | None = None
        self._taking = threading.Lock()

    def receive(self, receive: Receive) -> Receive:
        """Receive the next message that may be in-flight beside the others."""

        def receive_guarded(timeout: float | None) -> pulsar.Message | None:
            end = None if timeout is None else self._clock.monotonic() + timeout
            # One thread at a time: none takes a message while a suspect waits for in-flight ones.
            if not self._taking.acquire(timeout=-1 if timeout is None else timeout):
                return None
            try:
                return self._next(receive, end)
            finally:
                self._taking.release()

        return receive_guarded

    def handle(self, handle: Handle) -> Handle:
        """Count a handler that ends the process, by `sys.exit` for example, as a crash."""

        def handle_noted(messages: Sequence[pulsar.Message]) -> Sequence[Outcome]:
            try:
                return handle(messages)
            except BaseException as error:
                if exits(error):
                    self._crashed(messages)
                raise

        return handle_noted

    def settle(self, settle: Settle) -> Settle:
        """Note that a message is no longer in-flight, before it is settled."""

        def settle_noted(settlement: Settlement) -> pulsar.MessageId | None:
            message, verdict, failure = settlement
            if failure is not None and is_a(failure.error, ConsumerCrashError):
                receipt = settle(settlement)
                self._log_file.end(id_text(message.message_id()))  # only after the hop
                return receipt
            if isinstance(verdict, HandBack):
                self._log_file.let_go(self._taken_back(message))  # it stays a suspect
            else:
                self._log_file.end(self._taken_back(message))
            return settle(settlement)

        return settle_noted

    def _next(self, receive: Receive, end: float | None) -> pulsar.Message | None:
        while True:
            if not self._wait_while(lambda: any(list(self._in_flight.values())), end):
                return None
            remaining = None if end is None else max(0.0, end - self._clock.monotonic())
            message = receive(remaining)
            if message is None:
                return None
            key = id_text(message.message_id())
            crashes = self._log_file.crashes(key)
            if crashes > self._max_redeliveries:
                self._dead_letter(message, _too_many(crashes))
                continue
            if crashes and not self._wait_while(lambda: bool(self._in_flight), end):
                self._incoming.again(message, 0)  # it is delivered first
                return None
            self._in_flight[key] = bool(crashes)
            self._log_file.begin(key)
            return message

    def _crashed(self, messages: Sequence[pulsar.Message]) -> None:
        for key in (id_text(message.message_id()) for message in messages):
            if key in self._in_flight:  # otherwise its time-out has passed
                self._log_file.crash(key)

    def close(self) -> None:
        """Leave the notes to the next process."""
        self._log_file.close()

    def _taken_back(self, message: pulsar.Message) -> str:
        key = id_text(message.message_id())
        self._in_flight.pop(key, None)
        self._waiting_since = None
        return key

    def _wait_while(self, busy: Callable[[], bool], end: float | None) -> bool:
        """Wait while *busy*; return False if the caller's time ends first."""
        while busy():
            now = self._clock.monotonic()
            since = self._waiting_since
            if since is None:
                since = self._waiting_since = now
            if now - since >= _GIVE_UP_SECONDS:
                return True
            if end is not None and now >= end:
                return False
            self._incoming.sleep(_LOOK_EVERY_SECONDS)
        return True


def _too_many(crashes: int) -> ConsumerCrashError:
    return ConsumerCrashError(
        "processes ended while this message was in-flight",
        got=f"{crashes} times",
        remedy="find the cause of the ends, such as memory, before you replay it",
    )


logger = log_of(__name__)
_COMPACT_BYTES = 1 << 20
_UNFINISHED = ".unfinished"
_CLOSED = "."


class CrashLogFile:
    """The notes of one process about one policy, with those of its dead predecessors.

    A kill of the process loses no note; during the takeover of notes it may count a crash twice. A
    crash of the machine may lose notes. If the directory is removed, the next note creates it again
    with all in-flight messages and crashes. May be used by several threads; a forked child writes
    no notes.

    Attributes:
        deaths: number of processes in a row that were killed before this one.

    Raises:
        InvalidSpecError: the directory is not writable, or files cannot be locked in it.
    """

    def __init__(self, directory: str | os.PathLike[str], policy: Policy) -> None:
        directory = Path(directory)
        names = f"{policy.topic}\n{policy.subscription}"
        scope = hashlib.sha256(names.encode()).hexdigest()[:16]
        self._path = directory / f"{scope}-{os.urandom(16).hex()}.notes"
        self._process = os.getpid()  # a forked child has a copy, but no messages
        self._writing = threading.Lock()
        self._in_flight: set[str] = set()
        self._closing = False
        self._file = -1
        self._size = 0
        try:
            _create(directory)
            with _alone(directory):
                dead = list(_dead(directory.glob(f"{scope}-*.notes")))
                notes = [file.read_text() for file in dead]
                self._crashes = _sum(map(crashes_in, notes))
                self.deaths = max(map(deaths_in, notes), default=0)
                self._rewrite()
                for file in [*dead, *directory.glob(f"{scope}-*{_UNFINISHED}")]:
                    file.unlink()
        except (OSError, ImportError) as error:
            raise InvalidSpecError(
                f"the crash log cannot be written in {directory}",
                got=str(error),
                remedy="mount a writable volume there; Windows is not supported",
            ) from error
        call_in_children(self._leave_to_parent)
        atexit.register(self.close)  # a normal end is not a crash

    def crashes(self, key: str) -> int:
        """Return the number of crashes with message *key* in-flight."""
        return self._crashes.get(key, 0)

    def begin(self, key: str) -> None:
        """Note that message *key* is in-flight.

        Raises:
            OSError: the note cannot be written; also in `end` and `let_go`.
        """
        with self._writing:
            self._in_flight.add(key)
            self._write(f"+ {key}\n")

    def end(self, key: str) -> None:
        """Note that message *key* is settled."""
        with self._writing:
            self._in_flight.discard(key)
            self._crashes.pop(key, None)
            self._write(f"- {key}\n")

    def let_go(self, key: str) -> None:
        """Note that message *key* is no longer in-flight, but not settled."""
        with self._writing:
            self._in_flight.discard(key)
            self._write(f"~ {key}\n")

    def crash(self, key: str) -> None:
        """Count an end of the process by message *key* without a kill."""
        with self._writing:
            self._in_flight.discard(key)
            self._crashes[key] = count = self._crashes.get(key, 0) + 1
            self._write(f"~ {key}\n= {key} {count}\n")

    def inspected(self, malformed: int) -> None:
        """Note that an inspection is complete, and count deaths from 0.

        Args:
            malformed: number of removed entries. If there were any, they ended the processes
                instead of messages: all crashes are forgotten.
        """
        with self._writing:
            self.deaths = 0
            if malformed:
                self._crashes.clear()
            self._compact()

    def close(self) -> None:
        """Leave the notes to the next process; further calls have no effect.

        Raises no exception: notes that cannot be written are logged.
        """
        atexit.unregister(self.close)
        if os.getpid() != self._process:
            return  # without the lock, which a thread of the parent may hold
        with self._writing:
            if self._file < 0:
                return
            self._in_flight.clear()
            self._closing = True
            try:
                if self._crashes:
                    self._compact()
                else:
                    self._path.unlink(missing_ok=True)
            except OSError as error:
                logger.error(  # noqa: TRY400 - the line is complete
                    "the crash log cannot be written at the end of its process, so crashes of "
                    "%d messages may be counted from 0 again; got %s; mount a volume at %s that "
                    "outlives the process",
                    len(self._crashes),
                    error,
                    self._path.parent,
                )
            finally:
                os.close(self._file)
                self._file = -1

    def _leave_to_parent(self) -> None:
        """Close the file in a forked child, where it would look alive after the parent ends."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, note: str) -> None:
        if self._file < 0 or os.getpid() != self._process:
            return
        self._size += os.write(self._file, note.encode())
        if self._size > _COMPACT_BYTES or self._is_removed():
            self._compact()

    def _is_removed(self) -> bool:
        """Return True if the file was deleted."""
        return os.fstat(self._file).st_nlink == 0

    def _compact(self) -> None:
        removed = self._is_removed()
        _create(self._path.parent)
        with _alone(self._path.parent):
            self._rewrite()
        if removed:
            logger.warning(
                "the crash log was removed while its process runs, and is written again; "
                "got %s; mount a volume there that outlives the process",
                self._path,
            )

    def _rewrite(self) -> None:
        """Replace the file by a compact one; a kill leaves one of the two."""
        counts = [f"= {key} {count}\n" for key, count in self._crashes.items()]
        held = [f"+ {key}\n" for key in self._in_flight]
        if self._closing:
            held.append(f"{_CLOSED}\n")
        elif self.deaths:
            held.append(f"! {self.deaths}\n")
        unfinished = self._path.with_suffix(_UNFINISHED)
        with contextlib.ExitStack() as undo:
            file = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            undo.callback(os.close, file)
            undo.callback(unfinished.unlink)
            _lock(file)
            size = os.write(file, "".join([*counts, *held]).encode())
            unfinished.rename(self._path)
            undo.pop_all()
        if self._file >= 0:
            os.close(self._file)
        self._file, self._size = file, size


def crashes_in(notes: str) -> Mapping[str, int]:
    """Return the crashes of each message in the notes of a killed process."""
    crashes: dict[str, int] = {}
    in_flight: set[str] = set()
    for line in notes.splitlines():
        match line.split():
            case ["=", key, count] if count.isdecimal():
                crashes[key] = int(count)
            case ["+", key]:
                in_flight.add(key)
            case ["~", key]:
                in_flight.discard(key)
            case ["-", key]:
                in_flight.discard(key)
                crashes.pop(key, None)
    for key in in_flight:
        crashes[key] = crashes.get(key, 0) + 1
    return crashes


def deaths_in(notes: str) -> int:
    """Return the number of processes killed in a row, with that of *notes*; 0 after a close."""
    deaths = 0
    for line in notes.splitlines():
        match line.split():
            case [mark] if mark == _CLOSED:
                return 0
            case ["!", count] if count.isdecimal():
                deaths = int(count)
    return deaths + 1


def _dead(files: Iterable[Path]) -> Iterator[Path]:
    """Yield those of *files* whose processes are dead."""
    for file in files:
        with file.open() as notes, contextlib.suppress(BlockingIOError):  # its process lives
            _lock(notes.fileno(), wait=False)
            yield file


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    crashes: dict[str, int] = {}
    for counted in counts:
        for key, count in counted.items():
            crashes[key] = crashes.get(key, 0) + count
    return crashes


def _create(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Exclude processes that start now: a file that is not locked yet looks dead."""
    with (directory / "lock").open("w") as lock:
        _lock(lock.fileno())
        yield


def _lock(file: int, *, wait: bool = True) -> None:
    import fcntl  # noqa: PLC0415 - absent on Windows, where consumers without a crash log run

    fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
