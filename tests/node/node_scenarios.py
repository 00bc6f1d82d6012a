"""The demo with drivers and executors in pods, and their failures.

One installation in namespaces that admit restricted pods only. Each test continues the previous
one, in the order of this file.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pulsar
import pytest

from redrive.policy.envelope import CAUSE_TYPE
from sandbox.demo.shop import REPLAYER
from sandbox.demo.stage import NAMESPACE
from sandbox.demo.story import DEAD_LETTER_TOPIC, RETRY_TOPIC, Story
from sandbox.errors import SandboxError
from sandbox.process import Processes
from sandbox.pulsar import SUPERUSER, Broker
from sandbox.sandbox import Sandbox
from tests.node.conftest import (
    LOST,
    RESTRICTED,
    Node,
    User,
    left_in,
    make_restricted,
    remove_redrive,
    spark_operator_running,
)
from tests.support.documented import INSTALL

ORDERS = 300
SECONDS = 300
SYSTEM = "redrive-system"
# Both Spark operators have this kind; kubectl would choose one of them.
APPLICATIONS = "sparkapplications.sparkoperator.k8s.io"
LONGEST_NAME = f"{'a-replay-with-a-long-name.' * 2}e{'n' * 9}d"


@dataclass(frozen=True)
class Shop:
    """The shop of the demo, where redrive runs in pods."""

    user: User
    node: Node
    broker: Broker
    story: Story
    client: pulsar.Client
    last: ExitStack
    buried: dict[str, set[str]] = field(default_factory=dict)

    def kubectl(self, *args: str, text: str | None = None) -> str:
        """Call kubectl in the namespace of the shop."""
        return self.node.kubectl("-n", NAMESPACE, *args, input=text)

    def upgrade(self, *settings: str, **values: Any) -> None:  # noqa: ANN401  values of a chart
        """Change values of the release, and wait for the rollout."""
        file = self.user.folder / "upgrade.yaml"
        file.write_text(json.dumps(values), "utf-8")
        chosen = " ".join((*(f"--set {setting}" for setting in settings), f"--values {file}"))
        self.user.paste(
            f"helm upgrade redrive charts/redrive --namespace {SYSTEM} --reuse-values {chosen}\n"
            f"kubectl -n {SYSTEM} rollout status deployment/redrive --timeout=3m"
        )

    def bury(self, name: str, count: int, cause: str = "") -> str:
        """Produce *count* dead letters for the Replay *name*; return their cause."""
        cause = cause or f"Cause{len(self.buried)}"
        ids = self.buried[name] = {f"{cause}-{name}-{number}" for number in range(count)}
        producer = self.client.create_producer(DEAD_LETTER_TOPIC)
        for id_ in ids:
            producer.send(id_.encode(), properties={"id": id_, CAUSE_TYPE: cause})
        producer.close()
        return cause

    def replay(self, name: str, count: int = 6, *, sql: bool = True, **spec: Any) -> str:  # noqa: ANN401  of a Replay
        """Produce *count* dead letters, and create a Replay that selects only their cause.

        Other Replays are deleted: it would wait for the Replay of a failed test.
        """
        self.kubectl("delete", "replays", "--all")
        cause = self.bury(name, count)
        wanted = {
            "apiVersion": "redrive.io/v1beta1",
            "kind": "Replay",
            "metadata": {"name": name},
            "spec": {
                "policyRef": {"name": "orders-fulfilment"},
                "select": {"where": f"cause_type = '{cause}'"} if sql else {"causes": [cause]},
                "engine": "Spark",
                **spec,
            },
        }
        self.kubectl("create", "-f", "-", text=json.dumps(wanted))
        return cause

    def get(self, target: str, path: str) -> str:
        """Return a field of an object."""
        return self.kubectl("get", target, "-o", f"jsonpath={{{path}}}")

    def wait(self, target: str, path: str, value: str) -> None:
        """Wait until a field has a value; fail with the state of the cluster."""
        until = f"--for=jsonpath={{{path}}}={value}"
        try:
            self.kubectl("wait", until, target, f"--timeout={SECONDS}s")
        except SandboxError as error:
            self.tell()
            pytest.fail(f"{error}\n{self.kubectl('get', target, '-o', 'yaml')}")

    def tell(self) -> None:
        """Print objects, Events and logs for the analysis of a failure."""
        for args in (
            ("get", f"replays,{APPLICATIONS},pods", "-A"),
            ("get", "events", "--sort-by=.lastTimestamp"),
            ("logs", "-l", "spark-role=driver", "--tail=60"),
            ("logs", "-n", SYSTEM, "-l", "app.kubernetes.io/name=redrive", "--tail=60"),
            ("logs", "-n", "spark-operator", "--all-pods", "deploy/spark-operator", "--tail=60"),
        ):
            try:
                print(self.kubectl(*args))  # noqa: T201
            except SandboxError as error:
                print(error)  # noqa: T201

    def condition(self, name: str, reason: str) -> str:
        """Wait until a Replay is not Ready for *reason*, and return the message."""
        ready = '.status.conditions[?(@.type=="Ready")]'
        self.wait(f"replay/{name}", f"{ready}.reason", reason)
        return self.get(f"replay/{name}", f"{ready}.message")

    def completes(self, name: str) -> None:
        """Wait until a Replay is Complete; check that it moved each dead letter once."""
        self.wait(f"replay/{name}", '.status.conditions[?(@.type=="Complete")].status', "True")
        assert self.get(f"replay/{name}", ".status.run.counts.left") in ("", "0")
        assert self.arrived(name) == Counter(self.buried[name])

    def arrived(self, name: str) -> Counter[str]:
        """Count the ids that a Replay has moved."""
        return Counter(id_ for id_ in self._in_retry_topic() if id_ in self.buried[name])

    def _in_retry_topic(self) -> Iterator[str]:
        for partition in self.client.get_topic_partitions(RETRY_TOPIC):
            reader = self.client.create_reader(partition, pulsar.MessageId.earliest)
            while reader.has_message_available():
                yield reader.read_next().properties().get("id", "")
            reader.close()


@pytest.fixture(scope="module")
def shop(
    user: User, node: Node, broker: Broker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shop]:
    """The demo up to its dead letters; redrive runs in pods, the programs of the shop do not."""
    state = tmp_path_factory.mktemp("story")
    make_restricted(node, SYSTEM)
    user.follow(INSTALL, "The operator")
    processes = Processes(state)
    story = Story(Sandbox(state, processes, broker, node), ORDERS)
    client = pulsar.Client(
        broker.service_url, pulsar.AuthenticationToken(broker.token(SUPERUSER)),
        logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
    )  # fmt: skip
    with ExitStack() as last:
        opened = Shop(user, node, broker, story, client, last)
        try:
            # Small requests, so that all pods of a run fit on a small node.
            request = "spec.containers[0].resources.requests.cpu=100m"
            pods = ("job", "driver", "executor")
            opened.upgrade(*(f"jobTemplates.default.{pod}.{request}" for pod in pods))
            story.declare()
            node.kubectl("label", "namespace", NAMESPACE, RESTRICTED)
            story.fail()
            yield opened
        finally:
            client.close()
            processes.stop_all()
            remove_redrive(node)


@pytest.fixture(scope="module")
def without_spark_operator(shop: Shop) -> Shop:
    """The shop in a cluster without the CRDs of a Spark operator."""
    assert "sparkapplications" not in shop.kubectl("get", "crds")
    return shop


def test_a_replay_waits_until_a_spark_operator_is_installed(
    without_spark_operator: Shop, request: pytest.FixtureRequest
) -> None:
    shop = without_spark_operator
    shop.replay("early", count=0)  # the dead letters of the demo
    message = shop.condition("early", "SparkOperatorNotFound")
    assert "install the Spark operator" in message
    request.getfixturevalue("replays")
    shop.completes("early")


@pytest.fixture(scope="module")
def replays(shop: Shop) -> Shop:
    """The shop in a cluster where Replays run."""
    shop.last.enter_context(spark_operator_running(shop.node, shop.user))
    return shop


def test_the_story_of_the_demo_ends_well_with_its_job_in_pods(replays: Shop) -> None:
    replays.story.replay()
    account = replays.story.settle()
    assert account.faults == {}
    assert len(account.produced) == ORDERS
    malformed = {f"order-{n:06}" for n in range(ORDERS) if n % 100 < 2}
    assert account.dead == malformed
    assert account.done == account.produced - malformed


def driver_under_way(shop: Shop, name: str, engine: str) -> tuple[str, str]:
    """Wait until a Replay has moved messages; return its application and the pod of its driver."""
    deadline = time.monotonic() + SECONDS
    # Its progress is visible before its only range ends.
    while not int(shop.get(f"replay/{name}", ".status.run.counts.moved") or 0):
        assert time.monotonic() < deadline, shop.kubectl("get", f"replay/{name}", "-o", "yaml")
        time.sleep(0.5)
    if engine == "Job":
        application = f"job/{shop.get(f'replay/{name}', '.status.job')}"
        pods = f"batch.kubernetes.io/job-name={application.removeprefix('job/')}"
    else:
        application = shop.get(f"replay/{name}", ".status.sparkApplication")
        of_application = f"sparkoperator.k8s.io/app-name={application},spark-role="
        shop.kubectl("wait", "--for=condition=Ready", "pod", "-l", f"{of_application}executor")
        application, pods = f"{APPLICATIONS}/{application}", f"{of_application}driver"
    pod = shop.kubectl("get", "pods", "-l", pods, "--output=name").strip().removeprefix("pod/")
    return application, pod


@pytest.mark.parametrize("launched", ["Spark", "Job"])
@pytest.mark.parametrize("end", ["deleted", "evicted"])
def test_ended_driver_is_replaced_and_completes(replays: Shop, end: str, launched: str) -> None:
    name, count = f"{end}-{launched.lower()}", 300
    replays.replay(name, count, sql=False, engine=launched, rateLimit={"messages": 5})
    application, pod = driver_under_way(replays, name, launched)
    if end == "evicted":  # with a grace period, in which the driver continues
        replays.node.evict(NAMESPACE, pod)
        replays.kubectl("wait", "--for=delete", f"pod/{pod}", "--timeout=1m")
    else:
        replays.kubectl("delete", "pod", pod, "--now")
    assert 0 < replays.arrived(name).total() < count
    replays.completes(name)
    if launched == "Spark":
        assert int(replays.get(application, ".status.executionAttempts")) > 1
        return
    assert replays.get(application, ".status.succeeded") == "1"
    failed = int(replays.get(application, ".status.failed") or 0)
    assert failed == (end == "deleted")  # an eviction is no failure
    account = ".spec.template.spec.serviceAccountName"
    assert replays.get(application, account) == "redrive-job"


@pytest.mark.skipif(LOST not in os.environ, reason=f"{LOST}: say how the node is lost")
@pytest.mark.parametrize("launched", ["Spark", "Job"])
def test_replay_completes_after_its_node_was_lost(replays: Shop, launched: str) -> None:
    name, count = f"lost-{launched.lower()}", 300
    replays.replay(name, count, sql=False, engine=launched, rateLimit={"messages": 5})
    _, pod = driver_under_way(replays, name, launched)
    uid = replays.get(f"pod/{pod}", ".metadata.uid")
    replays.user.paste(os.environ[LOST])
    assert uid not in replays.get("pods", ".items[*].metadata.uid").split()
    assert 0 < replays.arrived(name).total() < count
    replays.completes(name)


def test_job_selects_by_sql_in_its_pod(shop: Shop) -> None:
    shop.replay("by-job-and-sql", engine="Job")
    shop.completes("by-job-and-sql")


def test_job_starts_once_a_quota_admits_its_pod(shop: Shop) -> None:
    shop.kubectl("create", "quota", "no-pods", "--hard=pods=0")
    shop.kubectl("wait", "--for=jsonpath={.status.hard.pods}=0", "quota/no-pods")
    shop.replay("refused-pod", sql=False, engine="Job")
    message = shop.condition("refused-pod", "DriverNotStarted")
    assert "exceeded quota: no-pods" in message
    command = re.search(r"`(kubectl [^`]+)`", message)
    assert command
    assert "exceeded quota: no-pods" in shop.user.paste(command[1])
    shop.kubectl("delete", "quota/no-pods")
    shop.completes("refused-pod")


def test_confirmed_review_moves_what_it_showed(shop: Shop) -> None:
    cause = shop.replay("reviewed", sql=False, engine="Job", mode="Review")
    message = shop.condition("reviewed", "InReview")
    assert f"the plan has {len(shop.buried['reviewed'])} dead letters to move" in message
    shop.bury("later", 3, cause)
    shop.kubectl("patch", "replay/reviewed", "--type=merge", "-p", '{"spec": {"mode": "Run"}}')
    shop.completes("reviewed")
    assert shop.arrived("later") == Counter()


def test_dead_letters_are_read_by_inspections_in_pods(shop: Shop) -> None:
    """As a person who may create Inspections, and no Replay."""
    secret(shop, shop.broker.token("inspector"), name="pulsar-inspector")
    token = {"secretRef": {"name": "pulsar-inspector", "key": "token"}}
    authentication = {"type": "Token", "token": token}
    inspection = {"role": "inspector", "authentication": authentication, "clearPayloads": "Allowed"}
    patch = json.dumps({"spec": {"inspection": inspection}})
    shop.kubectl("patch", "brokerconnection/main", "--type=merge", "-p", patch)
    for role in ("inspector", "revealer"):
        bound = f"--clusterrole=redrive-{role}.{SYSTEM}", "--user=ines"
        shop.kubectl("create", "rolebinding", role, *bound)
    count = 4
    cause = shop.bury("inspected", count)
    own = f"orders-fulfilment --namespace {NAMESPACE} --as ines"

    causes = shop.user.paste(f"kubectl redrive causes {own}")
    masked = shop.user.paste(f"kubectl redrive peek {own} --cause {cause} --limit {count}")
    clear = shop.user.paste(f"kubectl redrive peek {own} --cause {cause} --limit 1 --reveal")

    assert [str(count), cause] in [row.split()[:2] for row in causes.splitlines()]
    assert masked.count(f"cause      {cause}") == count
    assert sum(id_ in clear for id_ in shop.buried["inspected"]) == 1
    of_inspections = "app.kubernetes.io/component=inspection"
    logs = shop.kubectl("logs", "--selector", of_inspections, "--tail=-1")
    objects = shop.kubectl("get", "inspections,jobs,pods,events", "--output=yaml")
    assert "are selected" in logs
    for id_ in shop.buried["inspected"]:
        assert id_ not in masked + logs + objects


def secret(shop: Shop, token: str, key: str = "token", name: str = "pulsar-replayer") -> None:
    manifest = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": name,
            "annotations": {"redrive.io/usable-by": f"{NAMESPACE}/main"},
        },
        "stringData": {key: token},
    }
    shop.kubectl("apply", "-f", "-", text=json.dumps(manifest))


def test_refused_token_is_reported_and_the_new_one_used(replays: Shop) -> None:
    token = replays.broker.token(REPLAYER)
    secret(replays, token[:-6] + "wrong0")
    replays.replay("refused")
    shown = "--for=jsonpath={.status.run.failure.reason}"
    replays.kubectl("wait", shown, "replay/refused", f"--timeout={SECONDS}s")
    reason = replays.get("replay/refused", ".status.run.failure.reason")
    assert reason in {"AuthenticationFailed", "ReplayRoleRefused"}
    secret(replays, token)
    replays.completes("refused")


def test_a_missing_service_account_is_made_as_the_condition_says(replays: Shop) -> None:
    objects = "serviceaccount,role,rolebinding"
    replays.kubectl("delete", objects, "-l", "app.kubernetes.io/instance=redrive")
    replays.replay("no-account")
    message = replays.condition("no-account", "ServiceAccountNotFound")
    assert f"add {NAMESPACE} to replay.namespaces" in message
    replays.upgrade(f"'replay.namespaces={{{NAMESPACE}}}'")
    replays.completes("no-account")


def not_started(shop: Shop, name: str) -> str:
    """Wait until the condition names the pod and the cause; its command must show the same."""
    message = shop.condition(name, "DriverNotStarted")
    application = shop.get(f"replay/{name}", ".status.sparkApplication")
    assert f"{application}-driver" in message
    command = re.search(r"`(kubectl [^`]+)`", message)
    assert command
    described = shop.user.paste(command[1])
    why = re.search(r"after it was submitted: \w+: (.+?)(?:…|; got)", message)
    assert why
    assert why[1].split(":")[0] in described
    return why[0]


def test_a_missing_secret_or_key_is_named_by_the_condition(replays: Shop) -> None:
    token = replays.broker.token(REPLAYER)
    replays.kubectl("delete", "secret", "pulsar-replayer")
    replays.replay("no-secret")
    message = replays.condition("no-secret", "ConsentMissing")
    assert f"got '{NAMESPACE}/pulsar-replayer'" in message
    secret(replays, token, key="other")
    why = not_started(replays, "no-secret")
    assert "references non-existent secret key: token" in why
    secret(replays, token)
    replays.completes("no-secret")


def test_a_missing_image_is_named_by_the_condition(replays: Shop) -> None:
    replays.upgrade("replay.image.tag=missing")
    replays.replay("no-image")
    why = not_started(replays, "no-image")
    assert re.search(r"ErrImagePull|ImagePullBackOff", why)
    assert "registry.example/redrive-replay:missing" in why
    replays.upgrade("replay.image.tag=")
    application = replays.get("replay/no-image", ".status.sparkApplication")
    replays.kubectl("delete", APPLICATIONS, application)
    replays.completes("no-image")


def test_a_name_of_63_characters_reaches_a_pod(replays: Shop) -> None:
    assert len(LONGEST_NAME) == 63
    replays.replay(LONGEST_NAME)
    replays.completes(LONGEST_NAME)


SHAPED = {
    "metadata": {"labels": {"cost-centre": "42"}},
    "executors": 1,
    **{
        role: {
            "metadata": {"labels": {"team": role}, "annotations": {"example.com/note": role}},
            "spec": {
                "nodeSelector": {"kubernetes.io/os": "linux"},
                "tolerations": [{"key": "spot", "operator": "Exists"}],
                "terminationGracePeriodSeconds": 25,
                "volumes": [{"name": "scratch", "emptyDir": {}}],
                "initContainers": [
                    {"name": "first", "image": "registry.example/redrive:1", "command": ["true"]}
                ],
                "containers": [
                    {
                        "name": "redrive",
                        "imagePullPolicy": "Never",
                        "env": [{"name": "GREETING", "value": "hello"}],
                        "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
                        "resources": {
                            "requests": {"cpu": "150m"},
                            "limits": {"cpu": 1, "memory": "1Gi", "ephemeral-storage": "2Gi"},
                        },
                    }
                ],
            },
        }
        for role in ("driver", "executor")
    },
}
"""A job template that sets many fields of pods."""
KUBEFLOW = {"kubeflow": True, "apache": False}
APACHE = {"kubeflow": False, "apache": True}
SPARK_NAMES = re.compile(
    r"spark-(?:drv|exec)-[0-9a-f]+-conf-map|kube-api-access-\w+|spark-[-0-9a-f]{32,36}|[0-9a-f]{16,}"
)
OF_OPERATORS = ("sparkoperator.k8s.io/", "spark.operator/", "spark-")


def pods_of(shop: Shop, name: str) -> dict[str, dict[str, Any]]:
    """Wait until the pods of a Replay run; return them by role."""
    shop.wait(f"replay/{name}", ".status.phase", "Running")
    selector = f"redrive.io/replay={name},spark-role="
    pods = {}
    for role in ("driver", "executor"):
        target = "pod", "-l", f"{selector}{role}", f"--timeout={SECONDS}s"
        shop.kubectl("wait", "--for=create", *target)
        shop.kubectl("wait", "--for=condition=Ready", *target)
        listed = shop.kubectl("get", "pod", "-l", f"{selector}{role}", "-o", "json")
        (pods[role],) = json.loads(listed)["items"]
    return pods


def shape(pod: dict[str, Any], replay: str, application: str) -> dict[str, Any]:
    """Return a pod without values that differ between runs and between Spark operators."""
    metadata, spec = pod["metadata"], pod["spec"]
    for container in spec["containers"]:
        del container["args"]  # the job, and addresses of Spark
        container["env"] = [v for v in container["env"] if not v["name"].startswith("SPARK_")]
    labels = {k: v for k, v in metadata["labels"].items() if not k.startswith(OF_OPERATORS)}
    kept = {"labels": labels, "annotations": metadata.get("annotations"), "spec": spec}
    text = json.dumps(kept).replace(application, "APPLICATION").replace(replay, "REPLAY")
    shaped: dict[str, Any] = json.loads(SPARK_NAMES.sub("NAME", text))
    return shaped


def test_same_template_makes_same_pods_with_both_operators(replays: Shop) -> None:
    """A Replay waits for its job template, and starts once the operator has read it."""
    shapes = []
    for name, launchers in (("by-kubeflow", KUBEFLOW), ("by-apache", APACHE)):
        replays.upgrade(replay={"launchers": launchers})
        replays.replay(name, jobTemplate={"name": "shaped"}, count=40, rateLimit={"messages": 2})
        if launchers is KUBEFLOW:
            message = replays.condition(name, "JobTemplateNotFound")
            assert "this Replay starts automatically" in message
            replays.upgrade(jobTemplates={"shaped": SHAPED})
        pods = pods_of(replays, name)
        application = replays.get(f"replay/{name}", ".status.sparkApplication")
        shapes.append({role: shape(pod, name, application) for role, pod in pods.items()})
        replays.kubectl(
            "patch", f"replay/{name}", "--type=merge", "-p", '{"spec": {"rateLimit": null}}'
        )
        replays.completes(name)
    replays.upgrade(replay={"launchers": KUBEFLOW})
    kubeflow, apache = shapes
    for role, pod in kubeflow.items():
        assert apache[role] == pod
        check_shaped(role, pod)


def check_shaped(role: str, pod: dict[str, Any]) -> None:
    """Check that a pod has the fields of the template `SHAPED`."""
    assert pod["labels"]["team"] == pod["annotations"]["example.com/note"] == role
    spec = pod["spec"]
    assert spec["nodeSelector"]["kubernetes.io/os"] == "linux"
    assert {"key": "spot", "operator": "Exists"} in spec["tolerations"]
    assert "scratch" in {volume["name"] for volume in spec["volumes"]}
    assert [container["name"] for container in spec["initContainers"]] == ["first"]
    (container,) = spec["containers"]
    assert container["imagePullPolicy"] == "Never"
    assert {"name": "GREETING", "value": "hello"} in container["env"]
    assert "/scratch" in {mount["mountPath"] for mount in container["volumeMounts"]}
    resources = container["resources"]
    assert resources["requests"]["cpu"] == "150m"
    assert resources["limits"] == {"cpu": "1", "memory": "1Gi", "ephemeral-storage": "2Gi"}
    assert spec["terminationGracePeriodSeconds"] == 25


def test_a_replica_that_is_drained_hands_over(replays: Shop) -> None:
    """Evict the leader as by `kubectl drain` during a Replay: another replica completes it."""

    def leader() -> str:
        holder = ".spec.holderIdentity"
        return replays.node.kubectl(
            "get", "lease/redrive", "-n", SYSTEM, "-o", f"jsonpath={{{holder}}}"
        )

    replays.replay("drained", count=40, rateLimit={"messages": 4})
    replays.wait("replay/drained", ".status.phase", "Running")
    before = leader()
    pods = replays.node.kubectl("get", "pods", "-n", SYSTEM, "--output=name").split()
    (name,) = [pod.removeprefix("pod/") for pod in pods if pod.removeprefix("pod/") in before]
    replays.node.evict(SYSTEM, name)
    replays.completes("drained")
    assert leader() != before


def test_what_is_deleted_leaves_nothing(replays: Shop) -> None:
    """Delete the namespace during a Replay, and then the operator."""
    replays.replay("last", count=100, rateLimit={"messages": 1})
    replays.wait("replay/last", ".status.phase", "Running")
    replays.kubectl("delete", "replays,inspections", "--all")
    replays.kubectl("wait", "--for=delete", f"{APPLICATIONS},pods", "--all", "--timeout=3m")
    stay = {"configmap/kube-root-ca.crt", "configmap/orders-fulfilment-redrive"}
    deadline = time.monotonic() + SECONDS
    kinds = "services,configmaps,networkpolicies"
    # Objects owned by the driver are deleted after it.
    while others := set(replays.kubectl("get", kinds, "--output=name").split()) - stay:
        assert time.monotonic() < deadline, others
        time.sleep(1)
    replays.user.follow(INSTALL, "Uninstall")
    assert left_in(replays.node, SYSTEM) == set()
    replays.node.kubectl("delete", "namespace", NAMESPACE, "--timeout=2m")
