"""Admin client over real HTTP: redirects, rights in batches, and stats of partitions."""

from __future__ import annotations

import json
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from yarl import URL

from redrive.admin.access import Access
from redrive.admin.client import Admin
from redrive.admin.errors import (
    AdminError,
    AdminNotFoundError,
    AuthenticationFailedError,
    BrokerFailedError,
    BrokerRefusedError,
)
from redrive.admin.http import Http
from redrive.admin.model import RightsChange, TopicSubscriptions
from redrive.policy.naming import TopicName
from redrive.reasons import Reason
from tests.support.fake_admin import SUPERUSER, FakeBroker, Namespace
from tests.support.fake_admin import Topic as FakeTopic
from tests.support.http_servers import Answer, serving
from tests.support.reasons import raises

TOPIC = TopicName("t", "n", "a")
PRODUCE = frozenset({"produce"})


@asynccontextmanager
async def redirected(
    answer: Answer, host: str = "127.0.0.1", hosts: tuple[str, ...] = ()
) -> AsyncIterator[Admin]:
    """Yield a client of a broker that redirects to a server with *answer*, addressed as *host*.

    Args:
        hosts: hosts that the client may send its credentials to; `{port}` is that of the server.
    """
    async with serving(answer) as target:
        hosts = tuple(pattern.format(port=URL(target).port) for pattern in hosts)
        location = target.replace("127.0.0.1", host)

        async def redirect(request: web.Request) -> web.Response:
            return web.Response(status=307, headers={"Location": f"{location}{request.raw_path}"})

        async with serving(redirect) as url, Http.open() as http:
            yield Admin(http, url, Access.bearer("the-token", hosts=hosts))


@pytest.mark.parametrize(
    ("hosts", "followed"),
    [
        (("localhost:{port}",), True),
        (("local*:{port}",), True),
        (("localhost",), False),
        (("localhost:1",), False),
        ((), False),
        (("local:{port}",), False),
    ],
)
async def test_redirect_sends_credentials_only_to_named_hosts(
    hosts: tuple[str, ...], *, followed: bool
) -> None:
    seen: list[tuple[str, str | None, str]] = []

    async def owner(request: web.Request) -> web.Response:
        seen.append((request.method, request.headers.get("Authorization"), await request.text()))
        return web.Response(status=204)

    async with redirected(owner, "localhost", hosts) as admin:
        if followed:
            await admin.create_topic(TOPIC, 3, {"k": "v"})
        else:
            with raises(Reason.REDIRECT_REFUSED, match="redirectHosts") as refused:
                await admin.create_topic(TOPIC, 3, {"k": "v"})
            assert "localhost" not in "".join(traceback.format_exception(refused.value))
    body = '{"partitions": 3, "properties": {"k": "v"}}'
    assert seen == ([("PUT", "Bearer the-token", body)] if followed else [])


class Renewable:
    """Credentials with a successor, or without one."""

    def __init__(self, successor: str | None) -> None:
        self.held = Access.bearer("old")
        self._successor = successor

    async def renewed(self, refused: Access) -> Access | None:
        assert refused is self.held
        return None if self._successor is None else Access.bearer(self._successor)


@pytest.mark.parametrize("successor", ["valid", "refused", None])
async def test_refused_call_is_repeated_once_with_renewed_token(successor: str | None) -> None:
    tokens: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        tokens.append(request.headers["Authorization"].removeprefix("Bearer "))
        return web.json_response(["here"], status=200 if tokens[-1] == "valid" else 401)

    async with serving(answer) as url, Http.open() as http:
        admin = Admin(http, url, Renewable(successor))
        if successor == "valid":
            assert await admin.clusters() == {"here"}
        else:
            with pytest.raises(AuthenticationFailedError):
                await admin.clusters()
    assert tokens == ["old", *filter(None, [successor])]


