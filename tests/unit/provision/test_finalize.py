from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from redrive.admin.client import Admin
from redrive.admin.errors import BrokerUnreachableError
from redrive.admin.guards import FAILURES, Breaker
from redrive.admin.http import Access, Http
from redrive.api import Body
from redrive.api.connection import BrokerConnectionSpec
from redrive.api.policy_defaults import DeletionPolicy
from redrive.errors import Requeue
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.client import ConflictError, ConnectionNotFoundError
from redrive.kube.connections import Connection
from redrive.kube.resources import Key, Resource
from redrive.kube.status import Publisher
from redrive.provision.claims import Conflicts
from redrive.provision.finalize import (
    CLEANUP_ABANDONED,
    LATE_WRITES,
    RETAINED,
    SKIP_CLEANUP,
    finalize,
)
from redrive.provision.orphans import DeletionEvents
from redrive.provision.outcome import FINALIZER, ensure_cleanup_finalizer, publish
from tests.support.fake_admin import SUPERUSER, FakeBroker, Namespace
from tests.support.fake_kubernetes import FakeKubernetes

MakeBody = Callable[..., dict[str, Any]]
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def storing(body: Body) -> FakeKubernetes:
    """An API server that has the policy."""
    api = FakeKubernetes()
    api.add(resources.POLICIES, body)
    return api


def stored(api: FakeKubernetes) -> dict[str, Any]:
    """Return the only policy as it is now."""
    (body,) = api.objects[resources.POLICIES].values()
    return body


def ready_condition(api: FakeKubernetes) -> dict[str, Any]:
    """Return the Ready condition of the only policy."""
    return next(dict(c) for c in stored(api)["status"]["conditions"] if c["type"] == "Ready")


