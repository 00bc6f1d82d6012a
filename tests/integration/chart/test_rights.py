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
from sandbox import SOURCE_ROOT, chart, spark
from sandbox.errors import SandboxError
from sandbox.kubernetes import Cluster
from sandbox.objects import Objects
from tests.integration.api.test_manifests import application_manifest as manifest_of
from tests.support.manifests import manifest
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("control plane")

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
    cluster: Cluster, user: str, verb: str, resource: str, namespace: str = "default", **more: str
) -> bool:
    """Return True if the API server permits *user* the verb on a resource.

    Args:
        cluster: of the API server.
        user: the whole name, with `system:serviceaccount:NAMESPACE:` for a ServiceAccount.
        verb: of the API.
        resource: plural, with `.GROUP` unless that is the core group.
        namespace: of the resource.
        more: a name, or a subresource.
    """
    plural, _, group = resource.partition(".")
    groups = ["system:authenticated"]
    if user.startswith("system:serviceaccount:"):
        groups += ["system:serviceaccounts", f"system:serviceaccounts:{user.split(':')[2]}"]
    asked = {"verb": verb, "group": group, "resource": plural, "namespace": namespace}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": user, "groups": groups, "resourceAttributes": asked | more},
    }
    allowed: bool = cluster.objects.create(review)["status"]["allowed"]
    return allowed


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
    wait_until(lambda: refuses(call, message))


def test_rights_to_spark_and_secrets_can_be_switched_off(cluster: Cluster, release: str) -> None:
    user = operator(release)
    wait_until(lambda: may(cluster, user, "get", "secrets", "kube-public"))
    assert not may(cluster, user, "get", "secrets", "default")
    assert not may(cluster, user, "create", "sparkapplications.sparkoperator.k8s.io")
    assert not may(cluster, user, "create", "jobs.batch")
    assert not may(cluster, user, "get", "serviceaccounts", name="redrive-replay")


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
    for body in others:
        cluster.objects.apply(body)
    operator_pod, kinds_pod = pods["rights-test-operator"], pods["rights-test-kinds"]
    tester = f"system:serviceaccount:{release}:rights.rights.test"
    wait_until(lambda: may(cluster, tester, "create", "replays.redrive.io", release))
    assert not may(cluster, tester, "delete", "replays.redrive.io", release)
    assert not may(cluster, tester, "create", "replays.redrive.io", "default")

    ran = run_test_pod(cluster, operator_pod)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "the operator has its" in ran.stdout
    ran = run_test_pod(cluster, kinds_pod)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == f"the API server admits {', '.join(kind.kind for kind in KINDS)}\n"
    for kind in KINDS:
        assert cluster.objects.list(kind.kind.lower(), release) == []

    cluster.objects.delete("rolebinding", "rights.rights.secrets", "kube-public")
    wait_until(lambda: not may(cluster, operator(release), "get", "secrets", "kube-public"))
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
    user = operator(release)
    wait_until(lambda: may(cluster, user, "get", "namespaces", name="kube-system"))
    assert not may(cluster, user, "list", "namespaces")


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


def bind(cluster: Cluster, namespace: str, role: str, user: str) -> None:
    """Give *user* the rights of a ClusterRole in a namespace."""
    rbac = "rbac.authorization.k8s.io"
    body = {
        "apiVersion": f"{rbac}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": f"{user}.{role}".replace(":", ".")},
        "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": rbac, "kind": "User", "name": user}],
    }
    cluster.objects.create(body, namespace)


@pytest.mark.usefixtures("release")
def test_view_edit_and_admin_have_the_kinds_of_redrive(
    cluster: Cluster, kube_namespace: str
) -> None:
    for role in ("view", "edit", "admin"):
        bind(cluster, kube_namespace, role, user=role)
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

    def rights() -> dict[str, set[tuple[str, str]]]:
        return {
            role: {a for a in asked if may(cluster, role, *a, namespace=kube_namespace)}
            for role in expected
        }

    wait_until(lambda: rights() == expected, every=0.5)  # a controller aggregates the roles