async def test_subscription_is_created_at_the_first_message() -> None:
    created: list[tuple[str, str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        created.append((request.method, request.path, await request.json()))
        return web.Response(status=204)

    async with serving(answer) as url, Http.open() as http:
        await Admin(http, url, Access.bearer("t")).create_subscription(TOPIC, "s")
    first = {"ledgerId": -1, "entryId": -1, "partitionIndex": -1}
    assert created == [("PUT", "/admin/v2/persistent/t/n/a/subscription/s", first)]


async def test_redirect_to_same_origin_is_followed() -> None:
    async def answer(request: web.Request) -> web.Response:
        if not request.query:
            return web.Response(status=307, headers={"Location": f"{request.url}?there=1"})
        return web.json_response(["here"])

    async with serving(answer) as url, Http.open() as http:
        assert await Admin(http, url, Access.bearer("the-token")).clusters() == {"here"}


async def test_redirect_to_other_port_of_host_is_refused() -> None:
    tokens: list[str | None] = []

    async def neighbour(request: web.Request) -> web.Response:
        tokens.append(request.headers.get("Authorization"))
        return web.json_response(["here"])

    async with redirected(neighbour) as admin:
        with raises(Reason.REDIRECT_REFUSED, match="redirectHosts"):
            await admin.clusters()
    assert tokens == []


async def test_endless_redirects_are_refused_without_token() -> None:
    async def redirect(request: web.Request) -> web.Response:
        return web.Response(status=307, headers={"Location": request.raw_path})

    async with serving(redirect) as url, Http.open() as http:
        with raises(Reason.REDIRECT_REFUSED, match="more than 5 redirects") as caught:
            await Admin(http, url, Access.bearer("the-token")).metadata(TOPIC, partitioned=True)
    assert "the-token" not in str(caught.value)


@pytest.mark.parametrize("status", [200, 403, 503])
@pytest.mark.parametrize("body", ["key: hidden", "<title>hidden</title>", '{"key": "hidden"}'])
async def test_answer_of_redirect_target_is_not_shown(status: int, body: str) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, text=body)

    async with redirected(answer, hosts=("127.0.0.1:{port}",)) as admin:
        with pytest.raises(AdminError) as caught:
            await admin.namespace("t/n")
    assert "hidden" not in "".join(traceback.format_exception(caught.value))
    is_json = status == 200 and body.startswith("{")
    shown = "JSON of another form" if is_json else f"{len(body)} characters"
    assert shown in str(caught.value)


async def test_reason_of_redirect_target_is_shown() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"reason": "The bundle is moving"}, status=412)

    async with redirected(answer, hosts=("127.0.0.1:{port}",)) as admin:
        with pytest.raises(BrokerRefusedError, match="412 The bundle is moving"):
            await admin.namespace("t/n")


@pytest.mark.parametrize(
    "url", ["http://h:99999", "http://[::1", "http://h:port", "http://a..b", "http://[zz]:80/x"]
)
async def test_invalid_admin_url_is_refused_and_shown(url: str) -> None:
    async with Http.open() as http:
        with raises(Reason.ADMIN_URL_INVALID) as caught:
            await Admin(http, url, Access.bearer("the-token")).clusters()
    assert f"got {url!r}; correct its host and port" in str(caught.value)
    assert Reason.of(caught.value).stalls


async def test_redirect_to_invalid_url_is_refused_and_hidden() -> None:
    async def redirect(_: web.Request) -> web.Response:
        return web.Response(status=307, headers={"Location": "http://broker-7:99999/"})

    async with serving(redirect) as url, Http.open() as http:
        with raises(Reason.ADMIN_URL_INVALID) as caught:
            await Admin(http, url, Access.bearer("the-token")).clusters()
    assert "broker-7" not in str(caught.value)


@pytest.mark.parametrize(
    ("answer_text", "shown"),
    [
        ("<html><title>Our\nportal</title>…</html>", "'39 characters that are not JSON'"),
        ("\udcff", "'1 characters that are not JSON'"),
        ("3", "'JSON of another form'"),
        ('{"auth_policies": {}}', "'JSON of another form'"),
    ],
)
async def test_answer_not_of_a_broker_is_refused_and_hidden(answer_text: str, shown: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        if answer_text.startswith("{") and "persistent" in request.path:
            return web.json_response([])
        body = answer_text.encode("utf-8", "surrogateescape")
        return web.Response(body=body, content_type="text/html", charset="utf-8")

    async with serving(answer) as url, Http.open() as http:
        with raises(Reason.UNEXPECTED_ANSWER) as caught:
            await Admin(http, url, Access.bearer("x")).namespace("t/n")
    assert str(caught.value) == (
        'adminURL does not lead to a Pulsar admin API: unexpected response to "read namespace t/n"'
        f"; got {shown}; correct adminURL: the address of the admin REST API, without /admin/v2"
    )


async def test_partition_count_missing_in_answer_is_refused() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"partitions": None})

    async with serving(answer) as url, Http.open() as http:
        with raises(Reason.UNEXPECTED_ANSWER, match="read the partitions of"):
            await Admin(http, url, Access.bearer("x")).partitions(TOPIC)


