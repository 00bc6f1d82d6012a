"""Metrics of Replays, for Prometheus; `docs/reference/metrics.md` lists them."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import partial

from prometheus_client import REGISTRY, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from redrive.api import Body
from redrive.api.conditions import moment_of
from redrive.api.replay_status import Phase, ReplayStatus, RunCounts
from redrive.errors import InvalidSpecError
from redrive.kube.cache import Cache
from redrive.kube.context import Context
from redrive.kube.resources import Key, PolicyKey
from redrive.policy.values import parse_duration
from redrive.replay.controller.admission import is_dry_run

_LABELS = ("policy", "policy_namespace", "policy_kind")
MESSAGES = Counter(
    "redrive_replay_messages_total",
    "Messages that Replays selected or could not evaluate, by their outcome, once their "
    "Replay has ended.",
    (*_LABELS, "outcome"),
)
SECONDS = Histogram(
    "redrive_replay_duration_seconds",
    "Duration of Replays from their launch to their end.",
    ("outcome",),
    buckets=(10, 30, 60, 300, 900, 3_600, 4 * 3_600, 24 * 3_600),
)
_DONE = ("moved", "skipped", "refused")
_OUTCOMES = (*_DONE, "discarded", "left", "unevaluated")
_LIVE_OUTCOMES = (*_DONE, "discarded", "left")
_UNDER_WAY = frozenset({Phase.SUBMITTED, Phase.RUNNING})
_LIVE = _UNDER_WAY | {Phase.SUSPENDED}


class ReplayMetrics(Collector):
    """Replays by policy and phase, progress of live ones, and the last ends of each policy."""

    def __init__(self, replays: Cache) -> None:
        self._replays = replays

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Return the series of all Replays; plans are left out."""
        moving = [body for body in self._replays if not is_dry_run(body)]
        yield _by_phase(moving)
        yield from _live(moving)
        completed, failed = (
            [b for b in moving if _phase(b) == p] for p in (Phase.COMPLETED, Phase.FAILED)
        )
        yield _last("success", "was completed", completed)
        yield _last("failure", "failed", failed)
        yield _last(
            "refusal", "ended with refused messages", filter(_has_refused, completed + failed)
        )


def ended(replay: Body, status: ReplayStatus, phase: Phase, ctx: Context) -> None:
    """Count a Replay that has just ended, unless it is a dry run.

    Its messages are counted only if its policy exists, because the series of an invented name would
    be permanent.

    Args:
        replay: the Replay.
        status: report of its job. Invalid numbers, such as negative ones, count as 0.
        phase: final phase.
        ctx: policies and clock.
    """
    if is_dry_run(replay):
        return
    if ctx.find_policy(PolicyKey.of(replay)) is not None:
        for outcome in _OUTCOMES:
            count = max(0, getattr(status.run.counts, outcome) or 0)
            MESSAGES.labels(*_policy(replay), outcome).inc(count)
    if status.start_time is not None:
        created = datetime.fromisoformat(replay["metadata"]["creationTimestamp"])
        took = ctx.clock() - max(created, status.start_time)
        SECONDS.labels(phase.value).observe(max(0.0, took.total_seconds()))


@contextmanager
def counting(replays: Cache, policies: Mapping[str, Cache]) -> Iterator[None]:
    """Count *replays* while the block runs; the counts of `ended` are removed with their policy.

    *policies* are those of each kind.

    The counters of a policy start at 0 with its first Replay, because Prometheus detects no
    increase of a series that starts with another number.
    """

    @replays.listen
    def replay_changed(_: Key, before: Body | None, after: Body | None) -> None:
        if after is not None and (before is None or is_dry_run(before)):
            _begin(after, policies)

    def policy_changed(kind: str, policy: Key, _before: Body | None, after: Body | None) -> None:
        if after is None:
            for outcome in _OUTCOMES:
                MESSAGES.remove(policy.name, policy.namespace, kind, outcome)

    for kind, table in policies.items():
        table.listen(partial(policy_changed, kind))
    for replay in replays:
        _begin(replay, policies)
    collector = ReplayMetrics(replays)
    REGISTRY.register(collector)
    try:
        yield
    finally:
        REGISTRY.unregister(collector)
        MESSAGES.clear()  # deletions of policies are not observed any more


