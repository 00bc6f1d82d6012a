"""The Pulsar admin client: one method for each call of redrive to a broker.

A call uses the current credentials, and fails at once while the circuit breaker is open. Statistics
and subscriptions are read for each partition of a topic, in one call. A broker's answer for a
partitioned topic as a whole is a union: a subscription that one partition lacks, which loses
messages there, would appear to exist.
"""

from __future__ import annotations

import asyncio
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import quote

from redrive.admin import model
from redrive.admin.access import Credentials
from redrive.admin.errors import (
    AdminForbiddenError,
    AdminNotFoundError,
    AuthenticationFailedError,
    BrokerRefusedError,
    UnsupportedError,
)
from redrive.admin.granting import CachedRead, CachedReads, Granter, Granting, Permissions
from redrive.admin.guards import Breaker
from redrive.admin.http import (
    CALLS_AT_A_TIME,
    LONG_ANSWER,
    USUAL_ANSWER,
    Call,
    CallSlots,
    Endpoint,
    Http,
    quoted,
    subscription_path,
    topic_path,
)
from redrive.admin.internal_stats import BrokerSettings, acknowledged_behind, read_internal_stats
from redrive.admin.policies import LIMITS, KeepsBacklog, Quotas, TopicPolicy, Write
from redrive.policy.naming import TopicName

T = TypeVar("T")
Read = Callable[[Any], T]
Parser = Callable[[Mapping[str, Any]], T]
"""Parses statistics of one partition, or of a topic without partitions."""

_WITH_PROPERTIES = "application/vnd.partitioned-topic-metadata+json"
_EARLIEST = {"ledgerId": -1, "entryId": -1, "partitionIndex": -1}
_NAMES_ONLY = "excludePublishers=true&excludeConsumers=true&subscriptionBacklogSize=false"
PROBE_TIMEOUT_SECONDS = 10.0
"""Time-out of a probe: the next probe detects a broker that is available again."""
VERSION_SECONDS = 60.0
"""Maximum age of the cached release of a broker."""
MAX_TOPICS = 100_000
"""Maximum topics whose subscriptions are cached."""
CONFIGURATION_SECONDS = 3_600.0
"""Maximum age of the cached configuration of a broker; a restart changes it."""


