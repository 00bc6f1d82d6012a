"""The retry policy as a value, and the limits of an outage; pure.

The operator creates a `Policy` from a RetryPolicy resource, and consumers load it with `codec`.

A single failing message is retried. If most messages fail for one cause, retries do not help: the
consumer pauses and probes. `OutageLimits` and `OutcomeWindow` decide when;
`delivery.middleware.outage_breaker` acts.
"""

from __future__ import annotations

import enum
import functools
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from redrive.errors import InvalidSpecError
from redrive.policy import naming
from redrive.policy.ladder import DEFAULT_LEVELS, DEFAULT_PRESET, Ladder
from redrive.policy.values import Converted, check_instance, reads_directly, to_timedelta

DEFAULT_MAX_RETRIES = 16
MAX_RETRIES_LIMIT = 1_000


class SubscriptionType(enum.StrEnum):
    """Type of the subscription on the source topic.

    Brokers delay messages only on Shared and KeyShared subscriptions; on others they deliver
    delayed messages at once. The operator accepts only these two; a policy in a file may have the
    others.
    """

    SHARED = "Shared"
    KEY_SHARED = "KeyShared"
    EXCLUSIVE = "Exclusive"
    FAILOVER = "Failover"

    @property
    def honours_delays(self) -> bool:
        """Return True if a broker delays messages on such a subscription."""
        return self in {SubscriptionType.SHARED, SubscriptionType.KEY_SHARED}

    @property
    def of_broker(self) -> str:
        """Return the name in the API and the statistics of brokers."""
        return "Key_Shared" if self is SubscriptionType.KEY_SHARED else str(self)

    @classmethod
    def parse(cls, text: str) -> SubscriptionType:
        """Parse a subscription type.

        Raises:
            InvalidSpecError: the type is unknown.
        """
        try:
            return cls(text)
        except ValueError:
            raise InvalidSpecError(
                "the subscription type is unknown",
                got=str(text)[:64],
                remedy=f"use one of {', '.join(cls)}",
            ) from None


def check_max_retries(count: int) -> int:
    """Return *count* if it is a valid number of retries, from 0 to 1 000.

    Raises:
        InvalidSpecError: it is out of these bounds.
    """
    if not 0 <= count <= MAX_RETRIES_LIMIT:
        raise InvalidSpecError(
            f"maxRetries must be from 0 to {MAX_RETRIES_LIMIT}",
            got=count,
            remedy="choose a number within these bounds; 0 dead-letters the first failure",
        )
    return count


def check_order(kind: SubscriptionType, *, ordered: bool) -> None:
    """Check that a policy can be *ordered* with a subscription of *kind*.

    Raises:
        InvalidSpecError: several consumers of a Shared subscription receive messages of one key.
    """
    if ordered and kind is SubscriptionType.SHARED:
        raise InvalidSpecError(
            "an ordered policy needs a subscription that keeps the messages of a key together",
            got=kind.value,
            remedy="use KeyShared, or ordering None",
        )


def check_sequenced(sequenced: bool, *, ordered: bool, dead_letters: bool) -> None:  # noqa: FBT001 - a field
    """Check that dead letters can be *sequenced*.

    Raises:
        InvalidSpecError: the policy is not ordered, or keeps no dead letters.
    """
    if sequenced and not (ordered and dead_letters):
        raise InvalidSpecError(
            "sequenced requires an ordered policy that keeps dead letters",
            got=f"ordered={ordered}, dead letters={dead_letters}",
            remedy="set ordering to PerKey and enable dead letters, or leave sequenced out",
        )


def _topic(topic: object) -> naming.TopicName:
    if topic is None or isinstance(topic, naming.TopicName):
        return topic  # type: ignore[return-value]  # None is derived in `__post_init__`
    if not isinstance(topic, str):
        raise InvalidSpecError(
            "a topic must be a string or a TopicName",
            got=topic,
            remedy="write it like persistent://tenant/namespace/name",
        )
    return naming.TopicName.parse_whole(topic)