def test_responder_sets_annotations_under_its_own_name_only(
    cluster: Cluster, release: str, kube_namespace: str
) -> None:
    bind(cluster, kube_namespace, f"rights-responder.{release}", user="rita")
    cluster.objects.create(manifest("RetryPolicy"), kube_namespace)
    rita = cluster.objects_as("rita")

    def patch(change: dict[str, Any]) -> None:
        rita.patch("retrypolicy", "one", change, kube_namespace)

    def annotate(**annotations: str | None) -> dict[str, Any]:
        names = {f"redrive.io/{n.replace('_', '-')}": v for n, v in annotations.items()}
        return {"metadata": {"annotations": names}}

    other, limited = "requested-by must name the caller; got 'ann'", "only these annotations"
    wait_until_refused(lambda: patch(annotate(requested_by="ann")), other)
    patch(annotate(requested_by="rita", paused="true"))
    until = "2099-01-01T00:00:00Z"
    patch(annotate(paused=None, ignore_outages_until=until, dead_letter_now=f"4711:3:0@{until}"))
    patch(annotate(unload_requested_at=until))
    finalizers = {"metadata": {"finalizers": ["redrive.io/x"]}}
    for change in (
        {"spec": {"maxRetries": 3}},
        {"metadata": {"labels": {"a": "b"}}},
        finalizers,
        annotate(skip_cleanup="true"),
    ):
        with pytest.raises(SandboxError, match=limited):
            patch(change)
    second = "system:serviceaccount:second:redrive"  # the operator of another release
    bind(cluster, kube_namespace, f"rights.{release}.operator", user=second)
    cluster.objects_as(second).patch("retrypolicy", "one", finalizers, kube_namespace)
    finalizers["metadata"]["finalizers"] = []
    cluster.objects_as(second).patch("retrypolicy", "one", finalizers, kube_namespace)
    assert not may(cluster, "rita", "create", "replayapprovals.redrive.io", kube_namespace)

    def replay(name: str, **annotations: str) -> None:
        metadata = {"name": name, **annotate(**annotations)["metadata"]}
        rita.create(manifest("Replay") | {"metadata": metadata}, kube_namespace)

    replay("own", requested_by="rita")
    with pytest.raises(SandboxError, match=other):
        replay("forged", requested_by="ann")
    replay("restored", requested_by="ann", ended_at="2026-11-22T10:00:00Z")
    forged = annotate(requested_by="ann", ended_at="2026-11-22T10:00:00Z")["metadata"]
    for kind in ("Inspection", "ReplayApproval"):  # neither is an ended Replay
        body = manifest(kind, "forged")
        body["metadata"].update(forged)
        with pytest.raises(SandboxError, match="requested-by must name the caller"):
            cluster.objects.create(body, kube_namespace)
    bind(cluster, kube_namespace, f"rights-editor.{release}", user="rita")
    wait_until(lambda: may(cluster, "rita", "create", "retrypolicies.redrive.io", kube_namespace))
    body = manifest("RetryPolicy", "restored")
    body["metadata"].update(forged)
    with pytest.raises(SandboxError, match=other):
        rita.create(body, kube_namespace)
    cluster.objects.create(body, kube_namespace)  # a backup, by an administrator


