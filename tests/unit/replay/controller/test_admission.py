"""A Replay is launched when everything it needs is there and its turn has come."""

from __future__ import annotations

from typing import Any, cast

import pytest

from redrive.errors import (
    BatchMixesKeysError,
    DeadLettersDiscardedError,
    InvalidSpecError,
    JobNotPermittedError,
    PolicyNotFoundError,
    PolicyNotReadyError,
    ReplayIdentityMissingError,
    ReplayInProgressError,
    ReplayNotSafeError,
    Requeue,
    SuspendedError,
    TargetNotAllowedError,
    TrustNotSupportedError,
)
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.client import ConnectionNotFoundError, Kubernetes, NamespaceNotAllowedError
from redrive.kube.connections import Connections, NamespaceLabels
from redrive.kube.context import Context, Settings, wall_clock
from redrive.policy.naming import TopicName
from redrive.replay.controller import launch
from redrive.replay.controller.admission import admit
from redrive.replay.spec import Choice, ReplayJob

SETTINGS = Settings("here", (), "image", "local:///replay.py", "redrive-replay")


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


def replay(
    name: str = "now",
    where: str | None = None,
    spec: dict[str, Any] | None = None,
    **more: Any,  # noqa: ANN401
) -> dict[str, Any]:
    select = {} if where is None else {"select": {"where": where}}
    spec = {"policyRef": {"name": "orders"}, **select, **(spec or {})}
    return named("Replay", name, spec, **more)


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
    token = {"token": {"secretRef": {"name": "pulsar-admin", "key": "token"}}}
    replayer = {"token": {"secretRef": {"name": "pulsar-replayer", "key": "token"}}}
    defaults = {
        "serviceUrl": "pulsar://pulsar:6650",
        "adminUrl": "http://pulsar:8080",
        "authentication": token,
        "allow": [{"topics": ["persistent://shop/*/*"], "roles": ["*"]}],
        "replay": {"role": "replayer", "authentication": replayer},
    }
    filled = {key: value for key, value in (defaults | spec).items() if value is not None}
    return named("BrokerConnection", "main", filled)


def ctx(**tables: list[dict[str, Any]]) -> Context:
    """What the watches have shown. Nothing here may be asked over the network."""
    known: dict[str, list[dict[str, Any]]] = {
        "policies": [policy()],
        "connections": [connection()],
        "replays": [],
    }
    applications = Cache(tables.pop("applications", []))
    return Context(
        settings=SETTINGS,
        kubernetes=cast("Kubernetes", None),
        config_maps=Cache(),
        brokers=cast("Connections", None),
        namespaces=cast("NamespaceLabels", None),
        clock=wall_clock,
        missing=(),
        began=wall_clock(),
        applications={resources.SPARK_APPLICATIONS: applications},
        **{name: Cache(bodies) for name, bodies in (known | tables).items()},
    )


def test_the_job_knows_the_policy_the_broker_and_the_selection() -> None:
    admitted = admit(replay(where="cause_type = 'TimeoutError'"), ctx())
    assert str(admitted.job.policy.retry_topic) == "persistent://shop/prod/orders-fulfilment-RETRY"
    assert (admitted.job.namespace, admitted.job.name, admitted.job.uid) == (
        "shop",
        "now",
        "uid-now",
    )
    assert admitted.job.service_url == "pulsar://pulsar:6650"
    assert admitted.job.where == "cause_type = 'TimeoutError'"


def test_the_job_knows_the_other_parts_of_the_selection() -> None:
    select = {
        "ids": ["1:2"],
        "keys": ["eu"],
        "since": "1970-01-01T01:00:00.25+01:00",
        "until": "1970-01-01T00:00:01Z",
        "limit": 7,
    }
    admitted = admit(replay(spec={"select": select, "maxReplays": 3}), ctx())
    assert admitted.job.choice == Choice(("1:2",), ("eu",), 250, 1_000, 7, max_replays=3)
    assert admitted.job.where is None
    assert admit(replay(spec={"maxReplays": 3}), ctx()).job.choice == Choice(max_replays=3)


