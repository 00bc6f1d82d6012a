"""What travels with a message through its hops: properties ⇄ attempt, origin and cause.

The names in capitals without prefix are those of Pulsar's Java client, so that Java and Python
consumers can share a subscription; `REDRIVE_…` are ours. Each hop gives a message a new id; the
id it was first produced with is kept in `ORIGIN_MESSAGE_ID`.

Properties are written by whoever may produce, so nothing here decides where a message goes: the
policy alone does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from redrive.policy.model import Policy
from redrive.policy.verdict import Dead, Retry

RECONSUMETIMES = "RECONSUMETIMES"
REAL_TOPIC = "REAL_TOPIC"
REAL_SUBSCRIPTION = "REAL_SUBSCRIPTION"
ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID"
RETRY_TOPIC = "RETRY_TOPIC"
DELAY_TIME = "DELAY_TIME"
CAUSE_TYPE = "REDRIVE_CAUSE_TYPE"
CAUSE_MESSAGE = "REDRIVE_CAUSE_MESSAGE"
FAILED_AT = "REDRIVE_FAILED_AT"
CONSUMER = "REDRIVE_CONSUMER"
FIRST_FAILED_AT = "REDRIVE_FIRST_FAILED_AT"
DEAD_REASON = "REDRIVE_DEAD_REASON"
REPLAYS = "REDRIVE_REPLAYS"
REPLAY = "REDRIVE_REPLAY"

MAX_CAUSE_BYTES = 1_024
"""The most that one property of the cause may take: a broker refuses a message that is too big."""


@dataclass(frozen=True)
class Cause:
    """Why an attempt failed: what a triage needs to know.

    Attributes:
        type: the name of the exception's class.
        message: its text, cut to 1 KiB when written.
        failed_at: when, with a time zone.
        consumer: the name of the consumer that saw it fail.
    """

    type: str
    message: str
    failed_at: datetime
    consumer: str

    @classmethod
    def from_error(cls, error: BaseException, *, failed_at: datetime, consumer: str) -> Cause:
        """Describe *error*, raised by a handler."""
        return cls(type(error).__name__, str(error), failed_at, consumer)

    def to_properties(self) -> dict[str, str]:
        """Write the cause, each value cut to `MAX_CAUSE_BYTES`."""
        return {
            CAUSE_TYPE: _cut(self.type),
            CAUSE_MESSAGE: _cut(self.message),
            FAILED_AT: self.failed_at.isoformat(),
            CONSUMER: _cut(self.consumer),
        }


@dataclass(frozen=True)
class Attempt:
    """What a message has been through when a consumer gets it.

    Attributes:
        reconsume_times: the retries it has had.
        origin: the id it was first produced with, as `ledger:entry:partition`.
        first_failed_at: when its first attempt failed, where that is known.
    """

    reconsume_times: int
    origin: str
    first_failed_at: datetime | None

    @property
    def number(self) -> int:
        """Return which delivery to a handler this is, from 1."""
        return self.reconsume_times + 1

    @classmethod
    def of(cls, properties: Mapping[str, str], *, message_id: str, retried: bool) -> Attempt:
        """Read the attempt from what a message carries.

        Args:
            message_id: the id it arrived with.
            retried: whether it comes from the policy's retry topic. A message of the source topic
                has had no retry, whatever it claims; one that was replayed keeps its origin.
        """
        written = properties.get(ORIGIN_MESSAGE_ID, "")
        return cls(
            reconsume_times=reconsume_times(properties) if retried else 0,
            origin=written if _ORIGIN.fullmatch(written) else message_id,
            first_failed_at=_moment(properties.get(FIRST_FAILED_AT, "")) if retried else None,
        )

    def failing_for(self, now: datetime) -> timedelta:
        """Return the time since the first failure; nothing if there was none, or a clock is off."""
        return max(now - (self.first_failed_at or now), timedelta())


def reconsume_times(properties: Mapping[str, str]) -> int:
    """Return how many retries a message *of the retry topic* has had.

    A count that is absent, or that no client of ours would write, is 0: such a message gets its
    retries, never an early end. A message of the source topic has had none, whatever it claims.
    """
    return _count(properties, RECONSUMETIMES)


def replays(properties: Mapping[str, str]) -> int:
    """Return how often a message has been replayed from the dead-letter topic."""
    return _count(properties, REPLAYS)


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
    if cause is None:
        return kept
    return {FIRST_FAILED_AT: cause.failed_at.isoformat()} | kept | cause.to_properties()


def for_replay(properties: Mapping[str, str], *, replay: str) -> dict[str, str]:
    """Return the properties for a dead letter that goes back to be processed.

    Its retries start anew; its origin and the cause of its death stay readable; the number of its
    replays rises, so that a message which dies again and again can be told.

    Args:
        properties: those of the dead letter.
        replay: identifies the Replay that moves it.
    """
    kept = {k: v for k, v in properties.items() if k not in _OVER}
    return kept | {RECONSUMETIMES: "0", REPLAYS: str(replays(properties) + 1), REPLAY: replay}


_COUNT = re.compile(r"[0-9]{1,9}")
# Harmless in a log, whoever wrote it: Java, RocketMQ, we.
_ORIGIN = re.compile(r"[0-9A-Za-z:,()._-]{1,128}")
_OVER = {DELAY_TIME, DEAD_REASON, FIRST_FAILED_AT}
_REPLACED = _OVER | {CAUSE_TYPE, CAUSE_MESSAGE, FAILED_AT, CONSUMER}


def _moment(written: str) -> datetime | None:
    """Read a moment with a time zone, as `isoformat` writes it; None if it is none."""
    try:
        moment = datetime.fromisoformat(written)
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else None


def _count(properties: Mapping[str, str], name: str) -> int:
    written = properties.get(name, "")
    return int(written) if _COUNT.fullmatch(written) else 0


def _cut(text: str) -> str:
    """Make *text* fit a property: at most `MAX_CAUSE_BYTES` of valid UTF-8."""
    encoded = text.encode("utf-8", "backslashreplace")[:MAX_CAUSE_BYTES]
    return encoded.decode("utf-8", "ignore")
