"""The retry policy as a value, and the limits of an outage.

`Policy`: what every consumer and every replay of one subscription must know.

The operator makes it from a RetryPolicy resource and writes it with `codec` for consumers to load.

When failures count as an outage of what handlers depend on: limits, and the window of outcomes.

One message that fails is retried. When most fail for one cause, retries are of no use: the consumer
pauses instead, and probes. `delivery.middleware.outage_breaker` does that; pure.
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
from redrive.policy.values import Converted, to_timedelta

DEFAULT_MAX_RETRIES = 16
MAX_RETRIES_LIMIT = 1_000


class SubscriptionType(enum.StrEnum):
    """How the consumers of the source topic share its messages.

    Only Shared and KeyShared subscriptions honour a delay: on the others a broker delivers
    delayed messages at once. The operator takes no others; a policy in a file may have them.
    """

    SHARED = "Shared"
    KEY_SHARED = "KeyShared"
    EXCLUSIVE = "Exclusive"
    FAILOVER = "Failover"

    @property
    def honours_delays(self) -> bool:
        """Whether a broker delivers a delayed message when its delay is over."""
        return self in {SubscriptionType.SHARED, SubscriptionType.KEY_SHARED}

    @property
    def of_broker(self) -> str:
        """Its name in the API and the statistics of brokers."""
        return "Key_Shared" if self is SubscriptionType.KEY_SHARED else str(self)

    @classmethod
    def parse(cls, text: str) -> SubscriptionType:
        """Read a subscription type.

        Raises:
            InvalidSpecError: there is no such type.
        """
        try:
            return cls(text)
        except ValueError:
            raise InvalidSpecError(
                "there is no such type of subscription",
                got=text[:64],
                remedy=f"use one of {', '.join(cls)}",
            ) from None


def check_max_retries(count: int) -> int:
    """Return *count* if a message can be retried that often, from 0 to 1 000 times.

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
    """Pass if a policy can be *ordered* with a subscription of *kind*.

    Raises:
        InvalidSpecError: consumers of a Shared one get messages of the same key.
    """
    if ordered and kind is SubscriptionType.SHARED:
        raise InvalidSpecError(
            "an ordered policy needs a subscription that keeps the messages of a key together",
            got=kind.value,
            remedy="use KeyShared, or ordering None",
        )


def check_sequenced(sequenced: bool, *, ordered: bool, dead_letters: bool) -> None:  # noqa: FBT001 - a field
    """Pass if dead letters can be *sequenced*.

    Raises:
        InvalidSpecError: there is no order of keys, or there are no dead letters.
    """
    if sequenced and not (ordered and dead_letters):
        raise InvalidSpecError(
            "only an ordered policy that keeps dead letters can keep their sequence",
            got=f"ordered={ordered}, dead letters={dead_letters}",
            remedy="set ordering to PerKey and enable dead letters, or leave sequenced out",
        )


def _topic(given: object) -> naming.TopicName:
    if given is None or isinstance(given, naming.TopicName):
        return given  # type: ignore[return-value]  # None is derived, once all is there
    if not isinstance(given, str):
        raise InvalidSpecError(
            "a topic is a string, or a TopicName",
            got=given,
            remedy="write it like persistent://tenant/namespace/name",
        )
    return naming.TopicName.parse_whole(given)


_FLAGS = ("ordered", "dead_letters", "ignore_outages", "sequenced")
_KINDS: dict[str, tuple[type, str]] = {
    "subscription": (str, "give its name"),
    "dead_letter_subscription": (str, "give its name"),
    "name": (str, "give the name of a RetryPolicy as namespace/name, or leave it out"),
    "subscription_type": (SubscriptionType, "give one such as SubscriptionType.KEY_SHARED"),
    "max_retries": (int, "give a whole number such as 3"),
    "generation": (int, "give a whole number, or leave it out"),
    "ladder": (Ladder, 'give one such as Ladder.from_delays(["10s", "1m"])'),
    "levels": (Ladder, 'give one such as Ladder.from_delays(["10s", "1m"])'),
    "dead_letter_now": (frozenset, 'give origins, such as frozenset({"4711:3:0"})'),
    **dict.fromkeys(_FLAGS, (bool, "give True or False")),
}
"""The types of the fields that are not converted, and the remedy for another one."""


def _check_kinds(policy: Policy) -> None:
    for name, (kind, remedy) in _KINDS.items():
        value = getattr(policy, name)
        # Python's True is an int, and no count.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise InvalidSpecError(
                f"{name} of a policy must be of type {kind.__name__}", got=value, remedy=remedy
            )
    limits = policy.outage_breaker
    if limits is not None and not isinstance(limits, OutageLimits):
        raise InvalidSpecError(
            "outage_breaker of a policy must be of type OutageLimits",
            got=limits,
            remedy="give OutageLimits(), or leave it out",
        )


_DERIVED = (
    ("retry_topic", naming.retry_topic),
    ("dead_letter_topic", naming.dead_letter_topic),
)


