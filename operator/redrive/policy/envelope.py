"""The envelope of a retried or dead-lettered message: its properties and its cause.

Property names in capitals without prefix come from Pulsar's Java client, so Java and Python
consumers can share a subscription. `REDRIVE_…` names are redrive's. docs/reference/properties.md
documents them for users.

`Cause` describes a failed attempt: type, text, fingerprint and trace, redacted. `delivery` creates
it from the exception of a handler. The whole cause stays below 8 KiB, because a broker refuses
messages that are too large.

Any producer can write properties, so they never decide where a message goes: the policy decides.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import TracebackType
from typing import NamedTuple

from redrive.errors import PROCESS_ERRORS, InvalidSpecError, class_name
from redrive.policy.ladder import MAX_DELAY
from redrive.policy.model import Policy
from redrive.policy.values import is_function, text_of
from redrive.policy.verdict import Dead, Retry

# Progress of the message.
RECONSUMETIMES = "RECONSUMETIMES"
"""Retries so far; on a dead letter failed attempts, which is one more."""
DELAY_TIME = "DELAY_TIME"
"""Requested delay in milliseconds."""
DEAD_REASON = "REDRIVE_DEAD_REASON"
"""Reason of the dead letter: a value of `verdict.DeadReason`."""

# Origin of the message.
REAL_TOPIC = "REAL_TOPIC"
REAL_SUBSCRIPTION = "REAL_SUBSCRIPTION"
RETRY_TOPIC = "RETRY_TOPIC"
ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID"
"""Id with which the message was first produced; each hop gives it a new id."""
FIRST_ID = "REDRIVE_FIRST_ID"
"""Id of the message when a Python consumer first failed it. It distinguishes messages with the same
origin: Go's client gives one origin to all messages of a batch, and applications copy the
properties of other messages."""
SCHEMA_VERSION = "REDRIVE_SCHEMA_VERSION"
"""Version of the source topic's schema that the message was produced with, from 0."""

# Of a dead letter whose message could not be copied: see `redrive.messages`.
NOT_COPIED = "REDRIVE_NOT_COPIED"
"""Reasons of `NotCopyableError`, separated by commas."""
SOURCE_MESSAGE_ID = "REDRIVE_SOURCE_MESSAGE_ID"
"""Id of the message in the topic where it was consumed."""
ENCODED = "REDRIVE_ENCODED"
"""Parts that are not text, as JSON with base64."""
PAYLOAD_PREFIX = "REDRIVE_PAYLOAD_PREFIX"
"""Number of bytes of JSON that precede the payload, in place of `ENCODED`."""

# Cause of the last failure; replaced at each hop.
MAX_CAUSE = 256
"""Characters of `CAUSE_TYPE` that a plan shows and a selection compares."""
CAUSE_TYPE = "REDRIVE_CAUSE_TYPE"
"""Class name of the exception."""
CAUSE_MESSAGE = "REDRIVE_CAUSE_MESSAGE"
"""Text of the exception."""
CAUSE_FINGERPRINT = "REDRIVE_CAUSE_FINGERPRINT"
"""Identifier of equal failures: 16 hexadecimal digits."""
CAUSE_TRACE = "REDRIVE_CAUSE_TRACE"
"""Calls that led to the exception, the innermost first, and its causes."""
FAILED_AT = "REDRIVE_FAILED_AT"
"""Time of the failure, in ISO 8601 with a time zone."""
FIRST_FAILED_AT = "REDRIVE_FIRST_FAILED_AT"
"""Time of the first failure; the only one of these that is kept."""
CONSUMER = "REDRIVE_CONSUMER"
"""Name of the consumer that reported the failure."""
ATTEMPT = "REDRIVE_ATTEMPT"
"""Number of the failed attempt, from 1."""

# Replays of the message.
REPLAYS = "REDRIVE_REPLAYS"
"""Number of times that it was replayed."""
REPLAY = "REDRIVE_REPLAY"
"""The Replay that moved it last, as `namespace/name`."""
REPLAY_SOURCE = "REDRIVE_REPLAY_SOURCE"
"""Position from which it was moved, as `uid@partition:ledger:entry:index` with the uid of that
Replay. Together with `REPLAY_PROOF` it proves the move. A hop drops both."""
REPLAY_PROOF = "REDRIVE_REPLAY_PROOF"
"""Authentication code of `REPLAY_SOURCE`, which only jobs of the policy can compute."""


