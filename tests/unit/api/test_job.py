"""Job templates: fields that redrive sets, sizes, security context, references."""

from __future__ import annotations

from typing import Any

import pytest

from redrive.api.job import (
    RESTRICTED,
    ConnectionJobs,
    JobPod,
    JobTemplate,
    Role,
    container_name,
    pod_of,
    references,
)
from redrive.api.model import parse
from redrive.errors import InvalidSpecError


def template(**fields: object) -> JobTemplate:
    return parse(JobTemplate, fields, "large")


def with_container(**container: object) -> dict[str, Any]:
    """Return a PodTemplateSpec."""
    return {"spec": {"containers": [container]}}


def pod(**container: object) -> JobPod:
    """Return the executors of a template."""
    return pod_of(template(executor=with_container(**container)), Role.EXECUTOR)


def test_grace_period_of_executors_becomes_a_property() -> None:
    """Spark overwrites that field of executors, and keeps that of the driver."""
    name = "spark.kubernetes.executor.terminationGracePeriodSeconds"
    spec = {"spec": {"terminationGracePeriodSeconds": 0}}
    pods = template(driver=spec, executor=spec)
    assert pod_of(pods, Role.EXECUTOR).properties(Role.EXECUTOR)[name] == "0s"
    assert not any("Grace" in p for p in pod_of(pods, Role.DRIVER).properties(Role.DRIVER))
    assert name not in pod().properties(Role.EXECUTOR)


def test_empty_template_has_restricted_pods() -> None:
    for role in Role:
        spec = pod_of(template(), role).template["spec"]
        assert spec == {
            "automountServiceAccountToken": role is not Role.EXECUTOR,
            "containers": [{"name": container_name(role), "securityContext": RESTRICTED}],
        }


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        *(
            ({"driver": {"spec": {name: "x"}}}, f"driver.spec.{name}")
            for name in ("serviceAccountName", "serviceAccount", "restartPolicy")
        ),
        (
            {"executor": {"spec": {"automountServiceAccountToken": True}}},
            "executor.spec.automountServiceAccountToken",
        ),
        ({"driver": {"metadata": {"name": "x"}}}, "driver.metadata.name"),
        ({"driver": {"metadata": {"labels": {"redrive.io/replay": "x"}}}}, "redrive.io/replay"),
        (
            {"metadata": {"labels": {"app.kubernetes.io/managed-by": "x"}}},
            "app.kubernetes.io/managed-by",
        ),
        ({"driver": {"kind": "Pod"}}, "driver.kind"),
        ({"driver": with_container(command=["sh"])}, "command"),
        ({"executor": with_container(args=["x"])}, "args"),
        ({"executor": with_container(image="x")}, "image"),
        (
            {"driver": with_container(env=[{"name": "REDRIVE_PULSAR_ACCESS", "value": "{}"}])},
            "REDRIVE_PULSAR_ACCESS",
        ),
        (
            {"driver": with_container(volumeMounts=[{"name": "a", "mountPath": "/etc/redrive/"}])},
            "mountPath /etc/redrive",
        ),
        ({"driver": {"spec": {"volumes": [{"name": "redrive-access"}]}}}, "redrive-access"),
    ],
    ids=str,
)
def test_template_with_field_of_redrive_is_invalid(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidSpecError, match="must not set fields that redrive sets") as error:
        template(**fields)
    assert field in str(error.value)
    assert str(error.value).startswith("large: ")


@pytest.mark.parametrize(
    "name",
    [
        "spark.dynamicAllocation.maxExecutors",
        "spark.driver.memory",
        "spark.executor.cores",
        "spark.executor.instances",
        "spark.executor.memoryOverheadFactor",
        "spark.executorEnv.REDRIVE_PULSAR_ACCESS",
        "spark.kubernetes.authenticate.driver.serviceAccountName",
        "spark.kubernetes.container.image",
        "spark.kubernetes.container.image.pullPolicy",
        "spark.kubernetes.driver.container.image",
        "spark.kubernetes.driver.label.app",
        "spark.kubernetes.driver.podTemplateFile",
        "spark.kubernetes.driver.request.cores",
        "spark.kubernetes.driver.secrets.other",
        "spark.kubernetes.driverEnv.A",
        "spark.kubernetes.executor.disableConfigMap",
        "spark.kubernetes.executor.podNamePrefix",
        "spark.kubernetes.executor.terminationGracePeriodSeconds",
        "spark.kubernetes.executor.volumes.hostPath.a.mount.path",
        "spark.kubernetes.namespace",
        "spark.master",
        "spark.speculation",
        "hive.a",
    ],
)
def test_spark_property_of_redrive_or_pods_is_invalid(name: str) -> None:
    with pytest.raises(InvalidSpecError, match="got '" + name.replace(".", "[.]")):
        template(sparkConf={"spark.task.maxFailures": "8", name: "x"})


