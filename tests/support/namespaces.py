"""Kubernetes namespaces of tests."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from sandbox.kubernetes import Cluster


@contextmanager
def new_namespace(cluster: Cluster) -> Iterator[str]:
    """Create a namespace with a name of its own, and delete it after use without waiting."""
    name = f"t-{secrets.token_hex(4)}"
    cluster.objects.create_namespace(name)
    yield name
    cluster.objects.delete("namespace", name)
