from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from redrive.admin.client import Admin
from redrive.admin.http import Access, Http
from redrive.api.conditions import reason
from redrive.api.connection import BrokerConnectionSpec
from redrive.errors import Requeue
from redrive.kube.cache import Cache
from redrive.kube.client import SecretNotFoundError
from redrive.kube.connections import Connection
from redrive.kube.context import wall_clock
from redrive.kube.resources import CONNECTIONS, Key
from redrive.provision.connection import reconcile, unsupported
from tests.support.fake_admin import SUPERUSER, FakeBroker, answering
from tests.support.fake_kubernetes import FakeKubernetes

KEY = Key("shop", "main")
MakeBody = Callable[..., dict[str, Any]]


async def test_a_connection_that_stands_as_before_costs_two_calls_and_no_write(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    policies = Cache([policy("orders"), policy("elsewhere", connectionRef={"name": "other"})])
    identity = {"namespace": "shop", "name": "main", "uid": "u", "resourceVersion": "1"}
    typed = {"apiVersion": CONNECTIONS.api_version, "kind": CONNECTIONS.kind}
    body = {**typed, "metadata": {**identity, "generation": 1}, "spec": connection}
    kubernetes, missing = FakeKubernetes(), list[SecretNotFoundError]()
    kubernetes.add(CONNECTIONS, body)
    async with FakeBroker.serving() as broker, aiohttp.ClientSession() as session:
        broker.tenants = {"shop": []}
        admin = Admin(Http(session), broker.url, Access.bearer(FakeBroker.token(SUPERUSER)))
        spec = BrokerConnectionSpec.model_validate(connection)

        async def open_(key: Key) -> Connection:
            for error in missing:
                raise error
            return Connection(key, spec, admin)

        ctx: Any = SimpleNamespace(
            kubernetes=kubernetes,
            connections=Cache([body]),
            policies=policies,
            namespaces=None,
            brokers=SimpleNamespace(open=open_),
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
        assert kubernetes.objects[CONNECTIONS][KEY]["status"]["policies"] == 2

        missing.append(SecretNotFoundError("the Secret is not there", remedy="make it"))
        assert await reconcile(KEY, ctx) is Requeue.BACKOFF
        assert reason(kubernetes.objects[CONNECTIONS][KEY]) == "SecretNotFound"


@pytest.mark.parametrize(
    ("said", "warned"),
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
async def test_a_broker_outside_of_the_support_matrix_is_warned_about(
    said: str, warned: str
) -> None:
    async with FakeBroker.serving() as broker, aiohttp.ClientSession() as session:
        broker.version = said
        admin = Admin(Http(session), broker.url, Access.bearer(FakeBroker.token(SUPERUSER)))
        found = unsupported(await admin.version())
    assert (found is not None) is bool(warned)
    assert found is None or (found.reason == "BrokerNotSupported" and warned in found.message)


async def test_a_broker_that_does_not_tell_its_version_is_none_to_warn_about() -> None:
    async with FakeBroker.serving() as broker, aiohttp.ClientSession() as session:
        admin = Admin(Http(session), broker.url, Access.bearer(FakeBroker.token(SUPERUSER)))
        broker.fault = answering(403)
        assert await admin.version() == ()
        assert unsupported(()) is None