MAX_TEXT_BYTES = 1_024
"""Maximum size of a property of the cause, except the trace."""
MAX_TRACE_BYTES = 4_096


@dataclass(frozen=True)
class Redaction:
    """Removes personal data from causes: their text, trace and fingerprint.

    Attributes:
        patterns: regular expressions; matches are replaced by `[redacted]`.
        hook: receives each text after that, and returns the text to show. If it raises an
            exception or returns no string, nothing is shown.

    Raises:
        InvalidSpecError: a pattern is not a regular expression for text, or the hook is not
            callable.
    """

    patterns: Sequence[str | re.Pattern[str]] = ()
    hook: Callable[[str], str] | None = None

    def __post_init__(self) -> None:
        """Validate at construction: at the first cause a message is already being settled."""
        if isinstance(self.patterns, str) or not isinstance(self.patterns, Iterable):
            raise InvalidSpecError(
                "patterns must be a list; each character of a string would be a pattern",
                got=self.patterns,
                remedy="put it into a list",
            )
        # An iterator would be used up here, and redact nothing later.
        object.__setattr__(self, "patterns", tuple(self.patterns))
        for pattern in self.patterns:
            try:
                re.sub(pattern, "", "")
            except (re.error, TypeError) as error:
                raise InvalidSpecError(
                    f"a pattern of a redaction must be a regular expression for text: {error}",
                    got=pattern,
                    remedy="correct it; re.escape makes a pattern of any text",
                ) from error
        if self.hook is not None and not is_function(self.hook):
            raise InvalidSpecError(
                "hook of a redaction must be a function of a text, and no coroutine function",
                got=self.hook,
                remedy="pass a function that returns the text to show",
            )

    def __call__(self, text: str) -> str:
        """Return the part of *text* that may be shown."""
        for pattern in self.patterns:
            text = re.sub(pattern, "[redacted]", text)
        if self.hook is None:
            return text
        try:
            shown: object = self.hook(text)
        except PROCESS_ERRORS:
            raise
        except BaseException as error:  # noqa: BLE001 - must not block the message
            return f"[redacted: the hook raised {type(error).__name__}]"
        text_shown = text_of(shown)
        if text_shown is None:
            return f"[redacted: the hook returned {type(shown).__name__}]"
        return text_shown


