"""The quick start, run by a second user block by block, as written.

The first block of the quick start has the address of the user's broker; the others are run
unchanged. The last one leaves the cluster as before.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.node.conftest import (
    Node,
    User,
    left_in,
    remove_redrive,
)
from tests.support.documented import QUICK_START, commands


@pytest.fixture
def all_removed(node: Node) -> Iterator[None]:
    """Remove the objects of the quick start if it fails."""
    yield
    remove_redrive(node)


@pytest.mark.usefixtures("all_removed")
def test_the_quick_start_leads_from_nothing_to_a_replay_and_back(user: User, node: Node) -> None:
    first, *rest = commands(QUICK_START)
    assert first.text.count("export PULSAR_") == 3  # from the environment of `user`
    shown = {block.heading: user.paste(block.text) for block in rest}
    assert "Phase:          Succeeded" in shown["1. Install the operator"]
    assert shown["3. The tokens, in the cluster"].count(" created\n") == 4
    for name in ("orders-partition-1", "orders-fulfilment-RETRY-partition-1"):
        assert f"persistent://shop/prod/{name}" in shown["4. A connection and a policy"]
    assert "persistent://shop/prod/orders-fulfilment-DLQ" in shown["4. A connection and a policy"]
    assert 'deployment "fulfilment" successfully rolled out' in shown["5. Consumers"]
    log = shown["6. One message that works, one that fails"]
    assert "handled good" in log
    assert log.count("cannot handle bad") == 4
    assert "Completed" in shown["7. Replay"].splitlines()[-1]
    *_, last = shown["8. Remove it"].splitlines()
    assert last.endswith('"rocketmqretrypolicies.redrive.io" deleted')
    assert left_in(node, "redrive-system") == set()
    assert "redrive.io" not in node.kubectl("get", "crds", "--output=name")
