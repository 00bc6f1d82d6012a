"""Admission of Replays: prerequisites, priority, and the job that is launched."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic.alias_generators import to_camel

from redrive.admin.model import TopicMetadata
from redrive.api.job import JobTemplate
from redrive.api.permissions import LabelSelector, Namespaces
from redrive.api.replay import ReplayEngine
from redrive.api.replay_status import ADMITTED, ReplayRun, RunCounts
from redrive.api.rocketmq import RocketMQMessages
from redrive.errors import (
    InvalidSpecError,
    Requeue,
)
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.client import Kubernetes, ReferenceNotFoundError
from redrive.kube.connections import Connections, NamespaceLabels
from redrive.kube.context import Context, Settings, wall_clock
from redrive.kube.job_templates import JobTemplates
from redrive.kube.resources import CONNECTION, Key
from redrive.policy.naming import TopicName
from redrive.reasons import Reason
from redrive.replay.controller import admission, launch
from redrive.replay.controller.admission import ENDED_AT, former_targets
from redrive.replay.controller.launch import ChosenTemplate
from redrive.replay.controller.spark_operators import (
    APPLICATION,
    LAUNCHED_AT,
    Launched,
    find_application,
)
from redrive.replay.spec import Choice, QueueReplayJob, ReplayJob, decode_job
from tests.support.manifests import changed
from tests.support.reasons import raises

SETTINGS = Settings("here", (), Key("redrive", "replay"), "local:///replay.py", "redrive-replay")


def named(
    kind: str,
    name: str,
    spec: dict[str, Any],
    *,
    age: int = 0,
    **more: Any,  # noqa: ANN401
) -> dict[str, Any]:
    metadata = {
        "name": name,
        "namespace": "shop",
        "uid": f"uid-{name}",
        "generation": 1,
        "resourceVersion": "1",
        "creationTimestamp": f"2026-01-01T00:00:{age:02}Z",
    }
    return {
        "apiVersion": "redrive.io/v1beta1",
        "kind": kind,
        "metadata": metadata,
        "spec": spec,
        **more,
    }


def reported(**fields: object) -> dict[str, Any]:
    """Return a status of a Replay: counts, other fields of its job, and those of the operator."""
    names = {
        model: {to_camel(name) for name in model.model_fields} for model in (RunCounts, ReplayRun)
    }
    counts = {name: fields.pop(name) for name in names[RunCounts] & fields.keys()}
    run = {name: fields.pop(name) for name in names[ReplayRun] & fields.keys()}
    run |= {"counts": counts} if counts else {}
    return {**fields, **({"run": run} if run else {})}


def replay(
    name: str = "now",
    where: str | None = None,
    spec: dict[str, Any] | None = None,
    *,
    ended_at: str = "",
    **more: Any,  # noqa: ANN401
) -> dict[str, Any]:
    """Return a Replay; its status may have the fields of `status.run` beside the others.

    Args:
        ended_at: the time of its end; empty for one that has not ended.
    """
    select = {} if where is None else {"select": {"where": where}}
    spec = {"policyRef": {"name": "orders"}, **select, **(spec or {})}
    if "status" in more:
        more["status"] = reported(**more["status"])
    body = named("Replay", name, spec, **more)
    if ended_at:
        body["metadata"]["annotations"] = {ENDED_AT: ended_at}
    return body


def launched(body: dict[str, Any], minutes_ago: int = 0) -> dict[str, Any]:
    """Return a Replay as the operator annotates it when it creates its application."""
    launch_time = (wall_clock() - timedelta(minutes=minutes_ago)).isoformat()
    body["metadata"].setdefault("annotations", {}).update(
        {APPLICATION: launch.name_of(body), LAUNCHED_AT: launch_time}
    )
    if body["spec"].get("mode", "Run") == "Run":
        body["metadata"]["annotations"][ADMITTED] = body["metadata"]["uid"]
    return body


def policy(ready: str = "True", observed: int = 1, **spec: object) -> dict[str, Any]:
    condition = {
        "type": "Ready",
        "status": ready,
        "reason": "Provisioned",
        "message": "all there",
        "observedGeneration": observed,
    }
    spec = {
        "connectionRef": {"name": "main"},
        "topic": "persistent://shop/prod/orders",
        "subscription": "fulfilment",
        **spec,
    }
    return named("RetryPolicy", "orders", spec, status={"conditions": [condition]})


def connection(**spec: object) -> dict[str, Any]:
    token = {"type": "Token", "token": {"secretRef": {"name": "pulsar-admin", "key": "token"}}}
    replayer = {
        "type": "Token",
        "token": {"secretRef": {"name": "pulsar-replayer", "key": "token"}},
    }
    defaults = {
        "pulsar": {
            "serviceURL": "pulsar://pulsar:6650",
            "adminURL": "http://pulsar:8080",
            "authentication": token,
        },
        "allow": [{"name": "one", "topics": ["persistent://shop/*/*"], "roles": ["*"]}],
        "replay": {"role": "replayer", "authentication": replayer},
    }
    return named("BrokerConnection", "main", changed(defaults, **spec))


def with_templates(context: Context, **templates: JobTemplate) -> Context:
    """Return *context* with these job templates."""
    store = JobTemplates(None)
    store._valid = templates  # noqa: SLF001  as if they were read
    return dataclasses.replace(context, job_templates=store)


class Ledgers:
    """The brokers of a context, of which only properties of ledger topics are asked.

    Attributes:
        properties: of each ledger topic.
    """

    def __init__(self) -> None:
        self.properties: dict[str, str] = {}

    async def resolve(self, _ref: object, _namespace: str) -> SimpleNamespace:
        return SimpleNamespace(admin=self)

    async def metadata(self, _topic: TopicName, *, partitioned: bool) -> TopicMetadata:
        assert not partitioned
        return TopicMetadata(0, dict(self.properties))

    async def set_properties(self, _topic: TopicName, properties: Mapping[str, str]) -> None:
        self.properties.update(properties)


def ctx(**tables: list[dict[str, Any]]) -> Context:
    """Return a context with these objects in its caches, and without a client of Kubernetes."""
    defaults: dict[str, list[dict[str, Any]]] = {
        "policies": [policy()],
        "connections": [connection()],
        "replays": [],
        "inspections": [],
    }
    applications = Cache(tables.pop("applications", []))
    return Context(
        settings=SETTINGS,
        kubernetes=cast("Kubernetes", None),
        config_maps=Cache(),
        brokers=cast("Connections", Ledgers()),
        namespaces=cast("NamespaceLabels", None),
        job_templates=JobTemplates(None),
        clock=wall_clock,
        missing=(),
        began=wall_clock(),
        applications={resources.SPARK_APPLICATIONS: applications},
        **{name: Cache(bodies) for name, bodies in (defaults | tables).items()},
    )


def admit(body: dict[str, Any], context: Context) -> Any:  # noqa: ANN401  its job is of any kind
    """Return the admitted Replay."""
    return admission.admit(body, context)


def test_job_has_policy_broker_and_selection() -> None:
    admitted = admit(replay(where="cause_type = 'TimeoutError'"), ctx())
    assert str(admitted.job.policy.retry_topic) == "persistent://shop/prod/orders-fulfilment-RETRY"
    assert (admitted.job.namespace, admitted.job.name, admitted.job.uid) == (
        "shop",
        "now",
        "uid-now",
    )
    assert admitted.job.service_url == "pulsar://pulsar:6650"
    assert admitted.job.where == "cause_type = 'TimeoutError'"


def test_job_has_each_part_of_the_selection() -> None:
    select = {
        "ids": ["1:2"],
        "keys": ["eu"],
        "since": "1970-01-01T01:00:00.25+01:00",
        "until": "1970-01-01T00:00:01Z",
        "limit": 7,
        "causes": ["TimeoutError", ""],
        "fingerprints": ["0f4a9c31d2be7755"],
    }
    admitted = admit(replay(spec={"select": select, "maxReplays": 3}), ctx())
    assert admitted.job.choice == Choice(
        ("1:2",),
        ("eu",),
        250,
        1_000,
        7,
        max_replays=3,
        causes=("TimeoutError", ""),
        fingerprints=("0f4a9c31d2be7755",),
    )
    assert ReplayJob.decode(admitted.job.encode()) == admitted.job
    assert admitted.job.where is None
    assert admit(replay(spec={"maxReplays": 3}), ctx()).job.choice == Choice(max_replays=3)


IN_ROCKETMQ = {"policyRef": {"kind": "RocketMQRetryPolicy", "name": "orders"}}


def test_policies_of_one_name_differ_by_their_kind() -> None:
    other = launched(replay("other", spec={**IN_ROCKETMQ, "target": {"type": "Source"}}))
    with raises(Reason.POLICY_NOT_FOUND, match="the RocketMQRetryPolicy of policyRef"):
        admit(other, ctx())
    context = ctx(replays=[other])
    assert admit(replay(age=1), context).grants == ()


def rocketmq(clients: str = "Remoting", **more: object) -> Context:
    """Return the context of a RocketMQRetryPolicy; its connection has *more* for the cluster."""
    key = {"user": "replayer", "secretRef": {"name": "replayer", "key": "secretKey"}}
    cluster = {
        "nameServers": ["rocketmq:9876"],
        "authentication": {"type": "None"},
        "allow": [{"name": "one", "topics": ["*"], "groups": ["*"]}],
        "replay": {
            "authentication": {"type": "AccessKey", "accessKey": key}, "approvalAbove": 9
        },
        **more,
    }  # fmt: skip
    spec = {"connectionRef": {"name": "main"}, "topic": "orders", "group": "g", "clients": clients}
    body = named("RocketMQRetryPolicy", "orders", spec, status=policy()["status"])
    tables = {"policies": [policy()], "rocketmq_policies": [body]}
    return ctx(connections=[named("BrokerConnection", "main", {"rocketmq": cluster})], **tables)


@pytest.mark.parametrize(
    ("spec", "target", "retry_of"),
    [
        ({}, "%RETRY%g", "orders"),
        ({"target": {"type": "Source"}}, "orders", ""),
        ({"target": {"type": "Topic", "topic": "orders-repair"}}, "orders-repair", ""),
    ],
    ids=["retry", "source", "topic"],
)
def test_job_of_rocketmq_has_cluster_and_topics(
    spec: dict[str, Any], target: str, retry_of: str
) -> None:
    select = {"keys": ["eu"], "limit": 5, "ids": ["broker-a:0:17"]}
    body = replay(spec={**IN_ROCKETMQ, "select": select, "maxReplays": 3, **spec})
    admitted = admit(body, rocketmq())
    source = RocketMQMessages("%DLQ%g", "g", ["rocketmq:9876"], None, [])
    choice = Choice(ids=("broker-a:0:17",), keys=("eu",), limit=5, max_replays=3)
    ledger = "redrive-ledger-g"
    assert admitted.job == QueueReplayJob(
        "shop", "now", "uid-now", source, ledger, target, retry_of, choice=choice, approval_above=9
    )
    assert admitted.template.engine is ReplayEngine.JOB
    assert admitted.grants == ()


@pytest.mark.parametrize(
    "spec",
    [
        {"guarantee": "ExactlyOnce"},
        {"sending": "Batched"},
        {"followFor": "5m"},
        {"confirmations": ["Reconciled"]},
        {"confirmations": ["UnprovenHandled"]},
        {"jobTemplate": {"executors": 2}},
        {"select": {"causes": ["a"]}},
    ],
)
def test_fields_that_rocketmq_ignores_are_refused(spec: dict[str, Any]) -> None:
    with raises(Reason.OTHER_BROKER, match="create another Replay without them"):
        admit(replay(spec={**IN_ROCKETMQ, **spec}), rocketmq())


def test_review_of_rocketmq_is_a_review() -> None:
    job = admit(replay(spec={**IN_ROCKETMQ, "mode": "Review"}), rocketmq()).job
    assert (job.review, job.dry_run) == (True, False)
    assert decode_job(job.encode()) == job


def test_spark_selects_dead_letters_of_rocketmq() -> None:
    spec = {"engine": "Spark", "jobTemplate": {"executors": 2}, "select": {"where": "size > 1"}}
    admitted = admit(replay(spec={**IN_ROCKETMQ, **spec}), rocketmq())
    assert isinstance(admitted.job, QueueReplayJob)
    assert admitted.job.where == "size > 1"
    assert (admitted.template.engine, admitted.template.executors) == (ReplayEngine.SPARK, 2)
    with pytest.raises(InvalidSpecError, match="can't use this"):
        admit(replay(spec={**IN_ROCKETMQ, "select": {"where": "size > unknown"}}), rocketmq())


@pytest.mark.parametrize(
    ("topics", "group", "is_allowed"),
    [
        (["orders", "orders-repair"], "g", True),
        (["{namespace}-repair"], "g", False),
        (["orders"], "g", False),
        (["orders-repair"], "other", False),
    ],
    ids=["both", "another namespace", "another topic", "another group"],
)
def test_target_of_rocketmq_needs_a_rule_with_the_group(
    topics: list[str], group: str, *, is_allowed: bool
) -> None:
    spec = {**IN_ROCKETMQ, "target": {"type": "Topic", "topic": "orders-repair"}}
    context = rocketmq(allow=[
        {"name": "policy", "topics": ["orders"], "groups": ["g"]},
        {"name": "target", "topics": topics, "groups": [group]},
        {"name": "others", "topics": ["*"], "groups": ["*"], "namespaces": {"names": ["other"]}},
    ])  # fmt: skip
    if is_allowed:
        assert admit(replay(spec=spec), context).job.target == "orders-repair"
        return
    with raises(Reason.TARGET_NOT_ALLOWED, match="together with the group g; got 'orders-repair'"):
        admit(replay(spec=spec), context)


def test_retry_topic_of_grpc_clients_is_refused() -> None:
    with raises(Reason.OTHER_BROKER, match="got 'target: Retry'; create another .* target Source"):
        admit(replay(spec=IN_ROCKETMQ), rocketmq("GRPC"))
    admit(replay(spec={**IN_ROCKETMQ, "target": {"type": "Source"}}), rocketmq("GRPC"))


def test_replay_of_rocketmq_needs_access() -> None:
    with raises(Reason.REPLAY_IDENTITY_MISSING, match=r"spec\.rocketmq\.replay"):
        admit(replay(spec=IN_ROCKETMQ), rocketmq(replay=None))
    with raises(Reason.NAMESPACE_NOT_ALLOWED):
        admit(replay(spec=IN_ROCKETMQ), rocketmq(allow=[]))
    tls = {"caRef": {"kind": "ConfigMap", "name": "ca", "key": "ca.crt"}}
    with raises(Reason.TRUST_NOT_SUPPORTED, match=r"spec\.rocketmq\.replay\.tls"):
        admit(replay(spec=IN_ROCKETMQ), rocketmq(tls=tls))


def test_job_token_is_that_of_replay_role() -> None:
    token = admit(replay(), ctx()).identity.authentication.token
    assert token is not None
    assert token.secret_ref.name == "pulsar-replayer"


def test_job_has_redirect_hosts_of_connection() -> None:
    assert admit(replay(), ctx()).redirect_hosts == ()
    several = connection(redirectHosts=["broker-*.pulsar"])
    assert admit(replay(), ctx(connections=[several])).redirect_hosts == ("broker-*.pulsar",)


def test_job_pods_follow_connection_and_replay() -> None:
    through = connection(jobs={"templates": ["large"], "maxExecutors": 3})
    large = JobTemplate(executors=2, max_executors=5)
    context = with_templates(ctx(connections=[through]), large=large)
    assert admit(replay(), context).template == ChosenTemplate(
        "large", large, 2, ReplayEngine.SPARK
    )
    asking = replay(spec={"jobTemplate": {"name": "large", "executors": 3}})
    assert admit(asking, context).template.executors == 3
    beyond = replay(spec={"jobTemplate": {"executors": 4}})
    with raises(Reason.JOB_NOT_PERMITTED, match=r"at most 3.*got 4"):
        admit(beyond, context)
    other = replay(spec={"jobTemplate": {"name": "default"}})
    with raises(Reason.JOB_NOT_PERMITTED, match="does not permit this job template; got 'defau"):
        admit(other, context)
    with raises(Reason.JOB_TEMPLATE_NOT_FOUND, match="got 'large'"):
        admit(asking, ctx())


def test_bound_below_default_lowers_number_of_executors() -> None:
    through = connection(jobs={"maxExecutors": 2})
    context = with_templates(
        ctx(connections=[through]), default=JobTemplate(executors=3, max_executors=3)
    )
    assert admit(replay(), context).template.executors == 2
    settings = dataclasses.replace(SETTINGS, max_executors=1)
    assert admit(replay(), dataclasses.replace(context, settings=settings)).template.executors == 1


def test_job_template_is_for_its_namespaces_only() -> None:
    names = JobTemplate(namespaces=Namespaces(names=("other",)))
    with raises(Reason.JOB_NOT_PERMITTED, match="not for jobs of this namespace; got 'shop'"):
        admit(replay(), with_templates(ctx(), default=names))
    selector = LabelSelector(match_labels={"size": "large"})
    context = with_templates(ctx(), default=JobTemplate(namespaces=Namespaces(selector=selector)))
    for labels, is_permitted in (({"size": "large"}, True), ({}, False)):
        namespaces = cast("NamespaceLabels", SimpleNamespace(of=lambda _, labels=labels: labels))
        labelled = dataclasses.replace(context, namespaces=namespaces)
        if is_permitted:
            assert admit(replay(), labelled).template.name == "default"
        else:
            with raises(Reason.JOB_NOT_PERMITTED):
                admit(replay(), labelled)


ORDERS = "persistent://shop/prod/orders"
SOURCE = {"type": "Source"}


@pytest.mark.parametrize(
    ("asked", "target"),
    [
        ({}, None),
        ({"target": {"type": "Retry"}}, None),
        ({"target": {"type": "Source"}}, ORDERS),
        ({"target": {"type": "Topic", "topic": f"{ORDERS}-checked"}}, f"{ORDERS}-checked"),
        ({"target": {"type": "Topic", "topic": f"{ORDERS}-fulfilment-RETRY"}}, None),
    ],
)
def test_job_target_follows_the_spec(asked: dict[str, str], target: str | None) -> None:
    job = admit(replay(spec=asked), ctx()).job
    assert job.target == (target and TopicName.parse(target))
    assert str(job.destination) == (target or f"{ORDERS}-fulfilment-RETRY")
    assert ReplayJob.decode(job.encode()) == job


@pytest.mark.parametrize(
    ("spec", "field", "value"),
    [
        ({}, "follow_for", None),
        ({"followFor": "1m30s"}, "follow_for", 90),
        ({}, "exactly_once", True),
        ({"guarantee": "ExactlyOnce"}, "exactly_once", True),
        ({"guarantee": "AtLeastOnce"}, "exactly_once", False),
        ({}, "batch", False),
        ({"sending": "Batched"}, "batch", True),
        ({"reason": "up again"}, "reason", "up again"),
        ({"ticket": "OPS-1"}, "ticket", "OPS-1"),
        ({"rateLimit": {"messages": 5, "per": "2s"}}, "rate_limit", 2.5),
    ],
)
def test_job_has_field_of_the_spec(spec: dict[str, Any], field: str, value: object) -> None:
    job = admit(replay(spec=spec), ctx()).job
    assert getattr(job, field) == value
    assert ReplayJob.decode(job.encode()) == job


@pytest.mark.parametrize(
    "topic",
    [
        "persistent://billing/prod/invoices",
        "persistent://shop/prod/payments",
        "persistent://shop/staging/orders",
    ],
)
def test_target_outside_rules_is_refused(topic: str) -> None:
    allow = [
        {"name": "one", "topics": ["persistent://shop/prod/orders*"], "roles": ["*"]},
        {
            "name": "one",
            "namespaces": {"names": ["billing"]},
            "topics": ["persistent://*/*/*"],
            "roles": ["*"],
        },
    ]
    asked = replay(spec={"target": {"type": "Topic", "topic": topic}})
    with raises(Reason.TARGET_NOT_ALLOWED, match=r"spec\.allow") as refused:
        admit(asked, ctx(connections=[connection(allow=allow)]))
    assert topic in str(refused.value)


@pytest.mark.parametrize("mode", ["Run", "Plan"])
@pytest.mark.parametrize(
    ("spec", "role", "is_allowed"),
    [
        ({"target": SOURCE}, "replay*", True),
        ({"target": SOURCE}, "fulfilment", False),
        ({"target": {"type": "Topic", "topic": "persistent://shop/prod/checked"}}, "*", False),
        ({}, "fulfilment", True),
        ({"target": {"type": "Topic", "topic": f"{ORDERS}-fulfilment-RETRY"}}, "fulfilment", True),
    ],
)
def test_target_needs_a_rule_for_the_replay_role(
    spec: dict[str, Any], role: str, mode: str, *, is_allowed: bool
) -> None:
    """The role may have the right already, by the rule of another namespace."""
    allow = [
        {"name": "one", "topics": [f"{ORDERS}*"], "roles": [role]},
        {"name": "two", "topics": ["persistent://shop/prod/*"], "roles": ["fulfilment"]},
        {
            "name": "three",
            "namespaces": {"names": ["billing"]},
            "topics": ["persistent://shop/prod/*"],
            "roles": ["replayer"],
        },
    ]
    asked, context = replay(spec={**spec, "mode": mode}), ctx(connections=[connection(allow=allow)])
    if is_allowed:
        source = TopicName.parse(ORDERS)
        is_granted = mode == "Run" and spec.get("target") == SOURCE
        assert admit(asked, context).grants == (source,) * is_granted
        return
    with raises(Reason.TARGET_NOT_ALLOWED, match=r"role replayer .*add the role to `roles`"):
        admit(asked, context)


def test_earlier_replays_add_grants_at_their_targets() -> None:
    """The next Replay looks for messages that they left there without a record."""
    targets = [
        {"target": {"type": "Source"}},
        {"target": {"type": "Topic", "topic": f"{ORDERS}-checked"}},
        {},
    ]
    earlier = [
        launched(replay(f"ended-{number}", spec=spec, ended_at="2026-01-01T00:00:00Z"))
        for number, spec in enumerate(targets)
    ]
    context = ctx(replays=earlier)
    source, checked = TopicName.parse(ORDERS), TopicName.parse(f"{ORDERS}-checked")
    assert admit(replay(), context).grants == (source, checked)
    assert admit(replay(spec=targets[1]), context).grants == (checked, source)
    audit = admit(replay(spec={"mode": "Audit"}), context)
    assert isinstance(audit.job, ReplayJob)
    assert audit.job.audited == (audit.job.policy.retry_topic, *audit.grants)
    assert audit.grants == (source, checked)


@pytest.mark.parametrize("phase", ["Running", "Completed", "Failed"])
def test_status_of_another_replay_adds_no_grants(phase: str) -> None:
    """A job may write the status of each Replay of its namespace."""
    other = replay("other", spec={"target": {"type": "Source"}, "suspend": True})
    other["status"] = {"phase": phase, "sparkApplication": launch.name_of(other)}
    context = ctx(replays=[other])
    assert tuple(former_targets(replay(), context, TopicName.parse(ORDERS))) == ()
    application = named("SparkApplication", launch.name_of(other), {})
    context = ctx(replays=[other], applications=[application])
    assert tuple(former_targets(replay(), context, TopicName.parse(ORDERS))) == (
        TopicName.parse(ORDERS),
    )


def test_annotated_end_without_launch_adds_no_grants() -> None:
    """An author may create Replays with the annotation, and with any targets."""
    forged = replay("forged", spec={"target": {"type": "Source"}}, ended_at="2026-01-01T00:00:00Z")
    assert admit(replay(), ctx(replays=[forged])).grants == ()


def test_former_targets_visit_no_pending_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant may create thousands of them, and each reconcile of one would visit all."""
    visited: list[object] = []
    monkeypatch.setattr(admission, "is_dry_run", visited.append)
    spec = {"target": {"type": "Source"}, "suspend": True}
    context = ctx(replays=[replay(f"pending-{number}", spec=spec) for number in range(9)])
    assert not any(former_targets(replay(), context, TopicName.parse(ORDERS)))
    assert not visited


