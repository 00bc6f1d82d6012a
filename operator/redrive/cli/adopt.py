"""Manifests for retry and dead-letter topics that exist already: `redrive adopt`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import click
import yaml

from redrive.admin.access import Access
from redrive.admin.client import Admin
from redrive.admin.model import NamespaceState
from redrive.cli.develop import broker_options, open_admin
from redrive.errors import InvalidSpecError
from redrive.kube.resources import POLICIES
from redrive.policy import naming
from redrive.policy.naming import DEAD_LETTER_SUBSCRIPTION, Scheme, TopicName
from redrive.provision.ownership import OwnershipRecord

_MAX_NAME = 63
_CONSUMES = frozenset({"consume", "produce"})


@dataclass(frozen=True)
class Adoptable:
    """A subscription whose retry or dead-letter topic exists.

    Attributes:
        retry: None where the topic does not exist.
        dead_letter: None where the topic does not exist.
    """

    topic: TopicName
    subscription: str
    scheme: Scheme
    retry: TopicName | None
    dead_letter: TopicName | None


@click.command()
@click.argument("pulsar_namespace", metavar="TENANT/NAMESPACE")
@click.option("--connection", default="main", show_default=True, help="BrokerConnection to name.")
@broker_options(required=True)
def adopt(pulsar_namespace: str, connection: str, admin_url: str, access: Access) -> None:
    """Print RetryPolicies for retry and dead-letter topics that exist in a Pulsar namespace.

    A topic counts if its name is that which a scheme gives for a topic and a subscription of it,
    and no policy owns it. Nothing is changed. Compare delays and retries with the program of the
    consumers before you apply a manifest: a broker does not know them.
    """

    async def run() -> list[dict[str, Any]]:
        async with open_admin(admin_url, access) as admin:
            state = await admin.namespace(pulsar_namespace)
            return [
                await _manifest(adoptable, state, admin, connection)
                async for adoptable in _adoptable(state, admin)
            ]

    manifests = asyncio.run(run())
    if not manifests:
        click.echo(f"no topic of {pulsar_namespace} has a name by a scheme", err=True)
        return
    click.echo(
        "# The connection has to allow the adoption: `adoption: Allowed` in a rule of spec.allow\n"
        + yaml.safe_dump_all(manifests, sort_keys=False, explicit_start=True),
        nl=False,
    )


async def _adoptable(state: NamespaceState, admin: Admin) -> AsyncIterator[Adoptable]:
    """Yield each subscription with a topic of its own, by the first scheme that fits."""
    topics = [topic for topic in _topics(state) if not topic.is_system]
    own: set[TopicName] = set()
    candidates = []
    for topic in topics:
        is_partitioned = str(topic) in state.partitioned
        subscriptions = await admin.subscriptions(topic, partitioned=is_partitioned)
        for subscription in sorted(subscriptions.names):
            for scheme in Scheme:
                try:
                    names = _names(topic, subscription, scheme)
                except InvalidSpecError:  # no topic can have that name
                    continue
                existing = [name if state.exists(name) else None for name in names]
                if any(existing):
                    own.update(name for name in existing if name is not None)
                    candidates.append(Adoptable(topic, subscription, scheme, *existing))
                    break
    for candidate in candidates:
        if candidate.topic not in own and not await _is_owned(candidate, state, admin):
            yield candidate


def _names(topic: TopicName, subscription: str, scheme: Scheme) -> tuple[TopicName, TopicName]:
    naming.check_subscription(subscription)
    retry = naming.retry_topic(topic, subscription, scheme)
    return retry, naming.dead_letter_topic(topic, subscription, scheme)


def _topics(state: NamespaceState) -> list[TopicName]:
    names = {TopicName.parse(name).without_partition() for name in state.unpartitioned}
    return sorted(names | {TopicName.parse(name) for name in state.partitioned})


async def _is_owned(candidate: Adoptable, state: NamespaceState, admin: Admin) -> bool:
    """Return True if a policy owns one of the topics."""
    for topic in filter(None, (candidate.retry, candidate.dead_letter)):
        is_partitioned = str(topic) in state.partitioned
        metadata = await admin.metadata(topic, partitioned=is_partitioned)
        if not OwnershipRecord.of(metadata.properties).is_free:
            return True
    return False


async def _manifest(
    adoptable: Adoptable, state: NamespaceState, admin: Admin, connection: str
) -> dict[str, Any]:
    topic, retry, dead_letter = adoptable.topic, adoptable.retry, adoptable.dead_letter
    spec: dict[str, Any] = {
        "connectionRef": {"name": connection},
        "topic": str(topic),
        "subscription": adoptable.subscription,
        "adoption": "IfPresent",
    }
    if adoptable.scheme is not Scheme.PULSAR:
        spec["naming"] = {"scheme": adoptable.scheme.value}
    if retry is not None:
        if state.partitions(retry) not in {0, state.partitions(topic)}:
            spec["retry"] = {"partitions": state.partitions(retry)}
        granted = state.permissions.get(str(retry), {})
        if roles := sorted(role for role, actions in granted.items() if actions >= _CONSUMES):
            spec["consumerRoles"] = roles
    if dead_letter is not None:
        is_partitioned = str(dead_letter) in state.partitioned
        subscriptions = await admin.receivers(dead_letter, partitioned=is_partitioned)
        fields = {"partitions": state.partitions(dead_letter)} if is_partitioned else {}
        if len(subscriptions.names) == 1 and DEAD_LETTER_SUBSCRIPTION not in subscriptions.names:
            spec["deadLetter"] = {**fields, "subscription": next(iter(subscriptions.names))}
        elif fields:
            spec["deadLetter"] = fields
    name = _object_name(f"{topic.local}-{adoptable.subscription}")
    return {**POLICIES.typed, "metadata": {"name": name}, "spec": spec}


def _object_name(text: str) -> str:
    """Return *text* with characters that no object's name has replaced."""
    return re.sub(r"[^a-z0-9-]+", "-", text.lower())[:_MAX_NAME].strip("-") or "policy"