@dataclass(frozen=True)
class Cause:
    """Cause of a failed attempt.

    Attributes:
        type: class name of the exception.
        message: text of the exception.
        failed_at: time of the failure, with a time zone.
        consumer: name of the consumer that reported it.
        attempt: number of the failed attempt, from 1.
        fingerprint: equal for failures of one kind, independent of ids and numbers in their text
            and of line numbers.
        trace: calls that led to the exception, the innermost first.
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
        """Describe *error*, raised by a handler.

        Raises:
            TypeError: it is no exception.
        """
        if not issubclass(type(error), BaseException):
            msg = f"the cause must be an exception: got {error!r}; give what the handler raised"
            raise TypeError(msg)
        try:
            raised = [
                _Raised(*_names(type(e)), _shown(_text(e), redact), _calls(e.__traceback__))
                for e in _chain(error)
            ]
        except PROCESS_ERRORS:
            raise
        except BaseException:  # noqa: BLE001 - the exception itself may be broken
            name = class_name(error)
            raised = [_Raised(name, name, "", ())]
        fingerprint, trace = _described(tuple(raised))
        return cls(
            type=raised[0].name,
            message=raised[0].text,
            failed_at=failed_at,
            consumer=consumer,
            attempt=attempt,
            fingerprint=fingerprint,
            trace=redact(trace),
        )

    @classmethod
    def read(cls, properties: Mapping[str, str]) -> Cause | None:
        """Parse the properties of `to_properties`; None if a message has no cause."""
        if CAUSE_TYPE not in properties:
            return None
        try:
            return cls(
                type=properties[CAUSE_TYPE],
                message=properties.get(CAUSE_MESSAGE, ""),
                failed_at=_required(parse_moment(properties[FAILED_AT])),
                consumer=properties[CONSUMER],
                attempt=int(properties[ATTEMPT]),
                fingerprint=properties.get(CAUSE_FINGERPRINT, ""),
                trace=properties.get(CAUSE_TRACE, ""),
            )
        except (KeyError, ValueError):
            return None

    def to_properties(self) -> dict[str, str]:
        """Return the cause as properties, each cut to its maximum size."""
        return {
            CAUSE_TYPE: _cut(self.type, MAX_TEXT_BYTES),
            CAUSE_MESSAGE: _cut(self.message, MAX_TEXT_BYTES),
            CAUSE_FINGERPRINT: self.fingerprint,
            CAUSE_TRACE: _cut(self.trace, MAX_TRACE_BYTES),
            FAILED_AT: self.failed_at.isoformat(),
            CONSUMER: _cut(self.consumer, MAX_TEXT_BYTES),
            ATTEMPT: str(self.attempt),
        }


CAUSE_PROPERTIES = frozenset({
    CAUSE_TYPE, CAUSE_MESSAGE, CAUSE_FINGERPRINT, CAUSE_TRACE,
    FAILED_AT, CONSUMER, ATTEMPT,
})  # fmt: skip
"""The properties that `Cause.to_properties` writes."""

_EDGE = 3_072
"""Maximum length of a secret that a pattern must match in a text that is cut."""

_MAX_CHAIN = 5
_MAX_FRAMES = 50
# A text may be a whole payload: the pattern reads each word once, without backtracking.
VARIABLE = re.compile(
    r"""'[^']*'|"[^"]*"|(?<![\w.:/@#-])(?:[^\W\d]|[.:/@#-])*+\d[\w.:/@#-]*"""
    r"""|\b[0-9a-f]{8,}\b""",
    re.IGNORECASE,
)
"""Parts that differ between texts of one failure: ids, quoted values, and words with a digit."""


def parse_moment(written: str) -> datetime | None:
    """Parse a time with a time zone, as `isoformat` writes it; None if it is invalid."""
    try:
        moment = datetime.fromisoformat(written)
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else None


def _required(moment: datetime | None) -> datetime:
    if moment is None:
        raise ValueError
    return moment


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except PROCESS_ERRORS:
        raise
    except BaseException:  # noqa: BLE001 - the exception itself may be broken
        return ""


def _shown(text: str, redact: Callable[[str], str]) -> str:
    """Redact the beginning of *text*: the time of a pattern may be quadratic in its length.

    The end of a text that is cut may be part of a match, so it is not shown.
    """
    longest = MAX_TEXT_BYTES + _EDGE
    return redact(text) if len(text) <= longest else redact(text[:longest])[:-_EDGE]


def _chain(error: BaseException) -> Sequence[BaseException]:
    """Return *error* and its causes."""
    chain = [error]
    while len(chain) < _MAX_CHAIN:
        hidden = error.__suppress_context__
        following = error.__cause__ or (None if hidden else error.__context__)
        if following is None:
            break
        chain.append(error := following)
    return chain


_Call = tuple[str, int]
"""Function and line."""


def _calls(traceback: TracebackType | None) -> tuple[_Call, ...]:
    """Return function and line of each call outside redrive, innermost first.

    Source lines are left out: they may be outdated, and reading them is I/O.
    """
    calls = []
    while traceback is not None:
        frame = traceback.tb_frame
        module = str(frame.f_globals.get("__name__", "?"))
        if not _is_own(module):
            calls.append((f"{module}.{frame.f_code.co_qualname}", traceback.tb_lineno))
        traceback = traceback.tb_next
    return tuple(calls[: -_MAX_FRAMES - 1 : -1])


class _Raised(NamedTuple):
    name: str
    identity: str
    text: str
    calls: tuple[_Call, ...]


def _names(kind: type[BaseException]) -> tuple[str, str]:
    """Return the name of a class, and one that tells it from others."""
    module = str(kind.__module__)  # a program may set any object here
    return kind.__name__, f"{'redrive' if _is_own(module) else module}\0{kind.__qualname__}"


