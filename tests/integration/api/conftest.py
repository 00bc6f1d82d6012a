"""The kinds of redrive at an API server without an operator, which would write statuses."""

from __future__ import annotations

import pytest

from redrive.api.crds import crds
from sandbox.kubernetes import Cluster


@pytest.fixture(scope="module", autouse=True)
def _kinds(cluster: Cluster) -> None:
    cluster.define(crds())
