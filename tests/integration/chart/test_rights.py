"""The rights that the chart gives: to the operator, to replay jobs, and to users of the cluster."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from redrive.api.crds import KINDS
from redrive.replay.controller.spark_operators import LAUNCHERS
from sandbox import SOURCE_ROOT, chart, spark_operator
from sandbox.errors import SandboxError
from sandbox.kubernetes import Cluster
from tests.integration.api.test_admission_of_applications import manifest as manifest_of
from tests.support.invalid_manifests import manifest

pytestmark = pytest.mark.xdist_group("own sandbox")

IMAGE: dict[str, Any] = {"image": {"registry": "registry.test"}}
VALUES = IMAGE | {
    "replay": {"enabled": False},
    "rbac": {"secretNamespaces": ["kube-public"]},
    "fullnameOverride": "rights",
}
SECONDS = 180


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Iterator[str]:
    """The namespace of a release without Replays that reads Secrets in one namespace only."""
    chart.install(cluster, "rights", "rights", VALUES)
    yield "rights"
    chart.uninstall(cluster, "rights", "rights")
    cluster.objects.delete("namespace", "rights")


def may(
    cluster: Cluster, user: str, verb: str, resource: str, namespace: str = "default", *more: str
) -> bool:
    """Return True if the API server permits *user* the verb on the resource."""
    try:
        answer = cluster.kubectl(
            "auth", "can-i", verb, resource, f"--as={user}", "-n", namespace, *more
        )
    except SandboxError:  # kubectl ends with 1 where the answer is no
        return False
    return answer.strip() == "yes"


def operator(release: str) -> str:
    return f"system:serviceaccount:{release}:rights"


def refuses(call: Callable[[], object], message: str) -> bool:
    """Return True if *call* is refused with *message*."""
    try:
        call()
    except SandboxError as error:
        return message in str(error)
    return False


def wait_until_refused(call: Callable[[], object], message: str) -> None:
    """Repeat *call* until it is refused with *message*: the API server reads policies late."""
    deadline = time.monotonic() + SECONDS
    while not refuses(call, message):
        assert time.monotonic() < deadline, f"no policy refuses with {message!r}"


def test_rights_to_spark_and_secrets_can_be_switched_off(cluster: Cluster, release: str) -> None:
    user = operator(release)
    assert may(cluster, user, "get", "secrets", "kube-public")
    assert not may(cluster, user, "get", "secrets", "default")
    assert not may(cluster, user, "create", "sparkapplications.sparkoperator.k8s.io")
    assert not may(cluster, user, "create", "jobs.batch")
    assert not may(cluster, user, "get", "serviceaccounts/redrive-replay")


def run_test_pod(cluster: Cluster, pod: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Run the command of a test pod as its ServiceAccount, without its endpoint."""
    namespace, spec = pod["metadata"]["namespace"], pod["spec"]
    (container,) = spec["containers"]
    account = cluster.service_account_kubeconfig(namespace, spec["serviceAccountName"])
    arguments = [a for a in container["args"] if not a.startswith("--endpoint=")]
    return subprocess.run(
        [sys.executable, *container["command"][1:], *arguments],
        env={"KUBECONFIG": str(account), "PYTHONPATH": str(SOURCE_ROOT)},
        check=False, text=True, capture_output=True, timeout=SECONDS,
    )  # fmt: skip


def test_helm_test_finds_missing_rights_and_kinds(cluster: Cluster, release: str) -> None:
    where = f"--namespace={release}"
    text = chart.helm("get", "hooks", "rights", where, f"--kubeconfig={cluster.kubeconfig}")
    hooks = [body for body in yaml.safe_load_all(text) if body]
    pods = {body["metadata"]["name"]: body for body in hooks if body["kind"] == "Pod"}
    others = [body for body in hooks if body["kind"] != "Pod"]
    cluster.kubectl("apply", "-f", "-", input=yaml.safe_dump_all(others))
    operator_pod, kinds_pod = pods["rights-test-operator"], pods["rights-test-kinds"]
    tester = f"system:serviceaccount:{release}:rights.rights.test"
    assert may(cluster, tester, "create", "replays.redrive.io", release)
    assert not may(cluster, tester, "delete", "replays.redrive.io", release)
    assert not may(cluster, tester, "create", "replays.redrive.io", "default")

    ran = run_test_pod(cluster, operator_pod)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "the operator has its" in ran.stdout
    ran = run_test_pod(cluster, kinds_pod)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == f"the API server admits {', '.join(kind.kind for kind in KINDS)}\n"
    plurals = ",".join(f"{kind.plural}.redrive.io" for kind in KINDS)
    assert cluster.kubectl("get", plurals, where, "--output=name") == ""

    cluster.kubectl("delete", "rolebinding", "rights.rights.secrets", "--namespace=kube-public")
    ran = run_test_pod(cluster, operator_pod)
    assert ran.returncode == 1
    assert "lacks rights that the chart grants; got 'get secrets in namespace kube" in ran.stderr
    (argument,) = (a for a in kinds_pod["spec"]["containers"][0]["args"] if "--manifests" in a)
    unknown = argument.replace('"topic":', '"topics":')
    ran = run_test_pod(cluster, with_argument(kinds_pod, argument, unknown))
    assert ran.returncode == 1
    assert "topics" in ran.stderr
    chart.install(cluster, "rights", "rights", VALUES)  # repairs the binding


