"""Health checks over the topic statistics of a policy; pure.

`findings` reads their input from the statistics. A published warning keeps its message while its
check still fails: new figures at each reading would be an Event each time.

`Deliveries` counts first deliveries and retries in a sliding window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from redrive.admin.internal_stats import AS_ARRAYS, BY_DEFAULT, RANGES, AckPersistence
from redrive.admin.model import SubscriptionStats
from redrive.admin.policies import (
    BY_AGE,
    DEFAULT_MESSAGE_SIZE,
    MAX_CONSUMERS,
    MAX_CONSUMERS_OF_SUBSCRIPTION,
    MAX_MESSAGE_SIZE,
    MAX_PRODUCERS,
    MAX_SUBSCRIPTIONS,
    Limits,
)
from redrive.api.conditions import StatusWarning, first_of
from redrive.api.retrypolicy import Backlog, BlockedKey
from redrive.policy.model import Policy, SubscriptionType
from redrive.policy.naming import TopicName
from redrive.policy.values import format_duration
from redrive.reasons import Reason

_CAUSE = 128


@dataclass(frozen=True)
class Thresholds:
    """Thresholds of the checks.

    Attributes:
        ack_share: warn from this share of the acknowledgements that a broker persists.
        ack_share_cleared: clear the warning below this share. It is lower, so that the warning does
            not flap.
        deliveries: minimum deliveries within the window for a retry storm.
        retry_share: a retry storm has a larger share of retries.
        overdue: a due retry should have been delivered after this time.
        undelivered_seconds: minimum time without any delivery of retries.
        stranded_readings: consecutive readings with stranded chunks. A broker that delivers
            thousands of messages a second shows some in one of ten readings.
        quota_share: warn from this share of the quota of the dead-letter topic.
        quota_share_cleared: clear the warning below this share.
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
class Reading:
    """Statistics of a policy's three topics.

    Attributes:
        begun: the moment before the first topic was read.
        seconds: the same moment of a monotonic clock.
        requested: True if the reading was requested, possibly just after another.
        source: all subscriptions of the source topic, by name.
        retry: those of the retry topic.
        dead_letter: those of the dead-letter topic; empty if the policy discards.
        quota: backlog quota in bytes of a partition of the dead-letter topic. It is set by the
            policy, the topic, its namespace or the broker; None means unlimited.
        persistence: limit of the acknowledgements that the broker persists.
        acknowledged: messages of the retry topic that are acknowledged out of order, see
            `Admin.acknowledged`; 0 if not read.
        outages: cause that each paused consumer publishes.
        refusals_known: True once all of `terminated`, `limits` and `types` were read: each reading
            reads a few of them.
        terminated: topics of the policy that accept no messages.
        limits: limits of the source topic and of each topic of the policy, if they were read. That
            of `BY_AGE` is the result of `age_limit`.
        producers: producers of each topic, or of a partition, whose number is limited.
        types: subscription types that the topics of consumers, and the dead-letter topic if Replays
            or Inspections read it, allow by a setting of their own.
        blocked_keys: keys that consumers publish as blocked.
        published: messages stored in each partition of the dead-letter topic, see `TopicStats`.
    """

    policy: Policy
    begun: datetime
    seconds: float
    requested: bool
    quota: int | None
    source: Mapping[str, SubscriptionStats]
    retry: Mapping[str, SubscriptionStats]
    dead_letter: Mapping[str, SubscriptionStats]
    persistence: AckPersistence = BY_DEFAULT
    acknowledged: int = 0
    outages: tuple[str, ...] = ()
    refusals_known: bool = True
    terminated: tuple[TopicName, ...] = ()
    limits: Mapping[TopicName, Limits] = field(default_factory=dict)
    producers: Mapping[TopicName, int] = field(default_factory=dict)
    types: Mapping[TopicName, frozenset[str]] = field(default_factory=dict)
    blocked_keys: tuple[BlockedKey, ...] = ()
    published: Mapping[str, int] = field(default_factory=dict)

    @property
    def own_source(self) -> SubscriptionStats | None:
        """Return the policy's subscription on the source topic; None if it does not exist."""
        return self.source.get(self.policy.subscription)

    @property
    def retries(self) -> SubscriptionStats | None:
        """Return the policy's subscription on the retry topic."""
        return self.retry.get(self.policy.subscription)

    @property
    def shows_stranded(self) -> bool:
        """Return True if unacknowledged messages belong to no connected consumer."""
        own = (self.own_source, self.retries)
        return any(stats is not None and stats.stranded > 0 for stats in own)

    @property
    def dead_letter_bytes(self) -> int:
        """Return the bytes of dead letters in the partition that has most."""
        stats = self.dead_letter.get(self.policy.dead_letter_subscription)
        return 0 if stats is None else stats.bytes

    @property
    def backlog(self) -> Backlog:
        """Return the backlog of the policy's own subscriptions."""
        return backlog_of(
            self.own_source,
            self.retries,
            self.dead_letter.get(self.policy.dead_letter_subscription),
            quota=self.quota,
            discards=not self.policy.dead_letters,
            now=self.begun,
        )


