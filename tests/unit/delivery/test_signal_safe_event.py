from __future__ import annotations

import signal
import threading
import time

from redrive.delivery.concurrency import SignalSafeEvent


def test_a_closed_latch_keeps_whoever_waits() -> None:
    assert not SignalSafeEvent().wait(0.01)


def test_an_open_latch_lets_everybody_through_again_and_again() -> None:
    event = SignalSafeEvent()
    through = []
    waiting = [threading.Thread(target=lambda: through.append(event.wait(10))) for _ in range(3)]
    for thread in waiting:
        thread.start()
    event.set()
    for thread in waiting:
        thread.join(10)
    assert through == [True] * 3
    assert event.wait(0)


def test_a_signal_handler_opens_it_for_the_thread_it_interrupts() -> None:
    event = SignalSafeEvent()
    before = signal.signal(signal.SIGALRM, lambda *_: event.set())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        began = time.monotonic()
        assert event.wait(10)
        assert time.monotonic() - began < 5
    finally:
        signal.signal(signal.SIGALRM, before)
