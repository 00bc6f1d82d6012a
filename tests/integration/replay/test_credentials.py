"""Each method by which a replay job, or a notebook, proves to a real broker who it is."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from pyspark.sql import SparkSession

from redrive.admin.errors import (
    AdminForbiddenError,
    AuthenticationFailedError,
)
from redrive.auth.files import job_credentials
from redrive.auth.method import ACCESS_VARIABLE, BrokerAccess, Method
from redrive.reading import broker
from redrive.reading import broker as brokers
from redrive.reading.broker import ReplayRoleRefusedError
from redrive.reading.session import Session
from redrive.reasons import Reason
from redrive.spark.options import PARAMETERS, PLUGIN, TRUSTED
from sandbox.pulsar import Broker
from tests.integration.replay.conftest import ROLE, ProvisionedPolicy, ProvisionPolicy
from tests.support.reasons import raises

Give = Callable[..., None]


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Give:
    """Gives this process credentials, as the pod of a job gets them."""

    def give(method: Method, files: dict[str, str], issuer_url: str | None = None) -> None:
        for name, content in files.items():
            file = tmp_path / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(content)
        access = BrokerAccess(method, str(tmp_path), issuer_url=issuer_url, client_id="replay")
        monkeypatch.setenv(ACCESS_VARIABLE, access.encode())

    return give


def use(provisioned: ProvisionedPolicy, admin_url: str, service_url: str) -> int:
    """Read statistics, send to the retry topic and receive from the dead-letter topic."""
    shown = job_credentials().protocol()
    policy = provisioned.policy
    before = len(broker.read_partitions(admin_url, policy.dead_letter_topic))
    with brokers.connect(service_url) as client, brokers.refusals("use the topics", "do so"):
        producer = client.create_producer(str(policy.retry_topic))
        producer.send(b"again")
        client.subscribe(str(policy.dead_letter_topic), policy.dead_letter_subscription)
    with closing(Session[None](service_url, shown)) as session:
        session.open(str(policy.retry_topic), "sender")
    return before


def test_a_client_certificate(
    provision_policy: ProvisionPolicy, broker: Broker, give: Give
) -> None:
    provisioned = provision_policy()
    authority = {"ca/ca.crt": broker.authority}
    urls = broker.admin_tls_url, broker.service_tls_url
    certificate, key = broker.certificate(ROLE)
    pair = {"credentials/tls.crt": certificate, "credentials/tls.key": key}
    give(Method.TLS, pair | authority)
    assert use(provisioned, *urls) == 1
    certificate, key = broker.certificate("stranger")
    give(Method.TLS, {"credentials/tls.crt": certificate, "credentials/tls.key": key})
    with pytest.raises(AdminForbiddenError):
        use(provisioned, *urls)


def test_a_token_over_tls_and_authorities_of_ones_own(
    provision_policy: ProvisionPolicy, broker: Broker, give: Give
) -> None:
    provisioned = provision_policy()
    token = {"credentials/token": broker.token(ROLE)}
    urls = broker.admin_tls_url, broker.service_tls_url
    give(Method.TOKEN, token)
    with raises(Reason.CERTIFICATE_REFUSED):
        use(provisioned, *urls)
    with (
        brokers.connect(broker.service_tls_url) as client,
        pytest.raises(ReplayRoleRefusedError),
        brokers.refusals("look", "look"),
    ):
        client.get_topic_partitions(str(provisioned.policy.retry_topic))
    give(Method.TOKEN, token | {"ca/ca.crt": broker.authority})
    assert use(provisioned, *urls) == 1


class _Clerk(BaseHTTPRequestHandler):
    token = ""

    def do_GET(self) -> None:
        self._answer(200, {"token_endpoint": f"http://{self.headers['Host']}/token"})

    def do_POST(self) -> None:
        form = self.rfile.read(int(self.headers["Content-Length"])).decode()
        is_known = "client_secret=right" in form
        self._answer(200, {"access_token": self.token}) if is_known else self._answer(401, {})

    def _answer(self, status: int, body: dict[str, str]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def issuer(broker: Broker) -> Iterator[str]:
    """An issuer that gives the replay role's token to whoever knows the secret."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Clerk) as server:
        _Clerk.token = broker.token(ROLE)
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_client_credentials_of_an_issuer(
    provision_policy: ProvisionPolicy, broker: Broker, give: Give, issuer: str
) -> None:
    provisioned = provision_policy()
    urls = broker.admin_url, broker.service_url
    give(Method.OAUTH2, {"credentials/client-secret": "wrong"}, issuer)
    with pytest.raises(AuthenticationFailedError, match="does not accept the client"):
        use(provisioned, *urls)
    give(Method.OAUTH2, {"credentials/client-secret": "right"}, issuer)
    assert use(provisioned, *urls) == 1


Notebook = tuple[Broker, dict[str, str]]
"""A broker, and the options of a notebook that connects to it."""


@pytest.fixture
def certificate_of_notebook(broker: Broker, tmp_path: Path) -> Notebook:
    certificate, key = broker.certificate(ROLE)
    files = {"tls.crt": certificate, "tls.key": key, "ca.crt": broker.authority}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    return broker, {
        "service.url": broker.service_tls_url,
        "admin.url": broker.admin_tls_url,
        PLUGIN: "AuthenticationTls",
        PARAMETERS: f"tlsCertFile:{tmp_path}/tls.crt,tlsKeyFile:{tmp_path}/tls.key",
        TRUSTED: f"{tmp_path}/ca.crt",
    }


@pytest.fixture
def issuer_of_notebook(broker: Broker, issuer: str, tmp_path: Path) -> Notebook:
    key = tmp_path / "client.json"
    key.write_text(json.dumps({"client_id": "analyst", "client_secret": "right"}))
    return broker, {
        "service.url": broker.service_url,
        "admin.url": broker.admin_url,
        PLUGIN: "AuthenticationOAuth2",
        PARAMETERS: json.dumps({"issuerUrl": issuer, "privateKey": key.as_uri()}),
    }


@pytest.fixture
def open_notebook(open_broker: Broker) -> Notebook:
    """A notebook at a broker for development, which asks for no credentials."""
    urls = {"service.url": open_broker.service_url, "admin.url": open_broker.admin_url}
    return open_broker, urls


@pytest.mark.parametrize(
    "method", ["certificate_of_notebook", "issuer_of_notebook", "open_notebook"]
)
def test_data_source_reads_its_own_rows(
    notebook: SparkSession, request: pytest.FixtureRequest, method: str
) -> None:
    """The tests of the data source itself use a token."""
    on, options = request.getfixturevalue(method)
    tenant = f"t-{secrets.token_hex(4)}"
    on.create_namespace(tenant, "test")
    grant = f"/admin/v2/namespaces/{tenant}/test/permissions/{ROLE}"
    on.request("POST", grant, ["consume", "produce"]).check("grant")
    on.request("PUT", f"/admin/v2/persistent/{tenant}/test/orders").check("create a topic")
    keep = {"ledgerId": -1, "entryId": -1}
    at = f"/admin/v2/persistent/{tenant}/test/orders/subscription/keep"
    on.request("PUT", at, keep).check("subscribe")
    options |= {"topic": f"persistent://{tenant}/test/orders"}

    written = notebook.range(5).selectExpr("cast(id as string) as value")
    written.write.format("pulsar").mode("append").options(**options).save()

    read = notebook.read.format("pulsar").options(**options).load()
    assert sorted(bytes(row.value) for row in read.collect()) == [b"0", b"1", b"2", b"3", b"4"]
