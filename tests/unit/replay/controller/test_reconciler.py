"""Reconciles of a Replay, also with a fault at each write."""

from __future__ import annotations

import asyncio
import base64
import copy
import dataclasses
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from redrive.admin.errors import BrokerDownError
from redrive.api import Body
from redrive.api.conditions import ObjectEvent
from redrive.api.job import JobTemplate
from redrive.api.replay_status import ADMITTED, CHECKED, ReplayStatus
from redrive.errors import RedriveError, Requeue
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.client import ConflictError, ForbiddenError, KubernetesError, UnavailableError
from redrive.kube.context import Context, Settings, wall_clock
from redrive.kube.resources import CONNECTION, Key, Resource
from redrive.policy.naming import TopicName
from redrive.reasons import Reason
from redrive.replay.controller import launch
from redrive.replay.controller.admission import ENDED_AT
from redrive.replay.controller.keys import KEY_ID
from redrive.replay.controller.reconciler import reconcile
from redrive.replay.evidence import KEY_BYTES, LedgerKey
from tests.support.crd_fields import SpecField, SpecFields
from tests.support.fake_kubernetes import Crash, FakeKubernetes, Fault, Faulty, edit
from tests.unit.replay.controller.test_admission import (
    IN_ROCKETMQ,
    SETTINGS,
    connection,
    ctx,
    launched,
    policy,
    replay,
    reported,
    rocketmq,
    with_templates,
)

KEY = Key("shop", "now")
ACCOUNT = Key("shop", "redrive-replay")
SECRET = Key("shop", "pulsar-replayer")
USABLE = {"annotations": {"redrive.io/usable-by": "shop/main"}}
TEMPLATE = SETTINGS.replay_template or Key("", "")
OPERATOR_SECRET = Key("redrive", "replay-keys")
LAUNCH = ["Secret", "SparkApplication"]
"""Kinds of the objects that a launch creates."""
MASTER = base64.b64encode(b"5a" * 32).decode()


@pytest.fixture
def api() -> FakeKubernetes:
    """An API server with one Replay."""
    return storing(replay())


def storing(body: dict[str, Any]) -> FakeKubernetes:
    """Return an API server with one Replay."""
    api = FakeKubernetes()
    api.add(resources.REPLAYS, body)
    provide_image(api)
    return api


async def reconcile_cached(
    api: FakeKubernetes,
    body: dict[str, Any],
    *applications: dict[str, Any],
    **changes: Any,  # noqa: ANN401  of a Context
) -> Requeue:
    """Reconcile a Replay once, with *body* and its applications in the caches."""
    context = ctx(replays=[body], applications=list(applications))
    context = dataclasses.replace(context, kubernetes=api, **changes)
    return await reconcile(Key.of(body), context, asyncio.Lock())


def provide_image(api: FakeKubernetes) -> None:
    """Add the PodTemplate of the operator, and its Secret."""
    template = {"spec": {"containers": [{"image": "job"}]}}
    api.add(resources.POD_TEMPLATES, {"metadata": TEMPLATE._asdict(), "template": template})
    api.add(resources.SECRETS, {"metadata": OPERATOR_SECRET._asdict(), "data": {"current": MASTER}})


def provide(api: FakeKubernetes, namespace: str = "shop") -> None:
    """Add the image, the ServiceAccount and the Secret of jobs."""
    provide_image(api)
    account, secret = (key._replace(namespace=namespace) for key in (ACCOUNT, SECRET))
    usable = {"annotations": {"redrive.io/usable-by": f"{namespace}/main"}}
    api.add(resources.SERVICE_ACCOUNTS, {"metadata": account._asdict()})
    api.add(resources.SECRETS, {"metadata": secret._asdict() | usable})


async def look(
    api: FakeKubernetes,
    settings: Settings = SETTINGS,
    applications: Sequence[dict[str, Any]] = (),
    **status: object,
) -> Requeue:
    """Reconcile the Replay once, with these fields in its status."""
    body = replay(status=status)
    stored = api.objects[resources.REPLAYS].get(Key.of(body), body)
    body["metadata"]["resourceVersion"] = stored["metadata"]["resourceVersion"]
    return await reconcile_cached(api, body, *applications, settings=settings)


def true_conditions(status: Body) -> set[str]:
    """Return the types of the conditions that are true."""
    return {c["type"] for c in status["conditions"] if c["status"] == "True"}


def statuses(api: FakeKubernetes) -> list[dict[str, Any]]:
    """Return each status that was written."""
    return [write.body["status"] for write in api.writes if write.verb == "patch_status"]


async def test_missing_service_account_is_waited_for(
    api: FakeKubernetes,
) -> None:
    read: list[tuple[Resource, Key]] = []

    def note(verb: str, resource: Resource, key: Key) -> None:
        if verb == "annotations":
            read.append((resource, key))

    api.before = note
    assert await look(api) is Requeue.BACKOFF
    assert read == [(resources.SERVICE_ACCOUNTS, ACCOUNT)]
    assert [write.verb for write in api.writes] == ["patch_status"]
    (status,) = statuses(api)
    assert status["phase"] == "Pending"
    ready = next(c for c in status["conditions"] if c["type"] == "Ready")
    assert ready["reason"] == "ServiceAccountNotFound"
    assert "got 'shop/redrive-replay'" in ready["message"]
    assert "add shop to replay.namespaces of the Helm chart" in ready["message"]
    assert "kubectl create serviceaccount redrive-replay -n shop" in ready["message"]
    assert all(c["type"] != "Stalled" for c in status["conditions"])


@pytest.mark.parametrize(
    ("denied", "right"),
    [
        ({"replays"}, "get replays, patch replays/status"),
        ({"replayapprovals"}, "get replayapprovals"),
        ({"services"}, "get/list/watch/create/update/patch/delete/deletecollection services"),
    ],
)
async def test_missing_right_of_the_job_is_waited_for(
    api: FakeKubernetes, denied: set[str], right: str
) -> None:
    provide(api)
    api.denied = denied
    assert await look(api) is Requeue.SLOW_BACKOFF
    reason, message = shown(api)
    assert reason == "JobRightsMissing"
    assert f"may not {right}; got 'shop/redrive-replay'; add shop to replay.namespaces" in message
    api.denied = set()
    await look(api)
    assert shown(api)[0] != reason


async def test_rights_of_an_account_are_reviewed_at_intervals(api: FakeKubernetes) -> None:
    reviews: list[Key] = []

    def note(verb: str, _resource: Resource, key: Key) -> None:
        reviews.extend([key] if verb == "review" else [])

    api.before = note
    api.add(resources.SERVICE_ACCOUNTS, {"metadata": ACCOUNT._asdict()})
    now = wall_clock()
    context = dataclasses.replace(ctx(replays=[replay()]), kubernetes=api, clock=lambda: now)
    for minutes, count in ((0, 27), (9, 27), (1, 54)):
        now += timedelta(minutes=minutes)
        await reconcile(KEY, context, asyncio.Lock())
        assert reviews == [ACCOUNT] * count


async def test_rights_are_not_checked_by_an_operator_that_may_not(api: FakeKubernetes) -> None:
    provide(api)
    api.denied = {"replays"}

    def forbid(verb: str, _resource: Resource, _key: Key) -> None:
        if verb == "review":
            raise ForbiddenError("no", remedy="grant it")

    api.before = forbid
    await look(api)
    assert shown(api)[0] != "JobRightsMissing"


async def test_missing_job_secret_is_waited_for(
    api: FakeKubernetes,
) -> None:
    api.add(resources.SERVICE_ACCOUNTS, {"metadata": ACCOUNT._asdict()})
    assert await look(api) is Requeue.BACKOFF
    assert [write.verb for write in api.writes] == ["patch_status"]
    reason, message = shown(api)
    assert reason == "ConsentMissing"
    assert "got 'shop/pulsar-replayer'; create it if it is missing" in message


async def test_missing_secret_looks_like_one_without_consent(api: FakeKubernetes) -> None:
    """The author of a connection would learn which Secrets exist in other namespaces."""
    api.add(resources.SERVICE_ACCOUNTS, {"metadata": ACCOUNT._asdict()})
    await look(api)
    missing = shown(api)
    api.add(resources.SECRETS, {"metadata": {"namespace": "shop", "name": "pulsar-replayer"}})
    await look(api)
    assert shown(api) == missing
    api.objects[resources.SECRETS].clear()
    api.add(resources.SERVICE_ACCOUNTS, {"metadata": ACCOUNT._asdict() | USABLE})
    await look(api)
    assert shown(api)[0] == "JobSecretNotFound"


