"""Findings over the topic statistics of a policy, from one reading to the next; pure.

`Findings.of` combines the latest reading with earlier findings and runs `health_checks.CHECKS`.
`is_backlog_worth_writing` limits the writes of `status.backlog`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from pydantic import OnErrorOmit, TypeAdapter, ValidationError

from redrive.api import Body
from redrive.api.conditions import StatusWarning, moment_of
from redrive.api.retrypolicy import Backlog, BlockedKey
from redrive.policy.model import BLOCKED_KEYS, MAX_BLOCKED_KEYS
from redrive.provision.health_checks import CheckInput, Deliveries, Reading, Thresholds, check

_HOUR_SECONDS = 3_600.0
_PARTS = 60


@dataclass(frozen=True)
class Findings:
    """Result of all readings of one policy.

    Attributes:
        unconsumed: see `CheckInput`; of the latest reading.
        stranded_readings: see `CheckInput`.
        dead_letters: messages stored in the dead-letter topic since the reading before.
        published: latest known count of each partition, see `Reading`.
        recent: readings of the last hour with new dead letters: time and number.
    """

    deliveries: Deliveries
    unconsumed: bool
    warnings: tuple[StatusWarning, ...]
    stranded_readings: int = 0
    dead_letters: int = 0
    published: Mapping[str, int] = field(default_factory=dict)
    recent: tuple[tuple[float, int], ...] = ()

    @classmethod
    def of(
        cls,
        reading: Reading,
        before: Findings | None,
        published: Iterable[StatusWarning],
        limits: Thresholds,
    ) -> Findings:
        """Return the findings after *reading*.

        Args:
            reading: the latest one.
            before: the findings so far; None before the first reading.
            published: current warnings of the policy.
            limits: thresholds of the checks.
        """
        own = (reading.own_source, reading.retries)
        counters = [None if stats is None else stats.delivered for stats in own]
        window = (
            Deliveries.begin(reading.seconds, *counters)
            if before is None
            else before.deliveries.seen(reading.seconds, *counters)
        )
        readings = 0 if before is None else before.stranded_readings
        facts = CheckInput(
            **vars(reading),
            deliveries=window,
            # A requested reading may follow another at once: too early to confirm.
            unconsumed_before=before is not None and before.unconsumed and not reading.requested,
            warnings={warning.reason: warning for warning in published},
            # A requested reading may follow another at once, so it does not count.
            stranded_readings=readings + (not reading.requested) if reading.shows_stranded else 0,
        )
        stored = {} if before is None else before.published
        dead_letters = stored_since(stored, reading.published)
        recent = [] if before is None else [*before.recent, (reading.seconds, dead_letters)]
        return cls(
            window,
            facts.unconsumed,
            check(facts, limits),
            facts.stranded_readings,
            dead_letters,
            {**stored, **reading.published},  # an answer may lack a partition
            tuple((at, n) for at, n in recent if n and at > reading.seconds - _HOUR_SECONDS),
        )

    @property
    def last_hour(self) -> int:
        """Return the number of dead letters that were stored in the last hour."""
        return sum(number for _, number in self.recent)

    def resumed(self, reading: Reading, written: Backlog | None) -> Findings:
        """Return the findings with the last hour as another operator has written it.

        The times within that hour are unknown, so the dead letters are divided equally over it:
        they expire from now on, even if operators restart more often than each hour.
        """
        if written is None or written.observed_time is None or not written.dead_letters_last_hour:
            return self
        age = (reading.begun - written.observed_time).total_seconds()
        begin = reading.seconds - age - _HOUR_SECONDS
        counts = [written.dead_letters_last_hour * part // _PARTS for part in range(_PARTS + 1)]
        recent = [
            (begin + _HOUR_SECONDS * part / _PARTS, counts[part] - counts[part - 1])
            for part in range(1, _PARTS + 1)
        ]
        start = reading.seconds - _HOUR_SECONDS
        return replace(self, recent=tuple((at, n) for at, n in recent if n and at > start))


def stored_since(before: Mapping[str, int], now: Mapping[str, int]) -> int:
    """Return the number of messages stored between two readings of a topic.

    The first count of a partition counts nothing. A lower count started at 0, when the broker
    loaded the partition: messages stored just before that are not counted.
    """
    steps = ((before[part], count) for part, count in now.items() if part in before)
    return sum(count - earlier if count >= earlier else count for earlier, count in steps)


BACKLOG_SHARE = 0.1
"""A count that changed by more than this share is written at once."""
BACKLOG_CHANGED_AFTER = timedelta(minutes=10)
"""A smaller change is written once the written value has this age."""
BACKLOG_UNCHANGED_AFTER = timedelta(hours=1)
"""Unchanged figures are written again at this age, as a confirmation."""


def are_keys_worth_writing(written: Body, patch: Body) -> bool:
    """Return True if the keys of *patch* should replace those of *written*, a status with figures.

    Other keys, or other messages, are written at once; their numbers and causes every ten minutes.
    """
    before, after = written.get("blockedKeys") or [], patch["blockedKeys"] or []
    if before == after:
        return False
    earlier = moment_of(written["backlog"]["observedTime"])
    later = moment_of(patch["backlog"]["observedTime"])
    is_old = not earlier or not later or later - earlier >= BACKLOG_CHANGED_AFTER
    return is_old or _blocking(before) != _blocking(after)


def _blocking(keys: Sequence[Body]) -> set[tuple[str, str]]:
    return {(key["keyHash"], key["messageID"]) for key in keys}


def is_backlog_worth_writing(written: Backlog | None, current: Backlog) -> bool:
    """Return True if *current* should replace *written* in the status.

    A start, an end or a large change of retries or dead letters is written at once, like the first
    and the last consumer. Other changes are written every ten minutes, and unchanged figures
    hourly. Otherwise a thousand policies would be a thousand writes a minute.
    """
    if written is None or written.observed_time is None or current.observed_time is None:
        return True
    age = current.observed_time - written.observed_time
    if written == current.model_copy(update={"observed_time": written.observed_time}):
        return age >= BACKLOG_UNCHANGED_AFTER
    return (
        age >= BACKLOG_CHANGED_AFTER
        or _moved(written.retry, current.retry)
        or _moved(written.dead_letter, current.dead_letter)
        or bool(written.source_consumers) != bool(current.source_consumers)
        or bool(written.retry_consumers) != bool(current.retry_consumers)
    )


def read_backlog(status: Mapping[str, Any]) -> Backlog | None:
    """Return the backlog in a policy's *status*; None if it is missing or cannot be read."""
    written = status.get("backlog")
    try:
        return None if written is None else Backlog.model_validate(written)
    except ValidationError:
        return None


