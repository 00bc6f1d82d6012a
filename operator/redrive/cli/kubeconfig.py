"""Kubeconfig of a command: its loaders, and the impersonated user."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from urllib.parse import quote

import click

INVALID = (AttributeError, OSError, TypeError, ValueError)
"""Errors of a kubeconfig with values of other types, beside those of its loaders."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
"""Characters that no header may contain."""
_TOKEN = "!#$&'*+^`|"  # noqa: S105  characters of the names of headers
"""Characters that the name of a header may contain, beside those that `quote` keeps."""


class ImpersonatedName(click.ParamType[str]):
    """Name of a user or a group to impersonate."""

    name = "name"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Check a name."""
        text = str(value)
        if _CONTROL.search(text):
            self.fail(f"{text!r} has control characters, which no name may have", param, ctx)
        return text


def impersonation(
    entry: Mapping[str, Any], user: str | None, groups: Sequence[str]
) -> list[tuple[str, str]]:
    """Return the headers of the impersonated user; empty if there is none.

    As of kubectl, each flag replaces its own field of the kubeconfig, and no other one.

    Args:
        entry: `users[].user` of the kubeconfig.
        user: of the flag `--as`.
        groups: of the flags `--as-group`.

    Raises:
        ValueError: the kubeconfig has a value that no header may have, or has no user.
    """
    headers = list(_impersonation(entry, user, groups))
    for name, value in headers:
        if not isinstance(value, str) or _CONTROL.search(value):
            raise ValueError(f"{name} must be text without control characters: {value!r}")
    if headers and headers[0][0] != "Impersonate-User":
        raise ValueError("groups, a uid or extra fields to impersonate need a user: use --as")
    # The HTTP client writes Latin-1, and kubectl UTF-8.
    return [
        (name, value.encode(errors="surrogateescape").decode("latin-1")) for name, value in headers
    ]


def _impersonation(
    entry: Mapping[str, Any], user: str | None, groups: Sequence[str]
) -> Iterator[tuple[str, Any]]:
    if name := user or entry.get("as"):
        yield "Impersonate-User", name
    if uid := entry.get("as-uid"):
        yield "Impersonate-Uid", uid
    for group in groups or entry.get("as-groups") or ():
        yield "Impersonate-Group", group
    for key, values in (entry.get("as-user-extra") or {}).items():
        for value in values or ():
            yield f"Impersonate-Extra-{quote(key, safe=_TOKEN)}", value


@cache
def loaders() -> tuple[Any, Any]:
    """Import the loaders of kubeconfigs and of pods without the models of the client.

    Meanwhile hollow modules are in the place of the two packages that would import the models.
    """
    names = "kubernetes.config.kube_config", "kubernetes.config.incluster_config"
    hollow = () if "kubernetes" in sys.modules else ("kubernetes", "kubernetes.client")
    try:
        for name in hollow:
            spec = find_spec(name)
            if spec is None:
                raise ModuleNotFoundError(f"no module {name}", name=name)
            module: Any = ModuleType(name)
            module.__path__ = spec.submodule_search_locations
            sys.modules[name] = module
        if hollow:
            configuration = import_module("kubernetes.client.configuration")
            module.Configuration = configuration.Configuration
            module.ApiClient = _api_client
        loader, pod = map(import_module, names)
    finally:
        for name in hollow:
            sys.modules.pop(name, None)
    return loader, pod


def _api_client(**arguments: object) -> Any:  # noqa: ANN401  of the Kubernetes client
    """Make the client that renews an expired token of OIDC, which needs the models."""
    return import_module("kubernetes.client").ApiClient(**arguments)