PULLED = {"imagePullSecrets": [{"name": "registry"}]}
MOUNTED = {"volumes": [{"name": "authorities", "configMap": {"name": "our-ca"}}]}
CLAIMED = {
    "volumes": [
        {"name": "scratch", "emptyDir": {}},
        {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
    ]
}


@pytest.mark.parametrize("role", ["driver", "executor"])
@pytest.mark.parametrize(
    ("spec", "resource", "name"),
    [
        (PULLED, resources.SECRETS, "registry"),
        (MOUNTED, resources.CONFIG_MAPS, "our-ca"),
        (CLAIMED, resources.CLAIMS, "data"),
    ],
)
async def test_missing_template_reference_is_waited_for(
    api: FakeKubernetes, role: str, spec: dict[str, Any], resource: Resource, name: str
) -> None:
    provide(api)
    template = JobTemplate.model_validate({role: {"spec": spec}})
    templates = with_templates(ctx(), default=template).job_templates
    assert await reconcile_cached(api, replay(), job_templates=templates) is Requeue.BACKOFF
    reason, message = shown(api)
    assert reason == "JobSecretNotFound"
    assert f"a {resource.kind} that the pods of replay jobs need does not exist" in message
    assert f"got 'shop/{name}'" in message
    assert "or in the job template" in message
    api.add(resource, {"metadata": {"namespace": "shop", "name": name}})
    (stored,) = api.objects[resources.REPLAYS].values()
    await reconcile_cached(api, stored, job_templates=templates)
    assert shown(api)[0] == "Progressing"


async def test_invalid_job_template_is_waited_for(api: FakeKubernetes) -> None:
    provide(api)
    templates = with_templates(ctx()).job_templates
    templates._problems = {"default": "`executors` is wrong"}  # noqa: SLF001  as if it were read
    await reconcile_cached(api, replay(), job_templates=templates)
    reason, message = shown(api)
    assert reason == "JobTemplateInvalid"
    assert "the job template default is invalid: `executors` is wrong; correct it" in message
    assert "warnings" not in statuses(api)[-1]


async def test_last_valid_template_runs_with_a_warning(api: FakeKubernetes) -> None:
    provide(api)
    templates = with_templates(ctx(), default=JobTemplate()).job_templates
    templates._problems = {"default": "`executors` is wrong"}  # noqa: SLF001  as if it were read
    await reconcile_cached(api, replay(), job_templates=templates)
    assert [write.resource.kind for write in api.writes if write.verb == "create"]
    assert shown(api)[0] == "Progressing"
    assert statuses(api)[-1]["warnings"] == ["JobTemplateInvalid"]
    assert [event for event in api.announced() if event[1] == "JobTemplateInvalid"]


async def test_field_unknown_to_spark_operator_is_reported(api: FakeKubernetes) -> None:
    provide(api)

    def refuse(verb: str, resource: Resource, _: Key) -> None:
        if (verb, resource) == ("create", resources.SPARK_APPLICATIONS):
            answer = (
                '400 SparkApplication in version "v1" cannot be handled as a SparkApplication: '
                'strict decoding error: unknown field "spec.driver.template"'
            )
            raise KubernetesError("the Kubernetes API refused", got=answer, remedy="it is tried")

    api.before = refuse
    assert await look(api) is Requeue.SLOW_BACKOFF
    reason, message = shown(api)
    assert reason == "JobTemplateInvalid"
    assert "lacks fields of the job template default; got 'driver.template'" in message
    assert "upgrade the Spark operator" in message


THIEF = Key("thief", "main")


def stealing(name: str) -> list[dict[str, Any]]:
    """Return a connection of another namespace that names a Secret of the victim's."""
    token = {"type": "Token", "token": {"secretRef": {"name": name, "key": "password"}}}
    rule = {
        "name": "one",
        "namespaces": {"names": ["shop"]},
        "topics": ["persistent://shop/*/*"],
        "roles": ["*"],
    }
    body = connection(replay={"role": "replayer", "authentication": token}, allow=[rule])
    body["metadata"]["namespace"] = THIEF.namespace
    return [body]


@pytest.mark.parametrize(
    "annotations",
    [
        {},
        {"redrive.io/usable-by": ""},
        {"redrive.io/usable-by": "shop/main"},
        {"redrive.io/usable-by": "main"},
        {"redrive.io/usable-by": "*"},
        {"redrive.io/usable-by": "thief/main2"},
    ],
)
async def test_foreign_connection_gets_no_secret_of_the_replay(
    api: FakeKubernetes, annotations: dict[str, str]
) -> None:
    """Whoever may create Replays would have it sent to an address of a connection of their own."""
    provide(api)
    database = {"namespace": "shop", "name": "database", "annotations": annotations}
    api.add(resources.SECRETS, {"metadata": database})
    account = {
        "metadata": {**ACCOUNT._asdict(), "annotations": {"redrive.io/usable-by": str(THIEF)}}
    }
    api.add(resources.SERVICE_ACCOUNTS, account)
    body = replay()
    context = ctx(
        replays=[body],
        connections=stealing("database"),
        policies=[policy(connectionRef={"name": THIEF.name, "namespace": THIEF.namespace})],
    )
    context = dataclasses.replace(context, kubernetes=api)
    assert await reconcile(Key.of(body), context, asyncio.Lock()) is Requeue.BACKOFF
    assert [write.verb for write in api.writes] == ["patch_status"]
    reason, message = shown(api)
    assert reason == "ConsentMissing"
    assert "got 'shop/database'" in message
    assert "`redrive.io/usable-by: thief/main`" in message
    assert "kubectl annotate secret database -n shop redrive.io/usable-by=thief/main" in message

    api.objects[resources.SECRETS][Key("shop", "database")]["metadata"]["annotations"] = {
        "redrive.io/usable-by": "shop/main, thief/main"
    }
    await reconcile(Key.of(body), context, asyncio.Lock())
    assert [write.resource.kind for write in api.writes if write.verb == "create"] == LAUNCH


async def test_config_map_of_a_connection_needs_consent(api: FakeKubernetes) -> None:
    provide(api)
    our_ca = {"namespace": "shop", "name": "our-ca"}
    api.add(resources.CONFIG_MAPS, {"metadata": our_ca})
    body, through = replay(), connection()
    through["spec"]["replay"]["tls"] = {"caRef": {"name": "our-ca", "key": "ca.crt"}}
    context = dataclasses.replace(ctx(replays=[body], connections=[through]), kubernetes=api)
    await reconcile(Key.of(body), context, asyncio.Lock())
    reason, message = shown(api)
    assert (reason, "ConfigMap" in message) == ("ConsentMissing", True)
    assert "kubectl annotate configmap our-ca -n shop" in message
    api.add(resources.CONFIG_MAPS, {"metadata": {**our_ca, **USABLE}})
    await reconcile(Key.of(body), context, asyncio.Lock())
    assert shown(api)[0] == "Progressing"


async def test_missing_spark_operator_is_reported(api: FakeKubernetes) -> None:
    body = replay()
    body["spec"]["engine"] = "Spark"
    # The Replay is reconciled again when the kind is installed.
    await reconcile_cached(api, body, missing=(resources.SPARK_APPLICATIONS,))
    assert [write.verb for write in api.writes] == ["patch_status"]
    reason, message = shown(api)
    assert reason == "SparkOperatorNotFound"
    assert "install the Spark operator" in message


async def test_replay_with_prerequisites_is_launched(api: FakeKubernetes) -> None:
    provide(api)
    assert await look(api) is Requeue.BACKOFF  # until the application has a state
    created = [write.resource.kind for write in api.writes if write.verb == "create"]
    assert created == LAUNCH
    assert [status["phase"] for status in statuses(api)] == ["Submitted"]


async def key_of_job(api: FakeKubernetes, context: Context, replay: Key = KEY) -> str:
    """Launch a Replay in *context*; return the key that its pods mount, in hexadecimal digits."""
    await reconcile(replay, dataclasses.replace(context, kubernetes=api), asyncio.Lock())
    created = [write.body for write in api.writes if write.verb == "create"]
    secret, application = created[-2:]
    volumes = application["spec"]["driver"]["template"]["spec"]["volumes"]
    assert [source["secret"]["name"] for v in volumes for source in v["projected"]["sources"]] == [
        SECRET.name,
        secret["metadata"]["name"],
    ]
    assert (secret["type"], secret["immutable"]) == ("Opaque", True)
    (owner,) = secret["metadata"]["ownerReferences"]
    assert owner["kind"] == "RetryPolicy"
    return base64.b64decode(secret["data"]["key"]).decode()


async def test_ledger_key_is_the_same_in_each_launch_and_restore() -> None:
    """The key of the operator stays, and everything else is lost."""
    properties, keys = dict[str, str](), set[str]()
    for _ in range(2):
        api, context = storing(replay()), ctx(replays=[replay()])
        provide(api)
        context.brokers.properties.update(properties)  # type: ignore[attr-defined]
        keys.add(await key_of_job(api, context))
        properties = context.brokers.properties  # type: ignore[attr-defined]
    assert len(keys) == len(properties) == 1
    assert MASTER not in str(keys)


async def test_other_namespace_gets_another_key_of_a_ledger() -> None:
    """At a broker of its own it may have any topic, and read the key in its Secrets."""
    keys = set[str]()
    for namespace in ("shop", "thief"):
        bodies = {"policies": policy(), "connections": connection(), "replays": replay()}
        for body in bodies.values():
            body["metadata"]["namespace"] = namespace
        api = storing(bodies["replays"])
        provide(api, namespace)
        context = ctx(**{table: [body] for table, body in bodies.items()})
        keys.add(await key_of_job(api, context, Key(namespace, "now")))
    assert len(keys) == 2


async def launched_for_rocketmq(
    internal: dict[str, Any], *, keys: Mapping[str, str] | None = None, messages: int = 0
) -> FakeKubernetes:
    """Launch a Replay of RocketMQ; return the API server.

    Args:
        internal: internal status of the policy.
        keys: further entries of the operator's Secret.
        messages: number of messages in the ledger.
    """
    body = replay(spec=IN_ROCKETMQ)
    lent: Any = {"namespace": "shop", "name": "replayer"}
    lent["annotations"] = {"redrive.io/usable-by": "shop/main"}
    api, context = storing(body), rocketmq()
    provide_image(api)
    account = ACCOUNT._replace(name="redrive-job")
    api.add(resources.SERVICE_ACCOUNTS, {"metadata": account._asdict()})
    api.add(resources.SECRETS, {"metadata": lent})
    api.objects[resources.SECRETS][OPERATOR_SECRET]["data"] |= keys or {}
    (policy,) = context.rocketmq_policies
    policy["status"]["internal"] = internal
    api.add(resources.ROCKETMQ_POLICIES, policy)

    async def listed(*_: object) -> Any:  # noqa: ANN401
        return ("broker-a", "broker-b")

    async def stored(_: str, topic: str) -> int:
        assert topic.startswith("redrive-ledger")
        return messages

    session = SimpleNamespace(masters=listed, messages=stored)
    admin = SimpleNamespace(session=lambda: nullcontext(session))

    async def connected(*_: object) -> Any:  # noqa: ANN401
        return SimpleNamespace(admin=admin)

    applications = {resources.JOBS: Cache()}
    changed: Any = {"kubernetes": api, "replays": Cache([body]), "applications": applications}
    changed["brokers"] = SimpleNamespace(rocketmq=connected)
    await reconcile(KEY, dataclasses.replace(context, **changed), asyncio.Lock())
    return api


async def test_key_of_rocketmq_is_the_recorded_one() -> None:
    """A broker of RocketMQ stores no properties, so the status of the policy has the id."""
    first = await launched_for_rocketmq({})
    (policy,) = [w.body for w in first.writes if w.resource is resources.ROCKETMQ_POLICIES]
    (secret,) = [w.body for w in first.writes if w.resource is resources.SECRETS]
    assert secret["metadata"]["ownerReferences"][0]["kind"] == "RocketMQRetryPolicy"
    again = await launched_for_rocketmq(policy["status"]["internal"], messages=1)
    assert secret["data"] in [w.body.get("data") for w in again.writes]
    assert resources.ROCKETMQ_POLICIES not in {write.resource for write in again.writes}
    lost = await launched_for_rocketmq({"ledgerKey": "0" * 32})
    assert shown(lost)[0] == "LedgerKeyLost"
    assert [write for write in lost.writes if write.verb == "create"] == []


async def test_key_of_rocketmq_is_not_guessed() -> None:
    """A policy from another installation has no status, and its ledger another key."""
    before = base64.b64encode((b"before" * 6)[:KEY_BYTES].hex().encode()).decode()
    keys = {"before": before}
    for messages, entries in ((1, {}), (0, keys)):  # one key, or a new ledger
        api = await launched_for_rocketmq({}, keys=entries, messages=messages)
        assert [w.verb for w in api.writes if w.resource is resources.JOBS] == ["create"]
    moved = await launched_for_rocketmq({}, keys=keys, messages=1)
    reason, message = shown(moved)
    assert reason == "LedgerKeyLost"
    assert [write for write in moved.writes if write.verb == "create"] == []
    (key_id,) = re.findall("entry before has key ([0-9a-f]+)", message)
    assert "kubectl patch rocketmqretrypolicy orders -n shop --subresource=status" in message
    resumed = await launched_for_rocketmq({"ledgerKey": key_id}, keys=keys, messages=1)
    assert [w.verb for w in resumed.writes if w.resource is resources.JOBS] == ["create"]


async def test_connection_needs_consent_for_the_key_of_a_ledger() -> None:
    """A connection that names the Secret as its token would send the key to its own broker."""
    earlier = storing(replay())
    provide(earlier)
    await key_of_job(earlier, ctx(replays=[replay()]))
    secret = next(write.body for write in earlier.writes if write.resource is resources.SECRETS)
    api = storing(replay())
    provide(api)
    api.add(resources.SECRETS, secret)
    body, name = replay(), secret["metadata"]["name"]
    through = connection()
    token = {"type": "Token", "token": {"secretRef": {"name": name, "key": "key"}}}
    through["spec"]["replay"]["authentication"] = token
    context = dataclasses.replace(ctx(replays=[body], connections=[through]), kubernetes=api)
    await reconcile(KEY, context, asyncio.Lock())
    assert shown(api)[0] == "ConsentMissing"
    assert f"got 'shop/{name}'" in shown(api)[1]
    assert [write for write in api.writes if write.verb == "create"] == []


async def test_replay_waits_for_the_lost_key_of_its_ledger() -> None:
    topic = TopicName("shop", "prod", "orders-fulfilment-DLQ-LEDGER")
    lost = LedgerKey.derive(b"lost" * 8, "shop", str(topic))
    api, context = storing(replay()), ctx(replays=[replay()])
    provide(api)
    del api.objects[resources.SECRETS][OPERATOR_SECRET]
    context.brokers.properties[KEY_ID] = lost.id  # type: ignore[attr-defined]
    now = dataclasses.replace(context, kubernetes=api)
    assert await reconcile(KEY, now, asyncio.Lock()) is Requeue.BACKOFF
    reason, message = shown(api)
    assert reason == "LedgerKeyLost"
    assert f"got 'key {lost.id}'; add the lost key to that Secret" in message
    created = [write.body["metadata"]["name"] for write in api.writes if write.verb == "create"]
    assert created == [OPERATOR_SECRET.name]

    entry = base64.b64encode((b"lost" * 8).hex().encode()).decode()
    api.objects[resources.SECRETS][OPERATOR_SECRET]["data"] |= {"before": entry, "a": "b", "c": ""}
    assert await key_of_job(api, context) == lost.secret.hex()
    assert context.brokers.properties[KEY_ID] == lost.id  # type: ignore[attr-defined]


async def test_short_key_of_the_operator_is_not_used() -> None:
    api, context = storing(replay()), ctx(replays=[replay()])
    provide(api)
    short = base64.b64encode((b"k" * (KEY_BYTES - 1)).hex().encode()).decode()
    api.objects[resources.SECRETS][OPERATOR_SECRET]["data"] = {"current": short}
    now = dataclasses.replace(context, kubernetes=api)
    assert await reconcile(KEY, now, asyncio.Lock()) is Requeue.BACKOFF
    reason, message = shown(api)
    assert reason == "LedgerKeyLost"
    assert "no valid entry `current`" in message
    assert context.brokers.properties == {}  # type: ignore[attr-defined]


async def test_unreadable_secret_needs_consent_of_the_account(api: FakeKubernetes) -> None:
    def refuse(verb: str, resource: Resource, key: Key) -> None:
        if resource == resources.SECRETS and verb != "create" and key != OPERATOR_SECRET:
            raise ForbiddenError("it is not allowed", remedy="none")

    provide(api)  # an annotation of the Secret that the operator may not read does not count
    api.before = refuse
    assert await look(api) is Requeue.BACKOFF
    reason, message = shown(api)
    assert reason == "ConsentMissing"
    assert "got 'shop/pulsar-replayer'" in message
    assert "kubectl annotate serviceaccount redrive-replay -n shop redrive.io/usable" in message
    api.add(resources.SERVICE_ACCOUNTS, {"metadata": ACCOUNT._asdict() | USABLE})
    await look(api)
    assert [status["phase"] for status in statuses(api)] == ["Pending", "Submitted"]


def application(created: datetime, **status: object) -> dict[str, Any]:
    """Return the application of the Replay with a status of the Spark operator."""
    return {
        "metadata": {
            "name": launch.name_of(replay()),
            "namespace": "shop",
            "creationTimestamp": created.isoformat(),
            "ownerReferences": [{"uid": replay()["metadata"]["uid"]}],
        },
        "status": status,
    }


def shown(api: FakeKubernetes) -> tuple[str, str]:
    """Return reason and message of the Ready condition that was written last."""
    ready = next(c for c in statuses(api)[-1]["conditions"] if c["type"] == "Ready")
    return ready["reason"], ready["message"]


async def test_application_without_spark_operator_is_reported(
    api: FakeKubernetes,
) -> None:
    fresh = application(wall_clock())
    assert await look(api, applications=[fresh]) is Requeue.BACKOFF
    assert shown(api)[0] == "Progressing"
    old = application(wall_clock() - timedelta(seconds=61))
    assert await look(api, applications=[old]) is Requeue.BACKOFF
    reason, message = shown(api)
    assert reason == "ApplicationNotStarted"
    assert "serve the namespace shop (spark.jobNamespaces" in message


async def test_application_of_another_owner_is_not_mirrored(api: FakeKubernetes) -> None:
    provide(api)
    foreign = application(wall_clock(), applicationState={"state": "COMPLETED"})
    foreign["metadata"]["ownerReferences"] = [{"uid": "another"}]
    await look(api, applications=[foreign], finished=True)
    assert [write.verb for write in api.writes] == ["patch_status"]
    reason, message = shown(api)
    assert reason == "ApplicationNotOurs"
    assert f"got {launch.name_of(replay())!r}; delete that SparkApplication" in message
    assert statuses(api)[-1].get("phase") not in {"Completed", "Running", "Submitted"}


async def test_application_with_state_is_followed_by_watch(api: FakeKubernetes) -> None:
    old = wall_clock() - timedelta(hours=1)
    running = application(old, applicationState={"state": "RUNNING"})
    assert await look(api, applications=[running], ratePerMinute=6) is Requeue.ON_CHANGE
    assert shown(api)[0] == "Progressing"


async def test_replay_waits_for_the_template_with_its_image(api: FakeKubernetes) -> None:
    provide(api)
    (stored,) = api.objects[resources.POD_TEMPLATES].values()
    del api.objects[resources.POD_TEMPLATES][TEMPLATE]
    assert await look(api) is Requeue.BACKOFF
    reason, message = shown(api)
    assert reason == "JobImageNotFound"
    assert f"got '{TEMPLATE}'; upgrade the Helm release" in message
    stored["template"]["spec"]["containers"][0]["image"] = "replaced"
    api.objects[resources.POD_TEMPLATES][TEMPLATE] = stored
    await look(api)
    *_, launched = (write.body for write in api.writes if write.verb == "create")
    assert launched["spec"]["image"] == "replaced"


async def test_operator_without_replay_image_disables_replays(api: FakeKubernetes) -> None:
    await look(api, settings=dataclasses.replace(SETTINGS, replay_template=None))
    assert shown(api)[0] == "ReplaysDisabled"
    assert all(write.verb != "create" for write in api.writes)


async def ended(
    api: FakeKubernetes, state: str, *, mode: str = "Run", **status: object
) -> dict[str, Any]:
    """Reconcile the Replay once its application is in *state*; return the status that is written.

    The operator's cache does not have the last report of the job yet.
    """
    body = replay(spec={"mode": mode})
    (stored,) = api.objects[resources.REPLAYS].values()
    stored |= {"spec": body["spec"], "status": reported(**status)}
    application = {
        "metadata": {
            "name": launch.name_of(body),
            "namespace": "shop",
            "creationTimestamp": "2026-11-22T00:00:00Z",
            "ownerReferences": [resources.owner_reference(resources.REPLAYS, body)],
        },
        "status": {"applicationState": {"state": state, "errorMessage": "ExitCode: 1"}},
    }
    await reconcile_cached(api, body, application)
    return statuses(api)[-1]


async def test_run_cut_off_is_failed_and_not_completed(api: FakeKubernetes) -> None:
    status = await ended(api, "COMPLETED", matched=8, moved=5, left=3)
    assert status["phase"] == "Failed"
    assert true_conditions(status) == {"Stalled", "Failed"}
    assert "has exited before it finished" in shown(api)[1]


async def test_run_reported_finished_is_completed(api: FakeKubernetes) -> None:
    status = await ended(
        api,
        "COMPLETED",
        matched=8,
        moved=5,
        skipped=2,
        refused=1,
        left=0,
        batched=3,
        doubled=2,
        finished=True,
    )
    assert status["phase"] == "Completed"
    assert shown(api) == (
        "CompletedWithRefusals",
        (
            "of 8 dead letters 5 were moved, 2 needed no move, 1 can't be moved; "
            "3 are of batches, which move as a whole; the target may contain 2 twice"
        ),
    )


@pytest.mark.parametrize(
    ("mode", "numbers", "reason", "conditions"),
    [
        ("Run", {"matched": 8, "moved": 8}, "Completed", {"Ready", "Complete"}),
        ("Run", {"matched": 8, "skipped": 8}, "Completed", {"Ready", "Complete"}),
        ("Run", {"matched": 0}, "Completed", {"Ready", "Complete"}),
        ("Plan", {"matched": 8, "refused": 8}, "Completed", {"Ready", "Complete"}),
        (
            "Run",
            {"matched": 8, "moved": 7, "refused": 1},
            "CompletedWithRefusals",
            {"Ready", "Complete", "MessagesRefused"},
        ),
        (
            "Run",
            {"matched": 8, "skipped": 7, "refused": 1},
            "CompletedWithRefusals",
            {"Ready", "Complete", "MessagesRefused"},
        ),
        (
            "Run",
            {"matched": 8, "discarded": 7, "refused": 1},
            "CompletedWithRefusals",
            {"Ready", "Complete", "MessagesRefused"},
        ),
        ("Run", {"matched": 1000, "refused": 1000}, "AllRefused", {"Stalled", "Failed"}),
    ],
)
async def test_end_is_shown_as_complete_or_failed(
    mode: str, numbers: dict[str, int], reason: str, conditions: set[str]
) -> None:
    status = {"sparkApplication": launch.name_of(replay()), "finished": True, **numbers}
    body = replay(spec={"mode": mode}, status=status)
    api = storing(body)
    done = application(wall_clock(), applicationState={"state": "COMPLETED"})
    await reconcile_cached(api, body, done)
    (status,) = statuses(api)
    assert shown(api)[0] == reason
    assert true_conditions(status) == conditions
    assert status["phase"] == ("Failed" if "Failed" in conditions else "Completed")
    assert "completionTime" in status


LAUNCHED: dict[str, Any] = {"launched": True, "state": "RUNNING"}
ENDED: dict[str, Any] = {"launched": True, "state": "COMPLETED"}
FINISHED = {"matched": 8, "finished": True}
REVIEW = {"review": {"expiryTime": "2100-01-01T00:00:00Z"}, "matched": 8, "left": 8}
EXPIRED = REVIEW | {"review": {"expiryTime": "2026-01-01T00:00:00Z"}}
UNSAFE = policy(replay={"safety": "Never"})


@pytest.mark.parametrize(
    ("spec", "run", "life", "ready", "others"),
    [
        pytest.param({}, {}, {"behind": True}, "False", {"Reconciling"}, id="turn"),
        pytest.param({}, {}, {"policies": []}, "False", {"Reconciling"}, id="prerequisite"),
        pytest.param({}, {}, {"policies": [UNSAFE]}, "False", {"Stalled"}, id="not safe"),
        pytest.param({}, {}, LAUNCHED, "Unknown", {"Reconciling"}, id="runs"),
        pytest.param(
            {"suspend": True}, {}, {}, "False", {"Reconciling", "Suspended"}, id="pending"
        ),
        pytest.param(
            {"suspend": True}, {"suspended": True}, LAUNCHED,
            "False", {"Reconciling", "Suspended"}, id="suspended",
        ),
        pytest.param(
            {}, {"suspended": True, "approval": {"messages": 9}, "left": 9}, LAUNCHED,
            "False", {"Reconciling", "ApprovalRequired"}, id="approval",
        ),
        pytest.param(
            {"mode": "Review"}, REVIEW, LAUNCHED, "False", {"Reconciling", "InReview"}, id="review"
        ),
        pytest.param(
            {}, REVIEW, LAUNCHED | {"behind": True, "is_review": True},
            "False", {"Reconciling"}, id="confirmed",
        ),
        pytest.param(
            {"mode": "Review"}, REVIEW | {"finished": True}, LAUNCHED,
            "True", {"Complete"}, id="expired",
        ),
        pytest.param(
            {}, REVIEW | {"finished": True}, LAUNCHED | {"is_review": True},
            "True", {"Complete"}, id="confirmed late",
        ),
        pytest.param({"mode": "Review"}, EXPIRED, LAUNCHED, "True", {"Complete"}, id="hangs"),
        pytest.param(
            {"mode": "Review"}, FINISHED | REVIEW | {"left": 0, "refused": 8}, ENDED,
            "True", {"Complete"}, id="nothing to move",
        ),
        pytest.param({}, FINISHED | {"moved": 8}, ENDED, "True", {"Complete"}, id="moved"),
        pytest.param({}, FINISHED | {"skipped": 8}, ENDED, "True", {"Complete"}, id="skipped"),
        pytest.param({}, {"matched": 0, "finished": True}, ENDED, "True", {"Complete"}, id="none"),
        pytest.param(
            {"mode": "Plan"}, FINISHED | {"refused": 8}, ENDED, "True", {"Complete"}, id="plan"
        ),
        pytest.param(
            {}, FINISHED | {"moved": 7, "refused": 1}, ENDED,
            "True", {"Complete", "MessagesRefused"}, id="some refused",
        ),
        pytest.param(
            {}, FINISHED | {"refused": 8}, ENDED, "False", {"Failed", "Stalled"}, id="all refused"
        ),
        pytest.param(
            {}, {"matched": 8, "moved": 7}, {"launched": True, "state": "FAILED"},
            "False", {"Failed", "Stalled"}, id="failed",
        ),
        pytest.param({"cancel": True}, {}, ENDED, "False", {"Failed", "Stalled"}, id="canceled"),
        pytest.param(
            {"deadline": "1h"}, {}, LAUNCHED | {"minutes": 63},
            "False", {"Failed", "Stalled"}, id="late",
        ),
        pytest.param(
            {"startBefore": "2026-01-01T00:00:00Z"}, {}, {},
            "False", {"Failed", "Stalled"}, id="not started",
        ),
    ],
)  # fmt: skip
async def test_state_has_its_conditions(
    spec: dict[str, Any], run: dict[str, Any], life: dict[str, Any], ready: str, others: set[str]
) -> None:
    """Each row of the table of states in docs/reference/replays.md."""
    body = replay(spec=spec, status=run)
    if "launched" in life:
        launched(body, life.get("minutes", 0))
    if "is_review" in life:
        del body["metadata"]["annotations"][ADMITTED]
    state = {"applicationState": {"state": life.get("state")}}
    applications = [application(wall_clock(), **state)] if "state" in life else []
    tables = {"policies": life["policies"]} if "policies" in life else {}
    first = [launched(replay("first"))] if "behind" in life else []
    api = storing(body)
    provide(api)
    context = ctx(replays=[*first, body], applications=applications, **tables)
    context = dataclasses.replace(context, kubernetes=api)
    await reconcile(KEY, context, asyncio.Lock())
    status = statuses(api)[-1]
    (shown_ready,) = (c["status"] for c in status["conditions"] if c["type"] == "Ready")
    assert (shown_ready, true_conditions(status) - {"Ready"}) == (ready, others)
    is_ended = "Complete" in others or "Failed" in others
    assert bool(status.get("completionTime")) is is_ended
    stored = api.objects[resources.REPLAYS][KEY]
    assert (ENDED_AT in stored["metadata"].get("annotations", {})) is is_ended


@pytest.mark.parametrize("mode", ["Review", "Run"])
async def test_only_confirmed_review_is_admitted(api: FakeKubernetes, mode: str) -> None:
    body = launched(replay(spec={"mode": "Review"}, status=REVIEW))
    body["spec"]["mode"] = mode
    api.add(resources.REPLAYS, body)
    await reconcile_cached(api, body, running())
    annotations = api.objects[resources.REPLAYS][KEY]["metadata"]["annotations"]
    assert (ADMITTED in annotations) is (mode == "Run")
    assert shown(api)[0] == ("InReview" if mode == "Review" else "Progressing")


@pytest.mark.parametrize(
    ("suspend", "evicts", "checked"),
    [(False, False, True), (True, False, False), (False, True, False)],
    ids=["resumed", "suspended", "evicting"],
)
async def test_run_resumes_after_a_check_of_its_target(
    api: FakeKubernetes,
    monkeypatch: pytest.MonkeyPatch,
    *,
    suspend: bool,
    evicts: bool,
    checked: bool,
) -> None:
    async def prepare(*_: object) -> tuple[ObjectEvent, ...]:
        if evicts:
            raise Reason.TARGET_EVICTS.error("evicts", remedy="raise it")
        return ()

    monkeypatch.setattr("redrive.replay.controller.reconciler.prepare_target", prepare)
    since = "2026-11-20T10:00:00Z"
    spec: dict[str, Any] = {"target": {"type": "Source"}, "suspend": suspend}
    body = launched(replay(spec=spec, status={"suspended": True, "suspendedTime": since}))
    api.add(resources.REPLAYS, body)
    await reconcile_cached(api, body, running())
    annotations = api.objects[resources.REPLAYS][KEY]["metadata"]["annotations"]
    assert annotations.get(CHECKED) == (since if checked else None)
    assert (shown(api)[0] == "TargetEvicts") is evicts


async def test_confirmed_review_of_unsafe_policy_moves_nothing(api: FakeKubernetes) -> None:
    body = launched(replay(spec={"mode": "Review"}, status=REVIEW))
    body["spec"]["mode"] = "Run"
    api.add(resources.REPLAYS, body)
    context = ctx(replays=[body], policies=[UNSAFE], applications=[running()])
    await reconcile(KEY, dataclasses.replace(context, kubernetes=api), asyncio.Lock())
    assert shown(api)[0] == "ReplayNotSafe"
    assert ADMITTED not in api.objects[resources.REPLAYS][KEY]["metadata"]["annotations"]


async def test_unconfirmed_review_is_no_result_of_its_policy() -> None:
    body = launched(replay(spec={"mode": "Review"}, status=REVIEW | {"finished": True}))
    api = storing(body)
    api.add(resources.POLICIES, policy())
    await reconcile_cached(api, body, running())
    assert shown(api)[0] == "ReviewExpired"
    assert "replays" not in api.objects[resources.POLICIES][Key("shop", "orders")].get("status", {})


async def test_completion_message_counts_unevaluated_messages() -> None:
    numbers = {"matched": 1, "moved": 1, "skipped": 0, "refused": 0, "unevaluated": 4}
    body = replay(status={"finished": True, "sparkApplication": "it", **numbers})
    api = FakeKubernetes()
    api.add(resources.REPLAYS, body)
    done = application(wall_clock(), applicationState={"state": "COMPLETED"})
    await reconcile_cached(api, body, done)
    assert shown(api)[1].endswith("moved; for 4 others select.where can't be computed")


async def test_completion_message_has_outcome_of_messages(
    api: FakeKubernetes,
) -> None:
    outcome = {"handled": 3, "waiting": 0, "deadAgain": 2, "settled": True}
    moment = {"observedTime": "2026-11-22T00:00:00Z"}
    numbers: dict[str, Any] = {"matched": 5, "moved": 5, "skipped": 0, "refused": 0, "left": 0}
    await ended(api, "COMPLETED", **numbers, outcome=outcome | moment, finished=True)
    assert shown(api)[1].endswith("that were moved 3 were handled, 2 are dead again, 0 wait")


async def test_dry_run_completion_shows_planned_moves(api: FakeKubernetes) -> None:
    numbers = {"scanned": 9, "matched": 8, "moved": 0, "refused": 1, "left": 7}
    await ended(api, "COMPLETED", mode="Plan", **numbers, finished=True)
    assert shown(api)[1] == "a plan: 7 of 9 dead letters would be moved, 1 can't be"


async def test_audit_completion_shows_differences(api: FakeKubernetes) -> None:
    numbers = {"doubled": 1, "unrecorded": 2, "missing": 3, "returned": 4, "open": 5}
    audit = {"topics": ["orders-RETRY"], "messages": 9, **numbers}
    await ended(api, "COMPLETED", mode="Audit", audit=audit, finished=True)
    assert shown(api)[1] == (
        "an audit of 9 messages of targets: doubled 1, unrecorded 2, missing 3, returned 4, "
        "open ranges 5"
    )


async def test_failure_message_has_error_of_the_job(api: FakeKubernetes) -> None:
    failure = {"reason": "DeduplicationOff", "message": "deduplication is off on the topic"}
    status = await ended(api, "FAILED", failure=failure)
    ready = next(c for c in status["conditions"] if c["type"] == "Ready")
    assert ready["reason"] == "ReplayFailed"
    assert "DeduplicationOff: deduplication is off on the topic" in ready["message"]
    assert "ExitCode" not in ready["message"]


async def test_ended_run_has_no_rate() -> None:
    body = replay(status={"moved": 5, "ratePerMinute": 80, "suspended": True, "finished": False})
    api = storing(body)
    failed = application(wall_clock(), applicationState={"state": "FAILED"})
    await reconcile_cached(api, body, failed)
    assert statuses(api)[-1]["run"] == {"counts": {"moved": 5}, "finished": False}


async def test_launch_event_has_reason_and_ticket() -> None:
    api = FakeKubernetes()
    body = replay(spec={"reason": "the warehouse is up", "ticket": "OPS-1"})
    api.add(resources.REPLAYS, body)
    provide(api)
    await reconcile_cached(api, body)
    events = [str(event) for event in api.events]
    assert any("runs this Replay: the warehouse is up: OPS-1" in event for event in events)


@pytest.mark.parametrize("target", ["Source", "Retry"])
async def test_hanging_broker_does_not_block_other_launches(
    api: FakeKubernetes, target: str
) -> None:
    body, launching = replay(spec={"target": {"type": target}}), asyncio.Lock()
    asked = []

    async def resolve(*_: object) -> None:
        assert not launching.locked()
        asked.append(body)
        raise BrokerDownError("the broker does not answer", remedy="wait")

    brokers = cast("Any", SimpleNamespace(resolve=resolve))
    context = dataclasses.replace(ctx(replays=[body]), kubernetes=api, brokers=brokers)
    assert await reconcile(Key.of(body), context, launching) is Requeue.ON_CHANGE
    assert asked == [body]
    assert shown(api)[0] == "BrokerUnreachable"


def running() -> dict[str, Any]:
    """Return the application as its job runs."""
    return application(wall_clock(), applicationState={"state": "RUNNING"})


async def test_suspended_run_has_phase_suspended(api: FakeKubernetes) -> None:
    body = replay(spec={"suspend": True}, status={"suspended": True})
    await reconcile_cached(api, body, running())
    assert statuses(api)[-1]["phase"] == "Suspended"
    assert true_conditions(statuses(api)[-1]) == {"Reconciling", "Suspended"}
    reason, message = shown(api)
    assert (reason, message.split(";")[0]) == (
        "Suspended",
        "the run is suspended: nothing is sent",
    )


async def test_replay_suspended_before_launch_shows_it() -> None:
    body = replay(spec={"suspend": True})
    api = storing(body)
    await reconcile_cached(api, body)
    assert statuses(api)[-1]["phase"] == "Pending"
    assert true_conditions(statuses(api)[-1]) == {"Reconciling", "Suspended"}


async def test_run_above_approval_bound_asks_for_approval(api: FakeKubernetes) -> None:
    account: dict[str, Any] = {"moved": 1, "left": 4_999, "approval": {"messages": 5_000}}
    await look(api, applications=[running()], suspended=True, **account)
    assert statuses(api)[-1]["phase"] == "Suspended"
    reason, message = shown(api)
    assert reason == "ApprovalRequired"
    assert true_conditions(statuses(api)[-1]) == {"Reconciling", "ApprovalRequired"}
    assert statuses(api)[-1]["warnings"] == ["ApprovalRequired"]
    assert "got 5000; create a ReplayApproval with the name and the uid of this Replay" in message


async def test_run_with_full_target_reports_it(api: FakeKubernetes) -> None:
    await look(
        api, applications=[running()], fullTopic="persistent://shop/prod/retry", moved=3, left=5_000
    )
    assert statuses(api)[-1]["phase"] == "Running"
    reason, message = shown(api)
    assert reason == "TargetFull"
    assert message.startswith("persistent://shop/prod/retry is over its backlog quota")
    assert "have its consumers catch up" in message


def finished(seconds_ago: int, **spec: object) -> dict[str, Any]:
    """Return a Replay that has ended, as long ago as that."""
    moment = (wall_clock() - timedelta(seconds=seconds_ago)).isoformat()
    return replay(spec=spec, status={"phase": "Completed"}, ended_at=moment)


@pytest.mark.parametrize(
    ("body", "requeue", "stays"),
    [
        (finished(61, ttlAfterFinished="1m"), Requeue.ON_CHANGE, False),
        (finished(1, ttlAfterFinished="1s"), Requeue.ON_CHANGE, False),
        (finished(50, ttlAfterFinished="1d"), Requeue.SLOW_BACKOFF, True),
        (finished(10**6), Requeue.ON_CHANGE, True),
    ],
)
async def test_ended_replay_is_deleted_after_its_ttl(
    body: dict[str, Any], requeue: Requeue, *, stays: bool
) -> None:
    api = storing(body)
    assert await reconcile_cached(api, body) is requeue
    assert (Key.of(body) in api.objects[resources.REPLAYS]) is stays


@pytest.mark.parametrize(
    "forged",
    [
        "0000-01-01T00:00:00Z",
        "2026-01-01T00:00:00+99:00",
        "9999-12-31T23:59:59-14:00",
        "9000-01-01T00:00:00Z",
        "now",
    ],
)
@pytest.mark.parametrize("ttl", ["1m", None])
async def test_invalid_time_of_end_counts_as_now(forged: str, ttl: str | None) -> None:
    """Such a Replay is neither deleted at once nor kept permanently."""
    spec = (ttl and {"ttlAfterFinished": ttl}) or {}
    body = replay(spec=spec, status={"phase": "Completed", "moved": 3}, ended_at=forged)
    api = storing(body)
    now = wall_clock().replace(microsecond=0)
    context = ctx(replays=[body])
    for seconds in (0, 59, 60):
        clock = partial(now.__add__, timedelta(seconds=seconds))
        context = dataclasses.replace(context, kubernetes=api, clock=clock)
        requeue = await reconcile(Key.of(body), context, asyncio.Lock())
        deleted = ttl is not None and seconds == 60
        waits = ttl is not None and not deleted
        assert requeue is (Requeue.SLOW_BACKOFF if waits else Requeue.ON_CHANGE)
        assert (Key.of(body) in api.objects[resources.REPLAYS]) is not deleted
    (annotated,) = (write.body for write in api.writes if write.verb == "patch")
    assert datetime.fromisoformat(annotated["metadata"]["annotations"][ENDED_AT]) == now


@pytest.mark.parametrize("phase", ["Completed", "Failed"])
async def test_forged_end_in_status_deletes_no_replay(phase: str) -> None:
    """A job may write the status of each Replay of its namespace."""
    forged = {"phase": phase, "completionTime": "2020-01-01T00:00:00Z"}
    body = replay(spec={"ttlAfterFinished": "1s", "suspend": True}, status=forged)
    api = storing(body)
    await reconcile_cached(api, body)
    (status,) = statuses(api)
    assert status["phase"] == "Pending"
    assert "completionTime" not in status
    stored = api.objects[resources.REPLAYS][Key.of(body)]
    assert "annotations" not in stored["metadata"]


@pytest.mark.parametrize("status", [{}, {"phase": "Running"}])
async def test_copy_of_ended_replay_fails_and_is_not_launched(status: dict[str, Any]) -> None:
    body = replay(status=status, ended_at="2026-11-20T10:00:00Z")
    api = storing(body)
    provide(api)
    assert await reconcile_cached(api, body) is Requeue.ON_CHANGE
    (written,) = statuses(api)
    assert (written["phase"], shown(api)[0]) == ("Failed", "AlreadyEnded")
    assert true_conditions(written) == {"Stalled", "Failed"}
    assert written["completionTime"] == "2026-11-20T10:00:00Z"
    assert {write.verb for write in api.writes} == {"patch_status"}


async def test_end_is_annotated_after_its_status() -> None:
    body = launched(replay(status={"finished": True, "matched": 1, "moved": 1, "left": 0}))
    api = storing(body)
    done = application(wall_clock(), applicationState={"state": "COMPLETED"})

    def fail(verb: str, resource: Resource, _key: Key) -> None:
        if (verb, resource) == ("patch", resources.REPLAYS):
            raise UnavailableError("no answer", remedy="wait")

    api.before = fail
    with pytest.raises(UnavailableError):
        await reconcile_cached(api, body, done)
    api.before = lambda *_: None
    stored = api.objects[resources.REPLAYS][Key.of(body)]
    assert ENDED_AT not in stored["metadata"]["annotations"]
    await reconcile_cached(api, copy.deepcopy(stored), done)
    assert [write.verb for write in api.writes] == ["patch_status", "patch"]
    stored = api.objects[resources.REPLAYS][Key.of(body)]
    assert ENDED_AT in stored["metadata"]["annotations"]


async def test_policy_retains_results_of_its_last_ten_replays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "redrive.audit")
    where = "key = 'ann''s' or `value` like \"%secret%\""
    select = {"keys": ["ann", "bob"], "where": where}
    api, owner = FakeKubernetes(), policy()
    api.add(resources.POLICIES, owner)
    approval = {"messages": 4, "approvedTime": "2026-11-22T10:00:00Z", "approvedBy": "bob"}
    counts = {"matched": 4, "moved": 3, "refused": 1, "left": 0}
    outcome: dict[str, Any] = {"handled": 1, "waiting": 0, "deadAgain": 2, "settled": True}
    outcome |= {"observedTime": "2026-11-22T10:00:00Z"}
    done = {"finished": True, "approval": approval, "outcome": outcome, **counts}
    for number in range(11):
        spec = {"reason": "up again" * 100, "ticket": f"OPS-{number}", "select": select}
        body = launched(replay(f"replay-{number}", spec=spec, status=done))
        body["metadata"]["annotations"]["redrive.io/requested-by"] = "ann@example.com"
        api.add(resources.REPLAYS, body)
        (owner,) = api.objects[resources.POLICIES].values()
        context = dataclasses.replace(
            ctx(replays=[body], policies=[copy.deepcopy(owner)]), kubernetes=api
        )
        await reconcile(Key.of(body), context, asyncio.Lock())
    (owner,) = api.objects[resources.POLICIES].values()
    results = owner["status"]["replays"]
    assert [result["name"] for result in results] == [f"replay-{n}" for n in range(10, 0, -1)]
    assert (results[0]["phase"], results[0]["result"]) == ("Completed", "CompletedWithRefusals")
    assert (results[0]["moved"], results[0]["refused"], results[0]["deadAgain"]) == (3, 1, 2)
    assert "doubled" not in results[0]
    assert (results[0]["author"], results[0]["ticket"]) == ("ann@example.com", "OPS-10")
    assert results[0]["approvedBy"] == "bob"
    assert len(results[0]["reason"]) == 256
    (record, *others) = [r for r in caplog.records if r.name == "redrive.audit"]
    assert len(others) == 10
    audited = json.loads(record.getMessage().removeprefix("Replay ended: "))
    assert (audited["requestedBy"], audited["result"]) == (
        "ann@example.com",
        "CompletedWithRefusals",
    )
    assert audited["approvedBy"] == "bob"
    assert audited["select"] == {"keys": 2, "where": "key = '…' or `value` like '…'"}
    assert (audited["moved"], audited["refused"], audited["ticket"]) == (3, 1, "OPS-0")