def test_the_token_is_that_of_the_replay_role() -> None:
    given = admit(replay(), ctx()).identity.credentials.token
    assert given is not None
    assert given.secret_ref.name == "pulsar-replayer"


def test_the_job_knows_where_its_token_may_be_redirected() -> None:
    assert admit(replay(), ctx()).redirect_hosts == ()
    several = connection(redirectHosts=["broker-*.pulsar"])
    assert admit(replay(), ctx(connections=[several])).redirect_hosts == ("broker-*.pulsar",)


def test_the_job_has_the_pods_that_its_connection_gives_it() -> None:
    through = connection(job={"executors": 2, "overrides": {"maxExecutors": 3}})
    assert admit(replay(), ctx(connections=[through])).template.executors == 2
    asking = replay(spec={"job": {"executors": 3}})
    assert admit(asking, ctx(connections=[through])).template.executors == 3
    with pytest.raises(JobNotPermittedError, match="got 'executors: 3'"):
        admit(asking, ctx())


ORDERS = "persistent://shop/prod/orders"


@pytest.mark.parametrize(
    ("asked", "target"),
    [
        ({}, None),
        ({"target": "Retry"}, None),
        ({"target": "Source"}, ORDERS),
        ({"target": "Topic", "targetTopic": f"{ORDERS}-checked"}, f"{ORDERS}-checked"),
        ({"target": "Topic", "targetTopic": f"{ORDERS}-fulfilment-RETRY"}, None),
    ],
)
def test_the_job_knows_its_target(asked: dict[str, str], target: str | None) -> None:
    job = admit(replay(spec=asked), ctx()).job
    assert job.target == (target and TopicName.parse(target))
    assert str(job.destination) == (target or f"{ORDERS}-fulfilment-RETRY")
    assert ReplayJob.decode(job.encode()) == job


def test_the_job_knows_how_long_to_follow() -> None:
    assert admit(replay(), ctx()).job.follow_for is None
    job = admit(replay(spec={"followFor": "1m30s"}), ctx()).job
    assert job.follow_for == 90
    assert ReplayJob.decode(job.encode()) == job


@pytest.mark.parametrize("asked", ["ExactlyOnce", "AtLeastOnce", None])
def test_the_job_knows_what_is_guaranteed(asked: str | None) -> None:
    spec = {} if asked is None else {"guarantee": asked}
    job = admit(replay(spec=spec), ctx()).job
    assert job.exactly_once is (asked != "AtLeastOnce")
    assert ReplayJob.decode(job.encode()) == job


@pytest.mark.parametrize(
    "topic",
    [
        "persistent://billing/prod/invoices",
        "persistent://shop/prod/payments",
        "persistent://shop/staging/orders",
    ],
)
def test_a_topic_outside_of_the_rules_for_the_namespace_is_no_target(topic: str) -> None:
    allow = [
        {"topics": ["persistent://shop/prod/orders*"], "roles": ["*"]},
        {"namespaces": {"names": ["billing"]}, "topics": ["persistent://*/*/*"], "roles": ["*"]},
    ]
    asked = replay(spec={"target": "Topic", "targetTopic": topic})
    with pytest.raises(TargetNotAllowedError, match=r"spec\.allow") as refused:
        admit(asked, ctx(connections=[connection(allow=allow)]))
    assert topic in str(refused.value)


@pytest.mark.parametrize(("role", "granted"), [("replay*", True), ("fulfilment", False)])
def test_the_replay_role_gets_rights_on_a_target_where_a_rule_names_it(
    role: str, *, granted: bool
) -> None:
    allow = [
        {"topics": [f"{ORDERS}*"], "roles": [role]},
        {"topics": ["persistent://shop/prod/*"], "roles": ["fulfilment"]},
    ]
    context = ctx(connections=[connection(allow=allow)])
    source = TopicName.parse(ORDERS)
    assert admit(replay(spec={"target": "Source"}), context).grants == (source,) * granted
    other = {"target": "Topic", "targetTopic": "persistent://shop/prod/checked"}
    assert admit(replay(spec=other), context).grants == ()
    assert admit(replay(), context).grants == ()


