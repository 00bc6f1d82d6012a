"""Reconciles of an Inspection: admission, launch, end and deletion."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from redrive.api import Body
from redrive.api.rocketmq import RocketMQMessages
from redrive.auth.method import BrokerAccess, Method
from redrive.errors import Requeue
from redrive.inspection import controller
from redrive.inspection.job import InspectionJob, PulsarMessages
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.client import ConflictError, UnavailableError
from redrive.kube.connections import NamespaceLabels
from redrive.kube.context import Context
from redrive.kube.resources import Key
from redrive.policy.naming import TopicName
from redrive.replay.controller import launch
from redrive.replay.controller.launch import launched_through
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


CLEAR = {"recipient": "A" * 43 + "=", "payload": "Clear"}
REVEALING: dict[str, Any] = {
    "connected": connection(inspection=INSPECTOR | {"clearPayloads": "Allowed"}),
    "settings": dataclasses.replace(SETTINGS, clear_payloads=True),
}
ELSEWHERE = named("RetryPolicy", "other", policy()["spec"])


class Broker:
    """A broker at which the roles of *granted* may consume each topic.

    Attributes:
        ages: the maximum age of each answer that was asked for.
    """

    def __init__(self, *granted: str) -> None:
        self.granted = granted
        self.ages: list[float] = []

    async def open(self, _key: Key) -> SimpleNamespace:
        return SimpleNamespace(admin=self)

    async def namespace(self, _name: str, *, max_age: float) -> SimpleNamespace:
        self.ages.append(max_age)
        names = (TopicName("shop", "prod", f"orders-fulfilment-{end}") for end in ("DLQ", "RETRY"))
        roles = dict.fromkeys(self.granted, frozenset({"consume"}))
        return SimpleNamespace(permissions={str(name): roles for name in names})


def inspection(name: str = "now", phase: str | None = None, **spec: object) -> dict[str, Any]:
    body = named("Inspection", name, {"policyRef": {"name": "orders"}, **spec})
    return body if phase is None else {**body, "status": {"phase": phase}}


def job_of(body: Body, **more: object) -> dict[str, Any]:
    """Return the Job of an Inspection, as a controller of Kubernetes has begun to run it."""
    job = named("Job", launch.name_of(inspection(body["metadata"]["name"]), KIND), {})
    job["metadata"]["annotations"] = {"redrive.io/connection": "shop/main"}
    job["metadata"]["ownerReferences"] = [resources.owner_reference(resources.INSPECTIONS, body)]
    return {**job, "status": {"startTime": "2026-01-01T00:00:00Z", "ready": 1}, **more}


def ended_job(body: Body, condition: str) -> dict[str, Any]:
    conditions = [{"type": condition, "status": "True", "reason": "Ended"}]
    return job_of(body, status={"startTime": "2026-01-01T00:00:00Z", "conditions": conditions})


ANOTHER = {**inspection()["metadata"], "uid": "another"}
NOW = datetime(2026, 11, 22, tzinfo=UTC)
"""The time at which the API server creates objects."""


def soon() -> datetime:
    """Return the latest time at which `inspection` may start in clear text."""
    created = datetime.fromisoformat(inspection()["metadata"]["creationTimestamp"])
    return created + timedelta(minutes=10)


def cluster(  # noqa: PLR0913  its parts
    *inspections: dict[str, Any],
    connected: dict[str, Any] | None = None,
    policies: Sequence[dict[str, Any]] = (),
    jobs: Sequence[Body] = (),
    api: FakeKubernetes | None = None,
    stored: dict[str, Any] | None = None,
    granted: Sequence[str] = ("inspector",),
    **changes: Any,  # noqa: ANN401  of a Context
) -> tuple[Context, FakeKubernetes]:
    """Return the caches of an operator, and its API server.

    The server has *stored*, if the operator retains only a part of the first Inspection.
    """
    api = api or FakeKubernetes()
    api.add(resources.INSPECTIONS, *inspections)
    if stored is not None:
        api.add(resources.INSPECTIONS, stored)
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
        inspections=list(inspections),
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
    return dataclasses.replace(context, kubernetes=api, **changes), api


async def reconciled(
    body: dict[str, Any],
    *others: dict[str, Any],
    **parts: Any,  # noqa: ANN401  of a cluster
) -> tuple[Requeue, FakeKubernetes]:
    """Reconcile one Inspection, and return the API server after it."""
    context, api = cluster(body, *others, **parts)
    return await controller.reconcile(Key.of(body), context, asyncio.Lock()), api


def rocketmq(**inspection: object) -> dict[str, Any]:
    """Return a connection of RocketMQ, with the access of jobs if it has fields."""
    cluster = {
        "nameServers": ["rocketmq:9876"],
        "brokerHosts": ["broker-*"],
        "authentication": {"type": "None"},
        "allow": [{"name": "one", "topics": ["*"], "groups": ["*"]}],
        **({"inspection": inspection} if inspection else {}),
    }
    return named("BrokerConnection", "main", {"rocketmq": cluster})


ROCKETMQ_POLICY = named(
    "RocketMQRetryPolicy",
    "orders",
    {"connectionRef": {"name": "main"}, "topic": "orders", "group": "fulfilment"},
    status={**policy()["status"], "masters": ["broker-a"]},
)
IN_ROCKETMQ = {"kind": "RocketMQRetryPolicy", "name": "orders"}
ACCESS_KEY = {
    "type": "AccessKey",
    "accessKey": {"user": "inspector", "secretRef": {"name": "pulsar-inspector", "key": "key"}},
}


async def test_job_reads_dead_letters_of_rocketmq() -> None:
    _, api = await reconciled(
        inspection(policyRef=IN_ROCKETMQ),
        connected=rocketmq(authentication=ACCESS_KEY),
        policies=[policy()],
        rocketmq_policies=Cache([ROCKETMQ_POLICY]),
    )
    (job,) = api.objects[resources.JOBS].values()
    pod = job["spec"]["template"]["spec"]
    assert InspectionJob.decode(pod["containers"][0]["args"][-1]).source == RocketMQMessages(
        "%DLQ%fulfilment", "fulfilment", ["rocketmq:9876"], None, ["broker-*"], ("broker-a",)
    )
    access = BrokerAccess.decode(pod["containers"][0]["env"][-1]["value"])
    assert (access.method, access.user) == (Method.ACCESS_KEY, "inspector")
    (source,) = pod["volumes"][-1]["projected"]["sources"]
    path = {"key": "key", "path": "credentials/secret-key"}
    assert source == {"secret": {"name": "pulsar-inspector", "items": [path]}}


@pytest.mark.parametrize(
    ("access", "spec", "reason", "words"),
    [
        (
            {}, {}, "InspectionIdentityMissing",
            "has no credentials for Inspections; give it spec.rocketmq.inspection, with an access",
        ),
        (
            {"authentication": ACCESS_KEY}, {"from": "Retry"}, "RetriesNotInspected",
            "does not permit to inspect waiting retries; inspect from: DeadLetter",
        ),
        (
            {"authentication": ACCESS_KEY}, {"export": {"destination": "archive"}},
            "DestinationNotFound", "no such destination for files; got 'archive'; remove export",
        ),
        (
            {"authentication": ACCESS_KEY}, {"messages": CLEAR}, "ClearTextNotPermitted",
            "create another Inspection after its rocketmq.inspection.clearPayloads is Allowed",
        ),
    ],
    ids=["identity", "retries", "file", "clear text"],
)  # fmt: skip
async def test_rocketmq_inspection_without_access_has_remedy(
    access: dict[str, Any], spec: dict[str, Any], reason: str, words: str
) -> None:
    _, api = await reconciled(
        inspection(policyRef=IN_ROCKETMQ, **spec),
        connected=rocketmq(**access),
        rocketmq_policies=Cache([ROCKETMQ_POLICY]),
        settings=REVEALING["settings"],
        clock=soon,
    )
    assert reason_in(api) == reason
    assert words in message_in(api)
    assert not api.objects.get(resources.JOBS)


def status_in(api: FakeKubernetes) -> dict[str, Any]:
    body = api.objects[resources.INSPECTIONS][Key("shop", "now")]
    status: dict[str, Any] = body["status"]
    return status


def reason_in(api: FakeKubernetes) -> str:
    return str(status_in(api)["conditions"][0]["reason"])


def message_in(api: FakeKubernetes) -> str:
    return str(status_in(api)["conditions"][0]["message"])


@pytest.mark.parametrize(
    ("masking", "job"),
    [
        (None, ([], False)),
        ({}, ([], False)),
        ({"show": ["$.needs"]}, (["$.needs"], False)),
        ({"keys": "Clear"}, ([], True)),
    ],
)
async def test_job_shows_what_the_connection_permits(
    masking: dict[str, Any] | None, job: tuple[list[str], bool]
) -> None:
    connected = connection(inspection=INSPECTOR | {"masking": masking})
    _, api = await reconciled(inspection(), connected=connected)
    (launched,) = api.objects[resources.JOBS].values()
    container = launched["spec"]["template"]["spec"]["containers"][0]
    argument = InspectionJob.decode(container["args"][-1])
    assert (argument.shown, argument.shows_keys) == job


async def test_launch_creates_job_of_the_inspection_role() -> None:
    _, api = await reconciled(inspection(deadline="90s"))
    (job,) = api.objects[resources.JOBS].values()
    pod = job["spec"]["template"]["spec"]
    module, argument = pod["containers"][0]["args"][-2:]
    decoded = InspectionJob.decode(argument)
    assert module == "redrive.inspection"
    assert decoded.seconds == 90
    assert decoded.source == PulsarMessages(
        DEAD_LETTERS, "redrive", "pulsar://pulsar:6650", "http://pulsar:8080"
    )
    assert job["spec"]["backoffLimit"] == 0
    # The job reports that it has exceeded the deadline before Kubernetes stops it.
    assert job["spec"]["activeDeadlineSeconds"] == 150
    assert job["spec"]["ttlSecondsAfterFinished"] == 86_400
    assert pod["serviceAccountName"] == "redrive-inspection"
    assert "pulsar-replayer" not in str(job)
    (source,) = pod["volumes"][0]["projected"]["sources"]  # and no key of a ledger
    assert [item["path"] for item in source["secret"]["items"]] == ["credentials/token"]
    assert (status_in(api)["phase"], status_in(api)["job"]) == (
        "Submitted",
        job["metadata"]["name"],
    )


async def test_file_goes_to_a_destination_of_the_connection() -> None:
    body = inspection(export={"destination": "archive"})
    for name, reason in (("archive", "Progressing"), ("other", "DestinationNotFound")):
        place = {"name": name, "uri": "s3://letters/prod/", "endpointURL": "https://store:9000"}
        secret = {
            "secretRef": {"name": "pulsar-inspector"}
        }  # exists, with the consent of its owner
        connected = connection(inspection=INSPECTOR | {"destinations": [place | secret]})
        _, api = await reconciled(body, connected=connected)
        assert reason_in(api) == reason
        running = {**body, "status": {"phase": "Running"}}
        _, ended = await reconciled(running, jobs=[job_of(body)], connected=connected)
        assert status_in(ended)["phase"] == ("Running" if name == "archive" else "Failed")
        if name == "archive":
            (job,) = api.objects[resources.JOBS].values()
    pod = job["spec"]["template"]["spec"]
    argument = InspectionJob.decode(pod["containers"][0]["args"][-1])
    uid = body["metadata"]["uid"][:8]
    assert argument.file == f"s3://letters/prod/shop/orders/now-{uid}.parquet"
    assert argument.endpoint_url == "https://store:9000"
    (volume,) = pod["volumes"]
    *_, keys = volume["projected"]["sources"]
    assert [item["path"] for item in keys["secret"]["items"]] == [
        "destination/access-key-id",
        "destination/secret-access-key",
    ]


async def test_report_shows_past_replays_of_the_policy() -> None:
    ended = {"result": "Completed", "completionTime": "2026-11-26T13:00:00Z"}
    followed = {"name": "fix", "moved": 4, "refused": 0, "deadAgain": 1, **ended}
    replayed = policy()
    replayed["status"]["replays"] = [followed, {"name": "first", **ended}]
    place = {"name": "archive", "uri": "file:///archive"}
    _, api = await reconciled(
        inspection(export={"destination": "archive", "format": "HTML"}),
        connected=connection(inspection=INSPECTOR | {"destinations": [place]}),
        policies=[replayed],
    )
    (job,) = api.objects[resources.JOBS].values()
    argument = job["spec"]["template"]["spec"]["containers"][0]["args"][-1]
    assert InspectionJob.decode(argument).replays == [
        ["fix", "Run", "Completed", "4", "0", "1", "2026-11-26T13:00:00Z"],
        ["first", "Run", "Completed", "", "", "", "2026-11-26T13:00:00Z"],
    ]


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


@pytest.mark.parametrize(
    ("is_allowed", "is_checked", "reasons"),
    [
        (True, True, ("Progressing", "Progressing")),
        (False, True, ("ClearTextNotPermitted", "InspectionFailed")),
        (True, False, ("ClearTextNotPermitted", "InspectionFailed")),
    ],
)
@pytest.mark.parametrize(
    "result",
    [
        {"messages": CLEAR},
        {"export": {"destination": "archive", "payload": "Clear"}},
    ],
)
async def test_clear_text_needs_connection_and_installation(
    *, result: dict[str, Any], is_allowed: bool, is_checked: bool, reasons: tuple[str, str]
) -> None:
    """Also of one that runs already."""
    body = inspection(**result)
    permission: dict[str, Any] = {"destinations": [{"name": "archive", "uri": "file:///archive"}]}
    permission |= {"clearPayloads": "Allowed" if is_allowed else "Never"}
    settings = dataclasses.replace(SETTINGS, clear_payloads=is_checked)
    connected = connection(inspection=INSPECTOR | permission)
    changes: dict[str, Any] = {"connected": connected, "settings": settings, "clock": soon}
    _, waiting = await reconciled(body, **changes)
    _, running = await reconciled(body, jobs=[job_of(body)], **changes)
    assert (reason_in(waiting), reason_in(running)) == reasons
    # It is final: one that was created unchecked does not run once this is permitted.
    phases = ("Submitted", "Running") if is_allowed and is_checked else ("Failed", "Failed")
    assert (status_in(waiting)["phase"], status_in(running)["phase"]) == phases


@pytest.mark.parametrize("payload", ["Masked", "Clear"])
async def test_clear_text_starts_soon_after_creation_or_never(payload: str) -> None:
    """Its author may lose the right that was checked at the creation."""
    body = inspection(messages={"recipient": "A" * 43 + "=", "payload": payload})
    _, started = await reconciled(body, **REVEALING, clock=soon)
    _, late = await reconciled(body, **REVEALING, clock=lambda: soon() + timedelta(seconds=1))
    is_clear = payload == "Clear"
    assert reason_in(started) == "Progressing"
    assert reason_in(late) == ("ClearTextNotPermitted" if is_clear else "Progressing")
    assert status_in(late)["phase"] == ("Failed" if is_clear else "Submitted")
    assert bool(late.objects[resources.JOBS]) is not is_clear

    missing, _ = await reconciled(body, **REVEALING | {"policies": [ELSEWHERE]}, clock=soon)
    assert missing is (Requeue.SLOW_BACKOFF if is_clear else Requeue.ON_CHANGE)


async def test_missing_right_of_the_account_is_waited_for() -> None:
    api = FakeKubernetes()
    api.denied = {"inspections"}
    requeue, _ = await reconciled(inspection(), api=api)
    assert (reason_in(api), requeue) == ("JobRightsMissing", Requeue.SLOW_BACKOFF)


async def test_pending_inspections_share_one_answer_about_grants() -> None:
    """Any number of them waits for one grant, and each asks again and again."""
    broker = Broker()
    for name in ("now", "later"):
        requeue, _ = await reconciled(inspection(name), brokers=broker)
        assert requeue is Requeue.SLOW_BACKOFF
    assert broker.ages == [5.0, 5.0]


async def test_third_inspection_of_a_namespace_waits() -> None:
    others = [inspection(name, "Running") for name in ("a", "b")]
    _, api = await reconciled(inspection(), *others, jobs=list(map(job_of, others)))
    assert reason_in(api) == "TooManyRuns"
    jobs = [job_of(others[0]), ended_job(others[1], "Failed")]
    _, api = await reconciled(inspection(), *others, jobs=jobs)
    assert reason_in(api) == "Progressing"


class HangingBroker(Broker):
    """A broker that does not answer until `released` is set.

    Attributes:
        calls: the number of calls that began.
    """

    def __init__(self, *granted: str) -> None:
        super().__init__(*granted)
        self.calls, self.released = 0, asyncio.Event()

    async def open(self, key: Key) -> SimpleNamespace:
        self.calls += 1
        await self.released.wait()
        return await super().open(key)


async def test_hanging_broker_blocks_no_other_launch() -> None:
    """Those that waited for it do not exceed the number that may run."""
    broker, launching = HangingBroker("inspector"), asyncio.Lock()
    names = ("a", "b", "c")
    context, api = cluster(*map(inspection, names), brokers=broker)
    reconciles = [
        asyncio.create_task(controller.reconcile(Key("shop", name), context, launching))
        for name in names
    ]
    for _ in range(60):
        await asyncio.sleep(0)
    assert (broker.calls, launching.locked()) == (3, False)
    broker.released.set()
    await asyncio.gather(*reconciles)
    assert len(api.objects[resources.JOBS]) == 2
    bodies = api.objects[resources.INSPECTIONS].values()
    reasons = sorted(body["status"]["conditions"][0]["reason"] for body in bodies)
    assert reasons == ["Progressing", "Progressing", "TooManyRuns"]


async def test_jobs_of_deleted_inspections_count_until_their_end() -> None:
    """Also those that a deletion with `--cascade=orphan` leaves without an owner."""
    deleted = [job_of(inspection("a")), job_of(inspection("b"))]
    del deleted[1]["metadata"]["ownerReferences"]
    _, api = await reconciled(inspection(), jobs=deleted)
    assert reason_in(api) == "TooManyRuns"


@pytest.mark.parametrize(
    "changes",
    [
        {"inspection": None},
        {"inspection": INSPECTOR | {"retryTopics": "Never"}},
        {"inspection": INSPECTOR | {"retryTopics": "Allowed"}, "allow": []},
    ],
)
async def test_running_inspection_ends_when_it_is_not_permitted(changes: dict[str, Any]) -> None:
    body = {**inspection(**{"from": "Retry"}), "status": {"phase": "Running"}}
    _, api = await reconciled(body, jobs=[job_of(body)], connected=connection(**changes))
    assert (reason_in(api), status_in(api)["phase"]) == ("InspectionFailed", "Failed")


async def test_running_inspection_ends_by_the_connection_of_its_launch() -> None:
    """The owner of the policy may delete it, or refer to another connection, to keep the role."""
    body, withdrawn = inspection(phase="Running"), connection(inspection=None)
    elsewhere = policy(connectionRef={"name": "another"})
    deleted = named("RetryPolicy", "other", elsewhere["spec"])
    for now in (elsewhere, deleted):
        _, api = await reconciled(body, jobs=[job_of(body)], policies=[now])
        assert status_in(api)["phase"] == "Running"
        _, api = await reconciled(body, jobs=[job_of(body)], policies=[now], connected=withdrawn)
        assert (reason_in(api), status_in(api)["phase"]) == ("InspectionFailed", "Failed")


async def test_launch_records_the_connection_that_the_cache_retains() -> None:
    _, api = await reconciled(inspection())
    (job,) = api.objects[resources.JOBS].values()
    assert launched_through(job) == Key("shop", "main")
    kept = resources.keep_of(resources.JOBS)(job)
    assert launched_through(kept) == Key("shop", "main")


async def test_withdrawal_wakes_inspections_whose_policy_is_gone(looks: Looks) -> None:
    body = inspection(phase="Running")
    context = dataclasses.replace(watched([job_of(body)], body), policies=Cache())
    (made,) = controller.start(context)
    assert await looks.seen() == ["now"]
    context.connections.drop(connection())
    assert await looks.seen() == ["now"]
    await made.stop()


async def test_running_inspection_survives_an_invalid_policy() -> None:
    body = inspection(phase="Running")
    await reconciled(body, jobs=[job_of(body)], policies=[policy(topic="orders")])
    _, api = await reconciled(body, jobs=[job_of(body)], policies=[policy(ready="False")])
    assert status_in(api)["phase"] == "Running"


class Looks:
    """Reconciles of a controller, which change nothing.

    Attributes:
        names: Inspections that were reconciled since the last `seen`.
    """

    def __init__(self) -> None:
        self.names: list[str] = []

    async def look(self, key: Key, *_: object) -> Requeue:
        self.names.append(key.name)
        return Requeue.ON_CHANGE

    async def seen(self) -> list[str]:
        for _ in range(60):
            await asyncio.sleep(0)
        return [self.names.pop(0) for _ in tuple(self.names)]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    looks = Looks()
    monkeypatch.setattr(controller, "reconcile", looks.look)
    return looks


def limited(name: str) -> dict[str, Any]:
    """Return an Inspection that waits for the end of others."""
    condition = {"type": "Ready", "status": "False", "reason": "TooManyRuns"}
    return {**inspection(name), "status": {"conditions": [condition]}}


def watched(jobs: Sequence[Body], *inspections: dict[str, Any]) -> Context:
    return dataclasses.replace(
        ctx(inspections=list(inspections), policies=[policy()]),
        applications={resources.JOBS: Cache(jobs)},
        namespaces=NamespaceLabels(cast("Any", None)),
    )


async def test_end_of_a_job_wakes_the_next_inspection_only(looks: Looks) -> None:
    running = [inspection("a", "Running"), inspection("b", "Running")]
    waiting = [limited(f"waits-{number}") for number in range(9)]
    context = watched([job_of(body) for body in running], *running, *waiting)
    (made,) = controller.start(context)
    assert len(await looks.seen()) == 11
    context.inspections.drop(waiting[3])
    assert await looks.seen() == ["waits-3"]
    context.applications[resources.JOBS].put(ended_job(running[0], "Complete"))
    assert await looks.seen() == ["a", "waits-0"]
    context.inspections.put({**running[0], "status": {"phase": "Completed"}})
    assert await looks.seen() == []
    # It can't start for another reason, so the next one is tried.
    context.inspections.put(inspection("waits-0"))
    assert await looks.seen() == ["waits-1"]
    context.inspections.put({**limited("waits-1"), "status": {"phase": "Failed"}})
    assert await looks.seen() == ["waits-2"]
    context.applications[resources.JOBS].drop(job_of(running[1]))
    assert await looks.seen() == ["b", "waits-2", "waits-4"]
    await made.stop()


async def test_inspection_that_misses_the_end_of_a_job_is_woken(looks: Looks) -> None:
    """The Job may end while the status that waits for it is written."""
    context = watched([], inspection())
    (made,) = controller.start(context)
    assert await looks.seen() == ["now"]
    context.inspections.put(limited("now"))
    assert await looks.seen() == ["now"]
    await made.stop()


async def test_figures_of_policies_and_others_wake_no_inspection(looks: Looks) -> None:
    context = watched([], inspection())
    (made,) = controller.start(context)
    assert await looks.seen() == ["now"]
    context.connections.put(named("BrokerConnection", "foreign", {}))
    figures = policy()
    figures["status"]["backlog"] = {"deadLetter": 3}
    context.policies.put(figures)
    assert await looks.seen() == []
    context.policies.put(policy(ready="False"))
    assert await looks.seen() == ["now"]
    await made.stop()


@pytest.mark.parametrize(
    ("run", "end", "phase", "reason", "words"),
    [
        (
            {"finished": True, "messages": 3, "matched": 2}, "Complete", "Completed", "Completed",
            "3 messages were read, 2 are selected",
        ),
        (
            {"messages": 3}, "Complete", "Failed", "InspectionFailed",
            "has exited before it finished the run; fix the cause and create another Inspection",
        ),
        (
            {"failure": {"reason": "TopicUnreadable", "message": "no"}},
            "Failed", "Failed", "InspectionFailed",
            "has failed; got 'TopicUnreadable: no'; fix the cause and create another Inspection",
        ),
    ],
    ids=["finished", "exited", "failed"],
)  # fmt: skip
async def test_end_follows_from_job_and_its_report(
    run: dict[str, Any], end: str, phase: str, reason: str, words: str
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
    assert message_in(api).endswith(words)


@pytest.mark.parametrize("payload", ["Masked", "Clear"])
async def test_audit_record_shows_that_text_was_clear(
    payload: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "redrive.audit")
    messages = {"recipient": "A" * 43 + "=", "payload": payload}
    body = inspection(phase="Running", messages=messages)
    body["status"]["run"] = {"finished": True, "messages": 3, "matched": 2}
    await reconciled(body, jobs=[ended_job(body, "Complete")])
    (text,) = [r.getMessage() for r in caplog.records if r.name == "redrive.audit"]
    record = json.loads(text.removeprefix("Inspection ended: "))
    assert (record["messages"], record["reveals"]) == (3, payload == "Clear")


@pytest.mark.parametrize("payload", ["Masked", "Clear"])
async def test_audit_log_shows_clear_text_before_its_job_exists(
    payload: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its author may delete it before its end."""
    caplog.set_level("INFO", "redrive.audit")
    messages = {"recipient": "A" * 43 + "=", "payload": payload}
    body, api = inspection(messages=messages, reason="the alert"), FakeKubernetes()
    body["metadata"]["annotations"] = {"redrive.io/requested-by": "ann"}
    lines: list[str] = []

    def look(verb: str, resource: resources.Resource, _key: Key) -> None:
        if (verb, resource) == ("create", resources.JOBS):
            lines.extend(r.getMessage() for r in caplog.records if r.name == "redrive.audit")

    api.before = look
    await reconciled(
        dict(resources.keep_of(KIND)(body)), api=api, stored=body, **REVEALING, clock=soon
    )
    assert api.objects[resources.JOBS]
    starts = [json.loads(line.removeprefix("Inspection starts: ")) for line in lines]
    shown = [(r["requestedBy"], r["reason"], r["reveals"], r["result"]) for r in starts]
    assert shown == ([("ann", "the alert", True, "Progressing")] if payload == "Clear" else [])


async def test_audit_log_shows_what_masking_permits(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "redrive.audit")
    body, api = inspection(), FakeKubernetes()
    masking = {"show": ["$.needs"], "keys": "Clear"}
    await reconciled(
        dict(resources.keep_of(KIND)(body)), api=api, stored=body,
        connected=connection(inspection=INSPECTOR | {"masking": masking}),
    )  # fmt: skip
    (line,) = (r.getMessage() for r in caplog.records if r.name == "redrive.audit")
    record = json.loads(line.removeprefix("Inspection starts: "))
    assert (record["shown"], record["showsKeys"], record["reveals"]) == (["$.needs"], True, False)


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