def test_inspection_in_clear_text_needs_the_verb_reveal(
    cluster: Cluster, release: str, kube_namespace: str
) -> None:
    for user in ("masked", "clear"):
        bind(cluster, kube_namespace, f"rights-inspector.{release}", user)
    bind(cluster, kube_namespace, f"rights-revealer.{release}", "clear")

    author = "redrive.io/requested-by"

    def inspect(user: str, payload: str, field: str = "messages", **annotations: str) -> None:
        own = {"messages": {"recipient": "A" * 43 + "="}, "export": {"destination": "archive"}}
        result: dict[str, Any] = {field: own[field] | {"payload": payload}}
        body = manifest("Inspection", **result)
        body["metadata"] = {"name": f"{user}-{payload.lower()}", "annotations": annotations}
        cluster.objects_as(user).create(body, kube_namespace)

    needed = "needs the verb reveal on inspections"
    wait_until_refused(lambda: inspect("masked", "Clear", **{author: "masked"}), needed)
    with pytest.raises(SandboxError, match=needed):
        inspect("masked", "Clear", "export", **{author: "masked"})
    inspect("masked", "Masked")
    kind = "inspections.redrive.io"
    wait_until(lambda: may(cluster, "clear", "create", kind, kube_namespace))
    wait_until(lambda: may(cluster, "clear", "reveal", kind, kube_namespace))
    named = "of an Inspection in clear text must name its author; got '{}'; write 'clear'"
    with pytest.raises(SandboxError, match=named.format("")):
        inspect("clear", "Clear")
    inspect("clear", "Clear", **{author: "clear"})
    for name in (None, "admin"):  # also by those who may change it
        change = {"metadata": {"annotations": {author: name}}}
        with pytest.raises(SandboxError, match=named.format(name or "")):
            cluster.objects.patch("inspection", "clear-clear", change, kube_namespace)
    longer = {"spec": {"ttlAfterFinished": "2h"}}
    cluster.objects.patch("inspection", "clear-clear", longer, kube_namespace)


def config_map(cluster: Cluster, namespace: str, name: str, **labels: str) -> None:
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    cluster.objects.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})


def test_operator_patches_only_config_maps_of_redrive(
    cluster: Cluster, release: str, kube_namespace: str
) -> None:
    ours = {"app.kubernetes.io/managed-by": "redrive"}
    config_map(cluster, kube_namespace, "ours", **ours)
    config_map(cluster, kube_namespace, "theirs")

    running = cluster.objects_as(operator(release))

    def patch(name: str, change: dict[str, Any]) -> None:
        running.patch("configmap", name, change, kube_namespace)

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
    bind(cluster, kube_namespace, "admin", user=operator(release))
    running = cluster.objects_as(operator(release))

    def create(kind: str, **labels: str) -> dict[str, Any]:
        account = {"kubernetes.io/service-account.name": "default"}
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"generateName": "key-", "labels": labels, "annotations": account},
            "type": kind,
        }
        return running.create(body, kube_namespace)

    ours = {"app.kubernetes.io/managed-by": "redrive"}
    unlabelled = "writes only ConfigMaps and Secrets with the label"
    wait_until_refused(lambda: create("Opaque"), unlabelled)
    with pytest.raises(SandboxError, match="only creates Secrets, of type Opaque"):
        create("kubernetes.io/service-account-token", **ours)
    name = create("Opaque", **ours)["metadata"]["name"]
    with pytest.raises(SandboxError, match="only creates Secrets, of type Opaque"):
        running.patch("secret", name, {"stringData": {"key": "other"}}, kube_namespace)


@pytest.mark.parametrize(
    "kind", ["RetryPolicy", "RocketMQRetryPolicy", "BrokerConnection", "Replay"]
)
def test_operator_changes_finalizers_and_no_specs(
    cluster: Cluster, release: str, kube_namespace: str, kind: str
) -> None:
    """It has no right to patch Inspections."""
    cluster.objects.create(manifest(kind), kube_namespace)
    running = cluster.objects_as(operator(release))

    def patch(change: dict[str, Any]) -> None:
        running.patch(kind.lower(), "one", change, kube_namespace)

    def change_spec() -> None:
        change: dict[str, Any] = {"connectionRef": {"name": str(time.monotonic())}}
        if kind == "BrokerConnection":
            change = {"pulsar": {"adminURL": f"http://thief:{time.monotonic_ns() % 60_000}"}}
        if kind == "Replay":
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
        cluster.objects.create(body, kube_namespace)

    create("stays")
    create("goes", ttlAfterFinished="1h")

    running = cluster.objects_as(operator(release))

    def delete(name: str) -> None:
        running.delete("replay", name, kube_namespace)

    refused = "the operator deletes only Replays that have ended"

    def delete_running() -> None:
        delete("goes")
        create("goes", ttlAfterFinished="1h")

    wait_until_refused(delete_running, refused)

    cluster.objects.patch("replay", "goes", forged, kube_namespace, "status")
    with pytest.raises(SandboxError, match=refused):
        delete("goes")
    for name in ("stays", "goes"):
        cluster.objects.patch("replay", name, ended, kube_namespace)
    with pytest.raises(SandboxError, match=refused):
        delete("stays")
    delete("goes")

    cluster.objects.create(manifest("Inspection"), kube_namespace)
    with pytest.raises(SandboxError, match="the operator deletes only Inspections that have ended"):
        running.delete("inspection", "one", kube_namespace)
    completed = {"status": {"phase": "Completed"}}
    cluster.objects.patch("inspection", "one", completed, kube_namespace, "status")
    running.delete("inspection", "one", kube_namespace)


