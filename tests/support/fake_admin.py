"""A broker's admin API over HTTP, with topics, subscriptions, grants and policies in memory.

For tests in which a broker fails at a chosen call, or with many brokers. It answers like the
real one, with status and reason, which `tests/contract/admin` proves. It stores no messages.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import unquote

import aiohttp
from aiohttp import web
from yarl import URL

from redrive.admin.access import Access
from redrive.admin.client import Admin
from redrive.admin.guards import Breaker
from redrive.admin.http import Http

SUPERUSER = "superuser"
_TOKEN = "token-of-"  # noqa: S105 - valid nowhere

Do = Callable[[], Awaitable[web.StreamResponse]]
"""A function that executes the call and returns the answer."""
Fault = Callable[[web.Request, Do], Awaitable[web.StreamResponse]]
"""A fault between a call and the broker, which returns the answer."""

_DEFAULTS: Mapping[str, Any] = {
    "deduplicationEnabled": False,
    "retention": {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0},
    "inactiveTopicPolicies": {
        "inactiveTopicDeleteMode": "delete_when_no_subscriptions",
        "maxInactiveDurationSeconds": 60,
        "deleteWhileInactive": True,
    },
    "delayedDelivery": {"tickTime": 1000, "active": True, "maxDeliveryDelayInMillis": 0},
}
_READER = "reader-"
"""The prefix of names of readers' subscriptions, which are not durable."""
_NO_STATS: dict[str, Any] = {
    "msgBacklog": 0,
    "msgOutCounter": 0,
    "consumers": [],
    "isDurable": True,
}


@dataclass
class Topic:
    """A topic, partitioned or (0) not.

    Attributes:
        parts: the subscriptions of each existing partition, by the suffix of its name; the suffix
            is empty for a topic without partitions.
        backlog: of each subscription of a topic without partitions.
    """

    partitions: int
    properties: dict[str, str]
    parts: dict[str, list[str]] = field(default_factory=dict)
    policies: dict[str, Any] = field(default_factory=dict)
    quotas: dict[str, Any] = field(default_factory=dict)
    schema: dict[str, Any] | None = None
    older_schemas: list[dict[str, Any]] = field(default_factory=list)
    backlog: int = 0

    def __post_init__(self) -> None:
        self.restore()

    @property
    def subscriptions(self) -> list[str]:
        """The subscriptions of all partitions."""
        return sorted({name for names in self.parts.values() for name in names})

    def restore(self, subscriptions: Sequence[str] = ()) -> None:
        """Create the missing partitions with *subscriptions*."""
        suffixes = [f"-partition-{index}" for index in range(self.partitions)] or [""]
        self.parts = {end: self.parts.get(end, [*subscriptions]) for end in suffixes}


@dataclass
class Namespace:
    """A Pulsar namespace: its topics by local name, and topic → role → actions."""

    topics: dict[str, Topic] = field(default_factory=dict)
    grants: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    policies: dict[str, Any] = field(default_factory=dict)