_FLAGS = ("ordered", "dead_letters", "ignore_outages", "sequenced")
_KINDS: dict[str, tuple[type, str]] = {
    "topic": (naming.TopicName, "write it like persistent://tenant/namespace/name"),
    "subscription": (str, "pass its name"),
    "dead_letter_subscription": (str, "pass its name"),
    "name": (str, "pass the name of a RetryPolicy as namespace/name, or leave it out"),
    "subscription_type": (SubscriptionType, "pass a value such as SubscriptionType.KEY_SHARED"),
    "max_retries": (int, "pass a whole number such as 3"),
    "generation": (int, "pass a whole number, or leave it out"),
    "ladder": (Ladder, 'pass a value such as Ladder.from_delays(["10s", "1m"])'),
    "levels": (Ladder, 'pass a value such as Ladder.from_delays(["10s", "1m"])'),
    "dead_letter_now": (frozenset, 'pass origins, such as frozenset({"4711:3:0"})'),
    **dict.fromkeys(_FLAGS, (bool, "pass True or False")),
}
"""Types of the fields that are not converted, and the remedy for another type."""


def _check_kinds(policy: Policy) -> None:
    for name, (kind, remedy) in _KINDS.items():
        value = getattr(policy, name)
        # Python's True is an int, but is not a number here.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise InvalidSpecError(
                f"{name} of a policy must be of type {kind.__name__}", got=value, remedy=remedy
            )
    for origin in policy.dead_letter_now:
        check_instance(origin, str, "an origin in dead_letter_now of a policy")
    limits = policy.outage_breaker
    if limits is not None and not isinstance(limits, OutageLimits):
        raise InvalidSpecError(
            "outage_breaker of a policy must be of type OutageLimits",
            got=limits,
            remedy="pass OutageLimits(), or leave it out",
        )


_DERIVED = (
    ("retry_topic", naming.retry_topic),
    ("dead_letter_topic", naming.dead_letter_topic),
)


