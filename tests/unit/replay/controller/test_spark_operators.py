"""Both Spark operators: choice, resources, states and errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from redrive.api import LauncherName
from redrive.api.job import SPARK_ROLES
from redrive.api.replay import ReplayEngine, ReplaySpec
from redrive.api.replay_status import Phase
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.context import Context
from redrive.kube.resources import Resource
from redrive.reasons import Reason
from redrive.replay.controller import launch
from redrive.replay.controller.spark_operators import (
    APPLICATION,
    LAUNCHERS,
    MAX_LENGTH,
    Launcher,
    apache_manifest,
    apache_run,
    choose_engine,
    choose_operator,
    find_application,
    job_run,
    kubeflow_manifest,
    kubeflow_run,
    root_cause,
)
from sandbox.spark_operator import apache
from sandbox.spark_operator import template as spark_pods
from sandbox.spark_operator.objects import Application
from tests.support.reasons import raises
from tests.unit.replay.controller.test_admission import ctx, replay
from tests.unit.replay.controller.test_launch import JOB, application
from tests.unit.replay.controller.test_launch import replay as launched_replay


def apache_spec(executors: int = 1, **template: object) -> dict[str, Any]:
    """Return the spec of the SparkApplication."""
    made = apache_manifest(application(template, executors=executors))
    assert (made["apiVersion"], made["kind"]) == ("spark.apache.org/v1", "SparkApplication")
    assert made["metadata"]["name"] == launch.name_of(launched_replay())
    spec: dict[str, Any] = made["spec"]
    return spec


def test_apache_manifest_has_program_image_and_account() -> None:
    made = apache_spec()
    assert made["pyFiles"] == "local:///opt/redrive/replay.py"
    assert made["driverArgs"] == [JOB.encode()]
    assert made["runtimeVersions"] == {"sparkVersion": launch.SPARK_VERSION}
    conf = made["sparkConf"]
    assert conf["spark.kubernetes.container.image"] == "registry/redrive:1"
    assert conf["spark.kubernetes.authenticate.driver.serviceAccountName"] == "redrive-replay"
    assert conf["spark.executor.instances"] == "1"
    assert all(isinstance(value, str) for value in conf.values())


def test_apache_manifest_restarts_failures() -> None:
    restarts = {
        "restartPolicy": "OnFailure",
        "maxRestartAttempts": 3,
        "restartBackoffMillis": 10_000,
    }
    assert apache_spec()["applicationTolerations"] == {"restartConfig": restarts}


POD = {
    "metadata": {"labels": {"team": "shop"}, "annotations": {"a": "b"}},
    "spec": {
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"operator": "Exists"}],
        "imagePullSecrets": [{"name": "one"}],
        "securityContext": {"fsGroup": 1000},
        "priorityClassName": "low",
        "volumes": [{"name": "scratch", "emptyDir": {}}],
        "containers": [
            {"name": "proxy", "image": "proxy:1"},
            {
                "name": "redrive",
                "imagePullPolicy": "Always",
                "resources": {
                    "requests": {"cpu": "100m", "memory": "2Gi", "ephemeral-storage": "1Gi"},
                    "limits": {"cpu": 2},
                },
                "env": [{"name": "TZ", "value": "UTC"}],
                "volumeMounts": [{"name": "scratch", "mountPath": "/mnt/scratch"}],
                "securityContext": {"runAsUser": 185},
            },
        ],
    },
}
WHOLE: dict[str, Any] = {
    "image": "r/i:1",
    "driver": POD,
    "executor": POD,
    "sparkConf": {"spark.task.maxFailures": "8"},
}


@pytest.mark.parametrize("template", [{}, WHOLE], ids=["empty", "whole"])
def test_template_gives_same_pod_with_both_operators(template: dict[str, Any]) -> None:
    """The stand-ins of both Spark operators pass the same pods and sizes to Spark."""
    job = application(template, executors=3)
    status = {"uid": "u"}
    applications = [
        read({**made, "metadata": {**made["metadata"], **status}})
        for read, made in (
            (Application.read, kubeflow_manifest(job)),
            (apache.read, apache_manifest(job)),
        )
    ]
    for role in SPARK_ROLES:
        kubeflow_pod, apache_pod = (
            spark_pods.template(application, role, version="group/v1", label="group/name")
            for application in applications
        )
        assert kubeflow_pod == apache_pod
        whole = job.pods[role].template
        assert {**kubeflow_pod["spec"], **whole["spec"]} == kubeflow_pod["spec"]
        assert kubeflow_pod["metadata"]["labels"].items() >= whole["metadata"]["labels"].items()
    files = {"driver": "d", "executor": "e"}
    kubeflow_conf, apache_conf = (
        spark_pods.properties(application, files) for application in applications
    )
    images = {
        f"spark.kubernetes.{role}container.image": job.image
        for role in ("", "driver.", "executor.")
    }
    assert kubeflow_conf | images == apache_conf | images


def test_apache_manifest_has_sizes_as_properties() -> None:
    conf = apache_spec(executors=3, **WHOLE)["sparkConf"]
    expected = {
        "spark.kubernetes.container.image": "r/i:1",
        "spark.kubernetes.container.image.pullPolicy": "Always",
        "spark.driver.cores": "2",
        "spark.driver.memory": "1462m",
        "spark.driver.memoryOverhead": "586m",
        "spark.kubernetes.driver.request.cores": "100m",
        "spark.kubernetes.driver.limit.cores": "2",
        "spark.kubernetes.driver.podTemplateContainerName": "spark-kubernetes-driver",
        "spark.executor.instances": "3",
        "spark.task.maxFailures": "8",
    }
    assert conf.items() >= expected.items()


def run_through(*states: str, **messages: str) -> Any:  # noqa: ANN401  a SparkRun
    """Return how an application stands that went through *states*, in this order."""
    history = {
        str(number): {
            "currentStateSummary": state,
            "lastTransitionTime": f"2026-11-22T00:00:{number:02}.123456789Z",
            **({"message": messages[state]} if state in messages else {}),
        }
        for number, state in enumerate(states)
    }
    metadata = {"name": "a", "namespace": "shop", "creationTimestamp": "2026-11-22T00:00:00Z"}
    current = history[str(len(states) - 1)] if states else None
    status = {"currentState": current, "stateTransitionHistory": history} if states else None
    return apache_run({"metadata": metadata, "status": status})


BEGUN = ("Submitted", "DriverRequested", "DriverStarted", "DriverReady", "RunningHealthy")
AGAIN = ("Failed", "ScheduledToRestart", "DriverRequested", "DriverStarted", "DriverReady")


@pytest.mark.parametrize(
    ("states", "phase"),
    [
        ((), Phase.SUBMITTED),
        (BEGUN[:1], Phase.SUBMITTED),
        (BEGUN[:2], Phase.SUBMITTED),
        (BEGUN[:3], Phase.RUNNING),
        (BEGUN, Phase.RUNNING),
        ((*BEGUN, "RunningWithPartialCapacity"), Phase.RUNNING),
        ((*BEGUN, "Failed"), Phase.RUNNING),  # it may be repeated
        ((*BEGUN, *AGAIN[:2]), Phase.SUBMITTED),
        ((*BEGUN, "Succeeded"), Phase.COMPLETED),
        ((*BEGUN, "Succeeded", "ResourceReleased"), Phase.COMPLETED),
        ((*BEGUN, "Succeeded", "TerminatedWithoutReleaseResources"), Phase.COMPLETED),
        ((*BEGUN, "Failed", "ResourceReleased"), Phase.FAILED),
        ((*BEGUN, *AGAIN, "RunningHealthy", "Succeeded", "ResourceReleased"), Phase.COMPLETED),
        ((*BEGUN, *AGAIN, "Failed", "ResourceReleased"), Phase.FAILED),
        (
            (
                *BEGUN, "Succeeded",
                "TerminatedWithoutReleaseResources", "ResourceReleased",
            ),
            Phase.COMPLETED,
        ),
        (("Submitted", "SchedulingFailure", "ResourceReleased"), Phase.FAILED),
        (("ResourceReleased",), Phase.FAILED),
    ],
    ids=lambda value: value.value if isinstance(value, Phase) else "-".join(value[-3:]),
)  # fmt: skip
def test_apache_phase_follows_the_state_history(states: tuple[str, ...], phase: Phase) -> None:
    run = run_through(*states)
    assert run.phase is phase
    assert run.state == (states[-1] if states else "")


def test_apache_failure_has_cause_of_earlier_state() -> None:
    failed = run_through(*BEGUN, "Failed", "ResourceReleased", Failed="exit code 1")
    assert failed.error == "exit code 1"
    both = run_through(
        *BEGUN, "Failed", "ResourceReleased", Failed="1", ResourceReleased="3 restarts"
    )
    assert both.error == "1; 3 restarts"
    assert run_through(*BEGUN, "DriverEvicted", "ResourceReleased").error == "DriverEvicted"
    assert run_through(*BEGUN, "Succeeded", "ResourceReleased", ResourceReleased="done").error == ""


def test_apache_pending_driver_shows_time_of_submission() -> None:
    requested = run_through("Submitted", "DriverRequested")
    assert requested.submitted is not None
    assert requested.submitted.second == 1
    assert requested.pods == "spark.operator/spark-app-name=a"
    assert run_through(*BEGUN).submitted is None


def test_forged_apache_state_is_read_safely() -> None:
    forged = {
        "currentStateSummary": "DriverRequested",
        "lastTransitionTime": "0000-01-01T00:00:00Z",
    }
    metadata = {"name": "a", "namespace": "shop", "creationTimestamp": "2026-11-22T00:00:00Z"}
    assert apache_run({"metadata": metadata, "status": {"currentState": forged}}).submitted is None
    history = {
        "9": {"currentStateSummary": "Failed"},
        "10": {"currentStateSummary": "Succeeded"},
        "no number": {"message": "no state"},
        "": {},
    }
    ended = {"currentStateSummary": "ResourceReleased"}
    status = {"currentState": ended, "stateTransitionHistory": history}
    assert apache_run({"metadata": metadata, "status": status}).phase is Phase.FAILED
    del history["no number"]
    assert apache_run({"metadata": metadata, "status": status}).phase is Phase.COMPLETED


FRAMES = "\n".join(
    f"\tat io.fabric8.kubernetes.client.dsl.internal.OperationSupport.step{n}(Some.java:{n})"
    for n in range(120)
)
QUOTA = (
    'pods "replay-a-0123456789-driver" is forbidden: exceeded quota: small, requested: '
    "count/pods=1, used: count/pods=3, limited: count/pods=3"
)
ANSWERED = (
    "io.fabric8.kubernetes.client.KubernetesClientException: Failure executing: POST at: "
    f"https://10.96.0.1/api/v1/namespaces/shop/pods. Message: {QUOTA}. Received status: "
    "Status(apiVersion=v1, code=403, details=StatusDetails(causes=[], group=null, kind=pods, "
    f"additionalProperties={{}}), kind=Status, message={QUOTA}, metadata=ListMeta(), "
    "reason=Forbidden, status=Failure, additionalProperties={})."
)
LOGGED = (
    "26/11/22 10:11:11 WARN NativeCodeLoader: Unable to load native-hadoop library for your "
    "platform... using builtin-java classes where applicable\n"
    "26/11/22 10:11:12 INFO SparkKubernetesClientFactory: Auto-configuring K8S client using "
    "current context from users K8S config file\n"
    '26/11/22 10:11:13 ERROR Client: Please check "kubectl auth can-i create pod" first.\n'
)
SUBMIT = "failed to run spark-submit: failed to run spark-submit: "
HOOKS = "\n26/11/22 10:11:14 INFO ShutdownHookManager: Shutdown hook called\n"
REST = " (the rest is in .status of the SparkApplication)"


def shown_cause(text: str) -> str:
    """Return the cause that is shown of *text*, a longer message."""
    shown = root_cause(text, ".status")
    assert shown.endswith(REST)
    return shown.removesuffix(REST)


def test_cause_of_refused_pod_is_the_api_answer() -> None:
    thrown = f'{SUBMIT}{LOGGED}Exception in thread "main" {ANSWERED}\n{FRAMES}'
    assert len(thrown) > 11_000
    assert shown_cause(thrown + HOOKS) == QUOTA
    wrapped = (
        f'{SUBMIT}{LOGGED}Exception in thread "main" org.apache.spark.SparkException: no\n'
        f"{FRAMES}\nCaused by: {ANSWERED}\n{FRAMES}\nCaused by: java.io.IOException: closed\n"
        f"{FRAMES}\n\t... 12 more"
    )
    assert shown_cause(wrapped + HOOKS) == QUOTA


def test_cause_on_its_own_line_is_shown() -> None:
    broken = ANSWERED.replace("Message: ", "Message:\n")
    assert shown_cause(f'{SUBMIT}{LOGGED}Exception in thread "main" {broken}\n{FRAMES}') == QUOTA


def test_cause_of_nested_stack_is_its_root() -> None:
    text = (
        f'{SUBMIT}{LOGGED}Exception in thread "main" io.fabric8.kubernetes.client.'
        "KubernetesClientException: Operation: [create] for kind: [Pod] with name: [null] failed.\n"
        f"{FRAMES}\nCaused by: java.io.IOException: unreachable\n{FRAMES}\n\t... 8 more\n"
        "Caused by: java.net.UnknownHostException: kubernetes.default.svc: Name or service not "
        f"known\n{FRAMES}\n\t... 3 more{HOOKS}"
    )
    root = "java.net.UnknownHostException: kubernetes.default.svc: Name or service not known"
    assert shown_cause(text) == root


def test_cause_ignores_stacks_that_were_only_logged() -> None:
    logged = f"26/11/22 10:11:12 WARN a: tried\nCaused by: java.io.IOException: x\n{FRAMES}\n"
    last = f'Exception in thread "main" java.lang.IllegalArgumentException: no image\n{FRAMES}'
    assert shown_cause(SUBMIT + logged + last) == "java.lang.IllegalArgumentException: no image"


def test_cause_of_several_lines_becomes_one() -> None:
    text = f'Exception in thread "main" java.lang.Error: one\n  two\n\nthree\n{FRAMES}{HOOKS}'
    assert shown_cause(text) == "java.lang.Error: one two three"


@pytest.mark.parametrize("before", ["", LOGGED])
def test_cause_of_spark_submit_error_has_no_usage(before: str) -> None:
    usage = "\n\nUsage: spark-submit [options] <app jar | python file> [app arguments]\nOptions:\n"
    text = f"{SUBMIT}{before}Error: Unrecognized option: --bad{usage}  --master MASTER_URL  x\n"
    assert shown_cause(text) == "Error: Unrecognized option: --bad"


def test_cause_without_stack_is_last_line_beside_logs() -> None:
    java = "/opt/spark/bin/spark-class: line 71: /opt/java/bin/java: No such file or directory"
    assert shown_cause(f"{SUBMIT}{LOGGED}{java}{HOOKS}") == java
    logged = "26/11/22 10:11:13 ERROR Client: the API server refused"
    assert shown_cause(f"26/11/22 10:11:12 INFO a: b\n{logged}{HOOKS}") == logged
    assert shown_cause("26/11/22 10:11:12 INFO a: b\n26/11/22 10:11:12 INFO a: c").endswith("a: c")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "driver container failed with ExitCode: 1, Reason: Error",
        f"{SUBMIT}signal: killed",
        f"{SUBMIT}exit status 1",
        "driver pod already exist",
        "Failed to request resource for driver with kind: ConfigMap, name: a-spark-conf",
    ],
)
def test_cause_of_one_line_is_unchanged(text: str) -> None:
    assert root_cause(text, ".status") == text


def test_cause_is_limited_in_length() -> None:
    shown = root_cause(f"{SUBMIT}{'x' * 20_000}", ".status")
    assert len(shown) <= MAX_LENGTH + len(REST) + 1
    assert shown.endswith(f"x…{REST}")


def application_with(status: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": "a", "namespace": "shop", "creationTimestamp": "2026-11-22T00:00:00Z"}
    return {"metadata": metadata, "status": status}


def test_kubeflow_cause_names_its_status_field() -> None:
    text = f'{SUBMIT}{LOGGED}Exception in thread "main" {ANSWERED}\n{FRAMES}'
    state = {"state": "SUBMISSION_FAILED", "errorMessage": text}
    place = "(the rest is in .status.applicationState.errorMessage of the SparkApplication)"
    assert kubeflow_run(application_with({"applicationState": state})).error == f"{QUOTA} {place}"


def test_apache_cause_names_its_status_field() -> None:
    text = f"Failed to request driver from scheduler backend. StackTrace: {ANSWERED}\n{FRAMES}"
    tried = "The maximum number of restart attempts (3) has been exceeded."
    failed = {"currentStateSummary": "SchedulingFailure", "message": text}
    ended = {"currentStateSummary": "ResourceReleased", "message": tried}
    history = {"0": failed, "1": ended}
    run = apache_run(application_with({"currentState": ended, "stateTransitionHistory": history}))
    place = "(the rest is in .status.stateTransitionHistory of the SparkApplication)"
    assert run.error == f"{QUOTA} {place}; {tried}"


KUBEFLOW, APACHE = resources.SPARK_APPLICATIONS, resources.APACHE_SPARK_APPLICATIONS


def context_with(*kinds: Resource, missing: tuple[Resource, ...] = ()) -> Context:
    caches = {kind: Cache() for kind in kinds}
    return dataclasses.replace(ctx(), applications=caches, missing=missing)


@pytest.mark.parametrize(
    ("missing", "chosen"),
    [
        ((), LauncherName.KUBEFLOW),
        ((KUBEFLOW,), LauncherName.APACHE),
        ((APACHE,), LauncherName.KUBEFLOW),
    ],
)
def test_installed_spark_operator_is_chosen(
    missing: tuple[Resource, ...], chosen: LauncherName
) -> None:
    context = context_with(KUBEFLOW, APACHE, missing=missing)
    assert choose_operator(context).name is chosen


def test_missing_spark_operator_is_waited_for() -> None:
    context = context_with(KUBEFLOW, APACHE, missing=(KUBEFLOW, APACHE))
    with raises(Reason.SPARK_OPERATOR_NOT_FOUND, match=r"spark\.apache\.org") as refusal:
        choose_operator(context)
    assert not Reason.of(refusal.value).stalls


def test_disabled_spark_operator_is_never_used() -> None:
    assert choose_operator(context_with(APACHE)).name is LauncherName.APACHE


def owned_application(*owners: str) -> dict[str, Any]:
    """Return one of the name that the Replay's has."""
    metadata = {"name": launch.name_of(replay()), "namespace": "shop", "resourceVersion": "1"}
    references = [{"uid": uid} for uid in owners]
    return {"metadata": {**metadata, "uid": str(owners), "ownerReferences": references}}


