"""A second person installs redrive from the quick start alone: block by block, as it is written.

The quick start says where a broker is in its first block, which stands for the user's own; the rest
is run literally. It ends with a cluster as it was.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.node.conftest import Node, User, left_in, spark_operator_running
from tests.support.documented import QUICK_START, commands


@pytest.fixture
def spark_operator(node: Node, images: User) -> Iterator[None]:
    assert images.folder  # one of them is the stand-in's
    with spark_operator_running(node):
        yield


@pytest.mark.usefixtures("spark_operator")
def test_the_quick_start_leads_from_nothing_to_a_replay(user: User, node: Node) -> None:
    first, *rest = commands(QUICK_START)
    assert first.text.count("export PULSAR_") == 3  # what `user` has in its environment
    shown = {block.heading: user.paste(block.text) for block in rest}
    assert "Phase:          Succeeded" in shown["1. Install the operator"]
    for name in ("orders-partition-1", "orders-fulfilment-RETRY-partition-1"):
        assert f"persistent://shop/prod/{name}" in shown["4. A connection and a policy"]
    assert "persistent://shop/prod/orders-fulfilment-DLQ" in shown["4. A connection and a policy"]
    log = shown["6. One message that works, one that fails"]
    assert "handled good" in log
    assert "cannot handle bad" in log
    assert "Completed" in shown["7. Replay"].splitlines()[-1]
    assert left_in(node, "redrive-system") == []
    node.kubectl("delete", "namespace", "redrive-system")
