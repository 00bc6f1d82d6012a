"""Health checks over the topic statistics of a policy.

What the statistics of a policy's topics show that needs a fix: an ordered tuple of checks; pure.

Called by `findings`. A published message stays as it is while its check still finds something:
figures that differ at each reading would be an Event each time.

How many of a subscription's deliveries were retries lately: a sliding window; pure.

One reading of a policy's statistics, and what was found before → what is found now; pure.

What waits in a policy's topics → its status, and when that is worth a write; pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from pydantic import ValidationError

from redrive.admin.model import AS_ARRAYS, BY_DEFAULT, RANGES, AckPersistence, SubscriptionStats
from redrive.api.conditions import StatusWarning
from redrive.api.retrypolicy import Backlog
from redrive.policy.model import Policy
from redrive.policy.values import format_duration
from redrive.reasons import Reason

Subscriptions = Mapping[str, SubscriptionStats]


_SHOWN = 5
_CAUSE = 128


@dataclass(frozen=True)
class Thresholds:
    """From where on a check warns.

    Attributes:
        ack_share: the share of what a broker remembers of acknowledgements.
        ack_share_cleared: below this share the warning ends; lower, so that it does not come and
            go every minute.
        deliveries: fewer within the window are no storm.
        retry_share: more of the deliveries than this are one.
        overdue: retries that are due for longer than this should have been delivered.
        undelivered_seconds: nothing else was delivered for so long either.
        stranded_readings: so many consecutive readings show stranded chunks. A broker that delivers
            thousands of messages a second shows some in one of ten.
        quota_share: from this share of the quota on a dead-letter topic is nearly full.
        quota_share_cleared: below this share the warning ends.
    """

    ack_share: float = 0.5
    ack_share_cleared: float = 0.45
    deliveries: int = 100
    retry_share: float = 0.5
    overdue: timedelta = timedelta(minutes=5)
    undelivered_seconds: float = 60.0
    stranded_readings: int = 5
    quota_share: float = 0.8
    quota_share_cleared: float = 0.7


THRESHOLDS = Thresholds()


@dataclass(frozen=True)
class CheckInput:
    """What the checks read.

    Attributes:
        source: the policy's subscription on the source topic; None where there is none.
        retry: all subscriptions of the retry topic, by name.
        dead_letter: those of the dead-letter topic; empty where the policy discards.
        unconsumed_before: whether the previous reading found `unconsumed`, too.
        published: the warnings of the policy so far, by reason.
        now: the moment before the statistics were read.
        quota: the bytes that a partition of the dead-letter topic may hold, be that set by the
            policy, on the topic, on its namespace or at the broker; None is any.
        persistence: what the broker remembers of acknowledgements.
        acknowledged: how many messages of the retry topic are acknowledged behind one that is not,
            see `Admin.acknowledged`; 0 where that was not read.
        outages: what each consumer that has paused shows as the cause.
        stranded_readings: how many consecutive readings show stranded chunks, this one included.
    """

    policy: Policy
    source: SubscriptionStats | None
    retry: Mapping[str, SubscriptionStats]
    dead_letter: Mapping[str, SubscriptionStats]
    deliveries: Deliveries
    unconsumed_before: bool
    published: Mapping[str, StatusWarning]
    now: datetime
    quota: int | None = None
    persistence: AckPersistence = BY_DEFAULT
    acknowledged: int = 0
    outages: tuple[str, ...] = ()
    stranded_readings: int = 0

    @property
    def retries(self) -> SubscriptionStats | None:
        """Return the policy's own subscription on the retry topic."""
        return self.retry.get(self.policy.subscription)

    @property
    def unconsumed(self) -> bool:
        """Whether the source topic has consumers, and the retry topic has none."""
        if self.source is None or self.retries is None or not self.policy.max_retries:
            return False
        return self.source.consumers > 0 and self.retries.consumers == 0