def with_argument(pod: dict[str, Any], argument: str, other: str) -> dict[str, Any]:
    """Return *pod* with *other* in place of an argument."""
    changed: dict[str, Any] = json.loads(
        json.dumps(pod).replace(json.dumps(argument), json.dumps(other))
    )
    return changed


def test_operator_may_read_kube_system_but_list_no_namespaces(
    cluster: Cluster, release: str
) -> None:
    assert may(cluster, operator(release), "get", "namespaces/kube-system")
    assert not may(cluster, operator(release), "list", "namespaces")


def test_operator_without_right_to_kube_system_names_remedy(
    cluster: Cluster, kube_namespace: str
) -> None:
    account = cluster.service_account_kubeconfig(kube_namespace, "default")
    ran = subprocess.run(
        [sys.executable, "-m", "redrive", "operator", f"--namespace={kube_namespace}"],
        env={"KUBECONFIG": str(account), "PYTHONPATH": str(SOURCE_ROOT)},
        check=False, text=True, capture_output=True, timeout=SECONDS,
    )  # fmt: skip
    assert ran.returncode == 1
    *_, last = (ran.stdout + ran.stderr).splitlines()
    assert last.startswith("redrive: ClusterUnknown: ")
    assert "start the operator with --cluster-id (clusterId in the Helm chart)" in last


@pytest.mark.usefixtures("release")
def test_view_edit_and_admin_have_the_kinds_of_redrive(
    cluster: Cluster, kube_namespace: str
) -> None:
    for role in ("view", "edit", "admin"):
        cluster.kubectl(
            "create", "rolebinding", role, f"--clusterrole={role}", f"--user={role}",
            f"--namespace={kube_namespace}",
        )  # fmt: skip
        assert not may(cluster, role, "create", "replayapprovals.redrive.io", kube_namespace)
    asked = [
        (verb, f"{kind}.redrive.io")
        for verb in ("list", "create", "delete")
        for kind in ("retrypolicies", "replays", "brokerconnections")
    ]
    writes = {ask for ask in asked if ask[0] != "list"}
    connections = {ask for ask in writes if ask[1].startswith("brokerconnections")}
    expected = {
        "view": set(asked) - writes,
        "edit": set(asked) - connections,
        "admin": set(asked),
    }
    deadline = time.monotonic() + SECONDS  # a controller aggregates the roles
    for role, allowed in expected.items():
        while {a for a in asked if may(cluster, role, *a, namespace=kube_namespace)} != allowed:
            assert time.monotonic() < deadline, role