def figures_patch(backlog: Backlog, blocked_keys: Sequence[BlockedKey]) -> dict[str, Any]:
    """Return the merge patch of a status; None values remove their fields."""
    return {
        "backlog": backlog.model_dump(mode="json", by_alias=True),
        "blockedKeys": [key.to_manifest() for key in blocked_keys] or None,
    }


def _moved(before: int | None, now: int | None) -> bool:
    if before is None or now is None:
        return before is not now
    return bool(before) != bool(now) or abs(now - before) > BACKLOG_SHARE * before


_BLOCKED_KEYS = TypeAdapter(tuple[OnErrorOmit[BlockedKey], ...])
_KEYS_LENGTH = 256 * 2**10
"""Maximum characters of one policy, about a thousand keys: more would delay the event loop."""


def blocked_keys_of(producers: Iterable[Mapping[str, str]]) -> tuple[BlockedKey, ...]:
    """Return the blocked keys in the metadata of producers, the longest blocked first.

    Any client that may produce to the retry topic can write them, so invalid ones are left out, and
    `_KEYS_LENGTH` of all is read. A consumer has two producers for a moment while it publishes a
    change: the key with more failures counts.
    """
    keys: list[BlockedKey] = []
    unread = _KEYS_LENGTH
    for producer in producers:
        text = producer.get(BLOCKED_KEYS, "[]")
        if len(text) > unread:
            continue
        unread -= len(text)
        with suppress(ValidationError):
            keys += _BLOCKED_KEYS.validate_json(text)
    latest = {
        key.key_hash: key
        for key in sorted(keys, key=lambda key: (key.since_time, key.failures))
        if key.cause.isprintable()
    }
    shown = sorted(latest.values(), key=lambda key: (key.since_time, key.key_hash))
    return tuple(shown[:MAX_BLOCKED_KEYS])