def test_invalid_selection_is_refused_first() -> None:
    with pytest.raises(InvalidSpecError, match="unknown column, at character 1; got 'cause'"):
        admit(replay(where="cause = 'x'"), ctx(policies=[], connections=[]))


def test_discarding_policy_has_nothing_to_replay() -> None:
    discarding = policy()
    discarding["spec"]["deadLetter"] = {"mode": "Discard"}
    with raises(Reason.DEAD_LETTERS_DISCARDED, match=r"set its deadLetter\.mode to Keep"):
        admit(replay(), ctx(policies=[discarding]))


@pytest.mark.parametrize(
    ("spec", "missing"),
    [
        ({}, "reason, ticket"),
        ({"reason": "fixed"}, "ticket"),
        ({"ticket": "OPS-1", "mode": "Review"}, "reason"),
    ],
)
def test_required_reason_and_ticket_hold_a_replay(spec: dict[str, str], missing: str) -> None:
    body = connection()
    body["spec"]["replay"]["require"] = ["Reason", "Ticket"]
    with raises(Reason.AUTHOR_FIELD_MISSING, match=f"got '{missing}'; create another Replay"):
        admit(replay(spec=spec), ctx(connections=[body]))
    for complete in ({"reason": "fixed", "ticket": "OPS-1"}, {"mode": "Plan"}):
        admit(replay(spec=complete), ctx(connections=[body]))


