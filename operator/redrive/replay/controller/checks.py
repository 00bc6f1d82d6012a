"""Checks of a Replay against its policy and its connection; pure.

Called by `admission` before a launch, and by `redrive lint` for manifests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from redrive.api.connection import BrokerConnectionSpec, ReplayIdentity, Requirement
from redrive.api.job import ConnectionJobs, ReplayJobTemplate
from redrive.api.permissions import Permissions
from redrive.api.replay import (
    Confirmation,
    Guarantee,
    ReplayEngine,
    ReplaySpec,
    Selection,
    Sending,
    Target,
)
from redrive.api.retrypolicy import ReplaySafety, RetryPolicySpec
from redrive.api.rocketmq import (
    ClientKind,
    RocketMQCluster,
    RocketMQReplays,
    RocketMQRetryPolicySpec,
    RocketMQRule,
)
from redrive.errors import RedriveError
from redrive.kube.resources import Key
from redrive.policy.model import Policy, SubscriptionType
from redrive.policy.naming import TopicName
from redrive.reasons import Reason
from redrive.replay.spec import RunJob


@dataclass(frozen=True)
class BrokerRun:
    """A Replay that its connection and its policy permit.

    Attributes:
        job: the run.
        identity: access of the job, with references to its credentials in the Replay's namespace.
        through: connection of the policy.
        jobs: limits of the job templates.
        engine: engine of the run.
        runs: maximum number of concurrent Replays of the namespace.
        redirect_hosts: hosts that its requests may be redirected to, see `Access.hosts`.
        role: Pulsar role of the job; empty for other brokers.
        grants: topics on which the role gets rights: the target, and the targets of earlier
            Replays of the policy, which the run may have to search.
    """

    job: RunJob
    identity: ReplayIdentity | RocketMQReplays
    through: Key
    jobs: ConnectionJobs | None
    engine: ReplayEngine
    runs: int
    redirect_hosts: tuple[str, ...] = ()
    role: str = ""
    grants: tuple[TopicName, ...] = ()


@dataclass(frozen=True)
class RunRequest:
    """A Replay with the policy and the connection that it is for.

    Attributes:
        policy_spec: with the defaults of the connection.
        through: the connection.
        permissions: of the namespace of the Replay.
    """

    spec: ReplaySpec
    policy_key: Key
    policy_spec: RetryPolicySpec
    policy: Policy
    through: Key
    connection: BrokerConnectionSpec
    permissions: Permissions

    @property
    def target(self) -> TopicName | None:
        """Return the topic that messages are moved to; None for the policy's retry topic."""
        topic = self.spec.target_topic(self.policy.topic)
        return None if topic == self.policy.retry_topic else topic


def check_run(request: RunRequest) -> ReplayIdentity:
    """Return the identity of the job.

    Raises:
        RedriveError: the Replay may not run as it is; the first of `run_violations`.
    """
    for error in run_violations(request):
        raise error
    if request.connection.replay is None:
        raise no_identity(request.through)
    return request.connection.replay


def run_violations(request: RunRequest) -> Iterator[RedriveError]:
    """Yield the error of each check that fails."""
    return (error for check in _CHECKS if (error := check(request)) is not None)


def rocketmq_access(cluster: RocketMQCluster, through: Key) -> RocketMQReplays:
    """Return the access to a cluster that the connection *through* gives to jobs.

    Raises:
        RedriveError: it gives none.
    """
    if cluster.replay is None:
        raise no_identity(through, "spec.rocketmq.replay, with an access key for jobs")
    if cluster.tls is not None and cluster.replay.tls is None:
        raise no_trust(through, "spec.rocketmq.tls", "spec.rocketmq.replay.tls")
    return cluster.replay


def queue_run_violations(
    spec: ReplaySpec,
    policy: RocketMQRetryPolicySpec,
    namespace: str,
    rules: Sequence[RocketMQRule],
) -> Iterator[RedriveError]:
    """Yield the error of each check that a Replay of a RocketMQRetryPolicy fails."""
    checks = (
        _fields_are_not_supported(spec, policy),
        _queue_is_not_allowed(spec, policy, namespace, rules),
    )
    return filter(None, checks)


