"""The calls about one topic, one method each; `client.Admin` has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redrive.admin import answers, partitions
from redrive.admin.answer_limits import LONG
from redrive.admin.calls import Calls
from redrive.admin.errors import AdminNotFoundError
from redrive.admin.http import Call
from redrive.admin.model import (
    Schema,
    SubscriptionStats,
    TopicMetadata,
    TopicSubscriptions,
    TopicUsage,
)
from redrive.admin.paths import schema_path, schemas_path, subscription_path, topic_path
from redrive.admin.policies import TopicPolicy, Write
from redrive.admin.stats import read_producers, read_stats
from redrive.policy.naming import TopicName

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
        return await self._get(
            f"read the partitions of {topic}", path, lambda answer: int(answer["partitions"])
        )

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
        read = answers.partitioned if partitioned else answers.unpartitioned
        return await self._get(f"read the properties of {topic}", path, read)

    async def set_properties(self, topic: TopicName, properties: Mapping[str, str]) -> None:
        """Set properties of a topic; those that are not named stay as they are."""
        call = Call(f"mark {topic}", "PUT", f"{topic_path(topic)}/properties", dict(properties))
        await self._send(call)

    async def schema(self, topic: TopicName) -> Schema | None:
        """Return the newest schema of a topic; None if it has none."""
        try:
            return await self._get(
                f"read the schema of {topic}", schema_path(topic), answers.schema, LONG
            )
        except AdminNotFoundError:
            return None

    async def schemas(self, topic: TopicName) -> tuple[Schema, ...]:
        """Return all versions of a topic's schema, the oldest first."""
        try:
            return await self._get(
                f"read the schemas of {topic}", schemas_path(topic), answers.schemas, LONG
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
        return await partitions.subscriptions(self._get, topic, partitioned=partitioned)

    async def receivers(self, topic: TopicName, *, partitioned: bool) -> TopicSubscriptions:
        """Return the names of the subscriptions that keep the messages of a topic for consumers.

        These are the durable ones. Those of readers end with them, and Pulsar's own, such as
        `__compaction`, keep no message for anybody. Any right on the topic is enough.

        Raises:
            AdminNotFoundError: as for `stats`.
        """
        return await partitions.receivers(self._get, topic, partitioned=partitioned)

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
        return await self._get(f"read {policy} of {topic}", path, answers.as_is)

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
        return await self._get(f"read the internal state of {topic}", path, dict[str, Any], LONG)

    async def stats(
        self, topic: TopicName, *, partitioned: bool, oldest: bool = False
    ) -> dict[str, SubscriptionStats]:
        """Return how the subscriptions of a topic stand, by name.

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
        return await self._get(f"read the statistics of {topic}", path, read_stats, LONG)

    async def acknowledged(self, topic: TopicName, *, partitioned: bool, subscription: str) -> int:
        """Return how many messages are acknowledged behind one that is not, over several ledgers.

        Of a partitioned topic, where most are. The broker's answer lists all ranges of them: it is
        long where there are many.

        Raises:
            AdminNotFoundError: as for `stats`.
        """
        return await partitions.acknowledged(
            self._get, topic, partitioned=partitioned, subscription=subscription
        )

    async def producers(self, topic: TopicName, *, partitioned: bool) -> list[Mapping[str, str]]:
        """Return the metadata of each producer of a topic, of each of its partitions.

        Raises:
            AdminNotFoundError: as for `stats`.
        """
        kind = "partitioned-stats?perPartition=true" if partitioned else "stats?"
        path = f"{topic_path(topic)}/{kind}&excludeConsumers=true"
        return await self._get(f"read the producers of {topic}", path, read_producers, LONG)

    async def usage(self, topic: TopicName, *, partitioned: bool, subscription: str) -> TopicUsage:
        """Return the users of a topic, and the exact backlogs of *subscription* and others.

        Raises:
            AdminNotFoundError: as for `stats`.
        """
        return await partitions.usage(
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