@dataclass(frozen=True)
class Policy:
    """How failed messages of one (topic, subscription) are retried and where they end.

    Attributes:
        name: the RetryPolicy it was made from, as `namespace/name`; for logs.
        generation: that resource's `metadata.generation`; 0 for a policy made by hand.
        topic: the source topic; never a single partition. Topics may be given as strings.
        max_retries: retries after the first delivery, 0 … 1 000: N retries make N + 1 attempts.
        ladder: what "the next delay" means.
        ordered: whether a failed message is retried in its consumer, before those of its key that
            came later; else it waits in the retry topic, and they overtake it.
        levels: what `level=k` means, rung k; a level above the highest means the highest.
        dead_letters: whether a message that has used up its retries is kept in the dead-letter
            topic; else it is discarded, and there is no such topic.
        retry_topic: where messages wait for their next attempt; left out, it is named after
            topic and subscription by the scheme `pulsar`.
        dead_letter_subscription: what keeps dead letters in that topic, and what replays read.
        dead_letter_topic: where messages rest that have used up their attempts, or would if the
            policy kept them; left out, it is named like the retry topic.
        outage_breaker: when consumers pause because what they depend on is down; None if they
            don't.
        ignore_outages: whether consumers go on all the same: an operator's override.
        dead_letter_now: origins of messages that are dead-lettered at their next failure: an
            operator's override. It has no effect where the policy keeps no dead letters.
        sequenced: whether messages of a key that has a dead letter follow it, unhandled, until a
            replay has brought all of them back in order.

    Raises:
        InvalidSpecError: a field is of another type; `max_retries`, `subscription` or `topic` is
            out of bounds, or the names given or derived from the last two are, or lead to one and
            the same topic; or it is ordered, and its subscription Shared.
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

        The retry topic is always Shared: Java consumers do the same, and a broker refuses consumers
        of different types.
        """
        return {self.topic: self.subscription_type, self.retry_topic: SubscriptionType.SHARED}

    def __post_init__(self) -> None:
        """Refuse what no consumer could follow."""
        _check_kinds(self)
        naming.TopicName.parse_whole(str(self.topic))
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
                f"topics named after topic and subscription exceed {naming.MAX_NAME} characters",
                got=self.retry_topic.local[:128] + "…",
                remedy="use a shorter subscription name",
            )
        for name in (self.retry_topic, self.dead_letter_topic):
            naming.check_sibling(name, self.topic)
        four = (self.topic, self.retry_topic, self.dead_letter_topic, self.ledger_topic)
        if len({*four}) < len(four) or (self.sequenced and self.sequences_topic in four):
            raise InvalidSpecError(
                "source, retry, dead-letter and ledger topic are four topics",
                got=", ".join(map(str, four)),
                remedy="use another naming scheme, or give other names",
            )


BEACON = "redrive.outage"
"""What the broker's statistics show of a consumer that has paused: a producer on the retry topic
with this in its metadata, and the cause as the value."""

MAX_WINDOW = 10_000
MIN_INTERVAL = timedelta(seconds=1)
MAX_INTERVAL = timedelta(hours=1)
MAX_PAUSE = timedelta(days=7)


@dataclass(frozen=True)
class OutageLimits:
    """When a consumer pauses because what its handler depends on is down, and for how long.

    Attributes:
        min_messages: so many different messages have failed for the cause, 1 … `window`.
        failure_percent: and so many of a hundred outcomes in the window are failures for it.
        window: of so many outcomes, the latest of this consumer, 1 … 10 000.
        max_probe_interval: one message is tried after 1 s, then with back-off, and at least this
            often: 1 s … 1 h, in seconds or as a timedelta.
        max_pause: after this a consumer goes on as if there were no outage, until a message
            succeeds: 1 s … 7 days, in seconds or as a timedelta.
        count_not_retryable: whether failures that `FailureRules` dead-letter at once count, too.

    Raises:
        InvalidSpecError: one of them is out of bounds.
    """

    min_messages: int = 10
    failure_percent: int = 50
    window: int = 100
    max_probe_interval: Converted[float | timedelta, timedelta] = Converted(
        functools.partial(to_timedelta, what="maxProbeInterval of an outage breaker"),
        timedelta(seconds=30),
    )
    max_pause: Converted[float | timedelta, timedelta] = Converted(
        functools.partial(to_timedelta, what="maxPause of an outage breaker"),
        timedelta(hours=6),
    )
    count_not_retryable: bool = True

    def __post_init__(self) -> None:
        """Refuse what no consumer could follow."""
        if not isinstance(self.count_not_retryable, bool):
            raise InvalidSpecError(
                "count_not_retryable of an outage breaker must be of type bool",
                got=self.count_not_retryable,
                remedy="give True or False, or leave it out",
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
            remedy=f"give a value from {least} to {most}, or leave it out",
        )
    if not least <= value <= most:  # type: ignore[operator]  # each is of one type
        raise InvalidSpecError(
            f"{name} of an outage breaker is from {least} to {most}",
            got=str(value),
            remedy="choose a value within these bounds, or leave it out",
        )


class OutcomeWindow:
    """The latest outcomes of a consumer: for which cause a message failed, or none.

    Args:
        size: how many are remembered.
    """

    def __init__(self, size: int) -> None:
        self._outcomes: deque[tuple[str, str] | None] = deque(maxlen=size)
        # By cause, how often each message has failed for it, as far as the window goes back.
        self._failures: dict[str, Counter[str]] = {}

    def add(self, failure: tuple[str, str] | None) -> None:
        """Note one outcome: the cause and the first id of a message that failed for it."""
        if len(self._outcomes) == self._outcomes.maxlen:
            self._forget(self._outcomes[0])
        self._outcomes.append(failure)
        if failure is not None:
            cause, first_id = failure
            self._failures.setdefault(cause, Counter())[first_id] += 1

    def is_outage(self, cause: str, limits: OutageLimits) -> bool:
        """Whether so many messages have failed for *cause* that single ones are not to blame.

        One message that fails again and again is one message.
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
