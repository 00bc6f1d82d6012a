"""Checks of objects together: connections, topics that two policies claim, Replays, Inspections.

The operator's own checks decide. An object that the manifests do not contain is unknown here, never
missing. Manifests without a namespace share one whose name is unknown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from itertools import chain, islice, takewhile
from typing import TypeVar

from redrive.api.connection import BrokerConnectionSpec
from redrive.api.inspection import InspectionSpec
from redrive.api.model import parse, parse_spec
from redrive.api.permissions import NAMESPACE, NamespaceRule, Permissions
from redrive.api.replay import PolicyKind, PolicyRef, ReplaySpec
from redrive.api.retrypolicy import Chaining, ConnectionRef, RetryPolicySpec
from redrive.api.rocketmq import RocketMQRetryPolicySpec, RocketMQRule
from redrive.errors import InvalidSpecError, RedriveError
from redrive.inspection import checks as inspections
from redrive.kube.resources import SECRETS, USABLE_BY, Key
from redrive.lint.manifests import FieldPath, Manifest
from redrive.lint.rules import Finding, LintRule, concerned, finding_at, nearest
from redrive.policy.naming import TopicName
from redrive.provision import checks
from redrive.provision.desired import config_map_of
from redrive.provision.ownership import shown_policy
from redrive.provision.request import Request
from redrive.replay.controller import checks as replays
from redrive.replay.controller.checks import RunRequest, run_violations, start_is_too_late

_GROUP: FieldPath = ("spec", "group")
_PATTERNS = ("topics", "roles", "groups")
"""Fields of a rule with patterns, which may contain the namespace."""
Labels = Mapping[str, Mapping[str, str]]
"""Labels of Namespaces, by name."""
_GIVEN_NAMES = ("retryTopic", "deadLetterTopic")
"""Fields of `spec.naming`, in the order of `RetryPolicySpec.own_topics`."""


@dataclass(frozen=True)
class _Connection:
    """A BrokerConnection of the manifests."""

    key: Key
    spec: BrokerConnectionSpec
    manifest: Manifest


Connections = dict[Key, list[_Connection]]
"""BrokerConnections by name: folders of several environments may have one each."""


@dataclass(frozen=True)
class _Group:
    """A RocketMQRetryPolicy of the manifests; other attributes are those of `Claim`.

    Attributes:
        rules: rules of the connection for its namespace; empty where they are unknown.
    """

    manifest: Manifest
    key: Key
    through: Key
    spec: RocketMQRetryPolicySpec
    connection: _Connection | None
    has_permissions: bool
    rules: tuple[RocketMQRule, ...]


@dataclass(frozen=True)
class Claim:
    """A RetryPolicy of the manifests, and its request.

    Attributes:
        connection: None where the manifests do not contain it.
        has_permissions: False where the permissions of its namespace are unknown.
    """

    manifest: Manifest
    request: Request
    connection: _Connection | None
    has_permissions: bool

    @property
    def key(self) -> Key:
        """Return the policy."""
        return self.request.key

    @property
    def through(self) -> Key:
        """Return its connection."""
        return self.request.through


def check_references(
    manifests: Sequence[Manifest],
    namespaces: Sequence[Manifest],
    secrets: Sequence[Manifest],
    now: datetime,
) -> Iterator[Finding]:
    """Yield the findings between *manifests*, each of which is valid alone.

    Args:
        manifests: in the order of files and lines; the first of two policies has priority.
        namespaces: Namespaces, for connections that select by label.
        secrets: Secrets, which jobs may mount with the consent of their owner.
        now: time of the check.
    """
    connections, labels = _connections(manifests), _labels(namespaces)
    claims, findings = _claims(manifests, connections, labels)
    yield from findings
    groups = [_group(m, connections, labels) for m in _of_kind(manifests, "RocketMQRetryPolicy")]
    names: dict[str, set[str]] = defaultdict(set)
    for manifest in manifests:
        names[manifest.kind].add(str(_key(manifest)))
    yield from _check_numbers(claims, lambda claim: claim.request.permissions.limits.policies)
    yield from _check_numbers(groups, lambda group: checks.most_policies(group.rules))
    yield from _check_config_maps(claims)
    for claim in claims:
        yield from _check_permissions(claim)
        yield from _check_ladder(claim)
        yield from _check_discarded(claim)
    yield from _check_rivals(claims)
    for group in groups:
        yield from _check_connection_name(group.manifest, group.spec.connection_ref, connections)
        yield from _check_group(group, labels)
    yield from _check_group_rivals(groups)
    yield from _check_consents([*claims, *groups], secrets)
    for manifest in _of_kind(manifests, "Replay"):
        replay = parse_spec(ReplaySpec, manifest.body)
        yield from _check_policy_name(manifest, replay.policy_ref, names)
        if error := start_is_too_late(replay.start_before, now):
            yield finding_at(manifest, LintRule.of(error), ("spec", "startBefore"), str(error))
        yield from _check_run(manifest, replay, claims, groups)
    for manifest in _of_kind(manifests, "Inspection"):
        inspection = parse_spec(InspectionSpec, manifest.body)
        yield from _check_policy_name(manifest, inspection.policy_ref, names)
        yield from _check_run(manifest, inspection, claims, groups)


def resolve(
    manifests: Sequence[Manifest], namespaces: Sequence[Manifest]
) -> tuple[list[Claim], list[Finding]]:
    """Return the RetryPolicies with their requests, and findings where that is not possible.

    The arguments are the first two of `check_references`.
    """
    return _claims(manifests, _connections(manifests), _labels(namespaces))


def _claims(
    manifests: Sequence[Manifest], connections: Connections, labels: Labels
) -> tuple[list[Claim], list[Finding]]:
    claims: list[Claim] = []
    findings: list[Finding] = []
    for number, manifest in enumerate(_of_kind(manifests, "RetryPolicy")):
        spec = parse_spec(RetryPolicySpec, manifest.body)
        findings += _check_connection_name(manifest, spec.connection_ref, connections)
        try:
            claims.append(_claim(manifest, spec, number, connections, labels))
        except InvalidSpecError as error:
            path = concerned(manifest, ("spec", "naming"), str(error))
            findings.append(finding_at(manifest, LintRule.CONTRADICTION, path, str(error)))
        except RedriveError as error:
            path = ("spec", "connectionRef")
            findings.append(finding_at(manifest, LintRule.of(error), path, str(error)))
    return claims, findings


def _connections(manifests: Sequence[Manifest]) -> Connections:
    connections: Connections = defaultdict(list)
    for manifest in _of_kind(manifests, "BrokerConnection"):
        key, spec = _key(manifest), parse_spec(BrokerConnectionSpec, manifest.body)
        connections[key].append(_Connection(key, spec, manifest))
    return connections


def _labels(namespaces: Sequence[Manifest]) -> Labels:
    return {manifest.name: manifest.metadata.get("labels") or {} for manifest in namespaces}


def _group(manifest: Manifest, connections: Connections, labels: Labels) -> _Group:
    spec = parse_spec(RocketMQRetryPolicySpec, manifest.body)
    through = _through(manifest, spec.connection_ref)
    connection = _nearest_to(manifest, connections.get(through, ()))
    rules: tuple[RocketMQRule, ...] = ()
    namespace = manifest.namespace
    knows = connection is not None and _knows_rules(connection, namespace, labels)
    if knows and connection is not None and connection.spec.rocketmq is not None:
        place = namespace, labels.get(namespace, {}), connection.key.namespace
        rules = tuple(r for r in connection.spec.rocketmq.allow if r.is_for(*place))
    return _Group(manifest, _key(manifest), through, spec, connection, knows, rules)


def _of_kind(manifests: Sequence[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest.kind == kind]


def _key(manifest: Manifest) -> Key:
    return Key(manifest.namespace, manifest.name)


def _claim(
    manifest: Manifest,
    spec: RetryPolicySpec,
    number: int,
    connections: Connections,
    labels: Labels,
) -> Claim:
    """Return the request of a policy, as the operator makes it from the cluster.

    Raises:
        InvalidSpecError: its values can't make a policy together.
        RedriveError: its connection is for RocketMQ.
    """
    key, through = _key(manifest), _through(manifest, spec.connection_ref)
    connection = _nearest_to(manifest, connections.get(through, ()))
    if connection is not None:
        _ = connection.spec.pulsar  # an error if it is for another broker
    defaults = None if connection is None else connection.spec.policy_defaults
    completed = spec.completed(defaults)
    permissions = _permissions(connection, key.namespace, labels)
    request = Request(
        key=key,
        # A policy for a topic of another one, which it may be, is created after it.
        age=(f"{spec.chaining is Chaining.ALLOWED:d}", f"{number:09}"),
        spec=completed,
        policy=completed.to_policy(str(key), generation=1),
        connection=_unknown(through) if connection is None else connection.spec,
        permissions=Permissions(()) if permissions is None else permissions,
        is_proven=True,
    )
    return Claim(manifest, request, connection, permissions is not None)


def _through(manifest: Manifest, ref: ConnectionRef) -> Key:
    return Key(manifest.namespace if ref.namespace is None else ref.namespace, ref.name)


_Located = TypeVar("_Located", bound=_Connection | Claim | _Group)
_Policy = TypeVar("_Policy", Claim, _Group)


def _nearest_to(manifest: Manifest, objects: Sequence[_Located]) -> _Located | None:
    """Return the one of *objects* whose folder is nearest to that of *manifest*, if any."""
    own = manifest.document.folder.split("/")

    def distance(located: _Located) -> int:
        folder = located.manifest.document.folder.split("/")
        return -sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(own, folder, strict=False))
        )

    return min(objects, key=distance, default=None)


def _unknown(key: Key) -> BrokerConnectionSpec:
    """Return the place of a connection that is not there: its own broker, and no rules."""
    broker = {"serviceURL": "pulsar://unknown", "authentication": {"type": "None"}}
    admin_url = f"http://unknown/{key.namespace}/{key.name}"
    return parse(BrokerConnectionSpec, {"pulsar": broker | {"adminURL": admin_url}}, "spec")


def _permissions(
    connection: _Connection | None, namespace: str, labels: Labels
) -> Permissions | None:
    """Return the permissions of *namespace*; None where they are unknown."""
    if connection is None or not _knows_rules(connection, namespace, labels):
        return None
    own = connection.key.namespace
    return connection.spec.permissions(namespace, labels.get(namespace, {}), own)


def _knows_rules(connection: _Connection, namespace: str, labels: Labels) -> bool:
    """Return True if the manifests show which rules of a connection are for *namespace*."""
    spec = connection.spec
    if not namespace:
        return not connection.key.namespace and not any(map(_depends_on_namespace, spec.rules))
    return namespace in labels or not spec.selects_namespaces


def _depends_on_namespace(rule: NamespaceRule) -> bool:
    patterns = [pattern for name in _PATTERNS for pattern in getattr(rule, name, ())]
    return rule.namespaces is not None or any(NAMESPACE in pattern for pattern in patterns)


def _check_connection_name(
    manifest: Manifest, reference: ConnectionRef, connections: Connections
) -> Iterator[Finding]:
    key = _through(manifest, reference)
    near = nearest(str(key), map(str, connections), cutoff=0.85)
    if key not in connections and near:
        problem = (
            f"these manifests have no such BrokerConnection; got '{key}'; did you mean {near}?"
        )
        path = ("spec", "connectionRef", "name")
        yield finding_at(manifest, LintRule.CONNECTION_NOT_FOUND, path, problem)


def _check_permissions(claim: Claim) -> Iterator[Finding]:
    if claim.connection is None or not claim.has_permissions:
        return
    manifest, request = claim.manifest, claim.request
    if not request.permissions.rules:
        yield finding_at(
            manifest,
            LintRule.NAMESPACE_NOT_ALLOWED,
            ("spec", "connectionRef"),
            f"the BrokerConnection {request.through} may not be used from this namespace; "
            f"got {request.key.namespace!r}; add the namespace to a rule of its spec.allow, or use "
            "another connection",
        )
        return
    for error in checks.ADMISSION.violations(request):
        yield _finding(manifest, error)


def _check_numbers(claims: Sequence[_Policy], limit: Callable[[_Policy], int]) -> Iterator[Finding]:
    """Yield each policy beyond the number that its namespace may have."""
    peers: dict[tuple[str, Key], dict[Key, _Policy]] = defaultdict(dict)
    for claim in claims:
        if claim.connection is not None and claim.has_permissions:
            peers[claim.key.namespace, claim.through].setdefault(claim.key, claim)
    for (namespace, through), policies in peers.items():
        most = limit(next(iter(policies.values())))
        for claim in islice(policies.values(), most, None):
            error = checks.too_many_policies(namespace, through, most, len(policies))
            yield finding_at(claim.manifest, LintRule.of(error), ("metadata", "name"), str(error))


def _check_config_maps(claims: Sequence[Claim]) -> Iterator[Finding]:
    """Yield each policy whose ConfigMap is that of an earlier one of its namespace."""
    owners: dict[Key, Claim] = {}
    for claim in claims:
        manifest = claim.manifest
        body = {"metadata": claim.request.key._asdict(), "spec": manifest.body["spec"]}
        key = config_map_of(body)
        owner = owners.setdefault(key, claim)
        if owner.request.key != claim.request.key:
            error = checks.foreign_config_map(key.name)
            field: FieldPath = ("spec", "naming", "configMap")
            path = field if manifest.node_at(field)[2] == len(field) else ("metadata", "name")
            related = owner.manifest, ("metadata", "name")
            yield finding_at(manifest, LintRule.of(error), path, str(error), related=related)


def _finding(manifest: Manifest, error: RedriveError, default: FieldPath = ("spec",)) -> Finding:
    """Return the finding of *error* at the field that it is about, else at *default*."""
    path = concerned(manifest, ("spec",), str(error))
    path = default if path == ("spec",) else path
    return finding_at(manifest, LintRule.of(error), path, str(error))


def _check_ladder(claim: Claim) -> Iterator[Finding]:
    policy, path = claim.request.policy, ("spec", "delayLadder")
    if policy.ladder.descends:
        problem = (
            "the delay ladder descends: a later retry waits a shorter time than one before it; "
            "sort the delays unless that is meant"
        )
        yield finding_at(claim.manifest, LintRule.LADDER_DESCENDS, path, problem)
    delays = claim.manifest.node_at((*path, "delays"))
    if delays[2] == len(path) + 1 and len(policy.ladder.rungs) > policy.max_retries:
        problem = (
            "the delay ladder has delays that no retry waits for; "
            f"got {len(policy.ladder.rungs)} delays and maxRetries {policy.max_retries}; "
            "raise maxRetries, or remove the delays behind"
        )
        yield finding_at(claim.manifest, LintRule.LADDER_UNUSED, (*path, "delays"), problem)


def _check_discarded(claim: Claim) -> Iterator[Finding]:
    """Yield each field about dead letters of a policy that keeps none."""
    if claim.request.policy.dead_letters:
        return
    for field, values in claim.manifest.body["spec"].items():
        names = (values or {}).keys() - {"mode"} if field in {"deadLetter", "replay"} else ()
        for name in sorted(names):
            path = ("spec", field, name)
            problem = (
                "has no effect, because dead letters are discarded; got deadLetter.mode Discard; "
                "remove the field, or set the mode to Keep"
            )
            yield finding_at(claim.manifest, LintRule.UNUSED_FIELD, path, problem, at_key=True)


def _check_rivals(claims: Sequence[Claim]) -> Iterator[Finding]:
    """Yield each claim on a topic that an earlier policy has or needs, at the same broker."""
    by_topic: dict[tuple[str, TopicName], list[Claim]] = defaultdict(list)
    for claim in sorted(claims, key=lambda claim: claim.request.age):
        request = claim.request
        topics = {(request.broker, topic) for topic in request.spec.own_topics}
        topics.add((request.broker, request.policy.topic))
        rivals = {id(rival): rival for topic in sorted(topics) for rival in by_topic[topic]}
        for rival in rivals.values():
            if rival.request.key != request.key:  # the same object of another environment
                yield from _check_rival(claim, rival)
        for topic in topics:
            by_topic[topic].append(claim)


def _check_rival(claim: Claim, rival: Claim) -> Iterator[Finding]:
    request, other, manifest = claim.request, rival.request, claim.manifest
    contested = checks.prior_claim(request, other)
    if contested is not None:
        shared = set(other.spec.own_topics) | {other.policy.topic}
        path: FieldPath = ("spec", "subscription")
        for field, topic in zip(_GIVEN_NAMES, request.spec.own_topics, strict=False):
            _, _, depth = manifest.node_at(("spec", "naming", field))
            if topic in shared and depth == len(("spec", "naming", field)):
                path = ("spec", "naming", field)
        related = rival.manifest, ("spec", "subscription")
        rule = LintRule.of(contested)
        yield finding_at(manifest, rule, path, str(contested), related=related)
    elif request.policy.topic in other.spec.own_topics and (
        request.spec.chaining is Chaining.FORBIDDEN
    ):
        error = checks.chained(shown_policy(other.key, request.key.namespace))
        related = rival.manifest, ("spec", "subscription")
        path = ("spec", "topic")
        yield finding_at(manifest, LintRule.of(error), path, str(error), related=related)


def _check_group(group: _Group, labels: Labels) -> Iterator[Finding]:
    connection, namespace = group.connection, group.manifest.namespace
    if connection is None:
        return
    # Loaded for manifests of this kind only: it takes long.
    rocketmq = import_module("redrive.kube.rocketmq")
    error: RedriveError | None = None
    path: FieldPath = ("spec", "connectionRef")
    try:
        rocketmq.cluster_of(connection.spec, group.through)
        if group.has_permissions:
            of_namespace = labels.get(namespace, {})
            rules = rocketmq.rules_at(connection.spec, group.through, namespace, of_namespace)
            error, path = checks.group_is_not_allowed(group.spec, namespace, rules), _GROUP
    except RedriveError as refused:
        error = refused
    if error is not None:
        yield finding_at(group.manifest, LintRule.of(error), path, str(error))


def _check_group_rivals(groups: Sequence[_Group]) -> Iterator[Finding]:
    """Yield each policy of a group that an earlier policy of the same connection manages."""
    owners: dict[tuple[Key, str], _Group] = {}
    for group in groups:
        owner = owners.setdefault((group.through, group.spec.group), group)
        if owner.key != group.key:
            error = checks.contested_group(group.spec.group, owner.key, group.key.namespace)
            related = owner.manifest, _GROUP
            yield finding_at(
                group.manifest, LintRule.of(error), _GROUP, str(error), related=related
            )


def _check_consents(
    claims: Sequence[Claim | _Group], secrets: Sequence[Manifest]
) -> Iterator[Finding]:
    """Yield each Secret that jobs of a policy mount, and whose owner does not consent."""
    by_key: dict[Key, list[Manifest]] = defaultdict(list)
    for secret in secrets:
        by_key[_key(secret)].append(secret)
    for claim in claims if secrets else ():
        spec = None if claim.connection is None else claim.connection.spec
        rocketmq = None if spec is None else spec.rocketmq
        identities = [
            *(() if spec is None else (spec.replay, spec.inspection)),
            *(() if rocketmq is None else (rocketmq.replay, rocketmq.inspection)),
        ]
        # Loaded for manifests with Secrets only: it takes long.
        lent_objects = import_module("redrive.replay.controller.launch").lent_objects
        for needed in chain.from_iterable(map(lent_objects, filter(None, identities))):
            if needed.resource is SECRETS:
                for secret in by_key[Key(claim.key.namespace, needed.name)]:
                    yield from _check_consent(secret, claim.through)


def _check_consent(secret: Manifest, connection: Key) -> Iterator[Finding]:
    annotations = secret.metadata.get("annotations")
    value = annotations.get(USABLE_BY) if isinstance(annotations, dict) else None
    names = [name.strip() for name in str(value or "").split(",")]
    if not connection.namespace:  # unknown
        names = [name.rpartition("/")[2] for name in names]
    if (str(connection) if connection.namespace else connection.name) not in names:
        problem = (
            f"jobs of the BrokerConnection {connection} mount this Secret, and its owner "
            f"does not consent; got {value!r}; add the annotation `{USABLE_BY}: {connection}`"
        )
        path = ("metadata", "annotations", USABLE_BY)
        yield finding_at(secret, LintRule.CONSENT_MISSING, path, problem)


def _check_policy_name(
    manifest: Manifest, reference: PolicyRef, names: Mapping[str, Collection[str]]
) -> Iterator[Finding]:
    key, others = str(Key(manifest.namespace, reference.name)), names.get(reference.kind, ())
    near = nearest(key, others, cutoff=0.85)
    if key not in others and near:
        problem = (
            f"these manifests have no such {reference.kind}; got '{key}'; did you mean {near}?"
        )
        path = ("spec", "policyRef", "name")
        yield finding_at(manifest, LintRule.POLICY_NOT_FOUND, path, problem)


def _check_run(
    manifest: Manifest,
    spec: ReplaySpec | InspectionSpec,
    claims: Sequence[Claim],
    groups: Sequence[_Group],
) -> Iterator[Finding]:
    """Yield each part of a Replay or an Inspection that its policy or connection does not allow."""
    policy = _policy(manifest, spec.policy_ref, claims, groups)
    if policy is None or policy.connection is None or not policy.has_permissions:
        return
    connection = policy.connection.spec
    if isinstance(spec, ReplaySpec):
        errors = _replay_violations(spec, policy, connection)
    else:
        errors = _inspection_violations(spec, policy, connection)
    for error in errors:
        yield _finding(manifest, error, ("spec", "policyRef", "name"))


def _policy(
    manifest: Manifest, reference: PolicyRef, claims: Sequence[Claim], groups: Sequence[_Group]
) -> Claim | _Group | None:
    """Return the policy that a Replay or an Inspection refers to; None if it is unknown."""
    policies = claims if reference.kind is PolicyKind.RETRY_POLICY else groups
    key = Key(manifest.namespace, reference.name)
    return _nearest_to(manifest, [policy for policy in policies if policy.key == key])


def _replay_violations(
    spec: ReplaySpec, policy: Claim | _Group, connection: BrokerConnectionSpec
) -> Iterator[RedriveError]:
    if isinstance(policy, Claim):
        request = policy.request
        yield from run_violations(
            RunRequest(
                spec,
                request.key,
                request.spec,
                request.policy,
                request.through,
                request.connection,
                request.permissions,
            )
        )
    elif connection.rocketmq is not None:
        yield from replays.queue_run_violations(
            spec, policy.spec, policy.key.namespace, policy.rules
        )
        try:
            replays.rocketmq_access(connection.rocketmq, policy.through)
        except RedriveError as error:
            yield error


def _inspection_violations(
    spec: InspectionSpec, policy: Claim | _Group, connection: BrokerConnectionSpec
) -> Iterator[RedriveError]:
    try:
        if isinstance(policy, Claim):
            if error := inspections.dead_letters_are_discarded(spec.source, policy.request.policy):
                yield error
            access = inspections.pulsar_access(connection, policy.through)
        elif connection.rocketmq is not None:
            access = inspections.rocketmq_access(connection.rocketmq, policy.through)
        else:
            return
    except RedriveError as error:
        yield error
        return
    yield from inspections.access_violations(spec, access, policy.through)
