"""The commands of the page on audits, as they are written, on a real broker."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from redrive.auth.method import ACCESS_VARIABLE
from redrive.replay.job import run as runs
from redrive.replay.job.plan import Local
from redrive.replay.spec import Choice
from sandbox import builds
from sandbox.kubernetes import Cluster
from tests.support.documented import AUDIT, ROOT, commands
from tests.support.local_runs import Notes, job_of

ProvisionPolicy = Callable[..., Any]


def test_the_documented_commands_compare_and_list_what_was_refused(
    provision_policy: ProvisionPolicy,
    cluster: Cluster,
    kube_namespace: str,
    replay_token: str,
    tmp_path: Path,
) -> None:
    provisioned = provision_policy()
    provisioned.bury(3)
    provisioned.bury(2, replays=1)
    job = dataclasses.replace(job_of(provisioned), choice=Choice(max_replays=1))
    assert runs.run(job, Local(), Notes()).refused == 2
    cluster.kubectl(
        "--namespace", kube_namespace, "create", "secret", "generic", "pulsar-replayer",
        f"--from-literal=token={replay_token}",
    )  # fmt: skip

    shown = pasted(provisioned, cluster, kube_namespace, tmp_path)

    left = [message.message_id() for message in provisioned.resting()]
    assert shown.splitlines() == [
        *(f"{kind}: 0" for kind in ("doubled", "missing", "unrecorded", "returned", "open")),
        *(f"{at.ledger_id()}:{at.entry_id()}:-1 1 ReplayedTooOften tests/again" for at in left),
    ]


def pasted(provisioned: Any, cluster: Cluster, namespace: str, folder: Path) -> str:  # noqa: ANN401
    """Run all commands of the page, and return what they print; only places are other ones."""
    script = "\n".join(block.text for block in commands(AUDIT))
    for written, here in (
        ("pulsar://pulsar:6650", provisioned.broker.service_url),
        ("http://pulsar:8080", provisioned.broker.admin_url),
        ("persistent://shop/prod", f"persistent://{provisioned.policy.topic.namespace_name}"),
        ("-n shop", f"-n {namespace}"),
    ):
        assert written in script
        script = script.replace(written, here)
    path = [str(Path(sys.executable).parent), str(builds.kubernetes()), os.environ["PATH"]]
    environment = os.environ | {
        "KUBECONFIG": str(cluster.kubeconfig),
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": str(ROOT / "operator"),
    }
    environment.pop(ACCESS_VARIABLE)
    run = subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", script],
        cwd=folder, env=environment, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout
