"""One Java for all tests, and a client of the role that a stage lets consume."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from py4j.java_gateway import JavaGateway

from tests.support.java import JavaClient, virtual_machine
from tests.support.stage import Stage, set_stage

__all__ = ["set_stage"]

MakeClient = Callable[..., JavaClient]


@pytest.fixture(scope="session")
def java() -> Iterator[JavaGateway]:
    with virtual_machine() as gateway:
        yield gateway


@pytest.fixture
def java_client(java: JavaGateway) -> Iterator[MakeClient]:
    """Make a Java client of the stage's consumer role, or of another, closed with the test."""
    with ExitStack() as closing:

        def make(stage: Stage, role: str | None = None) -> JavaClient:
            token = stage.broker.token(role or stage.role)
            client = JavaClient(java, stage.broker.service_url, token)
            closing.callback(client.close)
            return client

        yield make
