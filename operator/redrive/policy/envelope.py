"""The envelope of a retried or dead-lettered message: its properties and its cause.

The names of all properties that a retried or dead-lettered message carries.

Those in capitals without prefix are of Pulsar's Java client, so that Java and Python consumers can
share a subscription; `REDRIVE_…` are ours. docs/reference/properties.md tells users of them.

Why an attempt failed: type, text, fingerprint and trace, redacted.

Made by `delivery` from the exception of a handler; travels with the message in `properties`. All of
it together stays below 8 KiB: a broker refuses a message that is too big.

What travels with a message through its hops: properties ⇄ attempt, origin and cause.

Properties are written by whoever may produce, so nothing here decides where a message goes: the
policy alone does. Their names stand in `properties`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import TracebackType
from typing import NamedTuple

from redrive.errors import PROCESS_ERRORS, InvalidSpecError
from redrive.policy.ladder import MAX_DELAY
from redrive.policy.model import Policy
from redrive.policy.verdict import Dead, Retry

# Where it is on its way.
RECONSUMETIMES = "RECONSUMETIMES"
"""Retries so far; on a dead letter failed attempts, which is one more."""
DELAY_TIME = "DELAY_TIME"
"""The delay asked for, in milliseconds."""
DEAD_REASON = "REDRIVE_DEAD_REASON"
"""Why it is a dead letter: one of `verdict.DeadReason`."""

# Where it comes from.
REAL_TOPIC = "REAL_TOPIC"
REAL_SUBSCRIPTION = "REAL_SUBSCRIPTION"
RETRY_TOPIC = "RETRY_TOPIC"
ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID"
"""The id it was first produced with; each hop gives it a new one."""
FIRST_ID = "REDRIVE_FIRST_ID"
"""The id it had when a consumer in Python failed it first: tells apart messages that share an
origin, as those of one batch do for Go's client, and those to which an application has copied the
properties of another."""
SCHEMA_VERSION = "REDRIVE_SCHEMA_VERSION"
"""The version of the source topic's schema it was produced with, a number from 0."""

# Of a dead letter that no copy of its message could be: see `copying.encoding`.
NOT_COPIED = "REDRIVE_NOT_COPIED"
"""Why not: reasons of `NotCopyableError`, separated by commas."""
SOURCE_MESSAGE_ID = "REDRIVE_SOURCE_MESSAGE_ID"
"""The id that it had where it was consumed."""
ENCODED = "REDRIVE_ENCODED"
"""The parts that are no text, as JSON with base64."""
PAYLOAD_PREFIX = "REDRIVE_PAYLOAD_PREFIX"
"""So many bytes of JSON precede the payload, in place of `ENCODED`."""

# Why its last attempt failed; replaced at each hop.
MAX_CAUSE = 256
"""Characters of `CAUSE_TYPE` that a plan shows and a selection compares."""
CAUSE_TYPE = "REDRIVE_CAUSE_TYPE"
"""The name of the exception's class."""
CAUSE_MESSAGE = "REDRIVE_CAUSE_MESSAGE"
"""The exception's text."""
CAUSE_FINGERPRINT = "REDRIVE_CAUSE_FINGERPRINT"
"""The same for failures of one kind: 16 hexadecimal digits."""
CAUSE_TRACE = "REDRIVE_CAUSE_TRACE"
"""Where it was raised, the innermost call first, and what it was caused by."""
FAILED_AT = "REDRIVE_FAILED_AT"
"""When, in ISO 8601 with a time zone."""
FIRST_FAILED_AT = "REDRIVE_FIRST_FAILED_AT"
"""When the first attempt failed; the only one of these that stays."""
CONSUMER = "REDRIVE_CONSUMER"
"""The name of the consumer that saw it fail."""
ATTEMPT = "REDRIVE_ATTEMPT"
"""Which attempt it was, from 1."""

# What replays have done to it.
REPLAYS = "REDRIVE_REPLAYS"
"""How often it has been replayed."""
REPLAY = "REDRIVE_REPLAY"
"""The Replay that moved it last, as `namespace/name`."""
REPLAY_SOURCE = "REDRIVE_REPLAY_SOURCE"
"""From where it was moved, as `uid@partition:ledger:entry:index` with the uid of that Replay: the
evidence that it was, with `REPLAY_PROOF`. A hop drops both."""
REPLAY_PROOF = "REDRIVE_REPLAY_PROOF"
"""The code of `REPLAY_SOURCE`, which only jobs of the policy can compute."""


