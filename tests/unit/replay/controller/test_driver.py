"""A driver that does not start: when that is shown, and what of its pod and its Events."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from redrive.errors import Requeue
from redrive.kube import resources
from redrive.kube.context import wall_clock
from redrive.kube.errors import ForbiddenError, UnavailableError
from redrive.kube.resources import Key, Resource
from redrive.replay.controller import launch
from redrive.replay.controller.driver import MAX_REASON, awaited, last
from tests.support.fake_kubernetes import FakeKubernetes
from tests.unit.replay.controller.test_admission import replay
from tests.unit.replay.controller.test_reconcile import api as api  # noqa: PLC0414  a fixture
from tests.unit.replay.controller.test_reconcile import application, look, shown

LABELS = f"sparkoperator.k8s.io/app-name={launch.name_of(replay())},spark-role=driver"
PODS = replace(resources.PODS, selector=LABELS)
EVENTS = replace(resources.EVENTS, fields="involvedObject.uid=u")
MOUNT = {
    "metadata": {"name": "e", "namespace": "shop"},
    "reason": "FailedMount",
    "message": 'MountVolume.SetUp failed for volume "access":  secret "replayer" not found',
    "lastTimestamp": "2026-11-22T10:00:00Z",
}


def submitted(seconds: int) -> dict[str, Any]:
    """Return the application, as its driver was submitted so long ago."""
    moment = wall_clock() - timedelta(seconds=seconds)
    return application(
        wall_clock() - timedelta(hours=1),
        applicationState={"state": "SUBMITTED"},
        lastSubmissionAttemptTime=moment.isoformat(),
    )


def pod(name: str = "the-driver", created: str = "10:00", **status: object) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "shop", "uid": "u"}
    made = {"creationTimestamp": f"2026-11-22T{created}:00Z"}
    return {"metadata": metadata | made, "status": {"phase": "Pending", **status}}


def waits(reason: str, message: str = "") -> dict[str, Any]:
    """Return the status of a container that waits."""
    said = {"message": message} if message else {}
    return {"name": "spark-kubernetes-driver", "state": {"waiting": {"reason": reason} | said}}


async def told(api: FakeKubernetes) -> str:
    """Return the message about a driver that has not started in time."""
    assert await look(api, applications=[submitted(121)]) is Requeue.SLOW_BACKOFF
    reason, message = shown(api)
    assert reason == "DriverNotStarted"
    return message


async def test_it_is_shown_two_minutes_after_its_submission(api: FakeKubernetes) -> None:
    assert await look(api, applications=[submitted(100)]) is Requeue.BACKOFF
    assert shown(api)[0] == "Progressing"
    assert f"`kubectl --namespace shop describe pod --selector {LABELS}`" in await told(api)


async def test_the_message_names_the_pod_and_why_its_container_waits(api: FakeKubernetes) -> None:
    why = waits("CreateContainerConfigError", 'secret "replayer" not found')
    api.add(PODS, pod("of-the-last-run", "09:00"), pod(containerStatuses=[why]))
    message = await told(api)
    assert 'was submitted: CreateContainerConfigError: secret "replayer" not found;' in message
    assert "got 'pod the-driver'" in message
    assert "`kubectl --namespace shop describe pod the-driver`" in message


async def test_a_volume_that_is_missing_is_what_the_last_event_says(api: FakeKubernetes) -> None:
    api.add(PODS, pod(containerStatuses=[waits("ContainerCreating")]))
    assert "after it was submitted; got 'pod the-driver'" in await told(api)
    earlier = {"metadata": {"name": "f", "namespace": "shop"}, "reason": "R", "message": "m"}
    api.add(EVENTS, MOUNT, earlier)
    assert 'FailedMount: MountVolume.SetUp failed for volume "access": secret' in await told(api)


@pytest.mark.parametrize("error", [ForbiddenError, UnavailableError])
@pytest.mark.parametrize("kind", ["Pod", "Event"])
async def test_without_the_right_to_look_the_message_says_how_to(
    api: FakeKubernetes, error: type[ForbiddenError | UnavailableError], kind: str
) -> None:
    def refuse(_verb: str, resource: Resource, _key: Key) -> None:
        if resource.kind == kind:
            raise error("it is refused", remedy="none")

    api.add(PODS, pod())
    api.before = refuse
    assert "kubectl --namespace shop describe pod" in await told(api)


async def test_what_is_shown_is_short_and_without_credentials(api: FakeKubernetes) -> None:
    url = "https://me:hunter2@registry.test/layer?X-Amz-Signature=abc"
    why = waits("ErrImagePull", f'Get "{url}": 403 {"x" * 2000}')
    api.add(PODS, pod(containerStatuses=[why]))
    message = await told(api)
    assert 'ErrImagePull: Get "https://…registry.test/layer…": 403 xxx' in message
    assert len(message) < MAX_REASON + 500


def test_a_pod_that_no_node_has_room_for_says_so() -> None:
    full = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/1 nodes are available: 1 Insufficient cpu.",
    }
    assert awaited(pod(conditions=[full])) == f"Unschedulable: {full['message']}"
    assert not awaited(pod(conditions=[{**full, "status": "True"}]))


def test_what_runs_or_was_never_looked_at_waits_for_nothing() -> None:
    assert not awaited({"metadata": {}})
    assert not awaited(pod(containerStatuses=[{"state": {"running": {}}}]))
    assert not last([])


def test_what_has_no_reason_or_no_message_is_shown_without() -> None:
    assert last([{"message": "m"}]) == "m"
    assert last([{"reason": "R"}]) == "R"
    assert awaited(pod(containerStatuses=[{"state": {"waiting": {"message": "m"}}}])) == "m"


async def test_a_submission_whose_time_somebody_forged_is_not_late(api: FakeKubernetes) -> None:
    forged = submitted(121)
    forged["status"]["lastSubmissionAttemptTime"] = "0000-01-01T00:00:00Z"
    assert await look(api, applications=[forged]) is Requeue.BACKOFF