def test_job_policy_has_connection_defaults() -> None:
    admitted = admit(replay(), ctx(connections=[connection(policyDefaults={"maxRetries": 3})]))
    assert admitted.job.policy.max_retries == 3


def test_missing_policy_is_waited_for() -> None:
    with raises(Reason.POLICY_NOT_FOUND, match="does not exist"):
        admit(replay(), ctx(policies=[]))


def test_deleted_policy_counts_as_missing() -> None:
    going = policy()
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    with raises(Reason.POLICY_NOT_FOUND):
        admit(replay(), ctx(policies=[going]))


@pytest.mark.parametrize("state", [{"ready": "False"}, {"ready": "Unknown"}, {"observed": 0}])
def test_policy_that_is_not_ready_is_waited_for(state: dict[str, Any]) -> None:
    with raises(Reason.POLICY_NOT_READY, match="got 'Provisioned: all there'"):
        admit(replay(), ctx(policies=[policy(**state)]))


def test_connection_without_replay_role_is_refused() -> None:
    with raises(Reason.REPLAY_IDENTITY_MISSING, match=r"give it spec\.replay"):
        admit(replay(), ctx(connections=[connection(replay=None)]))


def test_connection_with_ca_needs_one_for_jobs() -> None:
    tls = {"caRef": {"kind": "ConfigMap", "name": "authorities", "key": "ca.crt"}}
    secured = connection(tls=tls, adminURL="https://pulsar:8443")
    with raises(Reason.TRUST_NOT_SUPPORTED, match=r"shop/main .* name them in spec\.replay\.tls"):
        admit(replay(), ctx(connections=[secured]))
    identity = {**secured["spec"]["replay"], "tls": tls}
    admit(replay(), ctx(connections=[connection(**secured["spec"] | {"replay": identity})]))
    assert Reason.TRUST_NOT_SUPPORTED.stalls
    assert Reason.TRUST_NOT_SUPPORTED.requeue is Requeue.ON_CHANGE
    trusting = connection(adminURL="https://pulsar:8443")
    assert admit(replay(), ctx(connections=[trusting])).job.admin_url == "https://pulsar:8443"