def test_other_spark_properties_are_kept() -> None:
    conf = {"spark.task.maxFailures": "8", "spark.dynamicAllocation.enabled": "true"}
    assert template(sparkConf=conf).spark_conf == conf


def test_container_of_job_is_named_redrive_or_first() -> None:
    sidecar, own = {"name": "proxy", "image": "p:1"}, {"name": "redrive", "tty": True}
    for containers in ([sidecar, own], [own, sidecar], [{**own, "name": "job"}, sidecar]):
        made = pod_of(template(driver={"spec": {"containers": containers}}), Role.DRIVER)
        first, second = made.template["spec"]["containers"]
        assert (first["name"], first["tty"]) == ("spark-kubernetes-driver", True)
        assert (second["name"], second["image"]) == ("proxy", "p:1")
        assert second["securityContext"] == RESTRICTED


def test_security_context_keeps_fields_of_the_template() -> None:
    spec = {
        "securityContext": {"fsGroup": 1000, "seccompProfile": {"type": "Unconfined"}},
        "containers": [{"name": "a", "securityContext": {"runAsUser": 185, "runAsNonRoot": False}}],
        "initContainers": [{"name": "b", "image": "i"}],
    }
    made = pod_of(template(executor={"spec": spec}), Role.EXECUTOR).template["spec"]
    rest = {name: RESTRICTED[name] for name in ("allowPrivilegeEscalation", "capabilities")}
    own = {**rest, "runAsUser": 185, "runAsNonRoot": False}
    assert made["securityContext"] == spec["securityContext"]
    assert made["containers"][0]["securityContext"] == own
    assert made["initContainers"][0]["securityContext"] == {**rest, "runAsNonRoot": True}


@pytest.mark.parametrize(
    ("resources", "size"),
    [
        ({}, (1, "1024m", "410m", "1", "")),
        ({"requests": {"cpu": "100m", "memory": "896Mi"}}, (1, "512m", "384m", "100m", "")),
        ({"requests": {"cpu": 2, "memory": "2Gi"}}, (2, "1462m", "586m", "2", "")),
        ({"limits": {"cpu": "1500m", "memory": "4G"}}, (2, "2724m", "1090m", "1500m", "1500m")),
        (
            {"requests": {"cpu": "0.5", "memory": "1Gi"}, "limits": {"cpu": 3, "memory": "1024Mi"}},
            (3, "640m", "384m", "0.5", "3"),
        ),
        ({"requests": {"memory": "2e9"}}, (1, "1362m", "545m", "1", "")),
    ],
)
def test_resources_become_spark_sizes(resources: dict[str, Any], size: tuple[Any, ...]) -> None:
    made = pod(resources=resources)
    cores, memory, overhead, core_request, core_limit = size
    sizes = (made.cores, made.memory, made.memory_overhead, made.core_request, made.core_limit)
    assert sizes == size
    assert "resources" not in made.template["spec"]["containers"][0]
    limit = {"spark.kubernetes.executor.limit.cores": core_limit} if core_limit else {}
    assert made.properties(Role.EXECUTOR) == limit | {
        "spark.executor.cores": str(cores),
        "spark.executor.memory": memory,
        "spark.executor.memoryOverhead": overhead,
        "spark.kubernetes.executor.request.cores": core_request,
        "spark.kubernetes.executor.podTemplateContainerName": "spark-kubernetes-executor",
    }


def test_sized_pod_has_memory_limit_and_cpu_request() -> None:
    sizes = {"requests": {"cpu": "500m", "ephemeral-storage": "1Gi"}, "limits": {"memory": "2Gi"}}
    made = pod_of(template(job=with_container(resources=sizes)), Role.JOB)
    (own,) = made.sized()["spec"]["containers"]
    assert own["resources"] == {
        "requests": {"cpu": "500m", "ephemeral-storage": "1Gi", "memory": "2048Mi"},
        "limits": {"memory": "2048Mi"},
    }
    assert (made.cores, made.mebibytes) == (1, 2_048)


