"""The environment variables of a driver, from the object and its Secrets and ConfigMaps.

Pure: the pod reads the sources that `references` returns and calls `resolve`. In local mode the
executors run in the driver's JVM, so both have one environment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .errors import MissingConfigError, RefusedError
from .objects import Application, Object

_REFERENCE = re.compile(r"\$\$|\$\(([^)]*)\)")


class Source(NamedTuple):
    """A Secret or a ConfigMap of the application's namespace."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Data:
    """The content of the sources that exist. `repr` shows no values."""

    _by_source: Mapping[Source, Mapping[str, str]]

    def __repr__(self) -> str:
        return f"Data({sorted(self._by_source)})"

    def whole(self, source: Source, *, optional: bool) -> Mapping[str, str]:
        """Return all entries of *source*.

        Raises:
            MissingConfigError: the source does not exist, and is not optional.
        """
        if source not in self._by_source and not optional:
            msg = f'{source.kind} "{source.name}" not found'
            raise MissingConfigError(msg)
        return self._by_source.get(source, {})

    def value(self, source: Source, key: str, *, optional: bool) -> str | None:
        """Return one entry; None if it is missing and optional.

        Raises:
            MissingConfigError: the entry does not exist, and is not optional.
        """
        entries = self.whole(source, optional=optional)
        if key not in entries and not optional:
            msg = f'couldn\'t find key {key} in {source.kind} "{source.name}"'
            raise MissingConfigError(msg)
        return entries.get(key)


def references(app: Application) -> frozenset[Source]:
    """Return every Secret and ConfigMap in the environment of *app*."""
    return frozenset(
        source for pod in (app.spec["driver"], app.spec["executor"]) for source in _sources(pod)
    )


def resolve(app: Application, data: Data) -> dict[str, str]:
    """Return the environment of driver and executors.

    Raises:
        MissingConfigError: a required entry is not in *data*; it may be created later.
        RefusedError: driver and executors have different values of one variable.
    """
    driver = _pod_environment(app.spec["driver"], data)
    executor = _pod_environment(app.spec["executor"], data)
    clashes = sorted(name for name in driver.keys() & executor if driver[name] != executor[name])
    if clashes:
        msg = (
            f"driver and executors have different values of {', '.join(clashes)}, but share one "
            "process here; give them the same value or different names"
        )
        raise RefusedError(msg)
    return executor | driver


def _sources(pod: Object) -> Iterator[Source]:
    for entry in pod.get("envFrom", []):
        yield from (source for source, _ in _whole_sources(entry))
    for ref in pod.get("envSecretKeyRefs", {}).values():
        yield Source("secret", ref["name"])
    for variable in pod.get("env", []):
        if (reference := _single_source(variable)) is not None:
            yield reference[0]


def _whole_sources(entry: Object) -> Iterator[tuple[Source, Object]]:
    if ref := entry.get("configMapRef"):
        yield Source("configmap", ref["name"]), ref
    if ref := entry.get("secretRef"):
        yield Source("secret", ref["name"]), ref


def _single_source(variable: Object) -> tuple[Source, Object] | None:
    origin = variable.get("valueFrom", {})
    if ref := origin.get("secretKeyRef"):
        return Source("secret", ref["name"]), ref
    if ref := origin.get("configMapKeyRef"):
        return Source("configmap", ref["name"]), ref
    return None


def _pod_environment(pod: Object, data: Data) -> dict[str, str]:
    """Return the variables of a pod; the last of envFrom, envVars, envSecretKeyRefs, env wins."""
    result: dict[str, str] = {}
    for entry in pod.get("envFrom", []):
        for source, ref in _whole_sources(entry):
            prefix = entry.get("prefix", "")
            entries = data.whole(source, optional=ref.get("optional", False))
            result.update({prefix + key: value for key, value in entries.items()})
    for name, value in pod.get("envVars", {}).items():
        result[name] = expanded(value, result)
    for name, ref in pod.get("envSecretKeyRefs", {}).items():
        secret = data.value(Source("secret", ref["name"]), ref["key"], optional=False)
        result.update({} if secret is None else {name: secret})
    for variable in pod.get("env", []):
        result.update(_variable(variable, data, result))
    return result


def _variable(variable: Object, data: Data, before: Mapping[str, str]) -> dict[str, str]:
    reference = _single_source(variable)
    if reference is None:
        return {variable["name"]: expanded(variable.get("value", ""), before)}
    source, ref = reference
    value = data.value(source, ref["key"], optional=ref.get("optional", False))
    return {} if value is None else {variable["name"]: value}


def expanded(value: str, before: Mapping[str, str]) -> str:
    """Replace $(NAME) by an earlier variable and $$ by $; an unknown name stays unchanged.

    A kubelet does this in values of variables and in arguments of containers.
    """

    def replaced(match: re.Match[str]) -> str:
        name = match.group(1)
        return "$" if name is None else before.get(name, match.group(0))

    return _REFERENCE.sub(replaced, value)