def backlog_of(  # noqa: PLR0913  figures of one policy
    source: SubscriptionStats | None,
    retry: SubscriptionStats | None,
    dead_letter: SubscriptionStats | None,
    *,
    quota: int | None = None,
    discards: bool,
    now: datetime,
) -> Backlog:
    """Return the backlog of the policy's own subscriptions; a missing one counts as 0.

    Args:
        source: subscription of the policy on its source topic; figures of a missing one are absent.
        retry: subscription on its retry topic.
        dead_letter: subscription on its dead-letter topic.
        quota: see `Reading`.
        discards: True if the policy has no dead-letter topic.
        now: time of the reading.
    """
    dead = None if discards else dead_letter
    oldest = None if dead is None else dead.oldest
    return Backlog(
        source=None if source is None else source.backlog,
        source_consumers=None if source is None else source.consumers,
        retry_consumers=0 if retry is None else retry.consumers,
        retry=0 if retry is None else retry.backlog,
        retry_due=0 if retry is None else retry.due,
        dead_letter=None if discards else 0 if dead is None else dead.backlog,
        # In whole seconds, as it is written: otherwise each poll would see a change.
        oldest_dead_letter_time=None if oldest is None else oldest.replace(microsecond=0),
        dead_letter_bytes=None if discards else 0 if dead is None else dead.bytes,
        dead_letter_quota_bytes=None if discards else quota,
        observed_time=now.replace(microsecond=0),
    )


@dataclass(frozen=True, kw_only=True)
class CheckInput(Reading):
    """A reading, and the results of those before it.

    Attributes:
        unconsumed_before: True if the previous reading was `unconsumed`, too.
        warnings: current warnings of the policy, by reason.
        stranded_readings: consecutive readings with stranded chunks, this one included.
    """

    deliveries: Deliveries
    unconsumed_before: bool
    warnings: Mapping[str, StatusWarning]
    stranded_readings: int = 0

    @property
    def unconsumed(self) -> bool:
        """Return True if the source topic has consumers and the retry topic has none."""
        if self.own_source is None or self.retries is None or not self.policy.max_retries:
            return False
        return self.own_source.consumers > 0 and self.retries.consumers == 0


def acknowledged_range_has_holes(facts: CheckInput, limits: Thresholds) -> StatusWarning | None:
    """Find a retry subscription that nears the limit of persisted acknowledgements."""
    broker, published = facts.persistence, facts.warnings.get(Reason.ACK_HOLES)
    holes = 0 if facts.retries is None else facts.retries.ack_holes
    # Each range has at least one message, so many ranges are enough to exceed the limit.
    count = max(holes, facts.acknowledged) if broker.whole_ledgers else holes
    share = limits.ack_share if published is None else limits.ack_share_cleared
    if not holes or count < share * broker.limit:
        return None
    unit, limit = (
        ("acknowledged messages", f"whole ledgers of them ({AS_ARRAYS}=true) until there are")
        if broker.whole_ledgers
        else ("ranges of acknowledged messages", "at most")
    )
    origin = "configured" if broker.configured else "the default of its release"
    return published or StatusWarning(
        Reason.ACK_HOLES,
        f"subscription {facts.policy.subscription} of {facts.policy.retry_topic} has many {unit} "
        "behind waiting retries; when the broker unloads the topic, it keeps "
        f"{limit} {broker.limit} ({RANGES}, {origin}), and beyond that processed messages may "
        "be redelivered; "
        f"got {count}; make the delays more similar, give the retry topic more partitions "
        f"(retry.partitions), or raise {RANGES} at the broker",
    )


