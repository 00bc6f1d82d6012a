"""The broker of the sandbox refuses requests without rights. Its Spark loads archived classes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import jwt
import pulsar
import pyspark
import pytest

from sandbox import spark
from sandbox.pulsar import Broker


@pytest.fixture
def topic(broker: Broker, pulsar_namespace: str) -> str:
    """A topic without any grants."""
    name = f"persistent/{pulsar_namespace}/orders"
    broker.request("PUT", f"/admin/v2/{name}").check("create the topic")
    return name


@pytest.fixture
def clerk(broker: Broker) -> Iterator[pulsar.Client]:
    """A client that acts as the role ``clerk``."""
    client = pulsar.Client(
        broker.service_url,
        operation_timeout_seconds=5,
        authentication=pulsar.AuthenticationToken(broker.token("clerk")),
        logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
    )
    yield client
    client.close()


def test_missing_token_is_refused(broker: Broker) -> None:
    assert broker.request("GET", "/admin/v2/tenants", token="").status == 401


def test_a_token_signed_with_another_key_is_refused(broker: Broker) -> None:
    forged = jwt.encode({"sub": "superuser"}, b"another key, of the same length." * 2)
    assert broker.request("GET", "/admin/v2/tenants", token=forged).status == 401


def test_a_role_that_administers_nothing_is_refused(broker: Broker, pulsar_namespace: str) -> None:
    tenant = pulsar_namespace.split("/", maxsplit=1)[0]
    token = broker.token("clerk")
    assert broker.request("GET", "/admin/v2/tenants", token=token).status == 401
    refused = broker.request("PUT", f"/admin/v2/namespaces/{tenant}/mine", token=token)
    assert refused.status in {401, 403}
    namespaces = broker.request("GET", f"/admin/v2/namespaces/{tenant}").body
    assert namespaces == f'["{pulsar_namespace}"]'


def test_tenant_administrator_has_rights_in_its_tenant_only(
    broker: Broker, pulsar_namespace: str
) -> None:
    tenant = pulsar_namespace.split("/", maxsplit=1)[0]
    body = {"allowedClusters": ["standalone"], "adminRoles": ["clerk"]}
    broker.request("POST", f"/admin/v2/tenants/{tenant}", body).check("name an administrator")
    token = broker.token("clerk")
    mine = broker.request("PUT", f"/admin/v2/namespaces/{tenant}/mine", token=token)
    assert mine.status == 204
    other = broker.request("PUT", "/admin/v2/namespaces/public/mine", token=token)
    assert other.status in {401, 403}


def test_a_role_sends_only_where_it_was_granted_to(
    broker: Broker, topic: str, clerk: pulsar.Client
) -> None:
    name = topic.replace("persistent/", "persistent://")
    with pytest.raises(pulsar.AuthorizationError):
        clerk.create_producer(name)
    granted = broker.request("POST", f"/admin/v2/{topic}/permissions/clerk", ["produce"])
    granted.check("grant")
    clerk.create_producer(name).send(b"an order")
    with pytest.raises(pulsar.AuthorizationError):
        clerk.subscribe(name, "packing")


def test_using_a_topic_or_a_subscription_does_not_create_it(
    broker: Broker, topic: str, pulsar_namespace: str, clerk: pulsar.Client
) -> None:
    rights = f"/admin/v2/namespaces/{pulsar_namespace}/permissions/clerk"
    broker.request("POST", rights, ["produce", "consume"]).check("grant")
    with pytest.raises(pulsar.TopicNotFound):
        clerk.create_producer(f"persistent://{pulsar_namespace}/missing")
    with pytest.raises(pulsar.Timeout):  # the client asks again and again
        clerk.subscribe(topic.replace("persistent/", "persistent://"), "missing")
    topics = broker.request("GET", f"/admin/v2/persistent/{pulsar_namespace}").body
    assert topics == f'["{topic.replace("persistent/", "persistent://")}"]'
    assert broker.request("GET", f"/admin/v2/{topic}/subscriptions").body == "[]"


def test_java_takes_most_classes_of_spark_from_an_archive() -> None:
    image = spark.image()
    shown = "-Xlog:class+load"
    run = subprocess.run(
        [spark.SUBMIT, "--version"],
        env=image | {"SPARK_SUBMIT_OPTS": f"{image['SPARK_SUBMIT_OPTS']} {shown}"},
        check=True, text=True, capture_output=True,
    )  # fmt: skip
    sources = [line.rpartition("source: ")[2] for line in run.stdout.splitlines()]
    archived = sum(source.startswith("shared objects file") for source in sources)
    java = [f"{image['JAVA_HOME']}/bin/java", "-Xshare:on", "-version"]
    # That of PyPI has no classes to share, and goes without.
    shares = subprocess.run(java, check=False, capture_output=True).returncode == 0
    assert (archived > len(sources) / 2) == shares


def test_spark_python_imports_compiled_and_shipped_modules() -> None:
    shipped = Path(pyspark.__file__).parent / "python" / "lib"
    archives = [shipped / "pyspark.zip", *shipped.glob("py4j-*-src.zip")]
    run = subprocess.run(
        [spark.image()["PYSPARK_PYTHON"], "-c", "import py4j, pyspark; print(pyspark, py4j)"],
        env={"PYTHONPATH": ":".join(map(str, archives))},
        check=True, text=True, capture_output=True,
    )  # fmt: skip
    assert f"{pyspark.__file__}'" in run.stdout
    assert str(archives[1]) in run.stdout
