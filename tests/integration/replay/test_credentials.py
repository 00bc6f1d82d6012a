"""Each method by which a replay job proves to a real broker who it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

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