def foreign_subscriptions_take_messages(facts: CheckInput, _: Thresholds) -> StatusWarning | None:
    """Find durable subscriptions on the policy's topics that are not its own.

    Subscriptions of readers are not durable. Names with two underscores are the broker's own.
    """
    policy = facts.policy
    own = (
        (policy.retry_topic, facts.retry, policy.subscription),
        (policy.dead_letter_topic, facts.dead_letter, policy.dead_letter_subscription),
    )
    others = [
        f"{name} on {topic.local}"
        for topic, subscriptions, ours in own
        for name, subscription in sorted(subscriptions.items())
        if name != ours and subscription.durable and not name.startswith("__")
    ]
    if not others:
        return None
    return StatusWarning(
        Reason.FOREIGN_SUBSCRIPTION,
        "other subscriptions than this policy's receive messages of its retry or dead-letter "
        "topic, for example by a pattern that matches these topics; got "
        f"{', '.join(first_of(others))}; exclude these topics from the pattern, then "
        "delete the subscriptions there",
    )


def retry_topic_is_not_consumed(facts: CheckInput, _: Thresholds) -> StatusWarning | None:
    """Find consumers of the source topic without consumers of the retry topic, in two readings.

    One reading is not enough: a starting consumer subscribes to one topic before the other.
    """
    published = facts.warnings.get(Reason.RETRY_TOPIC_NOT_CONSUMED)
    if not facts.unconsumed or (published is None and not facts.unconsumed_before):
        return None
    policy = facts.policy
    return StatusWarning(
        Reason.RETRY_TOPIC_NOT_CONSUMED,
        f"subscription {policy.subscription} has consumers on {policy.topic.local} and none on "
        f"{policy.retry_topic.local}, so retries are not delivered; let the consumers subscribe to "
        "both topics, as redrive's RetryConsumer and Java's enableRetry do",
    )


def subscription_types_differ(facts: CheckInput, _: Thresholds) -> StatusWarning | None:
    """Find connected consumers whose subscription type makes the broker refuse the policy's."""
    policy = facts.policy
    connected = {policy.topic: facts.own_source, policy.retry_topic: facts.retries}
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
        "policy's; meanwhile the broker refuses consumers of the policy's type with ConsumerBusy, "
        f"and a rollout does not complete; got {'; '.join(others)}; stop all consumers of the "
        "subscription, then start them, or change subscriptionType to their type; the retry topic "
        "is always Shared, but Go's client uses the type of the source topic there",
    )


def most_deliveries_are_retries(facts: CheckInput, limits: Thresholds) -> StatusWarning | None:
    """Find a majority of retries among the deliveries; few deliveries are ignored."""
    window, published = facts.deliveries, facts.warnings.get(Reason.RETRY_STORM)
    together = window.first + window.retries
    if together < limits.deliveries or window.retries <= limits.retry_share * together:
        # After a restart the count is too low to clear a warning.
        return None if window.is_whole or together >= limits.deliveries else published
    return published or StatusWarning(
        Reason.RETRY_STORM,
        f"most deliveries to subscription {facts.policy.subscription} are retries: retries are "
        "for single failing messages, and worsen an outage that affects all; "
        f"got {window.retries} retries among {together} deliveries within ten minutes; fix the "
        "dependency of the consumers, or let them slow down (max_rate) or pause meanwhile",
    )


