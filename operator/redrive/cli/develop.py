"""Commands for development without a cluster: `explain`, `policy`, `provision`, `rights`.

They read RetryPolicies from manifests, `explain` also from a cluster, resolve them as the operator
does, and use its own code for names, attempts, rights and topics.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

import click

from redrive.admin.access import Access, tls_context
from redrive.admin.client import Admin
from redrive.admin.http import Http
from redrive.api import Body
from redrive.api.permissions import AllowRule, Consent, Permissions
from redrive.cli.cluster import Cluster, NotPermittedError, ObjectNotFoundError
from redrive.cli.frame import (
    DEFAULT_NAMESPACE,
    FILE,
    NAME_WITHOUT_FILE,
    ClusterFlags,
    cluster_options,
    is_file,
    names_of,
)
from redrive.cli.output import now
from redrive.errors import RedriveError
from redrive.kube.resources import CONNECTIONS, POLICIES, Key
from redrive.lint import report
from redrive.lint.checks import lint
from redrive.lint.manifests import Manifests
from redrive.lint.references import Claim, resolve
from redrive.lint.rules import Severity
from redrive.policy import codec
from redrive.policy.model import Policy
from redrive.policy.values import format_duration
from redrive.provision.actions import Action, CreateConfigMap, PatchConfigMap, Targets, apply
from redrive.provision.checks import PREFLIGHT, Evidence
from redrive.provision.desired import Desired, config_map_of, desired
from redrive.provision.diff import diff
from redrive.provision.observe import around, observe_broker

CLUSTER = "provision"
"""Owner, in place of a cluster, of the topics that `provision` creates. No operator has this id, so
each refuses the topics of the other."""
_SHOWN_ATTEMPTS = 12
_ALL = AllowRule(name="all", topics=("persistent://*/*/*",), roles=("*",), adoption=Consent.ALLOWED)
"""Permissions of the caller: the broker decides about the token."""


def _manifest_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the arguments that name policies; the command gets them as `claims`."""

    @click.argument("file", metavar="FILE")
    @click.argument("name", metavar="[POLICY]", required=False)
    @click.option(
        "-n",
        "--namespace",
        default=DEFAULT_NAMESPACE,
        show_default=True,
        metavar="NS",
        help="Of manifests that name none.",
    )
    @wraps(function)
    def command(file: str, name: str | None, namespace: str, **options: Any) -> Any:  # noqa: ANN401
        return function(claims=read_claims(file, name, namespace), **options)

    return command