def test_replay_gets_rights_at_former_target_of_failed_one() -> None:
    """What it left there without a record is looked for by the next one."""
    targets = [{"target": "Source"}, {"target": "Topic", "targetTopic": f"{ORDERS}-checked"}, {}]
    failed = [
        replay(
            f"failed-{number}",
            spec=spec,
            status={"phase": phase, "sparkApplication": f"replay-failed-{number}-"},
        )
        for number, spec in enumerate(targets)
        for phase in ["Failed"]
    ]
    for each in failed:
        each["status"]["sparkApplication"] = launch.name_of(each)
    context = ctx(replays=failed)
    source, checked = TopicName.parse(ORDERS), TopicName.parse(f"{ORDERS}-checked")
    assert admit(replay(), context).grants == (source, checked)
    assert admit(replay(spec=targets[1]), context).grants == (checked, source)
    failed[0]["status"]["phase"] = "Completed"
    failed[1]["status"]["sparkApplication"] = "of-another"
    assert admit(replay(), ctx(replays=failed)).grants == ()


def test_a_selection_that_cannot_be_is_refused_before_anything_else_is_asked() -> None:
    with pytest.raises(InvalidSpecError, match="unknown column, at character 1; got 'cause'"):
        admit(replay(where="cause = 'x'"), ctx(policies=[], connections=[]))


def test_a_policy_that_discards_has_nothing_to_replay() -> None:
    discarding = policy()
    discarding["spec"]["deadLetter"] = {"mode": "Discard"}
    with pytest.raises(DeadLettersDiscardedError, match=r"set its deadLetter\.mode to Keep"):
        admit(replay(), ctx(policies=[discarding]))


def test_the_job_knows_what_the_policy_leaves_to_its_connection() -> None:
    admitted = admit(replay(), ctx(connections=[connection(policyDefaults={"maxRetries": 3})]))
    assert admitted.job.policy.max_retries == 3


def test_the_job_knows_the_topics_that_the_policy_has_whatever_its_connection_says_now() -> None:
    body = policy()
    body["status"]["namingScheme"] = "tdmq-2.7.2"
    through = connection(policyDefaults={"naming": {"scheme": "rocketmq"}})
    found = admit(replay(), ctx(policies=[body], connections=[through])).job.policy
    assert found.dead_letter_topic.local == "fulfilment-DLQ"


def test_a_missing_policy_is_waited_for() -> None:
    with pytest.raises(PolicyNotFoundError, match="does not exist"):
        admit(replay(), ctx(policies=[]))


def test_a_policy_that_is_being_deleted_counts_as_missing() -> None:
    going = policy()
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    with pytest.raises(PolicyNotFoundError):
        admit(replay(), ctx(policies=[going]))


@pytest.mark.parametrize("state", [{"ready": "False"}, {"ready": "Unknown"}, {"observed": 0}])
def test_a_policy_that_is_not_ready_as_it_stands_is_waited_for(state: dict[str, Any]) -> None:
    with pytest.raises(PolicyNotReadyError, match="got 'Provisioned: all there'"):
        admit(replay(), ctx(policies=[policy(**state)]))


def test_a_connection_without_a_replay_role_is_refused() -> None:
    with pytest.raises(ReplayIdentityMissingError, match=r"give it spec\.replay"):
        admit(replay(), ctx(connections=[connection(replay=None)]))


