"""Credentials of jobs: files, and tokens of an OAuth2 issuer."""

from __future__ import annotations

import asyncio
import gc
import ssl
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trustme
from aiohttp import web

from redrive.admin.errors import AdminError, AuthenticationFailedError
from redrive.admin.http import Http
from redrive.auth import files, oauth2
from redrive.auth.files import JobCredentials, job_credentials
from redrive.auth.method import ACCESS_VARIABLE, BrokerAccess, Method
from redrive.auth.oauth2 import Client, issue
from redrive.reasons import Reason
from tests.support.http_servers import serving
from tests.support.reasons import raises

Write = Callable[..., JobCredentials]
AUTHORITY = trustme.CA()


@pytest.fixture
def mounted(tmp_path: Path) -> Write:
    """Writes files, and returns the credentials in them."""

    def write(method: Method, files: dict[str, str], **more: Any) -> JobCredentials:  # noqa: ANN401
        for name, content in files.items():
            file = tmp_path / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(content)
        return JobCredentials(BrokerAccess(method, str(tmp_path), ("other",), **more))

    return write


def certificate() -> dict[str, str]:
    issued = AUTHORITY.issue_cert(common_name="replayer")
    return {
        "credentials/tls.crt": issued.cert_chain_pems[0].bytes().decode(),
        "credentials/tls.key": issued.private_key_pem.bytes().decode(),
        "ca/ca.crt": AUTHORITY.cert_pem.bytes().decode(),
    }


def test_renewed_token_file_is_used_immediately(mounted: Write) -> None:
    credentials = mounted(Method.TOKEN, {"credentials/token": "first\n"})
    assert credentials.access().headers == {"Authorization": "Bearer first"}
    assert credentials.access().hosts == ("other",)
    assert credentials.access().tls is None
    mounted(Method.TOKEN, {"credentials/token": "second"})
    assert credentials.access().headers == {"Authorization": "Bearer second"}
    assert credentials.client("pulsar://b:6650").keys() == {"authentication"}


def test_authentication_object_outlives_its_clients(mounted: Write) -> None:
    """A thread of a closed client that drops the last reference aborts an ending process."""
    credentials = mounted(Method.TOKEN, {"credentials/token": "first"})
    one, other = credentials.client("pulsar://b:6650"), credentials.client("pulsar://b:6650")
    assert one["authentication"] is other["authentication"]
    kept = weakref.ref(one["authentication"])
    del credentials, one, other
    gc.collect()
    assert kept() is not None


def test_tls_method_sends_a_certificate_and_no_token(mounted: Write) -> None:
    credentials = mounted(Method.TLS, certificate())
    access = credentials.access()
    assert access.headers == {}
    assert access.tls is not None
    assert access.tls.check_hostname
    assert len(access.tls.get_ca_certs()) == 1
    options = credentials.client("pulsar+ssl://b:6651")
    assert options["tls_validate_hostname"] is True
    assert options["tls_trust_certs_file_path"].endswith("ca/ca.crt")


def test_only_changed_certificate_is_parsed_again(mounted: Write) -> None:
    credentials = mounted(Method.TLS, certificate())
    first = credentials.access().tls
    assert credentials.access().tls is first
    mounted(Method.TLS, certificate())
    assert credentials.access().tls is not first


def test_method_none_sends_no_credentials(mounted: Write) -> None:
    credentials = mounted(Method.NONE, {})
    assert credentials.access().headers == {}
    assert credentials.client("pulsar://b:6650") == {"authentication": None}