class Refused(Exception):  # noqa: N818 - a refusal, not an error
    """The broker refuses a call."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class FakeBroker:
    """The state of the broker, and its calls.

    Attributes:
        calls: method and path of each call, in order, failed ones too.
        writes: the calls that are no reads.
        fault: see `Fault`.
        url: where its admin API is; see `serving` and `in_process`.
        version: its release.
        in_force: topic policy → the value of topics without their own.
        settings: its configuration, which a super-user may read.
    """

    def __init__(self) -> None:
        self.tenants: dict[str, list[str]] = {}
        self.namespaces: dict[str, Namespace] = {}
        self.calls: list[tuple[str, str]] = []
        self.fault: Fault | None = None
        self.url = "http://broker.test"
        self.version = "4.0.8"
        self.in_force: dict[str, Any] = dict(_DEFAULTS)
        self.settings = {
            "subscriptionTypesEnabled": "[Exclusive, Failover, Key_Shared, Shared]",
            "encryptionRequireOnProducer": "false",
        }

    @classmethod
    @asynccontextmanager
    async def serving(cls) -> AsyncIterator[FakeBroker]:
        """Serve on a free port of the loopback interface."""
        broker = cls()
        application = web.Application(middlewares=[broker._answer])
        application.add_routes(broker._routes())
        # A call that hangs by a fault is not awaited.
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            broker.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield broker
        finally:
            await runner.cleanup()

    @staticmethod
    def token(role: str) -> str:
        """A token whose bearer acts as *role*."""
        return f"{_TOKEN}{role}"

    @cached_property
    def _http(self) -> Http:
        return Http(in_process(self))

    def admin(self, breaker: Breaker | None = None) -> Admin:
        """Return a client of a super-user; see `in_process`."""
        return Admin(self._http, self.url, Access.bearer(self.token(SUPERUSER)), breaker)

    @property
    def writes(self) -> list[tuple[str, str]]:
        return [call for call in self.calls if call[0] != "GET"]

    def _routes(self) -> list[web.RouteDef]:
        topic = "/persistent/{tenant}/{namespace}/{topic}"
        table = {
            "GET /clusters": self._clusters,
            "GET /brokers/version": self._version,
            "GET /brokers/configuration/runtime": self._runtime_configuration,
            "PUT /tenants/{tenant}": self._create_tenant,
            "GET /namespaces/{tenant}": self._list_namespaces,
            "POST /namespaces/grantPermissionsOnTopics": self._grant_many,
            "POST /namespaces/revokePermissionsOnTopics": self._revoke_many,
            "PUT /namespaces/{tenant}/{namespace}": self._create_namespace,
            "GET /namespaces/{tenant}/{namespace}": self._namespace_policies,
            "GET /persistent/{tenant}/{namespace}": self._list_topics,
            "GET /persistent/{tenant}/{namespace}/partitioned": self._list_partitioned,
            f"PUT {topic}": self._create_topic,
            f"DELETE {topic}": self._delete_topic,
            f"PUT {topic}/partitions": self._create_partitioned,
            f"GET {topic}/partitions": self._partitions,
            f"POST {topic}/partitions": self._add_partitions,
            f"DELETE {topic}/partitions": self._delete_topic,
            f"PUT {topic}/unload": self._unload,
            f"POST {topic}/createMissedPartitions": self._restore_partitions,
            f"GET {topic}/properties": self._properties,
            f"PUT {topic}/properties": self._set_properties,
            f"DELETE {topic}/properties": self._remove_property,
            f"GET {topic}/subscriptions": self._subscriptions,
            f"PUT {topic}/subscription/{{name}}": self._create_subscription,
            f"DELETE {topic}/subscription/{{name}}": self._delete_subscription,
            f"POST {topic}/permissions/{{role}}": self._grant,
            f"DELETE {topic}/permissions/{{role}}": self._revoke,
            f"GET {topic}/stats": self._stats,
            f"GET {topic}/partitioned-stats": self._partitioned_stats,
            f"GET {topic}/internalStats": self._internal_stats,
            "GET /schemas/{tenant}/{namespace}/{topic}/schema": self._schema,
            "GET /schemas/{tenant}/{namespace}/{topic}/schemas": self._schemas,
            "POST /schemas/{tenant}/{namespace}/{topic}/schema": self._set_schema,
            f"POST {topic}/messageTTL": self._set_ttl,
            f"GET {topic}/backlogQuotaMap": self._quotas,
            f"POST {topic}/backlogQuota": self._set_quota,
            f"DELETE {topic}/backlogQuota": self._remove_quota,
            f"DELETE {topic}/{{policy}}": self._remove_policy,
            f"GET {topic}/{{policy}}": self._policy,
            f"POST {topic}/{{policy}}": self._set_policy,
        }
        return [
            web.route(method, f"/admin/v2{path}", handler)
            for (method, path), handler in ((line.split(), do) for line, do in table.items())
        ]

    @web.middleware
    async def _answer(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]
    ) -> web.StreamResponse:
        self.calls.append((request.method, request.raw_path.removeprefix("/admin/v2/")))
        if self.fault is None:
            return await self._do(request, handler)
        return await self.fault(request, lambda: self._do(request, handler))

    async def _do(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]
    ) -> web.StreamResponse:
        if not request.headers.get("Authorization", "").startswith(f"Bearer {_TOKEN}"):
            page = "<html><title>Error 401 Authentication required</title></html>"
            return web.Response(status=401, text=page, content_type="text/html")
        if request.method == "PUT" and "Content-Type" not in request.headers:
            return web.json_response({"reason": "HTTP 415 Unsupported Media Type"}, status=415)
        try:
            answer = await handler(request)
        except Refused as refused:
            return web.json_response({"reason": refused.reason}, status=refused.status)
        if request.method != "GET":
            return web.Response(status=204)
        if isinstance(answer, web.Response):
            return answer
        return web.Response() if answer is None else web.json_response(answer)

    # Permissions: the super-user everywhere, a tenant's administrators in the tenant.

    def _check(self, request: web.Request, does: str, status: int = 403) -> str:
        """Return the namespace that the call is about."""
        tenant = request.match_info["tenant"]
        role = request.headers["Authorization"].removeprefix(f"Bearer {_TOKEN}")
        if tenant not in self.tenants:
            raise Refused(404, "Tenant does not exist")
        if role != SUPERUSER and role not in self.tenants[tenant]:
            raise Refused(status, f"Unauthorized to {does}")
        return f"{tenant}/{request.match_info.get('namespace', '')}"

    def _in(self, request: web.Request, does: str) -> tuple[str, Namespace]:
        name = self._check(request, does)
        if name not in self.namespaces:
            raise Refused(404, "Namespace does not exist")
        return name, self.namespaces[name]

    def _find(self, request: web.Request, does: str, status: int = 403) -> tuple[str, Topic]:
        name = self._check(request, does, status)
        local = request.match_info["topic"]
        whole, _, number = local.rpartition("-partition-")
        topics = self.namespaces.get(name, Namespace()).topics
        if local in topics:
            return f"persistent://{name}/{local}", topics[local]
        if whole in topics and f"-partition-{number}" in topics[whole].parts:
            return f"persistent://{name}/{local}", topics[whole]
        raise Refused(404, f"Topic persistent://{name}/{local} not found")

    def _find_parts(
        self, request: web.Request, does: str, status: int = 403
    ) -> tuple[str, list[list[str]]]:
        """Return the subscriptions of each partition, or of the one that is named."""
        name, topic = self._find(request, does, status)
        named = [names for end, names in topic.parts.items() if end and name.endswith(end)]
        return name, named or list(topic.parts.values())

    async def _version(self, _: web.Request) -> web.Response:
        return web.Response(text=self.version)

    async def _runtime_configuration(self, request: web.Request) -> dict[str, str]:
        if request.headers["Authorization"] != f"Bearer {self.token(SUPERUSER)}":
            raise Refused(401, "Need to authenticate to perform the request")
        return self.settings

    # Tenants and namespaces.

    async def _clusters(self, _: web.Request) -> Any:  # noqa: ANN401
        return ["standalone"]

    async def _create_tenant(self, request: web.Request) -> None:
        tenant = request.match_info["tenant"]
        if tenant in self.tenants:
            raise Refused(409, "Tenant already exist")
        self.tenants[tenant] = (await _body(request)).get("adminRoles", [])

    async def _list_namespaces(self, request: web.Request) -> Any:  # noqa: ANN401
        tenant = self._check(request, "list namespaces", 401)
        return [name for name in self.namespaces if name.startswith(tenant)]

    async def _create_namespace(self, request: web.Request) -> None:
        name = self._check(request, "create a namespace")
        if name in self.namespaces:
            raise Refused(409, "Namespace already exists")
        self.namespaces[name] = Namespace()

    async def _namespace_policies(self, request: web.Request) -> Any:  # noqa: ANN401
        _, namespace = self._in(request, "read policies")
        rights = {"auth_policies": {"destination_auth": namespace.grants}}
        return {**rights, "backlog_quota_map": {}, **namespace.policies}

    async def _list_topics(self, request: web.Request) -> Any:  # noqa: ANN401
        name, namespace = self._in(request, "get topics")
        return [
            f"persistent://{name}/{local}{end}"
            for local, topic in namespace.topics.items()
            for end in topic.parts
        ]

    async def _list_partitioned(self, request: web.Request) -> Any:  # noqa: ANN401
        name, namespace = self._in(request, "get topics")
        topics = namespace.topics.items()
        return [f"persistent://{name}/{local}" for local, topic in topics if topic.partitions]

    # Topics.

    async def _create_topic(self, request: web.Request) -> None:
        self._create(request, 0, await _body(request) or {})

    async def _create_partitioned(self, request: web.Request) -> None:
        body = await _body(request)
        whole = body if isinstance(body, dict) else {"partitions": body, "properties": {}}
        if whole["partitions"] <= 0:
            raise Refused(406, "Number of partitions should be more than 0")
        self._create(request, whole["partitions"], whole["properties"])

    def _create(self, request: web.Request, partitions: int, properties: dict[str, str]) -> None:
        name, local = self._check(request, "create a topic"), request.match_info["topic"]
        if name not in self.namespaces:
            raise Refused(404, "Namespace not found")
        if local in self.namespaces[name].topics:
            raise Refused(409, "This topic already exists")
        self.namespaces[name].topics[local] = Topic(partitions, dict(properties))

    async def _delete_topic(self, request: web.Request) -> None:
        name, topic = self._find(request, "delete a topic")
        namespace, local = self.namespaces[self._check(request, "")], request.match_info["topic"]
        if local not in namespace.topics:
            del topic.parts[local[local.rindex("-partition-") :]]
            return
        if bool(topic.partitions) != request.path.endswith("/partitions"):
            kind = "partitioned" if topic.partitions else "non-partitioned"
            raise Refused(409, f"{name} is a {kind} topic")
        del namespace.topics[local]
        namespace.grants.pop(name, None)

    async def _unload(self, request: web.Request) -> None:
        self._find(request, "unload a topic")

    async def _partitions(self, request: web.Request) -> Any:  # noqa: ANN401
        _, topic = self._find(request, "get metadata", 401)
        of_whole = {"properties": topic.properties} if topic.partitions else {}
        return {"partitions": topic.partitions, "deleted": False, **of_whole}

    async def _add_partitions(self, request: web.Request) -> None:
        name = f"persistent://{self._check(request, '')}/{request.match_info['topic']}"
        topics = self.namespaces[self._check(request, "")].topics
        topic = topics.get(request.match_info["topic"])
        if topic is None or not topic.partitions:
            raise Refused(409, f"Topic {name} is not the partitioned topic.")
        count = await _body(request)
        if count < topic.partitions:
            have = f"the current partitions {topic.partitions}."
            raise Refused(422, f"Desired partitions {count} can't be less than {have}")
        topic.partitions = count
        topic.restore(topic.subscriptions)

    async def _restore_partitions(self, request: web.Request) -> None:
        name, topic = self._find(request, "create missing partitions")
        if not topic.partitions:
            raise Refused(404, f"Topic {name} does not exist")
        topic.restore()

    async def _properties(self, request: web.Request) -> Any:  # noqa: ANN401
        return self._find(request, "read properties", 401)[1].properties

    async def _set_properties(self, request: web.Request) -> None:
        self._find(request, "set properties")[1].properties.update(await _body(request))

    async def _remove_property(self, request: web.Request) -> None:
        self._find(request, "remove a property")[1].properties.pop(request.query["key"], None)

    # Subscriptions.

    async def _subscriptions(self, request: web.Request) -> Any:  # noqa: ANN401
        _, parts = self._find_parts(request, "get subscriptions", 401)
        return sorted({name for names in parts for name in names})

    async def _create_subscription(self, request: web.Request) -> None:
        try:
            _, topic = self._find(request, "subscribe")
        except Refused as refused:
            if refused.status != 404:
                raise
            raise Refused(412, "Topic does not exist and cannot be auto-created") from refused
        topic.restore()  # a call about one partition creates that one, too
        _, parts = self._find_parts(request, "subscribe")
        name = unquote(request.match_info["name"])  # the second time, like the broker
        if all(name in names for names in parts):
            raise Refused(409, "Subscription already exists for topic")
        for names in parts:
            if name not in names:
                names.append(name)

    async def _delete_subscription(self, request: web.Request) -> None:
        whole, parts = self._find_parts(request, "unsubscribe")
        name = unquote(request.match_info["name"])
        having = [names for names in parts if name in names]
        for names in having:
            names.remove(name)
        if len(having) < len(parts):
            raise Refused(404, f"Subscription {name} not found for topic {whole}")

    # Grants.

    async def _grant_many(self, request: web.Request) -> None:
        self._set_grants(request, await _body(request))

    async def _revoke_many(self, request: web.Request) -> None:
        self._set_grants(request, [asked | {"actions": []} for asked in await _body(request)])

    async def _grant(self, request: web.Request) -> None:
        name, _ = self._find(request, "grant")
        asked = {"topic": name, "role": request.match_info["role"]}
        self._set_grants(request, [asked | {"actions": await _body(request)}])

    async def _revoke(self, request: web.Request) -> None:
        name, _ = self._find(request, "revoke")
        role = request.match_info["role"]
        self._set_grants(request, [{"topic": name, "role": role, "actions": []}])

    def _set_grants(self, request: web.Request, asked: list[dict[str, Any]]) -> None:
        """Replace the permissions of roles, atomically."""
        bearer = request.headers["Authorization"].removeprefix(f"Bearer {_TOKEN}")
        replaced = []
        for grant in asked:
            tenant, namespace, local = grant["topic"].removeprefix("persistent://").split("/", 2)
            if bearer != SUPERUSER and bearer not in self.tenants.get(tenant, []):
                raise Refused(401, "Don't have permission to administrate resources on this tenant")
            within = self.namespaces.get(f"{tenant}/{namespace}", Namespace())
            if local not in within.topics:
                raise Refused(404, f"Topic {grant['topic']} not found")
            replaced.append((within, grant))
        for within, grant in replaced:
            roles = within.grants.setdefault(grant["topic"], {})
            roles.pop(grant["role"], None)
            if grant["actions"]:
                roles[grant["role"]] = grant["actions"]
            if not roles:
                del within.grants[grant["topic"]]

    # Statistics and policies.

    async def _stats(self, request: web.Request) -> Any:  # noqa: ANN401
        name, topic = self._find(request, "read statistics", 401)
        whole = request.match_info["topic"] in self.namespaces[self._check(request, "")].topics
        if topic.partitions and whole:
            raise Refused(404, f"Topic {name} not found")
        _, [names] = self._find_parts(request, "read statistics", 401)
        return _unused(names, topic.backlog)

    async def _partitioned_stats(self, request: web.Request) -> Any:  # noqa: ANN401
        name, topic = self._find(request, "read statistics", 401)
        if not topic.partitions:
            raise Refused(404, f"Partitioned Topic {name} not found")
        parts = {f"{name}{end}": _unused(names) for end, names in topic.parts.items()}
        return {
            **_unused(topic.subscriptions),
            "metadata": {"partitions": topic.partitions, "deleted": False},
            "partitions": parts or {name: _unused([])},
        }

    async def _internal_stats(self, request: web.Request) -> Any:  # noqa: ANN401
        self._find(request, "read statistics", 401)
        return {"state": "LedgerOpened"}

    async def _policy(self, request: web.Request) -> Any:  # noqa: ANN401
        _, topic = self._find(request, "read a policy")
        policy = request.match_info["policy"]
        inherited = self.in_force.get(policy) if request.query.get("applied") == "true" else None
        return topic.policies.get(policy, inherited)

    async def _set_policy(self, request: web.Request) -> None:
        _, topic = self._find(request, "set a policy")
        topic.policies[request.match_info["policy"]] = await _body(request)

    async def _remove_policy(self, request: web.Request) -> None:
        _, topic = self._find(request, "remove a policy")
        topic.policies.pop(request.match_info["policy"], None)

    async def _remove_quota(self, request: web.Request) -> None:
        _, topic = self._find(request, "remove a policy")
        topic.quotas.pop(request.query["backlogQuotaType"], None)

    async def _set_ttl(self, request: web.Request) -> None:
        _, topic = self._find(request, "set a policy")
        seconds = int(request.query["messageTTL"])
        if seconds < 0:
            raise Refused(412, "Invalid value for message TTL")
        topic.policies["messageTTL"] = seconds

    async def _schema(self, request: web.Request) -> Any:  # noqa: ANN401
        try:
            _, topic = self._find(request, "read a schema", 401)
        except Refused as refused:
            if refused.status != 404:
                raise
            raise Refused(404, "Schema not found") from refused
        if topic.schema is None:
            raise Refused(404, "Schema not found")
        return topic.schema

    async def _schemas(self, request: web.Request) -> Any:  # noqa: ANN401
        newest = await self._schema(request)
        versions = [*self._find(request, "read schemas")[1].older_schemas, newest]
        return {
            "getSchemaResponses": [
                {"version": number, **schema} for number, schema in enumerate(versions)
            ]
        }

    async def _set_schema(self, request: web.Request) -> None:
        _, topic = self._find(request, "set a schema")
        body = await _body(request)
        new = {"type": body["type"], "data": body["schema"], "properties": body["properties"]}
        if topic.schema is not None:
            if topic.schema["type"] != body["type"]:
                raise Refused(409, "Incompatible schema")
            if new in (*topic.older_schemas, topic.schema):
                return
            topic.older_schemas.append(topic.schema)
        topic.schema = new

    async def _quotas(self, request: web.Request) -> Any:  # noqa: ANN401
        return self._find(request, "read a policy")[1].quotas

    async def _set_quota(self, request: web.Request) -> None:
        body = await _body(request)
        size = body.get("limitSize", -1)
        quota = {"limit": size, "limitSize": size, "limitTime": body.get("limitTime", 0)}
        _, topic = self._find(request, "set a policy")
        kind = request.query["backlogQuotaType"]
        topic.quotas[kind] = quota | {"policy": body["policy"]}


def in_process(*brokers: FakeBroker) -> aiohttp.ClientSession:
    """Return a session whose calls reach *brokers* by their URLs, without a socket.

    A call takes a fraction of the time that HTTP takes: for tests with thousands of calls, and for
    virtual time.
    """
    session = _InProcess({URL(broker.url).origin(): broker for broker in brokers})
    return cast("aiohttp.ClientSession", session)


class _InProcess:
    """A session of which `Http` uses one method."""

    def __init__(self, brokers: Mapping[URL, FakeBroker]) -> None:
        self._brokers = brokers
        self._routers = {url: web.UrlDispatcher() for url in brokers}
        self._matches: dict[tuple[str, URL], web.UrlMappingMatchInfo] = {}
        for url, router in self._routers.items():
            router.add_routes(brokers[url]._routes())  # noqa: SLF001

    @asynccontextmanager
    async def request(
        self, method: str, url: URL, *, data: str | None, headers: Mapping[str, str], **_: object
    ) -> AsyncIterator[Any]:
        """Have a broker answer; other calls run meanwhile.

        Raises:
            aiohttp.ServerDisconnectedError: a fault closed the connection.
        """
        transport = _Transport()

        async def text() -> str:
            return data or ""

        request = SimpleNamespace(
            method=method,
            rel_url=url.relative(),
            raw_path=url.raw_path_qs,
            path=url.path,
            query=url.query,
            headers=headers,
            transport=transport,
            text=text,
        )
        await asyncio.sleep(0)
        match = self._matches.get((method, url))
        if match is None:
            router = self._routers[url.origin()]
            match = await router.resolve(cast("web.Request", request))
            self._matches[method, url] = match
        request.match_info = match
        broker = self._brokers[url.origin()]
        try:
            response = await broker._answer(cast("web.Request", request), match.handler)  # noqa: SLF001
        except web.HTTPException as unknown:
            response = unknown
        if transport.is_closed:
            raise aiohttp.ServerDisconnectedError
        yield _Reply(cast("web.Response", response))


class _Transport:
    """A connection that a fault may close."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


