"""The mounts of an application without a kubelet: keys of Secrets and ConfigMaps as files.

Pure. The files are in the folder of the pod, and paths of mounts in values of the environment are
replaced by paths in that folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from .environment import Data, Source
from .errors import MissingConfigError
from .objects import Application, Object

_KINDS = {"secret": "secret", "configMap": "configmap"}


def mountable(app: Application) -> frozenset[str]:
    """Return the names of the supported volumes: those with projected keys."""
    return frozenset(
        volume["name"]
        for volume in app.spec.get("volumes", [])
        if "projected" in volume and all(map(_items, _listed(volume)))
    )


def references(app: Application) -> frozenset[Source]:
    """Return every Secret and ConfigMap that is mounted."""
    return frozenset(source for _, source, _ in _keys(app))


def files(app: Application, data: Data) -> dict[str, str]:
    """Return the content of all mounted files by their paths in a pod.

    Raises:
        MissingConfigError: a key is not in *data*; it may be created later.
    """
    contents = {}
    for folder, source, item in _keys(app):
        content = data.value(source, item["key"], optional=False)
        if content is None:
            msg = f'{source.kind} "{source.name}" has no key {item["key"]}'
            raise MissingConfigError(msg)
        contents[f"{folder}/{item['path']}"] = content
    return contents


def moved(value: str, app: Application, root: Path) -> str:
    """Return *value* with each path of a mount replaced by its path below *root*."""
    for folder in {mount["mountPath"] for mount in _mounts(app)}:
        value = value.replace(folder, f"{root}{folder}")
    return value


def environment(variables: Mapping[str, str], app: Application, root: Path) -> dict[str, str]:
    """Return *variables* with each path of a mount replaced by its path below *root*."""
    return {name: moved(value, app, root) for name, value in variables.items()}


def _keys(app: Application) -> Iterator[tuple[str, Source, Object]]:
    volumes = {volume["name"]: volume for volume in app.spec.get("volumes", [])}
    for mount in _mounts(app):
        for listed in _listed(volumes[mount["name"]]):
            for kind, reference in listed.items():
                for item in reference["items"]:
                    yield mount["mountPath"], Source(_KINDS[kind], reference["name"]), item


def _mounts(app: Application) -> Iterator[Object]:
    for pod in (app.spec["driver"], app.spec["executor"]):
        yield from pod.get("volumeMounts", [])


def _listed(volume: Object) -> list[Object]:
    sources: list[Object] = volume["projected"].get("sources", [])
    return sources


def _items(listed: Object) -> bool:
    return all(kind in _KINDS and reference.get("items") for kind, reference in listed.items())
