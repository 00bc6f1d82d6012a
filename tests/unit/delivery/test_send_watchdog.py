from __future__ import annotations

import threading
import time

import pytest

from redrive.delivery.concurrency import SendWatchdog


def test_calls_have_their_own_limits_and_are_given_up_once() -> None:
    given_up: list[str] = []
    ended = threading.Event()

    def give_up() -> None:
        given_up.append("slow")
        ended.set()

    waiting = SendWatchdog()
    began = time.monotonic()
    with waiting.during(30, lambda: given_up.append("later")), waiting.during(0.2, give_up):
        for _ in range(3):
            with waiting.during(1, lambda: given_up.append("quick")):
                pass
        assert ended.wait(30)
        assert time.monotonic() - began >= 0.2
        time.sleep(0.1)
    waiting.close()
    assert given_up == ["slow"]


def test_a_call_that_fails_is_over_too() -> None:
    given_up: list[str] = []
    waiting = SendWatchdog()
    with pytest.raises(LookupError), waiting.during(0.2, lambda: given_up.append("failed")):
        raise LookupError
    time.sleep(0.4)
    waiting.close()
    assert given_up == []


def test_its_thread_ends_with_it() -> None:
    others = set(threading.enumerate())
    waiting = SendWatchdog()
    with waiting.during(1, lambda: None):
        (ours,) = set(threading.enumerate()) - others
        assert ours.is_alive()
    waiting.close()
    assert not ours.is_alive()