async def test_rights_without_batch_support_are_set_one_by_one() -> None:
    called: list[tuple[str, str, list[str] | None]] = []

    async def answer(request: web.Request) -> web.Response:
        if request.path.endswith("PermissionsOnTopics"):
            return web.Response(status=405)
        if "/missing/" in request.path:
            return web.json_response({"reason": "Topic missing not found"}, status=404)
        if request.method == "GET":
            rights = {str(TOPIC): {"gone/now": ["consume"]}}
            return web.json_response({"auth_policies": {"destination_auth": rights}})
        sent = await request.text()
        called.append((request.method, request.raw_path, json.loads(sent) if sent else None))
        return web.Response(status=204)

    async with serving(answer) as url, Http.open() as http:
        admin = Admin(http, url, Access.bearer("x"))
        changes = [
            RightsChange(TOPIC.sibling("missing"), "r", PRODUCE),
            RightsChange(TOPIC, "r", PRODUCE | {"consume"}),
            RightsChange(TOPIC, "team a/../b", PRODUCE),
            RightsChange(TOPIC, "gone/now", take=frozenset({"consume"})),
        ]
        with (
            admin.granting("t/n") as grant,
            pytest.raises(AdminNotFoundError, match="Topic missing not found"),
        ):
            await grant(changes)
    rights = "/admin/v2/persistent/t/n/a/permissions"
    assert called == [
        ("POST", f"{rights}/r", ["consume", "produce"]),
        ("POST", f"{rights}/team%20a%2F..%2Fb", ["produce"]),
        ("DELETE", f"{rights}/gone%2Fnow", None),
    ]


@asynccontextmanager
async def namespace(
    *topics: str, batches: Callable[[list[str]], int]
) -> AsyncIterator[tuple[Admin, list[str]]]:
    """Give a client of a broker that has *topics*, and the calls that it is asked.

    Args:
        batches: the status it answers when asked for rights on those topics.
    """
    calls: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        if request.method == "POST":
            names = [grant["topic"].rpartition("/")[2] for grant in await request.json()]
            calls.append(" ".join(names))
            return web.json_response({"reason": "?"}, status=batches(names))
        calls.append(request.path.removeprefix("/admin/v2/"))
        if "/partitioned" in request.path:
            return web.json_response([])
        if "namespaces" in request.path:
            granted = {"persistent://t/n/gone": {"r": ["consume"]}}
            return web.json_response({"auth_policies": {"destination_auth": granted}})
        return web.json_response([f"persistent://t/n/{name}" for name in topics])

    async with serving(answer) as url, Http.open() as http:
        yield Admin(http, url, Access.bearer("x")), calls


READING = {"persistent/t/n", "persistent/t/n/partitioned", "namespaces/t/n"}


async def test_missing_topics_cost_one_listing_and_one_more_batch() -> None:
    present = [f"there-{number}" for number in range(50)]
    missing = [f"missing-{number}" for number in range(50)]

    def batches(names: list[str]) -> int:
        return 404 if set(names) & set(missing) else 204

    async with namespace(*present, batches=batches) as (admin, calls):
        changes = [RightsChange(TOPIC.sibling(name), "r", PRODUCE) for name in [*present, *missing]]
        with (
            admin.granting("t/n") as grant,
            pytest.raises(
                AdminNotFoundError,
                match="grant permissions of r: the topic does not exist; got 'persistent://t/n/missing",
            ),
        ):
            await grant(changes)
        assert set(calls[2:-1]) == READING
        assert [*calls[:2], calls[-1], len(calls)] == [
            "namespaces/t/n",
            " ".join([*present, *missing]),
            " ".join(present),
            6,
        ]