async def test_rocketmq_policy_has_the_result_of_its_replay() -> None:
    owner, api = policy(), FakeKubernetes()
    owner["kind"] = "RocketMQRetryPolicy"
    reference = {"policyRef": {"kind": owner["kind"], "name": "orders"}}
    done = {"finished": True, "matched": 2, "moved": 2, "left": 0, "doubled": 1}
    body = launched(replay(spec=reference, status=done))
    api.add(resources.ROCKETMQ_POLICIES, owner)
    api.add(resources.REPLAYS, body)
    context = ctx(replays=[body], rocketmq_policies=[copy.deepcopy(owner)])
    await reconcile(Key.of(body), dataclasses.replace(context, kubernetes=api), asyncio.Lock())
    (owner,) = api.objects[resources.ROCKETMQ_POLICIES].values()
    results = owner["status"]["replays"]
    assert [(result["moved"], result["doubled"]) for result in results] == [(2, 1)]
    (retained,) = context.rocketmq_policies
    assert retained["status"] == owner["status"]


async def test_end_waits_until_its_result_is_recorded() -> None:
    body = launched(replay(status={"finished": True, "matched": 1, "moved": 1, "left": 0}))
    api, changed = storing(body), policy()
    changed["metadata"]["resourceVersion"] = "2"
    api.add(resources.POLICIES, changed)
    assert await reconcile_cached(api, body) is Requeue.BACKOFF  # the cache is behind
    stored = api.objects[resources.REPLAYS][Key.of(body)]
    assert stored["status"]["phase"] == "Completed"
    assert ENDED_AT not in stored["metadata"]["annotations"]


