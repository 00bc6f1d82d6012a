from __future__ import annotations

import threading
import time

import pytest

from redrive.delivery.retrying import send_watchdog
from redrive.delivery.retrying.send_watchdog import SendWatchdog


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_watchdog, "_LOOK_EVERY_SECONDS", 0.01)


def test_what_takes_too_long_is_given_up_once_and_what_does_not_never() -> None:
    given_up: list[str] = []
    ended = threading.Event()

    def give_up() -> None:
        given_up.append("slow")
        ended.set()

    waiting = SendWatchdog(1)
    with waiting.during(give_up):
        for _ in range(3):
            with waiting.during(lambda: given_up.append("quick")):
                pass
        assert ended.wait(30)
        time.sleep(0.1)
    waiting.close()
    assert given_up == ["slow"]


def test_a_call_that_fails_is_over_too() -> None:
    given_up: list[str] = []
    waiting = SendWatchdog(1)
    with pytest.raises(LookupError), waiting.during(lambda: given_up.append("failed")):
        raise LookupError
    time.sleep(1.2)
    waiting.close()
    assert given_up == []


def test_its_thread_ends_with_it() -> None:
    others = set(threading.enumerate())
    waiting = SendWatchdog(1)
    with waiting.during(lambda: None):
        (ours,) = set(threading.enumerate()) - others
        assert ours.is_alive()
    waiting.close()
    assert not ours.is_alive()