class Admin:
    """Client of one broker, acting as the role of its credentials.

    Reads of a namespace and grants in it are batched: concurrent callers share one call. So they
    must share the client.

    Each call about a topic raises `AdminNotFoundError` if the topic does not exist, or if
    *partitioned* is wrong.

    Args:
        http: sends the calls.
        admin_url: URL of the broker's admin API.
        credentials: credentials of the role.
        breaker: fails calls at once while the broker does not answer; None allows all.
        namespace: namespace of the connection, which has a share of all calls.

    Attributes:
        settings: those that `read_settings` returned last; its connection's reconcile calls it.
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
        self._http = http
        self._breaker = breaker
        self._admin_url = admin_url
        self._credentials = credentials
        self._slots = CallSlots(CALLS_AT_A_TIME, namespace)
        self._version = CachedRead(self._read_version)
        self._configuration = CachedRead(self._read_configuration)
        self.settings = BrokerSettings()
        self._tenants = CachedReads(self._namespaces_of)
        self._namespaces = CachedReads(self._read_namespace)
        self._newest: dict[str, tuple[TopicName, TopicPolicy]] = {}
        self._inherited = CachedReads(self._read_inherited)
        self._grantings: dict[str, Granting] = {}
        self._complete: dict[TopicName, tuple[float, frozenset[str]]] = {}

    def is_for(self, admin_url: str, credentials: Credentials) -> bool:
        """Return True if this client calls that broker with those credentials."""
        return admin_url == self._admin_url and credentials is self._credentials

    async def _get(self, does: str, path: str, read: Read[T], longest: int = USUAL_ANSWER) -> T:
        return await self._read(Call(does, "GET", path, longest=longest), read)

    async def _read(self, call: Call, read: Read[T], *, probe: timedelta | None = None) -> T:
        """Send *call* and parse the answer with *read*."""
        value: T = await self._send(replace(call, read=read), probe=probe)
        return value

    async def _send(self, call: Call, *, probe: timedelta | None = None) -> Any:  # noqa: ANN401  JSON
        """Send *call*; once more if the broker refuses credentials that were renewed since."""

        async def send() -> Any:  # noqa: ANN401  JSON
            access = self._credentials.held
            try:
                return await self._http.send(call, Endpoint(self._admin_url, access, self._slots))
            except AuthenticationFailedError:
                renewed = await self._credentials.renewed(access)
                if renewed is None:
                    raise
            return await self._http.send(call, Endpoint(self._admin_url, renewed, self._slots))

        return await (send() if self._breaker is None else self._breaker.guard(send, probe))

    async def partitions(self, topic: TopicName) -> int:
        """Return the number of partitions of a topic; 0 if it is not partitioned."""
        path = f"{topic_path(topic)}/partitions"
        return await self._get(f"read the partitions of {topic}", path, model.read_partitions)

    async def metadata(self, topic: TopicName, *, partitioned: bool) -> model.TopicMetadata:
        """Return partitions and properties of a topic, in one call.

        Args:
            topic: the topic.
            partitioned: True if it is partitioned; otherwise only its properties are read.
        """
        # The first call has all metadata of a partitioned topic, and none of any other.
        path = f"{topic_path(topic)}/{'partitions' if partitioned else 'properties'}"
        read = model.read_metadata if partitioned else model.read_unpartitioned_metadata
        return await self._get(f"read the properties of {topic}", path, read)

    async def set_properties(self, topic: TopicName, properties: Mapping[str, str]) -> None:
        """Set properties of a topic; its other properties are kept."""
        path = f"{topic_path(topic)}/properties"
        await self._send(Call(f"mark {topic}", "PUT", path, dict(properties)))

    async def schema(self, topic: TopicName) -> model.Schema | None:
        """Return the latest schema of a topic; None if it has none."""
        does, path = f"read the schema of {topic}", _schema_path(topic)
        call = Call(does, "GET", path, longest=LONG_ANSWER, optional=True)
        return await self._read(call, model.read_schema)

    async def schemas(self, topic: TopicName) -> tuple[model.Schema, ...]:
        """Return all versions of a topic's schema, the oldest first."""
        does, path = f"read the schemas of {topic}", f"{_schema_path(topic)}s"
        call = Call(does, "GET", path, longest=LONG_ANSWER, optional=True)
        return await self._read(call, model.read_schemas) or ()

    async def put_schema(self, topic: TopicName, schema: model.Schema) -> None:
        """Set the latest schema of a topic; no change if it has that schema.

        Raises:
            ConflictError: its namespace does not allow the change.
            BrokerRefusedError: it is not a schema.
        """
        properties = dict(schema.properties)
        body = {"type": schema.type, "schema": schema.data, "properties": properties}
        await self._send(Call(f"give {topic} a schema", "POST", _schema_path(topic), body))

    async def replicated_to(self, topic: TopicName) -> frozenset[str]:
        """Return the clusters that have a topic, its own included."""
        path = f"{topic_path(topic)}/replication?applied=true"
        return await self._get(
            f"read the clusters of {topic}", path, lambda answer: model.name_set(answer or ())
        )

    async def deduplicates(self, topic: TopicName) -> bool:
        """Return True if the broker deduplicates messages of *topic*, by any setting."""
        path = f"{topic_path(topic)}/deduplicationEnabled?applied=true"
        does = f"read deduplication of {topic}"
        return await self._get(does, path, model.read_flag)

    async def subscriptions(
        self, topic: TopicName, *, partitioned: bool, max_age: float = 0.0
    ) -> model.TopicSubscriptions:
        """Return the subscriptions of a topic, in one call unless a partition is missing.

        Statistics that were read at most *max_age* seconds ago answer instead of the broker, with
        the subscriptions that each partition has.
        """
        at, complete = self._complete.get(topic, (float("-inf"), frozenset[str]()))
        if asyncio.get_running_loop().time() - at < max_age:
            return model.TopicSubscriptions((complete,))
        does = f"read the subscriptions of {topic}"
        if not partitioned:
            path = f"{topic_path(topic)}/subscriptions"
            return model.TopicSubscriptions((await self._get(does, path, model.name_set),))
        return model.TopicSubscriptions(
            await self._stats(does, topic, _NAMES_ONLY, model.read_names)
        )

    async def receivers(self, topic: TopicName, *, partitioned: bool) -> model.TopicSubscriptions:
        """Return the names of the subscriptions that retain messages of a topic for consumers.

        These are the durable ones, except Pulsar's own, such as `__compaction`. The call needs any
        permission on the topic.
        """
        does = f"read the subscriptions of {topic}"
        parts = self._stats(does, topic, _NAMES_ONLY, model.read_receivers, partitioned=partitioned)
        return model.TopicSubscriptions(await parts)

    async def ttl_in_force(self, topic: TopicName) -> int:
        """Return the seconds after which unread messages of a topic expire; 0 means never.

        The value of the topic, its namespace or the broker applies.
        """
        does, path = f"read the TTL of {topic}", f"{topic_path(topic)}/messageTTL?applied=true"
        return await self._get(does, path, lambda answer: model.bounded(answer or 0))

    async def topic_policy(
        self, topic: TopicName, policy: TopicPolicy, *, own: bool = False
    ) -> Any:  # noqa: ANN401
        """Return a policy of *topic* as the broker's JSON; None if there is none.

        Args:
            own: True reads the value of the topic itself, False the value in force.
        """
        path = f"{topic_path(topic)}/{policy.own if own else policy.read}"
        does = f"read {policy} of {topic}"
        return await self._get(does, path, lambda answer: model.read_policy(policy.own, answer))

    async def policy_of_new_topic(self, topic: TopicName, policy: TopicPolicy) -> Any:  # noqa: ANN401
        """Return the value in force of *policy* on a topic that was just created.

        New topics of a namespace inherit one value. Concurrent callers share the read of one topic,
        because a broker lists the namespace for each. *topic* itself is read, too, if that topic
        cannot be read, or if its value needs no change.
        """
        place = f"{topic.namespace_name} {policy.read}"
        self._newest[place] = topic, policy
        with suppress(AdminForbiddenError, AdminNotFoundError, BrokerRefusedError):  # of another
            newest, value = await self._inherited.get(place, max_age=0.0)
            if newest == topic or any(policy.writes(value)):
                return value
        return await self.topic_policy(topic, policy)

    async def _read_inherited(self, place: str) -> tuple[TopicName, Any]:
        topic, policy = self._newest[place]
        return topic, await self.topic_policy(topic, policy)

    async def set_topic_policy(
        self, topic: TopicName, policy: TopicPolicy | str, write: Write
    ) -> None:
        """Perform one write that *policy* needs."""
        path = f"{topic_path(topic)}/{write.path}"
        await self._send(Call(f"set {policy} of {topic}", write.method, path, write.body))

    async def internal_stats(self, topic: TopicName) -> dict[str, Any]:
        """Return ledgers and cursors of a topic or of one partition, as the broker's JSON.

        The call needs any permission on the topic.
        """
        does, path = f"read the internal state of {topic}", f"{topic_path(topic)}/internalStats"
        return await self._get(does, path, read_internal_stats, LONG_ANSWER)

    async def stats(
        self, topic: TopicName, *, partitioned: bool, oldest: bool = False, producers: bool = False
    ) -> model.TopicStats:
        """Return the statistics of a topic, and of its subscriptions by name.

        Args:
            topic: the whole topic, never one partition.
            partitioned: True if it is partitioned; a broker has two calls.
            oldest: True reads the oldest message and the bytes of each backlog, too; the broker
                reads a message for that.
            producers: True reads the metadata of producers, too.
        """
        kind = "partitioned-stats?perPartition=true" if partitioned else "stats?"
        read = str(oldest).lower()
        query = f"&getEarliestTimeInBacklog={read}&subscriptionBacklogSize={read}"
        path = f"{topic_path(topic)}/{kind}{query}&excludePublishers={str(not producers).lower()}"
        does = f"read the statistics of {topic}"
        stats = await self._get(does, path, model.read_stats, LONG_ANSWER)
        if len(self._complete) >= MAX_TOPICS:
            self._complete.clear()
        self._complete[topic] = asyncio.get_running_loop().time(), stats.complete
        return stats

    async def acknowledged(self, topic: TopicName, *, partitioned: bool, subscription: str) -> int:
        """Return the number of messages acknowledged out of order, across ledgers.

        Of a partitioned topic it is the maximum of a partition. The answer lists all ranges, so it
        may be long.
        """
        does = f"read acknowledgements of {topic}"
        read = functools.partial(acknowledged_behind, subscription=subscription)
        return max(await self._internals(does, topic, read, partitioned=partitioned), default=0)

    async def is_terminated(self, topic: TopicName, *, partitioned: bool) -> bool:
        """Return True if a topic, or one of its partitions, accepts no more messages."""
        does = f"read the state of {topic}"
        read = operator.itemgetter("state")
        return "Terminated" in await self._internals(does, topic, read, partitioned=partitioned)

    async def has_open_transaction(self, topic: TopicName) -> bool:
        """Return True if *topic*, a partition or a topic without, has a transaction under way."""
        does, path = f"read the transactions of {topic}", f"{topic_path(topic)}/stats?{_NAMES_ONLY}"
        return await self._get(does, path, model.has_transactions, LONG_ANSWER)

    async def _internals(
        self, does: str, topic: TopicName, read: Parser[T], *, partitioned: bool
    ) -> list[T]:
        """Read the internal statistics of a topic, or of each of its partitions."""

        def read_all(answer: Mapping[str, Any]) -> list[T]:
            parts = answer["partitions"].values() if partitioned else [answer]
            return [read(part) for part in parts]

        kind = "partitioned-internalStats" if partitioned else "internalStats"
        return await self._get(does, f"{topic_path(topic)}/{kind}", read_all, LONG_ANSWER)

    async def usage(
        self, topic: TopicName, *, partitioned: bool, subscription: str
    ) -> model.TopicUsage:
        """Return the clients of a topic, and the exact backlogs of its subscriptions."""
        does = f"read the use of {topic}"
        # An imprecise count may be 0 although messages remain.
        query = "getPreciseBacklog=true&subscriptionBacklogSize=false"
        read = functools.partial(model.read_usage, subscription=subscription)
        parts = await self._stats(does, topic, query, read, partitioned=partitioned)
        return model.combine_partitions(part for part in parts if part is not None)

    async def _stats(
        self, does: str, topic: TopicName, query: str, read: Parser[T], *, partitioned: bool = True
    ) -> tuple[T | None, ...]:
        """Read the statistics of a topic, or of each partition in order; None if it is missing."""
        if not partitioned:
            return (await self._get(does, f"{topic_path(topic)}/stats?{query}", read, LONG_ANSWER),)

        def read_all(answer: Mapping[str, Any]) -> list[T | None]:
            parts, count = answer["partitions"], model.read_partitions(answer["metadata"])
            names = (str(topic.partition(number)) for number in range(count))
            return [read(parts[name]) if name in parts else None for name in names]

        path = f"{topic_path(topic)}/partitioned-stats?perPartition=true&{query}"
        results = await self._get(does, path, read_all, LONG_ANSWER)
        for number, result in enumerate(results):
            if result is None:  # missing, or not readable at that moment
                part = f"{topic_path(topic.partition(number))}/stats?{query}"
                with suppress(AdminNotFoundError):
                    results[number] = await self._get(does, part, read, LONG_ANSWER)
        return tuple(results)

    async def delete_topic(self, topic: TopicName, *, partitioned: bool) -> None:
        """Delete a topic with its messages, subscriptions and grants, unless clients are connected.

        Raises:
            AdminNotFoundError: the topic does not exist.
            BrokerRefusedError: clients are connected. Partitions without clients may be deleted.
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
        """Delete a subscription with its backlog, unless consumers are connected.

        Raises:
            AdminNotFoundError: the subscription does not exist.
            BrokerRefusedError: consumers are connected.
        """
        path = subscription_path(topic, name)
        await self._send(Call(f"delete subscription {name} on {topic}", "DELETE", path))

    async def create_topic(
        self, topic: TopicName, partitions: int, properties: Mapping[str, str]
    ) -> None:
        """Create a topic with *properties*; 0 *partitions* means not partitioned.

        In a replicated namespace, it is created in this cluster only.

        Raises:
            ConflictError: the topic exists, with any number of partitions.
        """
        if partitions:
            does = f"create {topic} with {partitions} partitions"
            path = f"{topic_path(topic)}/partitions?createLocalTopicOnly=true"
            body = {"partitions": partitions, "properties": dict(properties)}
            await self._send(Call(does, "PUT", path, body, _WITH_PROPERTIES))
        else:
            await self._send(Call(f"create {topic}", "PUT", topic_path(topic), dict(properties)))

    async def add_partitions(self, topic: TopicName, partitions: int) -> None:
        """Increase the number of partitions of a topic to *partitions*, with its subscriptions.

        Raises:
            BrokerRefusedError: it has as many, or more.
        """
        does = f"add partitions to {topic}, up to {partitions}"
        await self._send(Call(does, "POST", f"{topic_path(topic)}/partitions", partitions))

    async def restore_partitions(self, topic: TopicName) -> None:
        """Create the missing partitions of a topic, empty and without subscriptions.

        Raises:
            AdminNotFoundError: the topic does not exist, or is not partitioned.
        """
        path = f"{topic_path(topic)}/createMissedPartitions"
        await self._send(Call(f"create missing partitions of {topic}", "POST", path))

    async def create_subscription(self, topic: TopicName, name: str) -> None:
        """Create a subscription that starts at the earliest message.

        On a partitioned topic, it is created on each partition that lacks it. The broker does that
        for each partition separately, so after a failure some may have it.

        Raises:
            ConflictError: it exists on every partition.
        """
        path = subscription_path(topic, name)
        await self._send(Call(f"create subscription {name} on {topic}", "PUT", path, _EARLIEST))

    async def clusters(self, *, pause: timedelta = timedelta()) -> frozenset[str]:
        """Return the names of the broker's clusters, which any role may read.

        This probe is sent even while the breaker is open, if the last one was a *pause* ago.

        Raises:
            AuthenticationFailedError: the broker rejects the credentials.
        """
        call = Call("list the clusters", "GET", "clusters", seconds=PROBE_TIMEOUT_SECONDS)
        return await self._read(call, model.name_set, probe=pause)

    async def version(self) -> tuple[int, ...]:
        """Return the broker's release as numbers, such as (4, 0, 8); read once a minute.

        It is empty if the broker does not return it, as behind some proxies.

        Raises:
            AdminError: the broker does not answer, or rejects the credentials.
        """
        return await self._version.get(max_age=VERSION_SECONDS)

    async def _read_version(self) -> tuple[int, ...]:
        call = Call("read the version", "GET", "brokers/version", as_text=True)
        try:
            return model.read_version(await self._send(call))
        except (AdminForbiddenError, AdminNotFoundError, UnsupportedError):
            return ()

    async def read_settings(self) -> BrokerSettings:
        """Return the settings of the broker; read once an hour.

        They come from the configuration, which a super-user may read, else from the defaults of the
        release. Of several brokers any one may answer.

        Raises:
            AdminError: the broker does not answer, or rejects the credentials.
        """
        self.settings = await self._configuration.get(max_age=CONFIGURATION_SECONDS)
        return self.settings

    async def quotas_in_force(self, topic: TopicName, *, max_age: float = 0.0) -> Quotas:
        """Return the backlog quotas of a topic: its own, its namespace's or the broker's default.

        Only super-users can read the default; for others it is left out. A read of the topic's
        quotas with `applied=true` would make the broker write the default into the namespace. The
        namespace was read at most *max_age* seconds ago.
        """
        own = await self.topic_policy(topic, KeepsBacklog())
        around = await self.namespace(topic.namespace_name, max_age=max_age)
        defaults = (await self.read_settings()).quotas
        return {**defaults, **around.backlog_quotas, **(own or {})}

    async def subscription_types(self, topic: TopicName) -> frozenset[str]:
        """Return the subscription types that *topic* itself allows; empty if it sets none."""
        does, path = f"read the types of {topic}", f"{topic_path(topic)}/subscriptionTypesEnabled"
        return await self._get(does, path, lambda answer: model.name_set(answer or ()))

    async def limit(self, topic: TopicName, setting: str, *, max_age: float = 0.0) -> int:
        """Return one of the `LIMITS` of *topic*; 0 for none. See `quotas_in_force`."""
        # Only some of these calls know `applied`; the others return the value of the topic.
        path = f"{topic_path(topic)}/{LIMITS[setting][0]}?applied=true"
        does = f"read {setting} of {topic}"
        own = await self._get(does, path, model.read_limit)
        around = await self.namespace(topic.namespace_name, max_age=max_age)
        defaults = (await self.read_settings()).limits
        in_force = own if own is not None else {**defaults, **around.limits}[setting]
        return max(0, in_force)

    async def _read_configuration(self) -> BrokerSettings:
        release = await self.version()
        path = "brokers/configuration/runtime"
        try:
            return await self._get(
                "read the configuration", path, lambda answer: BrokerSettings.of(answer, release)
            )
        except (
            AdminForbiddenError,
            AdminNotFoundError,
            BrokerRefusedError,  # of a gateway: no policy depends on these settings
            AuthenticationFailedError,  # the broker's answer to a role that is not a super-user
            UnsupportedError,
        ):
            return BrokerSettings.of({}, release)

    async def tenant_exists(self, tenant: str, *, max_age: float = 0.0) -> bool:
        """Return True if a tenant exists, or existed at most *max_age* seconds ago."""
        try:
            await self._tenants.get(tenant, max_age=max_age)
        except AdminNotFoundError:
            return False
        return True

    async def namespace(self, namespace: str, *, max_age: float = 0.0) -> model.NamespaceState:
        """Read the topics and permissions of a Pulsar namespace, `tenant/namespace`: three calls.

        Args:
            max_age: maximum age of cached data in seconds.

        Raises:
            AdminNotFoundError: the tenant or the namespace does not exist, or did not then.
        """
        return await self._namespaces.get(namespace, max_age=max_age)

    async def topics(self, namespace: str) -> tuple[frozenset[str], frozenset[str]]:
        """Return the names of topics without partitions, and of partitioned topics: two calls.

        The first include the single partitions of the second.

        Raises:
            AdminNotFoundError: the tenant or the namespace does not exist.
        """
        does, path = f"list the topics of {namespace}", f"persistent/{quoted(namespace)}"
        unpartitioned, partitioned = await asyncio.gather(
            self._get(does, path, model.name_set, LONG_ANSWER),
            self._get(does, f"{path}/partitioned", model.name_set, LONG_ANSWER),
        )
        return unpartitioned, partitioned

    @contextmanager
    def granting(self, namespace: str) -> Iterator[Granter]:
        """Announce that grants on topics of one namespace may be changed within the block.

        The yielded function changes them, once. It waits for other announced changes, while they
        keep coming, and all are sent in one call. It raises an `AdminError` if one of its changes
        was refused; the others may be performed.
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
        return await self._get(does, f"namespaces/{quoted(tenant)}", model.name_set)

    async def _permissions(self, namespace: str) -> Permissions:
        does, path = f"read the grants in {namespace}", f"namespaces/{quoted(namespace)}"
        policies = await self._get(does, path, model.read_namespace_policies, LONG_ANSWER)
        return policies["permissions"]  # type: ignore[no-any-return]

    async def _read_namespace(self, namespace: str) -> model.NamespaceState:
        does, path = f"read namespace {namespace}", f"namespaces/{quoted(namespace)}"
        reading = self._get(does, path, model.read_namespace_policies, LONG_ANSWER)
        topics, policies = await asyncio.gather(self.topics(namespace), reading)
        return model.NamespaceState(*topics, **policies)


def _schema_path(topic: TopicName) -> str:
    """Return the path of the latest schema of a topic."""
    name = quote(quote(topic.local, safe=""), safe="")  # the broker decodes it twice
    return f"schemas/{quoted(topic.namespace_name)}/{name}/schema"
