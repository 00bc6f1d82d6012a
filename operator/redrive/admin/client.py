"""`Admin`: the calls of redrive to a broker, one method each; those about a topic are inherited.

Called by `provision` to observe and apply, and by `replay` to learn where a topic ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from redrive.admin import answers
from redrive.admin.access import Credentials
from redrive.admin.acknowledgements import AckPersistence
from redrive.admin.answer_limits import LONG
from redrive.admin.breaker import Breaker
from redrive.admin.cached_reads import CachedRead
from redrive.admin.errors import (
    AdminForbiddenError,
    AdminNotFoundError,
    AuthenticationFailedError,
    UnsupportedError,
)
from redrive.admin.granting import Granter, Granting, Permissions
from redrive.admin.http import Call, Http
from redrive.admin.model import NamespaceState
from redrive.admin.paths import quoted
from redrive.admin.policies import (
    KeepsBacklog,
    Quotas,
    default_quotas,
    size_limit,
)
from redrive.admin.topic_calls import TopicCalls
from redrive.policy.naming import TopicName

PROBE_SECONDS = 10.0
"""How long a probe waits for its answer: a broker that is back is found by the next one."""
VERSION_SECONDS = 60.0
"""How old what is known of a broker's release may be."""
CONFIGURATION_SECONDS = 3_600.0
"""How old what is known of a broker's configuration may be: it changes with a restart."""


