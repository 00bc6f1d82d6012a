"""What is kept in memory of an object: what redrive reads of it, and no more. Pure.

A label selects ConfigMaps and SparkApplications, and everyone can set it: a namespace may hold a
thousand ConfigMaps of a mebibyte each that have it. So what is kept of either has a length of its
own, whatever the object holds. Of redrive's own kinds the spec and the status are kept, whose
schemas limit them, and of the rest nothing that others write for themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from redrive.api import GROUP
from redrive.kube.resources import (
    APACHE_SPARK_APPLICATIONS,
    CONFIG_MAPS,
    MANAGED,
    SPARK_APPLICATIONS,
    Body,
    Resource,
)

CONFIG_MAP_KEY = "policy.json"
"""Consumers mount the ConfigMap at `/etc/redrive` and find this file there."""
Keep = Callable[[Body], Body]
"""An object → what is kept of it; of what was kept that is all."""

_IDENTITY = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
)
_MOST_OWNERS = 16
_LONGEST_WORD = 253
"""In characters: a name or a time is not longer."""
_LONGEST_TEXT = 16_384
"""In characters: the output of a submission that failed, stack traces included, is as long."""
_LAST_STATES = 4
"""Of its history: one of the last two says how a run has ended."""


def keep_of(resource: Resource) -> Keep:
    """Return what reduces the objects of a kind."""
    return _KEPT.get(resource, of_redrive)


def of_redrive(body: Body) -> Body:
    """Keep an object without what others write into its metadata for themselves.

    Who last wrote which field is half of an object; what `kubectl apply` notes is all of it again.
    """
    metadata = {n: value for n, value in body["metadata"].items() if n != "managedFields"}
    if "annotations" in metadata:
        found = metadata["annotations"] or {}
        ours = {name: value for name, value in found.items() if name.startswith(f"{GROUP}/")}
        metadata["annotations"] = ours
    if "labels" in metadata:
        metadata["labels"] = _managed(metadata["labels"])
    return {**body, "metadata": metadata}


def config_map(body: Body) -> Body:
    """Keep of a ConfigMap whose it is, and a digest of the policy in it, which is bytes."""
    found = (body.get("data") or {}).get(CONFIG_MAP_KEY)
    if isinstance(found, str):
        found = hashlib.sha256(found.encode(errors="surrogatepass")).digest()
    return _reduced(body, {"data": {CONFIG_MAP_KEY: found}} if found is not None else {})


def _application(body: Body) -> Body:
    """Keep of a SparkApplication, of either Spark operator, whose it is, and how it stands."""
    status = _mapping(body.get("status"))
    history = _mapping(status.get("stateTransitionHistory"))
    numbers = in_order(number for number in history if len(number) <= _LONGEST_WORD)
    states = {
        "applicationState": _state(status.get("applicationState"), "state", text="errorMessage"),
        "currentState": _apache_state(status.get("currentState")),
        "stateTransitionHistory": {n: _apache_state(history[n]) for n in numbers[-_LAST_STATES:]},
    }
    found = {**states, **dict(_words(status, "lastSubmissionAttemptTime"))}
    return _reduced(body, {"status": {name: value for name, value in found.items() if value}})


def in_order(numbers: Iterable[str]) -> list[str]:
    """Sort numbers, as they are written, without reading them: others may write any text."""
    return sorted(numbers, key=lambda number: (len(number), number))


def _state(found: object, *words: str, text: str) -> dict[str, str]:
    """Keep *words* of a state, and a text.

    Of a long one the middle is left out: it begins with what was done, and ends with why not.
    """
    known, half = _mapping(found), _LONGEST_TEXT // 2
    state = dict(_words(known, *words))
    if isinstance(said := known.get(text), str):
        state[text] = f"{said[:half]}\n{said[-half:]}" if len(said) > _LONGEST_TEXT else said
    return state


def _apache_state(found: object) -> dict[str, str]:
    return _state(found, "currentStateSummary", "lastTransitionTime", text="message")


def _words(found: Mapping[str, Any], *names: str) -> Iterator[tuple[str, str]]:
    for name in names:
        if isinstance(word := found.get(name), str):
            yield name, word[:_LONGEST_WORD]


def _mapping(found: object) -> Mapping[str, Any]:
    """Return *found* where it is as it should be: a kind of others may have no schema."""
    return found if isinstance(found, dict) else {}


def _reduced(body: Body, content: Body) -> Body:
    """Return an object with its identity, its owners and *content*."""
    found = body["metadata"]
    metadata = {name: found[name] for name in _IDENTITY if name in found}
    if "labels" in found:
        metadata["labels"] = _managed(found["labels"])
    owners = [owner for owner in found.get("ownerReferences") or () if _is_short(owner)]
    if owners:
        metadata["ownerReferences"] = owners[:_MOST_OWNERS]
    typed = {name: body[name] for name in ("apiVersion", "kind") if name in body}
    return {**typed, "metadata": metadata, **content}


def _managed(labels: Mapping[str, str] | None) -> dict[str, str]:
    name, _ = MANAGED
    return {name: labels[name]} if labels and name in labels else {}


def _is_short(owner: Mapping[str, Any]) -> bool:
    return all(len(str(value)) <= _LONGEST_WORD for value in owner.values())


_KEPT: Mapping[Resource, Keep] = {
    CONFIG_MAPS: config_map,
    SPARK_APPLICATIONS: _application,
    APACHE_SPARK_APPLICATIONS: _application,
}
