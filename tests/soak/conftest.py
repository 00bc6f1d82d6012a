"""The soak is a function `test_…` in a file `soak_*.py`, so that only `make soak` runs it."""

from __future__ import annotations

import pytest

from tests.support.provisioned_policy import provision_policy

__all__ = ["provision_policy"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed", type=int, default=1, help="which disturbances come when (default: %(default)s)"
    )
