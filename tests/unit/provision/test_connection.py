"""BrokerConnections: calls, versions of brokers, crashes, and deletion while in use."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from redrive import __version__
from redrive.admin.client import Admin
from redrive.admin.model import PULSAR_RELEASES
from redrive.api import Body
from redrive.api.conditions import find, reason
from redrive.api.connection import BrokerConnectionSpec
from redrive.api.job import JobTemplate
from redrive.errors import RedriveError, Requeue
from redrive.kube.cache import Cache
from redrive.kube.client import ConflictError, ReferenceNotFoundError
from redrive.kube.connections import Connection
from redrive.kube.context import Settings, wall_clock
from redrive.kube.job_templates import JobTemplates
from redrive.kube.resources import CONNECTIONS, Key
from redrive.provision.connection import (
    IN_USE,
    is_protection_due,
    job_templates,
    reconcile,
    unsupported,
    usage,
)
from redrive.reasons import Reason
from tests.support.fake_admin import FakeBroker, answering
from tests.support.fake_kubernetes import Crash, FakeKubernetes, Fault, Faulty

KEY = Key("shop", "main")
MakeBody = Callable[..., dict[str, Any]]


async def test_unchanged_connection_costs_two_calls_and_no_write(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    policies = Cache([policy("orders"), policy("elsewhere", connectionRef={"name": "other"})])
    identity = {"namespace": "shop", "name": "main", "uid": "u", "resourceVersion": "1"}
    typed = {"apiVersion": CONNECTIONS.api_version, "kind": CONNECTIONS.kind}
    body = {**typed, "metadata": {**identity, "generation": 1}, "spec": connection}
    kubernetes, missing = FakeKubernetes(), list[ReferenceNotFoundError]()
    kubernetes.add(CONNECTIONS, body)
    broker = FakeBroker()
    broker.tenants = {"shop": []}
    admin = broker.admin()
    spec = BrokerConnectionSpec.model_validate(connection)

    async def open_(key: Key) -> Connection:
        for error in missing:
            raise error
        return Connection(key, spec, admin)

    ctx: Any = SimpleNamespace(
        kubernetes=kubernetes,
        connections=Cache([body]),
        policies=policies,
        rocketmq_policies=Cache(),
        namespaces=None,
        settings=Settings("here", (), None, "", ""),
        brokers=SimpleNamespace(open_any=open_),
        clock=wall_clock,
    )
    assert await reconcile(KEY, ctx) is Requeue.ON_CHANGE
    assert reason(kubernetes.objects[CONNECTIONS][KEY]) == "Connected"
    assert kubernetes.objects[CONNECTIONS][KEY]["status"]["brokerVersion"] == "4.0.8"
    writes, calls = len(kubernetes.writes), len(broker.calls)
    assert await reconcile(KEY, ctx) is Requeue.ON_CHANGE
    assert (len(kubernetes.writes), len(broker.calls)) == (writes, calls + 2)

    assert kubernetes.objects[CONNECTIONS][KEY]["status"]["policies"] == 1
    policies.put(policy("payments"))
    assert await reconcile(KEY, ctx) is Requeue.ON_CHANGE
    status = kubernetes.objects[CONNECTIONS][KEY]["status"]
    assert (status["policies"], status["operatorVersion"]) == (2, __version__)
    assert status["allow"] == [{"name": "shop", "namespaces": 1, "policies": 2}]

    missing.append(ReferenceNotFoundError("the Secret is not there", remedy="make it"))
    assert await reconcile(KEY, ctx) is Requeue.BACKOFF
    assert reason(kubernetes.objects[CONNECTIONS][KEY]) == "SecretNotFound"


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("4.0.8", ""),
        ("4.2.4", ""),
        ("4.1.0-SNAPSHOT", ""),
        ("3.3.9", "got 3.3.9"),
        ("5.0.1", "tested with Pulsar 4.0 to 4.2"),
        ("<html>secret 10.0.0.1</html>", ""),
        ("10.11.12.13", ""),
    ],
)
async def test_broker_outside_support_matrix_is_warned_about(version: str, message: str) -> None:
    broker = FakeBroker()
    broker.version = version
    admin = broker.admin()
    warning = unsupported(await admin.version(), PULSAR_RELEASES)
    assert (warning is not None) is bool(message)
    assert warning is None or (
        warning.reason == "BrokerNotSupported" and message in warning.message
    )


async def test_broker_without_version_is_not_warned_about() -> None:
    broker = FakeBroker()
    admin = broker.admin()
    broker.fault = answering(403)
    assert await admin.version() == ()
    assert unsupported((), PULSAR_RELEASES) is None


NOW = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Life:
    """A connection that a policy uses, that is deleted then, and goes once the policy has gone.

    Attributes:
        stale: whether an operator that starts after a crash knows the connection as it was before.
        states: the stored connection after each part.
    """

    admin: Admin
    connection: Body
    policy: Body
    stale: bool = False
    fault: Fault = field(default_factory=lambda: Fault(0, done=False))
    states: list[Body | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kubernetes = Faulty()
        self.kubernetes.fault = self.fault
        self.kubernetes.add(CONNECTIONS, self.connection)

    @property
    def stored(self) -> dict[str, Any] | None:
        return self.kubernetes.objects[CONNECTIONS].get(KEY)

    async def lived(self) -> Life:
        """Reconcile the connection through the three parts of its life."""
        await self._part([self.policy])
        assert self.stored is not None
        self.stored["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        await self._part([self.policy])
        await self._part([])
        return self

    async def _part(self, policies: Sequence[Body]) -> None:
        cached = copy.deepcopy([self.stored] if self.stored else [])
        try:
            await self._reconcile(cached, policies)
        except Crash:
            if self.stale:
                with suppress(RedriveError):
                    await self._reconcile(cached, policies)
            await self._reconcile([self.stored] if self.stored else [], policies)
        state = copy.deepcopy(self.stored)
        if state is not None:
            del state["metadata"]["resourceVersion"]
        self.states.append(state)

    async def _reconcile(self, cached: Sequence[Body], policies: Sequence[Body]) -> None:
        async def open_(key: Key) -> Connection:
            spec = BrokerConnectionSpec.model_validate(self.connection["spec"])
            return Connection(key, spec, self.admin)

        ctx: Any = SimpleNamespace(
            kubernetes=self.kubernetes,
            connections=Cache(copy.deepcopy(list(cached))),
            policies=Cache(policies),
            rocketmq_policies=Cache(),
            namespaces=None,
            settings=Settings("here", (), None, "", ""),
            brokers=SimpleNamespace(open_any=open_),
            clock=lambda: NOW,
        )
        assert await reconcile(KEY, ctx) is Requeue.ON_CHANGE

    @property
    def history(self) -> Counter[str]:
        return Counter(write.verb for write in self.kubernetes.writes)


MakeLife = Callable[..., Life]


@pytest.fixture
async def live(connection: dict[str, Any], policy: MakeBody) -> MakeLife:
    identity = {"namespace": "shop", "name": "main", "uid": "u", "resourceVersion": "1"}
    typed = {"apiVersion": CONNECTIONS.api_version, "kind": CONNECTIONS.kind}
    body = {**typed, "metadata": {**identity, "generation": 1}, "spec": connection}
    broker = FakeBroker()
    broker.tenants = {"shop": []}
    admin = broker.admin()
    return lambda **options: Life(admin, body, policy(), **options)


@pytest.mark.parametrize("stale", [False, True], ids=["seen", "stale"])
@pytest.mark.parametrize("done", [False, True], ids=["not done", "done"])
async def test_connection_crash_at_any_write_ends_in_same_state(
    live: MakeLife, *, done: bool, stale: bool
) -> None:
    peace = await live().lived()
    used, blocked, gone = peace.states
    assert used is not None
    assert used["metadata"]["finalizers"]
    assert blocked is not None
    assert "DeletionBlocked" in str(blocked["status"])
    assert gone is None
    writes = peace.fault.count
    assert writes >= 5
    for number in range(1, writes + 1):
        disturbed = await live(stale=stale, fault=Fault(number, done=done)).lived()
        assert disturbed.states == peace.states, f"write {number}"
        more = disturbed.history - peace.history
        # One that is behind has the finalizer, and the progress, written again.
        assert more["patch"] <= 1, f"write {number}: {more}"
        assert more["patch_status"] <= 2, f"write {number}: {more}"


ALIEN = "example.com/other"


@dataclass(frozen=True)
class Lent:
    """A connection for the namespaces `shop` and `payments`, and its policies."""

    kubernetes: FakeKubernetes
    ctx: Any

    @property
    def stored(self) -> dict[str, Any] | None:
        """The connection as the API server has it."""
        return self.kubernetes.objects[CONNECTIONS].get(KEY)

    @property
    def finalizers(self) -> list[str]:
        """Those of the connection."""
        assert self.stored is not None
        return list(self.stored["metadata"].get("finalizers", []))

    async def reconcile(self, *policies: Body) -> str:
        """Reconcile it with these policies; return the reason that blocks its deletion."""
        for body in tuple(self.ctx.policies):
            self.ctx.policies.drop(body)
        for body in policies:
            self.ctx.policies.put(body)
        assert await reconcile(KEY, self.ctx) is Requeue.ON_CHANGE
        condition = None if self.stored is None else find(self.stored, Reason.DELETION_BLOCKED)
        return "" if condition is None else condition.message

    def delete(self) -> None:
        """Ask for its deletion, as the API server does where there are finalizers."""
        stored = self.stored
        assert stored is not None
        if not stored["metadata"].get("finalizers"):
            del self.kubernetes.objects[CONNECTIONS][KEY]
            self.ctx.connections.drop(stored)
            return
        stored["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        self.kubernetes.add(CONNECTIONS, stored)
        self.ctx.connections.renew(copy.deepcopy(stored))


@pytest.fixture
async def lent(connection: dict[str, Any]) -> Lent:
    names = {"names": ["shop", "payments"]}
    connection["allow"] = [rule | {"namespaces": names} for rule in connection["allow"]]
    identity = {"namespace": "shop", "name": "main", "uid": "u", "resourceVersion": "1"}
    typed = {"apiVersion": CONNECTIONS.api_version, "kind": CONNECTIONS.kind}
    body = {**typed, "metadata": {**identity, "generation": 1}, "spec": connection}
    kubernetes = FakeKubernetes()
    kubernetes.add(CONNECTIONS, body)
    broker = FakeBroker()
    broker.tenants = {"shop": []}
    admin = broker.admin()

    async def open_(key: Key) -> Connection:
        return Connection(key, BrokerConnectionSpec.model_validate(connection), admin)

    return Lent(
        kubernetes,
        SimpleNamespace(
            kubernetes=kubernetes,
            connections=Cache([body]),
            policies=Cache(),
            rocketmq_policies=Cache(),
            namespaces=None,
            settings=Settings("here", (), None, "", ""),
            brokers=SimpleNamespace(open_any=open_),
            clock=wall_clock,
        ),
    )


def policy_in(namespace: str, body: dict[str, Any]) -> dict[str, Any]:
    """The policy, in another namespace than the connection."""
    ref = {"name": "main", "namespace": "shop"}
    metadata = body["metadata"] | {"namespace": namespace}
    return body | {"metadata": metadata, "spec": body["spec"] | {"connectionRef": ref}}


async def test_connection_has_finalizer_while_policies_use_it(lent: Lent, policy: MakeBody) -> None:
    await lent.reconcile()
    assert lent.finalizers == []
    for used in ((policy(),), (policy_in("payments", policy()),), (policy("a"), policy("b"))):
        assert await lent.reconcile(*used) == ""
        assert lent.finalizers == [IN_USE]
        stored = lent.stored
        assert stored is not None
        assert stored["status"]["policies"] == len(used)
    writes = len(lent.kubernetes.writes)
    await lent.reconcile(policy("a"), policy("b"))
    assert len(lent.kubernetes.writes) == writes
    await lent.reconcile()
    assert lent.finalizers == []


async def test_deletion_in_use_names_policies_and_waits(lent: Lent, policy: MakeBody) -> None:
    own = [policy(f"own-{number}") for number in range(6)]
    others = [policy_in("payments", policy(f"hidden-{number}")) for number in range(2)]
    await lent.reconcile(*own, *others)
    lent.delete()
    message = await lent.reconcile(*own, *others)
    named = ", ".join(f"RetryPolicy own-{number}" for number in range(5))
    assert f"got {named}, 1 more, 2 of other namespaces; delete them, or let them use" in message
    stored = lent.stored
    assert stored is not None
    assert reason(stored) == "Connected"  # its policies continue to work
    assert stored["status"]["warnings"] == [Reason.DELETION_BLOCKED]
    assert "got 2 of other namespaces; delete" in await lent.reconcile(*others)
    assert "hidden" not in str(lent.stored)
    warned = [event for event in lent.kubernetes.announced() if event[1] == Reason.DELETION_BLOCKED]
    assert {event[0] for event in warned} == {"Warning"}
    await lent.reconcile()
    assert lent.stored is None


async def test_policy_of_foreign_namespace_does_not_block_deletion(
    lent: Lent, policy: MakeBody
) -> None:
    await lent.reconcile(policy_in("stranger", policy()))
    assert lent.finalizers == []
    await lent.reconcile(policy(), policy_in("stranger", policy()))
    lent.delete()
    await lent.reconcile(policy_in("stranger", policy()))
    assert lent.stored is None


async def test_recorded_rights_of_replays_block_deletion(lent: Lent, policy: MakeBody) -> None:
    await lent.reconcile(policy())
    topic = "persistent://shop/prod/checked"
    record = {"topic": topic, "role": "replayer", "actions": ["produce"]}
    for rights, message in (
        ({"uid": [record]}, "the grants of Replays at their targets are revoked"),
        ({"uid": None}, ""),
    ):
        status = {"targetRights": rights}
        lent.ctx.connections.renew(await lent.kubernetes.patch_status(CONNECTIONS, KEY, status))
        if message:
            lent.delete()
        assert message in await lent.reconcile()
        assert (lent.stored is not None) is bool(message)


async def test_foreign_finalizers_stay_and_conflicts_are_raised(
    lent: Lent, policy: MakeBody
) -> None:
    await lent.reconcile(policy())
    stored = lent.stored
    assert stored is not None
    stored["metadata"]["finalizers"] = [ALIEN, IN_USE]
    lent.kubernetes.add(CONNECTIONS, stored)
    lent.ctx.connections.renew(copy.deepcopy(stored))
    lent.delete()
    stored = lent.stored
    assert stored is not None
    stored["metadata"]["resourceVersion"] = "9999"  # another finalizer may have come or gone
    with pytest.raises(ConflictError):
        await lent.reconcile()
    lent.ctx.connections.renew(copy.deepcopy(stored))
    await lent.reconcile()
    assert lent.finalizers == [ALIEN]


def test_protection_is_due_for_first_and_last_policy() -> None:
    def made(**metadata: object) -> dict[str, Any]:
        return {"metadata": {"name": "main", "namespace": "shop", **metadata}}

    assert is_protection_due(made(), used=True)
    assert not is_protection_due(made(), used=False)
    assert is_protection_due(made(finalizers=[IN_USE]), used=False)
    assert not is_protection_due(made(finalizers=[IN_USE]), used=True)
    assert is_protection_due(made(finalizers=[IN_USE], deletionTimestamp="x"), used=True)
    granted: dict[str, Any] = {"status": {"targetRights": {"uid": []}}}
    assert not is_protection_due(made(finalizers=[IN_USE]) | granted, used=False)


def test_usage_counts_namespaces_and_policies_of_each_rule(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    topics = ["persistent://shop/*/*"]
    connection["allow"] = [
        {"name": "own", "topics": topics},
        {"name": "some", "topics": topics, "namespaces": {"names": ["shop", "a", "b"]}},
        {"name": "none", "topics": topics, "namespaces": {"names": ["c"]}},
    ]
    body = {"metadata": {**KEY._asdict(), "uid": "u"}, "spec": connection}
    used = [policy(str(n)) for n in range(5)]
    for other, namespace in zip(used[2:], "abb", strict=True):
        other["metadata"]["namespace"] = namespace
    ctx: Any = SimpleNamespace(connections=Cache([body]), namespaces=None)
    assert usage(body, used, ctx) == {
        "policies": 5,
        "allow": [
            {"name": "own", "namespaces": 1, "policies": 2},
            {"name": "some", "namespaces": 3, "policies": 5},
            {"name": "none", "namespaces": 0, "policies": 0},
        ],
    }


def template_context(spec: Body, store: JobTemplates, **jobs: object) -> Any:  # noqa: ANN401
    """Return a context with one connection, of an operator that permits 10 executors."""
    body = {
        "metadata": {**KEY._asdict(), "uid": "u", "generation": 1},
        "spec": {**spec, **({"jobs": jobs} if jobs else {})},
    }
    settings = Settings("here", (), Key("redrive", "replay"), "", "", max_executors=10)
    return SimpleNamespace(connections=Cache([body]), settings=settings, job_templates=store)


def test_job_templates_of_connection_have_lowest_bound(connection: Body) -> None:
    store = JobTemplates(None)
    store._valid |= {"large": JobTemplate(max_executors=16)}  # noqa: SLF001  as if it were read
    default, large = {"name": "default", "maxExecutors": 4}, {"name": "large", "maxExecutors": 10}
    assert job_templates(KEY, template_context(connection, store)) == ([default, large], ())
    chosen = template_context(connection, store, templates=["large", "absent"], maxExecutors=6)
    assert job_templates(KEY, chosen) == ([{**large, "maxExecutors": 6}], ())


def test_invalid_job_template_is_a_warning_of_connection(connection: Body) -> None:
    store = JobTemplates(None)
    store._problems = {"large": "wrong"}  # noqa: SLF001  as if it were read
    _, (problem,) = job_templates(KEY, template_context(connection, store))
    assert problem.reason == "JobTemplateInvalid"
    assert "the job template large is invalid: wrong" in problem.message
    assert job_templates(KEY, template_context(connection, store, templates=["default"]))[1] == ()