def acknowledged_range_has_holes(given: CheckInput, limits: Thresholds) -> StatusWarning | None:
    """Find a retry subscription with half as much behind its holes as the broker remembers."""
    broker, published = given.persistence, given.published.get(Reason.ACK_HOLES)
    holes = 0 if given.retries is None else given.retries.ack_holes
    # Each range has a message at least: with many of them, how many they have is not read.
    found = max(holes, given.acknowledged) if broker.whole_ledgers else holes
    share = limits.ack_share if published is None else limits.ack_share_cleared
    if not holes or found < share * broker.limit:
        return None
    what, remembered = (
        ("acknowledged messages", f"whole ledgers of them ({AS_ARRAYS}=true) until there are")
        if broker.whole_ledgers
        else ("ranges of acknowledged messages", "at most")
    )
    origin = "as it is configured" if broker.configured else "the default of its release"
    return published or StatusWarning(
        Reason.ACK_HOLES,
        f"subscription {given.policy.subscription} of {given.policy.retry_topic} has many {what} "
        "behind retries that still wait, and when the broker unloads the topic it remembers "
        f"{remembered} {broker.limit} ({RANGES}, {origin}): beyond that, processed messages may "
        "come again; "
        f"got {found}; make the delays more alike, give the retry topic more partitions "
        f"(retry.partitions), or raise {RANGES} at the broker",
    )


def foreign_subscriptions_take_messages(given: CheckInput, _: Thresholds) -> StatusWarning | None:
    """Find durable subscriptions on the policy's topics that are not its own.

    Those of readers do not last, and names with two underscores are the broker's own.
    """
    policy = given.policy
    own = (
        (policy.retry_topic, given.retry, policy.subscription),
        (policy.dead_letter_topic, given.dead_letter, policy.dead_letter_subscription),
    )
    found = [
        f"{name} on {topic.local}"
        for topic, subscriptions, ours in own
        for name, subscription in sorted(subscriptions.items())
        if name != ours and subscription.durable and not name.startswith("__")
    ]
    if not found:
        return None
    more = [f"{len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return StatusWarning(
        Reason.FOREIGN_SUBSCRIPTION,
        "subscriptions that are not this policy's take messages of its retry or dead-letter "
        "topic, as one by a pattern does that matches these topics too; got "
        f"{', '.join([*found[:_SHOWN], *more])}; have the pattern leave these topics out, then "
        "delete the subscriptions there",
    )


def retry_topic_is_not_consumed(given: CheckInput, _: Thresholds) -> StatusWarning | None:
    """Find consumers of the source topic while there is none on the retry topic, twice in a row.

    A consumer that is just starting has the one for a moment before the other.
    """
    published = given.published.get(Reason.RETRY_TOPIC_NOT_CONSUMED)
    if not given.unconsumed or (published is None and not given.unconsumed_before):
        return None
    policy = given.policy
    return StatusWarning(
        Reason.RETRY_TOPIC_NOT_CONSUMED,
        f"subscription {policy.subscription} has consumers on {policy.topic.local} and none on "
        f"{policy.retry_topic.local}, so messages that are to be retried stay there; have the "
        "consumers subscribe to both, as redrive's RetryConsumer and Java's enableRetry do",
    )


def subscription_types_differ(given: CheckInput, _: Thresholds) -> StatusWarning | None:
    """Find connected consumers beside which the broker refuses all that follow the policy."""
    policy = given.policy
    connected = {policy.topic: given.source, policy.retry_topic: given.retries}
    others = [
        f"{stats.type} on {topic.local}, which should be {kind.of_broker}"
        for topic, kind in policy.subscription_types.items()
        for stats in [connected[topic]]
        if stats is not None and stats.type not in {"", kind.of_broker}
    ]
    if not others:
        return None
    return StatusWarning(
        Reason.SUBSCRIPTION_TYPE_DIFFERS,
        f"consumers of subscription {policy.subscription} are connected with another type than the "
        "policy's, and while they are the broker refuses those of the policy's type with "
        f"ConsumerBusy, so that no rollout ends; got {'; '.join(others)}; stop all consumers of "
        "the subscription, then start them, or change subscriptionType to theirs; the retry topic "
        "is always Shared, and Go's client gives it the type of the source topic",
    )