@pytest.mark.parametrize("kind", [KUBEFLOW, APACHE])
def test_launched_replay_is_found_with_any_operator(kind: Resource) -> None:
    context = context_with(KUBEFLOW, APACHE)
    assert find_application(replay(), context) is None
    context.applications[kind].put(owned_application())
    application = find_application(replay(), context)
    assert application is not None
    assert application.launcher.resource == kind


@pytest.mark.parametrize(("own", "other"), [(KUBEFLOW, APACHE), (APACHE, KUBEFLOW)])
def test_foreign_application_does_not_hide_own_one(own: Resource, other: Resource) -> None:
    context = context_with(KUBEFLOW, APACHE)
    context.applications[other].put(owned_application("another"))
    context.applications[own].put(owned_application(replay()["metadata"]["uid"]))
    application = find_application(replay(), context)
    assert application is not None
    assert application.launcher.resource == own


@pytest.mark.parametrize(
    ("spec", "dead_letters", "missing", "engine"),
    [
        ({}, None, (), ReplayEngine.SPARK),
        ({}, 10_000, (), ReplayEngine.JOB),
        ({}, 10_001, (), ReplayEngine.SPARK),
        ({}, 10_001, (KUBEFLOW, APACHE), ReplayEngine.JOB),
        ({"select": {"limit": 10_000}}, 1_000_000, (), ReplayEngine.JOB),
        ({"select": {"limit": 10_001}}, None, (), ReplayEngine.SPARK),
        ({"select": {"ids": ["1:2"], "limit": 20_000}}, None, (), ReplayEngine.JOB),
        ({"mode": "Audit"}, 1_000_000, (), ReplayEngine.JOB),
        ({"engine": "Spark"}, 1, (KUBEFLOW, APACHE), ReplayEngine.SPARK),
        ({"engine": "Job"}, 1_000_000, (), ReplayEngine.JOB),
    ],
)
def test_engine_is_chosen_by_number_and_installed_kinds(
    spec: dict[str, Any],
    dead_letters: int | None,
    missing: tuple[Resource, ...],
    engine: ReplayEngine,
) -> None:
    context = context_with(KUBEFLOW, APACHE, missing=missing)
    backlog = {} if dead_letters is None else {"backlog": {"deadLetter": dead_letters}}
    parsed = ReplaySpec.model_validate({"policyRef": {"name": "orders"}, **spec})
    assert choose_engine(parsed, replay(), {"status": backlog}, context) is engine


