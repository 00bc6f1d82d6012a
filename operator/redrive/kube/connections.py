"""From a reference to the connection, its permissions, and the effective spec of a policy.

A `connectionRef` → the connection's spec and a client of its broker, or why there is none.

Called by every reconcile, of policies, replays and connections. Clients are kept, one for each
connection, so that reconciles share their batches. How credentials change without a restart is
described in `credentials`.

Labels of Kubernetes namespaces, for connections that choose namespaces by a selector.

Called by `connections`. A watch would need the right to list all namespaces of the cluster. So each
is read by name, which a Role in it can permit, and only those whose objects use such a connection:
when they are first asked for, and every `READ_SECONDS` from then on.

A RetryPolicy → its whole spec, with what it leaves to its connection; the one place for that.

Used by all that reads policies, of every journey. Each generation of a policy is read once with
each generation of its connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import TypeVar

from redrive.admin.client import Admin
from redrive.admin.guards import Breaker
from redrive.admin.http import Http
from redrive.admin.model import broker_at
from redrive.api import Body
from redrive.api.connection import BrokerConnectionSpec
from redrive.api.model import parse_spec
from redrive.api.permissions import AllowRule, Permissions
from redrive.api.policy_defaults import PolicyDefaults
from redrive.api.retrypolicy import ConnectionRef, RetryPolicySpec
from redrive.errors import InvalidSpecError, RedriveError
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.client import (
    ConnectionNotFoundError,
    Kubernetes,
    NamespaceUnreadError,
    NotFoundError,
    UnavailableError,
)
from redrive.kube.credentials import CredentialReader, KeptCredentials
from redrive.kube.observability import BREAKER_OPEN
from redrive.kube.resources import Key
from redrive.policy.model import Policy
from redrive.reasons import Reason

REMEMBERED = timedelta(minutes=15)
"""How long a connection that is gone serves what is deleted with it, which waits for less."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Connection:
    """A BrokerConnection that may be used, with a client that holds its token."""

    key: Key
    spec: BrokerConnectionSpec
    admin: Admin


def key_of(ref: ConnectionRef, namespace: str) -> Key:
    """Return which connection *ref* means in an object of *namespace*."""
    return Key(namespace if ref.namespace is None else ref.namespace, ref.name)


def find(
    ref: ConnectionRef, namespace: str, table: Cache, labels: NamespaceLabels
) -> BrokerConnectionSpec:
    """Return the spec of the connection that an object of *namespace* refers to.

    Raises:
        ConnectionNotFoundError: there is none of that name.
        ConnectionInvalid: its spec cannot be read.
        NamespaceNotAllowed: it is not for that namespace.
        RedriveError: whether it is can't be found out; see `NamespaceLabels.of`.
    """
    key = key_of(ref, namespace)
    spec = spec_at(key, table)
    if not permissions(spec, key, namespace, labels).rules:
        raise Reason.NAMESPACE_NOT_ALLOWED.error(
            f"the BrokerConnection {key} may not be used from this namespace",
            got=namespace,
            remedy="add the namespace to a rule of its spec.allow, or use another connection",
        )
    return spec


def shown_to(body: Body, error: RedriveError) -> RedriveError:
    """Return *error* as *body*, which refers to a connection, may show it.

    The Secrets and fields of a connection are for its own namespace alone.
    """
    connection = connection_of(body)
    if not error.private or connection.namespace == Key.of(body).namespace:
        return error
    return type(error)(
        f"the BrokerConnection {connection}, of another namespace, can't be used",
        got=error.reason,
        remedy="its own conditions say why; this resumes automatically once that is fixed",
    )


def permissions(
    spec: BrokerConnectionSpec, connection: Key, namespace: str, labels: NamespaceLabels
) -> Permissions:
    """Return what a connection permits to the objects of *namespace*.

    Raises:
        RedriveError: it takes labels to tell, which are not known; see `NamespaceLabels.of`.
    """
    known = labels.of(namespace) if spec.selects_namespaces else {}
    return spec.permissions(namespace, known, connection.namespace)


def may_use(connection: Key, namespace: str, table: Cache, labels: NamespaceLabels) -> bool:
    """Whether a connection is for objects of *namespace*, or that can't be found out."""
    try:
        return bool(permissions(spec_at(connection, table), connection, namespace, labels).rules)
    except RedriveError:
        return True


def rules_for(
    connection: Key, namespace: str, table: Cache, labels: NamespaceLabels
) -> tuple[AllowRule, ...]:
    """Return the rules of a connection for objects of *namespace*; none if they are unknown."""
    try:
        return permissions(spec_at(connection, table), connection, namespace, labels).rules
    except RedriveError:
        return ()


def selected_namespaces(connections: Cache, policies: Cache) -> set[str]:
    """Return the namespaces of policies whose connections choose namespaces by their labels."""
    return {
        Key.of(policy).namespace
        for body in connections
        if any("selector" in (rule.get("namespaces") or {}) for rule in _allow(body))
        for policy in users(Key.of(body), policies)
    }


