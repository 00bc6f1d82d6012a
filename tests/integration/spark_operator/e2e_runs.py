"""Applications that run to their end, are stopped, changed or deleted, or lose their stand-in."""

from __future__ import annotations

import json
import stat
from contextlib import suppress

import psutil
import pytest

from sandbox.errors import SandboxError
from tests.integration.spark_operator.conftest import StandIn, eventually, session

pytestmark = pytest.mark.xdist_group("control plane")

# Prints as JSON its arguments, the environment of its Python workers, and the rights of its
# ServiceAccount.
TELLING = """
import json, os, sys, time
from kubernetes import client, config
from pyspark.sql import SparkSession

config.load_kube_config()
who = client.AuthenticationV1Api().create_self_subject_review(client.V1SelfSubjectReview())
_, context = config.list_kube_config_contexts()
namespace = context["context"]["namespace"]
core = client.CoreV1Api()
try:
    core.list_namespaced_secret(namespace)
    secrets = "listed"
except client.ApiException as error:
    secrets = error.status

spark = SparkSession.builder.getOrCreate()
seen = spark.sparkContext.parallelize([0], 1).map(lambda _: os.environ["TOKEN"]).collect()
told = {
    "arguments": sys.argv[1:], "environment": dict(os.environ), "worker": seen,
    "id": spark.sparkContext.applicationId, "master": spark.sparkContext.master,
    "conf": spark.conf.get("spark.of.test"), "user": who.status.user_info.username,
    "may read": core.read_namespaced_config_map("settings", namespace).data["LEVEL"],
    "secrets": secrets,
}
print("TOLD " + json.dumps(told), flush=True)
while "MAY_END" not in core.read_namespaced_config_map("settings", namespace).data:
    time.sleep(0.2)
"""
ENVIRONMENT_OF_SPARK = {
    *("MASTER", "PWD", "PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET", "PYTHONHASHSEED"),
    *("PYTHONUNBUFFERED", "SHLVL", "SPARK_AUTH_SOCKET_TIMEOUT", "SPARK_BEELINE_OPTS"),
    *("SPARK_BUFFER_SIZE", "SPARK_CONF_DIR", "SPARK_ENV_LOADED", "SPARK_HOME"),
    *("SPARK_SCALA_VERSION", "LC_CTYPE", "_"),
}
# Writes its argument and stays; without a Spark session it starts in a second.
STAYING = "import sys, time; print('STARTED', *sys.argv[1:], flush=True); time.sleep(600)"
# Keeps one of Spark's Python workers busy.
WORKING = """
import time
from pyspark.sql import SparkSession
spark = SparkSession.builder.getOrCreate()
def work(_):
    print("WORKS", flush=True)
    time.sleep(600)
spark.sparkContext.parallelize([0], 1).foreach(work)
"""


def command_line(pid: int) -> str:
    """Return the command line of a process, of which nothing is left when it has ended."""
    with suppress(psutil.NoSuchProcess):
        return " ".join(psutil.Process(pid).cmdline())
    return ""


