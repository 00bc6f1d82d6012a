"""A watch that misses an event, and caches that are behind: the end is as in peace.

A policy is created, changed, deleted, and created again by the same name, and the operator
reconciles whenever its caches ask for it. Then the same once more with each fault, one at a time.
What was written in the end differs in nothing, and nothing is taken away that peace does not take.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest

from redrive.api import Body
from redrive.errors import RedriveError, Requeue
from redrive.kube import resources
from redrive.kube.cache import Cache, needs_reconcile
from redrive.kube.informer import relist
from redrive.kube.resources import Key, Resource
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.reconcile_harness import KEY, NOW, ReconcileHarness, reconcile_harness

MakeBody = Callable[..., dict[str, Any]]
WATCHED = (resources.POLICIES, resources.CONFIG_MAPS)
RECONCILES = 12
"""So many reconciles are enough for any step."""
LATER = timedelta(hours=1)
Objects = Mapping[Resource, Mapping[Key, Body]]


class CrashError(BaseException):
    """The operator ends here."""


class Watched(FakeKubernetes):
    """An API server whose watch shows each write, unless that is the one that is missed.

    Attributes:
        states: all that was stored, after each write.
        missed: which write no watch shows; None for none.
        crash: at which state the operator ends; None for never.
    """

    def __init__(self, missed: int | None = None, crash: int | None = None) -> None:
        super().__init__()
        self.states: list[Objects] = []
        self.missed, self.crash = missed, crash
        self.watch: Callable[[Resource, str, Body], None] = lambda *_: None

    async def patch(self, resource: Resource, key: Key, patch: Body) -> Body:
        return self._written(resource, await super().patch(resource, key, patch))

    async def patch_status(
        self, resource: Resource, key: Key, status: Body, version: str | None = None
    ) -> Body:
        return self._written(resource, await super().patch_status(resource, key, status, version))

    async def create(self, resource: Resource, body: Body) -> Body:
        return self._written(resource, await super().create(resource, body))

    async def user_edits(self, **spec: object) -> None:
        """Change the spec of the policy, as another client does."""
        await self._by_user(super().patch(resources.POLICIES, KEY, {"spec": spec}))

    async def user_creates(self, body: Body) -> None:
        """Create the policy."""
        await self._by_user(super().create(resources.POLICIES, body))

    async def user_deletes(self) -> None:
        """Delete the policy: it goes once it has no finalizer."""
        going = {"deletionTimestamp": NOW.isoformat()}
        await self._by_user(super().patch(resources.POLICIES, KEY, {"metadata": going}))

    async def _by_user(self, write: Awaitable[Body]) -> None:
        crash, self.crash = self.crash, None
        self._written(resources.POLICIES, await write)
        self.crash = crash

    def _written(self, resource: Resource, body: Body) -> Body:
        if resource not in WATCHED:
            return body
        number = len(self.states)
        self.states.append({kind: copy.deepcopy(self.objects[kind]) for kind in WATCHED})
        gone = Key.of(body) not in self.objects[resource]
        if number != self.missed:
            self.watch(resource, "DELETED" if gone else "MODIFIED", copy.deepcopy(body))
        if number == self.crash:
            raise CrashError
        return body


class Run:
    """An operator, started again where it ends, that follows what a user does."""

    def __init__(self, here: ReconcileHarness, kubernetes: Watched) -> None:
        self.here, self.kubernetes = here, kubernetes
        self.asked = False
        self.start({})

    def start(self, objects: Objects) -> None:
        """Start the operator with what a list shows it."""
        ctx = self.here.ctx
        ctx.policies = Cache(objects.get(resources.POLICIES, {}).values())
        ctx.config_maps = Cache(objects.get(resources.CONFIG_MAPS, {}).values())
        self.here.__post_init__()
        self.kubernetes.watch = self.show
        ctx.policies.listen(self._ask)
        ctx.config_maps.listen(self._ask)
        self.asked = True

    def show(self, resource: Resource, kind: str, body: Body) -> None:
        """Show an event of a watch."""
        self.caches[resource].on_event({"type": kind, "object": body})

    async def begin_again(self, shown: Objects) -> None:
        """Start the operator an hour later, with *shown*, and then show what is there."""
        self.kubernetes.crash = None
        self.here.now += LATER
        self.start(shown)
        with suppress(RedriveError):
            await self.here.reconcile()
        await self.relist()
        await self.work()

    @property
    def is_going(self) -> bool:
        """Whether the policy is being deleted."""
        there = self.kubernetes.objects[resources.POLICIES].values()
        return any("deletionTimestamp" in body["metadata"] for body in there)

    @property
    def caches(self) -> dict[Resource, Cache]:
        ctx = self.here.ctx
        return {resources.POLICIES: ctx.policies, resources.CONFIG_MAPS: ctx.config_maps}

    def collect_garbage(self) -> None:
        """Delete ConfigMaps whose owner is gone, and show that."""
        owners = {
            b["metadata"]["uid"] for b in self.kubernetes.objects[resources.POLICIES].values()
        }
        for key, body in list(self.kubernetes.objects[resources.CONFIG_MAPS].items()):
            if body["metadata"]["ownerReferences"][0]["uid"] not in owners:
                del self.kubernetes.objects[resources.CONFIG_MAPS][key]
                self.show(resources.CONFIG_MAPS, "DELETED", body)

    async def relist(self) -> None:
        """Show all that is there, as a watch that begins does, then look for what is not."""
        for resource in WATCHED:
            for body in await self.kubernetes.list(resource):
                self.show(resource, "ADDED", body)
        assert await relist(self.kubernetes, self.caches, ())

    async def work(self) -> None:
        """Reconcile until nothing asks for it."""
        for _ in range(RECONCILES):
            if not self.asked:
                return
            self.asked = False
            try:
                requeue = await self.here.reconcile()
            except RedriveError:
                requeue = Requeue.BACKOFF
            self.collect_garbage()
            if requeue is not Requeue.ON_CHANGE:
                self.asked = True
                self.here.now += timedelta(seconds=30)
        raise AssertionError("it never ends")

    def _ask(self, _key: Key, before: Body | None, after: Body | None) -> None:
        self.asked = self.asked or needs_reconcile(before, after)


@asynccontextmanager
async def started(connection: Body, body: Body, kubernetes: Watched) -> AsyncIterator[Run]:
    async with reconcile_harness(connection, body, kubernetes) as here:
        kubernetes.objects.clear()
        yield Run(here, kubernetes)


def story(run: Run, body: Body) -> list[Callable[[], Awaitable[None]]]:
    """What the user does, step by step."""
    users = run.kubernetes
    again = copy.deepcopy(dict(body))
    again["metadata"] |= {"uid": "another", "creationTimestamp": "2026-01-01T00:30:00Z"}
    again["spec"] |= {"deletionPolicy": "Retain"}
    return [
        lambda: users.user_creates(body),
        lambda: users.user_edits(consumerRoles=["fulfilment", "shop-new"], maxRetries=3),
        users.user_deletes,
        lambda: users.user_creates(again),
    ]


def stored(run: Run) -> dict[str, Any]:
    """All that there is, without what counts versions and tells times."""
    objects = copy.deepcopy({kind.kind: dict(run.kubernetes.objects[kind]) for kind in WATCHED})
    for by_key in objects.values():
        for body in by_key.values():
            body["metadata"].pop("resourceVersion")
            if body["kind"] == "ConfigMap":
                body["metadata"].pop("uid")
            for condition in body.get("status", {}).get("conditions", []):
                condition.pop("lastTransitionTime")
    return {"broker": run.here.broker.namespaces, **objects}


def history(run: Run) -> Counter[tuple[str, str]]:
    """How often each write was made, in Kubernetes and at the broker."""
    in_kubernetes = ((write.verb, write.resource.kind) for write in run.kubernetes.writes)
    return Counter([*run.here.broker.writes, *in_kubernetes])


def taken(writes: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
    """Those that take something away."""
    return Counter({write: count for write, count in writes.items() if write[0] == "DELETE"})


@pytest.fixture(params=["Keep", "Discard"])
def body(policy: MakeBody, request: pytest.FixtureRequest) -> Body:
    return policy(deletionPolicy="Delete", deadLetter={"mode": request.param})


async def peace(connection: Body, body: Body) -> tuple[dict[str, Any], Counter[Any], list[Objects]]:
    async with started(connection, body, Watched()) as run:
        for step in story(run, body):
            await step()
            await run.work()
        return stored(run), history(run), run.kubernetes.states


@pytest.mark.parametrize("late", [False, True], ids=["repaired at once", "repaired in the end"])
async def test_whatever_event_a_watch_misses_a_relist_repairs_it(
    connection: dict[str, Any], body: Body, *, late: bool
) -> None:
    right, before, states = await peace(connection, body)
    assert len(states) > 10
    for missed in range(len(states)):
        async with started(connection, body, Watched(missed)) as run:
            for step in story(run, body):
                await step()
                await run.work()
                if not late or run.is_going:  # a name is free once a missed deletion is seen
                    await run.relist()
                    await run.work()
            await run.relist()
            await run.work()
            assert stored(run) == right, f"event {missed}"
            assert not history(run) - before, f"event {missed}"


async def test_an_operator_that_begins_with_what_was_there_before_takes_nothing_away(
    connection: dict[str, Any], body: Body
) -> None:
    right, before, states = await peace(connection, body)
    for crash in range(len(states)):
        for shown in distinct(states[: crash + 1]):
            async with started(connection, body, Watched(crash=crash)) as run:
                for step in story(run, body):
                    await step()
                    with suppress(CrashError):
                        await run.work()
                    if run.kubernetes.crash is not None and len(run.kubernetes.states) > crash:
                        await run.begin_again(states[shown])
                case = f"ended at write {crash}, begun with what was there after write {shown}"
                assert stored(run) == right, case
                assert not taken(history(run)) - taken(before), case


def distinct(states: Sequence[Objects]) -> list[int]:
    """The states before which the policy came, changed or went, and the last one."""
    asked = [
        {
            key: (body["metadata"], body["spec"])
            for key, body in state[resources.POLICIES].items()
            if body["metadata"].pop("resourceVersion", True)
        }
        for state in copy.deepcopy(list(states))
    ]
    changed = [n for n, now in enumerate(asked) if n and asked[n - 1] != now]
    return sorted({0, *(number - 1 for number in changed), len(states) - 1})