async def test_forged_report_completes_no_waiting_replay() -> None:
    """A job may write the status of each Replay of its namespace."""
    forged = {"sparkApplication": launch.name_of(replay()), "finished": True, "moved": 3}
    body = replay(spec={"suspend": True}, status=forged)
    api = storing(body)
    await reconcile_cached(api, body)
    assert statuses(api)[-1]["phase"] == "Pending"
    assert shown(api)[0] == "Suspended"


@pytest.mark.parametrize(
    "forged",
    [
        {"startTime": "0000-01-01T00:00:00Z"},
        {"completionTime": "0000-01-01T00:00:00Z"},
        {"moved": 1e300},
        {"outcome": {"observedTime": "2026-01-01T00:00:00+99:00", "handled": 1, "waiting": 0,
                     "deadAgain": 0, "settled": True}},
        {"conditions": [{"type": "Other", "status": "True", "reason": "Why", "message": "",
                         "lastTransitionTime": "0000-01-01T00:00:00Z"}]},
    ],
)  # fmt: skip
async def test_invalid_status_field_counts_as_missing(
    forged: dict[str, Any],
) -> None:
    status = {"sparkApplication": "it", "matched": 5, "finished": True, **forged}
    body = replay(spec={"deadline": "1h"}, status=status)
    api = storing(body)
    runs = application(wall_clock(), applicationState={"state": "COMPLETED"})
    await reconcile_cached(api, body, runs)
    assert [written["phase"] for written in statuses(api)] == ["Completed"]
    assert "of 5 dead letters" in shown(api)[1]
    assert ReplayStatus.of({"status": statuses(api)[-1]}).completion_time is not None