def test_an_application_runs_from_its_object_alone(stand_in: StandIn) -> None:
    stand_in.kubectl("create", "secret", "generic", "pulsar", "--from-literal=token=s3cret")
    stand_in.kubectl("create", "configmap", "settings", "--from-literal=LEVEL=info")
    stand_in.kubectl("create", "serviceaccount", "runner")
    rights = ["--verb=get", "--resource=configmaps"]
    stand_in.kubectl("create", "role", "reader", *rights)
    account = f"--serviceaccount={stand_in.namespace}:runner"
    stand_in.kubectl("create", "rolebinding", "reader", "--role=reader", account)
    token = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "pulsar", "key": "token"}}}
    stand_in.create(
        "whole",
        TELLING,
        arguments=["--run", "größer als"],
        sparkConf={"spark.of.test": "as = given # here"},
        driver={
            "memory": "512m",
            "serviceAccount": "runner",
            "env": [token],
            "envFrom": [{"configMapRef": {"name": "settings"}}],
        },
        executor={"instances": 2, "env": [{"name": "OF_EXECUTORS", "value": "yes"}]},
    )

    running = stand_in.wait("whole", "RUNNING")
    assert running["driverInfo"] == {"podName": "whole-driver"}
    assert running["sparkApplicationId"].startswith("spark-")
    members = session(stand_in.leader("whole"))
    command_lines = [*map(command_line, members)]
    assert any("SparkSubmit" in line for line in command_lines)
    assert not any("s3cret" in line for line in command_lines)
    for file in (stand_in.files("whole"), *stand_in.files("whole").iterdir()):
        assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0, file
    stand_in.kubectl("patch", "configmap", "settings", '--patch={"data": {"MAY_END": ""}}')

    completed = stand_in.wait("whole", "COMPLETED")
    assert completed["applicationState"] == {"state": "COMPLETED"}
    assert completed["terminationTime"] >= completed["lastSubmissionAttemptTime"]
    assert (completed["submissionAttempts"], completed["executionAttempts"]) == (1, 1)
    assert not stand_in.files("whole").exists()

    lines = stand_in.log("whole").splitlines()
    arguments = json.loads(next(line for line in lines if line.startswith("TOLD "))[5:])
    environment = arguments.pop("environment")
    assert arguments == {
        "arguments": ["--run", "größer als"],
        "worker": ["s3cret"],
        "id": completed["sparkApplicationId"],
        "master": "local[2,4]",
        "conf": "as = given # here",
        "user": f"system:serviceaccount:{stand_in.namespace}:runner",
        "may read": "info",
        "secrets": 403,
    }
    variables = {"TOKEN": "s3cret", "LEVEL": "info", "OF_EXECUTORS": "yes"}
    assert variables.items() <= environment.items()
    image = {"PATH", "LANG", "JAVA_HOME", "PYSPARK_PYTHON", "PYTHONPATH", "SPARK_SUBMIT_OPTS"}
    pod = {"SPARK_LOCAL_IP", "SPARK_LOCAL_DIRS", "KUBECONFIG"}
    assert set(environment) - ENVIRONMENT_OF_SPARK == {*variables, *image, *pod}


def test_failing_driver_is_restarted_as_its_policy_says(
    stand_in: StandIn,
) -> None:
    policy = {"type": "OnFailure", "onFailureRetries": 1, "onFailureRetryInterval": 1}
    stand_in.create("fails", "raise ConnectionError('broker is down')", restartPolicy=policy)
    failed = stand_in.wait("fails", "FAILED")
    assert failed["applicationState"]["errorMessage"] == (
        "driver container failed with ExitCode: 1, Reason: Error"
    )
    assert "ConnectionError: broker is down" in stand_in.log("fails")
    assert failed["executionAttempts"] == 2
    stand_in.patch("fails", timeToLiveSeconds=1)
    stand_in.kubectl("wait", "--for=delete", "sparkapp/fails", "--timeout=180s")


