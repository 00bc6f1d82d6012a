"""Every type of authentication of the operator at a real broker, and authorities of its own."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs

import jwt
import pytest
import trustme
from aiohttp import web

from redrive.kube.credentials import REFUSED_SECONDS
from sandbox import installation
from sandbox.sandbox import Sandbox
from tests.chaos.proxy import Do, Proxy, Trap
from tests.integration.provision.conftest import MakeShop, Shop
from tests.support.waiting import wait_until

SECRET = "the-secret-of-the-client"  # noqa: S105


def config_map(shop: Shop, name: str, **data: str) -> None:
    shop.apply({name: {"apiVersion": "v1", "kind": "ConfigMap", "data": data}})


def assert_no_secret_is_shown(shop: Shop, log: Path) -> None:
    """No secret of the shop is in the log, in an object or Event of its namespace, in a metric."""
    secrets = {line for secret in shop.tokens for line in secret.splitlines() if len(line) > 6}
    assert len(secrets) >= 2
    texts = [log.read_text("utf-8"), metrics(shop)]
    kinds = "retrypolicies,brokerconnections,replays,configmaps,events"
    texts.append(shop.kubectl("get", kinds, "--output=json", "--show-managed-fields"))
    assert "RetryPolicy" in texts[0]
    public = shop.broker.authority
    leaked = [s for s in secrets if s not in public and any(s in text for text in texts)]
    assert leaked == []


def metrics(shop: Shop) -> str:
    """The metrics of the operator, as text."""
    endpoint = (shop.broker.state / f"{installation.OPERATOR}.endpoint").read_text()
    with urllib.request.urlopen(f"{endpoint}/metrics", timeout=60) as answer:  # noqa: S310  ours
        text: str = answer.read().decode()
    return text


def expiring(shop: Shop, seconds: float) -> str:
    """A token of the operator's role that is valid for so many seconds."""
    key = (shop.broker.state / "pulsar" / "token-key").read_bytes()
    token = jwt.encode({"sub": shop.role, "exp": time.time() + seconds}, key, algorithm="HS256")
    shop.tokens.append(token)
    return token


def test_client_certificate_and_own_authority_connect(shop: Shop, operator_process: Path) -> None:
    certificate, key = shop.broker.certificate(shop.role)
    shop.secret("operator-tls", **{"tls.crt": certificate, "tls.key": key})
    config_map(shop, "authority", **{"ca.crt": shop.broker.authority})
    mutual: dict[str, Any] = {
        "adminURL": shop.broker.admin_tls_url,
        "authentication": {"type": "TLS", "tls": {"secretRef": {"name": "operator-tls"}}},
        "tls": {"caRef": {"name": "authority", "key": "ca.crt"}},
    }
    shop.connection(**mutual)
    shop.create_topic(shop.topic("orders"))
    shop.policy()
    shop.ready()
    shop.ready("main", "brokerconnection")

    stranger = trustme.CA().cert_pem.bytes().decode()
    config_map(shop, "stranger", **{"ca.crt": stranger})
    shop.connection(**mutual | {"tls": {"caRef": {"name": "stranger", "key": "ca.crt"}}})
    refused = shop.reaches("main", "CertificateRefused", "brokerconnection")
    assert "set its authority in caRef" in json.dumps(refused["status"])
    shop.connection(**mutual | {"tls": {"caRef": {"name": "nobody", "key": "ca.crt"}}})
    shop.reaches("main", "CaInvalid", "brokerconnection")
    shop.secret("broken-tls", **{"tls.crt": certificate, "tls.key": "no key"})
    shop.connection(
        **mutual | {"authentication": {"type": "TLS", "tls": {"secretRef": {"name": "broken-tls"}}}}
    )
    shop.reaches("main", "CertificateInvalid", "brokerconnection")
    assert_no_secret_is_shown(shop, operator_process)


class Issuer(ThreadingHTTPServer):
    """An OAuth2 issuer for clients with the secret.

    It gives tokens a lifetime of a few seconds. The broker accepts them longer: a slow operator
    would use expired ones.
    """

    def __init__(self, shop: Shop) -> None:
        super().__init__(("127.0.0.1", 0), _Clerk)
        self.shop = shop
        self.issued = 0