def retries_are_overdue(facts: CheckInput, limits: Thresholds) -> StatusWarning | None:
    """Find a retry topic with consumers whose oldest message is due and that delivers nothing.

    A message is due after the longest delay of the policy. A longer delay that a consumer requested
    (`delay=`) is visible in the message only.
    """
    retries, window, policy = facts.retries, facts.deliveries, facts.policy
    if retries is None or retries.oldest is None or not retries.consumers:
        return None
    longest = policy.longest_delay
    is_due = facts.begun - retries.oldest > longest + limits.overdue
    is_delivered = retries.unacknowledged > 0 or window.retries > 0
    if not is_due or is_delivered or window.now - window.since < limits.undelivered_seconds:
        return None
    return facts.warnings.get(Reason.RETRIES_OVERDUE) or StatusWarning(
        Reason.RETRIES_OVERDUE,
        f"messages wait in {policy.retry_topic.local} for longer than any delay of the policy, and "
        "the broker delivers none, although consumers are connected; got a message published at "
        f"{retries.oldest:%Y-%m-%dT%H:%M:%SZ} and a longest delay of {format_duration(longest)}; "
        "unless the consumers are paused or request longer delays, let the broker reload the "
        f"topic: pulsar-admin topics unload {policy.retry_topic}",
    )


def chunks_are_stranded(facts: CheckInput, limits: Thresholds) -> StatusWarning | None:
    """Find unacknowledged messages of no connected consumer, in several consecutive readings.

    A broker assigns all chunks of a message to one consumer of a Shared subscription, even after
    that consumer has left.
    """
    policy, published = facts.policy, facts.warnings.get(Reason.CHUNKS_STRANDED)
    own = ((policy.topic, facts.own_source), (policy.retry_topic, facts.retries))
    chunks = {topic: stats.stranded for topic, stats in own if stats is not None and stats.stranded}
    if not chunks or (published is None and facts.stranded_readings < limits.stranded_readings):
        return None
    return published or StatusWarning(
        Reason.CHUNKS_STRANDED,
        f"a consumer of subscription {policy.subscription} left between two chunks of a large "
        "message, and the broker delivers that message to no other consumer; got "
        f"{sum(chunks.values())} chunks; reload the topic, which redelivers all unacknowledged "
        f"messages: {', '.join(f'pulsar-admin topics unload {topic}' for topic in chunks)}",
    )


def quota_is_nearly_reached(facts: CheckInput, limits: Thresholds) -> StatusWarning | None:
    """Find a dead-letter topic that will soon refuse dead letters; consumers then keep them."""
    dead_letter = facts.dead_letter.get(facts.policy.dead_letter_subscription)
    published = facts.warnings.get(Reason.QUOTA_NEARLY_REACHED)
    share = limits.quota_share if published is None else limits.quota_share_cleared
    if facts.quota is None or dead_letter is None or dead_letter.bytes < share * facts.quota:
        return None
    return published or StatusWarning(
        Reason.QUOTA_NEARLY_REACHED,
        f"the dead-letter topic {facts.policy.dead_letter_topic.local} nears its backlog quota, "
        "beyond which the broker refuses dead letters and consumers keep them; got "
        f"{dead_letter.bytes} of {facts.quota} bytes; replay or delete dead letters, or set a "
        "higher deadLetter.backlogQuota",
    )


def consumers_have_paused(facts: CheckInput, _: Thresholds) -> StatusWarning | None:
    """Find consumers that publish an outage. Their number changes too often to be shown."""
    if not facts.outages:
        return None
    # Any client that may produce to the retry topic can write them.
    causes = sorted({ascii(cause[:_CAUSE])[1:-1][:_CAUSE] for cause in facts.outages})
    namespace, *name = facts.policy.name.split("/")
    return StatusWarning(
        Reason.OUTAGE_SUSPECTED,
        f"consumers have paused, because most messages fail; got {', '.join(first_of(causes))}; "
        "fix the dependency, and they resume automatically: they probe with single messages; to "
        "resume now and use up retries, run "
        f"`kubectl redrive ignore-outage {''.join(name)} -n {namespace} --for 1h`",
    )


