"""Listeners to the caches, which enqueue the affected Replays for their `Controller`.

kopf's watches fill the caches, see `cli/operator.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, filterfalse
from weakref import WeakValueDictionary

from redrive.api import Body
from redrive.api.conditions import is_ready, reason, written_ready
from redrive.api.replay_status import FINAL, ReplayStatus
from redrive.errors import RedriveError
from redrive.kube import resources
from redrive.kube.cache import Turns, needs_reconcile
from redrive.kube.connections import connection_of, permissions, spec_at, users
from redrive.kube.context import Context
from redrive.kube.controller import Controller
from redrive.kube.resources import Key, PolicyKey, Resource
from redrive.reasons import Reason
from redrive.replay.controller.admission import is_final, namespace_of, running_through, turn_of
from redrive.replay.controller.launch import launched_through
from redrive.replay.controller.prerequisites import is_idle
from redrive.replay.controller.reconciler import reconcile
from redrive.replay.controller.spark_operators import LAUNCHERS, Launcher


def start(ctx: Context) -> tuple[Controller, ...]:
    """Follow the caches of this journey, and enqueue all Replays.

    Returns:
        The controllers, which the caller has to stop in the end.
    """
    # One lock for each namespace: its Replays are ordered by policy and share a limit.
    launching = WeakValueDictionary[str, asyncio.Lock]()
    controller = Controller(
        "Replay",
        lambda key: reconcile(key, ctx, launching.setdefault(key.namespace, asyncio.Lock())),
        partition_key=lambda key: _connection(key, ctx),
    )
    _listen(ctx, controller)
    for body in sorted(ctx.replays, key=is_final):  # final Replays may have to be deleted
        controller.enqueue(Key.of(body))
    return (controller,)


def _listen(ctx: Context, controller: Controller) -> None:
    """Enqueue the Replays that later changes affect."""
    turns = ctx.replays.turns(turn_of)

    @ctx.replays.listen
    def replay_changed(key: Key, before: Body | None, after: Body | None) -> None:
        if needs_reconcile(before, after) or _reported(before) != _reported(after):
            controller.enqueue(key)
        _enqueue_first(key, (before, after), turns, controller)
        if _limited_of(before) != _limited_of(after):
            # One that waits newly may have missed the end of a run.
            _enqueue_next(key.namespace, ctx, controller)

    for launcher in LAUNCHERS:
        if launcher.resource in ctx.applications:
            _listen_to_applications(launcher, ctx, controller)

    listen_to_inputs(resources.REPLAYS, is_final, ctx, controller)


def _listen_to_applications(launcher: Launcher, ctx: Context, controller: Controller) -> None:
    """Enqueue the Replay of a changed application, and the next ones after its end."""

    def is_open(application: Body | None) -> bool:
        return application is not None and launcher.run(application).phase not in FINAL

    @ctx.applications[launcher.resource].listen
    def application_changed(key: Key, before: Body | None, after: Body | None) -> None:
        for owner in owners_of(after or before or {}, resources.REPLAYS):
            controller.enqueue(owner)
        if after is None or (is_open(before) and not is_open(after)):
            _enqueue_next(key.namespace, ctx, controller)


def listen_to_inputs(
    kind: Resource, is_final: Callable[[Body], bool], ctx: Context, controller: Controller
) -> None:
    """Enqueue open objects of *kind*, Replays or Inspections, when an object that they use changes.

    Those are their policy, its connection, the labels of their namespace, and job templates.
    """
    runs = ctx.caches[kind]
    by_policy, by_namespace = runs.index(PolicyKey.of), runs.index(namespace_of)

    def enqueue_open(bodies: Iterable[Body]) -> None:
        for body in filterfalse(is_final, bodies):
            controller.enqueue(Key.of(body))

    def policy_changed(policy_kind: str, key: Key, before: Body | None, after: Body | None) -> None:
        # Other fields of its status change every minute, and permit no run.
        bodies = by_policy.get(PolicyKey(policy_kind, *key))
        if bodies and (
            needs_reconcile(before, after)
            or written_ready(before or {}) != written_ready(after or {})
        ):
            enqueue_open(bodies)

    def connection_changed(key: Key, before: Body | None, after: Body | None) -> None:
        became_ready = is_ready(after or {}) and not is_ready(before or {})
        if needs_reconcile(before, after) or became_ready:
            for policy_kind, policies in ctx.policy_caches.items():
                for policy in users(key, policies):
                    enqueue_open(by_policy.get(PolicyKey(policy_kind, *Key.of(policy))))

    for policy_kind, policies in ctx.policy_caches.items():
        policies.listen(partial(policy_changed, policy_kind))
    ctx.connections.listen(connection_changed)
    _listen_to_withdrawals(kind, ctx, controller)
    ctx.namespaces.listen(lambda namespace: enqueue_open(by_namespace.get(namespace)))
    ctx.job_templates.listen(lambda: enqueue_open(runs))


def _listen_to_withdrawals(kind: Resource, ctx: Context, controller: Controller) -> None:
    """Enqueue running objects of *kind* when the connection of their launch changes."""
    by_connection = [cache.index(launched_through) for cache in ctx.applications.values()]

    @ctx.connections.listen
    def connection_changed(key: Key, before: Body | None, after: Body | None) -> None:
        if needs_reconcile(before, after):
            for application in chain.from_iterable(index.get(key) for index in by_connection):
                for owner in owners_of(application, kind):
                    controller.enqueue(owner)


def _enqueue_first(
    key: Key, change: tuple[Body | None, Body | None], turns: Turns, controller: Controller
) -> None:
    """Enqueue the Replay that a change of *key* made the first of its policy; all others wait."""
    before, after = (None if body is None else turn_of(body) for body in change)
    if before == after:
        return
    for queue in {turn.queue for turn in (before, after) if turn is not None}:
        for rank, first in turns.first(queue, 1):
            preceded = before is not None and before.queue == queue and before.rank < rank
            if first == key or preceded:
                controller.enqueue(first)


def _enqueue_next(namespace: str, ctx: Context, controller: Controller) -> None:
    """Enqueue Replays of *namespace* that wait for others to end: one of a policy, as many as may.

    It leaves the index when it starts, or waits for something else; then the next one is enqueued.
    """
    limited = ctx.replays.index(_limited_of)
    free: dict[Key, int] = {}
    policies = (
        (PolicyKey(kind, *Key.of(body)), body)
        for kind, cache in ctx.policy_caches.items()
        for body in cache.index(namespace_of).get(namespace)
    )
    for policy, body in policies:
        for key in limited.first(policy, 1):
            through = connection_of(body)
            if through not in free:
                free[through] = _free_runs(through, namespace, ctx)
            if free[through] > 0:
                free[through] -= 1
                controller.enqueue(key)


def _free_runs(connection: Key, namespace: str, ctx: Context) -> int:
    """Return the number of further Replays that a connection allows; 1 if that is unknown."""
    try:
        spec = spec_at(connection, ctx.connections)
        most = permissions(spec, connection, namespace, ctx.namespaces).limits.runs
    except RedriveError:
        return 1  # this one then shows the error
    return most - running_through(connection, namespace, ctx)


def _limited_of(replay: Body | None) -> PolicyKey | None:
    """Return the policy of a Replay that waits for others to end; None for other Replays."""
    if replay is None or is_final(replay) or not is_limited(replay):
        return None
    return PolicyKey.of(replay)


def is_limited(run: Body) -> bool:
    """Return True if an open Replay or Inspection waits until others end."""
    is_deleted = "deletionTimestamp" in run["metadata"]
    return not is_deleted and reason(run) == Reason.TOO_MANY_RUNS


def _connection(replay: Key, ctx: Context) -> Key | None:
    """Return the connection of a Replay's policy; None if one of them does not exist."""
    body = ctx.replays.get(replay)
    policy = None if body is None else ctx.find_policy(PolicyKey.of(body))
    return None if policy is None else connection_of(policy)


def _reported(replay: Body | None) -> tuple[bool, ...]:
    """Return the reported states of a run that cause a reconcile; numbers do not."""
    run = ReplayStatus.of(replay or {}).run
    states = (
        run.suspended, run.awaits_approval, run.full_topic, run.unsubscribed_topic, run.review,
        is_idle(run),
    )  # fmt: skip
    return tuple(map(bool, states))


def owners_of(application: Body, kind: Resource) -> list[Key]:
    """Return the objects of *kind* that own *application*."""
    metadata = application["metadata"]
    return [
        Key(metadata["namespace"], owner["name"])
        for owner in metadata.get("ownerReferences", [])
        if owner["kind"] == kind.kind
    ]
