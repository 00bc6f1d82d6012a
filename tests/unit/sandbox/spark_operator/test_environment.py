"""The command, environment, mounts and pod template that a SparkApplication asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandbox.spark_operator import command, mounts, template
from sandbox.spark_operator.environment import Data, Source, references, resolve
from sandbox.spark_operator.errors import MissingConfigError, RefusedError
from sandbox.spark_operator.objects import Application

SECRET = Source("secret", "pulsar")
CONFIG = Source("configmap", "settings")
DATA = Data({SECRET: {"token": "s3cret"}, CONFIG: {"LEVEL": "info", "A.B": "dotted"}})

TOKEN_REF = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "pulsar", "key": "token"}}}


def test_all_references_to_secrets_and_config_maps_are_listed(
    application: Callable[..., Application],
) -> None:
    app = application(
        driver={
            "env": [
                TOKEN_REF,
                {"name": "L", "valueFrom": {"configMapKeyRef": {"name": "one", "key": "k"}}},
            ],
            "envFrom": [{"configMapRef": {"name": "settings"}}, {"secretRef": {"name": "two"}}],
        },
        executor={"envSecretKeyRefs": {"T": {"name": "three", "key": "k"}}},
    )
    assert references(app) == {
        SECRET,
        CONFIG,
        Source("configmap", "one"),
        Source("secret", "two"),
        Source("secret", "three"),
    }


def test_variables_come_from_spec_secrets_and_config_maps(
    application: Callable[..., Application],
) -> None:
    app = application(
        driver={
            "env": [{"name": "PLAIN", "value": "v"}, {"name": "EMPTY"}, TOKEN_REF],
            "envVars": {"OLD": "way"},
            "envSecretKeyRefs": {"OLD_TOKEN": {"name": "pulsar", "key": "token"}},
            "envFrom": [{"prefix": "S_", "configMapRef": {"name": "settings"}}],
        }
    )
    assert resolve(app, DATA) == {
        "PLAIN": "v",
        "EMPTY": "",
        "TOKEN": "s3cret",
        "OLD": "way",
        "OLD_TOKEN": "s3cret",
        "S_LEVEL": "info",
        "S_A.B": "dotted",
    }


def test_explicit_variable_has_priority(application: Callable[..., Application]) -> None:
    app = application(
        driver={
            "envFrom": [{"configMapRef": {"name": "settings"}}],
            "envVars": {"LEVEL": "from envVars", "TWICE": "from envVars"},
            "env": [{"name": "TWICE", "value": "first"}, {"name": "TWICE", "value": "last"}],
        }
    )
    resolved = resolve(app, DATA)
    assert (resolved["LEVEL"], resolved["TWICE"]) == ("from envVars", "last")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("$(FIRST)/x", "one/x"),
        ("$$(FIRST)", "$(FIRST)"),
        ("$(UNKNOWN)", "$(UNKNOWN)"),
        ("$(LATER)", "$(LATER)"),
        ("$FIRST $", "$FIRST $"),
        ("$(FIRST", "$(FIRST"),
    ],
)
def test_variable_may_refer_to_earlier_variables(
    application: Callable[..., Application], written: str, expected: str
) -> None:
    app = application(
        driver={
            "env": [
                {"name": "FIRST", "value": "one"},
                {"name": "IT", "value": written},
                {"name": "LATER", "value": "two"},
            ]
        }
    )
    assert resolve(app, DATA)["IT"] == expected


def test_value_of_secret_is_not_expanded(application: Callable[..., Application]) -> None:
    app = application(driver={"env": [{"name": "A", "value": "1"}, TOKEN_REF]})
    data = Data({SECRET: {"token": "$(A)"}})
    assert resolve(app, data) == {"A": "1", "TOKEN": "$(A)"}


@pytest.mark.parametrize(
    ("pod", "message"),
    [
        (
            {"env": [{"name": "T", "valueFrom": {"secretKeyRef": {"name": "no", "key": "k"}}}]},
            'secret "no" not found',
        ),
        (
            {"env": [{"name": "T", "valueFrom": {"secretKeyRef": {"name": "pulsar", "key": "k"}}}]},
            'couldn\'t find key k in secret "pulsar"',
        ),
        ({"envFrom": [{"configMapRef": {"name": "no"}}]}, 'configmap "no" not found'),
        ({"envSecretKeyRefs": {"T": {"name": "no", "key": "k"}}}, 'secret "no" not found'),
    ],
)
def test_missing_reference_is_named(
    application: Callable[..., Application], pod: dict[str, object], message: str
) -> None:
    with pytest.raises(MissingConfigError) as raised:
        resolve(application(driver=pod), DATA)
    assert str(raised.value) == message


def test_optional_reference_may_be_missing(application: Callable[..., Application]) -> None:
    ref = {"name": "no", "key": "k", "optional": True}
    app = application(
        driver={
            "env": [{"name": "T", "valueFrom": {"secretKeyRef": ref}}],
            "envFrom": [{"secretRef": {"name": "no", "optional": True}}],
        }
    )
    assert resolve(app, DATA) == {}


def test_executors_share_environment_of_driver(
    application: Callable[..., Application],
) -> None:
    app = application(
        driver={"env": [{"name": "BOTH", "value": "v"}, {"name": "D", "value": "d"}]},
        executor={"env": [{"name": "BOTH", "value": "v"}, {"name": "E", "value": "e"}]},
    )
    assert resolve(app, DATA) == {"BOTH": "v", "D": "d", "E": "e"}


def test_contradicting_variables_are_refused_without_values(
    application: Callable[..., Application],
) -> None:
    app = application(
        driver={"env": [TOKEN_REF]}, executor={"env": [{"name": "TOKEN", "value": "other"}]}
    )
    with pytest.raises(RefusedError, match="different values of TOKEN") as raised:
        resolve(app, DATA)
    assert "s3cret" not in str(raised.value)
    assert "other" not in str(raised.value)


def test_data_representation_hides_values() -> None:
    assert "s3cret" not in repr(DATA)


def test_command_has_program_and_arguments(
    application: Callable[..., Application],
) -> None:
    app = application(arguments=["--run", "a b"], sparkConf={"spark.x": "y"})
    assert command.arguments(app, Path("/w/p"), {}) == [
        *("--properties-file", "/w/p", "local:///opt/job.py", "--run", "a b")
    ]


def test_jvm_program_names_its_class(application: Callable[..., Application]) -> None:
    app = application(type="Scala", mainClass="a.B")
    assert command.arguments(app, Path("/w/p"), {})[2:4] == ["--class", "a.B"]


def test_arguments_expand_variables_as_a_kubelet(
    application: Callable[..., Application],
) -> None:
    """`$(NAME)` is the driver's variable, `$$` a plain dollar; a name that is unknown stays."""
    app = application(arguments=["$(A)-$(B)", "$$(A)", "$A ${A}"])
    arguments = command.arguments(app, Path("/w/p"), {"A": "1"})
    assert arguments[-3:] == ["1-$(B)", "$(A)", "$A ${A}"]