def test_missing_or_closed_connection_is_refused() -> None:
    with pytest.raises(ReferenceNotFoundError):
        admit(replay(), ctx(connections=[]))
    other = [
        {"name": "one", "namespaces": {"names": ["other"]}, "topics": ["persistent://shop/*/*"]}
    ]
    with raises(Reason.NAMESPACE_NOT_ALLOWED):
        admit(replay(), ctx(connections=[connection(allow=other)]))


def test_older_replay_goes_first() -> None:
    older, younger = replay("older", age=1), replay("younger", age=2)
    both = ctx(replays=[younger, older])
    assert admit(older, both).job.name == "older"
    with raises(Reason.REPLAY_IN_PROGRESS, match="got 'shop/older'"):
        admit(younger, both)


def test_running_replay_precedes_an_older_one() -> None:
    older, younger = replay("older", age=1), replay("younger", age=2)
    running = named("SparkApplication", launch.name_of(younger), {})
    with raises(Reason.REPLAY_IN_PROGRESS, match="got 'shop/younger'"):
        admit(older, ctx(replays=[younger, older], applications=[running]))
    launched(younger)
    with raises(Reason.REPLAY_IN_PROGRESS, match="got 'shop/younger'"):
        admit(older, ctx(replays=[younger, older]))


def test_other_replays_of_the_policy_do_not_slow_down_the_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A policy may have ten thousand; each would look at all others at each reconcile."""
    suspended = [replay(f"s{n:03}", spec={"suspend": True}) for n in range(300)]
    pending = [replay(f"p{n:03}", age=1) for n in range(300)]
    crowded = ctx(replays=[*reversed(pending), *suspended])
    assert admit(pending[0], crowded).job.name == "p000"
    looks = 0
    name_of = launch.name_of

    def count(body: Mapping[str, Any], kind: resources.Resource = resources.REPLAYS) -> str:
        nonlocal looks
        looks += 1
        return name_of(body, kind)

    monkeypatch.setattr(launch, "name_of", count)
    assert admit(pending[0], crowded).job.name == "p000"
    for body in pending[1:]:
        with raises(Reason.REPLAY_IN_PROGRESS, match="got 'shop/p000'"):
            admit(body, crowded)
    assert looks < 10 * len(pending)


def test_launched_replay_precedes_without_its_application() -> None:
    """The younger was launched while the older was suspended."""
    older, younger = replay("older", age=1), launched(replay("younger", age=2))
    both = ctx(replays=[younger, older])
    assert admit(younger, both).job.name == "younger"
    with raises(Reason.REPLAY_IN_PROGRESS):
        admit(older, both)


def test_stalled_replay_before_launch_blocks_no_other() -> None:
    stalls = {"type": "Stalled", "status": "True", "reason": "ReplayNotSafe", "message": "no"}
    older = replay("older", age=1, status={"conditions": [stalls]})
    assert admit(replay(age=2), ctx(replays=[older])).job.name == "now"
    with raises(Reason.REPLAY_IN_PROGRESS):
        admit(replay(age=2), ctx(replays=[launched(older)]))


@pytest.mark.parametrize("phase", ["Completed", "Failed"])
def test_ended_replay_blocks_no_other(phase: str) -> None:
    status = {"phase": phase, "sparkApplication": "it"}
    ended = replay("ended", age=1, status=status, ended_at="2026-01-01T00:00:00Z")
    assert admit(replay(age=2), ctx(replays=[ended])).job.name == "now"
    with raises(Reason.REPLAY_IN_PROGRESS):  # a job may have written that phase
        admit(replay(age=2), ctx(replays=[replay("ended", age=1, status=status)]))


def test_replay_of_other_policy_blocks_no_other() -> None:
    other = replay("other", age=1)
    other["spec"]["policyRef"]["name"] = "payments"
    assert admit(replay(age=2), ctx(replays=[other])).job.name == "now"


def test_dry_run_blocks_no_other_and_is_not_blocked() -> None:
    dry, moving = replay("dry", spec={"mode": "Plan"}, age=1), replay("moving", age=2)
    both = ctx(
        replays=[dry, moving],
        applications=[
            named("SparkApplication", launch.name_of(body), {}) for body in (dry, moving)
        ],
    )
    assert admit(dry, both).job.dry_run
    assert not admit(moving, both).job.dry_run


def reviewed(name: str, age: int, mode: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a Replay that was launched as a review, with its application."""
    body = launched(replay(name, spec={"mode": "Review"}, age=age))
    body["spec"]["mode"] = mode
    return body, named("SparkApplication", launch.name_of(body), {})