def test_a_connection_with_certificate_authorities_of_its_own_needs_some_for_jobs() -> None:
    tls = {"caRef": {"kind": "ConfigMap", "name": "authorities", "key": "ca.crt"}}
    secured = connection(tls=tls, adminUrl="https://pulsar:8443")
    with pytest.raises(
        TrustNotSupportedError, match=r"shop/main .* name them in spec\.replay\.tls"
    ):
        admit(replay(), ctx(connections=[secured]))
    told = {**secured["spec"]["replay"], "tls": tls}
    admit(replay(), ctx(connections=[connection(**secured["spec"] | {"replay": told})]))
    assert TrustNotSupportedError.stalls
    assert TrustNotSupportedError.requeue is Requeue.ON_CHANGE
    trusting = connection(adminUrl="https://pulsar:8443")
    assert admit(replay(), ctx(connections=[trusting])).job.admin_url == "https://pulsar:8443"


def test_a_connection_that_is_gone_or_closed_to_the_namespace_is_refused() -> None:
    with pytest.raises(ConnectionNotFoundError):
        admit(replay(), ctx(connections=[]))
    other = [{"namespaces": {"names": ["other"]}, "topics": ["persistent://shop/*/*"]}]
    with pytest.raises(NamespaceNotAllowedError):
        admit(replay(), ctx(connections=[connection(allow=other)]))


def test_the_older_replay_of_a_policy_goes_first() -> None:
    older, younger = replay("older", age=1), replay("younger", age=2)
    both = ctx(replays=[younger, older])
    assert admit(older, both).job.name == "older"
    with pytest.raises(ReplayInProgressError, match="got 'shop/older'"):
        admit(younger, both)


def test_a_replay_that_runs_already_goes_before_an_older_one() -> None:
    older, younger = replay("older", age=1), replay("younger", age=2)
    running = named("SparkApplication", launch.name_of(younger), {})
    with pytest.raises(ReplayInProgressError, match="got 'shop/younger'"):
        admit(older, ctx(replays=[younger, older], applications=[running]))
    younger["status"] = {"sparkApplication": launch.name_of(younger)}
    with pytest.raises(ReplayInProgressError, match="got 'shop/younger'"):
        admit(older, ctx(replays=[younger, older]))


def test_of_two_replays_one_waits_for_the_other_also_when_an_application_is_gone() -> None:
    """The younger was launched while the older was suspended."""
    older, younger = replay("older", age=1), replay("younger", age=2)
    younger["status"] = {"sparkApplication": launch.name_of(younger)}
    both = ctx(replays=[younger, older])
    assert admit(younger, both).job.name == "younger"
    with pytest.raises(ReplayInProgressError):
        admit(older, both)


def test_a_replay_that_stalls_before_its_launch_is_in_no_ones_way() -> None:
    stalls = {"type": "Stalled", "status": "True", "reason": "ReplayNotSafe", "message": "no"}
    older = replay("older", age=1, status={"conditions": [stalls]})
    assert admit(replay(age=2), ctx(replays=[older])).job.name == "now"
    older["status"]["sparkApplication"] = launch.name_of(older)
    with pytest.raises(ReplayInProgressError):
        admit(replay(age=2), ctx(replays=[older]))


def test_defaults_with_which_the_policy_is_not_valid_are_waited_for() -> None:
    wrong = connection(policyDefaults={"delayLadder": {"ordered": "5s"}})
    with pytest.raises(PolicyNotReadyError, match="not valid"):
        admit(replay(), ctx(connections=[wrong]))


@pytest.mark.parametrize("phase", ["Completed", "Failed"])
def test_a_replay_that_has_ended_is_in_nobodys_way(phase: str) -> None:
    ended = replay("ended", age=1, status={"phase": phase, "sparkApplication": "it"})
    assert admit(replay(age=2), ctx(replays=[ended])).job.name == "now"


def test_replays_of_other_policies_are_in_nobodys_way() -> None:
    other = replay("other", age=1)
    other["spec"]["policyRef"]["name"] = "payments"
    assert admit(replay(age=2), ctx(replays=[other])).job.name == "now"


def test_a_dry_run_waits_for_no_replay_and_none_waits_for_it() -> None:
    dry, moving = replay("dry", spec={"dryRun": True}, age=1), replay("moving", age=2)
    both = ctx(
        replays=[dry, moving],
        applications=[
            named("SparkApplication", launch.name_of(each), {}) for each in (dry, moving)
        ],
    )
    assert admit(dry, both).job.dry_run
    assert not admit(moving, both).job.dry_run


