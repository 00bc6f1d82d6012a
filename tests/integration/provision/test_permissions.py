"""Permissions of connections by name and label of a Kubernetes namespace."""

from __future__ import annotations

from tests.integration.provision.conftest import MakeShop, Shop


def test_namespace_without_the_label_is_not_permitted_anymore(make_shop: MakeShop) -> None:
    shop = make_shop()
    _label(shop, "yes")
    shop.create_topic(shop.topic("orders"))
    selector = {"matchExpressions": [{"key": "redrive-test", "operator": "In", "values": ["yes"]}]}
    shop.connection(allow=[{**shop.rule("fulfilment"), "namespaces": {"selector": selector}}])
    shop.policy()
    shop.ready()
    _label(shop, None)
    shop.reaches("orders", "NamespaceNotAllowed")


def _label(shop: Shop, value: str | None) -> None:
    change = {"metadata": {"labels": {"redrive-test": value}}}
    shop.cluster.objects.patch("namespace", shop.namespace, change)
