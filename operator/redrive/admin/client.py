"""The Pulsar admin client: one method for each call.

How a call to a broker is made: with credentials in force, and not where no answer will come.

Read statistics and subscriptions of each partition of a topic, as a broker keeps them.

Called by `client`. A broker's answer for a partitioned topic as a whole is only a union: a
subscription that one partition lacks, so that what is published there is lost, looks as if it were
there. So all partitions are read, in one call.

The calls about one topic, one method each; `client.Admin` has them.

`Admin`: the calls of redrive to a broker, one method each; those about a topic are inherited.

Called by `provision` to observe and apply, and by `replay` to learn where a topic ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from redrive.admin.errors import (
    AdminForbiddenError,
    AdminNotFoundError,
    AuthenticationFailedError,
    UnsupportedError,
)
from redrive.admin.granting import CachedRead, Granter, Granting, Permissions
from redrive.admin.guards import Breaker
from redrive.admin.http import (
    CALLS_AT_A_TIME,
    LONG_ANSWER,
    USUAL_ANSWER,
    Call,
    CallTurns,
    Credentials,
    Http,
    Way,
    quoted,
    schema_path,
    schemas_path,
    subscription_path,
    topic_path,
)
from redrive.admin.model import (
    AckPersistence,
    NamespaceState,
    Schema,
    TopicMetadata,
    TopicStats,
    TopicSubscriptions,
    TopicUsage,
    acknowledged_behind,
    as_is,
    combine_partitions,
    read_metadata,
    read_names,
    read_namespace_policies,
    read_partitions,
    read_producers,
    read_receivers,
    read_schema,
    read_schemas,
    read_stats,
    read_unpartitioned_metadata,
    read_usage,
    read_version,
)
from redrive.admin.policies import (
    KeepsBacklog,
    Quotas,
    TopicPolicy,
    Write,
    default_quotas,
    size_limit,
)
from redrive.policy.naming import TopicName

T = TypeVar("T")


class Calls:
    """Makes calls to one broker; see `client.Admin` for the arguments."""

    def __init__(
        self,
        http: Http,
        admin_url: str,
        credentials: Credentials,
        breaker: Breaker | None = None,
        *,
        namespace: str = "",
    ) -> None:
        self._http = http
        self._breaker = breaker
        self._admin_url = admin_url
        self._credentials = credentials
        self._turns = CallTurns(CALLS_AT_A_TIME, namespace)

    def is_for(self, admin_url: str, credentials: Credentials) -> bool:
        """Whether this client calls that broker with those credentials."""
        return admin_url == self._admin_url and credentials is self._credentials

    async def _get(
        self, does: str, path: str, read: Callable[[Any], T], longest: int = USUAL_ANSWER
    ) -> T:
        return await self._ask(Call(does, "GET", path, longest=longest), read)

    async def _ask(self, call: Call, read: Callable[[Any], T], *, probe: bool = False) -> T:
        """Send *call* and *read* the answer; one of another form is not a broker's."""
        value: T = await self._send(replace(call, read=read), probe=probe)
        return value

    async def _send(self, call: Call, *, probe: bool = False) -> Any:  # noqa: ANN401  JSON
        """Make *call*, once more if the broker refuses credentials that have changed since."""

        async def send() -> Any:  # noqa: ANN401  JSON
            access = self._credentials.held
            try:
                return await self._http.send(call, Way(self._admin_url, access, self._turns))
            except AuthenticationFailedError:
                renewed = await self._credentials.renewed(access)
                if renewed is None:
                    raise
            return await self._http.send(call, Way(self._admin_url, renewed, self._turns))

        return await (send() if self._breaker is None else self._breaker.guard(send, probe=probe))


class Get(Protocol):
    """Reads from a broker: what the call does in words, its path, and what reads the answer."""

    def __call__(
        self, does: str, path: str, read: Callable[[Any], T], longest: int = ..., /
    ) -> Awaitable[T]:
        """Return what was read, if it has at most *longest* bytes.

        Raises:
            AdminError: the broker gave no answer, or refused.
        """