@functools.lru_cache(maxsize=64)
def _described(chain: tuple[_Raised, ...]) -> tuple[str, str]:
    """Return fingerprint and trace of *chain*: in an outage most failures are the same."""
    return _fingerprint(chain), _trace(chain)[:MAX_TRACE_BYTES]


def _trace(chain: Sequence[_Raised]) -> str:
    lines: list[str] = []
    for number, (name, _, text, calls) in enumerate(chain):
        if number:
            lines.append(f"caused by {name}: {text}")
        lines += [f"at {function}:{line}" for function, line in calls]
    return "\n".join(lines)


@functools.lru_cache
def _is_own(module: str) -> bool:
    """Return True for a module of redrive.

    Fingerprints are stored with dead letters, so they must not depend on the file of redrive that
    defines an error or calls a handler.
    """
    return module == "redrive" or module.startswith("redrive.")


def _fingerprint(chain: Sequence[_Raised]) -> str:
    import hashlib  # noqa: PLC0415 - loads OpenSSL, and a consumer may never see a failure

    parts = []
    for _, identity, text, calls in chain:
        parts += [identity, VARIABLE.sub("?", text), *(function for function, _ in calls)]
    hashed = "\0".join(parts).encode("utf-8", "backslashreplace")
    return hashlib.sha256(hashed).hexdigest()[:16]


def _cut(text: str, limit: int) -> str:
    """Cut *text* to at most *limit* bytes of valid UTF-8."""
    if len(text) <= limit and text.isascii():
        return text
    encoded = text.encode("utf-8", "backslashreplace")[:limit]
    return encoded.decode("utf-8", "ignore")


@dataclass(frozen=True)
class Attempt:
    """History of a message when a consumer receives it.

    Attributes:
        reconsume_times: its retries so far.
        origin: the id with which it was first produced, as `ledger:entry:partition`. Several
            messages may share one: Go's client omits the index in a batch, and applications copy
            the properties of other messages.
        first_failed_at: time of its first failure, if known.
        cause: cause of the previous failure, if a client of redrive reported it. Of a replayed
            message, the cause of its death.
        schema_version: version of the source topic's schema that it was produced with. None if it
            has no schema, or its client does not set the version.
        first_id: identifies the message across all its attempts: the id it had when a Python
            consumer first failed it. Empty stands for the origin.
        redeliveries: negative acknowledgements since its last retry, as counted by the broker or by
            this consumer.
    """

    reconsume_times: int
    origin: str
    first_failed_at: datetime | None = None
    cause: Cause | None = None
    schema_version: int | None = None
    first_id: str = ""
    redeliveries: int = 0

    @property
    def number(self) -> int:
        """Return the number of this delivery to a handler, from 1.

        Negative acknowledgements before its last retry do not count.
        """
        return self.reconsume_times + self.redeliveries + 1

    @classmethod
    def of(
        cls,
        properties: Mapping[str, str],
        *,
        message_id: str,
        retried: bool,
        schema_version: int | None = None,
        sequenced: bool = False,
    ) -> Attempt:
        """Read the attempt from the properties of a message.

        Args:
            message_id: id of the received message.
            retried: True if it comes from the policy's retry topic. A message of the source
                topic has had no retry, regardless of its properties; a replayed one keeps its
                origin.
            schema_version: version in its topic. The retry topic has its own versions.
            sequenced: True if a replayed dead letter keeps its identity in any topic.
        """
        origin, first_id = properties.get(ORIGIN_MESSAGE_ID, ""), properties.get(FIRST_ID, "")
        # Properties in the source topic may be copied from another message.
        is_trusted = retried or (sequenced and REPLAY in properties)
        if retried or schema_version is None:
            schema_version = _number(properties, SCHEMA_VERSION)
        return cls(
            reconsume_times=reconsume_times(properties) if retried else 0,
            origin=origin if origin and ORIGIN_FORM.fullmatch(origin) else message_id,
            first_failed_at=parse_moment(properties.get(FIRST_FAILED_AT, "")) if retried else None,
            cause=Cause.read(properties),
            schema_version=schema_version,
            first_id=first_id if is_trusted and ORIGIN_FORM.fullmatch(first_id) else message_id,
        )

    def failing_for(self, now: datetime) -> timedelta:
        """Return the time since the first failure; zero without one, or if a clock is wrong."""
        return max(now - (self.first_failed_at or now), timedelta())