def _begin(replay: Body, policies: Mapping[str, Cache]) -> None:
    """Start the counters of the policy of a Replay at 0."""
    policy = PolicyKey.of(replay)
    table = policies.get(policy.kind)
    if not is_dry_run(replay) and table is not None and table.get(policy.key) is not None:
        for outcome in _OUTCOMES:
            MESSAGES.labels(*_policy(replay), outcome)


def _by_phase(replays: Iterable[Body]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(
        "redrive_replays", "Replays by their phase.", labels=(*_LABELS, "phase")
    )
    counts = collections.Counter((*_policy(body), _phase(body)) for body in replays)
    for labels, count in counts.items():
        family.add_metric(labels, count)
    return family


def _live(replays: Iterable[Body]) -> Iterator[GaugeMetricFamily]:
    """Return the progress of Replays that were launched and have not ended."""
    runs = [
        (phase, (*_policy(body), body["metadata"]["name"]), ReplayStatus.of(body).run)
        for body in replays
        if (phase := _phase(body)) in _LIVE
    ]
    progress = _family(
        "progress_messages",
        "Messages that a Replay under way has scanned, moved, skipped or refused so far.",
    )
    messages = _family("live_messages", "Messages of a live Replay by outcome so far.", "outcome")
    rate = _family("live_messages_per_second", "Messages that a live Replay moves in a second.")
    remaining = _family("live_remaining_seconds", "Estimated time until a live Replay ends.")
    approval = _family("awaits_approval", "1 while a live Replay waits for an approval, else 0.")
    for phase, labels, run in runs:
        counts = run.counts
        if phase in _UNDER_WAY and not run.finished:
            done = sum(_count(counts, step) or 0 for step in ("scanned", *_DONE))
            progress.add_metric(labels, done)
        for outcome in _LIVE_OUTCOMES:
            if (count := _count(counts, outcome)) is not None:
                messages.add_metric((*labels, outcome), count)
        if run.rate_per_minute is not None:
            rate.add_metric(labels, run.rate_per_minute / 60)
        if (seconds := _seconds(run.remaining)) is not None:
            remaining.add_metric(labels, seconds)
        approval.add_metric(labels, bool(run.awaits_approval))
    yield from (progress, messages, rate, remaining, approval)


def _family(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"redrive_replay_{name}", text, labels=(*_LABELS, "replay", *labels))


def _count(counts: RunCounts, outcome: str) -> int | None:
    """Return a number of messages that a job reported; None if it is missing or negative."""
    count: int | None = getattr(counts, outcome)
    return count if count is not None and count >= 0 else None


def _seconds(duration: str | None) -> float | None:
    """Return a reported duration in seconds; None if it is missing or invalid."""
    try:
        return None if duration is None else parse_duration(duration).total_seconds()
    except (InvalidSpecError, OverflowError):
        return None


def _has_refused(replay: Body) -> bool:
    """Return True if a Replay has refused messages."""
    counts = ((replay.get("status") or {}).get("run") or {}).get("counts") or {}
    return (counts.get("refused") or 0) > 0


def _last(name: str, event: str, replays: Iterable[Body]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(
        f"redrive_replay_last_{name}_timestamp_seconds",
        f"Time at which the last Replay of a policy {event}.",
        labels=_LABELS,
    )
    latest: dict[tuple[str, str, str], float] = {}
    for body in replays:
        moment = moment_of((body.get("status") or {}).get("completionTime"))
        if moment is not None:
            at = moment.timestamp()
            latest[_policy(body)] = max(at, latest.get(_policy(body), at))
    for labels, at in latest.items():
        family.add_metric(labels, at)
    return family


def _phase(replay: Body) -> str:
    phase: str = (replay.get("status") or {}).get("phase", Phase.PENDING.value)
    return phase


def _policy(replay: Body) -> tuple[str, str, str]:
    policy = PolicyKey.of(replay)
    return policy.name, policy.namespace, policy.kind