def test_spec_fields_become_properties(application: Callable[..., Application]) -> None:
    app = application(
        sparkConf={"spark.sql.shuffle.partitions": "2", "spark.driver.memory": "9g"},
        hadoopConf={"fs.a": "b"},
        deps={"packages": ["a:b:1", "c:d:2"], "pyFiles": ["local:///opt/x.zip"]},
        driver={"memory": "512m", "cores": 2},
        executor={"memory": "2g"},
    )
    conf = command.properties(app, "spark-1")
    assert conf["spark.driver.memory"] == "512m"
    assert {
        "spark.sql.shuffle.partitions": "2",
        "spark.hadoop.fs.a": "b",
        "spark.jars.packages": "a:b:1,c:d:2",
        "spark.submit.pyFiles": "local:///opt/x.zip",
        "spark.driver.cores": "2",
        "spark.executor.memory": "2g",
        "spark.app.name": "job",
        "spark.app.id": "spark-1",
    }.items() <= conf.items()


@pytest.mark.parametrize(
    ("fields", "master"),
    [
        ({}, "local[1,4]"),
        ({"executor": {"instances": 3, "cores": 2}}, "local[6,4]"),
        ({"sparkConf": {"spark.executor.instances": "2"}}, "local[2,4]"),
        ({"sparkConf": {"spark.task.maxFailures": "1"}}, "local[1,1]"),
        ({"dynamicAllocation": {"enabled": True, "minExecutors": 5}}, "local[5,4]"),
        ({"dynamicAllocation": {"minExecutors": 5}}, "local[1,4]"),
    ],
)
def test_local_master_has_threads_of_all_executors(
    application: Callable[..., Application], fields: dict[str, object], master: str
) -> None:
    assert command.master(application(**fields)) == master


