"""What Python keeps of the client's threads while receipts come in, and gives back."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from redrive.replay.moving.thread_state import ThreadState
from tests.integration.replay.test_mover import replay

ProvisionPolicy = Callable[..., Any]
COUNT = 3_000
pytestmark = pytest.mark.usefixtures("replay_token")


def thread_states() -> int:
    """How many threads Python knows, its own and others."""
    python = ctypes.pythonapi
    for function in (
        python.PyInterpreterState_Get,
        python.PyInterpreterState_ThreadHead,
        python.PyThreadState_Next,
    ):
        function.restype = ctypes.c_void_p
        function.argtypes = [ctypes.c_void_p] * (function is not python.PyInterpreterState_Get)
    count, state = 0, python.PyInterpreterState_ThreadHead(python.PyInterpreterState_Get())
    while state:
        count, state = count + 1, python.PyThreadState_Next(state)
    return count


@pytest.mark.parametrize("batch", [False, True])
def test_a_thread_is_known_while_receipts_come_and_forgotten_after_the_last(
    provision_policy: ProvisionPolicy,
    monkeypatch: pytest.MonkeyPatch,
    batch: bool,  # noqa: FBT001
) -> None:
    calls: Counter[str] = Counter()

    def count(name: str, call: Callable[[ThreadState], None]) -> None:
        def counted(self: ThreadState) -> None:
            calls[name] += 1
            call(self)

        monkeypatch.setattr(ThreadState, name, counted)

    count("keep", ThreadState.keep)
    count("release", ThreadState.release)
    provisioned = provision_policy()
    provisioned.bury_many(COUNT)
    before = thread_states()

    assert replay(provisioned, batch=batch).moved == COUNT

    assert thread_states() <= before
    assert 0 < calls["release"] < calls["keep"] / 2
