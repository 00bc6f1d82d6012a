"""From `kubectl apply` of a Replay to its end: operator, Spark operator, job and status."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest

from redrive.api import Body
from redrive.api.conditions import written
from redrive.errors import Requeue
from redrive.kube import resources
from redrive.kube.context import Context, Settings, wall_clock
from redrive.kube.resources import Key, Resource
from redrive.replay.controller import launch
from redrive.replay.controller.reconciler import reconcile
from sandbox import chart
from tests.support.replay_shop import (
    SECONDS,
    SPARK_APPLICATION,
    Shop,
    check_no_token_leaked,
    shop,
    shown,
)
from tests.support.waiting import wait_until

__all__ = ["shop"]


@pytest.mark.timeout(3 * SECONDS + 60)
def test_replays_of_one_policy_run_in_turn_and_report(
    shop: Shop,
) -> None:
    shop.declare()
    shop.bury(8, "WarehouseDown")
    shop.bury(5, "JSONDecodeError")
    shop.kubectl("annotate", "rpol/orders", "redrive.io/paused=true")  # rights that go stay away
    right = f"persistent/{shop.name}/prod/{shop.policy.ledger_topic.local}/permissions/replayer"
    shop.rest("DELETE", right)

    shop.replay("first", "cause_type = 'WarehouseDown'", engine="Spark")
    shop.launched("first")
    shop.replay("second")
    waiting = shop.reaches("second", "Pending", "ReplayInProgress")
    assert "got '" + shop.name + "/first'" in waiting["Reconciling"]["message"]
    failure = shop.fails("first")
    assert failure["reason"] == "ReplayRoleRefused"
    assert f"refused to open the ledger {shop.policy.ledger_topic}" in failure["message"]
    (application,) = shop.applications(SPARK_APPLICATION)
    error = application["status"]["applicationState"].get("errorMessage")
    # The Spark operator knows no more, and has the job run again by and by.
    assert error in {None, "driver container failed with ExitCode: 1, Reason: Error"}
    shop.rest("POST", right, ["produce", "consume"])
    first = shop.reaches("first", "Completed")
    assert "failure" not in first["run"]
    second = shop.reaches("second", "Completed")

    numbers = ("scanned", "matched", "moved", "skipped", "refused", "left")
    assert [first["run"]["counts"][name] for name in numbers] == [13, 8, 8, 0, 0, 0]
    assert [second["run"]["counts"][name] for name in numbers] == [5, 5, 5, 0, 0, 0]
    assert first["Ready"]["status"] == "True"
    assert "Reconciling" not in first
    assert first["startTime"] <= first["completionTime"] <= second["completionTime"]
    assert shop.replayed() == ["JSONDecodeError"] * 5 + ["WarehouseDown"] * 8
    (application,) = shop.applications(SPARK_APPLICATION)
    (job,) = shop.applications("job")
    assert application["metadata"]["name"] == first["sparkApplication"]
    assert job["metadata"]["name"] == second["job"]
    check_no_token_leaked(shop)


def test_forbidden_selection_fails_the_replay_before_a_launch(shop: Shop) -> None:
    shop.replay("hostile", "java_method('java.lang.System', 'getenv', 'PATH') = 'x'")
    status = shop.reaches("hostile", "Failed", "InvalidSpec")
    message = "a selection can't use this, at character 1; got 'java_method'"
    assert message in status["Stalled"]["message"]
    assert "completionTime" in status
    assert shop.applications() == []


def test_replay_starts_once_its_policy_and_identity_exist(shop: Shop) -> None:
    shop.replay("early")
    status = shop.reaches("early", "Pending", "PolicyNotFound")
    assert "create it; the run starts automatically then" in status["Reconciling"]["message"]
    shop.declare(replay=None)
    status = shop.reaches("early", "Pending", "ReplayIdentityMissing")
    assert "give it spec.replay" in status["Stalled"]["message"]
    assert shop.applications() == []
    shop.declare()
    assert "Stalled" not in shop.launched("early")


def test_replay_waits_for_service_account_and_secret_of_job(shop: Shop) -> None:
    shop.kubectl("delete", "serviceaccount/redrive-job", "rolebinding/redrive-job")
    shop.declare()
    shop.replay("early")
    status = shop.reaches("early", "Pending", "ServiceAccountNotFound")
    message = status["Reconciling"]["message"]
    assert f"got '{shop.name}/redrive-job'" in message
    assert f"add {shop.name} to replay.namespaces" in message
    assert shop.applications() == []
    shop.kubectl("create", "serviceaccount", "redrive-job")
    message = shop.reaches("early", "Pending", "JobRightsMissing")["Reconciling"]["message"]
    assert "may not get replays, get replayapprovals, patch replays/status; got" in message
    assert shop.applications() == []
    shop.kubectl("delete", "secret", "pulsar-replayer")
    chart.prepare_replays(shop.sandbox.cluster, shop.name)
    missing = shop.reaches("early", "Pending", "ConsentMissing")["Reconciling"]["message"]
    assert f"got '{shop.name}/pulsar-replayer'" in missing
    assert shop.applications() == []
    token = {"token": shop.tokens["pulsar-replayer"]}
    shop.apply("v1", "Secret", "pulsar-replayer", stringData=token)
    message = shop.reaches("early", "Pending", "ConsentMissing")["Reconciling"]["message"]
    assert message == missing
    assert f"`redrive.io/usable-by: {shop.name}/main`" in message
    assert shop.applications() == []
    usable = f"redrive.io/usable-by={shop.name}/main"
    shop.kubectl("annotate", "secret/pulsar-replayer", usable)
    shop.launched("early")


def test_foreign_connection_gets_no_secret_of_a_namespace(shop: Shop) -> None:
    """Its author may make Replays here, and names a Secret that only others may read."""
    shop.declare()
    thief, objects = f"{shop.name}-thief", shop.sandbox.cluster.objects
    objects.create_namespace(thief)
    shop.apply("v1", "Secret", "database", stringData={"password": "hunter2"})
    connection = objects.get("brokerconnection", "main", shop.name)["spec"]
    (rule,) = connection["allow"]
    stolen = {"type": "Token", "token": {"secretRef": {"name": "database", "key": "password"}}}
    spec = {
        **connection,
        "allow": [{**rule, "namespaces": {"names": [shop.name]}}],
        "replay": {"role": "replayer", "authentication": stolen},
    }
    token = {"token": shop.tokens["pulsar-admin"]}
    for version, kind, name, body in (
        ("v1", "Secret", "pulsar-admin", {"stringData": token}),
        ("redrive.io/v1beta1", "BrokerConnection", "main", {"spec": spec}),
    ):
        metadata = {"name": name, "namespace": thief}
        objects.apply({"apiVersion": version, "kind": kind, "metadata": metadata, **body})
    reference = {"connectionRef": {"name": "main", "namespace": thief}}
    shop.kubectl(
        "patch", "rpol/orders", "--type=merge", f"--patch={json.dumps({'spec': reference})}"
    )
    shop.kubectl(
        "wait", "rpol/orders", f"--for=jsonpath={{.status.connection}}={thief}/main",
        "--timeout=180s",
    )  # fmt: skip
    shop.replay("steal")
    message = shop.reaches("steal", "Pending", "ConsentMissing")["Reconciling"]["message"]
    assert f"got '{shop.name}/database'" in message
    assert f"`redrive.io/usable-by: {thief}/main`" in message
    assert shop.applications() == []


def test_replay_waits_for_objects_of_its_job_template(shop: Shop) -> None:
    shop.declare(jobs={"templates": [shop.name]})
    shop.replay("early")
    conditions = shop.reaches("early", "Pending", "JobTemplateNotFound")
    # The kubelet is about to update the file of the operator: tools must wait.
    assert "Stalled" not in conditions
    assert f"got '{shop.name}'" in conditions["Reconciling"]["message"]
    volumes = [
        {"name": "ca", "configMap": {"name": "authorities"}},
        {"name": "data", "persistentVolumeClaim": {"claimName": "scratch"}},
    ]
    spec = {"imagePullSecrets": [{"name": "registry"}], "volumes": volumes}
    shop.job_template({"job": {"spec": spec}})
    size = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    for kind, name, body in (
        ("Secret", "registry", {}),
        ("ConfigMap", "authorities", {}),
        ("PersistentVolumeClaim", "scratch", {"spec": size}),
    ):
        start = f"a {kind} that the pods of replay jobs need "

        def is_shown(start: str = start) -> bool:
            ready = shop.status("early")["Ready"]
            message: str = ready["message"]
            return ready["reason"] == "JobSecretNotFound" and message.startswith(start)

        wait_until(is_shown, SECONDS)
        assert f"got '{shop.name}/{name}'" in shop.status("early")["Ready"]["message"]
        assert shop.applications() == []
        shop.apply("v1", kind, name, **body)
    shop.launched("early")


def test_invalid_job_template_is_shown_and_its_last_form_runs(shop: Shop) -> None:
    shop.job_template({"executors": 2, "maxExecutors": 3})
    shop.declare(jobs={"templates": [shop.name], "maxExecutors": 2})
    connection = ("get", "bconn", "main", "-o", "jsonpath={.status}")

    def status() -> dict[str, Any]:
        return dict(json.loads(shop.kubectl(*connection)))

    shown = [{"name": shop.name, "maxExecutors": 2}]
    wait_until(lambda: status().get("jobTemplates") == shown)
    shop.job_template({"executor": {"spec": {"nodeSelectors": {"disk": "ssd"}}}})
    wait_until(lambda: status().get("warnings") == ["JobTemplateInvalid"])
    assert status()["jobTemplates"] == shown
    events = shop.kubectl("get", "events", "-o", "jsonpath={.items[*].reason}")
    assert "JobTemplateInvalid" in events
    shop.replay("now", engine="Spark")
    assert shop.launched("now")["warnings"] == ["JobTemplateInvalid"]
    (application,) = shop.applications(SPARK_APPLICATION)
    assert application["spec"]["executor"]["instances"] == 2
    shop.job_template({"executors": 1})
    wait_until(lambda: "warnings" not in status())


@pytest.mark.timeout(SECONDS + 60)
def test_followed_replay_reports_pending_messages_at_its_end(shop: Shop) -> None:
    shop.declare()
    shop.bury(4, "WarehouseDown")
    shop.replay("followed", followFor="2s")
    status = shop.reaches("followed", "Completed")
    outcome = status["run"]["outcome"]
    assert (outcome["handled"], outcome["waiting"], outcome["deadAgain"]) == (0, 4, 0)
    assert not outcome["settled"]
    assert status["Ready"]["message"].endswith("0 were handled, 0 are dead again, 4 wait")


STATES: list[tuple[dict[str, str], str, str, str]] = [
    ({}, "Submitted", "Progressing", "is NEW"),
    ({"state": "SUBMITTED"}, "Submitted", "Progressing", "is SUBMITTED"),
    (
        {"state": "SUBMISSION_FAILED", "errorMessage": "no image"},
        "Submitted", "Progressing", "is SUBMISSION_FAILED: no image",
    ),
    ({"state": "RUNNING"}, "Running", "Progressing", "is RUNNING"),
    # Without the word of its job that the run is finished.
    ({"state": "COMPLETED"}, "Failed", "ReplayFailed", "has exited before it finished the run"),
    (
        {"state": "FAILED", "errorMessage": "RedriveError: the broker gave no receipt"},
        "Failed", "ReplayFailed", "got 'RedriveError: the broker gave no receipt'",
    ),
]  # fmt: skip


def application_of(replay: Body, **status: object) -> Body:
    """Return the application of a Replay as a Spark operator shows it."""
    return {
        "metadata": {
            "name": launch.name_of(replay),
            "namespace": replay["metadata"]["namespace"],
            "creationTimestamp": wall_clock().isoformat(),
            "ownerReferences": [{"uid": replay["metadata"]["uid"]}],
        },
        "status": status,
    }


async def reconciled(key: Key, ctx: Context) -> tuple[Requeue, dict[str, Any]]:
    """Reconcile a Replay, and return the status too, as the API server answered.

    The operator, which has no such policy, writes another one soon. A write that conflicts with
    that is repeated.
    """
    answers, patch_status = list[Body](), ctx.kubernetes.patch_status

    async def patch_and_note(
        resource: Resource, key: Key, status: Body, version: str | None = None
    ) -> Body:
        answers.append(await patch_status(resource, key, status, version))
        return answers[-1]

    with mock.patch.object(ctx.kubernetes, "patch_status", patch_and_note):
        while not answers:
            ctx.replays.put(await ctx.kubernetes.get(resources.REPLAYS, key))
            requeue = await reconcile(key, ctx, asyncio.Lock())
    return requeue, shown(answers[-1])


async def test_application_state_becomes_the_replay_phase(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(shop.sandbox.cluster.kubeconfig))
    settings = Settings(
        "here", (shop.name,), Key("redrive", "replay"), "local:///replay.py", "redrive-replay"
    )
    names = [f"in-state-{index}" for index in range(len(STATES))]
    for name in names:
        shop.replay(name, engine="Spark")
    for name in names:
        shop.reaches(name, "Pending", "PolicyNotFound")
    async with Context.open(settings) as ctx:
        for name, (state, phase, reason, message) in zip(names, STATES, strict=True):
            key = Key(shop.name, name)
            replay = ctx.replays.get(key)
            assert replay is not None
            application = application_of(replay, applicationState=state)
            ctx.applications[resources.SPARK_APPLICATIONS].put(application)
            _, status = await reconciled(key, ctx)
            assert (status["phase"], status["Ready"]["reason"]) == (phase, reason), state
            assert message in status["Ready"]["message"]
            assert ("Stalled" in status) == ("Failed" in status) == (phase == "Failed")
            assert ("Complete" in status) == (phase == "Completed")
            assert ("completionTime" in status) == (phase in {"Completed", "Failed"})


def pod(shop: Shop, name: str, labels: dict[str, str], owner: Body | None = None) -> Body:
    """Make a pod, which no kubelet starts."""
    owned = [] if owner is None else [resources.owner_reference(resources.PODS, owner)]
    manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels, "ownerReferences": owned},
        "spec": {
            "serviceAccountName": "redrive-replay",
            "automountServiceAccountToken": False,
            "containers": [{"name": "spark", "image": "registry.example/replay:1"}],
        },
    }
    made: Body = json.loads(
        shop.kubectl("create", "-f", "-", "-o", "json", stdin=json.dumps(manifest))
    )
    return made


def becomes(shop: Shop, name: str, **status: object) -> None:
    """Write the status of a pod, as a scheduler or a kubelet does."""
    patch = json.dumps({"status": status})
    shop.kubectl("patch", "pod", name, "--subresource=status", "--type=merge", "--patch", patch)


async def test_unschedulable_executors_are_shown_until_one_runs(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(shop.sandbox.cluster.kubeconfig))
    settings = Settings(
        "here", (shop.name,), Key("redrive", "replay"), "local:///replay.py", "redrive-replay"
    )
    shop.replay("starving", engine="Spark")
    shop.reaches("starving", "Pending", "PolicyNotFound")
    key, now = Key(shop.name, "starving"), wall_clock()
    async with Context.open(settings) as opened:
        ctx = dataclasses.replace(opened, clock=lambda: now + timedelta(minutes=3))
        replay = ctx.replays.get(key)
        assert replay is not None
        role = {"sparkoperator.k8s.io/app-name": launch.name_of(replay)}
        driver = pod(shop, "the-driver", role | {"spark-role": "driver"})
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": written(now)}
        becomes(shop, "the-driver", phase="Running", conditions=[ready])
        pod(shop, "exec-1", role | {"spark-role": "executor"}, owner=driver)
        full = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        becomes(shop, "exec-1", conditions=[full | {"message": "0/1 nodes are available"}])
        ctx.replays.put(
            await ctx.kubernetes.patch_status(resources.REPLAYS, key, {"startTime": written(now)})
        )
        running = application_of(replay, applicationState={"state": "RUNNING"})
        ctx.applications[resources.SPARK_APPLICATIONS].put(running)
        requeue, status = await reconciled(key, ctx)
        assert requeue is Requeue.SLOW_BACKOFF
        assert (status["phase"], status["Ready"]["reason"]) == ("Running", "ExecutorsNotStarted")
        message = "so nothing is moved: Unschedulable: 0/1 nodes are available; got 'pod exec-1'"
        assert message in status["Ready"]["message"]
        becomes(shop, "exec-1", phase="Running")
        _, status = await reconciled(key, ctx)
        assert (status["phase"], status["Ready"]["reason"]) == ("Running", "Progressing")
