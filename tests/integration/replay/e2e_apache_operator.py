"""A Replay with Apache's Spark operator, in an installation that may use no other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sandbox import installation
from tests.support.installed_operator import namespaced_operator
from tests.support.replay_shop import SECONDS, Shop, check_no_token_leaked, shop

__all__ = ["shop"]

pytestmark = pytest.mark.xdist_group("own sandbox")  # it stops the operator


@pytest.fixture
def apache_shop(shop: Shop) -> Iterator[Shop]:
    """A shop whose operator may use Apache's Spark operator alone."""
    launchers = {"kubeflow": False, "apache": True}
    replays = {**installation.VALUES["replay"], "launchers": launchers}
    with namespaced_operator(shop.sandbox, shop.name, replay=replays):
        yield shop


@pytest.mark.timeout(SECONDS + 60)
def test_apache_operator_runs_a_replay_by_certificate(apache_shop: Shop) -> None:
    """Its pod template mounts a certificate, and the authorities of the namespace."""
    shop = apache_shop
    broker = shop.sandbox.pulsar
    certificate, key = broker.certificate("replayer")
    pair = {"tls.crt": certificate, "tls.key": key}
    shop.lend("Secret", "replayer-tls", type="kubernetes.io/tls", stringData=pair)
    shop.lend("ConfigMap", "authority", data={"ca.crt": broker.authority})
    trust = {"caRef": {"name": "authority", "key": "ca.crt"}}
    by_certificate = {"type": "TLS", "tls": {"secretRef": {"name": "replayer-tls"}}}
    shop.declare(
        serviceURL=broker.service_tls_url,
        adminURL=broker.admin_tls_url,
        tls=trust,
        replay={"role": "replayer", "authentication": by_certificate, "tls": trust},
    )
    shop.bury(3, "WarehouseDown")
    shop.tokens["replayer-tls"] = key  # must not be shown either
    shop.replay("secured", engine="Spark")
    status = shop.reaches("secured", "Completed")
    counts = status["run"]["counts"]
    assert (counts["matched"], counts["moved"], counts["left"]) == (3, 3, 0)
    assert shop.replayed() == ["WarehouseDown"] * 3
    assert shop.applications() == []
    (application,) = shop.applications("sparkapplication.spark.apache.org")
    assert application["metadata"]["name"] == status["sparkApplication"]
    history = application["status"]["stateTransitionHistory"].values()
    assert "Succeeded" in {state["currentStateSummary"] for state in history}
    check_no_token_leaked(shop)
