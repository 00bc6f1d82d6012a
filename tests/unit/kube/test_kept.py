from __future__ import annotations

import gc
import json
import sys
from types import FunctionType, ModuleType
from typing import Any

import pytest

from redrive.api import Body
from redrive.kube.cache import Cache
from redrive.kube.resources import (
    APACHE_SPARK_APPLICATIONS,
    CONFIG_MAPS,
    POLICIES,
    SPARK_APPLICATIONS,
    Resource,
    keep_of,
    retained_config_map,
)
from redrive.replay.controller.spark_operators import apache_run, kubeflow_run

MEBIBYTE = 2**20
IDENTITY = {
    "namespace": "n",
    "name": "a",
    "uid": "1",
    "resourceVersion": "9",
    "creationTimestamp": "2026-01-01T00:00:00Z",
}
OWNER = {"apiVersion": "redrive.io/v1beta1", "kind": "RetryPolicy", "name": "a", "uid": "2"}


def config_map(data: dict[str, str], **metadata: object) -> Body:
    return {"metadata": {**IDENTITY, "ownerReferences": [OWNER], **metadata}, "data": data}


def long(length: int) -> list[tuple[Resource, Body]]:
    """Return objects with *length* characters, or more, in each of the places for them."""
    text, names = "x" * length, {f"name-{number}": "x" for number in range(length // 10)}
    bogus = [{**OWNER, "uid": str(number)} for number in range(length // 100)]
    common: dict[str, Any] = {
        **IDENTITY,
        "labels": names,
        "annotations": {"note": text},
        "finalizers": list(names),
        "managedFields": [names],
        "ownerReferences": [{**OWNER, "name": text}, *bogus],
    }
    state = {"state": text, "errorMessage": text, "currentStateSummary": text, "message": text}
    count = length // 100
    states = {str(n): state if n > count - 5 else {"message": "x"} for n in range(count)}
    status = {
        "applicationState": state,
        "currentState": state,
        "lastSubmissionAttemptTime": text,
        "stateTransitionHistory": states,
        "executorState": names,
    }
    application = {"metadata": common, "spec": names, "status": status}
    return [
        (CONFIG_MAPS, {"metadata": common, "data": {"policy.json": text, **names}}),
        (SPARK_APPLICATIONS, application),
        (APACHE_SPARK_APPLICATIONS, application),
    ]


def size_of(holder: object) -> int:
    """The bytes of all that *holder* keeps alive, code apart."""
    sizes, found = dict[int, int](), [holder]
    while found:
        each = found.pop()
        if id(each) not in sizes and not isinstance(each, type | ModuleType | FunctionType):
            sizes[id(each)] = sys.getsizeof(each)
            found += gc.get_referents(each)
    return sum(sizes.values())


@pytest.mark.parametrize("kind", range(3), ids=["ConfigMap", "Kubeflow", "Apache"])
def test_what_is_kept_of_others_objects_has_a_length_of_its_own(kind: int) -> None:
    def held(length: int) -> int:
        resource, body = long(length)[kind]
        read = json.loads(json.dumps(body))  # what is read shares nothing with other objects
        cache = Cache([read], keep_of(resource))
        assert len(cache) == 1
        return size_of(cache)

    of_some = held(100_000)
    assert of_some < 200_000
    assert held(MEBIBYTE) == of_some


@pytest.mark.parametrize("kind", range(3), ids=["ConfigMap", "Kubeflow", "Apache"])
def test_what_was_kept_is_kept_as_it_is(kind: int) -> None:
    resource, body = long(20_000)[kind]
    once = keep_of(resource)(body)
    assert keep_of(resource)(once) == once


def test_of_a_config_map_the_owners_the_label_and_a_digest_are_kept() -> None:
    label = {"app.kubernetes.io/managed-by": "redrive"}
    ours = retained_config_map(config_map({"policy.json": "{}"}, labels=label))
    assert ours["metadata"] == {**IDENTITY, "ownerReferences": [OWNER], "labels": label}
    assert list(ours["data"]) == ["policy.json"]
    assert ours == retained_config_map(config_map({"policy.json": "{}", "b": "c"}, labels=label))
    assert ours["data"] != retained_config_map(config_map({"policy.json": "{ }"}))["data"]
    assert "data" not in retained_config_map(config_map({}))


def test_that_a_config_map_holds_the_text_of_a_digest_is_no_match() -> None:
    digest = retained_config_map(config_map({"policy.json": "{}"}))["data"]["policy.json"]
    forged = retained_config_map(config_map({"policy.json": str(digest)}))
    assert forged["data"]["policy.json"] != digest


@pytest.mark.parametrize(
    "status",
    [
        None,
        "x",
        [],
        {"applicationState": 3, "currentState": ["x"]},
        {"stateTransitionHistory": {"1" * 5_000: {"message": "x"}}},
    ],
)
def test_what_is_not_of_the_form_of_a_spark_application_is_kept_without_it(status: object) -> None:
    body = {"metadata": IDENTITY, "status": status}
    assert keep_of(SPARK_APPLICATIONS)(body) == {"metadata": IDENTITY, "status": {}}


def test_a_failure_reads_as_it_would_of_the_whole_kubeflow_application() -> None:
    said = "Exception in thread main a.B: it broke\n\tat c.D\n" + "Caused by: e.F: the disk\n"
    state = {"state": "FAILED", "errorMessage": "\tat g.H\n" * 9_000 + said}
    body = {"metadata": IDENTITY, "spec": {"type": "Python"}, "status": {"applicationState": state}}
    reduced = keep_of(SPARK_APPLICATIONS)(body)
    assert kubeflow_run(reduced) == kubeflow_run(body)
    assert "the disk" in kubeflow_run(reduced).error


def test_a_failure_reads_as_it_would_of_the_whole_apache_application() -> None:
    ended = {"currentStateSummary": "ResourceReleased", "message": "", "lastTransitionTime": "t"}
    history = {str(n): {"currentStateSummary": "Submitted", "message": "x"} for n in range(12)}
    history |= {"12": {"currentStateSummary": "Failed", "message": "e.F: the disk"}, "13": ended}
    status = {"currentState": ended, "stateTransitionHistory": history}
    body = {"metadata": IDENTITY, "status": status}
    reduced = keep_of(APACHE_SPARK_APPLICATIONS)(body)
    assert apache_run(reduced) == apache_run(body)
    assert "the disk" in apache_run(reduced).error


def test_of_redrives_own_kinds_only_what_others_note_is_left_out() -> None:
    metadata = {**IDENTITY, "generation": 2, "finalizers": ["redrive.io/cleanup"]}
    noted = {"kubectl.kubernetes.io/last-applied-configuration": "{}", "redrive.io/paused": "true"}
    body = {
        "metadata": {**metadata, "annotations": noted, "labels": {"a": "b"}, "managedFields": [{}]},
        "spec": {"topic": "t"},
        "status": {"conditions": []},
    }
    assert keep_of(POLICIES)(body) == {
        **body,
        "metadata": {**metadata, "annotations": {"redrive.io/paused": "true"}, "labels": {}},
    }
