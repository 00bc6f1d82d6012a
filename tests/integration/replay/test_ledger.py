"""The topic of a ledger, and the documented audit of it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from redrive.auth.files import job_credentials
from redrive.auth.method import ACCESS_VARIABLE
from redrive.replay.job import run as runs
from redrive.replay.ledger import Ledger, mounted_key, read
from redrive.replay.records import Header, header_key
from redrive.replay.spec import Choice
from sandbox import builds
from sandbox.kubernetes import Cluster
from sandbox.pulsar import SUPERUSER
from tests.support import compaction
from tests.support.documented import AUDIT, ROOT, commands
from tests.support.local_engine import Local
from tests.support.local_runs import Notes, job_of

ProvisionPolicy = Callable[..., Any]


pytestmark = pytest.mark.usefixtures("replay_token", "pulsar_namespace")


def test_compaction_leaves_nothing_of_a_removed_record(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    url, topic = provisioned.broker.service_url, provisioned.policy.ledger_topic
    with Ledger.open(url, topic, "first") as ledger:
        for uid in ("one", "two"):
            ledger.write(header_key(uid), Header("shop/again", 0).to_json())
        ledger.write(header_key("two"), None)
    assert compaction.compact(provisioned.broker, topic) == 2
    with Ledger.open(url, topic, "second") as ledger:
        assert ledger.records.headers.keys() == {"one"}
        ledger.write(header_key("one"), None)
    assert compaction.compact(provisioned.broker, topic) == 1
    # It ends, though the last record is gone.
    assert read(provisioned.client, topic, mounted_key()).owner == "second"
    with Ledger.open(url, topic, "third") as ledger:
        assert ledger.records.headers.keys() == set()
        assert ledger.records.owner == "third"


def test_the_records_stay_in_their_cluster(provision_policy: ProvisionPolicy) -> None:
    """They tell of entries by ids that those of another cluster have, too."""
    provisioned = provision_policy()
    broker, topic = provisioned.broker, provisioned.policy.ledger_topic
    with Ledger.open(broker.service_url, topic, "first") as ledger:
        stored = ledger.write(header_key("one"), Header("shop/again", 0).to_json())
    path = str(topic).replace("://", "/")
    entry = f"{path}/ledger/{stored.ledger_id()}/entry/{stored.entry_id()}"
    bearer = {"Authorization": f"Bearer {broker.token(SUPERUSER)}"}
    with closing(HTTPConnection(broker.address, broker.admin_port, timeout=30)) as connection:
        connection.request("GET", f"/admin/v2/{entry}", headers=bearer)
        assert connection.getresponse().headers["X-Pulsar-replicated-to"] == "__local__"


def test_documented_audit_commands_list_refused_messages(
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
    cluster.kubectl(
        "--namespace", kube_namespace, "create", "secret", "generic", "orders-ledger",
        f"--from-literal=key={job_credentials().ledger_key().hex()}",
    )  # fmt: skip
    cluster.kubectl(
        "--namespace", kube_namespace, "label", "secret", "orders-ledger",
        "redrive.io/policy=orders-fulfilment",
    )  # fmt: skip

    shown = pasted(provisioned, cluster, kube_namespace, tmp_path)

    ids = [message.message_id() for message in provisioned.unacknowledged()]
    assert shown.splitlines() == [
        *(f"{at.ledger_id()}:{at.entry_id()}:-1 1 ReplayedTooOften tests/again" for at in ids),
    ]


def pasted(provisioned: Any, cluster: Cluster, namespace: str, folder: Path) -> str:  # noqa: ANN401
    """Run all commands of the page with the places of the test, and return their output."""
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
