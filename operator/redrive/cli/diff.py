"""Changes that a manifest of a RetryPolicy makes: `redrive diff`.

Both sides are the desired state that the operator computes: of the policy in the cluster, and of
the one in the file. Without --observe nothing is created, and the broker is not read.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator

import click

from redrive.api import Body
from redrive.cli import develop
from redrive.cli.cluster import Cluster, ObjectNotFoundError, clean_up
from redrive.cli.frame import ClusterFlags, cluster_options
from redrive.cli.output import say
from redrive.cli.policies import conditions_of
from redrive.cli.policy_actions import REFRESH_SECONDS, awaited, without_conflict
from redrive.errors import RedriveError
from redrive.kube.resources import CONFIG_MAP_KEY, POLICIES, REQUESTED_BY, Key
from redrive.lint.manifests import Manifests
from redrive.lint.references import Claim, resolve
from redrive.provision.desired import TopicRole
from redrive.reasons import Reason

DIFFERENT = 1
FAILED = 2
IMMUTABLE = ("topic", "subscription", "naming")


@click.command()
@click.argument("file", metavar="FILE")
@click.option(
    "--observe",
    is_flag=True,
    help="Have the operator compare new policies with the broker, which creates and deletes them.",
)
@cluster_options
def diff(file: str, flags: ClusterFlags, *, observe: bool) -> int:
    """Show the changes that a changed manifest makes to topics, rights and consumers.

    FILE is a file, a folder, or - for standard input. Each RetryPolicy in it is compared with the
    one in the cluster. Defaults come from its connection: the one of the file, else the one of the
    cluster. The broker is not read: drift is not shown.

    With --observe each policy that the cluster does not have is created with managementPolicy
    Observe. The operator lists the changes that it would make at the broker, and the policy is
    deleted. A policy that was applied meanwhile is kept.

    Exit code: 0 without differences, 1 with differences, 2 if they can't be determined.
    """
    try:
        cluster = Cluster(flags)
        manifests = develop.read_manifests(file, cluster.namespace)
        changes = list(_changes(manifests, cluster, observes=observe))
    except RedriveError as error:
        click.echo(f"error: {error}", err=True)
        return FAILED
    for change in changes:
        click.echo(change)
    return DIFFERENT if changes else 0


def _changes(manifests: Manifests, cluster: Cluster, *, observes: bool) -> Iterator[str]:
    """Yield the lines of the difference of each policy.

    Raises:
        RedriveError: an object can't be read.
    """
    claims, _ = resolve(manifests.objects, manifests.namespaces)
    for claim in claims:
        key = claim.request.key
        live, wanted = _live(cluster, key), _completed(claim, cluster)
        before = [] if live is None else list(state(live))
        names = f"live {key}", f"file {key}"
        lines = list(difflib.unified_diff(before, list(state(wanted)), *names, lineterm=""))
        yield from lines
        if lines and live is not None:
            yield from _immutable(live, wanted)
        if live is None and observes:
            yield from _observed(wanted, cluster)


def _observed(claim: Claim, cluster: Cluster) -> Iterator[str]:
    """Yield the changes that the operator would make at the broker for a new policy.

    Raises:
        RedriveError: the operator has not listed them.
    """
    key, body = claim.request.key, claim.manifest.body
    created = cluster.create(
        POLICIES,
        {
            **body,
            "metadata": {**key._asdict(), "annotations": {REQUESTED_BY: cluster.user}},
            "spec": {**body["spec"], "managementPolicy": "Observe"},
        },
    )

    def is_settled(policy: Body) -> bool:
        conditions = conditions_of(policy)
        is_stalled = conditions.get("Stalled", {}).get("status") == "True"
        return is_stalled or conditions.get("Ready", {}).get("reason") == Reason.OBSERVED

    try:
        observed = awaited(cluster, created, REFRESH_SECONDS, is_settled)
        latest = observed or cluster.get(POLICIES, key.namespace, key.name)
        ready = conditions_of(latest).get("Ready", {})
        if ready.get("reason") != Reason.OBSERVED:
            raise RedriveError(
                f"the operator could not observe the RetryPolicy {key}",
                got=ready.get("message") or "no answer in time",
                remedy="see `redrive doctor`, or leave out --observe",
            )
    finally:
        clean_up(cluster, POLICIES, created, delete=lambda *_: _withdraw(cluster, created))
    for change in latest["status"].get("plannedChanges") or ():
        yield f"+broker: {change}"


def _withdraw(cluster: Cluster, created: Body) -> None:
    """Delete a policy, but keep it if it was applied since its creation.

    Raises:
        ClusterError: it can't be read or deleted.
    """
    key = Key.of(created)

    def content(policy: Body) -> list[object]:
        return [policy["metadata"].get(field) for field in ("generation", "annotations", "labels")]

    def delete() -> None:
        policy = cluster.get(POLICIES, key.namespace, key.name)
        metadata = policy["metadata"]
        if metadata["uid"] != created["metadata"]["uid"] or "deletionTimestamp" in metadata:
            return
        if content(policy) == content(created):
            cluster.delete(POLICIES, policy, only_as_read=True)
        else:
            hint = cluster.flags.hint("status", key.name, namespace=key.namespace)
            say(f"warning: the RetryPolicy {key} was applied meanwhile, and is kept; see {hint}")

    without_conflict(delete)


def _immutable(live: Claim, claim: Claim) -> Iterator[str]:
    """Yield a line for each field that differs and can't change."""
    before, after = (other.request.spec.to_manifest() for other in (live, claim))
    for field in IMMUTABLE:
        if before.get(field) != after.get(field):
            yield f"error: spec.{field} can't change; create another RetryPolicy"


def _live(cluster: Cluster, key: Key) -> Claim | None:
    """Return the policy of the cluster; None where it does not exist."""
    try:
        return develop.live_claim(cluster, key)
    except ObjectNotFoundError:
        return None


def _completed(claim: Claim, cluster: Cluster) -> Claim:
    """Return *claim* with the connection of the cluster where the file has none."""
    connection = (
        None if claim.connection else develop.read_connection(cluster, claim.request.through)
    )
    if connection is None:
        return claim
    metadata = {**claim.manifest.metadata, **claim.request.key._asdict()}
    return develop.resolved({**claim.manifest.body, "metadata": metadata}, connection)


def state(claim: Claim) -> Iterator[str]:
    """Yield the desired state of a policy, one fact in each line."""
    wanted, spec = develop.desired_of(claim), claim.request.spec
    topics = {"retry topic": wanted.retry, "dead-letter topic": wanted.topic(TopicRole.DEAD_LETTER)}
    for role, topic in topics.items():
        if topic is None:
            yield f"{role}: none"
            continue
        yield f"{role}: {topic.name}"
        yield f"{role}, partitions: {topic.partitions or 'default'}"
        yield f"{role}, subscription: {topic.subscription}"
        yield from (f"{role}, topic policy: {policy}" for policy in topic.policies)
    for grant in sorted(wanted.grants, key=lambda grant: (grant.role, str(grant.topic))):
        yield f"rights of {grant.role} on {grant.topic.local}: {', '.join(sorted(grant.actions))}"
    yield f"deletionPolicy: {claim.request.deletion}"
    yield f"managementPolicy: {spec.management_policy}"
    yield f"replay: {json.dumps(spec.replay.to_manifest(), sort_keys=True)}"
    document = json.loads(wanted.config_map["data"][CONFIG_MAP_KEY])
    del document["generation"]
    for field, value in document.items():
        yield f"consumers, {field}: {json.dumps(value)}"
