"""Connections of objects, their permissions and clients, and the effective spec of a policy.

`Connections` resolves a `connectionRef` to the connection's spec and a client of its broker. There
is one client for each connection, so that reconciles share batches. `credentials` reads its
credentials, and follows their rotation.

`NamespaceLabels` reads the labels of Kubernetes namespaces for connections that select namespaces.
A watch would need the permission to list all namespaces of the cluster. So each namespace is read
by name, which a Role can permit: at the first request, and every `READ_SECONDS` from then on.

`effective_spec` completes the spec of a RetryPolicy with the defaults of its connection. It is
computed once for each generation of the policy and of the connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import ClassVar, TypeVar

from redrive.admin.client import Admin
from redrive.admin.connector import Dialer
from redrive.admin.guards import Breaker, Fence
from redrive.admin.http import Http
from redrive.admin.model import PULSAR_RELEASES, broker_at
from redrive.admin.rocketmq import RocketMQAdmin
from redrive.api import Body
from redrive.api.connection import BrokerConnectionSpec
from redrive.api.model import parse_spec
from redrive.api.permissions import NAMESPACE, NamespaceRule, Permissions
from redrive.api.policy_defaults import PolicyDefaults
from redrive.api.retrypolicy import ConnectionRef, RetryPolicySpec
from redrive.api.rocketmq import RocketMQCluster, RocketMQRule
from redrive.errors import InvalidSpecError, RedriveError
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.client import Kubernetes, NotFoundError, ReferenceNotFoundError, UnavailableError
from redrive.kube.credentials import CredentialReader, KeptCredentials
from redrive.kube.observability import BREAKER_OPEN, in_background
from redrive.kube.resources import Key
from redrive.kube.rocketmq import RocketMQConnection, cluster_of, not_allowed, rules_at
from redrive.policy.model import Policy
from redrive.reasons import Reason

REMEMBERED = timedelta(minutes=15)
"""Time for which a deleted connection still serves objects that are deleted together with it."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Connection:
    """A BrokerConnection that may be used, with an authenticated client."""

    key: Key
    spec: BrokerConnectionSpec
    admin: Admin
    supported: ClassVar = PULSAR_RELEASES

    async def probe(self) -> tuple[int, ...]:
        """Check that the broker accepts the credentials, with rights in each tenant of spec.allow.

        Returns:
            The release of the broker; empty if unknown.

        Raises:
            AdminError: the broker does not answer, or refuses the call.
            TenantNotFound: a tenant of spec.allow does not exist.
        """
        await self.admin.clusters()
        patterns = (pattern for rule in self.spec.allow for pattern in rule.topics)
        tenants = {pattern.split("/")[2] for pattern in patterns}
        for tenant in sorted(t for t in tenants if "*" not in t and NAMESPACE not in t):
            if not await self.admin.tenant_exists(tenant):
                raise Reason.TENANT_NOT_FOUND.error(
                    "a tenant of the topics in spec.allow does not exist",
                    got=tenant,
                    remedy="create it, or remove the pattern",
                )
        await self.admin.read_settings()  # for its policies
        return await self.admin.version()


def key_of(ref: ConnectionRef, namespace: str) -> Key:
    """Return the connection of *ref* in an object of *namespace*."""
    return Key(namespace if ref.namespace is None else ref.namespace, ref.name)


def find(
    ref: ConnectionRef, namespace: str, table: Cache, labels: NamespaceLabels
) -> BrokerConnectionSpec:
    """Return the spec of the connection that an object of *namespace* refers to.

    Raises:
        ReferenceNotFoundError: the connection does not exist.
        ConnectionInvalid: its spec is invalid.
        NamespaceNotAllowed: it does not allow that namespace.
        RedriveError: the labels of the namespace are unknown; see `NamespaceLabels.of`. Or the
            connection is for RocketMQ.
    """
    return find_at(key_of(ref, namespace), namespace, table, labels)