async def test_replay_changed_meanwhile_is_not_deleted() -> None:
    api = FakeKubernetes()
    cached = finished(61, ttlAfterFinished="1m")
    changed = finished(61)
    changed["metadata"]["resourceVersion"] = "2"
    api.add(resources.REPLAYS, changed)
    with pytest.raises(ConflictError):
        await reconcile_cached(api, cached)
    assert Key.of(cached) in api.objects[resources.REPLAYS]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"startBefore": "2026-01-01T00:00:00Z"}, "StartedTooLate"),
        ({"cancel": True}, "Canceled"),
        ({"cancel": True, "suspend": True}, "Canceled"),
    ],
)
@pytest.mark.parametrize("policies", [True, False])
async def test_replay_that_may_not_start_fails_at_once(
    spec: dict[str, Any], reason: str, *, policies: bool
) -> None:
    """It does not wait for its policy first."""
    body = replay(spec=spec)
    api = storing(body)
    provide(api)
    context = ctx(replays=[body]) if policies else ctx(replays=[body], policies=[])
    context = dataclasses.replace(context, kubernetes=api)
    await reconcile(Key.of(body), context, asyncio.Lock())
    (status,) = statuses(api)
    assert (status["phase"], shown(api)[0]) == ("Failed", reason)
    assert "completionTime" in status
    assert not [write for write in api.writes if write.verb == "create"]


