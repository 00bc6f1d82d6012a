from __future__ import annotations

from collections.abc import Iterator

import jwt
import pulsar
import pytest

from sandbox.pulsar import Broker


@pytest.fixture
def topic(broker: Broker, pulsar_namespace: str) -> str:
    """A topic without any grants."""
    name = f"persistent/{pulsar_namespace}/orders"
    broker.request("PUT", f"/admin/v2/{name}").check("create the topic")
    return name


@pytest.fixture
def clerk(broker: Broker) -> Iterator[pulsar.Client]:
    """A client that acts as the role ``clerk``."""
    client = pulsar.Client(
        broker.service_url,
        operation_timeout_seconds=5,
        authentication=pulsar.AuthenticationToken(broker.token("clerk")),
        logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
    )
    yield client
    client.close()


def test_missing_token_is_refused(broker: Broker) -> None:
    assert broker.request("GET", "/admin/v2/tenants", token="").status == 401


def test_a_token_signed_with_another_key_is_refused(broker: Broker) -> None:
    forged = jwt.encode({"sub": "superuser"}, b"another key, of the same length." * 2)
    assert broker.request("GET", "/admin/v2/tenants", token=forged).status == 401


def test_a_role_that_administers_nothing_is_refused(broker: Broker, pulsar_namespace: str) -> None:
    tenant = pulsar_namespace.split("/", maxsplit=1)[0]
    token = broker.token("clerk")
    assert broker.request("GET", "/admin/v2/tenants", token=token).status == 401
    refused = broker.request("PUT", f"/admin/v2/namespaces/{tenant}/mine", token=token)
    assert refused.status in {401, 403}
    namespaces = broker.request("GET", f"/admin/v2/namespaces/{tenant}").body
    assert namespaces == f'["{pulsar_namespace}"]'


def test_tenant_administrator_has_rights_in_its_tenant_only(
    broker: Broker, pulsar_namespace: str
) -> None:
    tenant = pulsar_namespace.split("/", maxsplit=1)[0]
    body = {"allowedClusters": ["standalone"], "adminRoles": ["clerk"]}
    broker.request("POST", f"/admin/v2/tenants/{tenant}", body).check("name an administrator")
    token = broker.token("clerk")
    mine = broker.request("PUT", f"/admin/v2/namespaces/{tenant}/mine", token=token)
    assert mine.status == 204
    other = broker.request("PUT", "/admin/v2/namespaces/public/mine", token=token)
    assert other.status in {401, 403}


def test_a_role_sends_only_where_it_was_granted_to(
    broker: Broker, topic: str, clerk: pulsar.Client
) -> None:
    name = topic.replace("persistent/", "persistent://")
    with pytest.raises(pulsar.AuthorizationError):
        clerk.create_producer(name)
    granted = broker.request("POST", f"/admin/v2/{topic}/permissions/clerk", ["produce"])
    granted.check("grant")
    clerk.create_producer(name).send(b"an order")
    with pytest.raises(pulsar.AuthorizationError):
        clerk.subscribe(name, "packing")


def test_using_a_topic_or_a_subscription_does_not_create_it(
    broker: Broker, topic: str, pulsar_namespace: str, clerk: pulsar.Client
) -> None:
    rights = f"/admin/v2/namespaces/{pulsar_namespace}/permissions/clerk"
    broker.request("POST", rights, ["produce", "consume"]).check("grant")
    with pytest.raises(pulsar.TopicNotFound):
        clerk.create_producer(f"persistent://{pulsar_namespace}/missing")
    with pytest.raises(pulsar.Timeout):  # the client asks again and again
        clerk.subscribe(topic.replace("persistent/", "persistent://"), "missing")
    topics = broker.request("GET", f"/admin/v2/persistent/{pulsar_namespace}").body
    assert topics == f'["{topic.replace("persistent/", "persistent://")}"]'
    assert broker.request("GET", f"/admin/v2/{topic}/subscriptions").body == "[]"
