"""A second person installs redrive from the quick start alone: block by block, as it is written.

The page says where a broker is in its first block, which stands for the user's own; the rest is
run literally. The test ends with a cluster as it was.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.node.conftest import ROOT, blocks, run

PAGE = "docs/howto/quick-start.md"
SPARK = Path(ROOT / "sandbox" / "spark_operator" / "crd.yaml")


@pytest.mark.usefixtures("loaded")
def test_the_quick_start_leads_from_nothing_to_a_replay(
    user: dict[str, str], tmp_path: Path
) -> None:
    for folder in ("charts", "crds", "examples"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True)
    # The API of a Spark operator, as a cluster has it where one is installed.
    run(f"kubectl apply --server-side -f {SPARK}", user, tmp_path)
    first, *rest = blocks(PAGE)
    assert first[1].count("export PULSAR_") == 3  # what `user` has in its environment
    shown = {}
    for heading, block in rest:
        shown[heading] = run(block, user, tmp_path)
    assert "Phase:          Succeeded" in shown["1. Install the operator"]
    for name in ("orders-partition-1", "orders-fulfilment-RETRY-partition-1"):
        assert f"persistent://shop/prod/{name}" in shown["4. A connection and a policy"]
    assert "persistent://shop/prod/orders-fulfilment-DLQ" in shown["4. A connection and a policy"]
    log = shown["6. One message that works, one that fails"]
    assert "handled good" in log
    assert "cannot handle bad" in log
    left = run(
        "kubectl get all,leases,pdb --namespace redrive-system --output=name", user, tmp_path
    )
    assert [name for name in left.split() if not name.startswith("lease.")] == []
    run("kubectl delete namespace redrive-system", user, tmp_path)