def test_driver_without_its_secret_waits_and_reports_it(stand_in: StandIn) -> None:
    stand_in.create(
        "waits",
        "import os; print('GOT', os.environ['K'])",
        driver={"envSecretKeyRefs": {"K": {"name": "later", "key": "k"}}},
    )

    def complaints() -> str:
        chosen = "--field-selector=involvedObject.name=waits-driver"
        return stand_in.kubectl("get", "events", chosen, "-o", "jsonpath={.items[*].message}")

    eventually(complaints)
    assert complaints() == 'Error: secret "later" not found'
    assert stand_in.status("waits")["applicationState"] == {"state": "SUBMITTED"}
    stand_in.kubectl("create", "secret", "generic", "later", "--from-literal=k=there")
    stand_in.wait("waits", "COMPLETED")
    assert "GOT there" in stand_in.log("waits")


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (
            "mounts",
            {"driver": {"configMaps": [{"name": "policy", "path": "/etc/policy"}]}},
            "not possible without containers: spec.driver.configMaps mounts policy;",
        ),
        (
            "nobody",
            {"driver": {"serviceAccount": "nobody"}},
            'serviceaccount "nobody" not found',
        ),
        (
            "two-minds",
            {
                "driver": {"env": [{"name": "A", "value": "1"}]},
                "executor": {"env": [{"name": "A", "value": "2"}]},
            },
            "driver container did not start: driver and executors have different values of A,",
        ),
    ],
)
def test_unsupported_application_fails_with_its_reason(
    stand_in: StandIn, name: str, fields: dict[str, object], message: str
) -> None:
    stand_in.create(name, "raise SystemExit('must not run')", **fields)
    failed = stand_in.wait(name, "FAILED")
    assert message in failed["applicationState"]["errorMessage"]
    assert stand_in.log(name) == ""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"driver": {"corez": 1}}, 'unknown field "spec.driver.corez"'),
        ({"mode": "local"}, "spec.mode: Unsupported value"),
        ({"driver": {"cores": "1"}}, "spec.driver.cores: Invalid value"),
        ({"sparkConf": {"spark.master": "local"}}, "cannot be set in sparkConf"),
    ],
)
def test_fields_unknown_to_the_real_api_are_refused(
    stand_in: StandIn, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(SandboxError) as raised:
        stand_in.apply("never", mainApplicationFile="local:///job.py", **fields)
    assert message in str(raised.value)


def started(stand_in: StandIn, name: str, text: str = "STARTED") -> int:
    """Wait until the driver wrote *text*, and return its first process."""
    eventually(lambda: text in stand_in.log(name))
    return stand_in.leader(name)


def test_deleting_the_object_ends_the_driver_and_its_workers(stand_in: StandIn) -> None:
    stand_in.create("deleted", WORKING)
    leader = started(stand_in, "deleted", "WORKS")
    assert len(session(leader)) >= 3
    # In the foreground the object stays, marked, until whatever it owns is gone.
    stand_in.kubectl("delete", "sparkapp", "deleted", "--cascade=foreground")
    eventually(lambda: not session(leader))
    eventually(lambda: not stand_in.files("deleted").exists())
    assert "deleted is FAIL" not in stand_in.processes.log("spark-operator").read_text()


def test_suspending_stops_the_driver_and_resuming_starts_another(stand_in: StandIn) -> None:
    stand_in.create("paused", STAYING, suspend=True)
    stand_in.wait("paused", "SUSPENDED")
    assert stand_in.log("paused") == ""
    stand_in.patch("paused", suspend=False)
    leader = started(stand_in, "paused")
    stand_in.patch("paused", suspend=True)
    suspended = stand_in.wait("paused", "SUSPENDED")
    assert "sparkApplicationId" not in suspended
    assert not session(leader)
    stand_in.kubectl("delete", "sparkapp", "paused")


def test_changed_spec_runs_the_application_again(stand_in: StandIn) -> None:
    stand_in.create("changed", STAYING, arguments=["one"])
    leader = started(stand_in, "changed", "STARTED one")
    stand_in.patch("changed", timeToLiveSeconds=3600)
    stand_in.patch("changed", arguments=["two"])
    started(stand_in, "changed", "STARTED two")
    assert not session(leader)
    assert stand_in.status("changed")["executionAttempts"] == 1
    stand_in.kubectl("delete", "sparkapp", "changed")


def test_recreated_object_runs_after_the_old_driver_has_ended(
    stand_in: StandIn,
) -> None:
    stand_in.create("again", STAYING, arguments=["one"])
    leader = started(stand_in, "again", "STARTED one")
    stand_in.kubectl("delete", "sparkapp", "again")
    stand_in.create("again", STAYING, arguments=["two"])
    started(stand_in, "again", "STARTED two")
    assert not session(leader)
    stand_in.kubectl("delete", "sparkapp", "again")


def test_driver_lost_with_the_stand_in_fails_and_runs_once(
    stand_in: StandIn,
) -> None:
    stand_in.create("orphan", STAYING)
    leader = started(stand_in, "orphan")
    stand_in.kill()
    stand_in.start()
    failed = stand_in.wait("orphan", "FAILED")
    assert failed["applicationState"]["errorMessage"] == "driver pod not found"
    assert failed["submissionAttempts"] == 1
    assert not session(leader)


def test_drivers_end_with_the_stand_in(stand_in: StandIn) -> None:
    stand_in.create("last", STAYING)
    leader = started(stand_in, "last")
    stand_in.stop()
    assert not session(leader)
    assert not stand_in.files("last").exists()
    stand_in.start()
    stand_in.wait("last", "FAILED")
