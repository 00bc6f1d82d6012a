"""Poison messages: messages that end their process, counted in a crash log.

Poison messages: those that were in hand when a process was killed, or left by `sys.exit`.

At first such a message is a suspect: it is handed out when nothing else is in hand, and nothing
else is handed out meanwhile. So the next kill tells which of those in hand it was, and the others
are cleared once they are settled.

The messages in hand when a process was killed, or ended by `sys.exit`: notes in files. They also
count the processes that were killed in a row, whatever they had in hand: see `inspection`.

Called by `poison_guard`. The broker can't tell: it gives what a dead consumer held to the next one
with the same redelivery count as before.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pulsar

from redrive.delivery.concurrency import exits
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

_LOOK_EVERY_SECONDS = 0.05
_GIVE_UP_SECONDS = 60.0
"""How long a suspect and the others wait for each other while nothing is settled: a program that
wants several messages at a time before it settles one must not wait for ever."""


class ConsumerCrashError(RedriveError):
    """Processes were killed, or left, with a message in hand more often than allowed."""

    reason = "ConsumerCrash"


class PoisonGuard(Middleware):
    """Hands out suspects one by one, and dead-letters poison messages.

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
        self._in_hand: dict[str, bool] = {}  # by key, whether it is a suspect
        # Over the calls of all takers: one that asks again every moment waits as long as another.
        self._waiting_since: float | None = None
        self._taking = threading.Lock()

    def receive(self, receive: Receive) -> Receive:
        """Receive the next message that may be handed out beside what is in hand."""

        def receive_guarded(timeout: float | None) -> pulsar.Message | None:
            end = None if timeout is None else self._clock.monotonic() + timeout
            # One at a time: while a suspect waits for what is in hand, no thread takes any more.
            if not self._taking.acquire(timeout=-1 if timeout is None else timeout):
                return None
            try:
                return self._next(receive, end)
            finally:
                self._taking.release()

        return receive_guarded

    def handle(self, handle: Handle) -> Handle:
        """Count a handler that asks for the end of the process, as `sys.exit` does, as a crash."""

        def handle_noted(messages: Sequence[pulsar.Message]) -> Sequence[Outcome]:
            try:
                return handle(messages)
            except BaseException as error:
                if exits(error):
                    self._crashed(messages)
                raise

        return handle_noted

    def settle(self, settle: Settle) -> Settle:
        """Note that a message is no longer in hand, before it is settled."""

        def settle_noted(settlement: Settlement) -> pulsar.MessageId | None:
            message, verdict, failure = settlement
            if failure is not None and isinstance(failure.error, ConsumerCrashError):
                receipt = settle(settlement)
                self._log_file.end(id_text(message.message_id()))  # not before it is away
                return receipt
            if isinstance(verdict, HandBack):
                self._log_file.let_go(self._taken_back(message))  # it stays a suspect
            else:
                self._log_file.end(self._taken_back(message))
            return settle(settlement)

        return settle_noted

    def _next(self, receive: Receive, end: float | None) -> pulsar.Message | None:
        while True:
            if not self._wait_while(lambda: any(list(self._in_hand.values())), end):
                return None
            left = None if end is None else max(0.0, end - self._clock.monotonic())
            message = receive(left)
            if message is None:
                return None
            key = id_text(message.message_id())
            crashes = self._log_file.crashes(key)
            if crashes > self._max_redeliveries:
                self._dead_letter(message, _too_many(crashes))
                continue
            if crashes and not self._wait_while(lambda: bool(self._in_hand), end):
                self._incoming.again(message, 0)  # the next taker gets it first
                return None
            self._in_hand[key] = bool(crashes)
            self._log_file.begin(key)
            return message

    def _crashed(self, messages: Sequence[pulsar.Message]) -> None:
        for key in (id_text(message.message_id()) for message in messages):
            if key in self._in_hand:  # else it has failed: its handler was out of time
                self._log_file.crash(key)

    def close(self) -> None:
        """Leave to the next process what it has to know."""
        self._log_file.close()

    def _taken_back(self, message: pulsar.Message) -> str:
        key = id_text(message.message_id())
        self._in_hand.pop(key, None)
        self._waiting_since = None
        return key

    def _wait_while(self, busy: Callable[[], bool], end: float | None) -> bool:
        """Wait, and tell whether it was worth it: False if the caller's time is over."""
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
        "processes were killed while they had this message in hand",
        got=f"{crashes} times",
        remedy="look for what kills them, such as memory, before it is replayed",
    )


logger = logging.getLogger(__name__)
_COMPACT_BYTES = 1 << 20
_UNFINISHED = ".unfinished"
_CLOSED = "."