async def test_replay_in_time_is_launched_and_waits_no_longer() -> None:
    body = replay(spec={"startBefore": "2126-01-01T00:00:00Z"})
    api = storing(body)
    provide(api)
    await reconcile_cached(api, body)
    (status,) = statuses(api)
    assert status["phase"] == "Submitted"
    late = replay(spec={"startBefore": "2026-01-01T00:00:00Z"}, status=status)
    api = storing(late)
    runs = application(wall_clock(), applicationState={"state": "RUNNING"})
    await reconcile_cached(api, late, runs)
    assert statuses(api)[0]["phase"] == "Running"


async def test_waiting_replay_is_polled_for_its_start_before() -> None:
    body = replay(spec={"startBefore": "2126-01-01T00:00:00Z", "suspend": True})
    assert await reconcile_cached(storing(body), body) is Requeue.SLOW_BACKOFF


@pytest.mark.parametrize(
    ("state", "fields", "phase"),
    [
        ("RUNNING", {}, "Running"),
        ("COMPLETED", {}, "Failed"),
        ("COMPLETED", {"finished": True}, "Completed"),
    ],
)
async def test_canceled_run_drains_before_it_fails(
    state: str, fields: dict[str, Any], phase: str
) -> None:
    body = launched(replay(spec={"cancel": True}, status={"moved": 5, **fields}))
    api = storing(body)
    runs = application(wall_clock(), applicationState={"state": state})
    await reconcile_cached(api, body, runs)
    (status,) = statuses(api)
    assert status["phase"] == phase
    assert (shown(api)[0] == "Canceled") is (phase == "Failed")


