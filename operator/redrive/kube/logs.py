"""Log of the operator: one line for each entry, with the object that it is about.

The operator's command configures it; `Controller`s set the object of their tasks.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Literal

from redrive.api import Body
from redrive.kube.resources import Key

Format = Literal["json", "text"]
FORMATS: tuple[Format, ...] = ("json", "text")
LEVELS = ("debug", "info", "warning", "error")
TRACEBACK_SECONDS = 60.0

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
_object: ContextVar[dict[str, str]] = ContextVar("object", default={})  # noqa: B039  not mutated


def about(kind: str, key: Key) -> None:
    """Set the object of all later log entries of this task."""
    _object.set({"kind": kind, "namespace": key.namespace, "name": key.name})


def identify(body: Body) -> None:
    """Add the uid of the object to later log entries of this task."""
    _object.set({**_object.get(), "uid": body["metadata"]["uid"]})


class JsonFormatter(logging.Formatter):
    """Formats an entry as one JSON object in one line.

    Its fields are `time`, `level`, `logger` and `message`; `kind`, `namespace`, `name` and `uid` of
    its object, if known; and `exception`, if there is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Format *record*."""
        moment = datetime.fromtimestamp(record.created, UTC)
        line = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_object.get(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """Formats an entry as one line, followed by an indented traceback if there is one.

    Characters that are not printable, including line ends, are escaped. So text of users can
    neither imitate another entry nor change the terminal.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%Y-%m-%dT%H:%M:%S%z")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  overrides
        """Format the line."""
        return printable(super().formatMessage(record))

    def formatException(self, ei: _ExcInfo) -> str:  # noqa: N802  overrides
        """Format a traceback."""
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"  {printable(line)}" for line in lines)


class TracebackLimit(logging.Filter):
    """Logs the traceback of an error once within `TRACEBACK_SECONDS`, for each place in the code.

    Later entries have the error in one line: repeated wrong answers of an API server must not fill
    the log.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._shown: dict[object, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Reduce *record* if its traceback was logged recently; keep each record."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return True
        now, place = self._clock(), (record.name, type(error), _place(error))
        self._shown = {p: at for p, at in self._shown.items() if now - at < TRACEBACK_SECONDS}
        if place in self._shown:
            # The representation of an error of the HTTP library has the headers of the request.
            record.args = record.getMessage(), type(error).__name__, error
            record.msg = "%s: %s: %s"
            record.exc_info = record.exc_text = None
        else:
            self._shown[place] = now
        return True


def _place(error: BaseException) -> tuple[str, int] | None:
    """Return the file and line that raised *error*."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback and (traceback.tb_frame.f_code.co_filename, traceback.tb_lineno)


def printable(text: str) -> str:
    """Return *text* without characters that move the cursor of a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def to_stderr(form: Format, level: str = "info") -> None:
    """Log to standard error.

    Libraries never log below INFO, and kopf never below WARNING: at DEBUG the Kubernetes client
    logs answers of the API server, including Secrets.

    Args:
        form: format of each entry.
        level: one of `LEVELS`; less severe entries are omitted.
    """
    least = logging.getLevelNamesMapping()[level.upper()]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    handler.addFilter(TracebackLimit())
    logging.basicConfig(level=max(least, logging.INFO), handlers=[handler])
    logging.getLogger("redrive").setLevel(least)
    logging.getLogger("kopf").setLevel(max(least, logging.WARNING))