def test_property_files_are_escaped_for_java() -> None:
    written = command.properties_file({"a b": "1=2", "c": "back\\slash\nline # no comment"})
    assert written == "a\\ b=1\\=2\nc=back\\\\slash\\nline\\ \\#\\ no\\ comment\n"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "client"}, "spec.mode is client"),
        ({"pythonVersion": "2"}, "spec.pythonVersion"),
        (
            {"driver": {"secrets": [{"name": "s", "path": "/s", "secretType": "Generic"}]}},
            "spec.driver.secrets mounts s; pass values by env or envFrom",
        ),
        ({"executor": {"volumeMounts": [{"name": "v", "mountPath": "/v"}]}}, "mounts v"),
        (
            {
                "volumes": [{"name": "v", "emptyDir": {}}],
                "driver": {"volumeMounts": [{"name": "v", "mountPath": "/v"}]},
            },
            "mounts v",
        ),
        ({"driver": {"configMaps": [{"name": "c", "path": "/c"}]}}, "mounts c"),
        ({"executor": {"serviceAccount": "other"}}, "spec.executor.serviceAccount is other"),
        ({"sparkConf": {"spark.kubernetes.driverEnv.A": "b"}}, "spark.kubernetes.driverEnv.A"),
        ({"sparkConf": {"spark.kubernetes.namespace": "else"}}, "it must be shop"),
    ],
)
def test_unsupported_fields_without_containers_are_refused(
    application: Callable[..., Application], fields: dict[str, object], message: str
) -> None:
    with pytest.raises(RefusedError) as raised:
        command.check(application(**fields))
    assert message in str(raised.value)


def test_placement_fields_are_ignored(
    application: Callable[..., Application],
) -> None:
    pod = {
        "labels": {"a": "b"},
        "securityContext": {"runAsNonRoot": True},
        "coreRequest": "100m",
        "serviceAccount": "runner",
    }
    app = application(
        image="registry/image:1",
        volumes=[{"name": "unused", "emptyDir": {}}],
        sparkConf={"spark.kubernetes.namespace": "shop"},
        driver=pod,
        executor={**pod, "deleteOnTermination": True},
    )
    command.check(app)
    assert "registry" not in command.properties_file(command.properties(app, "spark-1"))


MakeApplication = Callable[..., Application]
MOUNTED_SECRET, MOUNTED_CONFIG = Source("secret", "pulsar"), Source("configmap", "authority")
ACCESS_VOLUME = {
    "name": "access",
    "projected": {
        "sources": [
            {"secret": {"name": "pulsar", "items": [{"key": "token", "path": "own/token"}]}},
            {"configMap": {"name": "authority", "items": [{"key": "ca", "path": "ca.crt"}]}},
        ]
    },
}
MOUNTING = {"volumeMounts": [{"name": "access", "mountPath": "/etc/access", "readOnly": True}]}


@pytest.fixture
def mounting(application: MakeApplication) -> Application:
    """An application whose pods mount keys of a Secret and a ConfigMap."""
    return application(volumes=[ACCESS_VOLUME], driver=MOUNTING, executor=MOUNTING)


def test_mounted_keys_become_files(mounting: Application) -> None:
    command.check(mounting)
    assert mounts.references(mounting) == {MOUNTED_SECRET, MOUNTED_CONFIG}
    data = Data({MOUNTED_SECRET: {"token": "s3cret", "other": "x"}, MOUNTED_CONFIG: {"ca": "PEM"}})
    assert mounts.files(mounting, data) == {
        "/etc/access/own/token": "s3cret",
        "/etc/access/ca.crt": "PEM",
    }


