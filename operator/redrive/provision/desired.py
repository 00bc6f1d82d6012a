"""A policy → all that has to exist for it, at the broker and beside it; pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from redrive.admin.model import Grant
from redrive.admin.policies import DelaysWithin, TopicPolicy
from redrive.kube import resources
from redrive.kube.kept import CONFIG_MAP_KEY
from redrive.kube.resources import Body, Key
from redrive.policy import codec, naming
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.provision import topic_policies
from redrive.provision.facts import Observed, Request, TopicState
from redrive.provision.ownership import Owner, creating

CONFIG_MAP_SUFFIX = "-redrive"

_CONSUME: frozenset[str] = frozenset({"consume"})
_PRODUCE: frozenset[str] = frozenset({"produce"})


@dataclass(frozen=True)
class DesiredTopic:
    """A topic that has to exist.

    Attributes:
        subscription: which must be on it before the first message: a topic without one keeps
            nothing.
        policies: the topic policies it must have.
    """

    name: TopicName
    subscription: str
    policies: tuple[TopicPolicy, ...]


@dataclass(frozen=True)
class Desired:
    """All that a policy needs.

    Attributes:
        owner: who its topics have to be marked as kept by.
        retry_partitions: of the retry topic; None means as many as the source topic has.
        dead_letter: None where the policy discards.
        ledger: what replays have moved of it; None where no replay can run.
        dead_letter_partitions: of the dead-letter topic; 0 for one without partitions.
        grants: the rights that these roles need; others that they or others have are kept.
        unused: the dead-letter topic of a policy that discards, which may be there from before.
        tolerated: the rights on it that stay, if they are there.
        config_map: the ConfigMap for consumers.
        creating: topics that were about to be created before, and may be there without a mark.
        had_ledger: whether the ledger was found to be the policy's own before.
        sequences: which keys have dead letters; None where their sequence is not kept.
        had_sequences: whether that was found to be the policy's own before.
    """

    policy: Policy
    owner: Owner
    retry: DesiredTopic
    retry_partitions: int | None
    dead_letter: DesiredTopic | None
    grants: tuple[Grant, ...]
    config_map: Body
    creating: frozenset[str] = frozenset()
    dead_letter_partitions: int = 0
    unused: TopicName | None = None
    tolerated: tuple[Grant, ...] = ()
    ledger: DesiredTopic | None = None
    had_ledger: bool = False
    sequences: DesiredTopic | None = None
    had_sequences: bool = False

    @property
    def sets_tick(self) -> bool:
        """Whether the retry topic gets a tick of its own."""
        return any(isinstance(policy, DelaysWithin) for policy in self.retry.policies)

    @property
    def records(self) -> tuple[DesiredTopic, ...]:
        """Return the topics whose messages are records of redrive's own."""
        return tuple(filter(None, (self.ledger, self.sequences)))

    def pairs(self, have: Observed) -> Iterator[tuple[DesiredTopic, TopicState | None]]:
        """Yield each topic of the policy's own, as it should be and as it is."""
        yield self.retry, have.retry
        if self.dead_letter is not None:
            yield self.dead_letter, have.dead_letter
        if self.ledger is not None:
            yield self.ledger, have.ledger
        if self.sequences is not None:
            yield self.sequences, have.sequences


def partitions_of_retry(wanted: Desired, source: int) -> int:
    """Return how many partitions the retry topic should have beside a source topic with *source*.

    0 means that a topic is not partitioned.
    """
    return source if wanted.retry_partitions is None else wanted.retry_partitions


def desired(request: Request, body: Body, cluster: str, release: tuple[int, ...] = ()) -> Desired:
    """Return what has to exist for what *body*, a RetryPolicy, asks for.

    Args:
        request: what it asks for.
        body: the owner of its ConfigMap.
        cluster: the id of the Kubernetes cluster it is in.
        release: of the broker; empty where that is not known.
    """
    policy, keeps = request.policy, request.policy.dead_letters
    status = body.get("status") or {}
    on_dead_letter = _united(_dead_letter_grants(request))
    return Desired(
        policy=policy,
        owner=owner_of(request, cluster),
        retry=_retry(request, release),
        retry_partitions=request.spec.retry.partitions,
        dead_letter=_dead_letter(request),
        ledger=_ledger(request),
        had_ledger=status.get("ledgerTopic") == str(policy.ledger_topic),
        sequences=_sequences(policy),
        had_sequences=status.get("sequencesTopic") == str(policy.sequences_topic),
        grants=(
            *_united(_retry_grants(request)),
            *(on_dead_letter if keeps else ()),
            *_ledger_grants(request),
            *_sequences_grants(request),
        ),
        config_map=_config_map(policy, body),
        creating=creating(body),
        dead_letter_partitions=request.spec.dead_letter.partitions or 0,
        unused=None if keeps else request.spec.dead_letter_topic,
        tolerated=() if keeps else on_dead_letter,
    )