def _allow(connection: Body) -> Iterable[Body]:
    return (connection.get("spec") or {}).get("allow") or ()


def users(connection: Key, objects: Cache) -> tuple[Body, ...]:
    """Return those of *objects* whose `connectionRef` means *connection*."""
    return objects.index(connection_of).get(connection)


def connection_of(body: Body) -> Key:
    """Return which connection the `connectionRef` of an object means.

    Its name is empty, as that of no connection is, in an object that is older than the schema that
    requires it.
    """
    ref = (body.get("spec") or {}).get("connectionRef") or {}
    return Key(ref.get("namespace", body["metadata"]["namespace"]), ref.get("name", ""))


def broker_of(connection: Key, connections: Cache) -> str | None:
    """Return the broker of a connection, as `broker_at` names it; None without the connection."""
    body = connections.get(connection)
    return None if body is None else broker_at(str(body["spec"]["pulsar"]["adminURL"]))


def defaults_of(connection: Key, connections: Cache) -> PolicyDefaults | None:
    """Return what a connection says of what its policies leave out; None where it can't be read."""
    try:
        return spec_at(connection, connections).policy_defaults
    except RedriveError:
        return None


class Connections:
    """The connections that the watches have shown, and a client for each that was used."""

    def __init__(
        self,
        table: Cache,
        http: Http,
        reader: CredentialReader,
        clock: Callable[[], datetime],
        labels: NamespaceLabels,
    ) -> None:
        self._table = table
        self._labels = labels
        self._http = http
        self._reader = reader
        self._clock = clock
        self._credentials: dict[Key, tuple[object, KeptCredentials]] = {}
        self._admins: dict[Key, Admin] = {}
        self._opened: dict[Key, Connection] = {}
        self._gone: dict[Key, datetime] = {}
        self._breakers: dict[Key, tuple[str, Breaker]] = {}
        self._listeners: list[Callable[[Key], None]] = []
        table.listen(self._forget)

    def listen(self, listener: Callable[[Key], None]) -> None:
        """Call *listener* when a connection's broker stops answering, and when it answers again."""
        self._listeners.append(listener)

    async def resolve(self, ref: ConnectionRef, namespace: str) -> Connection:
        """Return the connection that an object of *namespace* refers to, ready to be used.

        Raises:
            RedriveError: as `find` does; or `SecretNotFoundError`, `SecretKeyNotFoundError`,
                `ForbiddenError` where its token cannot be read.
        """
        return await self._open(
            key_of(ref, namespace), find(ref, namespace, self._table, self._labels)
        )

    async def open(self, key: Key) -> Connection:
        """Return the connection *key*, ready to be used, for a look at itself.

        Raises:
            RedriveError: as `resolve` does.
        """
        return await self._open(key, spec_at(key, self._table))

    def remembered(self, ref: ConnectionRef, namespace: str) -> Connection | None:
        """Return the connection as it was when it was last used, were it gone since.

        For what is deleted together with its connection, or with the Secret: a namespace is
        emptied in no order. One that is gone for long, and its credentials, are forgotten.
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
        if self._table.get(key) is None:  # it went meanwhile
            self._gone[key] = self._clock()
        else:
            self._gone.pop(key, None)
        self._forget_long_gone()
        return opened

    def _credentials_of(self, key: Key, spec: BrokerConnectionSpec) -> KeptCredentials:
        """Return what is kept for the connection as it is; other references are other ones."""
        broker = spec.pulsar
        references = broker.authentication, broker.tls, broker.redirect_hosts
        kept = self._credentials.get(key)
        if kept is None or kept[0] != references:
            read = partial(self._reader.read, key.namespace, spec)
            credentials = KeptCredentials(read, hosts=broker.redirect_hosts)
            kept = self._credentials[key] = references, credentials
        return kept[1]

    def _admin(self, key: Key, admin_url: str, credentials: KeptCredentials) -> Admin:
        """Return the one client that reconciles share: batches form only within one client."""
        admin = self._admins.get(key)
        if admin is None or not admin.is_for(admin_url, credentials):
            breaker = self._breaker(key, admin_url)
            admin = self._admins[key] = Admin(
                self._http, admin_url, credentials, breaker, namespace=key.namespace
            )
        return admin

    def _breaker(self, key: Key, admin_url: str) -> Breaker:
        """Return a connection's breaker, which outlives a token; another broker has another."""
        known = self._breakers.get(key)
        if known is None or known[0] != admin_url:

            def changed() -> None:
                self._show_breaker(key)
                logger.warning(
                    "BrokerConnection %s: the broker %s",
                    key,
                    "does not answer, and is left alone" if breaker.is_open else "answers again",
                )
                for listener in self._listeners:
                    listener(key)

            breaker = Breaker(admin_url, self._clock, changed)
            known = self._breakers[key] = admin_url, breaker
        self._show_breaker(key)
        return known[1]

    def _show_breaker(self, key: Key) -> None:
        """Show a connection's breaker in the metrics, as long as there is that connection.

        A call may still be under way from before a connection was deleted or its adminURL changed.
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
            self._admins.pop(key, None)  # made while it went
            self._breakers.pop(key, None)


def spec_at(key: Key, table: Cache) -> BrokerConnectionSpec:
    """Read the spec of a connection.

    Raises:
        ConnectionNotFoundError: it does not exist.
        ConnectionInvalid: its spec is invalid.
    """
    body = table.get(key)
    if body is None:
        raise ConnectionNotFoundError(
            "the BrokerConnection of connectionRef does not exist",
            got=str(key),
            remedy="create it, or correct the connectionRef",
        )
    try:
        return table.derive(_parsed, body)
    except InvalidSpecError as error:
        raise Reason.CONNECTION_INVALID.error(
            f"the BrokerConnection {key} has an invalid spec: {error}",
            remedy="correct it; what uses it resumes automatically then",
        ) from error


def _parsed(body: Body) -> BrokerConnectionSpec:
    return parse_spec(BrokerConnectionSpec, body)


READ_SECONDS = 30.0
"""How old labels are at most: a namespace that loses one loses what it permits within that time."""

Labels = Mapping[str, str]
L = TypeVar("L", bound=Callable[[str], None])


class NamespaceLabels:
    """The labels of the namespaces that were asked for, as last read."""

    def __init__(self, kubernetes: Kubernetes) -> None:
        self._kubernetes = kubernetes
        self._known: dict[str, Labels | RedriveError] = {}
        self._asked = asyncio.Event()
        self._listeners: list[Callable[[str], None]] = []

    def listen(self, listener: L) -> L:
        """Call *listener* with each namespace whose labels have changed; usable as a decorator."""
        self._listeners.append(listener)
        return listener

    def of(self, namespace: str) -> Labels:
        """Return the labels of a namespace.

        Raises:
            NamespaceUnreadError: they were not read yet; listeners are called once they are.
            KubernetesError: they can't be read.
        """
        found = self._known.setdefault(namespace, _unread(namespace))
        if isinstance(found, NamespaceUnreadError):
            self._asked.set()
        if isinstance(found, RedriveError):
            raise found
        return found

    async def read(self, namespaces: Iterable[str]) -> None:
        """Read the labels of *namespaces*; a failure is for those who ask for them."""
        for namespace in sorted(namespaces):
            try:
                body = await self._kubernetes.get(resources.NAMESPACES, Key("", namespace))
            except UnavailableError as error:
                logger.info("labels of the namespace %s: %s", namespace, error)
                continue  # what was read before stays in use
            except NotFoundError:
                self._known.pop(namespace, None)
                continue
            except RedriveError as error:
                self._put(namespace, error)
            else:
                self._put(namespace, body["metadata"].get("labels") or {})

    def _put(self, namespace: str, found: Labels | RedriveError) -> None:
        before = self._known.get(namespace)
        self._known[namespace] = found
        if before != found:
            for listener in self._listeners:
                listener(namespace)

    async def _read_for_ever(self) -> None:
        while True:
            self._asked.clear()
            try:
                await self.read(tuple(self._known))
            except Exception:
                logger.exception("labels of namespaces: failed")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), READ_SECONDS)


def _unread(namespace: str) -> NamespaceUnreadError:
    return NamespaceUnreadError(
        "the labels of this Kubernetes namespace, which a selector of the connection is about, "
        "were not read yet",
        got=namespace,
        remedy="wait a second: it resumes automatically",
    )


@asynccontextmanager
async def following(kubernetes: Kubernetes) -> AsyncIterator[NamespaceLabels]:
    """Keep labels up to date while the block runs."""
    labels = NamespaceLabels(kubernetes)
    task = asyncio.create_task(labels._read_for_ever(), name="namespaces")  # noqa: SLF001
    try:
        yield labels
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def spec_of(body: Body, policies: Cache) -> RetryPolicySpec:
    """Read the spec of a RetryPolicy as it is written: what it leaves out is left out.

    Raises:
        InvalidSpecError: it can't be obeyed.
    """
    return policies.derive(_parsed_policy, body)


def effective_spec(body: Body, policies: Cache, defaults: PolicyDefaults | None) -> RetryPolicySpec:
    """Read the whole spec of a RetryPolicy.

    Args:
        defaults: what its connection says of what it leaves out.

    Raises:
        InvalidSpecError: it can't be obeyed.
    """
    return policies.derive(_effective, body, spec_of(body, policies), defaults)


def policy_of(body: Body, policies: Cache, spec: RetryPolicySpec) -> Policy:
    """Return what consumers and replays need of a RetryPolicy.

    Args:
        spec: the whole spec.

    Raises:
        InvalidSpecError: its values can't make a policy together.
    """
    return policies.derive(_policy, body, spec)


def _parsed_policy(body: Body) -> RetryPolicySpec:
    return parse_spec(RetryPolicySpec, body)


def _effective(_: Body, spec: RetryPolicySpec, defaults: PolicyDefaults | None) -> RetryPolicySpec:
    return spec.completed(defaults)


def _policy(body: Body, spec: RetryPolicySpec) -> Policy:
    return spec.to_policy(str(Key.of(body)), body["metadata"]["generation"])