def find_at(
    key: Key, namespace: str, table: Cache, labels: NamespaceLabels
) -> BrokerConnectionSpec:
    """Return the spec of the connection *key* for an object of *namespace*; raises as `find`."""
    spec = spec_at(key, table)
    _ = spec.pulsar  # an error if it is for another broker
    if not permissions(spec, key, namespace, labels).rules:
        raise not_allowed(key, namespace, "spec.allow")
    return spec


def rocketmq_at(
    key: Key, namespace: str, table: Cache, labels: NamespaceLabels
) -> tuple[RocketMQCluster, tuple[RocketMQRule, ...]]:
    """Return the cluster of the connection *key*, and its rules for an object of *namespace*.

    Raises:
        RedriveError: as `find_at` does, or the connection is for Pulsar.
    """
    spec = spec_at(key, table)
    cluster = cluster_of(spec, key)
    selected = labels.of(namespace) if spec.selects_namespaces else {}
    return cluster, rules_at(spec, key, namespace, selected)


def shown_to(body: Body, error: RedriveError) -> RedriveError:
    """Return *error* in the form that *body*, which refers to a connection, may show.

    Secrets and fields of a connection are visible in its own namespace only.
    """
    connection = connection_of(body)
    is_private = error.names_object or Reason.of(error).private
    if not is_private or connection.namespace == Key.of(body).namespace:
        return error
    return type(error)(
        f"the BrokerConnection {connection} of another namespace cannot be used",
        got=error.reason,
        remedy="its conditions show the cause; this resumes automatically once it is fixed",
        reason=error.reason,
    )


def permissions(
    spec: BrokerConnectionSpec, connection: Key, namespace: str, labels: NamespaceLabels
) -> Permissions:
    """Return the permissions that a connection gives to objects of *namespace*.

    Raises:
        RedriveError: it needs labels that are unknown; see `NamespaceLabels.of`.
    """
    selected = labels.of(namespace) if spec.selects_namespaces else {}
    return spec.permissions(namespace, selected, connection.namespace)


def rules_for(
    connection: Key, namespace: str, table: Cache, labels: NamespaceLabels
) -> tuple[NamespaceRule, ...] | None:
    """Return the rules of a connection for objects of *namespace*; None if unknown."""
    try:
        spec = spec_at(connection, table)
        selected = labels.of(namespace) if spec.selects_namespaces else {}
    except RedriveError:
        return None
    return tuple(r for r in spec.rules if r.is_for(namespace, selected, connection.namespace))


def selected_namespaces(connections: Cache, policies: Cache) -> set[str]:
    """Return the namespaces of policies whose connections select namespaces by labels."""
    return {
        Key.of(policy).namespace
        for body in connections
        if any("selector" in (rule.get("namespaces") or {}) for rule in written_rules(body))
        for policy in users(Key.of(body), policies)
    }


def written_rules(connection: Body) -> Sequence[Body]:
    """Return the rules in the spec of a connection, as they are written."""
    spec = connection.get("spec") or {}
    return spec.get("allow") or (spec.get("rocketmq") or {}).get("allow") or ()


def users(connection: Key, objects: Cache) -> tuple[Body, ...]:
    """Return the objects among *objects* whose `connectionRef` is *connection*."""
    return objects.index(connection_of).get(connection)


def connection_at(key: Key, objects: Cache) -> Key | None:
    """Return the connection of an object; None if the object is gone."""
    body = objects.get(key)
    return None if body is None else connection_of(body)


def connection_of(body: Body) -> Key:
    """Return the connection of an object.

    An object that is older than the required `connectionRef` gets an empty name, which no
    connection has.
    """
    ref = (body.get("spec") or {}).get("connectionRef") or {}
    return Key(ref.get("namespace", body["metadata"]["namespace"]), ref.get("name", ""))


def broker_of(connection: Key, connections: Cache) -> str | None:
    """Return the broker of a connection, as `broker_at` names it; None if it is not of Pulsar."""
    return broker_in(connections.get(connection) or {})


def broker_in(connection: Body) -> str | None:
    """Return the broker in the body of a connection, as `broker_of` does."""
    pulsar = (connection.get("spec") or {}).get("pulsar")
    return broker_at(str(pulsar["adminURL"])) if pulsar else None