def owner_of(request: Request, cluster: str) -> Owner:
    """Return as what the topics of a policy are marked.

    Args:
        request: what the policy asks for.
        cluster: the id of the Kubernetes cluster it is in.
    """
    _, uid = request.age
    policy = request.policy
    return Owner(cluster, request.key, uid, f"{policy.topic}/{policy.subscription}")


def _retry(request: Request, release: tuple[int, ...]) -> DesiredTopic:
    policy, spec = request.policy, request.spec
    delays = topic_policies.delays(request.shortest_delay, release)
    policies = topic_policies.of_retry(spec.retry, delays)
    return DesiredTopic(policy.retry_topic, policy.subscription, policies)


def _dead_letter(request: Request) -> DesiredTopic | None:
    if not request.policy.dead_letters:
        return None
    policies = topic_policies.of_dead_letter(request.spec.dead_letter)
    policy = request.policy
    return DesiredTopic(policy.dead_letter_topic, policy.dead_letter_subscription, policies)


def _ledger(request: Request) -> DesiredTopic | None:
    if not request.policy.dead_letters or request.connection.replay is None:
        return None
    return _of_records(request.policy.ledger_topic)


def _sequences(policy: Policy) -> DesiredTopic | None:
    return _of_records(policy.sequences_topic) if policy.sequenced else None


def _of_records(name: TopicName) -> DesiredTopic:
    return DesiredTopic(name, naming.LEDGER_SUBSCRIPTION, topic_policies.of_records())


def config_map_name(policy_name: str) -> str:
    """Name the ConfigMap for the consumers of a RetryPolicy."""
    return f"{policy_name}{CONFIG_MAP_SUFFIX}"


def policy_of(config_map: Key) -> Key:
    """Return the RetryPolicy whose ConfigMap has, or would have, this name."""
    return Key(config_map.namespace, config_map.name.removesuffix(CONFIG_MAP_SUFFIX))


def _retry_grants(request: Request) -> Iterator[Grant]:
    topic, replay = request.policy.retry_topic, request.connection.replay
    for role in request.spec.consumer_roles:
        yield Grant(topic, role, _PRODUCE | _CONSUME)
    if request.policy.dead_letters and replay is not None:
        # What a replay has moved it looks for here, whatever became of it itself.
        yield Grant(topic, replay.role, _PRODUCE | _CONSUME)


def _dead_letter_grants(request: Request) -> Iterator[Grant]:
    """Yield what each role needs: consumers only write dead letters, readers and replays read."""
    topic, replay = request.spec.dead_letter_topic, request.connection.replay
    for role in request.spec.consumer_roles:
        yield Grant(topic, role, _PRODUCE)
    for role in request.spec.dead_letter.reader_roles:
        yield Grant(topic, role, _CONSUME)
    if replay is not None:
        yield Grant(topic, replay.role, _CONSUME)


def _ledger_grants(request: Request) -> Iterator[Grant]:
    if request.policy.dead_letters and request.connection.replay is not None:
        topic, role = request.policy.ledger_topic, request.connection.replay.role
        yield Grant(topic, role, _PRODUCE | _CONSUME)


def _sequences_grants(request: Request) -> Iterator[Grant]:
    if request.policy.sequenced:
        for role in request.spec.consumer_roles:
            yield Grant(request.policy.sequences_topic, role, _PRODUCE | _CONSUME)


def _united(grants: Iterator[Grant]) -> tuple[Grant, ...]:
    """Unite the grants of one role on one topic: of two, a broker would keep the later alone."""
    united: dict[tuple[TopicName, str], frozenset[str]] = {}
    for grant in grants:
        before = united.get((grant.topic, grant.role), frozenset())
        united[grant.topic, grant.role] = before | grant.actions
    return tuple(Grant(topic, role, actions) for (topic, role), actions in united.items())


def _config_map(policy: Policy, owner: Body) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": config_map_name(owner["metadata"]["name"]),
            "namespace": owner["metadata"]["namespace"],
            "labels": dict([resources.MANAGED]),
            "ownerReferences": [resources.owner_reference(resources.POLICIES, owner)],
        },
        "data": {CONFIG_MAP_KEY: codec.encode(policy)},
    }