def broker_options(*, required: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options that name a broker; the command gets them as `admin_url` and `access`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @click.option(
            "--admin-url",
            required=required,
            metavar="URL",
            help="Address of the admin REST API, such as http://localhost:8080.",
        )
        @click.option("--token-file", type=FILE, metavar="FILE", help="Token of the caller.")
        @click.option("--ca-file", type=FILE, metavar="FILE", help="Authorities, as PEM.")
        @wraps(function)
        def command(
            admin_url: str | None,
            token_file: Path | None,
            ca_file: Path | None,
            **options: Any,  # noqa: ANN401  a command's own
        ) -> Any:  # noqa: ANN401
            tls = None if ca_file is None else tls_context(ca=ca_file.read_text("utf-8"))
            token = None if token_file is None else token_file.read_text("utf-8").strip()
            access = Access(tls=tls) if token is None else Access.bearer(token, tls)
            return function(admin_url=admin_url, access=access, **options)

        return command

    return decorate


def read_claims(file: str, name: str | None, namespace: str) -> list[Claim]:
    """Return the RetryPolicies of *file*, or the one of that *name*.

    Raises:
        RedriveError: the file can't be read, or the manifests have no such policy, or errors, which
            are printed.
    """
    manifests = read_manifests(file, namespace)
    claims, _ = resolve(manifests.objects, manifests.namespaces)
    names = [claim.request.key.name for claim in claims]
    claims = [claim for claim in claims if name in {None, claim.request.key.name}]
    if not claims:
        raise RedriveError(
            f"{file} has no RetryPolicy{f' {name}' if name else ''}",
            got=", ".join(names) or "none",
            remedy="name a file with one, and its metadata.name",
        )
    return claims


def read_manifests(file: str, namespace: str) -> Manifests:
    """Read manifests without errors.

    Raises:
        RedriveError: the file can't be read, or they have errors, which are printed.
    """
    manifests = Manifests.read([file], namespace)
    errors = [f for f in lint(manifests, now()) if f.rule.severity is Severity.ERROR]
    if errors:
        click.echo(report.to_text(errors), nl=False, err=True)
        raise RedriveError("the manifests have errors", got=len(errors), remedy="correct them")
    return manifests


def live_claim(cluster: Cluster, key: Key) -> Claim:
    """Return a policy of the cluster, with its connection where the caller may read that.

    Raises:
        ObjectNotFoundError: the policy does not exist.
    """
    policy = cluster.get(POLICIES, key.namespace, key.name)
    reference = policy["spec"]["connectionRef"]
    through = Key(reference.get("namespace") or key.namespace, reference["name"])
    return resolved(policy, read_connection(cluster, through))


def read_connection(cluster: Cluster, key: Key) -> Body | None:
    """Read a connection; None where it does not exist, or is not for the caller."""
    try:
        return cluster.get(CONNECTIONS, key.namespace, key.name)
    except (ObjectNotFoundError, NotPermittedError):
        return None


def resolved(policy: Body, connection: Body | None) -> Claim:
    """Return a policy that uses *connection*, as the operator reads it."""
    items = [policy] if connection is None else [policy, connection]
    manifests = Manifests()
    manifests.add("cluster", json.dumps({"kind": "List", "items": items}).encode())
    ((claim,), _) = resolve(manifests.objects, manifests.namespaces)
    return claim


@click.command()
@click.argument("policy", metavar="POLICY|FILE", shell_complete=names_of("retrypolicies"))
@click.argument("name", metavar="[NAME]", required=False)
@cluster_options
def explain(policy: str, name: str | None, flags: ClusterFlags) -> None:
    """Show names, attempts in time, and lines to paste for Python, Java and Go.

    POLICY is the name of a RetryPolicy in the cluster. A FILE, whose name has a / or ends with
    .yaml or .json, or - for standard input, has RetryPolicies; NAME is one of several. Defaults
    come from the connection in the same manifests or cluster.
    """
    claims = _claims_of(policy, name, flags)
    missing = "is not in these manifests" if is_file(policy) else "can't be read"
    click.echo("\n".join(line for claim in claims for line in _explained(claim, missing)))


def _claims_of(policy: str, name: str | None, flags: ClusterFlags) -> list[Claim]:
    """Return the policies of a file, or the one of the cluster.

    Raises:
        UsageError: a policy of the cluster has a second name.
        RedriveError: there is no such policy, or the manifests have errors.
    """
    if is_file(policy):
        return read_claims(policy, name, flags.namespace or DEFAULT_NAMESPACE)
    if name is not None:
        raise click.UsageError(NAME_WITHOUT_FILE)
    cluster = Cluster(flags)
    return [live_claim(cluster, Key(cluster.namespace, policy))]


def _explained(claim: Claim, missing: str) -> Iterator[str]:
    policy, spec = claim.request.policy, claim.request.spec
    yield f"RetryPolicy {claim.request.key}"
    yield f"  source topic       {policy.topic}"
    yield f"  subscription       {policy.subscription}, {policy.subscription_type.value}"
    yield f"  retry topic        {policy.retry_topic}"
    if policy.dead_letters:
        yield f"  dead-letter topic  {policy.dead_letter_topic}"
        yield f"                     subscription {policy.dead_letter_subscription}"
        yield f"  ledger topic       {policy.ledger_topic}, if Replays are set up"
    else:
        yield "  dead-letter topic  none: dead letters are discarded"
    if policy.sequenced:
        yield f"  sequences topic    {policy.sequences_topic}"
    yield f"  ConfigMap          {config_map_of(_body(claim)).name}"
    yield f"  deletion           {spec.deletion_policy or 'Retain'}"
    if claim.connection is None:
        yield f"  defaults           of redrive: {claim.request.through} {missing}"
    else:
        yield f"  defaults           of BrokerConnection {claim.request.through}"
    yield ""
    yield from _attempts(policy)
    yield from _lines(policy)


def _attempts(policy: Policy) -> Iterator[str]:
    """Yield the table of attempts; of many, the first ones and the last."""
    since, rows = timedelta(), [(1, "", "0s")]
    for retry in range(1, policy.max_retries + 1):
        delay = policy.ladder.delay(retry)
        since += delay
        rows.append((retry + 1, format_duration(delay), format_duration(since)))
    end = "dead-lettered" if policy.dead_letters else "discarded"
    yield f"{len(rows)} attempts in {rows[-1][2]}, then {end}"
    yield "  ATTEMPT  AFTER       SINCE THE FIRST"
    is_long = len(rows) > _SHOWN_ATTEMPTS
    for number, delay_text, since_text in rows[: _SHOWN_ATTEMPTS - 2] if is_long else rows:
        yield f"  {number:>7}  {delay_text:<10}  {since_text}"
    if is_long:
        number, delay_text, since_text = rows[-1]
        yield "      ..."
        yield f"  {number:>7}  {delay_text:<10}  {since_text}"
    if policy.ladder.jitter:
        yield f"  Each delay is up to {policy.ladder.jitter:.0%} shorter, at random."
    yield "  Handling takes its own time, and consumers in Java and Go choose delays themselves."
    yield ""


_PYTHON = """Python: redrive policy FILE > policy.json, and REDRIVE_POLICY=policy.json

import pulsar
from redrive import PolicyFile, RetryConsumer

client = pulsar.Client("pulsar://localhost:6650")
with RetryConsumer(client, PolicyFile()) as consumer:
    consumer.run(handle)
"""
_JAVA = """Java:

Consumer<byte[]> consumer = client.newConsumer(Schema.BYTES)
    .topic("{topic}")
    .subscriptionName("{subscription}")
    .subscriptionType(SubscriptionType.{java_type})
    .enableRetry(true)
    .isAckReceiptEnabled(true)
    .deadLetterPolicy(DeadLetterPolicy.builder()
        .maxRedeliverCount({retries})
        .retryLetterTopic("{retry}")
        .deadLetterTopic("{dead_letter}")
        .build())
    .subscribe();

consumer.reconsumeLater(message, {delay}, TimeUnit.SECONDS);
"""
_GO = """Go:

consumer, err := client.Subscribe(pulsar.ConsumerOptions{{
    Topic:            "{topic}",
    SubscriptionName: "{subscription}",
    Type:             pulsar.{go_type},
    RetryEnable:      true,
    DLQ: &pulsar.DLQPolicy{{
        MaxDeliveries:    {retries},
        RetryLetterTopic: "{retry}",
        DeadLetterTopic:  "{dead_letter}",
    }},
}})

consumer.ReconsumeLater(message, {delay}*time.Second)
"""


def _lines(policy: Policy) -> Iterator[str]:
    yield _PYTHON
    if not policy.dead_letters or not policy.max_retries:
        yield "Java and Go: their clients need a dead-letter topic and at least one retry."
        return
    kind = policy.subscription_type.value
    values = {
        "topic": policy.topic,
        "subscription": policy.subscription,
        "java_type": "Key_Shared" if kind == "KeyShared" else kind,
        "go_type": kind,
        "retries": policy.max_retries,
        "retry": policy.retry_topic,
        "dead_letter": policy.dead_letter_topic,
        "delay": int(policy.ladder.delay(1).total_seconds()),
    }
    yield _JAVA.format(**values)
    yield _GO.format(**values)


@click.command()
@_manifest_options
def policy(claims: list[Claim]) -> None:
    """Print the file that consumers mount, as the operator writes it into the ConfigMap.

    FILE is a file, a folder, or - for standard input. POLICY is the name of one RetryPolicy of it.
    """
    if len(claims) > 1:
        raise RedriveError(
            "a policy file is for one RetryPolicy",
            got=", ".join(claim.request.key.name for claim in claims),
            remedy="name one of them behind FILE",
        )
    click.echo(codec.encode(claims[0].request.policy), nl=False)


@click.command()
@_manifest_options
@broker_options(required=True)
@click.option("--dry-run", is_flag=True, help="Print the changes, and make none.")
def provision(claims: list[Claim], admin_url: str, access: Access, *, dry_run: bool) -> None:
    """Create topics, subscriptions and rights on a broker without an operator.

    FILE is a file, a folder, or - for standard input. POLICY is the name of one RetryPolicy of it.
    Topics of an operator are refused, and an operator refuses these topics. A second run changes
    only what has changed.
    """

    async def run() -> None:
        async with open_admin(admin_url, access) as admin:
            for claim in claims:
                actions = await provision_topics(claim, admin, dry_run=dry_run)
                click.echo(f"RetryPolicy {claim.request.key}")
                for action in actions:
                    click.echo(f"  {'would have ' if dry_run else ''}{action}")
                if not actions:
                    click.echo("  unchanged")

    asyncio.run(run())


@asynccontextmanager
async def open_admin(url: str, access: Access) -> AsyncIterator[Admin]:
    """Open a client of one broker."""
    async with Http.open() as http:
        yield Admin(http, url, access)


async def provision_topics(claim: Claim, admin: Admin, *, dry_run: bool) -> Sequence[Action]:
    """Bring the broker to the state that a policy asks for; return the actions.

    All checks come before the first write. After a crash the next run does the rest.

    Raises:
        RedriveError: a topic has another owner, or the broker refuses.
    """
    wanted = desired_of(claim, await admin.version())
    request = replace(claim.request, permissions=Permissions((_ALL,)))
    with admin.granting(request.policy.topic.namespace_name) as grant:
        observed = await observe_broker(wanted, admin)
        PREFLIGHT.check(Evidence(_body(claim), wanted, observed, request))
        actions = [
            action
            for action in diff(wanted, observed)
            if not isinstance(action, CreateConfigMap | PatchConfigMap)
        ]
        if dry_run:
            return actions
        applied = await apply(actions, Targets(admin, grant, kubernetes=None))
    for refused in applied.refused:
        click.echo(f"warning: not {refused.action}: {refused.error}", err=True)
    return applied.done


def desired_of(claim: Claim, release: tuple[int, ...] = ()) -> Desired:
    """Return the desired state of a policy, as the operator computes it.

    Args:
        claim: the policy.
        release: of the broker; empty where it is not known.
    """
    request = claim.request
    uid = str(uuid5(NAMESPACE_URL, f"redrive:{request.key}"))
    owned = replace(request, age=("", uid), permissions=Permissions((_ALL,)))
    return desired(owned, _body(claim), CLUSTER, release)


def _body(claim: Claim) -> dict[str, Any]:
    """Return the object of a policy with the identity that an API server would give it."""
    key = claim.request.key
    identity = {**key._asdict(), "uid": str(uuid5(NAMESPACE_URL, f"redrive:{key}"))}
    manifest = claim.manifest
    return {**manifest.body, "metadata": {**manifest.metadata, **identity}}


@click.command()
@click.argument("policy", metavar="POLICY|FILE", shell_complete=names_of("retrypolicies"))
@click.argument("name", metavar="[NAME]", required=False)
@broker_options(required=False)
@cluster_options
def rights(
    policy: str, name: str | None, flags: ClusterFlags, admin_url: str | None, access: Access
) -> None:
    """Show the rights that each Pulsar role needs, by topic.

    POLICY is the name of a RetryPolicy in the cluster. A FILE, whose name has a / or ends with
    .yaml or .json, or - for standard input, has RetryPolicies; NAME is one of several. With
    --admin-url a column shows the rights that are not granted at the broker.
    """
    claims = _claims_of(policy, name, flags)

    async def run() -> None:
        if admin_url is None:
            click.echo("\n".join(line for claim in claims for line in _granted(claim, None)))
            return
        async with open_admin(admin_url, access) as admin:
            for claim in claims:
                namespace = await around(claim.request.policy.topic, admin, max_age=0.0)
                click.echo("\n".join(_granted(claim, namespace.permissions)))

    asyncio.run(run())


def _granted(
    claim: Claim, permissions: Mapping[str, Mapping[str, frozenset[str]]] | None
) -> Iterator[str]:
    """Yield the rights of one policy as a table.

    Args:
        permissions: topic → role → actions at the broker; None where they were not read.
    """
    grants = sorted(desired_of(claim).grants, key=lambda grant: (grant.role, str(grant.topic)))
    yield f"RetryPolicy {claim.request.key}"
    if not grants:
        yield "  no rights: spec.consumerRoles is empty"
        return
    width = max(len(grant.role) for grant in grants)
    for grant in grants:
        missing = ""
        if permissions is not None:
            actions = grant.actions - permissions.get(str(grant.topic), {}).get(
                grant.role, frozenset()
            )
            missing = f"   missing: {_joined(actions)}" if actions else "   granted"
        yield f"  {grant.role:<{width}}  {_joined(grant.actions):<16}  {grant.topic}{missing}"


def _joined(actions: Iterable[str]) -> str:
    return ", ".join(sorted(actions))
