"""The operator as a process, for tests of its work on manifests, and a broker for development."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox import installation
from sandbox.pulsar import Broker
from sandbox.sandbox import Sandbox
from tests.conftest import stack_of_group
from tests.support.brokers import own_broker


@pytest.fixture(scope="module")
def operator_process(installed: Sandbox) -> Iterator[Path]:
    """The operator with the rights that the chart gives it, serving all namespaces: its log."""
    log = installed.processes.log(installation.OPERATOR)
    begin = log.stat().st_size
    yield log
    # Whatever the tests of the module have used: no token, no key.
    written = log.read_bytes()[begin:]
    assert re.findall(rb"eyJ[\w-]+\.eyJ[\w-]+\.[\w-]+|-----BEGIN", written) == []


@pytest.fixture(scope="session")
def open_broker(
    request: pytest.FixtureRequest,
    shared_sandbox: Sandbox,
    tmp_path_factory: pytest.TempPathFactory,
) -> Broker:
    """A broker for development, which asks for no credentials and serves transactions.

    Its tests are in the group `spark`, so that one worker starts one such broker.
    """
    settings = {
        "authenticationEnabled": "false",
        "authorizationEnabled": "false",
        "brokerClientAuthenticationPlugin": "",
        "brokerClientAuthenticationParameters": "",
        "transactionCoordinatorEnabled": "true",
    }
    version, state = shared_sandbox.pulsar.version, tmp_path_factory.mktemp("broker")
    started = own_broker(version, state, settings)
    return stack_of_group(request, "spark").enter_context(started)