def defaults_of(connection: Key, connections: Cache) -> PolicyDefaults | None:
    """Return the defaults that a connection sets for its policies; None if it is unreadable."""
    try:
        return spec_at(connection, connections).policy_defaults
    except RedriveError:
        return None


class Connections:
    """All connections, and a client for each that was used."""

    def __init__(  # noqa: PLR0913, PLR0917  parts of the operator
        self,
        table: Cache,
        http: Http,
        reader: CredentialReader,
        clock: Callable[[], datetime],
        labels: NamespaceLabels,
        fence: Fence | None = None,
    ) -> None:
        self._table = table
        self._labels = labels
        self._http = http
        self._reader = reader
        self._clock = clock
        self._fence = fence
        self._dialer = Dialer()
        self._credentials: dict[Key, tuple[object, KeptCredentials]] = {}
        self._admins: dict[Key, Admin] = {}
        self._opened: dict[Key, Connection] = {}
        self._gone: dict[Key, datetime] = {}
        self._breakers: dict[Key, tuple[str, Breaker]] = {}
        self._listeners: list[Callable[[Key], None]] = []
        table.listen(self._forget)

    def listen(self, listener: Callable[[Key], None]) -> None:
        """Call *listener* when a connection's breaker opens or closes."""
        self._listeners.append(listener)

    async def resolve(self, ref: ConnectionRef, namespace: str) -> Connection:
        """Return the connection that an object of *namespace* refers to, ready to use.

        Raises:
            RedriveError: as `find` does; or `ReferenceNotFoundError` or
                `ForbiddenError` if its credentials cannot be read.
        """
        return await self._open(
            key_of(ref, namespace), find(ref, namespace, self._table, self._labels)
        )

    async def rocketmq(self, key: Key, namespace: str) -> RocketMQConnection:
        """Return the connection *key*, as an object of *namespace* may use it.

        Raises:
            RedriveError: as `rocketmq_at` does; or its credentials cannot be read.
        """
        _, rules = rocketmq_at(key, namespace, self._table, self._labels)
        return replace(await self._open_rocketmq(key, spec_at(key, self._table)), rules=rules)

    async def _open_rocketmq(self, key: Key, spec: BrokerConnectionSpec) -> RocketMQConnection:
        credentials = self._credentials_of(key, spec)
        await credentials.refresh()
        cluster = cluster_of(spec, key)
        admin = RocketMQAdmin(
            cluster.name_servers,
            credentials,
            cluster=cluster.cluster,
            broker_hosts=cluster.broker_hosts,
            fence=self._fence,
            dialer=self._dialer,
            namespace=key.namespace,
            name=key.name,
        )
        return RocketMQConnection(key, admin, has_replays=cluster.replay is not None)

    async def open_any(self, key: Key) -> Connection | RocketMQConnection:
        """Return the connection *key* to a broker of any kind, ready to use.

        Raises:
            RedriveError: as `resolve` does.
        """
        spec = spec_at(key, self._table)
        return await (
            self._open(key, spec) if spec.rocketmq is None else self._open_rocketmq(key, spec)
        )

    async def open(self, key: Key) -> Connection:
        """Return the connection *key*, ready to use, regardless of namespaces.

        Raises:
            RedriveError: as `resolve` does.
        """
        return await self._open(key, spec_at(key, self._table))

    def remembered(self, ref: ConnectionRef, namespace: str) -> Connection | None:
        """Return the connection as it was last used, even if it was deleted since.

        For objects that are deleted together with their connection or its Secret: a namespace is
        emptied in no particular order. Deleted connections are forgotten after `REMEMBERED`.
        """
        self._forget_long_gone()
        last = self._opened.get(key_of(ref, namespace))
        if last is None:
            return None
        return last if permissions(last.spec, last.key, namespace, self._labels).rules else None

    async def _open(self, key: Key, spec: BrokerConnectionSpec) -> Connection:
        credentials = self._credentials_of(key, spec)
        await credentials.refresh()
        admin = self._admin(key, spec.pulsar.admin_url, credentials)
        opened = self._opened[key] = Connection(key, spec, admin)
        if self._table.get(key) is None:  # deleted meanwhile
            self._gone[key] = self._clock()
        else:
            self._gone.pop(key, None)
        self._forget_long_gone()
        return opened

    def _credentials_of(self, key: Key, spec: BrokerConnectionSpec) -> KeptCredentials:
        """Return the cached credentials of a connection; other references are read from scratch."""
        broker = spec.rocketmq or spec.pulsar
        hosts = () if spec.rocketmq else spec.pulsar.redirect_hosts
        references = broker.authentication, broker.tls, hosts
        kept = self._credentials.get(key)
        if kept is None or kept[0] != references:
            read = partial(self._reader.read, key.namespace, spec)
            credentials = KeptCredentials(read, hosts=hosts)
            kept = self._credentials[key] = references, credentials
        return kept[1]

    def _admin(self, key: Key, admin_url: str, credentials: KeptCredentials) -> Admin:
        """Return the client of a connection, which reconciles share for their batches."""
        admin = self._admins.get(key)
        if admin is None or not admin.is_for(admin_url, credentials):
            breaker = self._breaker(key, admin_url)
            admin = self._admins[key] = Admin(
                self._http, admin_url, credentials, breaker, namespace=key.namespace
            )
        return admin

    def _breaker(self, key: Key, admin_url: str) -> Breaker:
        """Return the breaker of a connection and broker; it outlives a token."""
        current = self._breakers.get(key)
        if current is None or current[0] != admin_url:

            def changed() -> None:
                self._show_breaker(key)
                logger.warning(
                    "BrokerConnection %s: the broker %s",
                    key,
                    "does not answer; calls are suspended" if breaker.is_open else "answers again",
                )
                for listener in self._listeners:
                    listener(key)

            breaker = Breaker(admin_url, self._clock, changed)
            current = self._breakers[key] = admin_url, breaker
        self._show_breaker(key)
        return current[1]

    def _show_breaker(self, key: Key) -> None:
        """Show the breaker of an existing connection in the metrics.

        A call may have started before a connection was deleted or its adminURL changed.
        """
        if self._table.get(key) is not None and key in self._breakers:
            BREAKER_OPEN.labels(*key).set(self._breakers[key][1].is_open)

    def _forget(self, key: Key, _before: Body | None, after: Body | None) -> None:
        if after is None:
            self._credentials.pop(key, None)
            self._gone[key] = self._clock()
            self._admins.pop(key, None)
            if self._breakers.pop(key, None) is not None:
                BREAKER_OPEN.remove(*key)
            self._forget_long_gone()

    def _forget_long_gone(self) -> None:
        now = self._clock()
        for key in [key for key, since in self._gone.items() if now - since >= REMEMBERED]:
            del self._gone[key]
            self._opened.pop(key, None)
            self._admins.pop(key, None)  # created during the deletion
            self._breakers.pop(key, None)


