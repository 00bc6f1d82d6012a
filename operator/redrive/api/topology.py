"""Retry and dead-letter topic of a policy: partitions, limits of time and size, readers."""

from __future__ import annotations

import enum
import math
from datetime import timedelta
from typing import Annotated

from pydantic import AfterValidator, Field, Strict, WithJsonSchema

from redrive.api import model
from redrive.api.policy_defaults import bounded_duration
from redrive.errors import InvalidSpecError
from redrive.policy.ladder import MAX_DELAY
from redrive.policy.values import SIZE_PATTERN, parse_duration, parse_size

MAX_PARTITIONS = 256
MAX_TTL = timedelta(days=3_650)
MAX_MEGABYTES = 2**30
MIB = 2**20
UNLIMITED = "Unlimited"
"""Value of a disabled limit, which differs from a missing one."""


def _check_partitions(count: int) -> int:
    if not 1 <= count <= MAX_PARTITIONS:
        raise InvalidSpecError(
            f"`partitions` must be from 1 to {MAX_PARTITIONS}",
            got=count,
            remedy="choose a number within these bounds, or leave it out",
        )
    return count


Partitions = Annotated[
    int,
    Strict(),
    WithJsonSchema({"type": "integer", "minimum": 1, "maximum": MAX_PARTITIONS}),
    AfterValidator(model.refusing(_check_partitions)),
]


def _limit(text: str) -> timedelta | None:
    """Parse a time limit; None if it is unlimited."""
    return None if text == UNLIMITED else parse_duration(text)


def _time(least: int, problem: str, remedy: str) -> tuple[object, ...]:
    """Return the annotations of a time limit, from *least* seconds to `MAX_TTL`."""
    most = int(MAX_TTL.total_seconds())
    return bounded_duration(least, most, problem, remedy, word=UNLIMITED)


Ttl = Annotated[
    str,
    *_time(
        1,
        "`messageTTL` must be from 1s to 3650d",
        f"choose a duration within these bounds, or {UNLIMITED}",
    ),
]
RetryTtl = Annotated[
    str,
    *_time(
        int(MAX_DELAY.total_seconds()) + 1,
        "`messageTTL` of the retry topic must be more than 10d, the longest delay of a retry, and "
        "at most 3650d",
        f"choose a longer duration, or {UNLIMITED}",
    ),
]
RetentionTime = Annotated[
    str,
    *_time(
        60,
        "`time` of a retention must be from 1m to 3650d, because brokers count minutes",
        f"choose a duration within these bounds, or {UNLIMITED}",
    ),
]


def _check_size(text: str) -> str:
    if not MIB <= parse_size(text) <= MAX_MEGABYTES * MIB:
        raise _IN_BOUNDS.error(text)
    return text


_BYTES = "quantity(self)"
_IN_BOUNDS = model.Rule(
    f"!isQuantity(self) || ({_BYTES}.compareTo(quantity('1Mi')) >= 0"
    f" && {_BYTES}.compareTo(quantity('1024Ti')) <= 0)",
    "a size must be from 1Mi to 1024Ti",
    "choose a size within these bounds",
    got=model.QUOTED,
)
Size = Annotated[
    str,
    WithJsonSchema({"type": "string", "maxLength": 17, "pattern": SIZE_PATTERN}),
    _IN_BOUNDS,
    AfterValidator(model.refusing(_check_size)),
]
SizeOrUnlimited = Annotated[
    str,
    WithJsonSchema({"type": "string", "maxLength": 17, "pattern": f"^{UNLIMITED}$|{SIZE_PATTERN}"}),
    _IN_BOUNDS,
    AfterValidator(model.refusing(lambda text: text if text == UNLIMITED else _check_size(text))),
]


class _Expiring(model.ApiModel):
    """A topic whose messages may expire."""

    @property
    def ttl_seconds(self) -> int:
        """Return `messageTTL` in seconds, 0 for unlimited, as the broker writes it."""
        limit = _limit(self.message_ttl)  # type: ignore[attr-defined]  # of each subclass
        return 0 if limit is None else int(limit.total_seconds())


class RetryTopic(_Expiring):
    """The retry topic."""

    partitions: Partitions | None = None
    """Number of partitions, 1 to 256; it never shrinks. Defaults to that of the source topic, and
    grows with it."""

    message_ttl: Annotated[RetryTtl, Field(alias="messageTTL")] = UNLIMITED
    """Time after its publication when the broker drops a waiting message: more than 10d, the
    longest delay of a retry, and at most 3650d; or `Unlimited`. Defaults to Unlimited."""