def most_deliveries_are_retries(given: CheckInput, limits: Thresholds) -> StatusWarning | None:
    """Find that more than half of the deliveries were retries; few deliveries are no storm."""
    window, published = given.deliveries, given.published.get(Reason.RETRY_STORM)
    together = window.first + window.retries
    if together < limits.deliveries or window.retries <= limits.retry_share * together:
        # After a restart, too few deliveries were counted to end it.
        return None if window.is_whole or together >= limits.deliveries else published
    return published or StatusWarning(
        Reason.RETRY_STORM,
        f"most deliveries to subscription {given.policy.subscription} are retries: retries "
        "are for single messages that fail, and what holds up all of them they only make worse; "
        f"got {window.retries} retries among {together} deliveries within ten minutes; fix what "
        "the consumers depend on, or have them slow down (max_rate) or pause until it is",
    )


def retries_are_overdue(given: CheckInput, limits: Thresholds) -> StatusWarning | None:
    """Find a retry topic with consumers whose oldest message is due, while nothing is delivered.

    A message is due once the longest delay of the policy is over: what a consumer asks for beyond
    that (`delay=`) is known to the message alone.
    """
    retries, window, policy = given.retries, given.deliveries, given.policy
    if retries is None or retries.oldest is None or not retries.consumers:
        return None
    longest = policy.longest_delay
    is_due = given.now - retries.oldest > longest + limits.overdue
    is_delivered = retries.unacknowledged > 0 or window.retries > 0
    if not is_due or is_delivered or window.now - window.since < limits.undelivered_seconds:
        return None
    return given.published.get(Reason.RETRIES_OVERDUE) or StatusWarning(
        Reason.RETRIES_OVERDUE,
        f"messages wait in {policy.retry_topic.local} for longer than any delay of the policy, and "
        "the broker delivers none, although consumers are connected; got a message published at "
        f"{retries.oldest:%Y-%m-%dT%H:%M:%SZ} and a longest delay of {format_duration(longest)}; "
        "if the consumers are neither paused nor ask for longer delays, have the broker load the "
        f"topic again: pulsar-admin topics unload {policy.retry_topic}",
    )


def chunks_are_stranded(given: CheckInput, limits: Thresholds) -> StatusWarning | None:
    """Find unacknowledged messages that no connected consumer has, in several readings in a row.

    A broker assigns all chunks of a message to one consumer of a Shared subscription, also after
    that consumer has left.
    """
    policy, published = given.policy, given.published.get(Reason.CHUNKS_STRANDED)
    own = ((policy.topic, given.source), (policy.retry_topic, given.retries))
    chunks = {topic: stats.stranded for topic, stats in own if stats is not None and stats.stranded}
    if not chunks or (published is None and given.stranded_readings < limits.stranded_readings):
        return None
    return published or StatusWarning(
        Reason.CHUNKS_STRANDED,
        f"a consumer of subscription {policy.subscription} left between two chunks of a large "
        "message, and the broker delivers that message to no other consumer; got "
        f"{sum(chunks.values())} chunks; load the topic again, which delivers all unacknowledged "
        f"messages again: {', '.join(f'pulsar-admin topics unload {topic}' for topic in chunks)}",
    )


def quota_is_nearly_reached(given: CheckInput, limits: Thresholds) -> StatusWarning | None:
    """Find a dead-letter topic that will soon refuse dead letters, which then wait in consumers."""
    dead_letter = given.dead_letter.get(given.policy.dead_letter_subscription)
    published = given.published.get(Reason.QUOTA_NEARLY_REACHED)
    share = limits.quota_share if published is None else limits.quota_share_cleared
    if given.quota is None or dead_letter is None or dead_letter.bytes < share * given.quota:
        return None
    return published or StatusWarning(
        Reason.QUOTA_NEARLY_REACHED,
        f"the dead-letter topic {given.policy.dead_letter_topic.local} nears its backlog quota, "
        "beyond which the broker refuses dead letters, and consumers keep them; got "
        f"{dead_letter.bytes} of {given.quota} bytes; replay or delete dead letters, or set a "
        "higher deadLetter.backlogQuota",
    )


