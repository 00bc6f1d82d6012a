"""Metrics of Replays, for Prometheus; `docs/reference/metrics.md` lists them."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime

from prometheus_client import REGISTRY, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from redrive.api import Body
from redrive.api.conditions import moment_of
from redrive.api.replay import Phase, ReplayStatus
from redrive.kube.cache import Cache
from redrive.kube.context import Context
from redrive.kube.resources import Key
from redrive.replay.controller.admission import is_dry_run, policy_of

_LABELS = ("policy", "policy_namespace")
MESSAGES = Counter(
    "redrive_replay_messages_total",
    "Messages that Replays selected, or can't tell whether to, by their outcome, once their "
    "Replay has ended.",
    (*_LABELS, "outcome"),
)
SECONDS = Histogram(
    "redrive_replay_duration_seconds",
    "How long Replays took from their launch to their end.",
    ("outcome",),
    buckets=(10, 30, 60, 300, 900, 3_600, 4 * 3_600, 24 * 3_600),
)
_DONE = ("moved", "skipped", "refused")
_OUTCOMES = (*_DONE, "discarded", "left", "unevaluated")
_UNDER_WAY = frozenset({Phase.SUBMITTED, Phase.RUNNING})


class ReplayMetrics(Collector):
    """Replays by policy and phase, how far one is, and when the last ones of a policy ended."""

    def __init__(self, replays: Cache) -> None:
        self._replays = replays

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Count them, now; dry runs are none."""
        moving = [body for body in self._replays if not is_dry_run(body)]
        yield _by_phase(moving)
        yield _progress(moving)
        yield _last(Phase.COMPLETED, "success", "was completed", moving)
        yield _last(Phase.FAILED, "failure", "failed", moving)


def ended(replay: Body, status: ReplayStatus, phase: Phase, ctx: Context) -> None:
    """Count a Replay that has just ended; a dry run is none.

    Its messages are counted if its policy exists: a name that a user makes up would stay for ever.

    Args:
        replay: the Replay.
        status: what its job has reported; what can't be, such as a negative number, counts as 0.
        phase: the final one.
        ctx: tells the policies and the time.
    """
    if is_dry_run(replay):
        return
    if ctx.policies.get(policy_of(replay)) is not None:
        for outcome in _OUTCOMES:
            count = max(0, getattr(status.run.counts, outcome) or 0)
            MESSAGES.labels(*_policy(replay), outcome).inc(count)
    if status.start_time is not None:
        created = datetime.fromisoformat(replay["metadata"]["creationTimestamp"])
        took = ctx.clock() - max(created, status.start_time)
        SECONDS.labels(phase.value).observe(max(0.0, took.total_seconds()))


@contextmanager
def counting(replays: Cache, policies: Cache) -> Iterator[None]:
    """Count *replays* while the block runs; what `ended` has counted goes with its policy."""

    @policies.listen
    def policy_changed(policy: Key, _before: Body | None, after: Body | None) -> None:
        if after is None:
            for outcome in _OUTCOMES:
                MESSAGES.remove(policy.name, policy.namespace, outcome)

    collector = ReplayMetrics(replays)
    REGISTRY.register(collector)
    try:
        yield
    finally:
        REGISTRY.unregister(collector)
        MESSAGES.clear()  # which policies go is not seen any more


def _by_phase(replays: Iterable[Body]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(
        "redrive_replays", "Replays by their phase.", labels=(*_LABELS, "phase")
    )
    counts = collections.Counter(
        (*_policy(body), (body.get("status") or {}).get("phase", Phase.PENDING.value))
        for body in replays
    )
    for labels, count in counts.items():
        family.add_metric(labels, count)
    return family


def _progress(replays: Iterable[Body]) -> GaugeMetricFamily:
    """Of those with an application that has something to move: one of a policy at most."""
    family = GaugeMetricFamily(
        "redrive_replay_progress_messages",
        "Messages that the Replay under way has scanned, moved, skipped or refused so far.",
        labels=_LABELS,
    )
    for body in replays:
        if (body.get("status") or {}).get("phase") not in _UNDER_WAY:
            continue
        run = ReplayStatus.of(body).run
        if not run.finished:
            done = sum(getattr(run.counts, step) or 0 for step in ("scanned", *_DONE))
            family.add_metric(_policy(body), done)
    return family


def _last(phase: Phase, name: str, ended_so: str, replays: Iterable[Body]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(
        f"redrive_replay_last_{name}_timestamp_seconds",
        f"When the last Replay of a policy {ended_so}.",
        labels=_LABELS,
    )
    latest: dict[tuple[str, str], float] = {}
    for body in replays:
        status = body.get("status") or {}
        moment = moment_of(status.get("completionTime"))
        if status.get("phase") == phase and moment is not None:
            at = moment.timestamp()
            latest[_policy(body)] = max(at, latest.get(_policy(body), at))
    for labels, at in latest.items():
        family.add_metric(labels, at)
    return family


def _policy(replay: Body) -> tuple[str, str]:
    key: Key = policy_of(replay)
    return key.name, key.namespace