class CrashLogFile:
    """The notes of one process about one policy, and what its dead predecessors have left.

    A kill of the process loses no note; while this takes over the notes of others it may have a
    crash counted twice. A crash of the machine may lose some. If the directory is removed, the next
    note creates it again, with all that is in hand and all crashes that are known. May be used by
    several threads; a forked child notes nothing.

    Attributes:
        deaths: how many processes in a row were killed before this one, up to now.

    Raises:
        InvalidSpecError: the directory can't be written to, or files can't be locked here.
    """

    def __init__(self, directory: str | os.PathLike[str], policy: Policy) -> None:
        directory = Path(directory)
        names = f"{policy.topic}\n{policy.subscription}"
        scope = hashlib.sha256(names.encode()).hexdigest()[:16]
        self._path = directory / f"{scope}-{os.urandom(16).hex()}.notes"
        self._process = os.getpid()  # a forked child has these notes too, but not the messages
        self._writing = threading.Lock()
        self._in_hand: set[str] = set()
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
                f"the crash log can't be written in {directory}",
                got=str(error),
                remedy="mount a volume there that this process may write to; not on Windows",
            ) from error
        call_in_children(self._leave_to_parent)
        atexit.register(self.close)  # a program that ends by itself has not crashed

    def crashes(self, key: str) -> int:
        """Return how often a process was killed with message *key* in hand."""
        return self._crashes.get(key, 0)

    def begin(self, key: str) -> None:
        """Note that message *key* is in hand.

        Raises:
            OSError: the note can't be written; likewise `end` and `let_go`.
        """
        with self._writing:
            self._in_hand.add(key)
            self._write(f"+ {key}\n")

    def end(self, key: str) -> None:
        """Note that message *key* is settled."""
        with self._writing:
            self._in_hand.discard(key)
            self._crashes.pop(key, None)
            self._write(f"- {key}\n")

    def let_go(self, key: str) -> None:
        """Note that message *key* is no longer in hand, though it is not settled."""
        with self._writing:
            self._in_hand.discard(key)
            self._write(f"~ {key}\n")

    def crash(self, key: str) -> None:
        """Count that the process ends because of message *key*, though it is not killed."""
        with self._writing:
            self._in_hand.discard(key)
            self._crashes[key] = count = self._crashes.get(key, 0) + 1
            self._write(f"~ {key}\n= {key} {count}\n")

    def inspected(self, malformed: int) -> None:
        """Note that an inspection is complete, after which deaths count from 0.

        Args:
            malformed: how many entries it has removed. If there were any they ended those
                processes, and no message did: all crashes are forgotten.
        """
        with self._writing:
            self.deaths = 0
            if malformed:
                self._crashes.clear()
            self._compact()

    def close(self) -> None:
        """Leave to the next process what it has to know; once is enough.

        Raises nothing: notes that can't be left are logged.
        """
        atexit.unregister(self.close)
        if os.getpid() != self._process:
            return  # and waits for no thread of its parent that was writing when it was forked
        with self._writing:
            if self._file < 0:
                return
            self._in_hand.clear()
            self._closing = True
            try:
                if self._crashes:
                    self._compact()
                else:
                    self._path.unlink(missing_ok=True)
            except OSError as error:
                logger.error(  # noqa: TRY400 - the line has all that helps
                    "the crash log can't be written at the end of its process, so the crashes with "
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
        """Close the file in a forked child: open there, it would look alive without the parent."""
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
        """Return True if no process can open the file any more."""
        return os.fstat(self._file).st_nlink == 0

    def _compact(self) -> None:
        removed = self._is_removed()
        _create(self._path.parent)
        with _alone(self._path.parent):
            self._rewrite()
        if removed:
            logger.warning(
                "the crash log was removed while its process runs, and is written again in full; "
                "got %s; mount a volume there that outlives the process",
                self._path,
            )

    def _rewrite(self) -> None:
        """Put a short file into the place of the one there is: a kill leaves one of the two."""
        counts = [f"= {key} {count}\n" for key, count in self._crashes.items()]
        held = [f"+ {key}\n" for key in self._in_hand]
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
    """Read what a killed process has noted: how often each message was in hand at such an end."""
    crashes: dict[str, int] = {}
    in_hand: set[str] = set()
    for line in notes.splitlines():
        match line.split():
            case ["=", key, count] if count.isdecimal():
                crashes[key] = int(count)
            case ["+", key]:
                in_hand.add(key)
            case ["~", key]:
                in_hand.discard(key)
            case ["-", key]:
                in_hand.discard(key)
                crashes.pop(key, None)
    for key in in_hand:
        crashes[key] = crashes.get(key, 0) + 1
    return crashes


def deaths_in(notes: str) -> int:
    """Read how many processes in a row were killed, with that of *notes*; 0 if it was not."""
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
    """Keep others out who start now: a file that is not locked yet looks like a dead one's."""
    with (directory / "lock").open("w") as lock:
        _lock(lock.fileno())
        yield


def _lock(file: int, *, wait: bool = True) -> None:
    import fcntl  # noqa: PLC0415 - Windows has none, and consumers without notes run there

    fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