def consumers_have_paused(given: CheckInput, _: Thresholds) -> StatusWarning | None:
    """Find consumers that show an outage; not how many, for that changes all the time."""
    if not given.outages:
        return None
    # Whoever may produce to the retry topic writes them.
    causes = sorted({ascii(cause)[1:-1][:_CAUSE] for cause in given.outages})
    more = [f"{len(causes) - _SHOWN} more"] if len(causes) > _SHOWN else []
    return StatusWarning(
        Reason.OUTAGE_SUSPECTED,
        f"consumers of subscription {given.policy.subscription} have paused, because most messages "
        f"fail for one cause, and try single ones; got {', '.join([*causes[:_SHOWN], *more])}; fix "
        "what they depend on, and they go on by themselves; to have them go on all the same, and "
        "use up retries, run `kubectl redrive ignore-outage POLICY --for 1h`",
    )


CHECKS: tuple[Callable[[CheckInput, Thresholds], StatusWarning | None], ...] = (
    acknowledged_range_has_holes,
    foreign_subscriptions_take_messages,
    retry_topic_is_not_consumed,
    subscription_types_differ,
    most_deliveries_are_retries,
    retries_are_overdue,
    chunks_are_stranded,
    quota_is_nearly_reached,
    consumers_have_paused,
)
REASONS = frozenset(
    {
        Reason.ACK_HOLES,
        Reason.FOREIGN_SUBSCRIPTION,
        Reason.RETRY_TOPIC_NOT_CONSUMED,
        Reason.SUBSCRIPTION_TYPE_DIFFERS,
        Reason.RETRY_STORM,
        Reason.RETRIES_OVERDUE,
        Reason.CHUNKS_STRANDED,
        Reason.QUOTA_NEARLY_REACHED,
        Reason.OUTAGE_SUSPECTED,
    }
)


def check(given: CheckInput, limits: Thresholds) -> tuple[StatusWarning, ...]:
    """Return the warnings of all checks."""
    found = (each(given, limits) for each in CHECKS)
    return tuple(warning for warning in found if warning is not None)


WINDOW_SECONDS = 600.0


@dataclass(frozen=True)
class _Step:
    """What was delivered between two looks.

    Attributes:
        at: the moment of the later look.
    """

    at: float
    first: int
    retries: int


@dataclass(frozen=True)
class Deliveries:
    """What was delivered in the last ten minutes, by counters that a broker sets back at times.

    Made by the first look, it has counted nothing yet. It keeps one value for each look within the
    window.

    Attributes:
        since: the moment of the first look, in the seconds of any clock that never goes back.
        now: the moment of the last look.
        source: the counter of the source topic's subscription at the last look; None where that
            does not exist.
        retry: that of the retry topic's.
    """

    since: float
    now: float
    source: int | None
    retry: int | None
    _steps: tuple[_Step, ...] = ()

    @classmethod
    def begin(cls, now: float, source: int | None, retry: int | None) -> Deliveries:
        """Take note of the counters as they are at the first look."""
        return cls(now, now, source, retry)

    def seen(self, now: float, source: int | None, retry: int | None) -> Deliveries:
        """Return the window after another look."""
        step = _Step(now, _since(self.source, source), _since(self.retry, retry))
        steps = (kept for kept in self._steps if kept.at > now - WINDOW_SECONDS)
        return replace(self, now=now, source=source, retry=retry, _steps=(*steps, step))

    @property
    def first(self) -> int:
        """Return how many messages were delivered from the source topic."""
        return sum(step.first for step in self._steps)

    @property
    def retries(self) -> int:
        """Return how many messages were delivered from the retry topic."""
        return sum(step.retries for step in self._steps)

    @property
    def last(self) -> tuple[int, int]:
        """Return first deliveries and retries since the look before the last."""
        return (self._steps[-1].first, self._steps[-1].retries) if self._steps else (0, 0)

    @property
    def is_whole(self) -> bool:
        """Whether the looks go back for as long as the window."""
        return self.now - self.since >= WINDOW_SECONDS