class _Reply:
    """The parts of a response that `Http` reads."""

    def __init__(self, response: web.Response) -> None:
        self.status, self.headers, self.content = response.status, response.headers, self
        self._body = cast("bytes", response.body or b"")

    async def iter_any(self) -> AsyncIterator[bytes]:
        yield self._body


def _unused(subscriptions: Sequence[str], backlog: int = 0) -> dict[str, Any]:
    stats = {
        name: {**_NO_STATS, "msgBacklog": backlog, "isDurable": not name.startswith(_READER)}
        for name in subscriptions
    }
    return {"subscriptions": stats, "publishers": [], "storageSize": 0}


async def _body(request: web.Request) -> Any:  # noqa: ANN401 - JSON
    text = await request.text()
    return json.loads(text) if text else None


def at_call(number: int, fault: Fault) -> Fault:
    """Return a fault that applies *fault* to one call, counted from 1."""
    count = 0

    async def befall(request: web.Request, do: Do) -> web.StreamResponse:
        nonlocal count
        count += 1
        return await (fault(request, do) if count == number else do())

    return befall


def answering(status: int) -> Fault:
    """Refuse with *status*."""

    async def refuse(_: web.Request, __: Do) -> web.StreamResponse:
        return web.json_response({"reason": f"injected {status}"}, status=status)

    return refuse


async def neither_done_nor_told(request: web.Request, _: Do) -> web.StreamResponse:
    """Close the connection instead of executing the call."""
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def done_but_not_told(request: web.Request, do: Do) -> web.StreamResponse:
    """Execute the call, then close the connection instead of answering."""
    answer = await do()
    assert request.transport is not None
    request.transport.close()
    return answer
