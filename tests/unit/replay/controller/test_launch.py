"""A Replay becomes one SparkApplication that holds no secret."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib import metadata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.api.fields import SecretKeyRef
from redrive.errors import InvalidSpecError
from redrive.kube.context import Settings
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.replay.controller import launch
from redrive.replay.spec import ReplayJob

SETTINGS = Settings(
    "here", (), "registry/redrive:1", "local:///opt/redrive/replay.py", "redrive-replay"
)
ENVIRONMENT = launch.environment(
    SecretKeyRef(name="pulsar-replayer", key="token"), ("broker-*.pulsar", "other")
)
POLICY = Policy(TopicName("shop", "prod", "orders"), "fulfilment", name="shop/orders", generation=3)
JOB = ReplayJob(
    "shop", "after-fix", "uid-1", POLICY, "pulsar://pulsar:6650", "http://pulsar:8080", "key = 'ü'"
)


def replay(name: str = "after-fix", uid: str = "uid-1") -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "shop", "uid": uid}}


@given(st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", fullmatch=True), st.uuids())
def test_every_replay_has_a_name_that_spark_can_build_on(name: str, uid: object) -> None:
    made = launch.name_of(replay(name, str(uid)))
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", made)
    assert len(made) <= 45
    assert made == launch.name_of(replay(name, str(uid)))


def test_a_replay_made_anew_gets_another_application() -> None:
    assert launch.name_of(replay(uid="uid-1")) != launch.name_of(replay(uid="uid-2"))


def test_the_application_is_owned_by_the_replay() -> None:
    (owner,) = launch.application(replay(), JOB, ENVIRONMENT, SETTINGS)["metadata"][
        "ownerReferences"
    ]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Replay", "after-fix", "uid-1")
    assert owner["controller"] is True


def test_driver_and_executors_get_the_token_of_the_replay_role_by_reference() -> None:
    spec = launch.application(replay(), JOB, ENVIRONMENT, SETTINGS)["spec"]
    reference = {"secretKeyRef": {"name": "pulsar-replayer", "key": "token"}}
    expected = [
        {"name": "REDRIVE_PULSAR_TOKEN", "valueFrom": reference},
        {"name": "REDRIVE_PULSAR_REDIRECT_HOSTS", "value": "broker-*.pulsar,other"},
    ]
    assert spec["driver"]["env"] == spec["executor"]["env"] == expected
    assert "oken" not in json.dumps(spec["arguments"] + list(spec["sparkConf"]))


def test_the_job_runs_as_the_operator_was_told() -> None:
    spec = launch.application(replay(), JOB, ENVIRONMENT, SETTINGS)["spec"]
    assert spec["image"] == "registry/redrive:1"
    assert spec["mainApplicationFile"] == "local:///opt/redrive/replay.py"
    assert spec["driver"]["serviceAccount"] == "redrive-replay"
    assert spec["sparkConf"]["spark.speculation"] == "false"


def test_the_version_asked_for_is_the_one_that_the_tests_run() -> None:
    spec = launch.application(replay(), JOB, ENVIRONMENT, SETTINGS)["spec"]
    assert spec["sparkVersion"] == metadata.version("pyspark")


def test_the_argument_tells_the_whole_job() -> None:
    (argument,) = launch.application(replay(), JOB, ENVIRONMENT, SETTINGS)["spec"]["arguments"]
    assert ReplayJob.decode(argument) == JOB


def test_a_selection_cannot_have_a_kubelet_put_the_token_into_the_arguments() -> None:
    """`$(NAME)` in a container's arguments stands for a variable, and the token is in one."""
    job = replace(JOB, where="key > '$(REDRIVE_PULSAR_TOKEN)'")
    (argument,) = launch.application(replay(), job, ENVIRONMENT, SETTINGS)["spec"]["arguments"]
    assert "$" not in argument
    assert ReplayJob.decode(argument) == job


@pytest.mark.parametrize("wrong", ["", "{}", "[]", "null", '{"namespace": 1}'])
def test_any_other_argument_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidSpecError, match="the JSON document that the operator writes"):
        ReplayJob.decode(wrong)


def test_pods_pass_the_restricted_pod_security_unless_the_operator_was_started_otherwise() -> None:
    spec = launch.application(replay(), JOB, ENVIRONMENT, SETTINGS)["spec"]
    for pod in (spec["driver"], spec["executor"]):
        context = pod["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["runAsNonRoot"] is True
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    settings = replace(SETTINGS, replay_pod={"coreRequest": "100m", "memory": "2g"})
    changed = launch.application(replay(), JOB, ENVIRONMENT, settings)["spec"]
    for pod in (changed["driver"], changed["executor"]):
        assert (pod["coreRequest"], pod["memory"]) == ("100m", "2g")
        assert pod["securityContext"] == spec["driver"]["securityContext"]
        assert pod["env"] == spec["driver"]["env"]