def sends_are_refused(facts: CheckInput, _: Thresholds) -> StatusWarning | None:
    """Find topics to which consumers or Replays cannot send, or soon; they keep failed messages."""
    policy = facts.policy
    refusing = [f"{topic.local} is terminated" for topic in facts.terminated]
    refusing += [
        f"{topic.local} has {MAX_PRODUCERS}={facts.limits[topic][MAX_PRODUCERS]} producers"
        for topic, count in facts.producers.items()
        if count >= facts.limits[topic][MAX_PRODUCERS]
    ]
    own = facts.limits.get(policy.topic, {})
    is_known = MAX_MESSAGE_SIZE in own
    largest = (own[MAX_MESSAGE_SIZE] or DEFAULT_MESSAGE_SIZE) if is_known else 0
    refusing += [
        f"{topic.local} has {MAX_MESSAGE_SIZE}={size}, and {policy.topic.local} {largest} bytes"
        for topic in (policy.retry_topic, policy.dead_letter_topic)
        if 0 < (size := facts.limits.get(topic, {}).get(MAX_MESSAGE_SIZE, 0)) < largest
    ]
    aged = list(_beyond_age(facts))
    refusing += aged
    if not refusing:
        return None if facts.refusals_known else facts.warnings.get(Reason.SENDS_REFUSED)
    by_age = (
        "remove the backlog quota by age, or raise it (pulsar-admin namespaces set-backlog-quota "
        f"--type {BY_AGE}); "
    )
    return StatusWarning(
        Reason.SENDS_REFUSED,
        "the broker refuses messages to topics of this policy, or is about to: consumers keep "
        f"failed messages unacknowledged, and Replays fail; got {'; '.join(refusing)}; process the "
        "messages of a terminated topic, then delete it, and the operator creates it again; "
        f"{by_age if aged else ''}{_raise_limits(policy)}",
    )


def _beyond_age(facts: CheckInput) -> Iterator[str]:
    """Yield topics whose messages wait, or are to wait, for longer than a quota by age permits."""
    policy = facts.policy
    for topic, stats, delay in (
        (policy.retry_topic, facts.retry, policy.longest_delay),
        (policy.dead_letter_topic, facts.dead_letter, timedelta()),
    ):
        limit = facts.limits.get(topic, {}).get(BY_AGE, 0)
        oldest = min((one.oldest for one in stats.values() if one.oldest), default=facts.begun)
        if 0 < limit < delay.total_seconds():
            yield f"{topic.local} has {BY_AGE}={limit} s, and delays of {format_duration(delay)}"
        elif 0 < limit < (facts.begun - oldest).total_seconds():
            yield f"{topic.local} has {BY_AGE}={limit} s, and older messages"


def consumers_are_refused(facts: CheckInput, _: Thresholds) -> StatusWarning | None:
    """Find topics that accept no more consumers or subscriptions, or not those of the policy.

    Each reader is a consumer with a subscription.
    """
    policy = facts.policy
    needed = {**policy.subscription_types, policy.dead_letter_topic: SubscriptionType.EXCLUSIVE}
    full = [
        f"{topic.local} has subscriptionTypesEnabled={','.join(sorted(allowed))} without {kind}"
        for topic, kind in needed.items()
        if (allowed := facts.types.get(topic)) and kind.of_broker not in allowed
    ]
    for topic, stats, subscription in (
        (policy.topic, facts.source, policy.subscription),
        (policy.retry_topic, facts.retry, policy.subscription),
        (policy.dead_letter_topic, facts.dead_letter, policy.dead_letter_subscription),
    ):
        limits, own = facts.limits.get(topic, {}), stats.get(subscription)
        counts = {
            MAX_CONSUMERS: sum(one.consumers for one in stats.values()),
            MAX_CONSUMERS_OF_SUBSCRIPTION: 0 if own is None else own.consumers,
            # A source topic needs no other subscription than that of the policy.
            MAX_SUBSCRIPTIONS: 0
            if topic == policy.topic and own is not None
            else sum(one.durable for one in stats.values()),
        }
        full += [
            f"{topic.local} has {setting}={limits[setting]} and {count}"
            for setting, count in counts.items()
            if 0 < limits.get(setting, 0) <= count
        ]
    if not full:
        return None if facts.refusals_known else facts.warnings.get(Reason.CONSUMERS_REFUSED)
    return StatusWarning(
        Reason.CONSUMERS_REFUSED,
        "the broker refuses further consumers of topics of this policy: a rollout that starts new "
        "consumers before it stops others does not complete, and Replays fail, because each reader "
        f"is a consumer with a subscription of its own; got {'; '.join(full)}; allow the missing "
        f"subscription type, and {_raise_limits(policy)}",
    )


