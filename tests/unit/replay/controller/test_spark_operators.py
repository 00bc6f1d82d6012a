"""Both Spark operators: choice, resources, states and errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from redrive.api import LauncherName
from redrive.api.job import JobDefaults
from redrive.api.replay import Phase
from redrive.errors import LauncherDisabledError, SparkOperatorNotFoundError
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.context import Context
from redrive.kube.resources import Resource
from redrive.replay.controller import launch
from redrive.replay.controller.spark_operators import (
    MAX_LENGTH,
    apache_manifest,
    apache_run,
    choose_operator,
    find_application,
    kubeflow_run,
    root_cause,
)
from tests.unit.replay.controller.test_admission import ctx, replay
from tests.unit.replay.controller.test_launch import ACCESS, JOB, RESTRICTED, SETTINGS
from tests.unit.replay.controller.test_launch import replay as launched_replay


def apache_spec(**template: object) -> dict[str, Any]:
    """Return the spec of the SparkApplication."""
    pods = JobDefaults.model_validate(template)
    made = apache_manifest(launch.application(launched_replay(), JOB, ACCESS, pods, SETTINGS))
    assert (made["apiVersion"], made["kind"]) == ("spark.apache.org/v1", "SparkApplication")
    assert made["metadata"]["name"] == launch.name_of(launched_replay())
    found: dict[str, Any] = made["spec"]
    return found


def test_program_argument_image_and_account_stand_where_it_reads_them() -> None:
    made = apache_spec()
    assert made["pyFiles"] == "local:///opt/redrive/replay.py"
    assert made["driverArgs"] == [JOB.encode()]
    assert made["runtimeVersions"] == {"sparkVersion": launch.SPARK_VERSION}
    conf = made["sparkConf"]
    assert conf["spark.kubernetes.container.image"] == "registry/redrive:1"
    assert conf["spark.kubernetes.authenticate.driver.serviceAccountName"] == "redrive-replay"
    assert conf["spark.executor.instances"] == "1"
    assert all(isinstance(value, str) for value in conf.values())


def test_a_failed_run_is_repeated_and_an_ended_one_is_deleted_in_time() -> None:
    restarts = {
        "restartPolicy": "OnFailure",
        "maxRestartAttempts": 3,
        "restartBackoffMillis": 10_000,
    }
    assert apache_spec()["applicationTolerations"] == {"restartConfig": restarts}
    lasting = apache_spec(timeToLiveSeconds=600)["applicationTolerations"]
    assert lasting == {"restartConfig": restarts, "ttlAfterStopMillis": 600_000}


def test_what_is_said_about_pods_reaches_them() -> None:
    made = apache_spec(
        driver={"memory": "2g", "coreRequest": "100m"},
        executor={"cores": 2},
        executors=3,
        dynamicAllocation={"minExecutors": 1, "maxExecutors": 4},
        imagePullSecrets=["one", "two"],
        nodeSelector={"disk": "ssd"},
        tolerations=[{"operator": "Exists"}],
        labels={"team": "shop"},
        volumes=[{"name": "scratch", "emptyDir": {}}],
        securityContext={"runAsUser": 185, "fsGroup": 1000},
    )
    expected = {
        "spark.kubernetes.container.image.pullSecrets": "one,two",
        "spark.driver.memory": "2g",
        "spark.kubernetes.driver.request.cores": "100m",
        "spark.executor.cores": "2",
        "spark.executor.instances": "3",
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.shuffleTracking.enabled": "true",
        "spark.dynamicAllocation.initialExecutors": "3",
        "spark.dynamicAllocation.minExecutors": "1",
        "spark.dynamicAllocation.maxExecutors": "4",
    }
    assert made["sparkConf"].items() >= expected.items()
    assert "spark.kubernetes.executor.request.cores" not in made["sparkConf"]
    for name in ("driver", "executor"):
        template = made[f"{name}Spec"]["podTemplateSpec"]
        assert template["metadata"] == {"labels": {"team": "shop"}}
        pod = template["spec"]
        assert pod["nodeSelector"] == {"disk": "ssd"}
        assert pod["tolerations"] == [{"operator": "Exists"}]
        assert pod["securityContext"] == {"fsGroup": 1000}
        assert [volume["name"] for volume in pod["volumes"]] == ["job-scratch", "redrive-access"]
        (container,) = pod["containers"]
        assert container["securityContext"] == {**RESTRICTED, "runAsUser": 185}
        assert container["env"] == [ACCESS.variable]
        mounted = [mount["name"] for mount in container["volumeMounts"]]
        assert mounted == ["job-scratch", "redrive-access"]


def test_no_property_that_the_chart_sets_replaces_what_redrive_writes() -> None:
    theirs = {
        "spark.kubernetes.authenticate.driver.serviceAccountName": "admin",
        "spark.kubernetes.container.image": "other",
        "spark.speculation": "true",
    }
    assert not theirs.items() & apache_spec(sparkConf=theirs)["sparkConf"].items()


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
    ids=lambda given: given.value if isinstance(given, Phase) else "-".join(given[-3:]),
)  # fmt: skip
def test_a_run_is_what_its_history_says(states: tuple[str, ...], phase: Phase) -> None:
    found = run_through(*states)
    assert found.phase is phase
    assert found.state == (states[-1] if states else "")


def test_a_failed_run_tells_why_although_its_last_state_is_another() -> None:
    failed = run_through(*BEGUN, "Failed", "ResourceReleased", Failed="exit code 1")
    assert failed.error == "exit code 1"
    both = run_through(
        *BEGUN, "Failed", "ResourceReleased", Failed="1", ResourceReleased="3 restarts"
    )
    assert both.error == "1; 3 restarts"
    assert run_through(*BEGUN, "DriverEvicted", "ResourceReleased").error == "DriverEvicted"
    assert run_through(*BEGUN, "Succeeded", "ResourceReleased", ResourceReleased="done").error == ""


def test_a_driver_that_was_requested_and_does_not_run_shows_since_when() -> None:
    requested = run_through("Submitted", "DriverRequested")
    assert requested.submitted is not None
    assert requested.submitted.second == 1
    assert requested.pods == "spark.operator/spark-app-name=a"
    assert run_through(*BEGUN).submitted is None


def test_a_state_that_somebody_forged_is_read_as_far_as_it_can_be() -> None:
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


def shown_cause(said: str) -> str:
    """Return what is shown of *said*, a message that has more."""
    shown = root_cause(said, ".status")
    assert shown.endswith(REST)
    return shown.removesuffix(REST)


def test_of_a_refused_pod_the_answer_of_the_api_server_is_shown() -> None:
    thrown = f'{SUBMIT}{LOGGED}Exception in thread "main" {ANSWERED}\n{FRAMES}'
    assert len(thrown) > 11_000
    assert shown_cause(thrown + HOOKS) == QUOTA
    wrapped = (
        f'{SUBMIT}{LOGGED}Exception in thread "main" org.apache.spark.SparkException: no\n'
        f"{FRAMES}\nCaused by: {ANSWERED}\n{FRAMES}\nCaused by: java.io.IOException: closed\n"
        f"{FRAMES}\n\t... 12 more"
    )
    assert shown_cause(wrapped + HOOKS) == QUOTA


def test_an_answer_on_a_line_of_its_own_is_shown() -> None:
    broken = ANSWERED.replace("Message: ", "Message:\n")
    assert shown_cause(f'{SUBMIT}{LOGGED}Exception in thread "main" {broken}\n{FRAMES}') == QUOTA


def test_of_other_stacks_the_root_cause_is_shown() -> None:
    said = (
        f'{SUBMIT}{LOGGED}Exception in thread "main" io.fabric8.kubernetes.client.'
        "KubernetesClientException: Operation: [create] for kind: [Pod] with name: [null] failed.\n"
        f"{FRAMES}\nCaused by: java.io.IOException: unreachable\n{FRAMES}\n\t... 8 more\n"
        "Caused by: java.net.UnknownHostException: kubernetes.default.svc: Name or service not "
        f"known\n{FRAMES}\n\t... 3 more{HOOKS}"
    )
    root = "java.net.UnknownHostException: kubernetes.default.svc: Name or service not known"
    assert shown_cause(said) == root


def test_a_stack_that_was_only_logged_is_not_the_one_that_ended_it() -> None:
    logged = f"26/11/22 10:11:12 WARN a: tried\nCaused by: java.io.IOException: x\n{FRAMES}\n"
    last = f'Exception in thread "main" java.lang.IllegalArgumentException: no image\n{FRAMES}'
    assert shown_cause(SUBMIT + logged + last) == "java.lang.IllegalArgumentException: no image"


def test_a_message_of_several_lines_becomes_one() -> None:
    said = f'Exception in thread "main" java.lang.Error: one\n  two\n\nthree\n{FRAMES}{HOOKS}'
    assert shown_cause(said) == "java.lang.Error: one two three"


@pytest.mark.parametrize("before", ["", LOGGED])
def test_what_spark_submit_says_itself_is_shown_and_its_usage_is_not(before: str) -> None:
    usage = "\n\nUsage: spark-submit [options] <app jar | python file> [app arguments]\nOptions:\n"
    said = f"{SUBMIT}{before}Error: Unrecognized option: --bad{usage}  --master MASTER_URL  x\n"
    assert shown_cause(said) == "Error: Unrecognized option: --bad"


def test_without_any_of_that_the_last_line_that_is_no_log_is_shown() -> None:
    java = "/opt/spark/bin/spark-class: line 71: /opt/java/bin/java: No such file or directory"
    assert shown_cause(f"{SUBMIT}{LOGGED}{java}{HOOKS}") == java
    logged = "26/11/22 10:11:13 ERROR Client: the API server refused"
    assert shown_cause(f"26/11/22 10:11:12 INFO a: b\n{logged}{HOOKS}") == logged
    assert shown_cause("26/11/22 10:11:12 INFO a: b\n26/11/22 10:11:12 INFO a: c").endswith("a: c")


@pytest.mark.parametrize(
    "said",
    [
        "",
        "driver container failed with ExitCode: 1, Reason: Error",
        f"{SUBMIT}signal: killed",
        f"{SUBMIT}exit status 1",
        "driver pod already exist",
        "Failed to request resource for driver with kind: ConfigMap, name: a-spark-conf",
    ],
)
def test_one_line_is_shown_as_it_is(said: str) -> None:
    assert root_cause(said, ".status") == said


def test_no_line_is_long() -> None:
    shown = root_cause(f"{SUBMIT}{'x' * 20_000}", ".status")
    assert len(shown) <= MAX_LENGTH + len(REST) + 1
    assert shown.endswith(f"x…{REST}")


def application_with(status: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": "a", "namespace": "shop", "creationTimestamp": "2026-11-22T00:00:00Z"}
    return {"metadata": metadata, "status": status}


def test_a_run_by_kubeflow_says_where_the_rest_is() -> None:
    said = f'{SUBMIT}{LOGGED}Exception in thread "main" {ANSWERED}\n{FRAMES}'
    state = {"state": "SUBMISSION_FAILED", "errorMessage": said}
    place = "(the rest is in .status.applicationState.errorMessage of the SparkApplication)"
    assert kubeflow_run(application_with({"applicationState": state})).error == f"{QUOTA} {place}"


def test_a_run_by_apache_says_where_the_rest_is() -> None:
    said = f"Failed to request driver from scheduler backend. StackTrace: {ANSWERED}\n{FRAMES}"
    tried = "The maximum number of restart attempts (3) has been exceeded."
    failed = {"currentStateSummary": "SchedulingFailure", "message": said}
    ended = {"currentStateSummary": "ResourceReleased", "message": tried}
    history = {"0": failed, "1": ended}
    found = apache_run(application_with({"currentState": ended, "stateTransitionHistory": history}))
    place = "(the rest is in .status.stateTransitionHistory of the SparkApplication)"
    assert found.error == f"{QUOTA} {place}; {tried}"


KUBEFLOW, APACHE = resources.SPARK_APPLICATIONS, resources.APACHE_SPARK_APPLICATIONS


def context_with(*kinds: Resource, missing: tuple[Resource, ...] = ()) -> Context:
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
    context = context_with(KUBEFLOW, APACHE, missing=missing)
    assert choose_operator(wanted, context).name is chosen


def test_one_that_is_not_installed_is_waited_for() -> None:
    for wanted, missing in ((None, (KUBEFLOW, APACHE)), (LauncherName.APACHE, (APACHE,))):
        context = context_with(KUBEFLOW, APACHE, missing=missing)
        with pytest.raises(SparkOperatorNotFoundError, match=r"spark\.apache\.org") as refusal:
            choose_operator(wanted, context)
        assert not refusal.value.stalls


def test_a_spark_operator_that_is_not_enabled_is_never_used() -> None:
    assert choose_operator(None, context_with(APACHE)).name is LauncherName.APACHE
    with pytest.raises(LauncherDisabledError, match=r"replay\.launchers\.kubeflow"):
        choose_operator(LauncherName.KUBEFLOW, context_with(APACHE))


def owned_application(*owners: str) -> dict[str, Any]:
    """Return one of the name that the Replay's has."""
    metadata = {"name": launch.name_of(replay()), "namespace": "shop", "resourceVersion": "1"}
    references = [{"uid": uid} for uid in owners]
    return {"metadata": {**metadata, "uid": str(owners), "ownerReferences": references}}


@pytest.mark.parametrize("kind", [KUBEFLOW, APACHE])
def test_a_replay_that_was_launched_is_found_whatever_would_be_chosen_now(kind: Resource) -> None:
    context = context_with(KUBEFLOW, APACHE)
    assert find_application(replay(), context) is None
    context.applications[kind].put(owned_application())
    found = find_application(replay(), context)
    assert found is not None
    assert found.launcher.resource == kind


@pytest.mark.parametrize(("own", "other"), [(KUBEFLOW, APACHE), (APACHE, KUBEFLOW)])
def test_an_application_of_others_hides_none_of_a_replays_own(
    own: Resource, other: Resource
) -> None:
    context = context_with(KUBEFLOW, APACHE)
    context.applications[other].put(owned_application("another"))
    context.applications[own].put(owned_application(replay()["metadata"]["uid"]))
    found = find_application(replay(), context)
    assert found is not None
    assert found.launcher.resource == own