@reads_directly
@dataclass(frozen=True)
class Policy:
    """Policy for the failed messages of one topic and subscription.

    Attributes:
        name: the RetryPolicy that it was created from, as `namespace/name`; for logs.
        generation: `metadata.generation` of that resource; 0 for a policy created by a program.
        topic: the source topic, never a single partition. Topics may be given as strings.
        max_retries: retries after the first delivery, 0 … 1 000: N retries make N + 1 attempts.
        ladder: delays before the retries.
        ordered: True retries a failed message in its consumer, before later messages of its key.
            False sends it to the retry topic, and later messages overtake it.
        levels: rung k is the delay of `level=k`; a higher level means the highest.
        dead_letters: True keeps messages without remaining retries in the dead-letter topic. False
            discards them, and there is no such topic.
        retry_topic: topic where messages wait for their next attempt. Defaults to a name from topic
            and subscription by the scheme `Pulsar`.
        dead_letter_subscription: subscription that retains dead letters; Replays read it.
        dead_letter_topic: topic of messages that used up their attempts, even if the policy
            discards them. Defaults to a name like that of the retry topic.
        outage_breaker: limits of an outage, in which consumers pause; None never pauses.
        ignore_outages: True resumes paused consumers: an operator's override.
        dead_letter_now: origins of messages that are dead-lettered at their next failure: an
            operator's override. It has no effect if the policy discards dead letters.
        sequenced: True dead-letters messages whose key has a dead letter, without processing them,
            until a Replay has moved all of them back in order.

    Raises:
        InvalidSpecError: a field has a wrong type; `max_retries`, `subscription` or `topic` is out
            of bounds; a given or derived topic name is invalid, or two are equal; or the policy is
            ordered and its subscription is Shared.
    """

    topic: Converted[naming.TopicName | str, naming.TopicName] = Converted(_topic)
    subscription: str  # type: ignore[misc]  # mypy sees a default in the line before
    subscription_type: SubscriptionType = SubscriptionType.SHARED
    max_retries: int = DEFAULT_MAX_RETRIES
    ladder: Ladder = Ladder.from_preset(DEFAULT_PRESET)
    levels: Ladder = DEFAULT_LEVELS
    ordered: bool = False
    dead_letters: bool = True
    dead_letter_subscription: str = naming.DEAD_LETTER_SUBSCRIPTION
    retry_topic: Converted[naming.TopicName | str | None, naming.TopicName] = Converted(
        _topic, None
    )
    dead_letter_topic: Converted[naming.TopicName | str | None, naming.TopicName] = Converted(
        _topic, None
    )
    name: str = ""
    generation: int = 0
    outage_breaker: OutageLimits | None = None
    ignore_outages: bool = False
    dead_letter_now: frozenset[str] = frozenset()
    sequenced: bool = False

    @property
    def longest_delay(self) -> timedelta:
        """Return the longest delay of `ladder` and `levels`."""
        return max(*self.ladder.rungs, *self.levels.rungs)

    @property
    def subscription_types(self) -> Mapping[naming.TopicName, SubscriptionType]:
        """Return the types of the subscriptions on the source topic and on the retry topic.

        The retry topic is always Shared, as for Java consumers: a broker refuses consumers of
        different types.
        """
        return {self.topic: self.subscription_type, self.retry_topic: SubscriptionType.SHARED}

    def __post_init__(self) -> None:
        """Validate all fields, and derive missing topic names."""
        _check_kinds(self)
        naming.TopicName.parse_whole(self.topic)
        naming.check_subscription(self.subscription)
        naming.check_subscription(self.dead_letter_subscription)
        check_max_retries(self.max_retries)
        check_order(self.subscription_type, ordered=self.ordered)
        check_sequenced(self.sequenced, ordered=self.ordered, dead_letters=self.dead_letters)
        for field, derive in _DERIVED:
            if getattr(self, field) is None:
                object.__setattr__(self, field, derive(self.topic, self.subscription))
        self._check_topics()

    @property
    def ledger_topic(self) -> naming.TopicName:
        """Return the topic that records which dead letters were moved by replays."""
        return naming.ledger_topic(self.dead_letter_topic)

    @property
    def sequences_topic(self) -> naming.TopicName:
        """Return the topic that records which keys have dead letters."""
        return naming.sequences_topic(self.dead_letter_topic)

    def _check_topics(self) -> None:
        if len(self.retry_topic.local) > naming.MAX_NAME:
            raise InvalidSpecError(
                f"topic names derived from topic and subscription exceed {naming.MAX_NAME} "
                "characters",
                got=self.retry_topic.local[:128] + "…",
                remedy="use a shorter subscription name",
            )
        for name in (self.retry_topic, self.dead_letter_topic):
            naming.check_sibling(name, self.topic)
        four = (self.topic, self.retry_topic, self.dead_letter_topic, self.ledger_topic)
        if len({*four}) < len(four) or (self.sequenced and self.sequences_topic in four):
            raise InvalidSpecError(
                "source, retry, dead-letter and ledger topic must be four different topics",
                got=", ".join(map(str, four)),
                remedy="use another naming scheme, or set other names",
            )


OUTAGE = "redrive.outage"
"""Metadata key of a producer on the retry topic by which a paused consumer publishes its outage;
the value is the cause. Statistics of the broker show it."""
BLOCKED_KEYS = "redrive.blocked-keys"
"""Metadata key of the same producer by which a consumer publishes keys that wait for the retry of a
message, as JSON: a list of `status.blockedKeys` of a RetryPolicy."""
MAX_BLOCKED_KEYS = 20
"""Highest number of blocked keys that a consumer publishes, and a status shows."""

MAX_WINDOW = 10_000
MIN_INTERVAL = timedelta(seconds=1)
MAX_INTERVAL = timedelta(hours=1)
MAX_PAUSE = timedelta(days=7)