def _queue_is_not_allowed(
    spec: ReplaySpec,
    policy: RocketMQRetryPolicySpec,
    namespace: str,
    rules: Sequence[RocketMQRule],
) -> RedriveError | None:
    """Find a target that no rule of the connection allows for the group of the policy.

    The rules decide, not the broker: the user of Replays is shared by namespaces.
    """
    topic = spec.target.topic
    if topic is None or any(rule.covers(namespace, str(topic), policy.group) for rule in rules):
        return None
    return Reason.TARGET_NOT_ALLOWED.error(
        "no rule of the connection for this namespace allows the topic that this Replay is to move "
        f"messages to together with the group {policy.group}",
        got=str(topic),
        remedy="delete this Replay and create another one with a target among its topics, or add "
        "the topic to a rule of spec.rocketmq.allow of the BrokerConnection that has the group; "
        "the Replay starts automatically then",
    )


def _fields_are_not_supported(
    spec: ReplaySpec, policy: RocketMQRetryPolicySpec
) -> RedriveError | None:
    """Find fields of a Replay that RocketMQ ignores."""
    select = spec.select or Selection()
    is_grpc = policy.clients is ClientKind.GRPC
    refused = {
        "guarantee: ExactlyOnce": spec.guarantee is Guarantee.EXACTLY_ONCE,
        "sending: Batched": spec.sending is Sending.BATCHED,
        "confirmations": bool(spec.confirmations),
        "followFor": spec.follow_for is not None,
        "target: Retry": spec.target.type is Target.RETRY and is_grpc,
        "jobTemplate.executors": spec.engine is not ReplayEngine.SPARK
        and spec.job_template is not None
        and spec.job_template.executors is not None,
        "select.causes": select.causes is not None,
        "select.fingerprints": select.fingerprints is not None,
    }
    fields = [name for name, is_set in refused.items() if is_set]
    if not fields:
        return None
    is_retry = "target: Retry" in fields  # a broker accepts no messages for these topics
    return Reason.OTHER_BROKER.error(
        "fields of this Replay are not for the broker or the clients of its policy",
        got=", ".join(fields),
        remedy=f"create another Replay {'with target Source' if is_retry else 'without them'}",
    )


def start_is_too_late(latest: str | None, now: datetime) -> RedriveError | None:
    """Find a Replay that was not launched before its `startBefore`."""
    if latest is None or now < datetime.fromisoformat(latest):
        return None
    return Reason.STARTED_TOO_LATE.error(
        "the Replay was not launched before its startBefore",
        got=latest,
        remedy="create another Replay with a later startBefore to move its messages",
    )


def dead_letters_are_discarded(request: RunRequest) -> RedriveError | None:
    """Find a policy without a dead-letter topic."""
    if request.policy.dead_letters:
        return None
    return Reason.DEAD_LETTERS_DISCARDED.error(
        f"the RetryPolicy {request.policy_key} discards its dead letters, so none can be replayed",
        remedy="set its deadLetter.mode to Keep; discarded messages are lost",
    )


def identity_is_missing(request: RunRequest) -> RedriveError | None:
    """Find a connection without a role for Replays."""
    return no_identity(request.through) if request.connection.replay is None else None


def no_identity(
    connection: Key, field: str = "spec.replay, with a role and its credentials"
) -> RedriveError:
    """Return the error of a connection without credentials for Replays, which need *field*."""
    return Reason.REPLAY_IDENTITY_MISSING.error(
        f"the BrokerConnection {connection} has no credentials for Replays",
        remedy=f"give it {field}",
    )


def trust_is_not_supported(request: RunRequest) -> RedriveError | None:
    """Find certificate authorities that jobs don't have."""
    connection = request.connection
    if connection.pulsar.tls is None or connection.replay is None or connection.replay.tls:
        return None
    return no_trust(request.through, "spec.pulsar.tls", "spec.replay.tls")


def no_trust(connection: Key, field: str, missing: str, runs: str = "Replays") -> RedriveError:
    """Return the error of certificate authorities in *field* that jobs don't have."""
    return Reason.TRUST_NOT_SUPPORTED.error(
        f"the BrokerConnection {connection} has certificate authorities of its own, and names "
        f"none for jobs of {runs}",
        got=f"{field} without {missing}",
        remedy=f"store them in the namespaces of {runs}, and name them in {missing}",
    )