def test_review_is_not_blocked_and_blocks_until_confirmed() -> None:
    review, application = reviewed("review", 1, "Review")
    moving = launched(replay("moving", age=2))
    assert admit(review, ctx(replays=[review, moving])).job.review
    others = {"replays": [review, replay(age=3)], "applications": [application]}
    assert not admit(replay(age=3), ctx(**others)).job.review
    review["spec"]["mode"] = "Run"
    with raises(Reason.REPLAY_IN_PROGRESS, match="got 'shop/review'"):
        admit(replay(age=3), ctx(**others))
    with raises(Reason.REPLAY_IN_PROGRESS, match="got 'shop/moving'"):
        admit(review, ctx(replays=[review, moving]))


@pytest.mark.parametrize("admitted", ["older", "younger"])
def test_confirmed_reviews_run_one_after_another(admitted: str) -> None:
    older, first = reviewed("older", 1, "Run")
    younger, second = reviewed("younger", 2, "Run")
    both = ctx(replays=[older, younger], applications=[first, second])
    assert admit(older, both).job.name == "older"
    with raises(Reason.REPLAY_IN_PROGRESS, match="got 'shop/older'"):
        admit(younger, both)
    one, other = (older, younger) if admitted == "older" else (younger, older)
    one["metadata"]["annotations"][ADMITTED] = one["metadata"]["uid"]
    both = ctx(replays=[older, younger], applications=[first, second])
    with raises(Reason.REPLAY_IN_PROGRESS, match=f"got 'shop/{admitted}'"):
        admit(other, both)


