"""Number of files and functions that a reader of one reconcile follows.

`pytest -s tests/unit/provision/test_reconcile_path.py` prints them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import redrive
from redrive.api import Body
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.reconcile_harness import reconcile_harness
from tests.unit.provision.conftest import MakeBody

PACKAGE = f"{Path(redrive.__path__[0])}/"
BOUNDS = {"files": 37, "functions": 149, "pairs of files": 97}
"""The last measurement. A change that lowers a figure lowers its bound."""


async def test_new_policy_enters_few_files(connection: Body, policy: MakeBody) -> None:
    """The first reconcile of a policy enters few files and few functions of other files.

    Lambdas and comprehensions belong to the function around them.
    """
    files: set[str] = set()
    functions: set[tuple[str, str]] = set()
    pairs: set[tuple[str, str]] = set()

    def record(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        file = code.co_filename
        if event != "call" or not file.startswith(PACKAGE) or code.co_name.startswith("<"):
            return
        files.add(file)
        caller = "" if frame.f_back is None else frame.f_back.f_code.co_filename
        if caller.startswith(PACKAGE) and caller != file:
            functions.add((file, f"{code.co_qualname}:{code.co_firstlineno}"))
            pairs.add((caller, file))

    harness = reconcile_harness(connection, policy(), FakeKubernetes())
    sys.setprofile(record)
    try:
        await harness.reconcile()
    finally:
        sys.setprofile(None)
    assert len(harness.topics) > 1, "the policy was not provisioned"
    counts = {"files": len(files), "functions": len(functions), "pairs of files": len(pairs)}
    print(counts)  # noqa: T201
    assert {name: count for name, count in counts.items() if count > BOUNDS[name]} == {}
