"""What options say is what broker and admin API are shown; files are read for each use."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import trustme
from aiohttp import web

from redrive.auth.files import CredentialsUnreadableError, SourceCredentials, source_credentials
from redrive.spark.options import PARAMETERS, PLUGIN, TRUSTED, authentication_of_options

AUTHORITY = trustme.CA()


def shown(plugin: str = "", parameters: str = "", trusted: Path | None = None) -> SourceCredentials:
    options = {PLUGIN: plugin, PARAMETERS: parameters} if plugin else {}
    if trusted is not None:
        options[TRUSTED] = str(trusted)
    return SourceCredentials(authentication_of_options(options))


def test_no_method_shows_nothing() -> None:
    assert shown().access().headers == {}
    assert shown().client("pulsar://p:6650") == {"authentication": None}


def test_a_process_has_one_of_each() -> None:
    token, other = (
        authentication_of_options({PLUGIN: "AuthenticationToken", PARAMETERS: f"token:{value}"})
        for value in ("one", "other")
    )
    assert source_credentials(token) is source_credentials(token) is not source_credentials(other)


def test_a_token_of_a_file_may_change(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    given = shown("AuthenticationToken", f"file://{file}")
    assert given.access().headers == {"Authorization": "Bearer first"}
    file.write_text("second")
    assert given.access().headers == {"Authorization": "Bearer second"}
    file.unlink()
    with pytest.raises(CredentialsUnreadableError, match=str(file)):
        given.access()


def test_a_certificate_is_shown_and_authorities_are_trusted(tmp_path: Path) -> None:
    issued = AUTHORITY.issue_cert(common_name="analyst")
    files = [tmp_path / name for name in ("tls.crt", "tls.key", "ca.crt")]
    files[0].write_bytes(issued.cert_chain_pems[0].bytes())
    files[1].write_bytes(issued.private_key_pem.bytes())
    files[2].write_bytes(AUTHORITY.cert_pem.bytes())
    said = f"tlsCertFile:{files[0]},tlsKeyFile:{files[1]}"
    given = shown("AuthenticationTls", said, files[2])
    tls = given.access().tls
    assert tls is not None
    assert len(tls.get_ca_certs()) == 1
    options = given.client("pulsar+ssl://p:6651")
    assert options["tls_trust_certs_file_path"] == str(files[2])
    assert options["tls_validate_hostname"]
    files[1].write_text("s3cret")
    with pytest.raises(CredentialsUnreadableError, match="no certificate with its key") as error:
        given.access()
    assert "s3cret" not in str(error.value)


async def test_an_issuer_gives_the_token(tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response({"token_endpoint": str(request.url.with_path("/token"))})
        form = await request.post()
        return web.json_response(
            {"access_token": str(form["client_id"]) + str(form["client_secret"])}
        )

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    key = tmp_path / "client.json"
    key.write_text(json.dumps({"client_id": "analyst", "client_secret": "right"}))
    issuer = f"http://127.0.0.1:{runner.addresses[0][1]}"
    said = json.dumps({"issuerUrl": issuer, "privateKey": f"file://{key}"})
    given = shown("org.apache.pulsar.client.impl.auth.oauth2.AuthenticationOAuth2", said)
    access = await asyncio.to_thread(given.access)
    assert access.headers == {"Authorization": "Bearer analystright"}
    key.write_text("{}")
    other = shown("AuthenticationOAuth2", said)
    with pytest.raises(CredentialsUnreadableError, match="client_id and client_secret"):
        await asyncio.to_thread(other.access)
    await runner.cleanup()