class _Clerk(BaseHTTPRequestHandler):
    server: Issuer

    def do_GET(self) -> None:
        assert self.path == "/realm/.well-known/openid-configuration"
        port = self.server.server_port
        self._answer(200, {"token_endpoint": f"http://127.0.0.1:{port}/token"})

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        expected = {"grant_type": ["client_credentials"], "client_id": ["redrive"]}
        expected |= {"client_secret": [SECRET], "audience": ["urn:pulsar"], "scope": ["admin"]}
        if form != expected:
            self._answer(400, {"error": "invalid_client", "error_description": str(form)})
            return
        self.server.issued += 1
        token = expiring(self.server.shop, 3_600)
        self._answer(200, {"access_token": token, "token_type": "Bearer", "expires_in": 4})

    def _answer(self, status: int, body: dict[str, object]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def issuer(shop: Shop) -> Iterator[Issuer]:
    with Issuer(shop) as issuer:
        Thread(target=issuer.serve_forever, daemon=True).start()
        yield issuer
        issuer.shutdown()


def test_oauth2_token_that_expires_is_replaced(
    shop: Shop, issuer: Issuer, operator_process: Path
) -> None:
    shop.secret("client", secret=SECRET)
    oauth2 = {
        "issuerURL": f"http://127.0.0.1:{issuer.server_port}/realm",
        "clientID": "redrive",
        "clientSecret": {"secretRef": {"name": "client", "key": "secret"}},
        "audience": "urn:pulsar",
        "scope": "admin",
    }
    shop.connection(authentication={"type": "OAuth2", "oauth2": oauth2})
    shop.create_topic(shop.topic("orders"))
    shop.policy()
    shop.ready()
    first = issuer.issued

    def is_replaced() -> bool:
        shop.request_reconcile("orders")
        return issuer.issued > first

    wait_until(is_replaced, every=1.0)
    shop.policy("others", subscription="others", delayLadder={"fixed": "1m"})
    shop.ready("others")
    shop.event_message("others", "Provisioned")
    assert set(shop.event_reasons("others")) == {("Normal", "Provisioned")}

    shop.connection(authentication={"type": "OAuth2", "oauth2": oauth2 | {"clientID": "somebody"}})
    refused = shop.reaches("main", "AuthenticationFailed", "brokerconnection")
    status = json.dumps(refused["status"])
    assert "does not accept the client; got 'somebody'; correct oauth2.clientID" in status
    assert SECRET not in status
    assert_no_secret_is_shown(shop, operator_process)


def test_token_file_that_changes_is_read_again(
    shop: Shop, installed: Sandbox, operator_process: Path
) -> None:
    shop.create_topic(shop.topic("orders"))
    shop.connection(authentication={"type": "Token", "token": {"file": "admin.token"}})
    shop.reaches("main", "TokenFileInvalid", "brokerconnection")
    file = installation.credentials(installed) / shop.namespace / "admin.token"
    file.parent.mkdir(parents=True)
    shop.tokens.append("no-token-of-this-broker")
    file.write_text(shop.tokens[-1])
    shop.reaches("main", "AuthenticationFailed", "brokerconnection")
    file.write_text(shop.token(shop.role))
    shop.ready("main", "brokerconnection")
    shop.policy()
    shop.ready()
    assert_no_secret_is_shown(shop, operator_process)


class Revocation(Trap):
    """Refuses the token *former* from the first call with it on, and changes the Secret then.

    So the operator has used the former token after the change.
    """

    def __init__(self, shop: Shop, former: str) -> None:
        super().__init__("", 0, self._refuse)
        self.refused = 0
        self._shop, self._former = shop, former

    def comes(self) -> bool:
        return True

    async def _refuse(self, request: web.Request, do: Do) -> web.StreamResponse:
        if request.headers["Authorization"] != f"Bearer {self._former}":
            return await do()
        if not self.refused:
            self._shop.secret("pulsar-admin", token=self._shop.token(self._shop.role))
        self.refused += 1
        await asyncio.sleep(REFUSED_SECONDS)  # the operator reads the Secret no more often
        return web.Response(status=401)


def test_changed_token_is_used_once_the_former_is_refused(make_shop: MakeShop) -> None:
    shop = make_shop()
    shop.create_topic(shop.topic("orders"))
    former = expiring(shop, 3_600)  # a token that differs from the next one
    shop.secret("pulsar-admin", token=former)
    with Proxy.before(shop.broker.admin_url) as proxy:
        shop.connection(adminURL=proxy.url)
        shop.ready("main", "brokerconnection")
        revocation = Revocation(shop, former)
        proxy.traps.append(revocation)
        shop.policy(delayLadder={"fixed": "1m"})  # a delay of 1 s causes a warning at some brokers
        shop.ready()
        shop.event_message("orders", "Provisioned")
        assert set(shop.event_reasons("orders")) == {("Normal", "Provisioned")}
        assert revocation.refused