async def read_subscriptions(
    get: Get, topic: TopicName, *, partitioned: bool
) -> TopicSubscriptions:
    """See `Admin.subscriptions`."""
    does = f"read the subscriptions of {topic}"
    if not partitioned:
        return TopicSubscriptions(
            (await get(does, f"{topic_path(topic)}/subscriptions", frozenset),)
        )
    query = "excludePublishers=true&excludeConsumers=true&subscriptionBacklogSize=false"
    return TopicSubscriptions(await _of_each_partition(get, does, topic, query, read_names))


async def receivers(get: Get, topic: TopicName, *, partitioned: bool) -> TopicSubscriptions:
    """See `Admin.receivers`."""
    does = f"read the subscriptions of {topic}"
    query = "excludePublishers=true&excludeConsumers=true&subscriptionBacklogSize=false"
    if not partitioned:
        path = f"{topic_path(topic)}/stats?{query}"
        return TopicSubscriptions((await get(does, path, read_receivers, LONG_ANSWER),))
    return TopicSubscriptions(await _of_each_partition(get, does, topic, query, read_receivers))


async def read_topic_usage(
    get: Get, topic: TopicName, *, partitioned: bool, subscription: str
) -> TopicUsage:
    """See `Admin.usage`."""
    does = f"read the use of {topic}"
    # A count that is not precise may be 0 where messages are left.
    query = "getPreciseBacklog=true&subscriptionBacklogSize=false"

    def read(part: Mapping[str, Any]) -> TopicUsage:
        return read_usage(part, subscription)

    if not partitioned:
        return await get(does, f"{topic_path(topic)}/stats?{query}", read, LONG_ANSWER)
    parts = await _of_each_partition(get, does, topic, query, read)
    return combine_partitions(part for part in parts if part is not None)


async def read_acknowledged(
    get: Get, topic: TopicName, *, partitioned: bool, subscription: str
) -> int:
    """See `Admin.acknowledged`."""

    def read(answer: Mapping[str, Any]) -> int:
        parts = answer["partitions"].values() if partitioned else [answer]
        return max((acknowledged_behind(part, subscription) for part in parts), default=0)

    kind = "partitioned-internalStats" if partitioned else "internalStats"
    path = f"{topic_path(topic)}/{kind}"
    return await get(f"read what is acknowledged of {topic}", path, read, LONG_ANSWER)


async def _of_each_partition(
    get: Get, does: str, topic: TopicName, query: str, read: Callable[[Mapping[str, Any]], T]
) -> tuple[T | None, ...]:
    """Read the statistics of each partition, in order; None stands for one that is not there."""

    def read_all(answer: Mapping[str, Any]) -> list[T | None]:
        parts, count = answer["partitions"], read_partitions(answer["metadata"])
        names = (str(topic.partition(number)) for number in range(count))
        return [read(parts[name]) if name in parts else None for name in names]

    path = f"{topic_path(topic)}/partitioned-stats?perPartition=true&{query}"
    found = await get(does, path, read_all, LONG_ANSWER)
    for number, part in enumerate(found):
        if part is None:
            found[number] = await _of_partition(get, does, topic.partition(number), query, read)
    return tuple(found)


async def _of_partition(
    get: Get, does: str, part: TopicName, query: str, read: Callable[[Mapping[str, Any]], T]
) -> T | None:
    """Read a partition that was left out: it is missing, or could not be read just then."""
    try:
        return await get(does, f"{topic_path(part)}/stats?{query}", read, LONG_ANSWER)
    except AdminNotFoundError:
        return None


_WITH_PROPERTIES = "application/vnd.partitioned-topic-metadata+json"
_EARLIEST = {"ledgerId": -1, "entryId": -1, "partitionIndex": -1}


