"""Import of the Kubernetes library without its packages."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from redrive.errors import RedriveError
from redrive.kube.client import Kubernetes
from sandbox import SOURCE_ROOT


def run(code: str) -> str:
    """Run *code* in another process, which has imported nothing, and return its output."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(SOURCE_ROOT)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def test_parts_are_those_of_a_later_import() -> None:
    code = """
from redrive.kube.library import client_library
library, loader = client_library(in_pod=False)
from kubernetes.aio import client, config, watch
from kubernetes.config import new_client_from_config
print(client.ApiClient is library.ApiClient, config.ConfigException is loader.ConfigException)
"""
    assert run(code) == "True True\n"


def test_job_of_an_inspection_imports_what_it_needs() -> None:
    code = """
import sys
import redrive.inspection.__main__
from redrive.kube.library import client_library
client_library(in_pod=True)
print(*sys.modules)
"""
    unused = {"kubernetes.config", "oauthlib", "pyarrow.parquet", "redrive.inspection.rocketmq"}
    assert not unused & set(run(code).split())


async def test_pod_without_token_has_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    with pytest.raises(RedriveError, match="Service token file does not exist"):
        async with Kubernetes.connect():
            pass
