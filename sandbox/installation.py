"""redrive in a sandbox, installed as in production, with the same rights.

Called by the command ``python -m sandbox up``, the demo, and the fixtures of the tests.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from redrive.api.crds import crds
from sandbox import SOURCE_ROOT, chart, spark, versions
from sandbox.process import free_port
from sandbox.sandbox import KubernetesSandbox, Sandbox
from sandbox.steps import step

OPERATOR = "redrive-operator"
RELEASE, NAMESPACE = "redrive", "redrive-system"
_JOB = SOURCE_ROOT / "redrive" / "replay" / "__main__.py"
_START_SECONDS = 120.0

VALUES: Mapping[str, Any] = {
    "credentials": {"volume": {"emptyDir": {}}},
    "replay": {"application": f"local://{_JOB}", "launchers": {"apache": True}},
}
"""The values of the chart that the sandbox sets."""


def start(state: Path, pulsar_version: str = versions.PULSAR) -> Sandbox:
    """Start a sandbox with redrive, and leave it running.

    Raises:
        SandboxError: *state* is in use, or a component could not be fetched, built or started.
    """
    with ExitStack() as undo:
        started = undo.enter_context(Sandbox.start(state, pulsar_version))
        install(started)
        undo.pop_all()
    return started


def install(sandbox: KubernetesSandbox) -> None:
    """Install the chart; start the operator as its ServiceAccount, and the Spark operator stand-in.

    Raises:
        SandboxError: the API server refused a manifest, or a process did not start.
    """
    with step("install redrive"):
        spark.start(sandbox.processes, sandbox.cluster, sandbox.state / "spark")
        chart.install(sandbox.cluster, RELEASE, NAMESPACE, VALUES)
        sandbox.cluster.wait_for_kinds([crd["metadata"]["name"] for crd in crds()])
        start_operator(sandbox)


def start_operator(
    sandbox: KubernetesSandbox,
    *,
    release: str = RELEASE,
    namespace: str = NAMESPACE,
    name: str = OPERATOR,
    until: str = "redrive serves",
) -> None:
    """Start the command of the release's Deployment as a process, with its ServiceAccount.

    Unlike a pod, the process shares the address and the file system of this machine: its port
    differs (see `endpoint`), and so do the paths of its volumes (see `credentials`).

    Args:
        sandbox: the sandbox; it runs no pods.
        release: of the chart, already installed.
        namespace: of the release.
        name: of the process, also used as the name of its pod.
        until: the text in its log to wait for.

    Raises:
        SandboxError: the process ended, or did not log *until* in time.
    """
    objects = chart.installed(sandbox.cluster, release, namespace)
    (pod,) = (o["spec"]["template"]["spec"] for o in objects if o["kind"] == "Deployment")
    account = sandbox.cluster.service_account_kubeconfig(namespace, pod["serviceAccountName"])
    folders = {"credentials": credentials(sandbox), "job-templates": job_templates(sandbox, name)}
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    words = {"$(POD_NAME)": name} | {path: str(folders[m]) for m, path in mounts.items()}
    for body in objects:
        if body["kind"] == "ConfigMap" and body["metadata"]["name"].endswith("-job-templates"):
            folders["job-templates"].mkdir(parents=True, exist_ok=True)
            for file, text in body["data"].items():
                (folders["job-templates"] / file).write_text(text)
    arguments = [_replaced(argument, words) for argument in pod["containers"][0]["args"]]
    listen = f"127.0.0.1:{free_port()}"
    _endpoint_file(sandbox, name).write_text(f"http://{listen}")
    log = sandbox.processes.log(name)
    before = log.stat().st_size if log.exists() else 0
    sandbox.processes.start(
        name,
        [sys.executable, "-m", "redrive", *arguments, f"--listen={listen}"],
        env={"KUBECONFIG": str(account), "PYTHONPATH": str(SOURCE_ROOT)},
    )  # fmt: skip
    sandbox.processes.wait_until(
        name, lambda: until.encode() in log.read_bytes()[before:], seconds=_START_SECONDS
    )


def endpoint(sandbox: KubernetesSandbox, name: str = OPERATOR) -> str:
    """Return the URL at which the operator *name* serves metrics and probes."""
    return _endpoint_file(sandbox, name).read_text()


def credentials(sandbox: KubernetesSandbox) -> Path:
    """Return the folder that operators of this sandbox use as the volume of credentials."""
    return sandbox.state / "credentials"


def job_templates(sandbox: KubernetesSandbox, name: str = OPERATOR) -> Path:
    """Return the folder with the file of job templates of the operator *name*."""
    return sandbox.state / f"{name}.job-templates"


def _replaced(text: str, words: Mapping[str, str]) -> str:
    for word, other in words.items():
        text = text.replace(word, other)
    return text


def _endpoint_file(sandbox: KubernetesSandbox, name: str) -> Path:
    return sandbox.state / f"{name}.endpoint"