def test_responder_sets_annotations_under_its_own_name_only(
    cluster: Cluster, release: str, kube_namespace: str
) -> None:
    within = f"--namespace={kube_namespace}"
    role = f"--clusterrole=rights-responder.{release}"
    cluster.kubectl("create", "rolebinding", "rita", role, "--user=rita", within)
    body = json.dumps(manifest("RetryPolicy"))
    cluster.kubectl("create", within, "--filename=-", input=body)

    def patch(change: dict[str, Any]) -> None:
        cluster.kubectl(
            "patch", "rpol", "one", within, "--type=merge", "--as=rita",
            f"--patch={json.dumps(change)}",
        )  # fmt: skip

    def annotate(**annotations: str | None) -> dict[str, Any]:
        names = {f"redrive.io/{n.replace('_', '-')}": v for n, v in annotations.items()}
        return {"metadata": {"annotations": names}}

    other, limited = "requested-by must name the caller; got 'ann'", "only these annotations"
    wait_until_refused(lambda: patch(annotate(requested_by="ann")), other)
    patch(annotate(requested_by="rita", paused="true"))
    until = "2099-01-01T00:00:00Z"
    patch(annotate(paused=None, ignore_outages_until=until, dead_letter_now=f"4711:3:0@{until}"))
    patch(annotate(unload_requested_at=until))
    for change in (
        {"spec": {"maxRetries": 3}},
        {"metadata": {"labels": {"a": "b"}}},
        {"metadata": {"finalizers": ["redrive.io/x"]}},
        annotate(skip_cleanup="true"),
    ):
        with pytest.raises(SandboxError, match=limited):
            patch(change)
    assert not may(cluster, "rita", "create", "replayapprovals.redrive.io", kube_namespace)

    def replay(name: str, **annotations: str) -> None:
        metadata = {"name": name, **annotate(**annotations)["metadata"]}
        body = manifest("Replay") | {"metadata": metadata}
        cluster.kubectl("create", within, "--filename=-", "--as=rita", input=json.dumps(body))

    replay("own", requested_by="rita")
    with pytest.raises(SandboxError, match=other):
        replay("forged", requested_by="ann")
    replay("restored", requested_by="ann", ended_at="2026-11-22T10:00:00Z")
    forged = annotate(requested_by="ann", ended_at="2026-11-22T10:00:00Z")["metadata"]
    running = manifest("Inspection") | {"metadata": {"name": "forged", **forged}}  # not ended
    with pytest.raises(SandboxError, match="requested-by must name the caller"):
        cluster.kubectl("create", within, "--filename=-", input=json.dumps(running))


def config_map(cluster: Cluster, namespace: str, name: str, **labels: str) -> None:
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
    cluster.kubectl("create", "-f", "-", input=json.dumps(body))


def test_operator_patches_only_config_maps_of_redrive(
    cluster: Cluster, release: str, kube_namespace: str
) -> None:
    ours = {"app.kubernetes.io/managed-by": "redrive"}
    config_map(cluster, kube_namespace, "ours", **ours)
    config_map(cluster, kube_namespace, "theirs")

    def patch(name: str, change: dict[str, Any]) -> str:
        return cluster.kubectl(
            "patch", "configmap", name, f"--namespace={kube_namespace}", "--type=merge",
            f"--patch={json.dumps(change)}", f"--as={operator(release)}",
        )  # fmt: skip

    def change_foreign() -> None:
        patch("theirs", {"data": {"at": str(time.monotonic())}})

    wait_until_refused(change_foreign, "writes only ConfigMaps and Secrets with the label")
    patch("ours", {"data": {"policy.json": "{}"}})
    with pytest.raises(SandboxError, match="changes only ConfigMaps with the label"):
        patch("theirs", {"metadata": {"labels": ours}})  # taking it over
    with pytest.raises(SandboxError, match="writes only ConfigMaps and Secrets with the label"):
        patch("ours", {"metadata": {"labels": {"app.kubernetes.io/managed-by": None}}})


def test_operator_creates_only_opaque_secrets_of_redrive(
    cluster: Cluster, release: str, kube_namespace: str
) -> None:
    """The API server writes a token of a ServiceAccount into Secrets of another type."""
    within = f"--namespace={kube_namespace}"
    cluster.kubectl("create", "role", "creator", within, "--verb=create", "--resource=secrets")
    account = f"--serviceaccount={release}:rights"
    cluster.kubectl("create", "rolebinding", "creator", within, "--role=creator", account)

    def create(kind: str, **labels: str) -> None:
        account = {"kubernetes.io/service-account.name": "default"}
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"generateName": "key-", "labels": labels, "annotations": account},
            "type": kind,
        }
        user = f"--as={operator(release)}"
        cluster.kubectl("create", within, "--filename=-", user, input=json.dumps(body))

    ours = {"app.kubernetes.io/managed-by": "redrive"}
    unlabelled = "writes only ConfigMaps and Secrets with the label"
    wait_until_refused(lambda: create("Opaque"), unlabelled)
    with pytest.raises(SandboxError, match="only creates Secrets, of type Opaque"):
        create("kubernetes.io/service-account-token", **ours)
    create("Opaque", **ours)


