"""RetryPolicy and BrokerConnection objects as the API server gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from redrive.admin.model import broker_at
from redrive.api import Body
from redrive.api.connection import BrokerConnectionSpec
from redrive.api.retrypolicy import RetryPolicySpec
from redrive.kube.cache import Cache
from redrive.kube.connections import connection_of
from redrive.kube.context import Context, wall_clock
from redrive.kube.job_templates import JobTemplates
from redrive.kube.resources import Key
from redrive.provision.ownership import named_in
from redrive.provision.request import Priority, Request, is_proven
from tests.support.manifests import changed

MakeBody = Callable[..., dict[str, Any]]
MakeRequest = Callable[..., Request]

TOKEN = {"type": "Token", "token": {"secretRef": {"name": "pulsar-admin", "key": "token"}}}


@pytest.fixture
def connection() -> dict[str, Any]:
    """Spec of a connection."""
    return {
        "pulsar": {
            "serviceURL": "pulsar://pulsar:6650",
            "adminURL": "http://pulsar:8080",
            "authentication": TOKEN,
        },
        "allow": [
            {
                "name": "shop",
                "topics": ["persistent://shop/*/*"],
                "roles": ["fulfilment", "shop-*"],
                "adoption": "Allowed",
                "deletion": "Allowed",
            }
        ],
        "replay": {"role": "replayer", "authentication": TOKEN},
    }


@pytest.fixture
def policy() -> MakeBody:
    """Makes a RetryPolicy object."""

    def make(
        name: str = "orders", *, age: int = 0, generation: int = 7, **spec: object
    ) -> dict[str, Any]:
        return {
            "apiVersion": "redrive.io/v1beta1",
            "kind": "RetryPolicy",
            "metadata": {
                "namespace": "shop",
                "name": name,
                "uid": f"uid-{name}",
                "generation": generation,
                "resourceVersion": "1",
                "creationTimestamp": f"2026-01-01T00:00:{age:02}Z",
            },
            "spec": {
                "connectionRef": {"name": "main"},
                "topic": "persistent://shop/prod/orders",
                "subscription": "fulfilment",
                "consumerRoles": ["fulfilment"],
                **spec,
            },
        }

    return make


@pytest.fixture
def requested(connection: dict[str, Any]) -> MakeRequest:
    """Reads the request of a RetryPolicy object; keywords change its connection."""

    def read(body: Body, **changes: object) -> Request:
        key = Key.of(body)
        through = BrokerConnectionSpec.model_validate(changed(connection, **changes))
        written = RetryPolicySpec.model_validate(body["spec"])
        spec = written.completed(through.policy_defaults)
        return Request(
            key=key,
            age=(body["metadata"]["creationTimestamp"], body["metadata"]["uid"]),
            spec=spec,
            policy=spec.to_policy(str(key), body["metadata"]["generation"]),
            connection=through,
            permissions=through.permissions(key.namespace, {}, "shop"),
            priority=Priority.of(body),
            is_proven=is_proven(body, connection_of(body), broker_at(through.pulsar.admin_url)),
            takes_over=named_in(body),
        )

    return read


@pytest.fixture
def ctx() -> Context:
    """A context with empty caches, and without clients."""
    none = cast("Any", None)
    tables = ("connections", "policies", "replays", "inspections", "config_maps")
    return Context(
        settings=none,
        kubernetes=none,
        brokers=none,
        namespaces=none,
        job_templates=JobTemplates(None),
        clock=wall_clock,
        missing=(),
        began=wall_clock(),
        applications={},
        **{name: Cache() for name in tables},
    )
