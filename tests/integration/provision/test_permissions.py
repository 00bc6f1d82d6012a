"""What connections permit, by names and labels of Kubernetes namespaces, with a real API server."""

from __future__ import annotations

from tests.integration.provision.conftest import MakeShop, Shop


def test_a_namespace_is_permitted_by_its_labels_as_long_as_it_has_them(make_shop: MakeShop) -> None:
    shop = make_shop()
    shop.create_topic(shop.topic("orders"))
    selector = {"matchExpressions": [{"key": "redrive-test", "operator": "In", "values": ["yes"]}]}
    shop.connection(allow=[{**shop.rule("fulfilment"), "namespaces": {"selector": selector}}])
    shop.policy()
    shop.reaches("orders", "NamespaceNotAllowed")
    _label(shop, "redrive-test=yes")
    shop.ready()
    _label(shop, "redrive-test-")
    shop.reaches("orders", "NamespaceNotAllowed")


def _label(shop: Shop, change: str) -> None:
    shop.cluster.kubectl("label", "namespace", shop.namespace, change)
