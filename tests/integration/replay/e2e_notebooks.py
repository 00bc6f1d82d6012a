"""Each method by which a notebook proves to a real broker who it is."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from redrive.spark.options import PARAMETERS, PLUGIN, TRUSTED
from sandbox.pulsar import Broker
from tests.integration.replay.conftest import ROLE

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