MAX_TEXT_BYTES = 1_024
"""The most that one property of the cause may take, but for the trace."""
MAX_TRACE_BYTES = 4_096


@dataclass(frozen=True)
class Redaction:
    """Keeps personal data out of causes: their text, trace and fingerprint.

    Attributes:
        patterns: regular expressions; what they match is replaced by `[redacted]`.
        hook: gets each text after that, and returns what may be shown of it. If it raises an
            exception or returns no string, nothing is shown.

    Raises:
        InvalidSpecError: a pattern is no regular expression for text, or the hook no function.
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
        if self.hook is not None and not callable(self.hook):
            raise InvalidSpecError(
                "the hook of a redaction is a function of a text",
                got=self.hook,
                remedy="give a function that returns the text to be shown",
            )

    def __call__(self, text: str) -> str:
        """Return what may be shown of *text*."""
        for pattern in self.patterns:
            text = re.sub(pattern, "[redacted]", text)
        if self.hook is None:
            return text
        try:
            shown: object = self.hook(text)
        except PROCESS_ERRORS:
            raise
        except BaseException as error:  # noqa: BLE001 - a message must not be stuck for it
            return f"[redacted, for the hook raised {type(error).__name__}]"
        if not isinstance(shown, str):
            return f"[redacted, for the hook returned {type(shown).__name__}]"
        return shown


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
        chain = [
            _Raised(error, _shown(_text(error), redact), _calls(error.__traceback__))
            for error in _chain(error)
        ]
        return cls(
            type=type(error).__name__,
            message=chain[0].text,
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
                type=properties[CAUSE_TYPE],
                message=properties.get(CAUSE_MESSAGE, ""),
                failed_at=_known(parse_moment(properties[FAILED_AT])),
                consumer=properties[CONSUMER],
                attempt=int(properties[ATTEMPT]),
                fingerprint=properties.get(CAUSE_FINGERPRINT, ""),
                trace=properties.get(CAUSE_TRACE, ""),
            )
        except (KeyError, ValueError):
            return None

    def to_properties(self) -> dict[str, str]:
        """Write the cause, each value cut to its bound."""
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
"""So long may a secret be that a pattern has to see as a whole, in a text that is cut."""

_MAX_CHAIN = 5
_MAX_FRAMES = 50
# A text may be a whole payload: each word is looked at once, from its beginning, and never again.
VARIABLE = re.compile(
    r"""'[^']*'|"[^"]*"|(?<![\w.:/@#-])(?:[^\W\d]|[.:/@#-])*+\d[\w.:/@#-]*"""
    r"""|\b[0-9a-f]{8,}\b""",
    re.IGNORECASE,
)
"""Parts in which two texts of one failure differ: ids, quoted values, and words with a digit."""


def parse_moment(written: str) -> datetime | None:
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


class _Raised(NamedTuple):
    error: BaseException
    text: str
    calls: list[tuple[str, int]]


def _trace(chain: Sequence[_Raised]) -> str:
    lines: list[str] = []
    for number, (error, text, calls) in enumerate(chain):
        if number:
            lines.append(f"caused by {type(error).__name__}: {text}")
        lines += [f"at {function}:{line}" for function, line in calls]
    return "\n".join(lines)


def _is_own(module: str) -> bool:
    """Return True for a module of redrive.

    Fingerprints are stored with dead letters, so they must not depend on the file of redrive that
    defines an error or calls a handler.
    """
    return module == "redrive" or module.startswith("redrive.")


def _fingerprint(chain: Sequence[_Raised]) -> str:
    import hashlib  # noqa: PLC0415 - loads OpenSSL, and a consumer may never see a failure

    parts = []
    for error, text, calls in chain:
        module = str(type(error).__module__)  # a program may set any object
        parts += ["redrive" if _is_own(module) else module, type(error).__qualname__]
        parts.append(VARIABLE.sub("?", text))
        parts += [function for function, _ in calls]
    hashed = "\0".join(parts).encode("utf-8", "backslashreplace")
    return hashlib.sha256(hashed).hexdigest()[:16]


def _cut(text: str, limit: int) -> str:
    """Make *text* fit a property: at most *limit* bytes of valid UTF-8."""
    encoded = text.encode("utf-8", "backslashreplace")[:limit]
    return encoded.decode("utf-8", "ignore")


