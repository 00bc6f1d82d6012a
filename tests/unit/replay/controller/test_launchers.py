"""Which Spark operator runs a Replay."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from redrive.api import LauncherName
from redrive.errors import LauncherDisabledError, SparkOperatorNotFoundError
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.context import Context
from redrive.kube.resources import Resource
from redrive.replay.controller import launch
from redrive.replay.controller.spark_operators import choose_operator, find_application
from tests.unit.replay.controller.test_admission import ctx, replay

KUBEFLOW, APACHE = resources.SPARK_APPLICATIONS, resources.APACHE_SPARK_APPLICATIONS


def enabled(*kinds: Resource, missing: tuple[Resource, ...] = ()) -> Context:
    caches = {kind: Cache() for kind in kinds}
    return dataclasses.replace(ctx(), applications=caches, missing=missing)


@pytest.mark.parametrize(
    ("wanted", "missing", "chosen"),
    [
        (None, (), LauncherName.KUBEFLOW),
        (None, (KUBEFLOW,), LauncherName.APACHE),
        (None, (APACHE,), LauncherName.KUBEFLOW),
        (LauncherName.APACHE, (), LauncherName.APACHE),
        (LauncherName.APACHE, (KUBEFLOW,), LauncherName.APACHE),
    ],
)
def test_the_connection_chooses_else_what_is_installed(
    wanted: LauncherName | None, missing: tuple[Resource, ...], chosen: LauncherName
) -> None:
    context = enabled(KUBEFLOW, APACHE, missing=missing)
    assert choose_operator(wanted, context).name is chosen


def test_one_that_is_not_installed_is_waited_for() -> None:
    for wanted, missing in ((None, (KUBEFLOW, APACHE)), (LauncherName.APACHE, (APACHE,))):
        context = enabled(KUBEFLOW, APACHE, missing=missing)
        with pytest.raises(SparkOperatorNotFoundError, match=r"spark\.apache\.org") as refusal:
            choose_operator(wanted, context)
        assert not refusal.value.stalls


def test_a_spark_operator_that_is_not_enabled_is_never_used() -> None:
    assert choose_operator(None, enabled(APACHE)).name is LauncherName.APACHE
    with pytest.raises(LauncherDisabledError, match=r"replay\.launchers\.kubeflow"):
        choose_operator(LauncherName.KUBEFLOW, enabled(APACHE))


def application(*owners: str) -> dict[str, Any]:
    """Return one of the name that the Replay's has."""
    metadata = {"name": launch.name_of(replay()), "namespace": "shop", "resourceVersion": "1"}
    references = [{"uid": uid} for uid in owners]
    return {"metadata": {**metadata, "uid": str(owners), "ownerReferences": references}}


@pytest.mark.parametrize("kind", [KUBEFLOW, APACHE])
def test_a_replay_that_was_launched_is_found_whatever_would_be_chosen_now(kind: Resource) -> None:
    context = enabled(KUBEFLOW, APACHE)
    assert find_application(replay(), context) is None
    context.applications[kind].put(application())
    found = find_application(replay(), context)
    assert found is not None
    assert found.launcher.resource == kind


@pytest.mark.parametrize(("own", "other"), [(KUBEFLOW, APACHE), (APACHE, KUBEFLOW)])
def test_an_application_of_others_hides_none_of_a_replays_own(
    own: Resource, other: Resource
) -> None:
    context = enabled(KUBEFLOW, APACHE)
    context.applications[other].put(application("another"))
    context.applications[own].put(application(replay()["metadata"]["uid"]))
    found = find_application(replay(), context)
    assert found is not None
    assert found.launcher.resource == own
