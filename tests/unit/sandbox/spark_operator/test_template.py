from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sandbox.spark_operator import template
from sandbox.spark_operator.errors import RefusedError
from sandbox.spark_operator.objects import Application

FILES = {"driver": "/f/driver.json", "executor": "/f/executor.json"}
MOUNT = {"name": "token", "mountPath": "/etc/token", "readOnly": True}
VOLUME = {"name": "token", "projected": {"sources": [{"secret": {"name": "role"}}]}}


def test_fields_of_the_spec_become_properties_of_pods(
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
def test_what_has_no_property_stands_in_the_template(
    application: Callable[..., Application], role: str
) -> None:
    pod: dict[str, Any] = {
        "env": [{"name": "A", "value": "1"}],
        "envSecretKeyRefs": {"B": {"name": "role", "key": "token"}},
        "volumeMounts": [MOUNT],
        "securityContext": {"runAsNonRoot": True},
        "podSecurityContext": {"fsGroup": 185},
    }
    app = application(**{role: pod}, volumes=[VOLUME, {"name": "unused", "emptyDir": {}}])
    made = template.template(app, role)
    (container,) = made["spec"]["containers"]
    assert [variable["name"] for variable in container["env"]] == ["B", "A"]
    assert container["volumeMounts"] == [MOUNT]
    assert container["securityContext"] == {"runAsNonRoot": True}
    assert made["spec"]["volumes"] == [VOLUME]
    assert made["spec"]["securityContext"] == {"fsGroup": 185}


def test_the_application_owns_its_driver(application: Callable[..., Application]) -> None:
    """And the driver what Spark makes for it: one deletion takes all."""
    owners = template.template(application(), "driver")["metadata"]["ownerReferences"]
    assert [(owner["name"], owner["uid"]) for owner in owners] == [("job", "1")]
    assert "ownerReferences" not in template.template(application(), "executor")["metadata"]


def test_what_is_not_known_is_refused_by_name(application: Callable[..., Application]) -> None:
    secrets = [{"name": "role", "path": "/etc", "secretType": "Generic"}]
    with pytest.raises(RefusedError, match=r"spec\.driver\.secrets"):
        template.check(application(driver={"secrets": secrets}))