@pytest.mark.parametrize("kind", ["retrypolicy", "brokerconnection", "replay"])
def test_operator_changes_finalizers_and_no_specs(
    cluster: Cluster, release: str, kube_namespace: str, kind: str
) -> None:
    kinds = {
        "retrypolicy": "RetryPolicy",
        "brokerconnection": "BrokerConnection",
        "replay": "Replay",
    }
    body = manifest(kinds[kind])
    cluster.kubectl(
        "create", f"--namespace={kube_namespace}", "--filename=-", input=json.dumps(body)
    )

    # kubectl reads an object before it patches it; the operator may not read connections.
    cluster.kubectl(
        "create", "role", "reads", f"--namespace={kube_namespace}", "--verb=get",
        "--resource=retrypolicies.redrive.io,brokerconnections.redrive.io",
    )  # fmt: skip
    cluster.kubectl(
        "create", "rolebinding", "reads", f"--namespace={kube_namespace}", "--role=reads",
        f"--user={operator(release)}",
    )  # fmt: skip

    def patch(change: dict[str, Any]) -> str:
        return cluster.kubectl(
            "patch", kind, "one", f"--namespace={kube_namespace}", "--type=merge",
            f"--patch={json.dumps(change)}", f"--as={operator(release)}",
        )  # fmt: skip

    def change_spec() -> None:
        change: dict[str, Any] = {"connectionRef": {"name": str(time.monotonic())}}
        if kind == "brokerconnection":
            change = {"pulsar": {"adminURL": f"http://thief:{time.monotonic_ns() % 60_000}"}}
        if kind == "replay":
            change = {"ttlAfterFinished": f"{time.monotonic_ns() % 60_000}s"}
        patch({"spec": change})

    wait_until_refused(change_spec, "the operator does not change the spec")
    patch({"metadata": {"finalizers": ["redrive.io/in-use"]}})
    patch({"metadata": {"finalizers": []}})


def test_operator_deletes_only_ended_replays_with_a_ttl(
    cluster: Cluster, release: str, kube_namespace: str
) -> None:
    ended = {"metadata": {"annotations": {"redrive.io/ended-at": "2026-11-22T10:00:00Z"}}}
    forged = {"status": {"phase": "Completed", "completionTime": "2026-11-22T10:00:00Z"}}

    def create(name: str, **spec: str) -> None:
        body = {**manifest("Replay", **spec), "metadata": {"name": name}}
        cluster.kubectl(
            "create", f"--namespace={kube_namespace}", "--filename=-", input=json.dumps(body)
        )

    create("stays")
    create("goes", ttlAfterFinished="1h")

    def delete(name: str) -> None:
        path = f"/apis/redrive.io/v1beta1/namespaces/{kube_namespace}/replays/{name}"
        cluster.kubectl("delete", f"--raw={path}", f"--as={operator(release)}")

    refused = "the operator deletes only Replays that have ended"

    def delete_running() -> None:
        delete("goes")
        create("goes", ttlAfterFinished="1h")

    wait_until_refused(delete_running, refused)

    def patch(name: str, change: dict[str, Any], *options: str) -> None:
        cluster.kubectl(
            "patch", "replay", name, f"--namespace={kube_namespace}", "--type=merge",
            f"--patch={json.dumps(change)}", *options,
        )  # fmt: skip

    patch("goes", forged, "--subresource=status")
    with pytest.raises(SandboxError, match=refused):
        delete("goes")
    for name in ("stays", "goes"):
        patch(name, ended)
    with pytest.raises(SandboxError, match=refused):
        delete("stays")
    delete("goes")


