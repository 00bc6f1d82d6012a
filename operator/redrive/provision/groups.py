"""A consumer group of RocketMQ and its topics: desired and observed state, actions, and claims.

A broker of RocketMQ stores no owner of a group, because it refuses unknown attributes. So the
policy with the oldest claim owns a group, and the status of the policy records the objects that
redrive created. Only these are deleted with it.

Retry delays of gRPC clients are those of the policy, which the group has as a setting. Remoting
clients have the delay levels of their broker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from redrive.admin.rocketmq import Master, QueueCounts, RocketMQSession
from redrive.api import Body
from redrive.api.conditions import StatusWarning
from redrive.api.retrypolicy import Ordering
from redrive.api.rocketmq import ClientKind, RocketMQCluster, RocketMQRetryPolicySpec
from redrive.errors import RedriveError
from redrive.kube.cache import Turn
from redrive.kube.connections import connection_of, spec_at
from redrive.kube.context import Context
from redrive.kube.resources import Key
from redrive.policy.values import format_duration
from redrive.provision.checks import contested_group
from redrive.provision.request import Priority, is_proven
from redrive.reasons import Reason

_CUSTOMIZED = "CUSTOMIZED"
_READ_WRITE = 6


@dataclass(frozen=True)
class DesiredGroup:
    """State that a policy requires at each master.

    Attributes:
        settings: required settings of the group, as the broker writes them.
        topics: topic → minimum number of queues.
    """

    name: str
    settings: Mapping[str, Any]
    topics: Mapping[str, int]


@dataclass(frozen=True)
class MasterState:
    """Observed state of one master; None stands for a missing object."""

    master: Master
    group: Mapping[str, Any] | None
    topics: Mapping[str, QueueCounts | None]

    def has(self, name: str) -> bool:
        """Return True if the group or topic exists."""
        return self.topics.get(name, self.group) is not None


@dataclass(frozen=True)
class PutGroup:
    """Create a group, or change settings of it."""

    master: Master
    settings: Mapping[str, Any]
    changed: tuple[str, ...]

    def __str__(self) -> str:
        done = f"set {', '.join(self.changed)} of" if self.changed else "created"
        return f"{done} group {self.settings['groupName']} at {self.master.name}"

    async def perform(self, on: RocketMQSession) -> None:
        """Write all settings of the group."""
        await on.put_group(self.master, self.settings)


@dataclass(frozen=True)
class PutQueues:
    """Create a topic, or give it more queues or permissions."""

    master: Master
    topic: str
    queues: int
    creates: bool

    def __str__(self) -> str:
        done = "created" if self.creates else "repaired"
        return f"{done} topic {self.topic} with {self.queues} queues at {self.master.name}"

    async def perform(self, on: RocketMQSession) -> None:
        """Write the topic."""
        await on.put_topic(self.master, self.topic, self.queues)


@dataclass(frozen=True)
class DeleteName:
    """Delete a group, or a topic."""

    master: Master
    name: str
    is_group: bool

    def __str__(self) -> str:
        return f"deleted {'group' if self.is_group else 'topic'} {self.name} at {self.master.name}"

    async def perform(self, on: RocketMQSession) -> None:
        """Delete it."""
        delete = on.delete_group if self.is_group else on.delete_topic
        await delete(self.master, self.name)


GroupAction = PutGroup | PutQueues | DeleteName


def desired_group(spec: RocketMQRetryPolicySpec, *, replays: bool) -> DesiredGroup:
    """Return the state that a policy requires at each master.

    Remoting clients ignore retries and delays of the group, so these are not set for them. The
    ledger is for policies with *replays*.
    """
    settings: dict[str, Any] = {
        "groupName": spec.group,
        "consumeMessageOrderly": spec.ordering is Ordering.PER_KEY,
        "retryQueueNums": spec.retry_queues,
    }
    if spec.clients is ClientKind.GRPC:
        delays = [delay // timedelta(milliseconds=1) for delay in spec.delays]
        policy = {"type": _CUSTOMIZED, "customizedRetryPolicy": {"next": delays}}
        settings |= {"retryMaxTimes": spec.retries, "groupRetryPolicy": policy}
    topics = {spec.retry_topic: spec.retry_queues, spec.dead_letter_topic: 1}
    topics |= {spec.ledger_topic: 1} if replays else {}
    return DesiredGroup(spec.group, settings, topics)


async def observe_group(
    want: DesiredGroup, master: Master, session: RocketMQSession
) -> MasterState:
    """Read the state of a master.

    Raises:
        AdminError: a call failed.
    """
    topics = {name: await session.topic(master, name) for name in want.topics}
    return MasterState(master, await session.group(master, want.name), topics)


def diff_group(want: DesiredGroup, have: MasterState) -> Iterator[GroupAction]:
    """Yield the missing actions at a master; topics come first, as consumers need them at once."""
    for name, queues in want.topics.items():
        topic = have.topics[name]
        if topic is None:
            yield PutQueues(have.master, name, queues, creates=True)
        elif min(topic.read, topic.write) < queues or ~topic.permissions & _READ_WRITE:
            most = max(topic.read, topic.write, queues)
            yield PutQueues(have.master, name, most, creates=False)
    if have.group is None:
        yield PutGroup(have.master, want.settings, ())
        return
    changed = [n for n, value in want.settings.items() if not _holds(have.group.get(n), value)]
    if changed:
        yield PutGroup(have.master, {**have.group, **want.settings}, tuple(changed))


def _holds(have: object, want: object) -> bool:
    """Return True if *have* has each value of *want*; brokers write more fields than they need."""
    if isinstance(want, Mapping):
        return isinstance(have, Mapping) and all(_holds(have.get(n), v) for n, v in want.items())
    return have == want


def group_warnings(
    spec: RocketMQRetryPolicySpec, retention: timedelta | None
) -> Iterator[StatusWarning]:
    """Yield the warnings about a policy that is ready.

    Args:
        spec: its spec.
        retention: shortest time for which a master keeps messages; None if it is not shown.
    """
    fields = {"maxRetries": spec.max_retries, "ladder": spec.ladder}
    ignored = [name for name, value in fields.items() if value is not None]
    if spec.clients is ClientKind.REMOTING and ignored:
        yield StatusWarning(
            Reason.NOT_ENFORCED,
            f"remoting clients ignore {' and '.join(ignored)} of the policy; remove them and set "
            "maxReconsumeTimes in the clients, or use gRPC clients and `clients: GRPC`",
        )
    after = "an unknown time" if retention is None else format_duration(retention)
    yield StatusWarning(
        Reason.DEAD_LETTERS_EXPIRE,
        f"brokers delete dead letters like all messages, after {after} (fileReservedTime); process "
        "them in time, or raise it",
    )
    yield StatusWarning(
        Reason.NO_OWNERSHIP_MARK,
        "RocketMQ stores no owner of a group, so operators of other Kubernetes clusters can't see "
        "this policy; let one Kubernetes cluster manage the group",
    )


class GroupClaims:
    """Priority of policies that claim one group of a cluster.

    Args:
        ctx: caches of the operator.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        policies = ctx.rocketmq_policies
        self._blocked = policies.index(_blocked_group)
        self._held = policies.index(_held_group)
        self._open = policies.turns(_open_turn)

    def admit(self, body: Body) -> None:
        """Check that no other policy has priority.

        A provisioned policy precedes others; then age decides. A claim of another namespace counts
        if it was provisioned at this cluster: each author can write one.

        Raises:
            ContestedError: a policy with priority claims the group.
        """
        own, rank = Key.of(body), _rank(body)
        rivals = [Key.of(other) for other in self.holders(body)]
        # New ones of other connections count once they are provisioned.
        rivals += [key for _, key in self._open.first(_queue_of(body), 1)]
        for key in rivals:
            other = self._ctx.rocketmq_policies.get(key)
            if key != own and other is not None and _rank(other) < rank:
                raise contested_group(_group_of(body), key, own.namespace)

    def holders(self, body: Body) -> tuple[Body, ...]:
        """Return the other policies that hold the group of *body* at its cluster."""
        others = (o for o in self._held.get(_group_of(body)) if Key.of(o) != Key.of(body))
        return tuple(other for other in others if self._meets(body, other))

    def affected(self, before: Body | None, after: Body | None) -> tuple[Body, ...]:
        """Return the other policies whose priority may change with that of a policy."""
        body = after or before or {}
        was, now = _priority_of(before), _priority_of(after)
        if (was in _HELD) is not (now in _HELD):
            return self.holders(body) if now in _HELD else self._blocked.get(_group_of(body))
        was_first = was is Priority.OPEN and _blocked_group(before or {}) is None
        is_withdrawn = was_first and now is Priority.INACTIVE
        return self._blocked.get(_group_of(body)) if is_withdrawn else ()

    def broker_of(self, body: Body) -> str:
        """Return the text that identifies the cluster of a policy; empty if it is unknown."""
        cluster = self._cluster(body)
        if cluster is None:
            return ""
        return f"{','.join(sorted(_servers(cluster)))}/{cluster.cluster or ''}"

    def _meets(self, body: Body, other: Body) -> bool:
        """Return True if *other* counts at the cluster of *body*.

        The owner of two connections can name one cluster differently. Others can name any server.
        """
        one, two = self._cluster(body), self._cluster(other)
        if one is None or two is None:
            return False
        names = {one.cluster, two.cluster}  # None stands for the only cluster
        if None not in names and len(names) > 1:
            return False
        servers, others = _servers(one), _servers(two)
        owner, other_owner = connection_of(body).namespace, connection_of(other).namespace
        if servers != others and not (owner == other_owner and servers & others):
            return False
        is_own = Key.of(body).namespace == Key.of(other).namespace
        return is_own or is_proven(other, connection_of(other), self.broker_of(other))

    def _cluster(self, body: Body) -> RocketMQCluster | None:
        try:
            return spec_at(connection_of(body), self._ctx.connections).rocketmq
        except RedriveError:
            return None


def _servers(cluster: RocketMQCluster) -> frozenset[str]:
    return frozenset(server.lower() for server in cluster.name_servers)


def _group_of(body: Body) -> str:
    return str((body.get("spec") or {}).get("group", ""))


_HELD = Priority.HELD, Priority.STALLED


def _priority_of(body: Body | None) -> Priority:
    return Priority.INACTIVE if body is None else Priority.of(body)


def _held_group(body: Body) -> str | None:
    return _group_of(body) if _priority_of(body) in _HELD else None


def _blocked_group(body: Body) -> str | None:
    return _group_of(body) if "blockedBy" in (body.get("status") or {}) else None


def _queue_of(body: Body) -> tuple[str, str, Key]:
    return _group_of(body), Key.of(body).namespace, connection_of(body)


def _open_turn(body: Body) -> Turn | None:
    is_open = _priority_of(body) is Priority.OPEN
    return Turn(_queue_of(body), _rank(body)) if is_open else None


def _rank(body: Body) -> tuple[bool, str, str]:
    metadata = body["metadata"]
    return _priority_of(body) not in _HELD, metadata["creationTimestamp"], metadata["uid"]
