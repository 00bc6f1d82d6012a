from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox.spark_operator import command
from sandbox.spark_operator.errors import RefusedError
from sandbox.spark_operator.objects import Application


def test_the_command_line_holds_the_program_and_its_arguments_and_no_property(
    application: Callable[..., Application],
) -> None:
    app = application(arguments=["--run", "a b"], sparkConf={"spark.x": "y"})
    assert command.arguments(app, Path("/w/p"), {}) == [
        *("--properties-file", "/w/p", "local:///opt/job.py", "--run", "a b")
    ]


def test_a_program_on_the_jvm_names_its_class(application: Callable[..., Application]) -> None:
    app = application(type="Scala", mainClass="a.B")
    assert command.arguments(app, Path("/w/p"), {})[2:4] == ["--class", "a.B"]


def test_arguments_name_variables_as_a_kubelet_reads_them(
    application: Callable[..., Application],
) -> None:
    """`$(NAME)` is the driver's variable, `$$` a plain dollar; a name that is unknown stays."""
    app = application(arguments=["$(A)-$(B)", "$$(A)", "$A ${A}"])
    given = command.arguments(app, Path("/w/p"), {"A": "1"})
    assert given[-3:] == ["1-$(B)", "$(A)", "$A ${A}"]


def test_fields_of_the_spec_become_properties(application: Callable[..., Application]) -> None:
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
def test_local_mode_has_the_threads_of_all_executors_and_retries_tasks_as_a_cluster_does(
    application: Callable[..., Application], fields: dict[str, object], master: str
) -> None:
    assert command.master(application(**fields)) == master


def test_property_files_are_escaped_as_java_reads_them() -> None:
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
def test_what_cannot_be_done_without_containers_is_refused(
    application: Callable[..., Application], fields: dict[str, object], message: str
) -> None:
    with pytest.raises(RefusedError) as raised:
        command.check(application(**fields))
    assert message in str(raised.value)


def test_what_only_places_or_packs_pods_is_passed_over(
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