@pytest.mark.usefixtures("release")
@pytest.mark.parametrize(("kind", "name"), [("Replay", "job"), ("Inspection", "inspection")])
def test_jobs_write_only_the_run_of_a_status(
    cluster: Cluster, kube_namespace: str, kind: str, name: str
) -> None:
    chart.prepare_replays(cluster, kube_namespace)
    cluster.kubectl(
        "create", f"--namespace={kube_namespace}", "--filename=-",
        input=json.dumps(manifest(kind)),
    )  # fmt: skip

    def patch(status: dict[str, Any], *user: str) -> None:
        cluster.kubectl(
            "patch", kind, "one", f"--namespace={kube_namespace}", "--type=merge",
            "--subresource=status", f"--patch={json.dumps({'status': status})}", *user,
        )  # fmt: skip

    account = f"{kube_namespace}:redrive-{name}"
    job = f"--as=system:serviceaccount:{account}"
    for subject in (  # kubectl reads before it writes, and a job does not
        ("role", "--verb=get", f"--resource={kind.lower()}s.redrive.io/status"),
        ("rolebinding", "--role=reads-status", f"--serviceaccount={account}"),
    ):
        role, *options = subject
        cluster.kubectl("create", role, "reads-status", f"--namespace={kube_namespace}", *options)
    refused = "a job writes only status.run of its Replay or Inspection"
    patch({"phase": "Running"})

    def forge() -> None:
        patch({"completionTime": f"2026-01-01T00:00:{int(time.time()) % 60:02}Z"}, job)

    wait_until_refused(forge, refused)
    for forged in ({"phase": "Completed"}, {"phase": None}, {"warnings": ["Other"]}):
        with pytest.raises(SandboxError, match=refused):
            patch(forged, job)
    patch({"run": {"finished": True}}, job)
    patch({"run": None}, job)


def test_replay_jobs_have_rights_in_prepared_namespaces_only(
    cluster: Cluster, kube_namespace: str
) -> None:
    chart.prepare_replays(cluster, kube_namespace)
    user = f"system:serviceaccount:{kube_namespace}:redrive-replay"
    assert may(cluster, user, "create", "pods", kube_namespace)
    assert may(cluster, user, "patch", "replays.redrive.io", kube_namespace, "--subresource=status")
    assert not may(cluster, user, "create", "pods", "default")
    job = f"system:serviceaccount:{kube_namespace}:redrive-job"
    assert may(cluster, job, "patch", "replays.redrive.io", kube_namespace, "--subresource=status")
    assert not may(cluster, job, "create", "pods", kube_namespace)
    inspection = f"system:serviceaccount:{kube_namespace}:redrive-inspection"
    status = "--subresource=status"
    assert may(cluster, inspection, "patch", "inspections.redrive.io", kube_namespace, status)
    assert not may(cluster, inspection, "patch", "replays.redrive.io", kube_namespace, status)
    assert not may(cluster, job, "patch", "inspections.redrive.io", kube_namespace, status)
    # They belong to other programs, and RBAC can't limit a driver to those that it created.
    for verb in ("get", "list", "create", "update", "patch", "delete", "deletecollection"):
        for resource in ("configmaps", "secrets"):
            for account in (user, job, inspection):
                assert not may(cluster, account, verb, resource, kube_namespace), (verb, resource)


@pytest.fixture(scope="module")
def launching(cluster: Cluster) -> Iterator[str]:
    """The operator's user of a release that runs Replays by both Spark operators."""
    cluster.define(spark_operator.CRD.read_text(encoding="utf-8"))
    values = IMAGE | {
        "replay": {"launchers": {"kubeflow": True, "apache": True}},
        "fullnameOverride": "launching",
    }
    chart.install(cluster, "launching", "launching", values)
    yield "system:serviceaccount:launching:launching"
    chart.uninstall(cluster, "launching", "launching")
    cluster.objects.delete("namespace", "launching")


def changed(body: dict[str, Any], path: tuple[str, ...], value: object) -> dict[str, Any]:
    """Return *body* with *value* at *path*; None removes the field."""
    step, *rest = path
    if rest:
        return {**body, step: changed(body.get(step) or {}, tuple(rest), value)}
    others = {name: field for name, field in body.items() if name != step}
    return others if value is None else {**others, step: value}


