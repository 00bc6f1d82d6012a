"""Why an attempt failed: type, text, fingerprint and trace, redacted.

Made by `delivery` from the exception of a handler; travels with the message in `properties`. All of
it together stays below 8 KiB: a broker refuses a message that is too big.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType

from redrive.errors import PROCESS_ERRORS, InvalidSpecError
from redrive.policy import properties as names

MAX_TEXT_BYTES = 1_024
"""The most that one property of the cause may take, but for the trace."""
MAX_TRACE_BYTES = 4_096


@dataclass(frozen=True)
class Redaction:
    """Keeps personal data out of causes: their text, trace and fingerprint.

    Attributes:
        patterns: regular expressions; what they match is replaced by `[redacted]`.
        hook: gets each text after that, and returns what may be shown of it. If it raises,
            nothing is shown.

    Raises:
        InvalidSpecError: a pattern is no regular expression for text.
    """

    patterns: Sequence[str | re.Pattern[str]] = ()
    hook: Callable[[str], str] | None = None

    def __post_init__(self) -> None:
        """Refuse what would fail at the first cause, when a message is to be settled."""
        if isinstance(self.patterns, str):
            raise InvalidSpecError(
                "patterns is a list: of a string, each character would be a pattern",
                got=self.patterns,
                remedy="put it into a list",
            )
        for pattern in self.patterns:
            try:
                re.sub(pattern, "", "")
            except (re.error, TypeError) as error:
                raise InvalidSpecError(
                    f"a pattern of a redaction is no regular expression for text: {error}",
                    got=pattern,
                    remedy="fix it; re.escape makes one of any text",
                ) from error

    def __call__(self, text: str) -> str:
        """Return what may be shown of *text*."""
        for pattern in self.patterns:
            text = re.sub(pattern, "[redacted]", text)
        if self.hook is None:
            return text
        try:
            return str(self.hook(text))
        except PROCESS_ERRORS:
            raise
        except BaseException as error:  # noqa: BLE001 - a message must not be stuck for it
            return f"[redacted, for the hook raised {type(error).__name__}]"


@dataclass(frozen=True)
class Cause:
    """Why an attempt failed.

    Attributes:
        type: the name of the exception's class.
        message: its text.
        failed_at: when, with a time zone.
        consumer: the name of the consumer that saw it fail.
        attempt: which attempt failed, from 1.
        fingerprint: the same for failures of one kind, whatever ids and numbers their text holds
            and on whichever lines their code stands.
        trace: where it was raised, the innermost call first.
    """

    type: str
    message: str
    failed_at: datetime
    consumer: str
    attempt: int
    fingerprint: str = ""
    trace: str = ""

    @classmethod
    def from_error(
        cls,
        error: BaseException,
        *,
        failed_at: datetime,
        consumer: str,
        attempt: int,
        redact: Callable[[str], str],
    ) -> Cause:
        """Describe *error*, raised by a handler."""
        chain = [(error, _shown(_text(error), redact)) for error in _chain(error)]
        return cls(
            type=type(error).__name__,
            message=chain[0][1],
            failed_at=failed_at,
            consumer=consumer,
            attempt=attempt,
            fingerprint=_fingerprint(chain),
            trace=redact(_trace(chain)[:MAX_TRACE_BYTES]),
        )

    @classmethod
    def read(cls, properties: Mapping[str, str]) -> Cause | None:
        """Read what `to_properties` wrote; None if a message carries nothing of the kind."""
        try:
            return cls(
                type=properties[names.CAUSE_TYPE],
                message=properties.get(names.CAUSE_MESSAGE, ""),
                failed_at=_known(moment(properties[names.FAILED_AT])),
                consumer=properties[names.CONSUMER],
                attempt=int(properties[names.ATTEMPT]),
                fingerprint=properties.get(names.CAUSE_FINGERPRINT, ""),
                trace=properties.get(names.CAUSE_TRACE, ""),
            )
        except (KeyError, ValueError):
            return None

    def to_properties(self) -> dict[str, str]:
        """Write the cause, each value cut to its bound."""
        return {
            names.CAUSE_TYPE: _cut(self.type, MAX_TEXT_BYTES),
            names.CAUSE_MESSAGE: _cut(self.message, MAX_TEXT_BYTES),
            names.CAUSE_FINGERPRINT: self.fingerprint,
            names.CAUSE_TRACE: _cut(self.trace, MAX_TRACE_BYTES),
            names.FAILED_AT: self.failed_at.isoformat(),
            names.CONSUMER: _cut(self.consumer, MAX_TEXT_BYTES),
            names.ATTEMPT: str(self.attempt),
        }


WRITTEN = frozenset({
    names.CAUSE_TYPE, names.CAUSE_MESSAGE, names.CAUSE_FINGERPRINT, names.CAUSE_TRACE,
    names.FAILED_AT, names.CONSUMER, names.ATTEMPT,
})  # fmt: skip
"""The properties that `Cause.to_properties` writes."""

_EDGE = 3_072
"""So long may a secret be that a pattern has to see as a whole, in a text that is cut."""

_MAX_CHAIN = 5
_MAX_FRAMES = 50
# What makes two texts of one failure differ: ids, quoted values, and every word with a digit in it.
# A text may be a whole payload: each word is looked at once, from its beginning, and never again.
_VARIABLE = re.compile(
    r"""'[^']*'|"[^"]*"|(?<![\w.:/@#-])(?:[^\W\d]|[.:/@#-])*+\d[\w.:/@#-]*"""
    r"""|\b[0-9a-f]{8,}\b""",
    re.IGNORECASE,
)


