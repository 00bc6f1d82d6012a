"""Values that the tests of the stand-in's pure parts vary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sandbox.spark_operator.objects import Application

MakeApplication = Callable[..., Application]


@pytest.fixture
def application() -> MakeApplication:
    """Make an application from the fields of its spec, with defaults of the API server."""

    def make(status: dict[str, Any] | None = None, **fields: Any) -> Application:  # noqa: ANN401 - spec fields
        spec = {
            "type": "Python",
            "mode": "cluster",
            "sparkVersion": "4.3.0",
            "mainApplicationFile": "local:///opt/job.py",
            "restartPolicy": {"type": "Never"},
            "driver": {},
            "executor": {},
            **fields,
        }
        metadata = {"namespace": "shop", "name": "job", "uid": "1"}
        return Application.read({"metadata": metadata, "spec": spec, "status": status or {}})

    return make