TEMPLATE = {"containers": [{"name": "spark-kubernetes-driver"}], "serviceAccountName": "admin"}
CONF = ("spec", "sparkConf")
AUTHENTICATE = "spark.kubernetes.authenticate"
LABEL, OWNER, ACCOUNT = (
    "the operator creates only SparkApplications " + rule
    for rule in (
        "with the label app.kubernetes.io/managed-by=redrive",
        "that a Replay owns",
        "that run as the ServiceAccount redrive-replay",
    )
)
JOB_LABEL, JOB_ACCOUNT = (
    rule.replace("SparkApplications", "Jobs").replace("redrive-replay", "redrive-job")
    for rule in (LABEL, ACCOUNT)
)
JOB_OWNER = "the operator creates only Jobs that one Replay or Inspection owns"
POD = ("spec", "template", "spec")
OWNERS = [
    {"apiVersion": "redrive.io/v1beta1", "kind": kind, "name": "a", "uid": "u"}
    for kind in ("Replay", "Inspection")
]
FORGED: list[tuple[str, tuple[str, ...], object, str]] = [
    ("Kubeflow", ("metadata", "labels"), None, LABEL),
    ("Kubeflow", ("metadata", "labels"), {"app.kubernetes.io/managed-by": "Helm"}, LABEL),
    ("Apache", ("metadata", "labels"), None, LABEL),
    ("Kubeflow", ("metadata", "ownerReferences"), None, OWNER),
    (
        "Apache",
        ("metadata", "ownerReferences"),
        [{"apiVersion": "v1", "kind": "ConfigMap", "name": "a", "uid": "u"}],
        OWNER,
    ),
    ("Kubeflow", ("spec", "driver", "serviceAccount"), "admin", ACCOUNT),
    ("Kubeflow", ("spec", "driver", "serviceAccount"), None, ACCOUNT),
    ("Kubeflow", ("spec", "executor", "serviceAccount"), "admin", ACCOUNT),
    ("Kubeflow", ("spec", "driver", "template", "spec"), TEMPLATE, ACCOUNT),
    ("Kubeflow", ("spec", "executor", "template", "spec"), TEMPLATE, ACCOUNT),
    ("Apache", (*CONF, f"{AUTHENTICATE}.executor.serviceAccountName"), "admin", ACCOUNT),
    ("Apache", (*CONF, f"{AUTHENTICATE}.submission.oauthTokenFile"), "/token", ACCOUNT),
    ("Apache", (*CONF, "spark.kubernetes.driver.podTemplateFile"), "local:///a", ACCOUNT),
    ("Apache", (*CONF, f"{AUTHENTICATE}.driver.serviceAccountName"), "admin", ACCOUNT),
    ("Apache", (*CONF, f"{AUTHENTICATE}.driver.serviceAccountName"), None, ACCOUNT),
    ("Apache", ("spec", "driverSpec", "podTemplateSpec", "spec"), TEMPLATE, ACCOUNT),
    ("Apache", ("spec", "executorSpec", "podTemplateSpec", "spec"), TEMPLATE, ACCOUNT),
    ("Job", ("metadata", "labels"), {"app.kubernetes.io/managed-by": "Helm"}, JOB_LABEL),
    ("Job", ("metadata", "ownerReferences"), None, JOB_OWNER),
    ("Job", (*POD, "serviceAccountName"), "redrive-replay", JOB_ACCOUNT),
    ("Job", (*POD, "serviceAccountName"), None, JOB_ACCOUNT),
    ("Job", (*POD, "serviceAccountName"), "redrive-inspection", JOB_ACCOUNT),
    ("Inspection", (*POD, "serviceAccountName"), "redrive-job", JOB_ACCOUNT),
    ("Inspection", (*POD, "serviceAccountName"), "redrive-replay", JOB_ACCOUNT),
    ("Inspection", ("metadata", "ownerReferences"), OWNERS, JOB_OWNER),
]


def test_operator_creates_only_applications_of_replays(
    cluster: Cluster, launching: str, kube_namespace: str
) -> None:
    made = {
        "Job" if launcher.name is None else launcher.name.value: changed(
            manifest_of(launcher, {}), ("metadata", "namespace"), kube_namespace
        )
        for launcher in LAUNCHERS
    }

    owned = changed(made["Job"], ("metadata", "ownerReferences"), OWNERS[1:])
    made["Inspection"] = changed(owned, (*POD, "serviceAccountName"), "redrive-inspection")

    def create(body: str) -> None:
        cluster.kubectl(
            "create", "--dry-run=server", f"--as={launching}", "--filename=-", input=body
        )

    deadline = time.monotonic() + SECONDS  # the API server reads policies after a while
    for body in made.values():
        # A Job without labels has those of its pods.
        unlabelled = json.dumps(changed(body, ("metadata", "labels"), {"queue": "batch"}))
        message = JOB_LABEL if body["kind"] == "Job" else LABEL
        while not refuses(functools.partial(create, unlabelled), message):
            assert time.monotonic() < deadline, "the policy is not enforced"
        create(json.dumps(body))
    for launcher, path, value, message in FORGED:
        with pytest.raises(SandboxError, match=message):
            create(json.dumps(changed(made[launcher], path, value)))