def _parsed(body: Body) -> BrokerConnectionSpec:
    return parse_spec(BrokerConnectionSpec, body)


def spec_at(key: Key, table: Cache) -> BrokerConnectionSpec:
    """Read the spec of a connection.

    Raises:
        ReferenceNotFoundError: it does not exist.
        ConnectionInvalid: its spec is invalid.
    """
    body = table.get(key)
    if body is None:
        raise ReferenceNotFoundError(
            "the BrokerConnection of connectionRef does not exist",
            got=str(key),
            remedy="create it, or correct the connectionRef",
            reason=Reason.CONNECTION_NOT_FOUND,
        )
    try:
        return table.derive(_parsed, body)
    except InvalidSpecError as error:
        raise Reason.CONNECTION_INVALID.error(
            f"the BrokerConnection {key} has an invalid spec: {error}",
            remedy="correct it; dependent objects are reconciled automatically",
        ) from error


READ_SECONDS = 30.0
"""Maximum age of labels. A namespace that loses a label loses its permissions within that time."""

Labels = Mapping[str, str]
L = TypeVar("L", bound=Callable[[str], None])


class NamespaceLabels:
    """Labels of the requested namespaces, as last read."""

    def __init__(self, kubernetes: Kubernetes) -> None:
        self._kubernetes = kubernetes
        self._labels: dict[str, Labels | RedriveError] = {}
        self._asked = asyncio.Event()
        self._listeners: list[Callable[[str], None]] = []

    def listen(self, listener: L) -> L:
        """Call *listener* with each namespace whose labels changed; usable as a decorator."""
        self._listeners.append(listener)
        return listener

    def of(self, namespace: str) -> Labels:
        """Return the labels of a namespace.

        Raises:
            RedriveError: they were not read yet; listeners are called after the read.
            KubernetesError: they cannot be read.
        """
        labels = self._labels.setdefault(namespace, _unread(namespace))
        if isinstance(labels, RedriveError):
            if labels.reason is Reason.NAMESPACE_UNREAD:
                self._asked.set()
            raise labels
        return labels

    async def read(self, namespaces: Iterable[str]) -> None:
        """Read the labels of *namespaces*; `of` raises the failures."""
        for namespace in sorted(namespaces):
            try:
                body = await self._kubernetes.get(resources.NAMESPACES, Key("", namespace))
            except UnavailableError as error:
                logger.info("labels of the namespace %s: %s", namespace, error)
                continue  # the earlier labels stay in use
            except NotFoundError:
                self._labels.pop(namespace, None)
                continue
            except RedriveError as error:
                self._put(namespace, error)
            else:
                self._put(namespace, body["metadata"].get("labels") or {})

    def _put(self, namespace: str, labels: Labels | RedriveError) -> None:
        before = self._labels.get(namespace)
        self._labels[namespace] = labels
        if before != labels:
            for listener in self._listeners:
                listener(namespace)

    async def _poll(self) -> None:
        while True:
            self._asked.clear()
            try:
                await self.read(tuple(self._labels))
            except Exception:
                logger.exception("labels of namespaces: failed")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), READ_SECONDS)


