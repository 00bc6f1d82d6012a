"""Shops with an operator that has the rights of the chart, as in the integration tests."""

from __future__ import annotations

import pytest

from sandbox.sandbox import Sandbox
from tests.benchmarks.provision.operator import Operator
from tests.integration.conftest import operator_process
from tests.integration.provision.conftest import make_shop

__all__ = ["make_shop", "operator_process"]


@pytest.fixture
def operator(installed: Sandbox) -> Operator:
    return Operator(installed)
