"""Admission of Replays of a RocketMQRetryPolicy: access, target, and fields that it supports."""

from __future__ import annotations

from redrive.api import Body
from redrive.api.model import parse_spec
from redrive.api.permissions import NamespaceLimits
from redrive.api.replay import Mode, ReplayEngine, ReplaySpec, Selection, Target
from redrive.api.rocketmq import RocketMQReplays, RocketMQRetryPolicySpec
from redrive.kube.connections import connection_of, rocketmq_at
from redrive.kube.context import Context
from redrive.kube.resources import Key
from redrive.replay.controller.checks import BrokerRun, queue_run_violations, rocketmq_access
from redrive.replay.spec import Choice, QueueReplayJob


class RocketMQReplayBroker:
    """RocketMQ, see `ReplayBroker`."""

    def identity(self, through: Key, namespace: str, ctx: Context) -> RocketMQReplays:
        """Return the access of jobs of *namespace*."""
        cluster, _ = rocketmq_at(through, namespace, ctx.connections, ctx.namespaces)
        return rocketmq_access(cluster, through)

    def run(self, spec: ReplaySpec, replay: Body, policy: Body, ctx: Context) -> BrokerRun:
        """Check a Replay against its policy and connection."""
        key, through = Key.of(replay), connection_of(policy)
        cluster, rules = rocketmq_at(through, key.namespace, ctx.connections, ctx.namespaces)
        identity = rocketmq_access(cluster, through)
        of_policy = parse_spec(RocketMQRetryPolicySpec, policy)
        for error in queue_run_violations(spec, of_policy, key.namespace, rules):
            raise error
        targets = {Target.RETRY: of_policy.retry_topic, Target.SOURCE: of_policy.topic}
        is_retry, select = spec.target.type is Target.RETRY, spec.select or Selection()
        job = QueueReplayJob(
            namespace=key.namespace,
            name=key.name,
            uid=replay["metadata"]["uid"],
            source=cluster.messages(of_policy.dead_letter_topic, of_policy.group),
            ledger=of_policy.ledger_topic,
            target=targets.get(spec.target.type, str(spec.target.topic)),
            retry_of=of_policy.topic if is_retry else "",
            where=select.where,
            dry_run=spec.is_plan,
            review=spec.mode is Mode.REVIEW,
            rate_limit=None if spec.rate_limit is None else spec.rate_limit.per_second,
            choice=Choice.of(select, limit=select.limit, max_replays=spec.max_replays),
            approval_above=identity.approval_above,
        )
        is_spark = spec.engine is ReplayEngine.SPARK
        engine = ReplayEngine.SPARK if is_spark else ReplayEngine.JOB
        return BrokerRun(job, identity, through, None, engine, NamespaceLimits().runs)