class Gone:
    """Connections, none of which is there or was ever used; or a *fault* in looking for them."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.fault = fault

    async def resolve(self, ref: object, namespace: str) -> None:
        """Find none."""
        if self.fault is not None:
            raise self.fault
        raise ConnectionNotFoundError("no connection", got=f"{namespace}/{ref}", remedy="make it")

    def remembered(self, ref: object, namespace: str) -> Connection | None:
        """Remember none."""
        del ref, namespace
        return None


def deleted(body: dict[str, Any], **annotations: str) -> dict[str, Any]:
    """The policy, with topics, while it is being deleted."""
    body["status"] = {"retryTopic": "r", "deadLetterTopic": "d"}
    body["metadata"] |= {
        "finalizers": ["others", FINALIZER],
        "deletionTimestamp": "2026-01-01T00:00:00Z",
        "annotations": {f"redrive.io/{name}": value for name, value in annotations.items()},
    }
    return body


def out_of(api: FakeKubernetes, table: Cache) -> Publisher:
    return Publisher(api, resources.POLICIES, table, lambda: BEGAN)


class Remembered(Gone):
    """Connections, none of which is there any more; one is remembered."""

    def __init__(self, last: Connection) -> None:
        super().__init__()
        self.last = last

    def remembered(self, ref: object, namespace: str) -> Connection:
        """Remember it."""
        del ref, namespace
        return self.last


async def look(
    api: FakeKubernetes,
    table: Cache,
    after: timedelta = timedelta(0),
    brokers: Gone = Gone(),  # noqa: B008  it never changes
    began: timedelta = timedelta(0),
) -> Requeue:
    """One look at the only policy, so long after its deletion, with no connection there.

    The operator *began* so long after the deletion.
    """
    (known,) = table
    settings = SimpleNamespace(cluster_id="here", namespaces=())
    ctx: Any = SimpleNamespace(
        brokers=brokers,
        clock=lambda: BEGAN + after,
        began=BEGAN + began,
        policies=table,
        connections=Cache(),
        namespaces=None,
        settings=settings,
        kubernetes=api,
    )
    outcome = await finalize(known, ctx, Conflicts(table, ctx.connections, lambda _: None))
    await publish(known, outcome, out_of(api, table))
    return outcome.requeue


async def test_a_deletion_waits_for_its_connection_and_says_since_when_and_how_long(
    policy: MakeBody,
) -> None:
    body = deleted(policy(deletionPolicy="Delete"))
    api, table = storing(body), Cache([body])
    assert await look(api, table, timedelta(minutes=9, seconds=59)) is Requeue.BACKOFF
    ready = ready_condition(api)
    assert ready["reason"] == "ConnectionNotFound"
    said = ready["message"]
    assert said.startswith("being deleted since 2026-01-01T00:00:00Z: no connection; got")
    assert "at 2026-01-01T00:10:00Z the policy goes all the same" in said
    assert "with the annotation redrive.io/skip-cleanup=true it goes now" in said
    assert FINALIZER in stored(api)["metadata"]["finalizers"]


async def test_a_deletion_gives_up_in_the_end_and_says_what_may_be_left(policy: MakeBody) -> None:
    body = deleted(policy(deletionPolicy="Delete"))
    api, table = storing(body), Cache([body])
    assert await look(api, table, timedelta(minutes=10)) is Requeue.ON_CHANGE
    assert stored(api)["metadata"]["finalizers"] == ["others"]
    ((_, reason, message),) = api.announced()
    assert reason == CLEANUP_ABANDONED
    assert "waited since 2026-01-01T00:00:00Z: no connection" in message
    assert message.endswith("what there is of r and d stays at the broker")


async def test_an_outage_of_the_operator_does_not_count(policy: MakeBody) -> None:
    body = deleted(policy(deletionPolicy="Delete"))
    api, table = storing(body), Cache([body])
    began = timedelta(hours=1)
    almost = began + timedelta(minutes=9, seconds=59)
    assert await look(api, table, almost, began=began) is Requeue.BACKOFF
    said = ready_condition(api)["message"]
    assert said.startswith("being deleted since 2026-01-01T00:00:00Z: ")
    assert "at 2026-01-01T01:10:00Z the policy goes all the same" in said
    over = began + timedelta(minutes=10)
    assert await look(api, table, over, began=began) is Requeue.ON_CHANGE


async def test_a_fault_of_our_own_holds_up_no_deletion_for_ever(
    policy: MakeBody, caplog: pytest.LogCaptureFixture
) -> None:
    body = deleted(policy(deletionPolicy="Delete"))
    api, table = storing(body), Cache([body])
    faulty = Gone(KeyError("partitions"))
    with pytest.raises(KeyError):
        await look(api, table, timedelta(minutes=9, seconds=59), faulty)
    assert FINALIZER in stored(api)["metadata"]["finalizers"]
    assert await look(api, table, timedelta(minutes=10), faulty) is Requeue.ON_CHANGE
    assert stored(api)["metadata"]["finalizers"] == ["others"]
    ((_, reason, message),) = api.announced()
    assert reason == CLEANUP_ABANDONED
    assert "2026-01-01T00:00:00Z: KeyError, see the operator's log; what there" in message
    assert "KeyError: 'partitions'" in caplog.text


async def test_an_annotation_has_a_deletion_give_up_at_once(policy: MakeBody) -> None:
    body = deleted(policy(deletionPolicy="Delete"), **{"skip-cleanup": "true"})
    api, table = storing(body), Cache([body])
    assert SKIP_CLEANUP in body["metadata"]["annotations"]
    assert await look(api, table) is Requeue.ON_CHANGE
    assert stored(api)["metadata"]["finalizers"] == ["others"]
    assert [reason for _, reason, _ in api.announced()] == [CLEANUP_ABANDONED]


async def test_what_stays_is_told_once_however_often_letting_go_is_tried(policy: MakeBody) -> None:
    body = deleted(policy(), **{"skip-cleanup": "true"})
    api, table = storing(body), Cache([body])
    attempts = itertools.count(1)

    def modify(verb: str, _resource: Resource, _key: Key) -> None:
        if verb == "patch" and next(attempts) <= 2:
            raise ConflictError("the object has been modified", remedy="try again")

    api.before = modify
    for _ in range(2):
        with pytest.raises(ConflictError):
            await look(api, table)
    for _ in range(2):
        await look(api, table)
    assert [reason for _, reason, _ in api.announced()] == [CLEANUP_ABANDONED]
    assert stored(api)["metadata"]["finalizers"] == ["others"]


async def test_a_status_that_is_written_meanwhile_repeats_no_cleanup(policy: MakeBody) -> None:
    body = deleted(policy(), **{"skip-cleanup": "true"})
    body["metadata"]["finalizers"] = [FINALIZER]
    api, table = storing(body), Cache([body])
    await api.patch_status(resources.POLICIES, Key.of(body), {"backlog": {"retry": 1}})
    assert await look(api, table) is Requeue.ON_CHANGE
    assert api.objects[resources.POLICIES] == {}


async def test_a_deletion_asks_the_broker_of_a_connection_that_is_gone_for_a_sign_of_life(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    async def silent() -> None:
        raise BrokerUnreachableError("no answer", remedy="start it")

    body = deleted(policy(deletionPolicy="Delete"))
    api, table = storing(body), Cache([body])
    breaker = Breaker("http://pulsar:8080", lambda: BEGAN, lambda: None)
    async with FakeBroker.serving() as broker, aiohttp.ClientSession() as session:
        access = Access.bearer(FakeBroker.token(SUPERUSER))
        admin = Admin(Http(session), broker.url, access, breaker)
        last = Connection(Key("shop", "main"), BrokerConnectionSpec(**connection), admin)
        broker.tenants = {"shop": []}
        broker.namespaces = {"shop/prod": Namespace()}
        for _ in range(FAILURES):
            with pytest.raises(BrokerUnreachableError):
                await breaker.guard(silent, probe=False)
        assert breaker.is_open
        await look(api, table, LATE_WRITES, Remembered(last))
    assert not breaker.is_open
    assert stored(api)["metadata"]["finalizers"] == ["others"]
    assert CLEANUP_ABANDONED not in [reason for _, reason, _ in api.announced()]


@pytest.mark.parametrize(
    ("choice", "held"),
    [
        (DeletionPolicy.RETAIN, False),
        (DeletionPolicy.DELETE, True),
        (DeletionPolicy.DELETE_IF_EMPTY, True),
    ],
)
@pytest.mark.parametrize("before", [[], ["others"], ["others", FINALIZER]])
async def test_only_a_deletion_with_work_to_do_holds_the_api_server_up(
    policy: MakeBody, before: list[str], choice: DeletionPolicy, *, held: bool
) -> None:
    body = policy()
    body["metadata"]["finalizers"] = before
    api = storing(body)
    after = await ensure_cleanup_finalizer(body, choice, out_of(api, Cache([body])))
    assert (FINALIZER in after["metadata"]["finalizers"]) is held
    assert ("others" in after["metadata"]["finalizers"]) is ("others" in before)


async def test_what_stays_of_a_policy_that_went_at_once_is_told_too(policy: MakeBody) -> None:
    body = policy() | {"status": {"retryTopic": "r", "deadLetterTopic": "d"}}
    table = Cache([body, policy("unmade"), deleted(policy("told"))])
    api = storing(body)
    events = DeletionEvents(out_of(api, table))
    for each in table:
        table.drop(each)
    await events.idle()
    ((_, reason, message),) = api.announced()
    assert reason == RETAINED
    assert message.startswith("r and d stay at the broker")