def test_other_resources_stay_in_the_template() -> None:
    sizes = {"requests": {"cpu": 1, "ephemeral-storage": "1Gi"}, "limits": {"memory": "2Gi"}}
    (own,) = pod(resources=sizes).template["spec"]["containers"]
    assert own["resources"] == {"requests": {"ephemeral-storage": "1Gi"}}


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ({"requests": {"memory": "800Mi"}}, "at least 896Mi; got '800Mi'"),
        (
            {"requests": {"memory": "1Gi"}, "limits": {"memory": "2Gi"}},
            "the same in requests and limits.*got '1Gi and 2Gi'",
        ),
        ({"requests": {"cpu": "some"}}, "`cpu` of executor must be a positive amount.*got 'some'"),
        ({"requests": {"cpu": 0}}, "must be a positive amount.*got '0'"),
        ({"requests": {"cpu": 2}, "limits": {"cpu": 1}}, "limit .* at least its request"),
        ({"requests": ["cpu"]}, "`requests` of executor must be an object; got 'list'"),
    ],
)
def test_invalid_size_is_refused(resources: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSpecError, match=message):
        pod(resources=resources)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"executors": 5}, "`executors` must be at most `maxExecutors`; got '5 and 4'"),
        ({"executors": 0}, "large.executors: "),
        ({"image": "a b"}, "large.image: .*got 'a b'"),
        ({"job": {}, "engine": "Job"}, "large.engine: is not a known field"),
        ({"job": {"spec": {"restartPolicy": "Never"}}}, "job.spec.restartPolicy"),
        ({"driver": {"spec": {"containers": {}}, "metadata": []}}, ""),
        ({"driver": {"spec": {"containers": ["a"]}}}, "`containers` of driver must be a list"),
        (
            {
                "driver": with_container(imagePullPolicy="Always"),
                "executor": with_container(imagePullPolicy="Never"),
            },
            "`imagePullPolicy` must be the same in driver and executor.*got 'Always, Never'",
        ),
    ],
    ids=str,
)
def test_invalid_template_is_refused_with_its_name(fields: dict[str, Any], message: str) -> None:
    if not message:
        template(**fields)  # empty lists and objects mean nothing
        return
    with pytest.raises(InvalidSpecError, match=message):
        template(**fields)


def test_template_is_for_namespaces_by_name_or_label() -> None:
    assert template().is_for("shop", {})
    named = template(namespaces={"names": ["shop"]})
    assert (named.is_for("shop", {}), named.is_for("other", {})) == (True, False)
    labelled = template(namespaces={"selector": {"matchLabels": {"size": "large"}}})
    assert labelled.selects_namespaces
    assert labelled.is_for("shop", {"size": "large"})
    assert not labelled.is_for("shop", {})


def test_default_template_of_connection_is_first_of_its_list() -> None:
    assert ConnectionJobs().default == "default"
    assert ConnectionJobs(templates=("large", "default")).default == "large"
    both = ConnectionJobs(templates=("large", "small"), default_template="small")
    assert both.default == "small"
    assert (both.permits("large"), both.permits("default")) == (True, False)
    assert ConnectionJobs().permits("any")


def test_references_name_all_objects_that_are_not_optional() -> None:
    own = {
        "env": [
            {"name": "A", "valueFrom": {"secretKeyRef": {"name": "s1", "key": "k"}}},
            {"name": "B", "valueFrom": {"configMapKeyRef": {"name": "c1", "key": "k"}}},
            {"name": "C", "valueFrom": {"secretKeyRef": {"name": "s", "optional": True}}},
            {"name": "D", "value": "d"},
        ],
        "envFrom": [{"secretRef": {"name": "s2"}}, {"configMapRef": {"name": "c2"}}],
    }
    spec = {
        "imagePullSecrets": [{"name": "s3"}],
        "volumes": [
            {"name": "a", "secret": {"secretName": "s4"}},
            {"name": "b", "configMap": {"name": "c3"}},
            {"name": "c", "projected": {"sources": [{"secret": {"name": "s5"}}]}},
            {"name": "d", "persistentVolumeClaim": {"claimName": "p1"}},
            {"name": "e", "secret": {"secretName": "s", "optional": True}},
            {"name": "f", "emptyDir": {}},
        ],
        "containers": [own],
        "initContainers": [{"name": "i", "envFrom": [{"secretRef": {"name": "s6"}}]}],
    }
    names = sorted(references(pod_of(template(driver={"spec": spec}), Role.DRIVER).template))
    assert names == [
        *(("ConfigMap", f"c{number}") for number in (1, 2, 3)),
        ("PersistentVolumeClaim", "p1"),
        *(("Secret", f"s{number}") for number in range(1, 7)),
    ]
