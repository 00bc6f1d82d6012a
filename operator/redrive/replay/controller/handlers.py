"""Watch events of Replays and SparkApplications → the work queue; decides nothing itself.

The one door to kopf in this journey: its handlers fill the caches, whose listeners enqueue what a
change affects; the `Controller` does the rest. Called once, by the operator's command.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import kopf

from redrive.kube import resources
from redrive.kube.cache import Cache, needs_reconcile
from redrive.kube.context import Context
from redrive.kube.controller import Controller
from redrive.kube.resources import Body, Key
from redrive.replay.controller.admission import is_final, policy_of
from redrive.replay.controller.reconcile import reconcile


def register(registry: kopf.OperatorRegistry, ctx: Context) -> tuple[Controller, ...]:
    """Register the handlers of this journey, and enqueue all Replays.

    Returns:
        The controllers, which the caller has to stop in the end.
    """
    launching = asyncio.Lock()
    controller = Controller("Replay", lambda key: reconcile(key, ctx, launching))
    _listen(ctx, controller)

    @kopf.on.event(*resources.REPLAYS.address, registry=registry)
    async def replay(event: kopf.RawEvent, **_: object) -> None:
        ctx.replays.on_event(event)

    for kind, cache in ctx.applications.items():
        kopf.on.event(*kind.address, registry=registry)(_watching(cache))

    _enqueue_open(ctx, controller)
    for body in ctx.replays:
        if is_final(body):  # it may have to be deleted
            controller.enqueue(Key.of(body))
    return (controller,)


def _watching(applications: Cache) -> Callable[..., Awaitable[None]]:
    async def application(event: kopf.RawEvent, **_: object) -> None:
        applications.on_event(event)

    return application


def _listen(ctx: Context, controller: Controller) -> None:
    """Enqueue what later changes affect."""

    @ctx.replays.listen
    def replay_changed(key: Key, before: Body | None, after: Body | None) -> None:
        if needs_reconcile(before, after) or _rests(before) != _rests(after):
            controller.enqueue(key)
        if after is None or is_final(after):
            _enqueue_open(ctx, controller, policy_of(after or before or {}))

    def application_changed(_key: Key, before: Body | None, after: Body | None) -> None:
        for owner in _owners(after or before or {}):
            controller.enqueue(owner)

    for applications in ctx.applications.values():
        applications.listen(application_changed)

    @ctx.policies.listen
    def policy_changed(key: Key, _before: Body | None, _after: Body | None) -> None:
        _enqueue_open(ctx, controller, key)

    @ctx.connections.listen
    def connection_changed(*_: object) -> None:
        _enqueue_open(ctx, controller)

    @ctx.namespaces.listen
    def labels_changed(_namespace: str) -> None:
        _enqueue_open(ctx, controller)


def _enqueue_open(ctx: Context, controller: Controller, policy: Key | None = None) -> None:
    """Enqueue the Replays that are not final: of one policy, or all."""
    for body in ctx.replays:
        if not is_final(body) and policy in {None, policy_of(body)}:
            controller.enqueue(Key.of(body))


def _rests(replay: Body | None) -> bool:
    """Whether the job of a Replay says that its run is suspended."""
    return bool(((replay or {}).get("status") or {}).get("suspended"))


def _owners(application: Body) -> list[Key]:
    """Return the Replays that own *application*."""
    metadata = application["metadata"]
    return [
        Key(metadata["namespace"], owner["name"])
        for owner in metadata.get("ownerReferences", [])
        if owner["kind"] == resources.REPLAYS.kind
    ]
