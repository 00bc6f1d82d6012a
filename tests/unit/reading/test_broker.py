"""Calls of a job to its broker: redirects of credentials, and retries of errors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pulsar
import pytest
from aiohttp import web

from redrive.admin import errors as admin
from redrive.admin.errors import AdminNotFoundError
from redrive.auth.method import ACCESS_VARIABLE, BrokerAccess, Method
from redrive.errors import RedriveError
from redrive.messages import NotSentError, SchemaError
from redrive.policy.naming import TopicName
from redrive.reading import broker
from redrive.reading.broker import ReplayRoleRefusedError
from redrive.reasons import Reason
from redrive.replay.ledger import FencedError
from tests.support.http_servers import serving
from tests.support.reasons import raises

TOPIC = TopicName("t", "n", "a")


@asynccontextmanager
async def redirecting(shown: list[str | None]) -> AsyncIterator[str]:
    """Serve a broker on 127.0.0.1 that redirects to localhost, where tokens are noted."""

    async def answer(request: web.Request) -> web.Response:
        if request.url.host == "localhost":
            shown.append(request.headers.get("Authorization"))
            return web.json_response({"reason": "no such topic"}, status=404)
        elsewhere = request.url.with_host("localhost")
        return web.Response(status=307, headers={"Location": str(elsewhere)})

    async with serving(answer) as url:
        yield url


@pytest.fixture
def give_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives this process a token, and says where it may be redirected."""
    file = tmp_path / "credentials" / "token"
    file.parent.mkdir()
    file.write_text("the-token\n")

    def give_token(*hosts: str) -> None:
        access = BrokerAccess(Method.TOKEN, str(tmp_path), hosts)
        monkeypatch.setenv(ACCESS_VARIABLE, access.encode())

    return give_token


@pytest.mark.parametrize("hosts", [(), ("broker-*.pulsar",), ("localhost:1",)])
async def test_token_is_not_redirected_to_unnamed_host(
    give_token: Callable[..., None], hosts: tuple[str, ...]
) -> None:
    give_token(*hosts)
    shown: list[str | None] = []
    async with redirecting(shown) as url:
        with raises(Reason.REDIRECT_REFUSED, match="redirectHosts"):
            await asyncio.to_thread(broker.read_partitions, url, TOPIC)
    assert shown == []


async def test_token_is_redirected_to_named_hosts(
    give_token: Callable[..., None],
) -> None:
    give_token("broker-*.pulsar", "localhost")
    shown: list[str | None] = []
    async with redirecting(shown) as url:
        with pytest.raises(AdminNotFoundError, match="no such topic"):
            await asyncio.to_thread(broker.read_partitions, url, TOPIC)
    assert shown == ["Bearer the-token"]


async def test_call_to_the_admin_api_starts_no_thread(
    give_token: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks call it for each range, and a thread takes longer than a request."""
    give_token()

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"subscriptions": {}})

    async with serving(answer) as url:

        def call() -> None:
            with monkeypatch.context() as patch:
                patch.delattr(threading.Thread, "start")
                assert not broker.is_subscribed(url, TOPIC, 0, "")

        await asyncio.to_thread(call)


@pytest.mark.parametrize("refusal", broker.OVER_QUOTA)
def test_refusal_of_a_full_topic_names_its_quota(refusal: type[Exception]) -> None:
    with (
        pytest.raises(
            ReplayRoleRefusedError, match="raise its backlog quota by size or by age"
        ) as shown,
        broker.refusals("open a producer", "produce"),
    ):
        raise refusal("Pulsar error: ProducerBlockedQuotaExceeded")
    assert shown.value.reason == Reason.LIMIT_REACHED
    assert "role" not in str(shown.value)
    assert not broker.may_pass(shown.value)


def error_caused_by(kind: type[RedriveError], cause: type[Exception] | None = None) -> RedriveError:
    error = kind("it does not work", remedy="look")
    error.__cause__ = cause("by this") if cause else None
    return error


@pytest.mark.parametrize(
    "error",
    [
        error_caused_by(ReplayRoleRefusedError, pulsar.Timeout),
        error_caused_by(ReplayRoleRefusedError, pulsar.ConnectError),
        error_caused_by(ReplayRoleRefusedError, pulsar.ProducerBusy),
        error_caused_by(NotSentError, pulsar.Timeout),
        error_caused_by(admin.BrokerUnreachableError),
        error_caused_by(admin.BrokerDownError),
        error_caused_by(admin.BrokerFailedError),
        error_caused_by(admin.BrokerRefusedError),
        error_caused_by(admin.AdminConflictError),
    ],
    ids=repr,
)
def test_unavailable_broker_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, error: RedriveError
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    answers = [error, error, None]

    def call() -> str:
        if answer := answers.pop(0):
            raise answer
        return "there"

    assert broker.waited(call) == "there"


@pytest.mark.parametrize(
    "error",
    [
        error_caused_by(ReplayRoleRefusedError, pulsar.AuthorizationError),
        error_caused_by(ReplayRoleRefusedError, pulsar.ConsumerBusy),
        error_caused_by(ReplayRoleRefusedError, pulsar.TopicNotFound),
        error_caused_by(SchemaError, pulsar.TopicNotFound),
        error_caused_by(FencedError, pulsar.ProducerFenced),
        error_caused_by(RedriveError, pulsar.Timeout),  # it has waited already
        error_caused_by(admin.AdminForbiddenError),
        error_caused_by(admin.AuthenticationFailedError),
        error_caused_by(admin.AdminNotFoundError),
    ],
    ids=repr,
)
def test_permanent_error_is_raised_at_once(error: RedriveError) -> None:
    calls = []

    def call() -> None:
        calls.append(1)
        raise error

    with pytest.raises(type(error)):
        broker.waited(call)
    assert len(calls) == 1


def test_interrupted_call_is_not_repeated() -> None:
    def call() -> None:
        raise pulsar.Interrupted

    with pytest.raises(pulsar.Interrupted):
        broker.opened("look", "consume", call)