@reads_directly
@dataclass(frozen=True)
class OutageLimits:
    """Limits of an outage: when a consumer pauses, and for how long.

    Attributes:
        min_messages: minimum number of different messages that failed for the cause, 1 … `window`.
        failure_percent: minimum percentage of outcomes in the window that failed for it.
        window: number of latest outcomes of this consumer, 1 … 10 000.
        max_probe_interval: maximum interval between probes with one message, after a back-off from
            1 s: 1 s … 1 h, in seconds or as a timedelta.
        max_pause: time after which a consumer resumes even in an outage, until a message succeeds:
            1 s … 7 days, in seconds or as a timedelta.
        count_not_retryable: True counts failures that `FailureRules` dead-letter at once, too.

    Raises:
        InvalidSpecError: a value is out of bounds.
    """

    min_messages: int = 10
    failure_percent: int = 50
    window: int = 100
    max_probe_interval: Converted[float | timedelta, timedelta] = Converted(
        functools.partial(to_timedelta, name="maxProbeInterval of an outage breaker"),
        timedelta(seconds=30),
    )
    max_pause: Converted[float | timedelta, timedelta] = Converted(
        functools.partial(to_timedelta, name="maxPause of an outage breaker"),
        timedelta(hours=6),
    )
    count_not_retryable: bool = True

    def __post_init__(self) -> None:
        """Validate all values."""
        if not isinstance(self.count_not_retryable, bool):
            raise InvalidSpecError(
                "count_not_retryable of an outage breaker must be of type bool",
                got=self.count_not_retryable,
                remedy="pass True or False, or leave it out",
            )
        _check("window", self.window, 1, MAX_WINDOW)
        _check("minMessages", self.min_messages, 1, self.window)
        _check("failurePercent", self.failure_percent, 1, 100)
        _check("maxProbeInterval", self.max_probe_interval, MIN_INTERVAL, MAX_INTERVAL)
        _check("maxPause", self.max_pause, MIN_INTERVAL, MAX_PAUSE)


def _check(name: str, value: int | timedelta, least: object, most: object) -> None:
    if not isinstance(value, type(least)) or isinstance(value, bool):
        raise InvalidSpecError(
            f"{name} of an outage breaker must be of type {type(least).__name__}",
            got=value,
            remedy=f"pass a value from {least} to {most}, or leave it out",
        )
    if not least <= value <= most:  # type: ignore[operator]  # each is of one type
        raise InvalidSpecError(
            f"{name} of an outage breaker must be from {least} to {most}",
            got=str(value),
            remedy="choose a value within these bounds, or leave it out",
        )


class OutcomeWindow:
    """Latest outcomes of a consumer: the cause of each failure, or success.

    Args:
        size: number of outcomes that are remembered.
    """

    def __init__(self, size: int) -> None:
        self._outcomes: deque[tuple[str, str] | None] = deque(maxlen=size)
        # Cause → message → number of its failures within the window.
        self._failures: dict[str, Counter[str]] = {}

    def add(self, failure: tuple[str, str] | None) -> None:
        """Add an outcome: cause and first id of a failed message; None for a success."""
        if len(self._outcomes) == self._outcomes.maxlen:
            self._forget(self._outcomes[0])
        self._outcomes.append(failure)
        if failure is not None:
            cause, first_id = failure
            self._failures.setdefault(cause, Counter())[first_id] += 1

    def is_outage(self, cause: str, limits: OutageLimits) -> bool:
        """Return True if so many messages failed for *cause* that they are not the problem.

        A message that fails repeatedly counts once.
        """
        failures = self._failures.get(cause, Counter())
        share = failures.total() * 100 >= limits.failure_percent * len(self._outcomes)
        return share and len(failures) >= limits.min_messages

    def _forget(self, failure: tuple[str, str] | None) -> None:
        if failure is None:
            return
        cause, first_id = failure
        failures = self._failures[cause]
        failures[first_id] -= 1
        if not failures[first_id]:
            del failures[first_id]
        if not failures:
            del self._failures[cause]