def moment(written: str) -> datetime | None:
    """Read a moment with a time zone, as `isoformat` writes it; None if it is none."""
    try:
        read = datetime.fromisoformat(written)
    except ValueError:
        return None
    return read if read.tzinfo is not None else None


def _known(read: datetime | None) -> datetime:
    if read is None:
        raise ValueError
    return read


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except PROCESS_ERRORS:
        raise
    except BaseException:  # noqa: BLE001 - an exception may be broken too
        return ""


def _shown(text: str, redact: Callable[[str], str]) -> str:
    """Redact the beginning of *text*: a pattern may take the square of the length.

    What stands at the end of a text that is cut may be a part of what a pattern would have matched,
    so it is not shown.
    """
    longest = MAX_TEXT_BYTES + _EDGE
    return redact(text) if len(text) <= longest else redact(text[:longest])[:-_EDGE]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Go from *error* to what it was caused by, and on."""
    following: BaseException | None = error
    for _ in range(_MAX_CHAIN):
        if following is None:
            return
        yield following
        hidden = following.__suppress_context__
        following = following.__cause__ or (None if hidden else following.__context__)


def _calls(traceback: TracebackType | None) -> list[tuple[str, int]]:
    """List function and line of each call outside redrive, innermost first.

    Source text is left out: it may be out of date, and reading it is I/O.
    """
    calls = []
    while traceback is not None:
        module = str(traceback.tb_frame.f_globals.get("__name__", "?"))
        if not _is_own(module):
            function = traceback.tb_frame.f_code.co_qualname
            calls.append((f"{module}.{function}", traceback.tb_lineno))
        traceback = traceback.tb_next
    return calls[: -_MAX_FRAMES - 1 : -1]


def _trace(chain: Sequence[tuple[BaseException, str]]) -> str:
    lines: list[str] = []
    for number, (error, text) in enumerate(chain):
        if number:
            lines.append(f"caused by {type(error).__name__}: {text}")
        lines += [f"at {function}:{line}" for function, line in _calls(error.__traceback__)]
    return "\n".join(lines)


def _is_own(module: str) -> bool:
    """Return True for a module of redrive.

    Fingerprints are stored with dead letters, so they must not depend on the file of redrive that
    defines an error or calls a handler.
    """
    return module == "redrive" or module.startswith("redrive.")


def _fingerprint(chain: Sequence[tuple[BaseException, str]]) -> str:
    import hashlib  # noqa: PLC0415 - loads OpenSSL, and a consumer may never see a failure

    parts = []
    for error, text in chain:
        module = type(error).__module__
        parts += ["redrive" if _is_own(module) else module, type(error).__qualname__]
        parts.append(_VARIABLE.sub("?", text))
        parts += [function for function, _ in _calls(error.__traceback__)]
    hashed = "\0".join(parts).encode("utf-8", "backslashreplace")
    return hashlib.sha256(hashed).hexdigest()[:16]


def _cut(text: str, limit: int) -> str:
    """Make *text* fit a property: at most *limit* bytes of valid UTF-8."""
    encoded = text.encode("utf-8", "backslashreplace")[:limit]
    return encoded.decode("utf-8", "ignore")