def test_missing_mounted_key_is_waited_for(mounting: Application) -> None:
    for data in (Data({}), Data({MOUNTED_SECRET: {}, MOUNTED_CONFIG: {"ca": "PEM"}})):
        with pytest.raises(MissingConfigError, match='"pulsar"'):
            mounts.files(mounting, data)


def test_variables_point_to_mounted_files(mounting: Application) -> None:
    variables = {"ACCESS": '{"folder": "/etc/access"}', "PLAIN": "/etc"}
    assert mounts.environment(variables, mounting, Path("/pod")) == {
        "ACCESS": '{"folder": "/pod/etc/access"}',
        "PLAIN": "/etc",
    }


API = {"version": "sparkoperator.k8s.io/v1beta2", "label": "sparkoperator.k8s.io/app-name"}
FILES = {"driver": "/f/driver.json", "executor": "/f/executor.json"}
TOKEN_MOUNT = {"name": "token", "mountPath": "/etc/token", "readOnly": True}
TOKEN_VOLUME = {"name": "token", "projected": {"sources": [{"secret": {"name": "role"}}]}}


def test_spec_fields_become_pod_properties(
    application: Callable[..., Application],
) -> None:
    app = application(
        image="spark:1",
        driver={"serviceAccount": "jobs", "coreRequest": "100m", "memory": "512m"},
        executor={"image": "spark:2", "instances": 3, "coreLimit": "2"},
    )
    assert {
        "spark.submit.deployMode": "cluster",
        "spark.kubernetes.namespace": "shop",
        "spark.kubernetes.driver.pod.name": "job-driver",
        "spark.kubernetes.authenticate.driver.serviceAccountName": "jobs",
        "spark.kubernetes.driver.request.cores": "100m",
        "spark.kubernetes.driver.container.image": "spark:1",
        "spark.kubernetes.driver.podTemplateFile": "/f/driver.json",
        "spark.kubernetes.executor.container.image": "spark:2",
        "spark.kubernetes.executor.limit.cores": "2",
        "spark.executor.instances": "3",
        "spark.driver.memory": "512m",
    }.items() <= template.properties(app, FILES).items()


@pytest.mark.parametrize("role", template.ROLES)
def test_fields_without_property_are_in_the_template(
    application: Callable[..., Application], role: str
) -> None:
    pod: dict[str, Any] = {
        "env": [{"name": "A", "value": "1"}],
        "envSecretKeyRefs": {"B": {"name": "role", "key": "token"}},
        "volumeMounts": [TOKEN_MOUNT],
        "securityContext": {"runAsNonRoot": True},
        "podSecurityContext": {"fsGroup": 185},
    }
    app = application(**{role: pod}, volumes=[TOKEN_VOLUME, {"name": "unused", "emptyDir": {}}])
    made = template.template(app, role, **API)
    (container,) = made["spec"]["containers"]
    assert [variable["name"] for variable in container["env"]] == ["B", "A"]
    assert container["volumeMounts"] == [TOKEN_MOUNT]
    assert container["securityContext"] == {"runAsNonRoot": True}
    assert made["spec"]["volumes"] == [TOKEN_VOLUME]
    assert made["spec"]["securityContext"] == {"fsGroup": 185}


def test_driver_is_owned_by_its_application(application: Callable[..., Application]) -> None:
    """The driver owns the pods of Spark: one deletion takes all."""
    driver, executor = (
        template.template(application(), role, **API)["metadata"] for role in template.ROLES
    )
    (owner,) = driver["ownerReferences"]
    assert (owner["apiVersion"], owner["name"], owner["uid"]) == (API["version"], "job", "1")
    assert "ownerReferences" not in executor
    assert driver["labels"] == executor["labels"] == {API["label"]: "job"}


def test_unknown_field_is_refused_by_name(application: Callable[..., Application]) -> None:
    secrets = [{"name": "role", "path": "/etc", "secretType": "Generic"}]
    with pytest.raises(RefusedError, match=r"spec\.driver\.secrets"):
        template.check(application(driver={"secrets": secrets}))