def test_the_job_knows_whether_to_send_in_batches() -> None:
    assert not admit(replay(), ctx()).job.batch
    job = admit(replay(spec={"batch": True}), ctx()).job
    assert job.batch
    assert ReplayJob.decode(job.encode()) == job


@pytest.mark.parametrize("kind", ["Shared", "Key_Shared"])
@pytest.mark.parametrize(
    "target", [{"target": "Source"}, {"target": "Topic", "targetTopic": ORDERS}, {}]
)
def test_no_batch_comes_to_the_policys_own_subscription_by_key(
    kind: str, target: dict[str, str]
) -> None:
    context = ctx(policies=[policy(subscriptionType=kind)])
    asked = replay(spec={**target, "batch": True})
    if kind == "Key_Shared" and target:
        with pytest.raises(BatchMixesKeysError, match="without batch, or with target Retry"):
            admit(asked, context)
    else:
        assert admit(asked, context).job.batch


def test_messages_that_must_not_be_handled_again_can_only_be_looked_at() -> None:
    never = ctx(policies=[policy(replaySafety="Never")])
    with pytest.raises(ReplayNotSafeError, match="got 'replaySafety: Never'; look"):
        admit(replay(spec={"reconciled": True}), never)
    assert admit(replay(spec={"dryRun": True}), never).job.dry_run
    assert ReplayNotSafeError.stalls


def test_messages_that_need_to_be_reconciled_are_replayed_when_that_is_confirmed() -> None:
    first = ctx(policies=[policy(replaySafety="ReconcileFirst")])
    with pytest.raises(ReplayNotSafeError, match="make another Replay with reconciled: true"):
        admit(replay(), first)
    admit(replay(spec={"reconciled": True}), first)
    admit(replay(spec={"dryRun": True}), first)
    admit(replay(), ctx(policies=[policy(replaySafety="Idempotent")]))


def test_the_job_knows_why_and_where_that_was_decided() -> None:
    job = admit(replay(spec={"reason": "up again", "ticket": "OPS-1"}), ctx()).job
    assert (job.reason, job.ticket) == ("up again", "OPS-1")
    assert ReplayJob.decode(job.encode()) == job


def test_a_suspended_replay_is_not_launched_and_in_no_ones_way_before() -> None:
    resting, next_one = replay("resting", spec={"suspend": True}, age=1), replay("next", age=2)
    both = ctx(replays=[resting, next_one])
    with pytest.raises(SuspendedError, match=r"set spec\.suspend to false"):
        admit(resting, both)
    assert admit(next_one, both).job.name == "next"
    resting["status"] = {"sparkApplication": launch.name_of(resting)}
    with pytest.raises(ReplayInProgressError, match="got 'shop/resting'"):
        admit(next_one, ctx(replays=[resting, next_one]))


@pytest.mark.parametrize(
    ("of_policy", "of_connection", "bound"),
    [(None, None, None), (100, None, 100), (None, 0, 0), (100, 50, 50), (50, 100, 50)],
)
def test_the_lower_bound_of_policy_and_connection_asks_for_approval(
    of_policy: int | None, of_connection: int | None, bound: int | None
) -> None:
    token = {"token": {"secretRef": {"name": "pulsar-replayer", "key": "token"}}}
    identity = {"role": "replayer", "authentication": token, "approvalAbove": of_connection}
    asking: dict[str, Any] = {} if of_policy is None else {"replayApprovalAbove": of_policy}
    context = ctx(policies=[policy(**asking)], connections=[connection(replay=identity)])
    job = admit(replay(), context).job
    assert job.approval_above == bound
    assert ReplayJob.decode(job.encode()) == job


def test_the_job_knows_its_rate() -> None:
    job = admit(replay(spec={"rateLimit": {"messagesPerSecond": 2.5}}), ctx()).job
    assert job.rate_limit == 2.5
    assert ReplayJob.decode(job.encode()) == job
