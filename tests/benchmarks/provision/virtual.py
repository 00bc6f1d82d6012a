"""Brokers in the process of the operator, and virtual time: hours of polling take a minute.

No call leaves the process, so the clock of the event loop skips all waits. Each call takes
`CALL_SECONDS` of virtual time.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import parse_qsl, unquote

import looptime
from aiohttp import web

from redrive.admin.errors import error_for
from redrive.admin.http import Call, Endpoint, Http
from redrive.kube.context import Context
from tests.benchmarks.provision.brokers import namespace
from tests.benchmarks.provision.in_process import cluster
from tests.support.fake_admin import FakeBroker, Namespace, Topic
from tests.support.operator_in_process import operator_in_process

CALL_SECONDS = 0.005
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
KINDS = (
    ("namespace", r"namespaces/\w+/[^/]+|persistent/\w+/[^/]+(/partitioned)?"),
    ("connection", r"clusters|brokers/.*|namespaces/\w+"),
    ("statistics", r".*/(partitioned-)?stats"),
    ("state of topics", r".*/(partitioned-)?internalStats"),
    ("subscriptions", r".*/subscriptions"),
    ("properties", r".*/(properties|partitions)"),
    ("schemas", r"schemas/.*"),
    ("topic policies", r".*"),
)
"""Kinds of reads, and patterns of their paths; the first one counts."""


class VirtualHttp(Http):
    """Calls brokers in memory.

    Attributes:
        brokers: brokers by URL.
        calls: number of calls by kind.
    """

    def __init__(self, brokers: Mapping[str, FakeBroker]) -> None:
        self.brokers = brokers
        self.calls = Counter[str]()
        self._routes = {url: _Routes(broker) for url, broker in brokers.items()}

    async def send(self, call: Call, endpoint: Endpoint) -> Any:  # noqa: ANN401  JSON
        """Have a broker answer *call*."""
        path, _, query = call.path.partition("?")
        read = next(kind for kind, pattern in KINDS if re.fullmatch(pattern, path))
        self.calls[read if call.method == "GET" else "writes"] += 1
        await asyncio.sleep(CALL_SECONDS)
        request = _Request(call, path, query, endpoint.access.headers)
        answer = await self._routes[endpoint.url].answer(request)
        body = b"" if answer.body is None else bytes(cast("bytes", answer.body))
        if call.optional and answer.status == HTTPStatus.NOT_FOUND:
            return None
        if answer.status not in {HTTPStatus.OK, HTTPStatus.NO_CONTENT}:
            raise error_for(call.does, answer.status, body.decode())
        if call.as_text:
            return body.decode()
        document = json.loads(body) if body else None
        return document if call.read is None else call.read(document)


class _Request:
    """The parts of a request that a `FakeBroker` reads."""

    def __init__(self, call: Call, path: str, query: str, headers: Mapping[str, str]) -> None:
        self.method = call.method
        self.path = self.raw_path = f"/admin/v2/{path}"
        self.query = dict(parse_qsl(query, keep_blank_values=True))
        self.headers = {**headers, "Content-Type": call.content_type}
        self.match_info: dict[str, str] = {}
        self._body = "" if call.body is None else json.dumps(call.body)

    async def text(self) -> str:
        """Return the body."""
        return self._body


class _Routes:
    """Finds the handler of a request, as the server of a `FakeBroker` does."""

    def __init__(self, broker: FakeBroker) -> None:
        self._broker = broker
        self._routes = [
            (route.method, re.compile(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", route.path)), route)
            for route in broker._routes()  # noqa: SLF001
        ]

    async def answer(self, request: _Request) -> web.Response:
        """Return the broker's answer."""
        for method, pattern, route in self._routes:
            if method == request.method and (match := pattern.fullmatch(request.path)):
                groups = match.groupdict()
                request.match_info = {name: unquote(value) for name, value in groups.items()}
                do = self._broker._do  # noqa: SLF001
                answer = await do(cast("web.Request", request), cast("Any", route.handler))
                return cast("web.Response", answer)
        return web.json_response({"reason": "HTTP 404 Not Found"}, status=404)


@asynccontextmanager
async def idle_operator(brokers: int, policies: int) -> AsyncIterator[tuple[Context, VirtualHttp]]:
    """Run the operator in virtual time with *policies*, spread over this number of brokers."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, asyncio.BaseEventLoop)
    looptime.patch_event_loop(loop, start=0.0, noop_cycles=1)
    served = {f"http://broker-{number}:8080": FakeBroker() for number in range(brokers)}
    for broker in served.values():
        broker.tenants = {"shop": []}
        for number in range(policies // brokers):
            topics = broker.namespaces.setdefault(namespace(number), Namespace()).topics
            topics[f"orders-{number}"] = Topic(0, {})
    http = VirtualHttp(served)
    kubernetes = cluster(list(served), range(policies))

    def clock() -> datetime:
        return BEGIN + timedelta(seconds=loop.time())

    async with operator_in_process(kubernetes, http, clock) as ctx:
        yield ctx, http
