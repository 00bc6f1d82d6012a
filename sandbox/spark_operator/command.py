"""The arguments of spark-submit, derived from the object alone.

Pure. All settings go into a properties file that only its owner can read. The command line, which
every user of the machine can read, has only the program and its arguments.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from pathlib import Path

from . import environment, mounts
from .errors import RefusedError
from .objects import Application, Object

# The default of a cluster. Local mode would fail after the first attempt.
DEFAULT_TASK_MAX_FAILURES = "4"

# Properties by which Spark puts files and variables into pods. Here only fields of the spec can.
_POD_PROPERTIES = (
    "spark.kubernetes.driverEnv.",
    "spark.kubernetes.driver.secretKeyRef.",
    "spark.kubernetes.driver.secrets.",
    "spark.kubernetes.driver.volumes.",
    "spark.kubernetes.executor.secretKeyRef.",
    "spark.kubernetes.executor.secrets.",
    "spark.kubernetes.executor.volumes.",
)

_DEPENDENCIES = {
    "jars": "spark.jars",
    "files": "spark.files",
    "pyFiles": "spark.submit.pyFiles",
    "archives": "spark.archives",
    "packages": "spark.jars.packages",
    "excludePackages": "spark.jars.excludes",
    "repositories": "spark.jars.repositories",
}


def check(app: Application) -> None:
    """Refuse *app* if a field cannot have its effect without containers.

    Fields that place, pack or limit pods (images, node selectors, requests, security contexts,
    labels) are ignored, because they do not change the behaviour of the program.

    Raises:
        RefusedError: with all fields that cannot be supported.
    """
    problems = list(_unmet(app))
    if problems:
        msg = f"not possible without containers: {'; '.join(problems)}"
        raise RefusedError(msg)


def properties(app: Application, application_id: str) -> dict[str, str]:
    """Return the Spark properties of a run with the id *application_id*."""
    return {"spark.ui.port": "0", **common(app)} | {
        "spark.master": master(app),
        "spark.app.id": application_id,
        # Local mode generates an id unless this property is set.
        "spark.test.appId": application_id,
    }


def common(app: Application) -> dict[str, str]:
    """Return the Spark properties that are the same in pods and in local mode."""
    driver, executor = app.spec["driver"], app.spec["executor"]
    conf = {"spark.driver.memory": "1g", **app.conf, "spark.app.name": app.name}
    conf |= {
        f"spark.hadoop.{name}": value for name, value in app.spec.get("hadoopConf", {}).items()
    }
    for pod, prefix in ((driver, "spark.driver"), (executor, "spark.executor")):
        for field in ("cores", "memory", "memoryOverhead"):
            if field in pod:
                conf[f"{prefix}.{field}"] = str(pod[field])
    for field, name in _DEPENDENCIES.items():
        if listed := app.spec.get("deps", {}).get(field):
            conf[name] = ",".join(listed)
    return conf


def master(app: Application) -> str:
    """Return local[threads,attempts], with one thread per core of all executors together."""
    executor, conf = app.spec["executor"], app.conf
    instances = int(executor.get("instances", conf.get("spark.executor.instances", 1)))
    dynamic = app.spec.get("dynamicAllocation", {})
    if dynamic.get("enabled", False):
        least = (dynamic.get("initialExecutors", 1), dynamic.get("minExecutors", 1))
        instances = max(instances, *least)
    cores = int(executor.get("cores", conf.get("spark.executor.cores", 1)))
    attempts = conf.get("spark.task.maxFailures", DEFAULT_TASK_MAX_FAILURES)
    return f"local[{instances * cores},{attempts}]"


def properties_file(conf: dict[str, str]) -> str:
    """Return *conf* in the format of Java's property files."""
    return "".join(f"{_escaped(name)}={_escaped(value)}\n" for name, value in sorted(conf.items()))


def arguments(
    app: Application, properties_path: Path, variables: Mapping[str, str] | None
) -> list[str]:
    """Return the arguments of spark-submit.

    References to *variables* are replaced by their values; if None, a kubelet replaces them.
    """
    entry = ["--class", app.spec["mainClass"]] if "mainClass" in app.spec else []
    program = [app.spec["mainApplicationFile"], *app.spec.get("arguments", [])]
    if variables is not None:
        program = [environment.expanded(argument, variables) for argument in program]
    return ["--properties-file", str(properties_path), *entry, *program]


def _unmet(app: Application) -> Iterator[str]:
    spec = app.spec
    if spec["mode"] != "cluster":
        yield f"spec.mode is {spec['mode']}; leave it out or set it to cluster"
    if spec.get("pythonVersion") == "2":
        yield 'spec.pythonVersion is "2"; set it to "3"'
    for name in ("driver", "executor"):
        yield from _unmounted(name, spec[name], mounts.mountable(app))
    account = spec["executor"].get("serviceAccount", app.service_account)
    if account != app.service_account:
        yield (
            f"spec.executor.serviceAccount is {account}, the driver's {app.service_account}, but "
            "both run in one process; use one ServiceAccount"
        )
    for name, value in sorted(app.conf.items()):
        if name.startswith(_POD_PROPERTIES):
            yield f"spec.sparkConf sets {name}; use env, envFrom or arguments of the spec"
        if name == "spark.kubernetes.namespace" and value != app.namespace:
            yield f"spec.sparkConf sets {name} to {value}; it must be {app.namespace}"


def _unmounted(name: str, pod: Object, mountable: Container[str]) -> Iterator[str]:
    for field in ("secrets", "configMaps", "volumeMounts"):
        supported = mountable if field == "volumeMounts" else ()
        if names := sorted(
            item["name"] for item in pod.get(field, []) if item["name"] not in supported
        ):
            yield f"spec.{name}.{field} mounts {', '.join(names)}; pass values by env or envFrom"


def _escaped(text: str) -> str:
    for plain, written in (("\\", "\\\\"), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t")):
        text = text.replace(plain, written)
    for special in " :=#!":
        text = text.replace(special, f"\\{special}")
    return text
