"""Import of parts of the Kubernetes library without its packages.

A package of the library imports all its parts. That takes longer than the rest of a short command,
and a quarter of the start of a job.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any


@contextmanager
def hollow(*names: str) -> Iterator[Any]:
    """Put modules without content in the place of packages; yield the last of them.

    Args:
        names: packages, each within the one before. If the first is imported already, none is
            replaced, and None is yielded.

    Raises:
        ModuleNotFoundError: there is no such package.
    """
    replaced = () if names[0] in sys.modules else names
    package = None
    try:
        for name in replaced:
            spec = find_spec(name)
            if spec is None:
                raise ModuleNotFoundError(f"no module {name}", name=name)
            package = ModuleType(name)
            package.__path__ = spec.submodule_search_locations or []
            sys.modules[name] = package
        yield package
    finally:
        for name in replaced:
            sys.modules.pop(name, None)


@cache
def client_library(*, in_pod: bool) -> tuple[Any, Any]:
    """Import the asynchronous client, and the loader of its configuration."""
    loader = "incluster_config" if in_pod else "kube_config"
    with hollow("kubernetes", "kubernetes.aio", "kubernetes.aio.config"):
        client = import_module("kubernetes.aio.client")
        return client, import_module(f"kubernetes.aio.config.{loader}")
