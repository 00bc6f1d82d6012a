"""The kinds of redrive at the API server."""

from __future__ import annotations

import pytest
import yaml

from redrive.api.crds import crds
from sandbox.kubernetes import Cluster


@pytest.fixture(scope="module", autouse=True)
def _kinds(cluster: Cluster) -> None:
    cluster.define(yaml.safe_dump_all(crds()))