class Admin(TopicCalls):
    """A client of one broker, acting as the role of its token.

    Reads of a namespace and grants in it are batched: concurrent callers share one call. So share
    the client too.

    Args:
        http: makes the calls.
        admin_url: where the broker's admin API answers.
        credentials: of the role to act as.
        breaker: fails calls at once while the broker does not answer; None lets all pass.
    """

    def __init__(
        self, http: Http, admin_url: str, credentials: Credentials, breaker: Breaker | None = None
    ) -> None:
        super().__init__(http, admin_url, credentials, breaker)
        self._version = CachedRead(self._read_version)
        self._configuration = CachedRead(self._read_configuration)
        self._tenants: dict[str, CachedRead[frozenset[str]]] = {}
        self._namespaces: dict[str, CachedRead[NamespaceState]] = {}
        self._grantings: dict[str, Granting] = {}

    async def clusters(self) -> frozenset[str]:
        """Return the names of the broker's clusters, which any role may read.

        This call is the probe: it goes out even where the broker has been silent.

        Raises:
            AuthenticationFailedError: the broker rejects the token.
        """
        call = Call("list the clusters", "GET", "clusters", seconds=PROBE_SECONDS)
        return await self._ask(call, frozenset[str], probe=True)

    async def version(self) -> tuple[int, ...]:
        """Return the broker's release as numbers, such as (4, 0, 8), read once in a minute.

        Empty where it does not tell, as behind some proxies, or is none of Pulsar's.

        Raises:
            AdminError: it does not answer, or rejects the token.
        """
        return await self._version.get(max_age=VERSION_SECONDS)

    async def _read_version(self) -> tuple[int, ...]:
        call = Call("read the version", "GET", "brokers/version", as_text=True)
        try:
            return answers.version(await self._send(call))
        except (AdminForbiddenError, AdminNotFoundError, UnsupportedError):
            return ()

    async def ack_persistence(self) -> AckPersistence:
        """Return what the broker remembers of acknowledgements, read once in an hour.

        By its configuration, which a super-user may read, else by the defaults of its release. Of
        several brokers it is that of the one which answers.

        Raises:
            AdminError: it does not answer, or rejects the token.
        """
        found, _ = await self._configuration.get(max_age=CONFIGURATION_SECONDS)
        return found

    async def default_backlog_quota(self) -> int | None:
        """Return the bytes of backlog that the broker permits a topic without a quota.

        Read as `ack_persistence` is; None where it sets no limit, or the role may not read it.

        Raises:
            AdminError: it does not answer, or rejects the token.
        """
        _, quotas = await self._configuration.get(max_age=CONFIGURATION_SECONDS)
        return size_limit(quotas)

    async def quotas_in_force(self, topic: TopicName) -> Quotas:
        """Return the backlog quotas of a topic: its own, its namespace's or the broker's default.

        The default is known to super-users alone. For others it is left out: what a topic's quotas
        read with `applied=true` return would have the broker write it into the namespace.

        Raises:
            AdminNotFoundError: there is no such topic.
        """
        own = await self.topic_policy(topic, KeepsBacklog())
        inherited = (await self.namespace(topic.namespace_name)).backlog_quotas
        _, defaults = await self._configuration.get(max_age=CONFIGURATION_SECONDS)
        return {**defaults, **inherited, **(own or {})}

    async def _read_configuration(self) -> tuple[AckPersistence, Quotas]:
        release = await self.version()
        path = "brokers/configuration/runtime"
        try:
            return await self._get(
                "read the configuration",
                path,
                lambda found: (AckPersistence.of(found, release), default_quotas(found)),
            )
        except (
            AdminForbiddenError,
            AdminNotFoundError,
            AuthenticationFailedError,  # so a broker says that the role is no super-user
            UnsupportedError,
        ):
            return AckPersistence.of({}, release), {}

    async def tenant_exists(self, tenant: str, *, max_age: float = 0.0) -> bool:
        """Whether there is such a tenant, or was at most so many seconds ago."""
        if tenant not in self._tenants:
            self._tenants[tenant] = CachedRead(lambda: self._namespaces_of(tenant))
        try:
            await self._tenants[tenant].get(max_age=max_age)
        except AdminNotFoundError:
            return False
        return True

    async def namespace(self, namespace: str, *, max_age: float = 0.0) -> NamespaceState:
        """Read the topics and permissions of a Pulsar namespace, `tenant/namespace`: three calls.

        Args:
            max_age: what was read so many seconds ago, or later, is not read again.

        Raises:
            AdminNotFoundError: the tenant or the namespace does not exist, or did not then.
        """
        if namespace not in self._namespaces:
            self._namespaces[namespace] = CachedRead(lambda: self._read(namespace))
        return await self._namespaces[namespace].get(max_age=max_age)

    async def topics(self, namespace: str) -> tuple[frozenset[str], frozenset[str]]:
        """Return the topics of a Pulsar namespace without partitions, and those with any.

        Among the first are the single partitions of the second. It takes two calls.

        Raises:
            AdminNotFoundError: the tenant or the namespace does not exist.
        """
        does, path = f"list the topics of {namespace}", f"persistent/{quoted(namespace)}"
        unpartitioned, partitioned = await asyncio.gather(
            self._get(does, path, frozenset[str], LONG),
            self._get(does, f"{path}/partitioned", frozenset[str], LONG),
        )
        return unpartitioned, partitioned

    @contextmanager
    def granting(self, namespace: str) -> Iterator[Granter]:
        """Announce that rights on topics of one namespace may be changed within the block.

        What this yields changes rights, once. It waits for others that are announced, while they
        keep coming, and goes out with them in one call. It raises an `AdminError` if one of its
        changes was refused; the others may have been made.
        """
        if namespace not in self._grantings:
            self._grantings[namespace] = Granting(
                namespace,
                self._send,
                lambda: self._permissions(namespace),
                lambda: self.namespace(namespace),
            )
        with self._grantings[namespace].announced() as grant:
            yield grant

    async def _namespaces_of(self, tenant: str) -> frozenset[str]:
        does = f"list the namespaces of tenant {tenant}"
        return await self._get(does, f"namespaces/{quoted(tenant)}", frozenset[str])

    async def _permissions(self, namespace: str) -> Permissions:
        does, path = f"read the rights in {namespace}", f"namespaces/{quoted(namespace)}"
        return await self._get(
            does, path, lambda found: answers.policies(found)["permissions"], LONG
        )

    async def _read(self, namespace: str) -> NamespaceState:
        does = f"read namespace {namespace}"
        topics, policies = await asyncio.gather(
            self.topics(namespace),
            self._get(does, f"namespaces/{quoted(namespace)}", answers.policies, LONG),
        )
        return NamespaceState(*topics, **policies)