def _unread(namespace: str) -> RedriveError:
    return Reason.NAMESPACE_UNREAD.error(
        "the labels of this Kubernetes namespace, which a selector of the connection needs, were "
        "not read yet",
        got=namespace,
        remedy="No action needed: labels are read within a second",
    )


@asynccontextmanager
async def following(kubernetes: Kubernetes) -> AsyncIterator[NamespaceLabels]:
    """Keep labels up to date while the block runs."""
    labels = NamespaceLabels(kubernetes)
    async with in_background(labels._poll(), "namespaces"):  # noqa: SLF001
        yield labels


def _parsed_policy(body: Body) -> RetryPolicySpec:
    return parse_spec(RetryPolicySpec, body)


def spec_of(body: Body, policies: Cache) -> RetryPolicySpec:
    """Return the spec of a RetryPolicy as written, without defaults of its connection.

    Raises:
        InvalidSpecError: the spec is invalid.
    """
    return policies.derive(_parsed_policy, body)


def effective_spec(body: Body, policies: Cache, defaults: PolicyDefaults | None) -> RetryPolicySpec:
    """Return the complete spec of a RetryPolicy.

    Args:
        defaults: defaults of its connection.

    Raises:
        InvalidSpecError: the spec is invalid.
    """
    return policies.derive(_effective, body, spec_of(body, policies), defaults)


def policy_of(body: Body, policies: Cache, spec: RetryPolicySpec) -> Policy:
    """Return the policy of a RetryPolicy for consumers and Replays.

    Args:
        spec: the complete spec.

    Raises:
        InvalidSpecError: its values contradict each other.
    """
    return policies.derive(_policy, body, spec)


def _effective(_: Body, spec: RetryPolicySpec, defaults: PolicyDefaults | None) -> RetryPolicySpec:
    return spec.completed(defaults)


def _policy(body: Body, spec: RetryPolicySpec) -> Policy:
    return spec.to_policy(str(Key.of(body)), body["metadata"]["generation"])