async def test_batch_refused_with_all_topics_present_is_not_repeated() -> None:
    async with namespace("a", "b", batches=lambda _: 404) as (admin, calls):
        both = [RightsChange(topic, "r", PRODUCE) for topic in (TOPIC, TOPIC.sibling("b"))]
        with (
            admin.granting("t/n") as grant,
            pytest.raises(AdminNotFoundError, match="refused to grant"),
        ):
            await grant(both)
        assert calls[1] == "a b"
        assert set(calls[2:]) == READING
        assert len(calls) == 5


async def test_batch_with_all_topics_missing_is_not_repeated() -> None:
    async with namespace(batches=lambda _: 404) as (admin, calls):
        with (
            admin.granting("t/n") as grant,
            pytest.raises(AdminNotFoundError, match="revoke permissions"),
        ):
            await grant([RightsChange(TOPIC.sibling("gone"), "r", take=frozenset({"consume"}))])
        assert len(calls) == 5


async def test_rights_granted_by_others_meanwhile_are_kept() -> None:
    async with FakeBroker.serving() as fake, Http.open() as http:
        fake.tenants = {"t": []}
        fake.namespaces = {"t/n": Namespace({"a": FakeTopic(0, {})}, {str(TOPIC): {}})}
        admin = Admin(http, fake.url, Access.bearer(FakeBroker.token(SUPERUSER)))
        with admin.granting("t/n") as grant:
            await admin.namespace("t/n")  # the read before the write
            fake.namespaces["t/n"].grants[str(TOPIC)] = {"r": ["functions"], "s": ["consume"]}
            await grant(
                [
                    RightsChange(TOPIC, "r", give=PRODUCE),
                    RightsChange(TOPIC, "s", give=PRODUCE, take=frozenset({"packages"})),
                    RightsChange(TOPIC, "s", take=frozenset({"consume"})),
                ]
            )
        granted = fake.namespaces["t/n"].grants[str(TOPIC)]
        assert {role: set(may) for role, may in granted.items()} == {
            "r": {"functions", "produce"},
            "s": {"produce"},
        }
        writes = len(fake.writes)
        with admin.granting("t/n") as grant:
            await grant([RightsChange(TOPIC, "r", give=PRODUCE)])
        assert len(fake.writes) == writes  # another client gave it


WHOLE = "partitioned-stats"
S = frozenset({"s"})


def part(*, stored: int = 0, **backlogs: int) -> dict[str, Any]:
    """Stats of a partition, as a broker answers them."""
    common = {"msgOutCounter": 0, "consumers": []}
    subscriptions = {name: {"msgBacklog": count, **common} for name, count in backlogs.items()}
    return {"subscriptions": subscriptions, "publishers": [], "storageSize": stored}


class Partitions:
    """A broker with one topic, and its stats of each partition, together and separately."""

    def __init__(
        self, reported: Mapping[int, Any], separate: Mapping[int, Any], count: int = 3
    ) -> None:
        self.reported = {str(TOPIC.partition(number)): stats for number, stats in reported.items()}
        self.separate = {TOPIC.partition(number).local: stats for number, stats in separate.items()}
        self.count = count
        self.calls: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        local, call = request.path.split("/")[-2:]
        self.calls.append(f"{local} {call}")
        assert ("getPreciseBacklog" in request.query) != ("excludeConsumers" in request.query)
        if call == WHOLE:
            metadata = {"partitions": self.count}
            return web.json_response({"metadata": metadata, "partitions": self.reported})
        stats = self.separate.get(local, 404)
        if isinstance(stats, int):
            return web.json_response({"reason": "no"}, status=stats)
        return web.json_response(stats)

    async def subscriptions(self) -> TopicSubscriptions:
        async with serving(self.answer) as url, Http.open() as http:
            admin = Admin(http, url, Access.bearer("x"))
            return await admin.subscriptions(TOPIC, partitioned=True)

    async def use(self) -> tuple[dict[str, int], int]:
        """Return backlogs, and the uncounted bytes of `s`."""
        async with serving(self.answer) as url, Http.open() as http:
            admin = Admin(http, url, Access.bearer("x"))
            usage = await admin.usage(TOPIC, partitioned=True, subscription="s")
        backlogs = {name: stands.backlog for name, stands in usage.subscriptions.items()}
        return backlogs, usage.uncounted


