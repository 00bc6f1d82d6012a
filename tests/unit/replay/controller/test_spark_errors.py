"""What users see of a submission that failed, by the shapes in which Spark operators say it."""

from __future__ import annotations

from typing import Any

import pytest

from redrive.replay.controller.spark_operators import (
    MAX_LENGTH,
    apache_run,
    kubeflow_run,
    root_cause,
)

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


def essence(said: str) -> str:
    """Return what is shown of *said*, a message that has more."""
    shown = root_cause(said, ".status")
    assert shown.endswith(REST)
    return shown.removesuffix(REST)


def test_of_a_refused_pod_the_answer_of_the_api_server_is_shown() -> None:
    thrown = f'{SUBMIT}{LOGGED}Exception in thread "main" {ANSWERED}\n{FRAMES}'
    assert len(thrown) > 11_000
    assert essence(thrown + HOOKS) == QUOTA
    wrapped = (
        f'{SUBMIT}{LOGGED}Exception in thread "main" org.apache.spark.SparkException: no\n'
        f"{FRAMES}\nCaused by: {ANSWERED}\n{FRAMES}\nCaused by: java.io.IOException: closed\n"
        f"{FRAMES}\n\t... 12 more"
    )
    assert essence(wrapped + HOOKS) == QUOTA


def test_an_answer_on_a_line_of_its_own_is_shown() -> None:
    broken = ANSWERED.replace("Message: ", "Message:\n")
    assert essence(f'{SUBMIT}{LOGGED}Exception in thread "main" {broken}\n{FRAMES}') == QUOTA


def test_of_other_stacks_the_root_cause_is_shown() -> None:
    said = (
        f'{SUBMIT}{LOGGED}Exception in thread "main" io.fabric8.kubernetes.client.'
        "KubernetesClientException: Operation: [create] for kind: [Pod] with name: [null] failed.\n"
        f"{FRAMES}\nCaused by: java.io.IOException: unreachable\n{FRAMES}\n\t... 8 more\n"
        "Caused by: java.net.UnknownHostException: kubernetes.default.svc: Name or service not "
        f"known\n{FRAMES}\n\t... 3 more{HOOKS}"
    )
    root = "java.net.UnknownHostException: kubernetes.default.svc: Name or service not known"
    assert essence(said) == root


def test_a_stack_that_was_only_logged_is_not_the_one_that_ended_it() -> None:
    logged = f"26/11/22 10:11:12 WARN a: tried\nCaused by: java.io.IOException: x\n{FRAMES}\n"
    last = f'Exception in thread "main" java.lang.IllegalArgumentException: no image\n{FRAMES}'
    assert essence(SUBMIT + logged + last) == "java.lang.IllegalArgumentException: no image"


def test_a_message_of_several_lines_becomes_one() -> None:
    said = f'Exception in thread "main" java.lang.Error: one\n  two\n\nthree\n{FRAMES}{HOOKS}'
    assert essence(said) == "java.lang.Error: one two three"


@pytest.mark.parametrize("before", ["", LOGGED])
def test_what_spark_submit_says_itself_is_shown_and_its_usage_is_not(before: str) -> None:
    usage = "\n\nUsage: spark-submit [options] <app jar | python file> [app arguments]\nOptions:\n"
    said = f"{SUBMIT}{before}Error: Unrecognized option: --bad{usage}  --master MASTER_URL  x\n"
    assert essence(said) == "Error: Unrecognized option: --bad"


def test_without_any_of_that_the_last_line_that_is_no_log_is_shown() -> None:
    java = "/opt/spark/bin/spark-class: line 71: /opt/java/bin/java: No such file or directory"
    assert essence(f"{SUBMIT}{LOGGED}{java}{HOOKS}") == java
    logged = "26/11/22 10:11:13 ERROR Client: the API server refused"
    assert essence(f"26/11/22 10:11:12 INFO a: b\n{logged}{HOOKS}") == logged
    assert essence("26/11/22 10:11:12 INFO a: b\n26/11/22 10:11:12 INFO a: c").endswith("a: c")


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


def application(status: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": "a", "namespace": "shop", "creationTimestamp": "2026-11-22T00:00:00Z"}
    return {"metadata": metadata, "status": status}


def test_a_run_by_kubeflow_says_where_the_rest_is() -> None:
    said = f'{SUBMIT}{LOGGED}Exception in thread "main" {ANSWERED}\n{FRAMES}'
    state = {"state": "SUBMISSION_FAILED", "errorMessage": said}
    place = "(the rest is in .status.applicationState.errorMessage of the SparkApplication)"
    assert kubeflow_run(application({"applicationState": state})).error == f"{QUOTA} {place}"


def test_a_run_by_apache_says_where_the_rest_is() -> None:
    said = f"Failed to request driver from scheduler backend. StackTrace: {ANSWERED}\n{FRAMES}"
    tried = "The maximum number of restart attempts (3) has been exceeded."
    failed = {"currentStateSummary": "SchedulingFailure", "message": said}
    ended = {"currentStateSummary": "ResourceReleased", "message": tried}
    history = {"0": failed, "1": ended}
    found = apache_run(application({"currentState": ended, "stateTransitionHistory": history}))
    place = "(the rest is in .status.stateTransitionHistory of the SparkApplication)"
    assert found.error == f"{QUOTA} {place}; {tried}"
