"""Admission of Replays of a RocketMQRetryPolicy: access, target, and fields that it supports."""

from __future__ import annotations

from redrive.api import Body
from redrive.api.model import parse_spec
from redrive.api.permissions import NamespaceLimits
from redrive.api.replay import Guarantee, Mode, ReplayEngine, ReplaySpec, Selection, Sending, Target
from redrive.api.rocketmq import (
    ClientKind,
    RocketMQCluster,
    RocketMQReplays,
    RocketMQRetryPolicySpec,
    RocketMQRule,
)
from redrive.kube.connections import connection_of, spec_at
from redrive.kube.context import Context
from redrive.kube.resources import Key
from redrive.kube.rocketmq import cluster_of, rules_at
from redrive.reasons import Reason
from redrive.replay.controller.checks import BrokerRun, no_identity, no_trust
from redrive.replay.spec import Choice, QueueReplayJob


class RocketMQReplayBroker:
    """RocketMQ, see `ReplayBroker`."""

    def identity(self, through: Key, namespace: str, ctx: Context) -> RocketMQReplays:
        """Return the access of jobs of *namespace*."""
        return self._access(through, namespace, ctx)[1]

    def _access(
        self, through: Key, namespace: str, ctx: Context
    ) -> tuple[RocketMQCluster, RocketMQReplays, tuple[RocketMQRule, ...]]:
        spec = spec_at(through, ctx.connections)
        cluster = cluster_of(spec, through)
        labels = ctx.namespaces.of(namespace) if spec.selects_namespaces else {}
        rules = rules_at(spec, through, namespace, labels)
        if cluster.replay is None:
            raise no_identity(through, "spec.rocketmq.replay, with an access key for jobs")
        if cluster.tls is not None and cluster.replay.tls is None:
            raise no_trust(through, "spec.rocketmq.tls", "spec.rocketmq.replay.tls")
        return cluster, cluster.replay, rules

    def run(self, spec: ReplaySpec, replay: Body, policy: Body, ctx: Context) -> BrokerRun:
        """Check a Replay against its policy and connection."""
        key, through = Key.of(replay), connection_of(policy)
        cluster, identity, _ = self._access(through, key.namespace, ctx)
        of_policy = parse_spec(RocketMQRetryPolicySpec, policy)
        _check_supported(spec, of_policy)
        is_retry = spec.target.type is Target.RETRY
        select = spec.select or Selection()
        job = QueueReplayJob(
            namespace=key.namespace,
            name=key.name,
            uid=replay["metadata"]["uid"],
            source=cluster.messages(of_policy.dead_letter_topic, of_policy.group),
            ledger=of_policy.ledger_topic,
            target=of_policy.retry_topic if is_retry else of_policy.topic,
            retry_of=of_policy.topic if is_retry else "",
            dry_run=spec.is_plan,
            rate_limit=None if spec.rate_limit is None else spec.rate_limit.per_second,
            choice=Choice.of(select, limit=select.limit, max_replays=spec.max_replays),
            approval_above=identity.approval_above,
        )
        runs = NamespaceLimits().runs
        return BrokerRun(job, identity, through, None, ReplayEngine.JOB, runs)


def _check_supported(spec: ReplaySpec, policy: RocketMQRetryPolicySpec) -> None:
    """Check that RocketMQ obeys each field of a Replay.

    Raises:
        OtherBroker: it ignores one.
    """
    select = spec.select or Selection()
    is_grpc = policy.clients is ClientKind.GRPC
    refused = {
        "guarantee: ExactlyOnce": spec.guarantee is Guarantee.EXACTLY_ONCE,
        "engine: Spark": spec.engine is ReplayEngine.SPARK,
        "mode: Review": spec.mode is Mode.REVIEW,
        "sending: Batched": spec.sending is Sending.BATCHED,
        "confirmations": bool(spec.confirmations),
        "followFor": spec.follow_for is not None,
        "target: Topic": spec.target.type is Target.TOPIC,
        "target: Retry": spec.target.type is Target.RETRY and is_grpc,
        "jobTemplate.executors": spec.job_template is not None
        and spec.job_template.executors is not None,
        **{
            f"select.{name}": getattr(select, name) is not None
            for name in ("ids", "where", "causes", "fingerprints")
        },
    }
    if fields := [name for name, is_set in refused.items() if is_set]:
        is_retry = "target: Retry" in fields  # a broker accepts no messages for these topics
        raise Reason.OTHER_BROKER.error(
            "fields of this Replay are not for the broker or the clients of its policy",
            got=", ".join(fields),
            remedy=f"make another Replay {'with target Source' if is_retry else 'without them'}",
        )