@pytest.mark.parametrize("through", ["shop/main", None])
@pytest.mark.parametrize("changes", [{"replay": None}, {"allow": []}, {}])
async def test_running_replay_ends_when_it_is_not_permitted(
    changes: dict[str, Any], through: str | None
) -> None:
    """By the connection of its launch, whichever one its policy has now."""
    body = launched(replay(status={"moved": 5}))
    runs = application(wall_clock(), applicationState={"state": "RUNNING"})
    runs["metadata"]["annotations"] = {} if through is None else {CONNECTION: through}
    elsewhere = policy(connectionRef={"name": "another"})
    for policies in ([policy()], [elsewhere], []):
        api = storing(body)
        tables = {"policies": Cache(policies), "connections": Cache([connection(**changes)])}
        await reconcile_cached(api, body, runs, **tables)
        ends = bool(changes) and through is not None
        assert statuses(api)[-1]["phase"] == ("Failed" if ends else "Running")
        assert (shown(api)[0] == "ReplayFailed") is ends


@pytest.mark.parametrize("state", ["", "SUBMITTED", "RUNNING", "PENDING_RERUN"])
async def test_silent_run_fails_at_its_deadline(state: str) -> None:
    for minutes, phase in ((61, "Submitted"), (63, "Failed")):
        spec = {"deadline": "1h", "ttlAfterFinished": "1d"}
        body = launched(replay(spec=spec, status={"moved": 5}), minutes)
        api = storing(body)
        runs = application(wall_clock(), applicationState={"state": state})
        requeue = await reconcile_cached(api, body, runs)
        assert requeue is not Requeue.ON_CHANGE
        status = statuses(api)[-1]
        running = "Running" if state == "RUNNING" and phase == "Submitted" else phase
        assert (status["phase"], status["run"]["counts"]["moved"]) == (running, 5)
    assert shown(api)[0] == "DeadlineExceeded"
    assert "completionTime" in status


async def test_run_without_application_fails_at_its_deadline() -> None:
    for minutes, phase in ((61, None), (63, "Failed")):
        body = launched(replay(spec={"deadline": "1h", "suspend": True}), minutes)
        api = storing(body)
        requeue = await reconcile_cached(api, body)
        assert (requeue is Requeue.SLOW_BACKOFF) is (phase is None)
        assert statuses(api)[-1].get("phase") == phase
    assert shown(api)[0] == "DeadlineExceeded"


@pytest.mark.parametrize("phase", [None, "Completed"])
async def test_completion_overwrites_no_concurrent_status(phase: str | None) -> None:
    """By its job, or by another operator."""
    api, body = FakeKubernetes(), launched(replay(status={"moved": 5}))
    status = reported(finished=True, moved=8, **({"phase": phase} if phase else {}))

    def report(verb: str, resource: Resource, key: Key) -> None:
        if verb == "patch_status":
            stored = api.objects[resource][key]
            stored["status"] = status
            stored["metadata"]["resourceVersion"] = "2"

    api.add(resources.REPLAYS, body)
    api.before = report
    failed = application(wall_clock(), applicationState={"state": "FAILED"})
    assert await reconcile_cached(api, body, failed) is Requeue.BACKOFF
    assert api.writes == []
    assert api.objects[resources.REPLAYS][Key.of(body)]["status"] == status


async def test_replay_ended_by_another_operator_stays_ended() -> None:
    """The watch of this one is behind."""
    api, body = FakeKubernetes(), launched(replay())
    ended = launched(
        replay(status={"phase": "Completed", "finished": True}, ended_at="2026-01-01T00:00:00Z")
    )
    api.add(resources.REPLAYS, ended)
    failed = application(wall_clock(), applicationState={"state": "FAILED"})
    assert await reconcile_cached(api, body, failed) is Requeue.BACKOFF
    assert api.writes == []


def another() -> dict[str, Any]:
    """Return a Replay of the same name that was created later."""
    body = replay()
    return {**body, "metadata": body["metadata"] | {"uid": "another", "resourceVersion": "9"}}


