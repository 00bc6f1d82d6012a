"""Rights at a target: recorded, granted, shared, and revoked whatever the end of a Replay."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import re
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from redrive.api import Body
from redrive.api.connection import BrokerConnectionSpec
from redrive.api.crds import REPLAY, structural
from redrive.api.retrypolicy import ConnectionRef
from redrive.errors import RedriveError, Requeue
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.connections import Connection
from redrive.kube.context import Context
from redrive.kube.resources import TOPIC_OWNER, Key
from redrive.kube.status import has_finalizer
from redrive.provision.desired import GRANTS, Grantee
from redrive.reasons import Reason
from redrive.replay.controller import launch, rights
from redrive.replay.controller.admission import ENDED_AT
from redrive.replay.controller.prerequisites import prepare_target
from redrive.replay.controller.reconciler import reconcile
from redrive.replay.controller.spark_operators import APPLICATION
from tests.support.fake_admin import FakeBroker, Namespace, Topic, answering
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.reasons import raises
from tests.unit.replay.controller.test_admission import connection, ctx, policy, replay

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PREFIX = "persistent://shop/prod"
CHECKED = {"target": {"type": "Topic", "topic": f"{PREFIX}/checked"}}
BOTH = ["consume", "produce"]


@dataclasses.dataclass
class Rights:
    """A broker with targets, an API server with Replays, and an operator between them."""

    broker: FakeBroker
    kubernetes: FakeKubernetes
    ctx: Context
    now: datetime = NOW

    def add(self, name: str, **spec: Any) -> None:  # noqa: ANN401
        """Create a Replay to `checked`."""
        body = replay(name, spec={**CHECKED, **spec})
        self.kubernetes.add(resources.REPLAYS, body)
        self.ctx.replays.put(body)

    def add_two(self) -> None:
        """Create `first` and `second`, Replays of two policies, to `checked`."""
        other = policy(subscription="billing")
        other["metadata"] |= {"name": "billing", "uid": "uid-billing"}
        self.ctx.policies.put(other)
        self.add("first")
        self.add("second", policyRef={"name": "billing"})

    def body(self, name: str) -> Body | None:
        """Return a Replay as it is stored; None if it is gone."""
        return self.kubernetes.objects[resources.REPLAYS].get(Key("shop", name))

    async def change(self, name: str, status: dict[str, Any]) -> None:
        """Write into the status of a Replay, as its job or another reconcile does."""
        after = await self.kubernetes.patch_status(resources.REPLAYS, Key("shop", name), status)
        self.ctx.replays.renew(after)

    async def end(self, name: str, phase: str) -> None:
        """Have a launched Replay come to its end."""
        await self.change(name, {"phase": phase, "completionTime": "2026-01-01T00:00:00Z"})
        body = self.body(name)
        assert body is not None
        annotations = {ENDED_AT: "2026-01-01T00:00:00Z", APPLICATION: launch.name_of(body)}
        ended = {"metadata": {"annotations": annotations}}
        after = await self.kubernetes.patch(resources.REPLAYS, Key("shop", name), ended)
        self.ctx.replays.renew(after)

    @property
    def records(self) -> dict[str, Any]:
        """Return the records in the status of the connection, by uid of the Replay."""
        body = self.kubernetes.objects[resources.CONNECTIONS][Key("shop", "main")]
        records: dict[str, Any] = body.get("status", {}).get("targetRights", {})
        return records

    def delete(self, name: str) -> None:
        """Delete a Replay, which its finalizer keeps."""
        body = self.kubernetes.objects[resources.REPLAYS][Key("shop", name)]
        body["metadata"]["deletionTimestamp"] = f"{self.now:%Y-%m-%dT%H:%M:%SZ}"
        self.ctx.replays.put(body)

    async def prepare(self, name: str) -> None:
        """Have the operator prepare the target of a Replay."""
        body = self.ctx.replays.get(Key("shop", name))
        assert body is not None
        await prepare_target(body, self.ctx)

    async def reconcile(self, name: str) -> Requeue:
        """Have the operator reconcile a Replay."""
        return await reconcile(Key("shop", name), self.ctx, asyncio.Lock())

    @property
    def granted(self) -> dict[str, list[str]]:
        """Return the rights of each role on `checked`."""
        grants = self.broker.namespaces["shop/prod"].grants.get(f"{PREFIX}/checked", {})
        return {role: sorted(actions) for role, actions in grants.items()}

    def reset(self) -> None:
        """Remove all Replays, and what they have left."""
        self.now = NOW
        self.kubernetes.objects[resources.REPLAYS].clear()
        self.kubernetes.objects[resources.CONNECTIONS].clear()
        self.kubernetes.add(resources.CONNECTIONS, connection())
        self.broker.namespaces["shop/prod"].grants = {f"{PREFIX}/checked": {"billing": ["consume"]}}
        self.restart()

    def restart(self) -> None:
        """Start another operator, which lists the stored Replays."""
        stored = self.kubernetes.objects
        self.ctx = dataclasses.replace(
            self.ctx,
            replays=Cache(stored[resources.REPLAYS].values()),
            connections=Cache(stored[resources.CONNECTIONS].values()),
        )


@pytest.fixture
async def place() -> Rights:
    """A target that deduplicates and has a subscription, on which others have rights."""
    broker = FakeBroker()
    broker.tenants = {"shop": []}
    topics = {"checked": Topic(0, {}, {"": ["s"]}), "orders": Topic(0, {}, {"": ["s"]})}
    for topic in topics.values():
        topic.policies["deduplicationEnabled"] = True
    broker.namespaces = {"shop/prod": Namespace(topics)}
    admin = broker.admin()
    spec = BrokerConnectionSpec.model_validate(connection()["spec"])

    async def resolve(*_: object) -> Connection:
        return Connection(Key("shop", "main"), spec, admin)

    kubernetes = FakeKubernetes()
    place = Rights(broker, kubernetes, ctx())
    place.reset()
    place.ctx = dataclasses.replace(
        place.ctx,
        kubernetes=kubernetes,
        brokers=cast("Any", SimpleNamespace(resolve=resolve, open=resolve)),
        clock=lambda: place.now,
    )
    return place


async def test_right_is_recorded_before_it_is_granted(place: Rights) -> None:
    place.add("first")
    place.broker.fault = answering(500)
    with pytest.raises(Exception, match="500"):
        await place.prepare("first")
    place.broker.fault = None
    assert place.granted == {"billing": ["consume"]}
    await place.prepare("first")
    assert place.granted == {"billing": ["consume"], "replayer": BOTH}
    body = place.body("first")
    assert body is not None
    assert has_finalizer(body, rights.FINALIZER)
    record = {"topic": f"{PREFIX}/checked", "role": "replayer", "actions": BOTH}
    assert place.records == {"uid-first": [record]}
    writes = len(place.kubernetes.writes)
    await place.prepare("first")
    assert len(place.kubernetes.writes) == writes


@pytest.mark.parametrize("phase", ["Completed", "Failed"])
@pytest.mark.parametrize("restart", [False, True])
async def test_right_ends_with_replay(place: Rights, phase: str, *, restart: bool) -> None:
    place.add("first")
    await place.prepare("first")
    await place.end("first", phase)
    if restart:
        place.restart()
    await place.reconcile("first")
    assert place.granted == {"billing": ["consume"]}
    body = place.body("first")
    assert body is not None
    assert not has_finalizer(body, rights.FINALIZER)
    assert place.records == {}
    assert body["status"]["phase"] == phase


@pytest.mark.parametrize("restart", [False, True])
async def test_right_ends_with_deleted_replay(place: Rights, *, restart: bool) -> None:
    place.add("first")
    await place.prepare("first")
    place.delete("first")
    if restart:
        place.restart()
    assert await place.reconcile("first") is Requeue.ON_CHANGE
    assert place.granted == {"billing": ["consume"]}
    body = place.body("first")
    assert body is None or not has_finalizer(body, rights.FINALIZER)


async def test_right_granted_by_others_stays(place: Rights) -> None:
    place.broker.namespaces["shop/prod"].grants[f"{PREFIX}/checked"]["replayer"] = ["consume"]
    place.add("first")
    await place.prepare("first")
    assert place.granted["replayer"] == BOTH
    await place.end("first", "Completed")
    await place.reconcile("first")
    assert place.granted["replayer"] == ["consume"]


async def test_right_without_need_of_grant_leaves_no_record(place: Rights) -> None:
    place.broker.namespaces["shop/prod"].grants[f"{PREFIX}/checked"]["replayer"] = BOTH
    place.add("first")
    await place.prepare("first")
    assert place.kubernetes.writes == []
    await place.end("first", "Completed")
    await place.reconcile("first")
    assert place.granted["replayer"] == BOTH


@pytest.mark.parametrize(("earlier", "later"), [("first", "second"), ("second", "first")])
async def test_shared_right_ends_with_last_replay(place: Rights, earlier: str, later: str) -> None:
    place.add_two()
    await place.prepare("first")
    await place.prepare("second")
    await place.end(earlier, "Completed")
    await place.reconcile(earlier)
    assert place.granted["replayer"] == BOTH
    place.delete(later)
    await place.reconcile(later)
    assert place.granted == {"billing": ["consume"]}


async def test_right_ends_while_another_role_keeps_its_own(place: Rights) -> None:
    """The other Replay was prepared while its connection had another role."""
    place.add_two()
    await place.prepare("first")
    await place.prepare("second")
    of_second = {"uid-second": [{**place.records["uid-second"][0], "role": "former"}]}
    after = await place.kubernetes.patch_status(
        resources.CONNECTIONS, Key("shop", "main"), {"targetRights": of_second}
    )
    place.ctx.connections.renew(after)
    await place.end("first", "Completed")
    await place.reconcile("first")
    assert place.granted == {"billing": ["consume"]}
    assert place.records == of_second


async def test_right_of_former_role_ends_with_replay(place: Rights) -> None:
    """The role of the connection is changed while the Replay waits."""
    place.add_two()
    await place.prepare("first")
    own = place.records["uid-first"][0]
    after = await place.kubernetes.patch_status(
        resources.CONNECTIONS,
        Key("shop", "main"),
        {"targetRights": {"uid-first": [{**own, "role": "former"}]}},
    )
    place.ctx.connections.renew(after)
    grants = place.broker.namespaces["shop/prod"].grants[f"{PREFIX}/checked"]
    grants["former"] = grants.pop("replayer")
    await place.prepare("first")
    assert sorted(place.granted) == ["billing", "former", "replayer"]
    await place.end("first", "Completed")
    await place.reconcile("first")
    assert place.granted == {"billing": ["consume"]}
    assert place.records == {}


async def test_shared_right_ends_with_replays_ending_at_once(place: Rights) -> None:
    place.add_two()
    await asyncio.gather(place.prepare("first"), place.prepare("second"))
    assert place.granted["replayer"] == BOTH
    await place.end("first", "Completed")
    await place.end("second", "Failed")
    await asyncio.gather(place.reconcile("first"), place.reconcile("second"))
    assert place.granted == {"billing": ["consume"]}


def add_connection(place: Rights, spelling: str) -> FakeBroker:
    """Create `second`, a Replay of a policy with another connection, and return its broker."""
    through = connection()
    through["metadata"] |= {"name": "other", "uid": "uid-other"}
    broker = place.broker
    if spelling == "another":
        broker = FakeBroker()
        topic = Topic(0, {}, {"": ["s"]})
        topic.policies["deduplicationEnabled"] = True
        broker.tenants = {"shop": []}
        broker.namespaces = {"shop/prod": Namespace({"checked": topic})}
    through["spec"]["pulsar"]["adminURL"] = f"http://{spelling}:8080"
    place.kubernetes.add(resources.CONNECTIONS, through)
    place.ctx.connections.put(through)
    other = policy(subscription="billing", connectionRef={"name": "other"})
    other["metadata"] |= {"name": "billing", "uid": "uid-billing"}
    place.ctx.policies.put(other)
    place.add("first")
    place.add("second", policyRef={"name": "billing"})
    spec = BrokerConnectionSpec.model_validate(through["spec"])
    admins = {"main": place.broker.admin(), "other": broker.admin()}

    async def open_connection(key: Key) -> Connection:
        return Connection(key, spec, admins[key.name])

    async def resolve(ref: ConnectionRef, _: str) -> Connection:
        return await open_connection(Key("shop", ref.name))

    brokers = cast("Any", SimpleNamespace(resolve=resolve, open=open_connection))
    place.ctx = dataclasses.replace(place.ctx, brokers=brokers)
    return broker


def stored_records(place: Rights) -> list[object]:
    return [body.get("status", {}).get("targetRights") for body in place.ctx.connections]


def replayer(broker: FakeBroker) -> list[str]:
    grants = broker.namespaces["shop/prod"].grants.get(f"{PREFIX}/checked", {})
    return sorted(grants.get("replayer", []))


@pytest.mark.parametrize("spelling", ["alias", "another"])
@pytest.mark.parametrize("earlier", ["first", "second"])
@pytest.mark.parametrize("ending", ["first", "second"])
async def test_right_shared_by_connections_ends_with_last_replay(
    place: Rights, spelling: str, earlier: str, ending: str
) -> None:
    """The URLs of two connections do not show whether they name one broker."""
    broker = add_connection(place, spelling)
    names = ["first", "second"]
    await place.prepare(earlier)
    for name in names:
        await place.prepare(name)
    await place.end(ending, "Completed")
    await place.reconcile(ending)
    (running,) = set(names) - {ending}
    assert replayer(broker if running == "second" else place.broker) == BOTH
    await place.end(running, "Completed")
    await place.reconcile(running)
    assert (replayer(place.broker), replayer(broker)) == ([], [])
    assert not any(stored_records(place))


async def test_right_of_others_at_second_broker_stays(place: Rights) -> None:
    """The Replay joins the record of the first broker, and records none for the second."""
    broker = add_connection(place, "another")
    broker.namespaces["shop/prod"].grants[f"{PREFIX}/checked"] = {"replayer": BOTH}
    for name in ("first", "second"):
        await place.prepare(name)
    for name in ("first", "second"):
        await place.end(name, "Completed")
        await place.reconcile(name)
    assert (replayer(place.broker), replayer(broker)) == ([], BOTH)
    assert not any(stored_records(place))


async def test_unavailable_broker_delays_no_other_revocation(place: Rights) -> None:
    broker = add_connection(place, "another")
    for name in ("first", "second"):
        await place.prepare(name)
    await place.end("first", "Completed")
    await place.reconcile("first")
    place.broker.fault = answering(500)
    await place.end("second", "Completed")
    assert await place.reconcile("second") is Requeue.SLOW_BACKOFF
    assert (replayer(place.broker), replayer(broker)) == (BOTH, [])
    place.broker.fault = None
    await place.reconcile("second")
    assert replayer(place.broker) == []


async def test_error_at_a_connection_of_another_tenant_is_not_shown(
    place: Rights, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.add("first")
    await place.prepare("first")
    through = connection()
    through["metadata"] |= {"namespace": "infra", "name": "elsewhere", "uid": "uid-elsewhere"}
    (own,) = place.ctx.connections
    through["status"] = {"targetRights": own["status"]["targetRights"]}
    place.ctx.connections.put(through)

    async def fail(_: object, __: object, at: Key, ___: object) -> None:
        raise RedriveError(f"no answer of {at.namespace}", remedy="wait")

    monkeypatch.setattr(rights, "_revoke", fail)
    (replay,) = place.ctx.replays
    with pytest.raises(RedriveError, match="no answer of shop"):
        await rights.release(replay, place.ctx)
    place.ctx.connections.put({**own, "status": {}})
    with pytest.raises(RedriveError, match="another connection") as raised:
        await rights.release(replay, place.ctx)
    assert "infra" not in str(raised.value)


def adopt(
    place: Rights, field: str, owner: str = "here/shop/billing", **status: str | None
) -> None:
    """Have a policy own `checked`, and name it in a field of its status."""
    adopting = policy(subscription="billing", naming={field: f"{PREFIX}/checked"})
    adopting["metadata"] |= {"name": "billing", "uid": "uid-billing"}
    names = {"deadLetterTopic": f"{PREFIX}/dead", field: f"{PREFIX}/checked", **status}
    adopting["status"] |= {name: topic for name, topic in names.items() if topic}
    place.ctx.policies.put(adopting)
    place.broker.namespaces["shop/prod"].topics["checked"].properties = {TOPIC_OWNER: owner}


@pytest.mark.parametrize(
    ("field", "kept"),
    [("retryTopic", BOTH), ("ledgerTopic", BOTH), ("deadLetterTopic", ["consume"])],
)
async def test_right_that_owner_of_topic_grants_stays(
    place: Rights, field: str, kept: list[str]
) -> None:
    """The policy needs the right by now, and grants it."""
    place.add("first")
    await place.prepare("first")
    adopt(place, field)
    await place.end("first", "Completed")
    await place.reconcile("first")
    assert place.granted["replayer"] == kept
    assert place.records == {}


@pytest.mark.parametrize(
    ("owner", "status", "role"),
    [
        ("", {}, "replayer"),
        ("elsewhere/shop/billing", {}, "replayer"),
        ("here/shop/billing", {"retryTopic": f"{PREFIX}/orders-billing-RETRY"}, "replayer"),
        ("here/shop/billing", {"deadLetterTopic": None}, "replayer"),
        ("here/shop/billing", {}, "other"),
    ],
    ids=["not-owned", "owned-by-other", "former-name", "discards", "other-role"],
)
async def test_right_without_grant_of_owner_is_revoked(
    place: Rights, owner: str, status: dict[str, str | None], role: str
) -> None:
    """Anybody can create a policy that names the topic; it may be inadmissible, or elsewhere."""
    place.add("first")
    await place.prepare("first")
    adopt(place, "retryTopic", owner, **status)
    through = place.ctx.connections.get(Key("shop", "main"))
    assert through is not None
    replays = {**through["spec"]["replay"], "role": role}
    place.ctx.connections.put({**through, "spec": {**through["spec"], "replay": replays}})
    await place.end("first", "Completed")
    await place.reconcile("first")
    assert place.granted == {"billing": ["consume"]}
    assert place.records == {}


def test_rights_of_policies_are_those_that_they_grant() -> None:
    grants = {
        role.status_field: actions[Grantee.REPLAYS]
        for role, actions in GRANTS.items()
        if Grantee.REPLAYS in actions
    }
    assert grants == rights.OF_POLICY


async def test_deletion_waits_for_broker_until_its_deadline(place: Rights) -> None:
    place.add("first")
    await place.prepare("first")
    place.delete("first")
    place.broker.fault = answering(500)
    assert await place.reconcile("first") is Requeue.BACKOFF
    place.now += rights.ABANDON + timedelta(seconds=1)
    assert await place.reconcile("first") is Requeue.ON_CHANGE
    events = {reason for _, reason, _ in place.kubernetes.announced()}
    assert Reason.TARGET_RIGHTS_ABANDONED in events
    body = place.body("first")
    assert body is None or not has_finalizer(body, rights.FINALIZER)


async def test_ended_replay_waits_for_broker(place: Rights) -> None:
    place.add("first")
    await place.prepare("first")
    await place.end("first", "Failed")
    place.broker.fault = answering(500)
    assert await place.reconcile("first") is Requeue.SLOW_BACKOFF
    place.broker.fault = None
    await place.reconcile("first")
    assert place.granted == {"billing": ["consume"]}


async def test_right_on_deleted_topic_leaves_no_record(place: Rights) -> None:
    place.add("first")
    await place.prepare("first")
    del place.broker.namespaces["shop/prod"].topics["checked"]
    await place.end("first", "Completed")
    await place.reconcile("first")
    body = place.body("first")
    assert body is not None
    assert not has_finalizer(body, rights.FINALIZER)


TEXTS = (f"{PREFIX}/checked", "9223372036854775807:1", "AllRefused", "2020-01-01T00:00:00Z", "1h")
STATUS_SCHEMA = structural(cast("Any", REPLAY.status))


def forgeries(schema: Body) -> Iterator[object]:
    """Yield values of a field: for each field inside, some that differ in it."""
    match schema:
        case {"properties": properties}:
            required = {
                name: next(forgeries(properties[name])) for name in schema.get("required", [])
            }
            for name, field in properties.items():
                yield from ({**required, name: value} for value in forgeries(field))
        case {"items": items}:
            yield from ([value] for value in forgeries(items))
        case {"enum": words}:
            yield from words
        case {"type": "boolean"}:
            yield from (True, False)
        case {"type": "integer"}:
            yield from (0, 10**6)
        case {"format": "date-time"}:
            yield from ("2020-01-01T00:00:00Z", "2126-01-01T00:00:00Z")
        case {"type": "string"}:
            pattern = re.compile(schema.get("pattern", ""))
            yield from filter(pattern.search, TEXTS)
        case _:
            raise NotImplementedError(schema)


async def decisions(place: Rights, forged: Body) -> list[object]:
    """Return the decisions on two Replays while *forged* is written into their status."""
    place.add("first", ttlAfterFinished="1d", deadline="1h")
    place.add("second", target={"type": "Retry"}, ttlAfterFinished="1d", deadline="1h")
    results: list[object] = []

    async def forge() -> None:
        for name in ("first", "second"):
            if place.body(name) is not None:
                await place.change(name, dict(forged))

    def note() -> None:
        bodies = [place.body("first"), place.body("second")]
        facts = [
            body and (body["metadata"].get("annotations"), body.get("spec")) for body in bodies
        ]
        finalizers = [body and body["metadata"].get("finalizers") for body in bodies]
        results.append((place.granted, place.records, facts, finalizers))

    async def act(*steps: Callable[[str], Awaitable[object]]) -> None:
        for name, step in itertools.product(("first", "second"), steps):
            if place.body(name) is not None:
                await forge()
                await step(name)
                note()

    await act(place.prepare, place.reconcile)
    await place.end("first", "Failed")
    await act(place.reconcile)
    await place.prepare("second")
    await act(place.reconcile)
    await place.end("second", "Failed")
    await act(place.reconcile)
    place.now += timedelta(days=2)
    await act(place.reconcile)
    return results


async def test_forged_status_changes_no_decision(place: Rights) -> None:
    """A job may write the status of each Replay of its namespace, without admission policies."""
    honest = await decisions(place, {})
    assert [place.body("first"), place.body("second")] == [None, None]
    statuses = list(forgeries(STATUS_SCHEMA))
    for forged in statuses:
        place.reset()
        assert await decisions(place, cast("Body", forged)) == honest, forged
    assert len(statuses) > 60


@pytest.mark.parametrize(
    ("first", "last", "between"), [("audit", "second", BOTH), ("second", "audit", ["consume"])]
)
async def test_audit_reads_beside_a_replay_and_leaves_no_right(
    place: Rights, first: str, last: str, between: list[str]
) -> None:
    place.add_two()
    place.add("audit", mode="Audit")
    await place.prepare("audit")
    assert place.granted == {"billing": ["consume"], "replayer": ["consume"]}
    for name in ("second", "audit", "second"):
        await place.prepare(name)
        assert place.granted["replayer"] == BOTH
    await place.end(first, "Completed")
    await place.reconcile(first)
    assert place.granted["replayer"] == between
    await place.end(last, "Completed")
    await place.reconcile(last)
    assert (place.granted, place.records) == ({"billing": ["consume"]}, {})


@pytest.mark.parametrize("exists", [True, False])
async def test_next_replay_has_right_at_target_of_failed_one(
    place: Rights, *, exists: bool
) -> None:
    """Messages that the failed Replay left there without a record have to be found."""
    place.add("first")
    await place.prepare("first")
    await place.end("first", "Failed")
    await place.reconcile("first")
    assert place.granted == {"billing": ["consume"]}
    if not exists:
        del place.broker.namespaces["shop/prod"].topics["checked"]
    place.add("next", target={"type": "Retry"})
    await place.prepare("next")
    assert place.granted.get("replayer") == (BOTH if exists else None)
    assert set(place.records) == ({"uid-next"} if exists else set())
    await place.end("next", "Completed")
    await place.reconcile("next")
    assert place.granted == {"billing": ["consume"]}


async def recorded(place: Rights, number: int, namespace: str | None) -> None:
    """Record rights of *number* Replays of *namespace*; of missing ones with None."""
    record = {"topic": f"{PREFIX}/elsewhere", "role": "replayer", "actions": BOTH}
    records = {f"uid-other-{n}": [record] for n in range(number)}
    after = await place.kubernetes.patch_status(
        resources.CONNECTIONS, Key("shop", "main"), {"targetRights": records}
    )
    place.ctx.connections.renew(after)
    for n in range(number if namespace else 0):
        body = replay(f"other-{n}", spec=CHECKED)
        body["metadata"]["namespace"] = namespace
        place.ctx.replays.put(body)


async def test_records_of_a_namespace_are_bounded(place: Rights) -> None:
    await recorded(place, rights.MAX_OF_NAMESPACE, "shop")
    place.add("first")
    before = dict(place.records)
    with raises(Reason.LIMIT_EXCEEDED, match="wait for other Replays to end"):
        await place.prepare("first")
    assert place.records == before
    assert place.granted == {"billing": ["consume"]}


async def test_records_of_another_namespace_do_not_count(place: Rights) -> None:
    await recorded(place, rights.MAX_OF_NAMESPACE, "billing")
    place.add("first")
    await place.prepare("first")
    assert place.granted["replayer"] == BOTH


@pytest.mark.parametrize("number", [1, rights.MAX_STORED // 2])
async def test_many_records_of_missing_replays_are_forgotten(place: Rights, number: int) -> None:
    """An author may remove the finalizer of a Replay and delete it, as often as they like."""
    await recorded(place, number, None)
    place.add("first")
    await place.prepare("first")
    assert place.granted["replayer"] == BOTH
    forgotten = number > 1
    assert set(place.records) == {"uid-first"} | (set() if forgotten else {"uid-other-0"})


@pytest.mark.parametrize("fails", [False, True])
async def test_suspended_replay_gives_its_rights_back(place: Rights, *, fails: bool) -> None:
    """Suspended Replays block no others, so any number of them may wait."""
    place.add("first")
    await place.prepare("first")
    assert place.records
    after = await place.kubernetes.patch(
        resources.REPLAYS, Key("shop", "first"), {"spec": {"suspend": True}}
    )
    place.ctx.replays.renew(after)
    if fails:
        place.broker.fault = answering(500)
        assert await place.reconcile("first") is Requeue.BACKOFF
        place.broker.fault = None
    await place.reconcile("first")
    assert place.granted == {"billing": ["consume"]}
    assert place.records == {}
    body = place.body("first")
    assert body is not None
    assert not has_finalizer(body, rights.FINALIZER)
    assert body["status"]["conditions"][0]["reason"] == Reason.SUSPENDED