@pytest.mark.parametrize(
    ("method", "files", "shown"),
    [
        (Method.TOKEN, {}, "credentials/token; got 'FileNotFoundError'"),
        (Method.TOKEN, {"credentials/token": " \n"}, "credentials/token; got ''"),
        (Method.TOKEN, {"credentials/token": "hunter2 \u00e9"}, "got 'UnicodeDecodeError'"),
        (Method.TLS, {}, "credentials/tls.crt; got"),
        (
            Method.TLS,
            {"credentials/tls.crt": "x", "credentials/tls.key": "hunter2"},
            "no certificate with its key",
        ),
        (Method.OAUTH2, {}, "credentials/client-secret; got"),
        (Method.NONE, {"ca/ca.crt": "garbage"}, "or no authorities"),
    ],
)
def test_missing_credential_is_named_without_its_content(
    mounted: Write, method: Method, files: dict[str, str], shown: str
) -> None:
    with raises("CredentialsMissing", match=shown) as caught:
        mounted(method, files).access()
    assert "hunter2" not in str(caught.value)


def test_missing_access_variable_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(ACCESS_VARIABLE, raising=False)
    with raises("CredentialsMissing", match=ACCESS_VARIABLE):
        job_credentials()


@asynccontextmanager
async def issuing(lifetime: float) -> AsyncIterator[tuple[str, list[str]]]:
    """Serve an issuer of numbered tokens; yield its URL and the secrets that it received."""
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response({"token_endpoint": str(request.url.with_path("/token"))})
        form = await request.post()
        seen.append(str(form["client_secret"]))
        if seen[-1] != "right":
            return web.json_response({"error": "invalid_client"}, status=401)
        token = f"token-{len(seen)}"
        return web.json_response({"access_token": token, "expires_in": lifetime})

    async with serving(answer) as url:
        yield url, seen


async def test_issued_token_is_cached_for_most_of_its_lifetime(mounted: Write) -> None:
    secret = {"credentials/client-secret": "right\n"}
    async with issuing(3_600) as (url, seen):
        credentials = mounted(Method.OAUTH2, secret, issuer_url=url, client_id="replay")
        for _ in range(3):
            access = await asyncio.to_thread(credentials.access)
            assert access.headers == {"Authorization": "Bearer token-1"}
        assert seen == ["right"]
    async with issuing(0) as (url, _):
        credentials = mounted(Method.OAUTH2, secret, issuer_url=url, client_id="replay")
        for number in (1, 2):
            access = await asyncio.to_thread(credentials.access)
            assert access.headers == {"Authorization": f"Bearer token-{number}"}


async def test_last_token_is_used_until_expiry_if_the_issuer_fails(
    mounted: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(files, "time", SimpleNamespace(monotonic=lambda: now))
    requests, issue = 0, JobCredentials._issue  # noqa: SLF001 - to count its calls

    async def counted(credentials: JobCredentials) -> oauth2.Issued:
        nonlocal requests
        requests += 1
        return await issue(credentials)

    monkeypatch.setattr(JobCredentials, "_issue", counted)
    async with issuing(100) as (url, seen):
        credentials = mounted(
            Method.OAUTH2,
            {"credentials/client-secret": "right"},
            issuer_url=url,
            client_id="replay",
        )
        await asyncio.to_thread(credentials.access)
    now = 85.0
    for _ in range(3):
        access = await asyncio.to_thread(credentials.access)
        assert access.headers == {"Authorization": "Bearer token-1"}
    assert requests == 2, "each use would wait for the issuer"
    assert seen == ["right"]
    now = 100.0
    with pytest.raises(AdminError):
        await asyncio.to_thread(credentials.access)


async def test_issuer_that_refuses_the_client_is_named(mounted: Write) -> None:
    secret = {"credentials/client-secret": "wrong"}
    async with issuing(60) as (url, _):
        credentials = mounted(Method.OAUTH2, secret, issuer_url=url, client_id="replay")
        with pytest.raises(AuthenticationFailedError, match="does not accept the client"):
            await asyncio.to_thread(credentials.access)


@pytest.mark.parametrize("is_secure", [True, False], ids=["https", "http"])
async def test_secret_is_not_sent_to_another_origin(*, is_secure: bool) -> None:
    """An issuer's document names a token endpoint on another port, of TLS or not."""
    secrets: list[str] = []

    async def issue_token(request: web.Request) -> web.Response:
        secrets.append(str((await request.post())["client_secret"]))
        return web.json_response({"access_token": "token"})

    tls, trusting = (
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH),
        ssl.create_default_context(),
    )
    AUTHORITY.issue_cert("127.0.0.1").configure_cert(tls)
    AUTHORITY.configure_trust(trusting)
    async with serving(issue_token, tls if is_secure else None) as endpoint:

        async def discover(_request: web.Request) -> web.Response:
            return web.json_response({"token_endpoint": f"{endpoint}/token"})

        async with serving(discover, tls) as url, Http.open() as opened:
            client = Client(url, "me", "s3cret", tls=trusting)
            with raises(
                Reason.ISSUER_FAILED, match="a token_endpoint of another scheme, host or port"
            ) as refused:
                await issue(client, opened)
    assert endpoint not in str(refused.value)
    assert secrets == []


