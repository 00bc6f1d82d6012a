"""The lines that `redrive diff` compares."""

from __future__ import annotations

from redrive.cli.develop import resolved
from redrive.cli.diff import state


def test_state_shows_partitions_of_each_topic() -> None:
    policy = {
        "apiVersion": "redrive.io/v1beta1",
        "kind": "RetryPolicy",
        "metadata": {"namespace": "shop", "name": "orders", "uid": "u"},
        "spec": {
            "topic": "persistent://shop/prod/orders",
            "subscription": "fulfilment",
            "connectionRef": {"name": "main"},
            "deadLetter": {"partitions": 3},
        },
    }
    lines = list(state(resolved(policy, None)))
    assert "retry topic, partitions: default" in lines
    assert "dead-letter topic, partitions: 3" in lines