class TopicCalls(Calls):
    """What is read of a topic, and changed on it."""

    async def partitions(self, topic: TopicName) -> int:
        """Return how many partitions a topic has; 0 if it is not partitioned.

        Raises:
            AdminNotFoundError: there is no such topic.
        """
        path = f"{topic_path(topic)}/partitions"
        return await self._get(f"read the partitions of {topic}", path, read_partitions)

    async def metadata(self, topic: TopicName, *, partitioned: bool) -> TopicMetadata:
        """Return partitions and properties of a topic, in one call.

        Args:
            topic: the topic.
            partitioned: whether it has partitions; without, its properties are read and no count.

        Raises:
            AdminNotFoundError: there is no such topic.
        """
        # The first call returns all of a topic with partitions, and nothing of one without.
        path = f"{topic_path(topic)}/{'partitions' if partitioned else 'properties'}"
        read = read_metadata if partitioned else read_unpartitioned_metadata
        return await self._get(f"read the properties of {topic}", path, read)

    async def set_properties(self, topic: TopicName, properties: Mapping[str, str]) -> None:
        """Set properties of a topic; those that are not named stay as they are."""
        call = Call(f"mark {topic}", "PUT", f"{topic_path(topic)}/properties", dict(properties))
        await self._send(call)

    async def schema(self, topic: TopicName) -> Schema | None:
        """Return the newest schema of a topic; None if it has none."""
        try:
            return await self._get(
                f"read the schema of {topic}", schema_path(topic), read_schema, LONG_ANSWER
            )
        except AdminNotFoundError:
            return None

    async def schemas(self, topic: TopicName) -> tuple[Schema, ...]:
        """Return all versions of a topic's schema, the oldest first."""
        try:
            return await self._get(
                f"read the schemas of {topic}", schemas_path(topic), read_schemas, LONG_ANSWER
            )
        except AdminNotFoundError:
            return ()

    async def put_schema(self, topic: TopicName, schema: Schema) -> None:
        """Set the newest schema of a topic; nothing changes if it has that already.

        Raises:
            ConflictError: its namespace allows no such change.
            BrokerRefusedError: it is not a schema.
        """
        body = {
            "type": schema.type, "schema": schema.data, "properties": dict(schema.properties)
        }  # fmt: skip
        call = Call(f"give {topic} a schema", "POST", schema_path(topic), body)
        await self._send(call)

    async def replicated_to(self, topic: TopicName) -> frozenset[str]:
        """Return the clusters that a topic is replicated to, its own among them."""
        path = f"{topic_path(topic)}/replication?applied=true"
        return await self._get(
            f"read the clusters of {topic}", path, lambda found: frozenset(found or ())
        )

    async def deduplicates(self, topic: TopicName) -> bool:
        """Whether the broker drops what a producer sends to *topic* twice, for whatever reason.

        Raises:
            AdminNotFoundError: there is no such topic.
        """
        path = f"{topic_path(topic)}/deduplicationEnabled?applied=true"
        does = f"read whether {topic} deduplicates"
        return await self._get(does, path, lambda found: found is True)

    async def subscriptions(self, topic: TopicName, *, partitioned: bool) -> TopicSubscriptions:
        """Return the names of a topic's subscriptions, in one call where no partition is missing.

        Raises:
            AdminNotFoundError: as for `stats`.
        """
        return await read_subscriptions(self._get, topic, partitioned=partitioned)

    async def receivers(self, topic: TopicName, *, partitioned: bool) -> TopicSubscriptions:
        """Return the names of the subscriptions that keep the messages of a topic for consumers.

        These are the durable ones. Those of readers end with them, and Pulsar's own, such as
        `__compaction`, keep no message for anybody. Any right on the topic is enough.

        Raises:
            AdminNotFoundError: as for `stats`.
        """
        return await receivers(self._get, topic, partitioned=partitioned)

    async def ttl_in_force(self, topic: TopicName) -> int:
        """Return after how many seconds a message of a topic expires unread; 0 is never.

        Be that set on the topic, its namespace or at the broker.

        Raises:
            AdminNotFoundError: there is no such topic.
        """
        path = f"{topic_path(topic)}/messageTTL?applied=true"
        return await self._get(f"read the TTL of {topic}", path, lambda found: int(found or 0))

    async def topic_policy(
        self, topic: TopicName, policy: TopicPolicy, *, own: bool = False
    ) -> Any:  # noqa: ANN401
        """Return what the broker has of a policy of *topic*, as its JSON; None for nothing.

        Args:
            own: read what is set on the topic itself, not what is in force there.
        """
        path = f"{topic_path(topic)}/{policy.own if own else policy.read}"
        return await self._get(f"read {policy} of {topic}", path, as_is)

    async def set_topic_policy(
        self, topic: TopicName, policy: TopicPolicy | str, write: Write
    ) -> None:
        """Make one write of those that *policy* needs."""
        path = f"{topic_path(topic)}/{write.path}"
        await self._send(Call(f"set {policy} of {topic}", write.method, path, write.body))

    async def internal_stats(self, topic: TopicName) -> dict[str, Any]:
        """Return ledgers and cursors of one topic, or of one partition, as the broker gives them.

        Any right on the topic is enough.
        """
        path = f"{topic_path(topic)}/internalStats"
        return await self._get(
            f"read the internal state of {topic}", path, dict[str, Any], LONG_ANSWER
        )

    async def stats(
        self, topic: TopicName, *, partitioned: bool, oldest: bool = False
    ) -> TopicStats:
        """Return the statistics of a topic, and of its subscriptions by name.

        Args:
            topic: the whole topic, never one partition.
            partitioned: whether it is; a broker has two calls for this.
            oldest: read the oldest message of each backlog too, which costs the broker a read, and
                how many bytes it has.

        Raises:
            AdminNotFoundError: there is no such topic, or *partitioned* is wrong about it.
        """
        kind = "partitioned-stats?perPartition=true" if partitioned else "stats?"
        query = f"&getEarliestTimeInBacklog={str(oldest).lower()}&excludePublishers=true"
        path = f"{topic_path(topic)}/{kind}{query}&subscriptionBacklogSize={str(oldest).lower()}"
        return await self._get(f"read the statistics of {topic}", path, read_stats, LONG_ANSWER)

    async def acknowledged(self, topic: TopicName, *, partitioned: bool, subscription: str) -> int:
        """Return how many messages are acknowledged behind one that is not, over several ledgers.

        Of a partitioned topic, where most are. The broker's answer lists all ranges of them: it is
        long where there are many.

        Raises:
            AdminNotFoundError: as for `stats`.
        """
        return await read_acknowledged(
            self._get, topic, partitioned=partitioned, subscription=subscription
        )

    async def producers(self, topic: TopicName, *, partitioned: bool) -> list[Mapping[str, str]]:
        """Return the metadata of each producer of a topic, of each of its partitions.

        Raises:
            AdminNotFoundError: as for `stats`.
        """
        kind = "partitioned-stats?perPartition=true" if partitioned else "stats?"
        path = f"{topic_path(topic)}/{kind}&excludeConsumers=true"
        return await self._get(f"read the producers of {topic}", path, read_producers, LONG_ANSWER)

    async def usage(self, topic: TopicName, *, partitioned: bool, subscription: str) -> TopicUsage:
        """Return the users of a topic, and the exact backlogs of *subscription* and others.

        Raises:
            AdminNotFoundError: as for `stats`.
        """
        return await read_topic_usage(
            self._get, topic, partitioned=partitioned, subscription=subscription
        )

    async def delete_topic(self, topic: TopicName, *, partitioned: bool) -> None:
        """Delete a topic with its messages, subscriptions and grants; never against its clients.

        Raises:
            AdminNotFoundError: there is no such topic.
            BrokerRefusedError: clients are connected. Those partitions that none uses may be gone.
        """
        kind = "/partitions" if partitioned else ""
        await self._send(Call(f"delete {topic}", "DELETE", f"{topic_path(topic)}{kind}"))

    async def unload(self, topic: TopicName) -> None:
        """Have the broker close a topic, with all its partitions, and load it again.

        Clients reconnect, and unacknowledged messages are delivered again.

        Raises:
            AdminNotFoundError: the topic does not exist.
            AdminForbiddenError: the caller lacks the right.
        """
        await self._send(Call(f"unload {topic}", "PUT", f"{topic_path(topic)}/unload"))

    async def delete_subscription(self, topic: TopicName, name: str) -> None:
        """Delete a subscription with its backlog; never against its consumers.

        Raises:
            AdminNotFoundError: there is no such subscription.
            BrokerRefusedError: consumers are connected.
        """
        path = subscription_path(topic, name)
        await self._send(Call(f"delete subscription {name} on {topic}", "DELETE", path))

    async def create_topic(
        self, topic: TopicName, partitions: int, properties: Mapping[str, str]
    ) -> None:
        """Create a topic with *properties*, without partitions where *partitions* is 0.

        In a namespace that is replicated, it is created in this cluster alone.

        Raises:
            ConflictError: it exists already, with however many partitions.
        """
        if partitions:
            does = f"create {topic} with {partitions} partitions"
            path = f"{topic_path(topic)}/partitions?createLocalTopicOnly=true"
            body = {"partitions": partitions, "properties": dict(properties)}
            await self._send(Call(does, "PUT", path, body, _WITH_PROPERTIES))
        else:
            await self._send(Call(f"create {topic}", "PUT", topic_path(topic), dict(properties)))

    async def add_partitions(self, topic: TopicName, partitions: int) -> None:
        """Grow a partitioned topic to *partitions*, with its subscriptions on the new ones.

        Raises:
            BrokerRefusedError: it has as many already, or more.
        """
        does = f"add partitions to {topic}, up to {partitions}"
        await self._send(Call(does, "POST", f"{topic_path(topic)}/partitions", partitions))

    async def restore_partitions(self, topic: TopicName) -> None:
        """Create the missing partitions of a topic, empty and without subscriptions.

        Raises:
            AdminNotFoundError: there is no such topic, or it is not partitioned.
        """
        path = f"{topic_path(topic)}/createMissedPartitions"
        await self._send(Call(f"create missing partitions of {topic}", "POST", path))

    async def create_subscription(self, topic: TopicName, name: str) -> None:
        """Create a subscription that begins with the topic's first message.

        Of a partitioned topic, on those partitions that lack it. A broker makes it on each by
        itself: when this fails, some may have it and others not.

        Raises:
            ConflictError: it exists already, on every partition.
        """
        path = subscription_path(topic, name)
        await self._send(Call(f"create subscription {name} on {topic}", "PUT", path, _EARLIEST))


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
        namespace: of the connection, whose calls have a share of those of all connections.
    """

    def __init__(
        self,
        http: Http,
        admin_url: str,
        credentials: Credentials,
        breaker: Breaker | None = None,
        *,
        namespace: str = "",
    ) -> None:
        super().__init__(http, admin_url, credentials, breaker, namespace=namespace)
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
            return read_version(await self._send(call))
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
            self._get(does, path, frozenset[str], LONG_ANSWER),
            self._get(does, f"{path}/partitioned", frozenset[str], LONG_ANSWER),
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
            does, path, lambda found: read_namespace_policies(found)["permissions"], LONG_ANSWER
        )

    async def _read(self, namespace: str) -> NamespaceState:
        does = f"read namespace {namespace}"
        topics, policies = await asyncio.gather(
            self.topics(namespace),
            self._get(
                does, f"namespaces/{quoted(namespace)}", read_namespace_policies, LONG_ANSWER
            ),
        )
        return NamespaceState(*topics, **policies)