def test_suspended_confirmed_review_blocks_no_other() -> None:
    review, application = reviewed("review", 1, "Run")
    review["spec"]["suspend"] = True
    both = ctx(replays=[review], applications=[application])
    assert admit(replay(age=2), both).job.name == "now"


@pytest.mark.parametrize("kind", ["Shared", "KeyShared"])
@pytest.mark.parametrize(
    "target", [{"target": {"type": "Source"}}, {"target": {"type": "Topic", "topic": ORDERS}}, {}]
)
def test_batch_by_key_to_own_subscription_is_refused(kind: str, target: dict[str, str]) -> None:
    context = ctx(policies=[policy(subscriptionType=kind)])
    asked = replay(spec={**target, "sending": "Batched"})
    if kind == "KeyShared" and target:
        with raises(Reason.BATCH_MIXES_KEYS, match="sending Individual, or with target Retry"):
            admit(asked, context)
    else:
        assert admit(asked, context).job.batch


def test_unsafe_policy_allows_dry_runs_only() -> None:
    never = ctx(policies=[policy(replay={"safety": "Never"})])
    with raises(Reason.REPLAY_NOT_SAFE, match=r"got 'replay\.safety: Never'; count"):
        admit(replay(spec={"confirmations": ["Reconciled"]}), never)
    assert admit(replay(spec={"mode": "Plan"}), never).job.dry_run
    audit = admit(replay(spec={"mode": "Audit"}), never).job
    assert isinstance(audit, ReplayJob)
    assert (audit.dry_run, audit.audited) == (True, (audit.policy.retry_topic,))
    assert Reason.REPLAY_NOT_SAFE.stalls


