"""The messages in hand when a process was killed, or ended by `sys.exit`: notes in files.

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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from redrive.delivery.forking import call_in_children
from redrive.errors import InvalidSpecError
from redrive.policy.model import Policy

logger = logging.getLogger(__name__)
_COMPACT_BYTES = 1 << 20
_UNFINISHED = ".unfinished"


class CrashLogFile:
    """The notes of one process about one policy, and what its dead predecessors have left.

    A kill of the process loses no note; while this takes over the notes of others it may have a
    crash counted twice. A crash of the machine may lose some. If the directory is removed, the next
    note creates it again, with all that is in hand and all crashes that are known. May be used by
    several threads; a forked child notes nothing.

    Raises:
        InvalidSpecError: the directory can't be written to, or files can't be locked here.
    """

    def __init__(self, directory: Path, policy: Policy) -> None:
        names = f"{policy.topic}\n{policy.subscription}"
        scope = hashlib.sha256(names.encode()).hexdigest()[:16]
        self._path = directory / f"{scope}-{os.urandom(16).hex()}.notes"
        self._process = os.getpid()  # a forked child has these notes too, but not the messages
        self._writing = threading.Lock()
        self._in_hand: set[str] = set()
        self._file = -1
        self._size = 0
        try:
            _create(directory)
            with _alone(directory):
                dead = list(_dead(directory.glob(f"{scope}-*.notes")))
                self._crashes = _sum(crashes_in(file.read_text()) for file in dead)
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