def _raise_limits(policy: Policy) -> str:
    return (
        "raise a limit where it is set: at the topic (pulsar-admin topicPolicies), at the Pulsar "
        f"namespace {policy.topic.namespace_name}, or in the configuration of the brokers"
    )


CHECKS: Mapping[str, Callable[[CheckInput, Thresholds], StatusWarning | None]] = {
    Reason.ACK_HOLES: acknowledged_range_has_holes,
    Reason.FOREIGN_SUBSCRIPTION: foreign_subscriptions_take_messages,
    Reason.RETRY_TOPIC_NOT_CONSUMED: retry_topic_is_not_consumed,
    Reason.SUBSCRIPTION_TYPE_DIFFERS: subscription_types_differ,
    Reason.RETRY_STORM: most_deliveries_are_retries,
    Reason.RETRIES_OVERDUE: retries_are_overdue,
    Reason.CHUNKS_STRANDED: chunks_are_stranded,
    Reason.QUOTA_NEARLY_REACHED: quota_is_nearly_reached,
    Reason.OUTAGE_SUSPECTED: consumers_have_paused,
    Reason.SENDS_REFUSED: sends_are_refused,
    Reason.CONSUMERS_REFUSED: consumers_are_refused,
}
"""Check of each warning."""


def check(facts: CheckInput, limits: Thresholds) -> tuple[StatusWarning, ...]:
    """Return the warnings of all checks."""
    results = (run(facts, limits) for run in CHECKS.values())
    return tuple(warning for warning in results if warning is not None)


WINDOW_SECONDS = 600.0


@dataclass(frozen=True)
class _Step:
    """Deliveries between two polls.

    Attributes:
        at: time of the later poll.
    """

    at: float
    first: int
    retries: int


@dataclass(frozen=True)
class Deliveries:
    """Deliveries of the last ten minutes, from counters that a broker resets at times.

    The first poll counts nothing. Within the window one value is kept for each poll.

    Attributes:
        since: time of the first poll, in seconds of a monotonic clock.
        now: time of the latest poll.
        source: counter of the source topic's subscription at the latest poll; None if it does not
            exist.
        retry: counter of the retry topic's subscription.
    """

    since: float
    now: float
    source: int | None
    retry: int | None
    _steps: tuple[_Step, ...] = ()

    @classmethod
    def begin(cls, now: float, source: int | None, retry: int | None) -> Deliveries:
        """Start with the counters of the first poll."""
        return cls(now, now, source, retry)

    def seen(self, now: float, source: int | None, retry: int | None) -> Deliveries:
        """Return the window after another poll."""
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
        """Return the first deliveries and the retries since the poll before the latest."""
        return (self._steps[-1].first, self._steps[-1].retries) if self._steps else (0, 0)

    @property
    def is_whole(self) -> bool:
        """Return True if the polls cover the whole window."""
        return self.now - self.since >= WINDOW_SECONDS


def _since(before: int | None, now: int | None) -> int:
    """Return the growth of a counter; 0 if it was reset.

    A reset may concern one partition of many. The growth is then unknown, and a guess could report
    a storm that does not exist.
    """
    if before is None or now is None or now < before:
        return 0
    return now - before
