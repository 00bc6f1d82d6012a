"""What the pods of an application mount, in the place of a kubelet: keys of Secrets and ConfigMaps.

Pure. A process has no mounts: the files lie in the folder of the pod, and where a value of the
environment names a path of a mount, it names that folder instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from .environment import Data, Source
from .errors import MissingConfigError
from .objects import Application, Object

_KINDS = {"secret": "secret", "configMap": "configmap"}


def mountable(app: Application) -> frozenset[str]:
    """Return the names of the volumes whose content is known here: projected keys."""
    return frozenset(
        volume["name"]
        for volume in app.spec.get("volumes", [])
        if "projected" in volume and all(map(_items, _listed(volume)))
    )


def references(app: Application) -> frozenset[Source]:
    """Return every Secret and ConfigMap that is mounted."""
    return frozenset(source for _, source, _ in _keys(app))


def files(app: Application, data: Data) -> dict[str, str]:
    """Return the content of all files that are mounted, by their paths in a pod.

    Raises:
        MissingConfigError: one is not in *data*; it may come later.
    """
    found = {}
    for folder, source, item in _keys(app):
        content = data.value(source, item["key"], optional=False)
        if content is None:
            msg = f'{source.kind} "{source.name}" has no key {item["key"]}'
            raise MissingConfigError(msg)
        found[f"{folder}/{item['path']}"] = content
    return found


def moved(value: str, app: Application, root: Path) -> str:
    """Return a value of the environment with each path of a mount below *root*."""
    for folder in {mount["mountPath"] for mount in _mounts(app)}:
        value = value.replace(folder, f"{root}{folder}")
    return value


def environment(variables: Mapping[str, str], app: Application, root: Path) -> dict[str, str]:
    """Return the environment with each path of a mount below *root*."""
    return {name: moved(value, app, root) for name, value in variables.items()}


def _keys(app: Application) -> Iterator[tuple[str, Source, Object]]:
    volumes = {volume["name"]: volume for volume in app.spec.get("volumes", [])}
    for mount in _mounts(app):
        for listed in _listed(volumes[mount["name"]]):
            for kind, of in listed.items():
                for item in of["items"]:
                    yield mount["mountPath"], Source(_KINDS[kind], of["name"]), item


def _mounts(app: Application) -> Iterator[Object]:
    for pod in (app.spec["driver"], app.spec["executor"]):
        yield from pod.get("volumeMounts", [])


def _listed(volume: Object) -> list[Object]:
    sources: list[Object] = volume["projected"].get("sources", [])
    return sources


def _items(listed: Object) -> bool:
    return all(kind in _KINDS and of.get("items") for kind, of in listed.items())