def test_policy_to_reconcile_first_needs_confirmation() -> None:
    first = ctx(policies=[policy(replay={"safety": "ReconcileFirst"})])
    with raises(Reason.REPLAY_NOT_SAFE, match=r"with confirmations: \[Reconciled\]"):
        admit(replay(), first)
    admit(replay(spec={"confirmations": ["Reconciled"]}), first)
    admit(replay(spec={"mode": "Plan"}), first)
    admit(replay(), ctx(policies=[policy(replay={"safety": "Idempotent"})]))


def test_suspended_replay_is_not_launched_and_blocks_none() -> None:
    resting, next_one = replay("resting", spec={"suspend": True}, age=1), replay("next", age=2)
    both = ctx(replays=[resting, next_one])
    with raises(Reason.SUSPENDED, match=r"set spec\.suspend to false"):
        admit(resting, both)
    assert admit(next_one, both).job.name == "next"
    with raises(Reason.REPLAY_IN_PROGRESS, match="got 'shop/resting'"):
        admit(next_one, ctx(replays=[launched(resting), next_one]))


@pytest.mark.parametrize(
    ("of_policy", "of_connection", "bound"),
    [(None, None, None), (100, None, 100), (None, 0, 0), (100, 50, 50), (50, 100, 50)],
)
def test_lower_approval_bound_applies(
    of_policy: int | None, of_connection: int | None, bound: int | None
) -> None:
    token = {"type": "Token", "token": {"secretRef": {"name": "pulsar-replayer", "key": "token"}}}
    identity = {"role": "replayer", "authentication": token, "approvalAbove": of_connection}
    asking: dict[str, Any] = {} if of_policy is None else {"replay": {"approvalAbove": of_policy}}
    context = ctx(policies=[policy(**asking)], connections=[connection(replay=identity)])
    job = admit(replay(), context).job
    assert job.approval_above == bound
    assert ReplayJob.decode(job.encode()) == job