@pytest.mark.usefixtures("release")
@pytest.mark.parametrize(("kind", "name"), [("Replay", "job"), ("Inspection", "inspection")])
def test_jobs_write_only_the_run_of_a_status(
    cluster: Cluster, kube_namespace: str, kind: str, name: str
) -> None:
    chart.prepare_replays(cluster, kube_namespace)
    cluster.objects.create(manifest(kind), kube_namespace)
    job = cluster.objects_as(f"system:serviceaccount:{kube_namespace}:redrive-{name}")

    def patch(status: dict[str, Any], user: Objects = job) -> None:
        user.patch(kind.lower(), "one", {"status": status}, kube_namespace, "status")

    refused = "a job writes only status.run of its Replay or Inspection"
    patch({"phase": "Running"}, cluster.objects)

    def forge() -> None:
        patch({"completionTime": f"2026-01-01T00:00:{int(time.time()) % 60:02}Z"})

    wait_until_refused(forge, refused)
    for forged in ({"phase": "Completed"}, {"phase": None}, {"warnings": ["Other"]}):
        with pytest.raises(SandboxError, match=refused):
            patch(forged)
    patch({"run": {"finished": True}})
    patch({"run": None})


def test_replay_jobs_have_rights_in_prepared_namespaces_only(
    cluster: Cluster, kube_namespace: str
) -> None:
    chart.prepare_replays(cluster, kube_namespace)
    user, job, inspection = (
        f"system:serviceaccount:{kube_namespace}:redrive-{name}"
        for name in ("replay", "job", "inspection")
    )

    def patches_status(account: str, kind: str) -> bool:
        resource = f"{kind}.redrive.io"
        return may(cluster, account, "patch", resource, kube_namespace, subresource="status")

    wait_until(  # the API server reads roles and bindings after a while
        lambda: (
            may(cluster, user, "create", "pods", kube_namespace)
            and patches_status(user, "replays")
            and patches_status(job, "replays")
            and patches_status(inspection, "inspections")
        )
    )
    assert not may(cluster, user, "create", "pods", "default")
    assert not may(cluster, job, "create", "pods", kube_namespace)
    assert not patches_status(inspection, "replays")
    assert not patches_status(job, "inspections")
    # They belong to other programs, and RBAC can't limit a driver to those that it created.
    for verb in ("get", "list", "create", "update", "patch", "delete", "deletecollection"):
        for resource in ("configmaps", "secrets"):
            for account in (user, job, inspection):
                assert not may(cluster, account, verb, resource, kube_namespace), (verb, resource)


@pytest.fixture(scope="module")
def launching(cluster: Cluster) -> Iterator[str]:
    """The operator's user of a release that runs Replays by both Spark operators."""
    cluster.define(spark.definitions())
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

    running = cluster.objects_as(launching)

    def create(body: dict[str, Any]) -> None:
        running.create(body, dry_run=True)

    for body in made.values():
        # A Job without labels has those of its pods.
        unlabelled = changed(body, ("metadata", "labels"), {"queue": "batch"})
        message = JOB_LABEL if body["kind"] == "Job" else LABEL
        wait_until_refused(functools.partial(create, unlabelled), message)
        create(body)
    for launcher, path, value, message in FORGED:
        with pytest.raises(SandboxError, match=message):
            create(changed(made[launcher], path, value))