@dataclass(frozen=True)
class Attempt:
    """What a message has been through when a consumer gets it.

    Attributes:
        reconsume_times: the retries it has had.
        origin: the id it was first produced with, as `ledger:entry:partition`. Several messages may
            share one: Go's client leaves out the index in a batch, and applications copy the
            properties of one message to others.
        first_failed_at: when its first attempt failed, where that is known.
        cause: why the attempt before it failed, where a client of ours saw that; for a message
            that was replayed, why it died.
        schema_version: of the source topic's schema, which it was produced with; None if it has no
            schema, or comes from a client that does not set it.
        first_id: the same for all attempts at one message, and another for each other message: the
            id it had when a consumer in Python failed it first. Empty stands for the origin.
        redeliveries: how often it was acknowledged negatively since its last retry, as far as the
            broker, or this consumer in its place, has counted.
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
        """Return which delivery to a handler this is, from 1."""
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
        """Read the attempt from what a message carries.

        Args:
            message_id: the id it arrived with.
            retried: whether it comes from the policy's retry topic. A message of the source topic
                has had no retry, whatever its properties say; a replayed one keeps its origin.
            schema_version: the version that its topic gives it. The retry topic counts its own.
            sequenced: whether a dead letter that is replayed, to whichever topic, is known again.
        """
        origin, first_id = (properties.get(name, "") for name in (ORIGIN_MESSAGE_ID, FIRST_ID))
        # A copy of another message's properties comes by the source topic.
        believed = retried or (sequenced and REPLAY in properties)
        if retried or schema_version is None:
            schema_version = _number(properties, SCHEMA_VERSION)
        return cls(
            reconsume_times=reconsume_times(properties) if retried else 0,
            origin=origin if ORIGIN_FORM.fullmatch(origin) else message_id,
            first_failed_at=parse_moment(properties.get(FIRST_FAILED_AT, "")) if retried else None,
            cause=Cause.read(properties),
            schema_version=schema_version,
            first_id=first_id if believed and ORIGIN_FORM.fullmatch(first_id) else message_id,
        )

    def failing_for(self, now: datetime) -> timedelta:
        """Return the time since the first failure; nothing if there was none, or a clock is off."""
        return max(now - (self.first_failed_at or now), timedelta())


def reconsume_times(properties: Mapping[str, str]) -> int:
    """Return how many retries a message *of the retry topic* has had.

    A count that is absent or no number of up to nine digits is 0: such a message gets its retries,
    never an early end. Any other is trusted: a producer of the retry topic can end a message early.
    A message of the source topic has had none, whatever its properties say.
    """
    return _number(properties, RECONSUMETIMES) or 0


def replays(properties: Mapping[str, str]) -> int:
    """Return how often a message has been replayed from the dead-letter topic."""
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

    User properties are kept. The cause of an earlier failure is replaced, never added to.

    Args:
        properties: those the message arrived with.
        attempt: which of its attempts failed.
        cause: why it failed, where the caller knows.
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
    why = cause.to_properties()
    return {FIRST_FAILED_AT: why[FAILED_AT]} | kept | why


def for_replay(properties: Mapping[str, str], *, replay: str, source: str) -> dict[str, str]:
    """Return the properties for a dead letter that goes back to be processed.

    Its retries start again from 0; its origin and its cause are kept; the number of its replays
    rises, so that a message which is dead-lettered again and again can be recognized.

    Args:
        properties: those of the dead letter.
        replay: identifies the Replay that moves it.
        source: where it lies, for `REPLAY_SOURCE`.
    """
    carried = {**properties, RECONSUMETIMES: "0", REPLAY: replay, REPLAY_SOURCE: source}
    carried[REPLAYS] = str(replays(properties) + 1)
    for name in _OVER:
        carried.pop(name, None)
    return carried


_NUMBER = re.compile(r"[0-9]{1,9}")
# Harmless in a log, whoever wrote it: Java, RocketMQ, we.
ORIGIN_FORM = re.compile(r"[0-9A-Za-z:,()._-]{1,128}")
"""Form of `ORIGIN_MESSAGE_ID` that is believed, of clients in all languages."""


def delay_of(properties: Mapping[str, str]) -> timedelta | None:
    """Return the delay that a retry asks for; None if it names none that can be."""
    milliseconds = _number(properties, DELAY_TIME)
    if milliseconds is None or (delay := timedelta(milliseconds=milliseconds)) > MAX_DELAY:
        return None
    return delay


_OVER = {DELAY_TIME, DEAD_REASON, FIRST_FAILED_AT}
_REPLACED = _OVER | {SCHEMA_VERSION, REPLAY_SOURCE, REPLAY_PROOF} | CAUSE_PROPERTIES


def _number(properties: Mapping[str, str], name: str) -> int | None:
    written = properties.get(name)
    return int(written) if written is not None and _NUMBER.fullmatch(written) else None
