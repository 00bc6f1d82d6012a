"""A SparkApplication as input of `spark-submit --master k8s://`: properties and pod templates.

Pure. Fields without a property are in the templates; the real operator sets them by a webhook.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from . import command
from .errors import RefusedError
from .objects import Application, Object, own_container

MASTER = "k8s://https://kubernetes.default.svc"
ROLES = ("driver", "executor")

_CONTAINER_FIELDS = ("envFrom", "volumeMounts", "securityContext")
_POD_FIELDS = {"podSecurityContext": "securityContext", "tolerations": "tolerations"}


def check(app: Application) -> None:
    """Refuse *app* if it has a field that is not supported here.

    Raises:
        RefusedError: with all such fields.
    """
    problems = [
        f"spec.{role}.{field}; use volumes and volumeMounts"
        for role in ROLES
        for field in ("secrets", "configMaps")
        if app.spec[role].get(field)
    ]
    if app.spec["mode"] != "cluster":
        problems.append(f"spec.mode is {app.spec['mode']}; leave it out or set it to cluster")
    if problems:
        raise RefusedError(f"not possible with this operator: {'; '.join(problems)}")


def properties(app: Application, templates: dict[str, str]) -> dict[str, str]:
    """Return the Spark properties of a run; *templates* are files by the role of the pod."""
    conf = command.common(app) | {
        "spark.master": MASTER,
        "spark.submit.deployMode": "cluster",
        "spark.kubernetes.namespace": app.namespace,
        "spark.kubernetes.submission.waitAppCompletion": "false",
        "spark.kubernetes.driver.pod.name": app.driver_pod,
        "spark.kubernetes.authenticate.driver.serviceAccountName": app.service_account,
    }
    if policy := app.spec.get("imagePullPolicy"):
        conf["spark.kubernetes.container.image.pullPolicy"] = policy
    if secrets := app.spec.get("imagePullSecrets"):
        conf["spark.kubernetes.container.image.pullSecrets"] = ",".join(secrets)
    if instances := app.spec["executor"].get("instances"):
        conf["spark.executor.instances"] = str(instances)
    for role in ROLES:
        pod, prefix = app.spec[role], f"spark.kubernetes.{role}"
        conf[f"{prefix}.podTemplateFile"] = templates[role]
        for field, name in (("coreRequest", "request.cores"), ("coreLimit", "limit.cores")):
            if field in pod:
                conf[f"{prefix}.{name}"] = pod[field]
        if image := pod.get("image", app.spec.get("image")):
            conf[f"{prefix}.container.image"] = image
    return conf


def template(app: Application, role: str, *, version: str, label: str) -> Object:
    """Return the template of the pods with *role*, driver or executor.

    The application owns the driver's pod, and that pod owns the others, so all are deleted with it.

    Args:
        app: the application.
        role: driver or executor.
        version: the `apiVersion` of the application.
        label: label of the pods with the name of the application.
    """
    pod: Object = app.spec[role]
    whole: Object = pod.get("template", {})
    base, metadata = whole.get("spec", {}), whole.get("metadata", {})
    own = own_container(base, role)
    container = {**own, **{field: pod[field] for field in _CONTAINER_FIELDS if field in pod}}
    container |= {"name": f"spark-kubernetes-{role}", "env": list(_environment(pod))}
    used = {mount["name"] for mount in (*pod.get("volumeMounts", []), *base.get("volumes", []))}
    selectors = (part.get("nodeSelector", {}) for part in (base, app.spec, pod))
    spec: dict[str, Any] = {
        **base,
        "containers": [container, *(c for c in base.get("containers", []) if c is not own)],
        "volumes": [volume for volume in app.spec.get("volumes", []) if volume["name"] in used],
        "nodeSelector": {name: value for part in selectors for name, value in part.items()},
    }
    spec |= {name: pod[field] for field, name in _POD_FIELDS.items() if field in pod}
    metadata = {
        "labels": {**metadata.get("labels", {}), **pod.get("labels", {}), label: app.name},
        "annotations": {**metadata.get("annotations", {}), **pod.get("annotations", {})},
    }
    if role == "driver":
        metadata["ownerReferences"] = [
            {
                "apiVersion": version,
                "kind": "SparkApplication",
                "name": app.name,
                "uid": app.uid,
                "controller": True,
            }
        ]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _environment(pod: Object) -> Iterator[Object]:
    """Yield the variables in the order of the real operator; the last of a name wins."""
    for name, value in pod.get("envVars", {}).items():
        yield {"name": name, "value": value}
    for name, ref in pod.get("envSecretKeyRefs", {}).items():
        yield {"name": name, "valueFrom": {"secretKeyRef": ref}}
    yield from pod.get("env", [])