def target_is_not_allowed(request: RunRequest) -> RedriveError | None:
    """Find a target that the rules of the connection do not cover together with the replay role.

    The rules decide, not the broker: the replay role is shared, and may have a right there by a
    rule of another namespace.
    """
    topic, identity = request.target, request.connection.replay
    if topic is None or identity is None:
        return None
    if not request.permissions.allows_topic(topic):
        return Reason.TARGET_NOT_ALLOWED.error(
            "the topic that this Replay is to move messages to is not among those that the "
            "connection allows to its namespace",
            got=str(topic),
            remedy="delete this Replay and create another one with a target among them, or add the "
            "topic to a rule of spec.allow of the BrokerConnection; the Replay starts "
            "automatically then",
        )
    if not request.permissions.allows_role(identity.role, topic):
        return Reason.TARGET_NOT_ALLOWED.error(
            "no rule of the connection for this namespace and the topic that this Replay is to "
            f"move messages to allows the replay role {identity.role} there",
            got=str(topic),
            remedy="add the role to `roles` of a rule for that topic in spec.allow of the "
            "BrokerConnection; the Replay starts automatically then",
        )
    return None


def batch_mixes_keys(request: RunRequest) -> RedriveError | None:
    """Find batches for a source topic that is read by key."""
    kind = request.policy.subscription_type
    is_to_source = request.target == request.policy.topic
    if request.spec.sending is not Sending.BATCHED or not is_to_source:
        return None
    if kind is not SubscriptionType.KEY_SHARED:
        return None
    return Reason.BATCH_MIXES_KEYS.error(
        "a batch is delivered to one consumer, also if its messages have several keys: with a "
        f"subscription of type {kind.value}, several consumers would receive messages of one key",
        got=f"sending: Batched, and {request.policy.topic} as the target",
        remedy="create another Replay with sending Individual, or with target Retry",
    )


def template_is_not_permitted(request: RunRequest) -> RedriveError | None:
    """Find a job template that the connection excludes."""
    jobs = request.connection.jobs or ConnectionJobs()
    name = (request.spec.job_template or ReplayJobTemplate()).name or jobs.default
    if jobs.permits(name):
        return None
    return Reason.JOB_NOT_PERMITTED.error(
        "the BrokerConnection does not permit this job template",
        got=name,
        remedy="create another Replay with one of its status.jobTemplates, or add it to "
        "jobs.templates of the BrokerConnection; this Replay starts automatically then",
    )


def executors_exceed_connection(request: RunRequest) -> RedriveError | None:
    """Find more executors than the connection permits."""
    most = (request.connection.jobs or ConnectionJobs()).max_executors
    executors = (request.spec.job_template or ReplayJobTemplate()).executors
    if most is None or executors is None or executors <= most:
        return None
    return Reason.JOB_NOT_PERMITTED.error(
        f"`jobTemplate.executors` must be at most {most}, the bound of the BrokerConnection "
        f"{request.through}",
        got=executors,
        remedy="create another Replay with fewer, or raise jobs.maxExecutors; this Replay starts "
        "automatically then",
    )


def replay_is_not_safe(request: RunRequest) -> RedriveError | None:
    """Find messages that must not be handled again, or not without a confirmation."""
    spec, safety = request.spec, request.policy_spec.replay.safety
    if spec.is_plan:
        return None
    if safety is ReplaySafety.NEVER:
        return Reason.REPLAY_NOT_SAFE.error(
            f"the RetryPolicy {request.policy_key} excludes that its messages are handled again",
            got=f"replay.safety: {safety}",
            remedy="count them by a plan; change the policy if its handlers have changed",
        )
    if safety is ReplaySafety.RECONCILE_FIRST and not spec.confirms(Confirmation.RECONCILED):
        return Reason.REPLAY_NOT_SAFE.error(
            f"messages of the RetryPolicy {request.policy_key} are handled again only once the "
            "effects of their first handling were reconciled",
            got=list(spec.confirmations or ()),
            remedy="reconcile them, and create another Replay with confirmations: [Reconciled]",
        )
    return None


def field_is_required(request: RunRequest) -> RedriveError | None:
    """Find a Replay without a reason or ticket that the connection requires."""
    identity, spec = request.connection.replay, request.spec
    if identity is None or spec.is_plan:
        return None
    fields = {Requirement.REASON: spec.reason, Requirement.TICKET: spec.ticket}
    missing = [name.lower() for name in identity.require or () if not fields[name]]
    if not missing:
        return None
    return Reason.AUTHOR_FIELD_MISSING.error(
        f"the BrokerConnection {request.through} requires fields of Replays that are missing",
        got=", ".join(missing),
        remedy=f"create another Replay with {' and '.join(missing)}",
    )


_CHECKS: tuple[Callable[[RunRequest], RedriveError | None], ...] = (
    dead_letters_are_discarded,
    identity_is_missing,
    trust_is_not_supported,
    target_is_not_allowed,
    batch_mixes_keys,
    template_is_not_permitted,
    executors_exceed_connection,
    replay_is_not_safe,
    field_is_required,
)
