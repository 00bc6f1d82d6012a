"""Reconciles of an Inspection: admission, launch, end and deletion."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import kopf
import pytest

from redrive.api import Body
from redrive.errors import Requeue
from redrive.inspection import controller
from redrive.inspection.job import InspectionJob
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.client import ConflictError, UnavailableError
from redrive.kube.connections import NamespaceLabels
from redrive.kube.resources import Key
from redrive.policy.naming import TopicName
from redrive.replay.controller import launch
from tests.support.fake_kubernetes import FakeKubernetes
from tests.unit.replay.controller.test_admission import SETTINGS, connection, ctx, named, policy

INSPECTOR = {
    "role": "inspector",
    "authentication": {
        "type": "Token",
        "token": {"secretRef": {"name": "pulsar-inspector", "key": "token"}},
    },
}
KIND = resources.INSPECTIONS
DEAD_LETTERS = "persistent://shop/prod/orders-fulfilment-DLQ"
CA = {"caRef": {"name": "ca", "key": "ca.crt"}}


class Broker:
    """A broker at which the roles of *granted* may consume each topic."""

    def __init__(self, *granted: str) -> None:
        self.granted = granted

    async def open(self, _key: Key) -> SimpleNamespace:
        return SimpleNamespace(admin=self)

    async def namespace(self, _name: str) -> SimpleNamespace:
        names = (TopicName("shop", "prod", f"orders-fulfilment-{end}") for end in ("DLQ", "RETRY"))
        roles = dict.fromkeys(self.granted, frozenset({"consume"}))
        return SimpleNamespace(permissions={str(name): roles for name in names})


def inspection(name: str = "now", phase: str | None = None, **spec: object) -> dict[str, Any]:
    body = named("Inspection", name, {"policyRef": {"name": "orders"}, **spec})
    return body if phase is None else {**body, "status": {"phase": phase}}


def job_of(body: Body, **more: object) -> dict[str, Any]:
    """Return the Job of an Inspection, as a controller of Kubernetes has begun to run it."""
    job = named("Job", launch.name_of(inspection(body["metadata"]["name"]), KIND), {})
    job["metadata"]["ownerReferences"] = [resources.owner_reference(resources.INSPECTIONS, body)]
    return {**job, "status": {"startTime": "2026-01-01T00:00:00Z", "ready": 1}, **more}


def ended_job(body: Body, condition: str) -> dict[str, Any]:
    conditions = [{"type": condition, "status": "True", "reason": "Ended"}]
    return job_of(body, status={"startTime": "2026-01-01T00:00:00Z", "conditions": conditions})


ANOTHER = {**inspection()["metadata"], "uid": "another"}
NOW = datetime(2026, 11, 22, tzinfo=UTC)
"""The time at which the API server creates objects."""


async def reconciled(  # noqa: PLR0913  parts of a cluster
    body: dict[str, Any],
    *others: dict[str, Any],
    connected: dict[str, Any] | None = None,
    policies: Sequence[dict[str, Any]] = (),
    jobs: Sequence[Body] = (),
    api: FakeKubernetes | None = None,
    granted: Sequence[str] = ("inspector",),
    **changes: Any,  # noqa: ANN401  of a Context
) -> tuple[Requeue, FakeKubernetes]:
    """Reconcile one Inspection, and return the API server after it."""
    api = api or FakeKubernetes()
    api.add(resources.INSPECTIONS, body, *others)
    template = SETTINGS.replay_template
    assert template is not None
    pod = {"spec": {"containers": [{"image": "job"}]}}
    api.add(resources.POD_TEMPLATES, {"metadata": template._asdict(), "template": pod})
    account = {"namespace": "shop", "name": "redrive-inspection"}
    api.add(resources.SERVICE_ACCOUNTS, {"metadata": account})
    usable = {"annotations": {"redrive.io/usable-by": "shop/main"}}
    api.add(
        resources.SECRETS,
        {"metadata": {"namespace": "shop", "name": "pulsar-inspector", **usable}},
    )
    context = ctx(
        inspections=[body, *others],
        policies=list(policies or [policy()]),
        connections=[connected or connection(inspection=INSPECTOR)],
    )
    applications = {resources.JOBS: Cache(jobs)}
    defaults: dict[str, Any] = {
        "applications": applications,
        "brokers": Broker(*granted),
        "clock": lambda: NOW,
    }
    changes = defaults | changes
    context = dataclasses.replace(context, kubernetes=api, **changes)
    return await controller.reconcile(Key.of(body), context, asyncio.Lock()), api


def status_in(api: FakeKubernetes) -> dict[str, Any]:
    body = api.objects[resources.INSPECTIONS][Key("shop", "now")]
    status: dict[str, Any] = body["status"]
    return status


def reason_in(api: FakeKubernetes) -> str:
    return str(status_in(api)["conditions"][0]["reason"])


async def test_launch_creates_job_of_the_inspection_role() -> None:
    _, api = await reconciled(inspection(deadline="90s"))
    (job,) = api.objects[resources.JOBS].values()
    pod = job["spec"]["template"]["spec"]
    module, argument = pod["containers"][0]["args"][-2:]
    decoded = InspectionJob.decode(argument)
    assert module == "redrive.inspection"
    assert (decoded.topic, decoded.subscription, decoded.seconds) == (DEAD_LETTERS, "redrive", 90)
    assert (job["spec"]["backoffLimit"], job["spec"]["activeDeadlineSeconds"]) == (0, 90)
    assert pod["serviceAccountName"] == "redrive-inspection"
    assert "pulsar-replayer" not in str(job)
    assert (status_in(api)["phase"], status_in(api)["job"]) == (
        "Submitted",
        job["metadata"]["name"],
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"connected": connection()}, "InspectionIdentityMissing"),
        (
            {"connected": connection(inspection=INSPECTOR, tls=CA)},
            "TrustNotSupported",
        ),
        ({"policies": [policy(ready="False")]}, "PolicyNotReady"),
        ({"policies": [policy(topic="orders")]}, "PolicyNotReady"),  # invalid; it can be corrected
        ({"policies": [policy(deadLetter={"mode": "Discard"})]}, "DeadLettersDiscarded"),
        ({"granted": ()}, "InspectionRoleNotGranted"),
        ({"settings": dataclasses.replace(SETTINGS, replay_template=None)}, "ReplaysDisabled"),
        ({"jobs": [job_of({**inspection(), "metadata": ANOTHER})]}, "ApplicationNotOurs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_unmet_prerequisite_is_shown_and_no_job_made(
    changes: dict[str, Any], reason: str
) -> None:
    _, api = await reconciled(inspection(), **changes)
    assert (reason_in(api), status_in(api)["phase"]) == (reason, "Pending")
    assert not api.objects[resources.JOBS]


async def test_missing_right_of_the_account_is_waited_for() -> None:
    api = FakeKubernetes()
    api.denied = {"inspections"}
    requeue, _ = await reconciled(inspection(), api=api)
    assert (reason_in(api), requeue) == ("JobRightsMissing", Requeue.BACKOFF)


async def test_third_inspection_of_a_namespace_waits() -> None:
    others = [inspection(name, "Running") for name in ("a", "b")]
    _, api = await reconciled(inspection(), *others, jobs=list(map(job_of, others)))
    assert reason_in(api) == "TooManyRuns"
    others[0]["status"]["phase"] = "Completed"
    _, api = await reconciled(inspection(), *others, jobs=list(map(job_of, others)))
    assert reason_in(api) == "Progressing"


async def test_only_ends_and_own_connections_wake_inspections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[str] = []

    async def look(key: Key, *_: object) -> Requeue:
        looked.append(key.name)
        return Requeue.ON_CHANGE

    async def seen() -> list[str]:
        for _ in range(20):
            await asyncio.sleep(0)
        return [looked.pop(0) for _ in tuple(looked)]

    monkeypatch.setattr(controller, "reconcile", look)
    limited = {"type": "Ready", "status": "False", "reason": "TooManyRuns"}
    waiting = {**inspection("waiting"), "status": {"conditions": [limited]}}
    other, running = inspection("other"), inspection("running", "Running")
    job = job_of(running)
    context = dataclasses.replace(
        ctx(inspections=[waiting, other, running]),
        applications={resources.JOBS: Cache([job])},
        namespaces=NamespaceLabels(cast("Any", None)),
    )
    (made,) = controller.register(kopf.OperatorRegistry(), context)
    assert await seen() == ["waiting", "other", "running"]
    context.connections.put(named("BrokerConnection", "foreign", {}))
    assert await seen() == []
    context.inspections.drop(other)
    assert await seen() == ["other"]
    ended = {**running, "status": {"phase": "Completed"}}
    context.inspections.put(ended)
    assert await seen() == ["waiting"]
    context.inspections.put(ended)
    assert await seen() == []
    context.applications[resources.JOBS].drop(job)
    assert await seen() == ["running", "waiting"]
    await made.stop()


@pytest.mark.parametrize(
    ("run", "end", "phase", "reason"),
    [
        ({"finished": True, "messages": 3, "matched": 2}, "Complete", "Completed", "Completed"),
        ({"messages": 3}, "Complete", "Failed", "InspectionFailed"),
        (
            {"failure": {"reason": "TopicUnreadable", "message": "no"}},
            "Failed",
            "Failed",
            "InspectionFailed",
        ),
    ],
)
async def test_end_follows_from_job_and_its_report(
    run: dict[str, Any], end: str, phase: str, reason: str
) -> None:
    body = inspection(phase="Running")
    api = FakeKubernetes()
    reported = {**body, "status": {"phase": "Running", "run": run}}

    def report(verb: str, resource: resources.Resource, _key: Key) -> None:
        if (verb, resource) == ("get", resources.INSPECTIONS):  # later than the end of the Job
            api.add(resources.INSPECTIONS, reported)

    api.before = report
    await reconciled(body, jobs=[ended_job(body, end)], api=api)
    status = status_in(api)
    assert (status["phase"], reason_in(api), "completionTime" in status) == (phase, reason, True)


async def test_unread_report_of_an_ended_job_is_no_end() -> None:
    body, api = inspection(phase="Running"), FakeKubernetes()

    def fail(verb: str, resource: resources.Resource, _key: Key) -> None:
        if (verb, resource) == ("get", resources.INSPECTIONS):
            raise UnavailableError("no answer", remedy="wait")

    api.before = fail
    requeue, _ = await reconciled(body, jobs=[ended_job(body, "Complete")], api=api)
    status = status_in(api)
    assert (status["phase"], "completionTime" in status) == ("Running", False)
    assert requeue is Requeue.BACKOFF


async def test_conflicting_write_of_the_job_is_not_lost() -> None:
    body, api = inspection(), FakeKubernetes()

    def refuse(verb: str, _resource: object, key: Key) -> None:
        if verb == "patch_status":
            raise ConflictError(f"{key} has been modified", remedy="read it")

    api.before = refuse
    requeue, _ = await reconciled(body, jobs=[job_of(body)], api=api)
    assert requeue is Requeue.BACKOFF


@pytest.mark.parametrize(("hour", "is_deleted"), [(10, False), (12, True)])
async def test_ended_inspection_is_deleted_after_its_ttl(hour: int, is_deleted: bool) -> None:  # noqa: FBT001
    body = inspection(phase="Completed")
    body["status"]["completionTime"] = "2026-01-01T10:30:00Z"
    clock = datetime.fromisoformat(f"2026-01-01T{hour}:59:00Z")
    _, api = await reconciled(body, clock=lambda: clock)
    assert (Key("shop", "now") not in api.objects[resources.INSPECTIONS]) is is_deleted
