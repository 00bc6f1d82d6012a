"""Faults of brokers, API servers and watches: the end is as without them.

In the tests of watches a policy is created, changed, deleted, and created again by the same name;
the operator reconciles whenever its caches ask for it. The same is done once more with each fault.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from redrive.admin.errors import AdminConflictError, AdminError
from redrive.api import Body
from redrive.api.connection import BrokerConnectionSpec
from redrive.api.retrypolicy import ConnectionRef
from redrive.errors import RedriveError, Requeue
from redrive.kube import resources
from redrive.kube.cache import Cache, needs_reconcile
from redrive.kube.connections import Connection
from redrive.kube.informer import relist
from redrive.kube.resources import Key, Resource
from redrive.kube.status import Publisher
from redrive.provision.claims import Conflicts, resolve
from redrive.provision.finalize import LATE_WRITES, finalize
from redrive.provision.outcome import FINALIZER, publish
from redrive.provision.reconciler import Converged, converge
from redrive.reasons import Reason
from tests.support.fake_admin import (
    Do,
    FakeBroker,
    Namespace,
    Topic,
    answering,
    at_call,
    done_but_not_told,
    neither_done_nor_told,
)
from tests.support.fake_admin import Fault as BrokerFault
from tests.support.fake_kubernetes import Crash, FakeKubernetes, Fault, Faulty
from tests.support.operator_in_process import KEY, NOW, ReconcileHarness, reconcile_harness
from tests.support.reasons import raises

MakeBody = Callable[..., dict[str, Any]]

QUOTAS = {
    "message_age": {
        "limit": -1,
        "limitSize": -1,
        "limitTime": 60,
        "policy": "consumer_backlog_eviction",
    }
}
DELETED = datetime(2026, 1, 1, tzinfo=UTC)
FAULTS: dict[str, BrokerFault] = {
    **{str(status): answering(status) for status in (409, 412, 500)},
    "no answer": neither_done_nor_told,
    "done, but not told": done_but_not_told,
}
"""One of each class of errors; `make chaos` has more, of each call to a real broker."""
OF_CHANGES = frozenset({"409", "done, but not told"})
"""Faults of changes only: a read has no conflict, and no effect without an answer."""


def deleted(policy: Body) -> Body:
    """The policy while it is being deleted."""
    going = {"finalizers": [FINALIZER], "deletionTimestamp": DELETED.isoformat()}
    return {**policy, "metadata": {**policy["metadata"], **going}}


@dataclass(frozen=True)
class Shop:
    """A broker with a source topic and a foreign topic, and a policy to provision."""

    broker: FakeBroker
    kubernetes: FakeKubernetes
    connection: Body
    policy: Body

    async def look(self) -> Converged:
        """Provision the policy as a restarted operator would: nothing is remembered."""
        ctx = self.ctx()
        conflicts = Conflicts(ctx.policies, ctx.connections, lambda _: None)
        return await converge(resolve(self.stored, ctx), self.stored, ctx, conflicts)

    async def finalize(self) -> Requeue:
        """Clean up the deleted policy as a restarted operator does."""
        ctx = self.ctx()
        conflicts = Conflicts(ctx.policies, ctx.connections, lambda _: None)
        out = Publisher(self.kubernetes, resources.POLICIES, ctx.policies, ctx.clock)
        outcome = await finalize(self.stored, ctx, conflicts)
        await publish(self.stored, outcome, out)
        return outcome.requeue

    @property
    def stored(self) -> Body:
        """The policy as the API server has it."""
        return self.kubernetes.objects[resources.POLICIES][Key.of(self.policy)]

    @property
    def topics(self) -> dict[str, Topic]:
        """The topics at the broker."""
        return self.broker.namespaces["shop/prod"].topics

    @property
    def config_maps(self) -> dict[Key, Any]:
        """Data of the ConfigMaps for consumers, by key."""
        config_maps = self.kubernetes.objects[resources.CONFIG_MAPS]
        return {key: config_map["data"] for key, config_map in config_maps.items()}

    def ctx(self) -> Any:  # noqa: ANN401
        """Return the context of a reconcile."""

        async def resolve(ref: ConnectionRef, namespace: str) -> Connection:
            spec = BrokerConnectionSpec.model_validate(self.connection["spec"])
            return Connection(Key(namespace, ref.name), spec, self.broker.admin())

        return SimpleNamespace(
            kubernetes=self.kubernetes,
            policies=Cache([self.stored]),
            config_maps=Cache(self.kubernetes.objects[resources.CONFIG_MAPS].values()),
            connections=Cache(
                {**self.connection, "metadata": {**self.connection["metadata"], "name": name}}
                for name in ("main", "alias", "other")
            ),
            namespaces=None,
            brokers=SimpleNamespace(resolve=resolve),
            settings=SimpleNamespace(cluster_id="this-cluster", namespaces=()),
            clock=lambda: DELETED + LATE_WRITES,
            began=DELETED,
        )


def shop(connection: dict[str, Any], policy: Body) -> Shop:
    body = {"metadata": {"namespace": "shop", "name": "main", "uid": "u"}, "spec": connection}
    broker = FakeBroker()
    broker.tenants = {"shop": []}
    grants = {"persistent://shop/prod/others": {"fulfilment": ["consume"]}}
    topics = {"orders": Topic(2, {}), "others": Topic(0, {"a": "b"}, {"": ["s"]})}
    broker.namespaces = {"shop/prod": Namespace(topics, grants)}
    kubernetes = FakeKubernetes()
    kubernetes.add(resources.POLICIES, policy)
    return Shop(broker, kubernetes, body, policy)


def numbers_of(calls: Sequence[tuple[str, str]], fault: str) -> list[int]:
    """Return the numbers of the calls that *fault* may befall."""
    return [n for n, call in enumerate(calls, 1) if fault not in OF_CHANGES or call[0] != "GET"]


@pytest.mark.parametrize("fault", FAULTS)
async def test_failed_broker_call_is_repaired_by_next_reconcile(
    connection: dict[str, Any], policy: MakeBody, fault: str
) -> None:
    undisturbed = shop(connection, policy())
    made = await undisturbed.look()
    assert made.actions
    numbers = numbers_of(undisturbed.broker.calls, fault)
    assert (await undisturbed.look()).actions == ()
    for number in numbers:
        disturbed = shop(connection, policy())
        disturbed.broker.fault = at_call(number, FAULTS[fault])
        with suppress(AdminError):  # a policy may work without the refused call
            await disturbed.look()
        await disturbed.look()
        broker = disturbed.broker
        assert broker.namespaces == undisturbed.broker.namespaces, broker.calls[number - 1]
        assert disturbed.config_maps == undisturbed.config_maps


@pytest.mark.parametrize("fault", FAULTS)
async def test_failed_deletion_call_is_repaired_by_next_reconcile(
    connection: dict[str, Any], policy: MakeBody, fault: str
) -> None:
    body = policy(deletionPolicy="Delete", adoption="IfPresent")
    undisturbed = await deleted_shop(connection, body)
    before = len(undisturbed.broker.calls)
    assert await undisturbed.finalize() is Requeue.ON_CHANGE
    calls = undisturbed.broker.calls[before:]
    topics = undisturbed.broker.namespaces["shop/prod"].topics
    # A ledger stays with its dead-letter topic: it records moves that must not be repeated.
    kept = {"orders-fulfilment-DLQ", "orders-fulfilment-DLQ-LEDGER"}
    assert topics.keys() == {"orders", "others"} | kept
    assert topics["orders-fulfilment-DLQ"].subscriptions == []
    assert topics["orders-fulfilment-DLQ"].policies == {"messageTTL": 3600}
    assert topics["orders-fulfilment-DLQ"].quotas == QUOTAS
    assert len(calls) > 10
    for number in numbers_of(calls, fault):
        disturbed = await deleted_shop(connection, body)
        broker, policies = disturbed.broker, disturbed.kubernetes.objects[resources.POLICIES]
        broker.fault = at_call(number, FAULTS[fault])
        again = await disturbed.finalize()
        if again is Requeue.BACKOFF:
            broker.fault = None
            assert policies[Key.of(body)]["metadata"]["finalizers"] == [FINALIZER]
            again = await disturbed.finalize()
        assert again is Requeue.ON_CHANGE
        assert policies == {}  # the only finalizer is gone
        assert broker.namespaces == undisturbed.broker.namespaces, broker.calls[-number:]


async def deleted_shop(connection: dict[str, Any], policy: Body) -> Shop:
    """A shop with a policy that is provisioned and being deleted.

    Its dead-letter topic was there before.
    """
    made = shop(connection, policy)
    made.topics["orders-fulfilment-DLQ"] = Topic(
        0, {}, policies={"messageTTL": 3600}, quotas=dict(QUOTAS)
    )
    await made.look()
    made.kubernetes.add(resources.POLICIES, deleted(made.stored))
    return made


def created_in_part(made: Shop) -> BrokerFault:
    """Store a topic without partitions, lose its properties, and be killed before the answer."""

    async def befall(request: web.Request, do: Do) -> web.StreamResponse:
        topic = request.match_info.get("topic", "")
        if request.method != "PUT" or not request.path.endswith(f"/{topic}"):
            return await do()
        made.broker.fault = None
        await do()
        made.topics[topic].properties.clear()
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    return befall


async def test_created_topic_without_properties_is_owned_by_redrive(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    body = policy(deletionPolicy="Delete")
    undisturbed = shop(connection, body)
    disturbed = shop(connection, body)
    await undisturbed.look()
    disturbed.broker.fault = created_in_part(disturbed)
    with pytest.raises(AdminError):
        await disturbed.look()
    assert disturbed.topics["orders-fulfilment-DLQ"].properties == {}
    await disturbed.look()
    assert disturbed.broker.namespaces == undisturbed.broker.namespaces


async def test_deletion_removes_created_topic_without_properties(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    disturbed = shop(connection, policy(deletionPolicy="Delete"))
    disturbed.broker.fault = created_in_part(disturbed)
    with pytest.raises(AdminError):
        await disturbed.look()
    disturbed.kubernetes.add(resources.POLICIES, deleted(disturbed.stored))
    await disturbed.finalize()
    assert disturbed.topics.keys() == {"orders", "others"}


@pytest.mark.parametrize(
    "theirs", [Topic(0, {"team": "a"}), Topic(0, {}, {"": ["theirs"]})], ids=str
)
async def test_topic_created_first_by_others_is_not_owned(
    connection: dict[str, Any], policy: MakeBody, theirs: Topic
) -> None:
    contested = shop(connection, policy())

    async def forestall(request: web.Request, do: Do) -> web.StreamResponse:
        if request.method == "PUT" and request.path.endswith("/orders-fulfilment-DLQ"):
            contested.topics["orders-fulfilment-DLQ"] = theirs
        return await do()

    contested.broker.fault = forestall
    with pytest.raises(AdminConflictError):
        await contested.look()
    contested.broker.fault = None
    with raises(Reason.TOPIC_EXISTS):
        await contested.look()


STATUS_WRITE, FINALIZER_WRITE = ("patch_status", "RetryPolicy"), ("patch", "RetryPolicy")
LOOKS = 6
"""So many reconciles are enough for any fault."""


def crash_at_broker(fault: Fault) -> Callable[[web.Request, Do], Any]:
    """Have the operator crash at a write to the broker, too."""

    async def befall(request: web.Request, do: Do) -> web.StreamResponse:
        if request.method == "GET":
            return await do()
        try:
            answer: web.StreamResponse = await fault.befall(do)
        except Crash:
            return web.Response(status=503)
        return answer

    return befall


async def run(here: ReconcileHarness, fault: Fault) -> None:
    """Have the operator reconcile until all is done."""
    kubernetes = here.kubernetes
    assert isinstance(kubernetes, Faulty)
    kubernetes.fault, here.broker.fault = fault, crash_at_broker(fault)
    for _ in range(LOOKS):
        if await here.reconcile() is Requeue.ON_CHANGE:
            return
    raise AssertionError("it never ends")


def restart(here: ReconcileHarness, shown: list[Body]) -> None:
    """Start another operator, to which a list shows *shown* of the policies."""
    here.ctx.policies = Cache(shown)
    here.ctx.config_maps = Cache()
    here.__post_init__()


def stored_state(here: ReconcileHarness) -> dict[str, Any]:
    """Return all stored objects, without versions and times."""
    objects = copy.deepcopy(here.kubernetes.objects)
    for by_key in objects.values():
        for body in by_key.values():
            body["metadata"].pop("resourceVersion", None)
    for body in objects[resources.CONFIG_MAPS].values():
        body["metadata"].pop("uid")
    kinds = (resources.POLICIES, resources.CONFIG_MAPS)
    return {"broker": here.broker.namespaces, **{kind.kind: objects[kind] for kind in kinds}}


def count_writes(here: ReconcileHarness) -> Counter[tuple[str, str]]:
    """Return the number of each write, in Kubernetes and at the broker."""
    in_kubernetes = ((write.verb, write.resource.kind) for write in here.kubernetes.writes)
    return Counter([*here.broker.writes, *in_kubernetes])


@pytest.mark.parametrize("stale", [False, True], ids=["seen", "stale"])
@pytest.mark.parametrize("done", [False, True], ids=["not done", "done"])
async def test_crash_at_any_write_repeats_only_that_write(
    connection: dict[str, Any], policy: MakeBody, *, done: bool, stale: bool
) -> None:
    body = policy(deletionPolicy="Delete")
    peaceful = reconcile_harness(connection, body, Faulty())
    fault = Fault(0, done=False)
    await run(peaceful, fault)
    right, before, writes = stored_state(peaceful), count_writes(peaceful), fault.count
    assert writes > 10
    for number in range(1, writes + 1):
        here = reconcile_harness(connection, body, Faulty())
        kubernetes = here.kubernetes
        assert isinstance(kubernetes, Faulty)
        kubernetes.fault = fault = Fault(number, done=done)
        here.broker.fault = crash_at_broker(fault)
        with suppress(Crash, RedriveError):
            await here.reconcile()
        now = copy.deepcopy(kubernetes.objects[resources.POLICIES][KEY])
        restart(here, [body if stale else now])
        if stale:
            await reconcile_from_behind(here, now)
        await run(here, Fault(0, done=False))
        assert stored_state(here) == right, f"write {number}"
        more = count_writes(here) - before
        at_the_broker = {write: count for write, count in more.items() if write[0].isupper()}
        assert sum(at_the_broker.values()) <= 1, f"write {number}: {more}"
        # A stale cache shows no progress and no intent: both are written again.
        assert more.keys() - at_the_broker <= {STATUS_WRITE, FINALIZER_WRITE}, (
            f"write {number}: {more}"
        )
        assert max(more[STATUS_WRITE] - 1, more[FINALIZER_WRITE]) <= 1, f"write {number}: {more}"


async def reconcile_from_behind(here: ReconcileHarness, now: Body) -> None:
    """Reconcile once with a cache that is behind; then a watch shows the policy as it is."""
    with suppress(RedriveError):
        await here.reconcile()
    here.ctx.policies.put(now)


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
    """An operator, started again after a crash, that follows the changes of a user."""

    def __init__(self, here: ReconcileHarness, kubernetes: Watched) -> None:
        self.here, self.kubernetes = here, kubernetes
        self.asked = False
        self.start({})

    def start(self, objects: Objects) -> None:
        """Start the operator with the objects of a list."""
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
        """Start the operator an hour later with *shown*, then with the stored objects."""
        self.kubernetes.crash = None
        self.here.now += LATER
        self.start(shown)
        with suppress(RedriveError):
            await self.here.reconcile()
        await self.relist()
        await self.work()

    @property
    def is_going(self) -> bool:
        """True while the policy is being deleted."""
        policies = self.kubernetes.objects[resources.POLICIES].values()
        return any("deletionTimestamp" in body["metadata"] for body in policies)

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
        """Show all stored objects, as a new watch does, then relist to find deleted ones."""
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


def started(connection: Body, body: Body, kubernetes: Watched) -> Run:
    here = reconcile_harness(connection, body, kubernetes)
    kubernetes.objects.clear()
    return Run(here, kubernetes)


def story(run: Run, body: Body) -> list[Callable[[], Awaitable[None]]]:
    """Changes of the user, step by step."""
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


def state_of_run(run: Run) -> dict[str, Any]:
    """Return all stored objects, without versions and times."""
    objects = copy.deepcopy({kind.kind: dict(run.kubernetes.objects[kind]) for kind in WATCHED})
    for by_key in objects.values():
        for body in by_key.values():
            body["metadata"].pop("resourceVersion")
            if body["kind"] == "ConfigMap":
                body["metadata"].pop("uid")
            for condition in body.get("status", {}).get("conditions", []):
                condition.pop("lastTransitionTime")
    return {"broker": run.here.broker.namespaces, **objects}


def writes_of_run(run: Run) -> Counter[tuple[str, str]]:
    """Return the number of each write, in Kubernetes and at the broker."""
    in_kubernetes = ((write.verb, write.resource.kind) for write in run.kubernetes.writes)
    return Counter([*run.here.broker.writes, *in_kubernetes])


def deletions(writes: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
    """Return the deletions among *writes*."""
    return Counter({write: count for write, count in writes.items() if write[0] == "DELETE"})


@pytest.fixture(params=["Keep", "Discard"])
def body(policy: MakeBody, request: pytest.FixtureRequest) -> Body:
    return policy(deletionPolicy="Delete", deadLetter={"mode": request.param})


async def peace(connection: Body, body: Body) -> tuple[dict[str, Any], Counter[Any], list[Objects]]:
    run = started(connection, body, Watched())
    for step in story(run, body):
        await step()
        await run.work()
    return state_of_run(run), writes_of_run(run), run.kubernetes.states


@pytest.mark.parametrize("late", [False, True], ids=["repaired at once", "repaired in the end"])
async def test_relist_repairs_any_missed_watch_event(
    connection: dict[str, Any], body: Body, *, late: bool
) -> None:
    right, before, states = await peace(connection, body)
    assert len(states) > 10
    for missed in range(len(states)):
        run = started(connection, body, Watched(missed))
        for step in story(run, body):
            await step()
            await run.work()
            if not late or run.is_going:  # a name is free once a missed deletion is seen
                await run.relist()
                await run.work()
        await run.relist()
        await run.work()
        assert state_of_run(run) == right, f"event {missed}"
        assert not writes_of_run(run) - before, f"event {missed}"


async def test_stale_start_after_crash_deletes_nothing_more(
    connection: dict[str, Any], body: Body
) -> None:
    right, before, states = await peace(connection, body)
    for crash in range(len(states)):
        for shown in distinct(states[: crash + 1]):
            run = started(connection, body, Watched(crash=crash))
            for step in story(run, body):
                await step()
                with suppress(CrashError):
                    await run.work()
                if run.kubernetes.crash is not None and len(run.kubernetes.states) > crash:
                    await run.begin_again(states[shown])
            case = f"ended at write {crash}, begun with what was there after write {shown}"
            assert state_of_run(run) == right, case
            assert not deletions(writes_of_run(run)) - deletions(before), case


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
