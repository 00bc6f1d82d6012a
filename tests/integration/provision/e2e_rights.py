"""Rights of an operator that serves one namespace, while that of the sandbox is stopped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sandbox.sandbox import Sandbox
from tests.integration.provision.conftest import MakeShop, Shop
from tests.integration.provision.test_rights import DRIVERS, NEEDED, allowed
from tests.support.namespaced_operator import namespaced_operator

pytestmark = pytest.mark.xdist_group("own sandbox")


@pytest.fixture
def in_one_namespace(installed: Sandbox, make_shop: MakeShop) -> Iterator[tuple[Shop, str]]:
    """A shop whose operator has Roles in that namespace only, and the namespace of its release."""
    shop = make_shop()
    with namespaced_operator(installed, shop.namespace) as release_in:
        yield shop, release_in


def test_roles_in_the_served_namespaces_are_sufficient(
    in_one_namespace: tuple[Shop, str], installed: Sandbox, make_shop: MakeShop
) -> None:
    shop, release_in = in_one_namespace
    elsewhere = make_shop()
    for tenant in (elsewhere, shop):
        tenant.create_topic(tenant.topic("orders"))
        tenant.connection()
        tenant.policy()
    shop.ready()
    shop.ready("main", "brokerconnection")
    shop.delete("orders")
    assert "status" not in elsewhere.get("retrypolicy", "orders")
    cluster = installed.cluster
    served = allowed(cluster, release_in=release_in, namespace=shop.namespace)
    needed = {resource: set(verbs) for resource, verbs in NEEDED.items()}
    assert served == needed | {
        resource: {*NEEDED[resource], *verbs} for resource, verbs in DRIVERS.items()
    }
    beyond = allowed(cluster, release_in=release_in, namespace=elsewhere.namespace)
    assert beyond == {resource: set[str]() for resource in NEEDED}
    assert "Forbidden" not in installed.processes.log(release_in).read_text()
