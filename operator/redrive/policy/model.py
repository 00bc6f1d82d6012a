"""`Policy`: what every consumer and every replay of one subscription must know.

The operator makes it from a RetryPolicy resource and writes it with `codec` for consumers to load.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from redrive.errors import InvalidSpecError
from redrive.policy import naming
from redrive.policy.converted import Converted
from redrive.policy.ladder import DEFAULT_LEVELS, DEFAULT_PRESET, Ladder
from redrive.policy.outage import OutageLimits

DEFAULT_MAX_RETRIES = 16
MAX_RETRIES_LIMIT = 1_000


class SubscriptionType(enum.StrEnum):
    """How the consumers of the source topic share its messages.

    Only Shared and Key_Shared subscriptions honour a delay: on the others a broker delivers
    delayed messages at once. The operator takes no others; a policy in a file may have them.
    """

    SHARED = "Shared"
    KEY_SHARED = "Key_Shared"
    EXCLUSIVE = "Exclusive"
    FAILOVER = "Failover"

    @property
    def honours_delays(self) -> bool:
        """Whether a broker delivers a delayed message when its delay is over."""
        return self in {SubscriptionType.SHARED, SubscriptionType.KEY_SHARED}

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
            remedy="use Key_Shared, or ordering None",
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
        sequenced: whether messages of a key that has a dead letter follow it, unhandled, until a
            replay has brought all of them back in order.

    Raises:
        InvalidSpecError: `max_retries`, `subscription` or `topic` is out of bounds, or the names
            given or derived from the last two are, or lead to one and the same topic; or it is
            ordered, and its subscription Shared.
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
    sequenced: bool = False

    def __post_init__(self) -> None:
        """Refuse what no consumer could follow."""
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
