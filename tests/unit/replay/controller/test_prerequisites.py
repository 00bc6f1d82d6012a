"""Prerequisites of a Replay: its target, pods and pull secrets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from redrive.admin.policies import Quotas
from redrive.api.conditions import ObjectEvent
from redrive.api.replay_status import ReplayStatus
from redrive.errors import (
    RedriveError,
    Requeue,
)
from redrive.kube import resources
from redrive.kube.client import ForbiddenError, UnavailableError
from redrive.kube.context import Context, wall_clock
from redrive.kube.resources import Key, Resource
from redrive.reasons import Reason, requeue_of
from redrive.replay.controller import launch
from redrive.replay.controller.prerequisites import (
    MAX_REASON,
    check_pods,
    last_event,
    missing_prerequisite,
    prepare_target,
)
from redrive.replay.controller.spark_operators import job_run
from tests.support.fake_admin import FakeBroker, Namespace, Topic
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.reasons import raises
from tests.unit.replay.controller.test_admission import connection, ctx, replay
from tests.unit.replay.controller.test_reconciler import (
    REVIEW,
    application,
    look,
    shown,
    statuses,
)
from tests.unit.replay.controller.test_reconciler import api as api  # noqa: PLC0414  a fixture

NAMESPACE = "persistent://shop/prod"
RETRY = f"{NAMESPACE}/orders-fulfilment-RETRY"


@pytest.fixture
async def broker() -> FakeBroker:
    """A broker that has the source topic, and topics of a RetryPolicy beside it."""
    broker = FakeBroker()
    broker.tenants = {"shop": []}
    owned = {"redrive.io/owner": "here/billing/invoices"}
    topics = {
        "orders": Topic(2, {}),
        "checked": Topic(0, {"team": "shop", "redrive.io/owner": ""}),
        "theirs": Topic(0, owned),
        "theirs-in-parts": Topic(3, owned),
    }
    for topic in topics.values():
        topic.parts = {end: ["fulfilment"] for end in topic.parts}
    broker.namespaces = {"shop/prod": Namespace(topics)}
    return broker


async def prepare(
    broker: FakeBroker,
    roles: str = "*",
    status: dict[str, Any] | None = None,
    applications: Sequence[dict[str, Any]] = (),
    **spec: Any,  # noqa: ANN401
) -> tuple[ObjectEvent, ...]:
    """Prepare the target of a Replay, and return its events."""
    allow = [{"name": "one", "topics": [f"{NAMESPACE}/*"], "roles": [roles]}]
    body, through = replay(spec=spec, status=status or {}), connection(allow=allow)
    context = ctx(connections=[through], replays=[body], applications=list(applications))
    kubernetes = FakeKubernetes()
    kubernetes.add(resources.REPLAYS, body)
    kubernetes.add(resources.CONNECTIONS, through)
    admin = broker.admin()

    async def resolve(*_: object) -> Any:  # noqa: ANN401
        return SimpleNamespace(admin=admin, key=Key("shop", "main"))

    brokers = cast("Any", SimpleNamespace(resolve=resolve))
    context = dataclasses.replace(context, brokers=brokers, kubernetes=kubernetes)
    return await prepare_target(body, context)


def rights(broker: FakeBroker, topic: str) -> dict[str, list[str]]:
    """Return the rights of each role on a topic."""
    granted = broker.namespaces["shop/prod"].grants.get(f"{NAMESPACE}/{topic}", {})
    return {role: sorted(actions) for role, actions in granted.items()}


def deduplicate(broker: FakeBroker, topic: str) -> None:
    broker.namespaces["shop/prod"].topics[topic].policies["deduplicationEnabled"] = True


async def test_retry_topic_target_needs_no_broker_call(broker: FakeBroker) -> None:
    named = {"target": {"type": "Topic", "topic": RETRY}}
    same: tuple[dict[str, Any], ...] = ({}, {"target": {"type": "Retry"}}, named)
    for spec in same:
        await prepare(broker, **spec)
    assert broker.calls == []


async def test_launched_replay_skips_target_checks(broker: FakeBroker) -> None:
    """Its job detects changes at the broker."""
    await prepare(broker, target={"type": "Source"}, applications=[application(wall_clock())])
    assert broker.calls == []


@pytest.mark.parametrize("mode", ["Review", "Run"])
async def test_target_is_checked_before_review_is_admitted(broker: FakeBroker, mode: str) -> None:
    deduplicate(broker, "orders")
    broker.namespaces["shop/prod"].topics["orders"].quotas = {SIZE: {"limitSize": 10, **EVICTS}}
    spec: dict[str, Any] = {"target": {"type": "Source"}, "mode": mode}
    run: dict[str, Any] = {"status": REVIEW, "applications": [application(wall_clock())]}
    if mode == "Review":
        await prepare(broker, **run, **spec)
        assert broker.calls == []
        return
    with raises(Reason.TARGET_EVICTS):
        await prepare(broker, **run, **spec)


@pytest.mark.parametrize("waits_for", ["resumption", "approval", ""])
async def test_target_is_checked_before_a_run_resumes(broker: FakeBroker, waits_for: str) -> None:
    deduplicate(broker, "orders")
    broker.namespaces["shop/prod"].topics["orders"].quotas = {SIZE: {"limitSize": 10, **EVICTS}}
    status: dict[str, Any] = {"suspended": True, "suspendedTime": "2026-11-20T10:00:00Z"}
    if waits_for == "approval":
        status["approval"] = {"messages": 5}
    run: dict[str, Any] = {"status": status, "applications": [application(wall_clock())]}
    spec: dict[str, Any] = {"target": {"type": "Source"}, "suspend": waits_for == "resumption"}
    if waits_for:
        await prepare(broker, **run, **spec)
        assert broker.calls == []
        return
    with raises(Reason.TARGET_EVICTS):
        await prepare(broker, **run, **spec)


async def test_forged_status_does_not_skip_target_checks(broker: FakeBroker) -> None:
    """A job may write the status of each Replay of its namespace."""
    status = {"sparkApplication": launch.name_of(replay()), "phase": "Running"}
    with raises(Reason.TARGET_NOT_ALLOWED):
        await prepare(
            broker, target={"type": "Topic", "topic": f"{NAMESPACE}/theirs"}, status=status
        )


@pytest.mark.parametrize("topic", ["orders", "checked"])
async def test_deduplicating_target_gets_grant_of_replay_role(
    broker: FakeBroker, topic: str
) -> None:
    deduplicate(broker, topic)
    grants = broker.namespaces["shop/prod"].grants
    grants[f"{NAMESPACE}/{topic}"] = {"replayer": ["functions"], "fulfilment": ["consume"]}
    asked: dict[str, Any] = {"target": {"type": "Topic", "topic": f"{NAMESPACE}/{topic}"}}
    for spec in (asked, {"target": {"type": "Source"}} if topic == "orders" else asked):
        await prepare(broker, **spec)
        assert rights(broker, topic) == {
            "replayer": ["consume", "functions", "produce"],
            "fulfilment": ["consume"],
        }


@pytest.mark.parametrize("topic", ["theirs", "theirs-in-parts"])
@pytest.mark.parametrize("mode", ["Run", "Plan"])
async def test_topic_owned_by_policy_is_refused_as_target(
    broker: FakeBroker, topic: str, mode: str
) -> None:
    deduplicate(broker, topic)
    asked: dict[str, Any] = {"target": {"type": "Topic", "topic": f"{NAMESPACE}/{topic}"}}
    for guarantee in ("ExactlyOnce", "AtLeastOnce"):
        with raises(Reason.TARGET_NOT_ALLOWED, match="keeps for a RetryPolicy"):
            await prepare(broker, guarantee=guarantee, mode=mode, **asked)
    assert rights(broker, topic) == {}


async def test_source_owned_by_other_policy_is_refused_as_target(
    broker: FakeBroker,
) -> None:
    source = broker.namespaces["shop/prod"].topics["orders"]
    source.properties["redrive.io/owner"] = "here/shop/first"
    with raises(Reason.TARGET_NOT_ALLOWED):
        await prepare(broker, target={"type": "Source"})


async def test_target_without_deduplication_is_refused(broker: FakeBroker) -> None:
    with raises(Reason.TARGET_DOES_NOT_DEDUPLICATE) as refused:
        await prepare(broker, target={"type": "Source"})
    assert f"set-deduplication-status --enable {NAMESPACE}/orders" in str(refused.value)
    assert "guarantee: AtLeastOnce" in str(refused.value)
    assert requeue_of(refused.value) is Requeue.SLOW_BACKOFF
    assert rights(broker, "orders") == {}
    await prepare(broker, target={"type": "Source"}, guarantee="AtLeastOnce")
    assert rights(broker, "orders") == {"replayer": ["consume", "produce"]}


@pytest.mark.parametrize(
    "parts",
    [
        {"-partition-0": ["fulfilment"], "-partition-1": []},
        {"-partition-0": ["fulfilment"]},
        {"-partition-0": ["analytics", "fulfilment"], "-partition-1": ["analytics"]},
    ],
)
async def test_target_without_subscription_is_refused(
    broker: FakeBroker, parts: dict[str, list[str]]
) -> None:
    broker.namespaces["shop/prod"].topics["orders"].parts = parts
    deduplicate(broker, "orders")
    for target in ({"type": "Source"}, {"type": "Topic", "topic": f"{NAMESPACE}/orders"}):
        with raises(Reason.TARGET_NOT_SUBSCRIBED, match="create-subscription --subscription ful"):
            await prepare(broker, target=target)
    assert rights(broker, "orders") == {}


async def test_other_target_needs_any_durable_subscription(broker: FakeBroker) -> None:
    deduplicate(broker, "checked")
    target = {"type": "Topic", "topic": f"{NAMESPACE}/checked"}
    parts = broker.namespaces["shop/prod"].topics["checked"].parts
    parts[""] = []
    with raises(Reason.TARGET_NOT_SUBSCRIBED, match="create-subscription --subscription NAME"):
        await prepare(broker, target=target)
    parts[""] = ["checks"]
    await prepare(broker, target=target)


async def test_missing_target_is_not_created(broker: FakeBroker) -> None:
    with raises(Reason.TARGET_NOT_FOUND, match="create it"):
        await prepare(broker, target={"type": "Topic", "topic": f"{NAMESPACE}/absent"})
    assert "absent" not in broker.namespaces["shop/prod"].topics


async def test_dry_run_grants_nothing(broker: FakeBroker) -> None:
    deduplicate(broker, "orders")
    await prepare(broker, target={"type": "Source"}, mode="Plan")
    assert rights(broker, "orders") == {}


async def test_audit_of_a_target_without_deduplication_is_granted(broker: FakeBroker) -> None:
    """And of one without a subscription: nothing is sent there."""
    await prepare(broker, target={"type": "Source"}, mode="Audit")
    assert rights(broker, "orders") == {"replayer": ["consume"]}


async def test_target_without_a_rule_for_the_role_is_refused(broker: FakeBroker) -> None:
    deduplicate(broker, "orders")
    broker.namespaces["shop/prod"].grants[f"{NAMESPACE}/orders"] = {
        "replayer": ["produce", "consume"]
    }
    with raises(Reason.TARGET_NOT_ALLOWED):
        await prepare(broker, target={"type": "Source"}, roles="fulfilment")
    assert broker.calls == []


@pytest.mark.parametrize("only", ["reader-1a2b", "__compaction"])
async def test_target_with_only_system_subscriptions_is_refused(
    broker: FakeBroker, only: str
) -> None:
    deduplicate(broker, "orders")
    topic = broker.namespaces["shop/prod"].topics["orders"]
    topic.parts = {"-partition-0": ["fulfilment", only], "-partition-1": [only]}
    with raises(Reason.TARGET_NOT_SUBSCRIBED, match="subscriptions of readers"):
        await prepare(broker, target={"type": "Source"})
    assert rights(broker, "orders") == {}
    topic.parts["-partition-1"].append("fulfilment")
    await prepare(broker, target={"type": "Source"})


EVICTS = {"policy": "consumer_backlog_eviction"}
REFUSES = {"policy": "producer_request_hold"}
SIZE, AGE = "destination_storage", "message_age"


@pytest.mark.parametrize(
    ("own", "inherited", "evicts"),
    [
        ({SIZE: {"limitSize": 10, **EVICTS}}, {}, True),
        ({AGE: {"limitTime": 10, **EVICTS}}, {}, True),
        ({}, {SIZE: {"limitSize": 10, **EVICTS}}, True),
        ({}, {AGE: {"limitTime": 10, **EVICTS}}, True),
        ({SIZE: {"limitSize": 10, **REFUSES}}, {AGE: {"limitTime": 10, **EVICTS}}, True),
        ({SIZE: {"limitSize": 10, **REFUSES}}, {SIZE: {"limitSize": 10, **EVICTS}}, False),
        ({SIZE: {"limitSize": -1, **EVICTS}}, {}, False),
    ],
)
@pytest.mark.parametrize("guarantee", ["ExactlyOnce", "AtLeastOnce"])
async def test_target_with_evicting_quota_in_force_is_refused(
    broker: FakeBroker, own: Quotas, inherited: Quotas, guarantee: str, *, evicts: bool
) -> None:
    deduplicate(broker, "orders")
    namespace = broker.namespaces["shop/prod"]
    namespace.topics["orders"].quotas = dict(own)
    namespace.policies["backlog_quota_map"] = inherited
    if not evicts:
        await prepare(broker, target={"type": "Source"}, guarantee=guarantee)
        return
    with raises(Reason.TARGET_EVICTS, match="set-backlog-quota --type"):
        await prepare(broker, target={"type": "Source"}, guarantee=guarantee)
    assert rights(broker, "orders") == {}


@pytest.mark.parametrize(
    ("seconds", "rate", "outcome"),
    [
        (0, None, "passes"),
        (10 * 86_400, None, "passes"),
        (10 * 86_400 - 1, None, "warns"),
        (3_600, None, "warns"),
        (3_599, None, "refused"),
        (1, None, "refused"),
        (7_200, {"messages": 1, "per": "2s"}, "warns"),  # of no dead letters
    ],
)
async def test_target_with_short_ttl_in_force_is_refused(
    broker: FakeBroker, seconds: int, rate: dict[str, Any] | None, outcome: str
) -> None:
    deduplicate(broker, "orders")
    broker.in_force["messageTTL"] = seconds
    dead_letters = Topic(0, {}, {"": ["redrive"]})
    broker.namespaces["shop/prod"].topics["orders-fulfilment-DLQ"] = dead_letters
    limit: dict[str, Any] = {} if rate is None else {"rateLimit": rate}
    if outcome == "refused":
        with raises(Reason.TARGET_EXPIRES, match=f"got 'messageTTL of {seconds} s'"):
            await prepare(broker, target={"type": "Source"}, **limit)
        assert rights(broker, "orders") == {}
        return
    events = await prepare(broker, target={"type": "Source"}, **limit)
    assert [event.reason for event in events] == ["TargetExpires"] * (outcome == "warns")


@pytest.mark.parametrize(
    ("minutes", "outcome"),
    [(0, "passes"), (5, "refused"), (59, "refused"), (60, "warns"), (10 * 1_440, "passes")],
)
async def test_target_that_expires_idle_subscriptions_is_refused(
    broker: FakeBroker, minutes: int, outcome: str
) -> None:
    deduplicate(broker, "orders")
    broker.in_force["messageTTL"] = 86_400 * 20
    namespace = broker.namespaces["shop/prod"]
    namespace.policies["subscription_expiration_time_minutes"] = minutes
    namespace.topics["orders-fulfilment-DLQ"] = Topic(0, {}, {"": ["redrive"]})
    if outcome == "refused":
        with raises(Reason.TARGET_EXPIRES, match="subscription-expiration-time -t 0 shop/prod`"):
            await prepare(broker, target={"type": "Source"})
        assert rights(broker, "orders") == {}
        return
    events = await prepare(broker, target={"type": "Source"})
    assert [event.reason for event in events] == ["TargetExpires"] * (outcome == "warns")


async def test_target_with_ttl_below_run_time_is_refused(
    broker: FakeBroker,
) -> None:
    deduplicate(broker, "orders")
    broker.in_force["messageTTL"] = 7_200
    broker.namespaces["shop/prod"].topics["orders-fulfilment-DLQ"] = Topic(
        0, {}, {"": ["redrive"]}, backlog=3_601
    )
    limit: dict[str, Any] = {"rateLimit": {"messages": 1, "per": "2s"}}
    with raises(Reason.TARGET_EXPIRES, match="cover the run \\(about 2h2s\\)"):
        await prepare(broker, target={"type": "Source"}, **limit)
    few: dict[str, Any] = {"select": {"limit": 3_600}}
    await prepare(broker, target={"type": "Source"}, **limit, **few)


OF_RUN = f"sparkoperator.k8s.io/app-name={launch.name_of(replay())}"
LABELS = f"{OF_RUN},spark-role=driver"
PODS = replace(resources.PODS, selector=LABELS)
EXECUTORS = replace(resources.PODS, selector=f"{OF_RUN},spark-role=executor")
EVENTS = replace(resources.EVENTS, fields="involvedObject.uid=u")
MOUNT = {
    "metadata": {"name": "e", "namespace": "shop"},
    "reason": "FailedMount",
    "message": 'MountVolume.SetUp failed for volume "access":  secret "replayer" not found',
    "lastTimestamp": "2026-11-22T10:00:00Z",
}


def submitted(seconds: int) -> dict[str, Any]:
    """Return the application with a driver submitted so long ago."""
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


def waiting_container(reason: str, message: str = "") -> dict[str, Any]:
    """Return the status of a container that waits."""
    details = {"message": message} if message else {}
    return {"name": "spark-kubernetes-driver", "state": {"waiting": {"reason": reason} | details}}


async def driver_message(api: FakeKubernetes) -> str:
    """Return the message about a driver that has not started in time."""
    assert await look(api, applications=[submitted(121)]) is Requeue.SLOW_BACKOFF
    reason, message = shown(api)
    assert reason == "DriverNotStarted"
    return message


async def test_pending_driver_is_shown_after_two_minutes(api: FakeKubernetes) -> None:
    assert await look(api, applications=[submitted(100)]) is Requeue.BACKOFF
    assert shown(api)[0] == "Progressing"
    assert f"`kubectl --namespace shop describe pod --selector {LABELS}`" in await driver_message(
        api
    )


async def test_pending_driver_message_names_pod_and_reason(api: FakeKubernetes) -> None:
    why = waiting_container("CreateContainerConfigError", 'secret "replayer" not found')
    api.add(PODS, pod("of-the-last-run", "09:00"), pod(containerStatuses=[why]))
    message = await driver_message(api)
    assert 'was submitted: CreateContainerConfigError: secret "replayer" not found;' in message
    assert "got 'pod the-driver'" in message
    assert "`kubectl --namespace shop describe pod the-driver`" in message


async def test_pending_driver_message_has_its_last_event(api: FakeKubernetes) -> None:
    api.add(PODS, pod(containerStatuses=[waiting_container("ContainerCreating")]))
    assert "after it was submitted; got 'pod the-driver'" in await driver_message(api)
    earlier = {"metadata": {"name": "f", "namespace": "shop"}, "reason": "R", "message": "m"}
    api.add(EVENTS, MOUNT, earlier)
    assert (
        'FailedMount: MountVolume.SetUp failed for volume "access": secret'
        in await driver_message(api)
    )


@pytest.mark.parametrize("error", [ForbiddenError, UnavailableError])
@pytest.mark.parametrize("kind", ["Pod", "Event"])
async def test_unreadable_pods_leave_the_kubectl_command(
    api: FakeKubernetes, error: type[ForbiddenError | UnavailableError], kind: str
) -> None:
    def refuse(_verb: str, resource: Resource, _key: Key) -> None:
        if resource.kind == kind:
            raise error("it is refused", remedy="none")

    api.add(PODS, pod())
    api.before = refuse
    assert "kubectl --namespace shop describe pod" in await driver_message(api)


async def test_pending_driver_message_is_short_without_secrets(api: FakeKubernetes) -> None:
    url = "https://me:hunter2@registry.test/layer?X-Amz-Signature=abc"
    why = waiting_container("ErrImagePull", f'Get "{url}": 403 {"x" * 2000}')
    api.add(PODS, pod(containerStatuses=[why]))
    message = await driver_message(api)
    assert 'ErrImagePull: Get "https://…registry.test/layer…": 403 xxx' in message
    assert len(message) < MAX_REASON + 500


def test_unschedulable_pod_shows_its_condition() -> None:
    assert missing_prerequisite(pod(conditions=[FULL])) == f"Unschedulable: {FULL['message']}"
    assert not missing_prerequisite(pod(conditions=[{**FULL, "status": "True"}]))


def test_running_or_unknown_pod_misses_nothing() -> None:
    assert not missing_prerequisite({"metadata": {}})
    assert not missing_prerequisite(pod(containerStatuses=[{"state": {"running": {}}}]))
    assert not last_event([])


def test_missing_reason_or_message_is_left_out() -> None:
    assert last_event([{"message": "m"}]) == "m"
    assert last_event([{"reason": "R"}]) == "R"
    assert (
        missing_prerequisite(pod(containerStatuses=[{"state": {"waiting": {"message": "m"}}}]))
        == "m"
    )


async def test_forged_submission_time_is_not_late(api: FakeKubernetes) -> None:
    forged = submitted(121)
    forged["status"]["lastSubmissionAttemptTime"] = "0000-01-01T00:00:00Z"
    assert await look(api, applications=[forged]) is Requeue.BACKOFF


def time_ago(seconds: int) -> str:
    return (wall_clock() - timedelta(seconds=seconds)).isoformat()


def driver(uid: str = "u", seconds: int = 600, ready: str = "True") -> dict[str, Any]:
    """Return a driver that has run for so long."""
    condition = {"type": "Ready", "status": ready, "lastTransitionTime": time_ago(seconds)}
    body = pod(f"driver-{uid}", phase="Running", conditions=[condition])
    body["metadata"] |= {"uid": uid, "creationTimestamp": time_ago(seconds)}
    return body


def executor(seconds: int, owner_uid: str = "u", **status: object) -> dict[str, Any]:
    """Return an executor that a driver has made so long ago."""
    body = pod(f"exec-{owner_uid}-{seconds}")
    body["status"] |= status
    owner = {"apiVersion": "v1", "kind": "Pod", "name": f"driver-{owner_uid}", "uid": owner_uid}
    body["metadata"] |= {"creationTimestamp": time_ago(seconds), "ownerReferences": [owner]}
    return body


async def look_at_run(
    api: FakeKubernetes,
    *executors: dict[str, Any],
    launched: int = 3600,
    requeue: Requeue = Requeue.SLOW_BACKOFF,
    **reported: object,
) -> tuple[str, str]:
    """Reconcile a Replay whose application runs with these executors; return its Ready reason."""
    api.objects.pop(EXECUTORS, None)
    api.add(EXECUTORS, *executors)
    running = application(wall_clock(), applicationState={"state": "RUNNING"})
    fields: dict[str, Any] = {"startTime": time_ago(launched), **reported}
    assert await look(api, applications=[running], **fields) is requeue
    return shown(api)


FULL = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/1 nodes are available: 1 Insufficient cpu.",
}


async def test_pending_executors_are_shown_until_one_runs(
    api: FakeKubernetes,
) -> None:
    api.add(PODS, driver())
    waiting = executor(130, conditions=[FULL])
    reason, message = await look_at_run(api, executor(140), waiting, phase="Suspended")
    assert reason == "ExecutorsNotStarted"
    assert f"runs, so nothing is moved: Unschedulable: {FULL['message']}" in message
    assert "got 'pod exec-u-130'" in message
    assert "`kubectl --namespace shop describe pod exec-u-130`" in message
    status = statuses(api)[-1]
    assert (status["phase"], status["sparkApplication"]) == ("Running", launch.name_of(replay()))
    assert all(condition["type"] != "Stalled" for condition in status["conditions"])
    assert await look_at_run(api, waiting, executor(1, phase="Running")) == (
        "Progressing",
        f"the SparkApplication {launch.name_of(replay())} is RUNNING",
    )


async def test_executors_have_two_minutes_to_start(api: FakeKubernetes) -> None:
    api.add(PODS, driver())
    assert (await look_at_run(api, executor(110)))[0] == "Progressing"
    assert (await look_at_run(api, executor(130), executor(110)))[0] == "Progressing"


async def test_missing_executors_are_shown_with_driver_log(api: FakeKubernetes) -> None:
    """As by a quota: there is no pod then, and no Event."""
    assert (await look_at_run(api))[0] == "Progressing"
    api.add(PODS, driver(seconds=110))
    assert (await look_at_run(api))[0] == "Progressing"
    api.add(PODS, driver(seconds=130))
    reason, message = await look_at_run(api)
    assert reason == "ExecutorsNotStarted"
    assert "so nothing is moved: its driver has made none; got 'pod driver-u'" in message
    assert "`kubectl --namespace shop logs driver-u`" in message


async def test_executors_of_earlier_driver_do_not_count(api: FakeKubernetes) -> None:
    api.add(PODS, driver("old"), driver("new", seconds=20))
    assert (await look_at_run(api, executor(300, owner_uid="old")))[0] == "Progressing"
    api.add(PODS, driver("new", seconds=200))
    survivor = executor(100, owner_uid="old", phase="Running")
    reason, message = await look_at_run(api, survivor, executor(150, owner_uid="new"))
    assert reason == "ExecutorsNotStarted"
    assert "got 'pod exec-new-150'" in message


async def test_executors_of_ended_driver_are_not_checked(api: FakeKubernetes) -> None:
    api.add(PODS, driver(ready="False"))
    assert (await look_at_run(api, executor(300, phase="Succeeded")))[0] == "Progressing"


@pytest.mark.parametrize(
    "numbers",
    [
        {},
        {"scanned": 10_000},
        {"scanned": 10_000, "preview": {"causes": [{"cause": "TimeoutError", "messages": 9}]}},
        {"ratePerMinute": 0, "moved": 5, "left": 3},
    ],
)
async def test_run_that_moves_nothing_has_executors_checked(
    api: FakeKubernetes, numbers: dict[str, Any]
) -> None:
    """As while it plans, or its broker is away."""
    api.add(PODS, driver())
    assert (await look_at_run(api, executor(300, phase="Running"), **numbers))[0] == "Progressing"
    assert (await look_at_run(api, executor(300), **numbers))[0] == "ExecutorsNotStarted"


@pytest.mark.parametrize(
    "reported",
    [
        {"ratePerMinute": 6, "moved": 1, "left": 9},
        {"moved": 9, "left": 0},
        {"finished": True},
        {"left": 9, "preview": {"estimatedSeconds": 1}},
        {"suspended": True},
        {"suspended": True, "approval": {"messages": 9}, "left": 9},
    ],
)
async def test_run_that_progresses_or_waits_has_no_pod_checked(
    api: FakeKubernetes, reported: dict[str, Any]
) -> None:
    api.add(PODS, driver())
    listed = lists(api)
    reason, _ = await look_at_run(api, executor(300), requeue=Requeue.ON_CHANGE, **reported)
    waits = "ApprovalRequired" if "approval" in reported else "Suspended"
    assert reason == (waits if "suspended" in reported else "Progressing")
    assert listed == []


async def test_run_launched_just_now_has_no_pod_checked(api: FakeKubernetes) -> None:
    listed = lists(api)
    assert (await look_at_run(api, executor(300), launched=110))[0] == "Progressing"
    assert listed == []


def lists(api: FakeKubernetes) -> list[Resource]:
    """Return the resources that are listed from now on."""
    listed: list[Resource] = []

    def note(verb: str, resource: Resource, _key: Key) -> None:
        if verb == "list":
            listed.append(resource)

    api.before = note
    return listed


@pytest.mark.parametrize("error", [ForbiddenError, UnavailableError])
@pytest.mark.parametrize(
    ("refused", "reason"),
    [(PODS, "Progressing"), (EXECUTORS, "Progressing"), (EVENTS, "ExecutorsNotStarted")],
)
async def test_unreadable_executors_show_no_warning(
    api: FakeKubernetes,
    error: type[ForbiddenError | UnavailableError],
    refused: Resource,
    reason: str,
) -> None:
    def refuse(_verb: str, resource: Resource, _key: Key) -> None:
        if resource == refused:
            raise error("it is refused", remedy="none")

    api.add(PODS, driver())
    api.before = refuse
    assert (await look_at_run(api, executor(300)))[0] == reason


async def test_forged_pod_times_are_ignored(api: FakeKubernetes) -> None:
    forged = driver()
    forged["status"]["conditions"][0]["lastTransitionTime"] = "0000-01-01T00:00:00Z"
    api.add(PODS, forged)
    assert (await look_at_run(api, executor(300)))[0] == "Progressing"


REFUSED = {"reason": "FailedCreate", "message": 'pods "a-x" is forbidden: exceeded quota'}
CREATED = {"reason": "SuccessfulCreate", "message": "Created pod: a-x"}


async def look_at_job(
    api: FakeKubernetes, event: dict[str, str], *pods: dict[str, Any], failed: int = 0
) -> str:
    """Check the pods of a Job that began 121 s ago; return the problem, if there is one."""
    began = wall_clock() - timedelta(seconds=121)
    metadata = {"name": "a", "namespace": "shop", "creationTimestamp": began.isoformat()}
    status = {"startTime": began.isoformat(), "failed": failed}
    run = job_run({"metadata": metadata, "status": status})
    of_job = replace(resources.EVENTS, fields="involvedObject.kind=Job,involvedObject.name=a")
    api.add(of_job, {"metadata": {"name": "e", "namespace": "shop"}, **event})
    api.add(replace(resources.PODS, selector=run.pods), *pods)
    context = cast("Context", SimpleNamespace(kubernetes=api))
    try:
        await check_pods(run, ReplayStatus(), wall_clock(), context)
    except RedriveError as error:
        return f"{error.reason}: {error}"
    return ""


async def test_job_whose_pods_are_refused_shows_its_last_event(api: FakeKubernetes) -> None:
    problem = await look_at_job(api, REFUSED)
    assert "DriverNotStarted: the driver of the Job a does not run, 120 s after it" in problem
    assert 'FailedCreate: pods "a-x" is forbidden: exceeded quota; got ' in problem
    assert "`kubectl --namespace shop describe job a`" in problem


async def test_replaced_pod_of_a_job_has_time_to_start(api: FakeKubernetes) -> None:
    """After a failure or an eviction, also in a run that began long ago."""
    evicted = driver("evicted", ready="False")
    evicted["metadata"]["deletionTimestamp"] = time_ago(1)
    assert not await look_at_job(api, CREATED, evicted)
    failed = driver("failed", seconds=500) | {"status": {"phase": "Failed"}}
    assert not await look_at_job(api, CREATED, failed, failed=1)
    assert "exceeded quota" in await look_at_job(api, REFUSED, failed, failed=1)
    assert "pod driver-late" in await look_at_job(api, CREATED, driver("late", seconds=130))
    assert not await look_at_job(api, CREATED, driver("next", seconds=100))