def _since(before: int | None, now: int | None) -> int:
    """Return by how much a counter has grown.

    One that fell was set back, maybe for a single partition of many: what it grew by is not known,
    and to guess it from what is left could make a storm of nothing.
    """
    if before is None or now is None or now < before:
        return 0
    return now - before


@dataclass(frozen=True)
class Reading:
    """The statistics of a policy's three topics.

    Attributes:
        begun: the moment before the first of them was read.
        seconds: the same of a clock that never goes back.
        requested: whether the reading was requested, maybe right after another.
        dead_letter: empty where the policy discards.
        quota: see `CheckInput`.
        persistence: see `CheckInput`.
        acknowledged: see `CheckInput`.
        outages: see `CheckInput`.
        published: messages stored in each partition of the dead-letter topic, see `TopicStats`.
    """

    policy: Policy
    begun: datetime
    seconds: float
    requested: bool
    quota: int | None
    source: Subscriptions
    retry: Subscriptions
    dead_letter: Subscriptions
    persistence: AckPersistence = BY_DEFAULT
    acknowledged: int = 0
    outages: tuple[str, ...] = ()
    published: Mapping[str, int] = field(default_factory=dict)

    @property
    def subscriptions(self) -> tuple[SubscriptionStats | None, SubscriptionStats | None]:
        """Return the policy's subscription on the source topic and on the retry topic."""
        name = self.policy.subscription
        return self.source.get(name), self.retry.get(name)

    @property
    def shows_stranded(self) -> bool:
        """Return True if unacknowledged messages are with no connected consumer."""
        return any(stats is not None and stats.stranded > 0 for stats in self.subscriptions)

    @property
    def dead_letter_bytes(self) -> int:
        """Return the size of the dead letters, in the partition where most are."""
        stats = self.dead_letter.get(self.policy.dead_letter_subscription)
        return 0 if stats is None else stats.bytes

    @property
    def backlog(self) -> Backlog:
        """Return what waits in the policy's own subscriptions."""
        return backlog_of(
            self.retry.get(self.policy.subscription),
            self.dead_letter.get(self.policy.dead_letter_subscription),
            discards=not self.policy.dead_letters,
            now=self.begun,
        )


@dataclass(frozen=True)
class Findings:
    """What the readings of one policy have found so far.

    Attributes:
        unconsumed: see `CheckInput`; at the last reading.
        stranded_readings: see `CheckInput`.
        dead_letters: messages stored in the dead-letter topic since the reading before.
        published: the last known count of each partition, see `Reading`.
    """

    deliveries: Deliveries
    unconsumed: bool
    warnings: tuple[StatusWarning, ...]
    stranded_readings: int = 0
    dead_letters: int = 0
    published: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        reading: Reading,
        before: Findings | None,
        published: Iterable[StatusWarning],
        limits: Thresholds,
    ) -> Findings:
        """Return what is found by now.

        Args:
            reading: the latest one.
            before: what was found until then; None if this is the first reading.
            published: the policy's warnings so far.
            limits: from where on a check warns.
        """
        source, retry = reading.subscriptions
        counters = [None if found is None else found.delivered for found in (source, retry)]
        window = (
            Deliveries.begin(reading.seconds, *counters)
            if before is None
            else before.deliveries.seen(reading.seconds, *counters)
        )
        readings = 0 if before is None else before.stranded_readings
        given = CheckInput(
            policy=reading.policy,
            source=source,
            retry=reading.retry,
            dead_letter=reading.dead_letter,
            deliveries=window,
            # A requested reading may come right after another: too early for a second finding.
            unconsumed_before=before is not None and before.unconsumed and not reading.requested,
            published={warning.reason: warning for warning in published},
            now=reading.begun,
            quota=reading.quota,
            persistence=reading.persistence,
            acknowledged=reading.acknowledged,
            outages=reading.outages,
            # A requested reading may come right after another, and is no further one.
            stranded_readings=readings + (not reading.requested) if reading.shows_stranded else 0,
        )
        stored = {} if before is None else before.published
        return cls(
            window,
            given.unconsumed,
            check(given, limits),
            given.stranded_readings,
            stored_since(stored, reading.published),
            {**stored, **reading.published},  # an answer may lack a partition
        )


