"""What travels with a message through its hops: properties ⇄ attempt, origin and cause.

Properties are written by whoever may produce, so nothing here decides where a message goes: the
policy alone does. Their names stand in `properties`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from redrive.policy import cause as causes
from redrive.policy.cause import Cause
from redrive.policy.model import Policy
from redrive.policy.properties import (
    DEAD_REASON,
    DELAY_TIME,
    FIRST_FAILED_AT,
    FIRST_ID,
    ORIGIN_MESSAGE_ID,
    REAL_SUBSCRIPTION,
    REAL_TOPIC,
    RECONSUMETIMES,
    REPLAY,
    REPLAY_SOURCE,
    REPLAYS,
    RETRY_TOPIC,
    SCHEMA_VERSION,
)
from redrive.policy.verdict import Dead, Retry


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
    """

    reconsume_times: int
    origin: str
    first_failed_at: datetime | None = None
    cause: Cause | None = None
    schema_version: int | None = None
    first_id: str = ""

    @property
    def number(self) -> int:
        """Return which delivery to a handler this is, from 1."""
        return self.reconsume_times + 1

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
            origin=origin if _ORIGIN.fullmatch(origin) else message_id,
            first_failed_at=causes.moment(properties.get(FIRST_FAILED_AT, "")) if retried else None,
            cause=Cause.read(properties),
            schema_version=schema_version,
            first_id=first_id if believed and _ORIGIN.fullmatch(first_id) else message_id,
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
    return {FIRST_FAILED_AT: cause.failed_at.isoformat()} | kept | cause.to_properties()


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
_ORIGIN = re.compile(r"[0-9A-Za-z:,()._-]{1,128}")
_OVER = {DELAY_TIME, DEAD_REASON, FIRST_FAILED_AT}
_REPLACED = _OVER | {SCHEMA_VERSION, REPLAY_SOURCE} | causes.WRITTEN


def _number(properties: Mapping[str, str], name: str) -> int | None:
    written = properties.get(name)
    return int(written) if written is not None and _NUMBER.fullmatch(written) else None
