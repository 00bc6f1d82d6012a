"""One Java for all tests: one worker runs them. Clients have the role of a policy's consumers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from py4j.java_gateway import JavaGateway

from sandbox.java import virtual_machine
from tests.conftest import stack_of_group
from tests.support.java import JavaClient
from tests.support.provisioned_policy import ProvisionedPolicy, provision_policy

__all__ = ["provision_policy"]

MakeClient = Callable[..., JavaClient]


@pytest.fixture(scope="session")
def java(request: pytest.FixtureRequest) -> JavaGateway:
    return stack_of_group(request, "java").enter_context(virtual_machine())


@pytest.fixture
def java_client(java: JavaGateway) -> Iterator[MakeClient]:
    """Make a Java client of the policy's consumer role, or of another, closed with the test."""
    with ExitStack() as closing:

        def make(provisioned: ProvisionedPolicy, role: str | None = None) -> JavaClient:
            token = provisioned.broker.token(role or provisioned.role)
            client = JavaClient(java, provisioned.broker.service_url, token)
            closing.callback(client.close)
            return client

        yield make