def stored_since(before: Mapping[str, int], now: Mapping[str, int]) -> int:
    """Return how many messages were stored between two readings of a topic.

    The first count of a partition counts nothing. A count that fell began at 0 since, when the
    broker loaded the partition: messages that were stored just before that are not counted.
    """
    steps = ((before[part], count) for part, count in now.items() if part in before)
    return sum(count - earlier if count >= earlier else count for earlier, count in steps)


BACKLOG_SHARE = 0.1
"""A count that differs by more than this share of what is written is written at once."""
BACKLOG_CHANGED_AFTER = timedelta(minutes=10)
"""A smaller difference is written once what is written is this old."""
BACKLOG_UNCHANGED_AFTER = timedelta(hours=1)
"""Unchanged figures are written again once they are this old: they were confirmed since."""


def backlog_of(
    retry: SubscriptionStats | None,
    dead_letter: SubscriptionStats | None,
    *,
    discards: bool,
    now: datetime,
) -> Backlog:
    """Return what waits in the policy's own subscriptions; one that is missing has nothing.

    Args:
        retry: the policy's subscription on its retry topic.
        dead_letter: the one on its dead-letter topic.
        discards: whether the policy has no dead-letter topic.
        now: when the two were read.
    """
    dead = None if discards else dead_letter
    oldest = None if dead is None else dead.oldest
    return Backlog(
        retry=0 if retry is None else retry.backlog,
        retry_due=0 if retry is None else retry.due,
        dead_letter=None if discards else 0 if dead is None else dead.backlog,
        # In whole seconds, as it is written: else each look would find it changed.
        oldest_dead_letter_time=None if oldest is None else oldest.replace(microsecond=0),
        observed_time=now.replace(microsecond=0),
    )


def is_backlog_worth_writing(written: Backlog | None, found: Backlog) -> bool:
    """Whether *found* is to take the place of *written*.

    What begins, ends or moves much is written at once, a little more or less every ten minutes,
    and unchanged figures once an hour: a thousand policies would else be a thousand writes a
    minute.
    """
    if written is None or written.observed_time is None or found.observed_time is None:
        return True
    age = found.observed_time - written.observed_time
    if written == found.model_copy(update={"observed_time": written.observed_time}):
        return age >= BACKLOG_UNCHANGED_AFTER
    return (
        age >= BACKLOG_CHANGED_AFTER
        or _moved(written.retry, found.retry)
        or _moved(written.dead_letter, found.dead_letter)
    )


def read_backlog(status: Mapping[str, Any]) -> Backlog | None:
    """Return what a policy's *status* holds; None for what can't be read, to be written again."""
    written = status.get("backlog")
    try:
        return None if written is None else Backlog.model_validate(written)
    except ValidationError:
        return None


def backlog_patch(backlog: Backlog) -> dict[str, Any]:
    """Return the merge patch of a status: what is None has to be taken away."""
    return {"backlog": backlog.model_dump(mode="json", by_alias=True)}


def _moved(before: int | None, now: int | None) -> bool:
    if before is None or now is None:
        return before is not now
    return bool(before) != bool(now) or abs(now - before) > BACKLOG_SHARE * before
