"""Watches of Replays and SparkApplications → who has to be looked at; decides nothing itself.

The one door to kopf in this journey: kopf brings the watches, the `Controller` does the rest.
Called once, by the operator's command.
"""

from __future__ import annotations

import asyncio

import kopf

from redrive.kube import resources
from redrive.kube.cache import is_asked_anew
from redrive.kube.context import Context
from redrive.kube.controller import Controller
from redrive.kube.resources import Body, Key
from redrive.replay.admission import is_final, policy_of
from redrive.replay.reconcile import reconcile


def register(registry: kopf.OperatorRegistry, ctx: Context) -> tuple[Controller, ...]:
    """Watch Replays and their applications from then on, and look at all Replays there are now.

    Returns:
        The controllers, which the caller has to stop in the end.
    """
    launching = asyncio.Lock()
    controller = Controller("Replay", lambda key: reconcile(key, ctx, launching))

    def replay_changed(key: Key, before: Body | None, after: Body | None) -> None:
        if is_asked_anew(before, after):
            controller.enqueue(key)
        if after is None or is_final(after):
            wake_open(policy_of(after or before or {}))

    def application_changed(_key: Key, before: Body | None, after: Body | None) -> None:
        for owner in _owners(after or before or {}):
            controller.enqueue(owner)

    def wake_open(policy: Key | None = None) -> None:
        """Look again at the Replays that are not at their end: of one policy, or all."""
        for body in ctx.replays:
            if not is_final(body) and policy in {None, policy_of(body)}:
                controller.enqueue(Key.of(body))

    ctx.replays.listen(replay_changed)
    ctx.applications.listen(application_changed)
    ctx.policies.listen(lambda key, _before, _after: wake_open(key))
    ctx.connections.listen(lambda *_: wake_open())
    kopf.on.event(*resources.REPLAYS.address, registry=registry)(ctx.replays.seen)
    kopf.on.event(*resources.SPARK_APPLICATIONS.address, registry=registry)(ctx.applications.seen)
    wake_open()
    return (controller,)


def _owners(application: Body) -> list[Key]:
    """Return the Replays that own *application*."""
    metadata = application["metadata"]
    return [
        Key(metadata["namespace"], owner["name"])
        for owner in metadata.get("ownerReferences", [])
        if owner["kind"] == resources.REPLAYS.kind
    ]