class Retention(model.ApiModel):
    """Retention of acknowledged messages. The first limit that is reached applies."""

    time: RetentionTime | None = None
    """Time after their acknowledgement, 1m to 3650d, or `Unlimited`; brokers round it up to
    minutes. Defaults to Unlimited if `size` is set."""

    size: SizeOrUnlimited | None = None
    """Size of the retained messages, `1Mi` to `1024Ti`, or `Unlimited`; brokers round it up to MiB.
    Defaults to Unlimited if `time` is set. Example: `10Gi`."""

    @property
    def bytes(self) -> int | None:
        """Return the size limit; None if it is unlimited."""
        return None if self.size in {None, UNLIMITED} else parse_size(str(self.size))

    def to_broker(self) -> dict[str, int]:
        """Return the broker's form, in minutes and MB; -1 means unlimited."""
        limit = None if self.time is None else _limit(self.time)
        minutes = -1 if limit is None else math.ceil(limit.total_seconds() / 60)
        return {
            "retentionTimeInMinutes": minutes,
            "retentionSizeInMB": -1 if self.bytes is None else math.ceil(self.bytes / MIB),
        }


class BacklogQuota(model.ApiModel):
    """Maximum backlog of the topic. A full topic refuses messages and drops none."""

    size: Size
    """Size of the backlog, `1Mi` to `1024Ti`. A message that the full topic refuses remains in its
    consumer, unacknowledged and without another attempt. It is sent again with back-off until there
    is room. A consumer with 1000 such messages receives no more. Example: `10Gi`."""

    @property
    def bytes(self) -> int:
        """Return the size in bytes."""
        return parse_size(self.size)


class DeadLetterMode(enum.StrEnum):
    """Treatment of messages that have used up their retries."""

    KEEP = "Keep"
    DISCARD = "Discard"


_MORE_THAN_THE_QUOTA = model.Rule(
    "!present(self.retention.size) || !present(self.backlogQuota.size)"
    " || !isQuantity(self.retention.size) || !isQuantity(self.backlogQuota.size)"
    " || quantity(self.retention.size).isGreaterThan(quantity(self.backlogQuota.size))",
    "`retention.size` must be more than `backlogQuota.size`, or the broker refuses both",
    "increase retention.size, or reduce backlogQuota.size",
    got="'retention ' + self.retention.size + ', quota ' + self.backlogQuota.size",
)


class DeadLetterTopic(_Expiring, model.CheckedModel):
    """Treatment of messages that have used up their retries."""

    RULES = (_MORE_THAN_THE_QUOTA,)

    mode: Annotated[DeadLetterMode, *model.one_of(DeadLetterMode, "`mode`")] = DeadLetterMode.KEEP
    """`Keep`: they are kept in the dead-letter topic. `Discard`: there is no such topic, and
    consumers acknowledge a message permanently once its retries are used up. Java consumers cannot
    discard: without a dead-letter topic they retry permanently. Defaults to Keep."""

    partitions: Partitions | None = None
    """Number of partitions of the topic, 1 to 256, if redrive creates it; it never shrinks.
    Defaults to none, which keeps dead letters in their order."""

    subscription: model.Subscription | None = None
    """Durable subscription that retains dead letters; Replays read it. If your own consumer
    acknowledges dead letters, use its subscription. Defaults to `redrive`."""

    message_ttl: Annotated[Ttl, Field(alias="messageTTL")] = UNLIMITED
    """Time after which the broker drops a dead letter, 1s to 3650d, or `Unlimited`. Defaults to
    Unlimited."""

    retention: Retention | None = None
    """Retention of acknowledged dead letters, for example after a Replay. Defaults to the retention
    of the Pulsar namespace."""

    backlog_quota: BacklogQuota | None = None
    """Maximum backlog of the dead-letter topic. Defaults to the quota of the Pulsar namespace. If
    that quota drops messages, the topic gets one of the same size that refuses them."""

    sequenced: Annotated[bool, Strict()] = False
    """True dead-letters later messages of a key that has a dead letter, without handling them,
    until a Replay has moved all of them back in order. Requires `ordering: PerKey` and Python
    consumers, which must be restarted after a change. Defaults to false: they are handled."""

    reader_roles: model.ReaderRoles = ()
    """Pulsar roles of people and tools that read dead letters. Each gets `consume` on the
    dead-letter topic; the connection must allow it. This permission includes skipping messages and
    resetting the cursor: readers of dead letters can also delete them. At most 16 roles, with 1024
    characters in total. Defaults to none. Example: `[oncall]`."""

    def _check(self) -> None:
        kept = None if self.retention is None else self.retention.bytes
        if kept is not None and self.backlog_quota and kept <= self.backlog_quota.bytes:
            raise _MORE_THAN_THE_QUOTA.error(f"{kept} and {self.backlog_quota.bytes} bytes")

    @property
    def keeps(self) -> bool:
        """Return True if dead letters are kept."""
        return self.mode is DeadLetterMode.KEEP