def with_application(
    name: str, policy_name: str, connection: str | None = "main"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a Replay, and its application, launched through a connection."""
    body = launched(replay(name, spec={"policyRef": {"name": policy_name}}))
    metadata = {"name": launch.name_of(body), "namespace": "shop", "uid": name}
    owner = {"kind": "Replay", "name": name, "uid": body["metadata"]["uid"]}
    through = {} if connection is None else {CONNECTION: f"shop/{connection}"}
    return body, {"metadata": metadata | {"ownerReferences": [owner], "annotations": through}}


@pytest.mark.parametrize(
    ("most", "runs", "mode", "refused"),
    [(2, 2, "Run", True), (2, 2, "Plan", True), (3, 2, "Run", False), (2, 1, "Run", False)],
)
def test_replay_waits_while_its_namespace_has_all_its_runs(
    most: int, runs: int, mode: str, *, refused: bool
) -> None:
    rule = {"name": "one", "topics": ["persistent://shop/*/*"], "limits": {"runs": most}}
    others = [with_application(f"other-{n}", f"policy-{n}") for n in range(runs)]
    policies = [policy(), *(renamed(policy(), f"policy-{n}") for n in range(runs))]
    elsewhere = renamed(policy(connectionRef={"name": "another"}), "elsewhere")
    uncounted = with_application("uncounted", "elsewhere", "another")
    mine = replay(spec={"mode": mode})
    made = ctx(
        connections=[connection(allow=[rule])],
        policies=[*policies, elsewhere],
        replays=[mine, uncounted[0], *(body for body, _ in others)],
        applications=[uncounted[1], *(application for _, application in others)],
    )
    if not refused:
        assert admit(mine, made).job.name == "now"
        return
    with raises(Reason.TOO_MANY_RUNS, match=rf"BrokerConnection shop/main allows; got {runs};"):
        admit(mine, made)


@pytest.mark.parametrize(
    ("state", "through", "refused"),
    [
        ("RUNNING", "main", True),
        ("RUNNING", None, True),
        ("COMPLETED", "main", False),
        ("RUNNING", "another", False),
    ],
)
def test_applications_count_by_their_launch_until_their_end(
    state: str, through: str | None, *, refused: bool
) -> None:
    """Whatever an author does meanwhile to the Replay, and to the connection of its policy."""
    rule = {"name": "one", "topics": ["persistent://shop/*/*"], "limits": {"runs": 1}}
    running, application = with_application("running", "moved", through)
    application["status"] = {"applicationState": {"state": state}}
    unannotated, ended = copy.deepcopy(running), copy.deepcopy(running)
    del unannotated["metadata"]["annotations"]
    ended["metadata"]["annotations"][ENDED_AT] = "2026-01-01T00:00:00Z"
    for others in ([], [running], [unannotated], [ended]):
        made = ctx(
            connections=[connection(allow=[rule])],
            policies=[policy(), renamed(policy(connectionRef={"name": "new"}), "moved")],
            replays=[replay(), *others],
            applications=[application],
        )
        if not refused:
            assert admit(replay(), made).job.name == "now"
            continue
        with raises(Reason.TOO_MANY_RUNS, match="got 1;"):
            admit(replay(), made)


def renamed(body: dict[str, Any], name: str) -> dict[str, Any]:
    return body | {"metadata": body["metadata"] | {"name": name, "uid": f"uid-{name}"}}


def test_pending_replays_do_not_slow_down_the_count_of_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A namespace may have ten thousand; each would look at all others at each reconcile."""
    rule = {"name": "one", "topics": ["persistent://shop/*/*"], "limits": {"runs": 1}}
    crowd = [replay(f"p-{n}", spec={"policyRef": {"name": f"policy-{n}"}}) for n in range(500)]
    running, application = with_application("running", "policy")
    made = ctx(
        connections=[connection(allow=[rule])],
        policies=[policy(), renamed(policy(), "policy")],
        replays=[replay(), running, *crowd],
        applications=[application],
    )
    looks = 0

    def count(body: dict[str, Any], context: Context) -> Launched | None:
        nonlocal looks
        looks += 1
        return find_application(body, context)

    monkeypatch.setattr("redrive.replay.controller.admission.find_application", count)
    with raises(Reason.TOO_MANY_RUNS, match="got 1;"):
        admit(replay(), made)
    assert looks < 10


def test_launched_replay_is_not_counted_against_itself() -> None:
    rule = {"name": "one", "topics": ["persistent://shop/*/*"], "limits": {"runs": 1}}
    mine, application = with_application("now", "orders")
    made = ctx(connections=[connection(allow=[rule])], replays=[mine], applications=[application])
    assert admit(mine, made).job.name == "now"