async def test_recent_stats_name_subscriptions_of_all_partitions() -> None:
    parts = {str(TOPIC.partition(0)): part(s=0), str(TOPIC.partition(1)): part(s=0, t=0)}
    calls = []

    async def answer(request: web.Request) -> web.Response:
        calls.append(request.path.rsplit("/", 1)[-1])
        return web.json_response({"metadata": {"partitions": 2}, "partitions": parts})

    async with serving(answer) as url, Http.open() as http:
        admin = Admin(http, url, Access.bearer("x"))
        await admin.stats(TOPIC, partitioned=True)
        recent = await admin.subscriptions(TOPIC, partitioned=True, max_age=60.0)
        assert (set(recent.names), calls) == ({"s"}, [WHOLE])
        fresh = await admin.subscriptions(TOPIC, partitioned=True)
        assert (set(fresh.names), calls) == ({"s", "t"}, [WHOLE, WHOLE])


async def test_subscriptions_of_partitions_are_read_in_one_call() -> None:
    topic = Partitions({0: part(s=0), 1: part(), 2: part(s=0, t=0)}, {})
    subscriptions = await topic.subscriptions()
    assert subscriptions.parts == (S, frozenset(), S | {"t"})
    assert topic.calls == [f"a {WHOLE}"]


async def test_omitted_partition_is_read_separately() -> None:
    topic = Partitions({0: part(s=0)}, {2: part(s=0)})
    assert (await topic.subscriptions()).parts == (S, None, S)
    assert topic.calls == [f"a {WHOLE}", "a-partition-1 stats", "a-partition-2 stats"]


async def test_unreadable_partition_is_not_taken_for_missing() -> None:
    with pytest.raises(BrokerFailedError, match="503 no"):
        await Partitions({0: part(s=0), 1: part(s=0)}, {2: 503}).subscriptions()
    with pytest.raises(BrokerFailedError, match="503 no"):
        await Partitions({0: part(s=0), 1: part(s=0)}, {2: 503}).use()


async def test_usage_includes_omitted_partitions() -> None:
    topic = Partitions({0: part(s=1), 1: part(s=0)}, {2: part(s=2)})
    assert await topic.use() == ({"s": 3}, 0)


async def test_usage_without_subscription_is_uncounted() -> None:
    topic = Partitions({0: part(s=1, stored=5), 1: part(t=0, stored=7), 2: part(stored=9)}, {})
    assert await topic.use() == ({"s": 1, "t": 0}, 16)


async def test_usage_reads_the_precise_backlog() -> None:
    async def answer(request: web.Request) -> web.Response:
        precise = request.query.get("getPreciseBacklog") == "true"
        return web.json_response(part(s=1 if precise else 0))

    async with serving(answer) as url, Http.open() as http:
        admin = Admin(http, url, Access.bearer("x"))
        usage = await admin.usage(TOPIC, partitioned=False, subscription="s")
    assert usage.subscriptions["s"].backlog == 1


@pytest.mark.parametrize("stats", [{}, {"subscriptions": 3}, []])
async def test_partition_stats_not_of_a_broker_are_refused(stats: object) -> None:
    with raises(Reason.UNEXPECTED_ANSWER):
        await Partitions({0: stats}, {}, count=1).subscriptions()
    with raises(Reason.UNEXPECTED_ANSWER):
        await Partitions({}, {0: stats}, count=1).use()


def test_subscription_missing_on_one_partition_is_incomplete() -> None:
    subscriptions = TopicSubscriptions((frozenset({"s", "t"}), None, frozenset({"s"})))
    assert not subscriptions.has("s")
    assert subscriptions.has_some_of("t")
    assert not subscriptions.has_some_of("u")
    assert subscriptions.missing == (1,)
    assert TopicSubscriptions((frozenset({"s"}), frozenset({"s", "t"}))).has("s")
    assert not TopicSubscriptions((frozenset({"s"}), frozenset({"s", "t"}))).has("t")