@pytest.mark.parametrize(
    ("endpoint", "accepted"),
    [
        ("http://127.0.0.1:{port}/token", True),
        ("HTTP://127.0.0.1:{port}", True),
        ("/token", False),
        ("http://localhost:{port}/token", False),
        ("http://me@127.0.0.1:{port}/token", False),
        ("http://127.0.0.1:{port}@localhost:{port}/token", False),
        ("http://127.0.0.1:99999/token", False),
        ("http://[::1", False),
    ],
)
async def test_token_endpoint_needs_origin_of_issuer(endpoint: str, *, accepted: bool) -> None:
    secrets: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        if request.method == "GET":
            address = endpoint.format(port=request.url.port)
            return web.json_response({"token_endpoint": address})
        secrets.append(str((await request.post())["client_secret"]))
        return web.json_response({"access_token": "token"})

    async with serving(answer) as url, Http.open() as opened:
        if accepted:
            assert (await issue(Client(url, "me", "s3cret"), opened)).token == "token"  # noqa: S105
        else:
            with raises(
                Reason.ISSUER_FAILED, match="a token_endpoint of another scheme, host or port"
            ):
                await issue(Client(url, "me", "s3cret"), opened)
    assert secrets == (["s3cret"] if accepted else [])


@pytest.mark.parametrize(
    ("lifetime", "seconds"),
    [
        ("60", 60), ("-1", 0), ("1e300", oauth2.LONGEST_LIFETIME_SECONDS), ('"60"', 0), ("[]", 0),
        ("null", 0), ("1e999", None), ("NaN", None), ("9" * 400, None), ("9" * 5_000, None),
        ("[" * 50_000, None), ("", None),
    ],
    ids=lambda value: str(value)[:8],
)  # fmt: skip
async def test_lifetime_of_an_issued_token_is_bounded(lifetime: str, seconds: float | None) -> None:
    async def answer(request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response({"token_endpoint": str(request.url.with_path("/token"))})
        return web.Response(text=f'{{"access_token": "token", "expires_in": {lifetime}}}')

    async with serving(answer) as url, Http.open() as opened:
        if seconds is None:
            with raises(Reason.ISSUER_FAILED, match="an answer without access_token"):
                await issue(Client(url, "me", "s3cret"), opened)
        else:
            issued = await issue(Client(url, "me", "s3cret"), opened)
            assert issued.lifetime == seconds


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("invalid_scope", "400 invalid_scope"),
        ("invalid_scope\n2026-11-22 INFO forged", "400"),
        ("s3cret-that-was-sent", "400"),
        ("a" * 41, "400"),
        ("", "400"),
        ({"secret": "s3cret"}, "400"),
        (None, "400"),
    ],
)
async def test_issuer_error_shows_only_its_code(error: object, shown: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response({"token_endpoint": str(request.url.with_path("/token"))})
        return web.json_response({"error": error, "error_description": "s3cret"}, status=400)

    async with serving(answer) as url, Http.open() as opened:
        with raises(Reason.ISSUER_FAILED, match=f"got '{shown}'; No action"):
            await issue(Client(url, "me", "s3cret"), opened)