def test_launched_replay_keeps_its_engine() -> None:
    context, body = context_with(KUBEFLOW), replay()
    spec = ReplaySpec.model_validate({"policyRef": {"name": "orders"}})
    body["status"] = {"engine": "Job"}
    assert choose_engine(spec, body, {}, context) is ReplayEngine.SPARK
    body["metadata"]["annotations"] = {APPLICATION: launch.name_of(body)}
    assert choose_engine(spec, body, {}, context) is ReplayEngine.JOB


BEGAN = {"startTime": "2026-11-22T00:00:01Z"}


@pytest.mark.parametrize(
    ("status", "state", "phase"),
    [
        ({}, "", Phase.SUBMITTED),
        (BEGAN | {"active": 1}, "Starting", Phase.SUBMITTED),
        (BEGAN | {"active": 1, "ready": 1}, "Running", Phase.RUNNING),
        (BEGAN | {"failed": 1}, "Restarting", Phase.SUBMITTED),
        (BEGAN | {"conditions": [{"type": "Complete", "status": "True"}]}, "Complete",
         Phase.COMPLETED),
        (BEGAN | {"conditions": [{"type": "Failed", "status": "False"}]}, "Starting",
         Phase.SUBMITTED),
        (BEGAN | {"failed": 4, "conditions": [{"type": "Failed", "status": "True"}]}, "Failed",
         Phase.FAILED),
    ],
)  # fmt: skip
def test_job_phase_follows_counts_and_conditions(
    status: dict[str, Any], state: str, phase: Phase
) -> None:
    run = job_run(job_with(status))
    assert (run.kind, run.state, run.phase) == ("Job", state, phase)


def test_failed_job_shows_reason_and_awaits_no_driver() -> None:
    failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}
    failed["message"] = "Job has reached the specified backoff limit"
    run = job_run(job_with(BEGAN | {"failed": 4, "conditions": [failed]}))
    assert run.error == "BackoffLimitExceeded: Job has reached the specified backoff limit"
    assert run.submitted is None
    assert job_run(job_with(BEGAN | {"active": 1})).submitted is not None


def job_with(status: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": "a", "namespace": "shop", "creationTimestamp": "2026-11-22T00:00:00Z"}
    return {"metadata": metadata, "status": status}


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.resource.group)
@pytest.mark.parametrize("created", [{}, {"creationTimestamp": None}, {"creationTimestamp": "x"}])
def test_application_of_a_faulty_api_server_is_open(
    launcher: Launcher, created: dict[str, Any]
) -> None:
    """Listeners of the caches read its state: an error would end the event of the watch."""
    run = launcher.run({"metadata": {"namespace": "shop", "name": "x", **created}})
    assert run.phase is Phase.SUBMITTED