async def test_completion_is_not_written_to_namesake() -> None:
    api, body = storing(another()), replay()
    failed = application(wall_clock(), applicationState={"state": "FAILED"})
    await reconcile_cached(api, body, failed)
    assert api.writes == []


async def test_replay_replaced_during_broker_call_is_not_launched() -> None:
    api, body = storing(another()), replay(spec={"target": {"type": "Source"}})
    cached = ctx(replays=[body])

    async def resolve(*_: object) -> None:
        cached.replays.drop(body)
        cached.replays.put(another())
        raise BrokerDownError("the broker does not answer", remedy="wait")

    brokers = cast("Any", SimpleNamespace(resolve=resolve))
    context = dataclasses.replace(cached, kubernetes=api, brokers=brokers)
    await reconcile(Key.of(body), context, asyncio.Lock())
    assert api.writes == []


@pytest.mark.parametrize(("minutes", "phase"), [(61, "Running"), (63, "Completed")])
async def test_finished_run_that_follows_completes_at_deadline(minutes: int, phase: str) -> None:
    body = launched(replay(spec={"deadline": "1h"}, status={"finished": True}), minutes)
    api = storing(body)
    runs = running()
    await reconcile_cached(api, body, runs)
    assert statuses(api)[-1]["phase"] == phase
    messages = {"Running": "all messages are moved; tracking their outcome"}
    assert shown(api)[1].startswith(messages.get(phase, "of "))


async def test_finished_run_completes_even_if_its_job_fails(
    api: FakeKubernetes,
) -> None:
    status = await ended(api, "FAILED", matched=5, moved=5, left=0, finished=True)
    assert status["phase"] == "Completed"


FAILURE = {"reason": "DeduplicationOff", "message": "deduplication is off on the topic"}


async def look_without_its_application(api: FakeKubernetes, **status: object) -> list[str]:
    """Reconcile a launched Replay without its application; return the kinds created."""
    body = launched(replay())  # the cache is behind
    (stored,) = api.objects[resources.REPLAYS].values()
    launched(stored)["status"] = reported(**status)
    provide(api)
    await reconcile_cached(api, body)
    return [write.resource.kind for write in api.writes if write.verb == "create"]


async def test_ended_run_without_application_is_not_relaunched(
    api: FakeKubernetes,
) -> None:
    account = {"matched": 8, "moved": 8, "skipped": 0, "refused": 0, "left": 0}
    assert await look_without_its_application(api, **account, finished=True) == []
    assert statuses(api)[-1]["phase"] == "Completed"
    assert shown(api)[1].startswith("of 8 dead letters 8 were moved")


@pytest.mark.parametrize("status", [{}, {"failure": FAILURE}])
async def test_application_deleted_by_hand_is_created_again(
    api: FakeKubernetes, status: dict[str, Any]
) -> None:
    assert await look_without_its_application(api, **status) == LAUNCH


PARTS = ("Submitted", "Running", "Completed", "gone")
FIELDS = SpecFields("Replay")
CHANGEABLE = [leaf for leaf in FIELDS.all if not leaf.immutable]


@dataclass
class Life:
    """A Replay that is launched, runs, ends, and is deleted a day later.

    Attributes:
        stale: whether an operator that starts after a crash knows everything as it was before.
        states: the stored objects after each part.
    """

    spec: Body = field(default_factory=lambda: {"ttlAfterFinished": "1d"})
    stale: bool = False
    fault: Fault = field(default_factory=lambda: Fault(0, done=False))
    states: list[Body] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.now = datetime(2026, 11, 22, tzinfo=UTC)
        self.kubernetes = Faulty()
        self.kubernetes.fault = self.fault
        self.kubernetes.add(resources.REPLAYS, replay(spec=dict(self.spec)))
        self.kubernetes.add(resources.POLICIES, policy())
        provide(self.kubernetes)

    @property
    def stored(self) -> dict[str, Any] | None:
        return self.kubernetes.objects[resources.REPLAYS].get(KEY)

    async def lived(self) -> Life:
        for part in PARTS:
            await self.reaches(part)
        return self

    async def reaches(self, part: str) -> None:
        """Bring the Replay to *part* of its life, and have the operator reconcile it."""
        cached = self._all()
        if part == "Running":
            self._spark("RUNNING")
        elif part == "Completed":
            assert self.stored is not None
            self.stored["status"] |= reported(matched=8, moved=8, left=0, finished=True)
            self._spark("COMPLETED")
        elif part == "gone":
            self.now += timedelta(days=2)
        try:
            await self.look()
        except Crash:
            if self.stale:
                with suppress(RedriveError):
                    await self._reconcile(cached)
            await self.look()
        self.states.append(self.state())

    async def look(self) -> None:
        """Have the operator see all as it is."""
        await self._reconcile(self._all())

    def change(self, spec: Body) -> None:
        """Have a user apply another spec; a job that runs follows."""
        assert self.stored is not None
        self.stored["spec"].clear()
        edit(self.stored, **spec)
        status = self.stored.setdefault("status", {})
        run = {name: value for name, value in status.pop("run", {}).items() if name != "suspended"}
        if status.get("phase") in {"Running", "Suspended"} and spec.get("suspend"):
            run["suspended"] = True
        status |= {"run": run} if run else {}

    def state(self) -> Body:
        """Return all stored objects, without versions and generations."""
        objects = copy.deepcopy(self._all())
        for bodies in objects.values():
            for body in bodies:
                for counts in ("resourceVersion", "generation", "uid"):
                    body["metadata"].pop(counts, None)
                body.get("status", {}).pop("observedGeneration", None)
                for condition in body.get("status", {}).get("conditions", []):
                    del condition["observedGeneration"]
        return objects

    @property
    def history(self) -> Counter[str]:
        verbs = ((write.verb, write.resource.kind) for write in self.kubernetes.writes)
        return Counter(f"{verb} {kind}" for verb, kind in verbs)

    def _all(self) -> dict[str, list[Body]]:
        kinds = (resources.REPLAYS, resources.SPARK_APPLICATIONS)
        objects = self.kubernetes.objects
        return {kind.kind: copy.deepcopy(list(objects[kind].values())) for kind in kinds}

    def _spark(self, state: str) -> None:
        for body in self.kubernetes.objects[resources.SPARK_APPLICATIONS].values():
            body["status"] = {"applicationState": {"state": state}}

    async def _reconcile(self, cached: dict[str, list[Body]]) -> None:
        context = dataclasses.replace(
            ctx(
                replays=copy.deepcopy([dict(body) for body in cached["Replay"]]),
                policies=copy.deepcopy([*self.kubernetes.objects[resources.POLICIES].values()]),
            ),
            kubernetes=self.kubernetes,
            settings=SETTINGS,
            clock=lambda: self.now,
            applications={resources.SPARK_APPLICATIONS: Cache(cached["SparkApplication"])},
        )
        await reconcile(KEY, context, asyncio.Lock())


@pytest.mark.parametrize("stale", [False, True], ids=["seen", "stale"])
@pytest.mark.parametrize("done", [False, True], ids=["not done", "done"])
async def test_replay_crash_at_any_write_launches_one_run(*, done: bool, stale: bool) -> None:
    peace = await Life().lived()
    assert [phase_of(state) for state in peace.states] == [*PARTS[:-1], None]
    writes = peace.fault.count
    assert writes == 9  # key, launch, three phases, two annotations, result, deletion
    for number in range(1, writes + 1):
        disturbed = await Life(stale=stale, fault=Fault(number, done=done)).lived()
        assert disturbed.states == peace.states, f"write {number}"
        assert disturbed.history["create SparkApplication"] == 1, f"write {number}"
        more = disturbed.history - peace.history
        # One that is behind tries to launch it once more, is refused, and shows that.
        repeated = {"patch_status Replay", "create Secret"}
        assert more.keys() <= repeated, f"write {number}: {more}"
        assert more.total() <= 2, f"write {number}: {more}"


def test_immutable_fields_are_all_but_a_few() -> None:
    assert [str(leaf) for leaf in CHANGEABLE] == [
        "suspend", "rateLimit.messages", "rateLimit.per", "deadline", "ttlAfterFinished",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("leaf", "during"),
    [
        (leaf, during)
        for leaf in CHANGEABLE
        for during in ("Pending", *PARTS[:-1])
        # An application has the rate limit of its launch; its job follows the spec.
        if (leaf.steps[0], during) != ("rateLimit", "Pending")
    ],
    ids=str,
)
async def test_field_changed_and_reverted_leaves_no_trace(leaf: SpecField, during: str) -> None:
    base = {"policyRef": {"name": "orders"}}
    for spec in FIELDS.specs(leaf, base, 3):
        never, changed = Life(base), Life(base)
        if during == "Pending":
            changed.change(spec)
            await changed.look()
            fresh = Life(spec)
            await fresh.look()
            assert changed.state() == fresh.state()
            changed.change(base)
        for part in PARTS[:-1]:
            for life in (never, changed):
                await life.reaches(part)
            if part == during:
                changed.change(spec)
                await changed.look()
                assert phase_of(changed.state()) == (
                    "Suspended" if part == "Running" and spec.get("suspend") else part
                )
                changed.change(base)
                await changed.look()
            assert changed.state() == never.state(), (spec, part)


def phase_of(state: Body) -> str | None:
    phases = [replay["status"]["phase"] for replay in state["Replay"]]
    return phases[0] if phases else None