def reconsume_times(properties: Mapping[str, str]) -> int:
    """Return the number of retries of a message *of the retry topic*.

    A missing count, and one that is not a number of up to nine digits, is 0: such a message gets
    all retries, never an early end. Other counts are trusted: a producer of the retry topic can end
    a message early. Messages of the source topic have had none, regardless of their properties.
    """
    return _number(properties, RECONSUMETIMES) or 0


def replays(properties: Mapping[str, str]) -> int:
    """Return the number of times that a message was replayed."""
    return _number(properties, REPLAYS) or 0


def for_hop(
    properties: Mapping[str, str],
    attempt: Attempt,
    *,
    policy: Policy,
    verdict: Retry | Dead,
    cause: Cause | None,
) -> dict[str, str]:
    """Return the properties for the next hop of a message, to the retry or dead-letter topic.

    User properties are kept. The cause of an earlier failure is replaced.

    Args:
        properties: properties of the received message.
        attempt: the failed attempt.
        cause: its cause, if the caller knows it.
    """
    kept = {k: v for k, v in properties.items() if k not in _REPLACED}
    kept |= {
        ORIGIN_MESSAGE_ID: attempt.origin,
        FIRST_ID: attempt.first_id or attempt.origin,
        REAL_TOPIC: str(policy.topic),
        REAL_SUBSCRIPTION: policy.subscription,
        RETRY_TOPIC: str(policy.retry_topic),
        RECONSUMETIMES: str(verdict.reconsume_times),
    }
    match verdict:
        case Retry(delay=delay):
            kept[DELAY_TIME] = str(delay // timedelta(milliseconds=1))
        case Dead(reason=reason):
            kept[DEAD_REASON] = reason
    if attempt.first_failed_at is not None:
        kept[FIRST_FAILED_AT] = attempt.first_failed_at.isoformat()
    if attempt.schema_version is not None:
        kept[SCHEMA_VERSION] = str(attempt.schema_version)
    if cause is None:
        return kept
    kept |= cause.to_properties()
    kept.setdefault(FIRST_FAILED_AT, kept[FAILED_AT])
    return kept


def for_replay(properties: Mapping[str, str], *, replay: str, source: str) -> dict[str, str]:
    """Return the properties of a dead letter that is replayed.

    Its retries start again from 0. Its origin and its cause are kept. The number of its replays is
    incremented, so that repeated dead-lettering is recognised.

    Args:
        properties: properties of the dead letter.
        replay: identifies the Replay that moves it.
        source: its position, for `REPLAY_SOURCE`.
    """
    carried = {**properties, RECONSUMETIMES: "0", REPLAY: replay, REPLAY_SOURCE: source}
    carried[REPLAYS] = str(replays(properties) + 1)
    for name in _OVER:
        carried.pop(name, None)
    return carried


_NUMBER = re.compile(r"[0-9]{1,9}")
# Harmless in a log, regardless of its writer: Java, RocketMQ, redrive.
ORIGIN_FORM = re.compile(r"[0-9A-Za-z:,()._-]{1,128}")
"""Form of a valid `ORIGIN_MESSAGE_ID`, of clients in all languages."""


def delay_of(properties: Mapping[str, str]) -> timedelta | None:
    """Return the requested delay of a retry; None if it is missing or invalid."""
    milliseconds = _number(properties, DELAY_TIME)
    if milliseconds is None or (delay := timedelta(milliseconds=milliseconds)) > MAX_DELAY:
        return None
    return delay


_OVER = {DELAY_TIME, DEAD_REASON, FIRST_FAILED_AT}
_REPLACED = _OVER | {SCHEMA_VERSION, REPLAY_SOURCE, REPLAY_PROOF} | CAUSE_PROPERTIES


def _number(properties: Mapping[str, str], name: str) -> int | None:
    written = properties.get(name)
    return int(written) if written is not None and _NUMBER.fullmatch(written) else None
