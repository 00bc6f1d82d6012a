"""Whether a policy may be obeyed at all: checks on requests, without a broker; pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from redrive.errors import InvalidSpecError, RedriveError
from redrive.provision.checks import Checks
from redrive.provision.desired import CONFIG_MAP_SUFFIX
from redrive.provision.errors import (
    ContestedError,
    DeletionNotAllowedError,
    NameCollisionError,
    ResourceConflictError,
    RoleNotAllowedError,
    TopicNotAllowedError,
)
from redrive.provision.facts import Request

MAX_OBJECT_NAME = 253
_SHOWN = 5


def name_is_too_long(request: Request) -> RedriveError | None:
    """Find a name from which no ConfigMap's name can be made."""
    room = MAX_OBJECT_NAME - len(CONFIG_MAP_SUFFIX)
    if len(request.key.name) > room:
        return InvalidSpecError(
            f"metadata.name has at most {room} characters, because a ConfigMap is named after it",
            got=len(request.key.name),
            remedy="make a policy with a shorter name",
        )
    return None


def topic_is_not_allowed(request: Request) -> RedriveError | None:
    """Find a source topic outside of what the connection is for."""
    if request.permissions.allows_topic(request.policy.topic):
        return None
    return TopicNotAllowedError(
        f"spec.topic is not among the topics that the connection allows to namespace "
        f"{request.key.namespace} ({_listed(request.permissions.topics)})",
        got=str(request.policy.topic),
        remedy="add it to a rule of the connection's spec.allow, or use another connection",
    )


def own_topic_is_not_allowed(request: Request) -> RedriveError | None:
    """Find names that lead out of what the connection is for.

    They are chosen freely: topic `orders` and subscription `eu-billing` would make rights, and
    replays, reach the retry topic of subscription `billing` of another team's `orders-eu`.
    """
    kinds = ("retry topic", "dead-letter topic")
    topics = request.spec.permitted_topics
    for kind, topic in zip(kinds, topics, strict=False):  # the second may be none
        if not request.permissions.allows_topic(topic):
            return TopicNotAllowedError(
                f"the {kind} that spec.topic, spec.subscription and spec.naming lead to is not "
                f"among the topics that the connection allows to namespace {request.key.namespace} "
                f"({_listed(request.permissions.topics)})",
                got=str(topic),
                remedy="add it to a rule of the connection's spec.allow, or use another "
                "subscription, name or connection",
            )
    return None


def role_is_not_allowed(request: Request) -> RedriveError | None:
    """Find a role that the connection does not let policies grant rights to, on the topics meant.

    A topic may be allowed by one rule of the connection and a role by another, for other topics.
    """
    spec, permitted = request.spec, request.spec.permitted_topics
    granted = (
        ("consumerRoles", spec.consumer_roles, permitted),
        ("deadLetter.readerRoles", spec.dead_letter.reader_roles, permitted[1:]),
    )
    for field, roles, topics in granted:
        refused = request.permissions.first_refused(roles, topics)
        if refused is not None:
            role, topic = refused
            return RoleNotAllowedError(
                f"a role of spec.{field} is not among those that the connection allows to "
                f"namespace {request.key.namespace} on {topic} "
                f"({_listed(request.permissions.roles_on(topic))})",
                got=role,
                remedy="add it to a rule for that topic in the connection's spec.allow, or use "
                "another role",
            )
    return None


def deletion_is_not_allowed(request: Request) -> RedriveError | None:
    """Find a deletionPolicy that deletes topics which the connection keeps."""
    if not request.deletion.deletes_topics:
        return None
    for topic in request.spec.permitted_topics:
        if not request.permissions.allows_deletion(topic):
            return DeletionNotAllowedError(
                f"with deletionPolicy {request.deletion} the topic would be deleted together with "
                "the policy, which the connection does not allow to namespace "
                f"{request.key.namespace}",
                got=str(topic),
                remedy="use deletionPolicy Retain, or set delete in a rule for that topic in the "
                "connection's spec.allow",
            )
    return None


def _listed(patterns: Sequence[str]) -> str:
    more = [f"and {len(patterns) - _SHOWN} more"] if len(patterns) > _SHOWN else []
    return ", ".join([*patterns[:_SHOWN], *more]) or "which is empty"


ADMISSION = Checks(
    name_is_too_long,
    topic_is_not_allowed,
    own_topic_is_not_allowed,
    role_is_not_allowed,
    deletion_is_not_allowed,
)


def prior_claim(request: Request, rivals: Iterable[Request]) -> ContestedError | None:
    """Find a policy whose claim on this one's topics, at the same broker, comes first.

    Args:
        rivals: admissible policies that claim one of its names: one that may not be obeyed
            itself must not keep others from their topics.
    """
    prior = [other for other in rivals if request.yields_to(other)]
    if not prior:
        return None
    winner = min(prior, key=lambda other: other.age)
    policy = request.policy
    if winner.subscribes_like(request):
        return ResourceConflictError(
            f"subscription {policy.subscription} of {policy.topic} has a RetryPolicy already, "
            "which keeps it until it is deleted or stalls",
            rival=winner.key,
            remedy="delete one of the two",
        )
    if winner.policy.topic in request.spec.own_topics:
        return NameCollisionError(
            "a topic of its own that spec.naming leads to is the source topic of an "
            f"older RetryPolicy, {winner.policy.topic}, and would be changed as if it held retries",
            rival=winner.key,
            remedy="delete this policy and create it again with other names for its topics",
        )
    return NameCollisionError(
        f"another RetryPolicy, for subscription {winner.policy.subscription} of "
        f"{winner.policy.topic}, has a retry, dead-letter or ledger topic of a name that this one "
        "needs",
        rival=winner.key,
        remedy="use another subscription for one of the two, or give its topics other names",
    )
