from __future__ import annotations

import signal
import threading
import time

from redrive.delivery.latch import Latch


def test_a_closed_latch_keeps_whoever_waits() -> None:
    assert not Latch().wait(0.01)


def test_an_open_latch_lets_everybody_through_again_and_again() -> None:
    latch = Latch()
    through = []
    waiting = [threading.Thread(target=lambda: through.append(latch.wait(10))) for _ in range(3)]
    for thread in waiting:
        thread.start()
    latch.open()
    for thread in waiting:
        thread.join(10)
    assert through == [True] * 3
    assert latch.wait(0)


def test_a_signal_handler_opens_it_for_the_thread_it_interrupts() -> None:
    latch = Latch()
    before = signal.signal(signal.SIGALRM, lambda *_: latch.open())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        began = time.monotonic()
        assert latch.wait(10)
        assert time.monotonic() - began < 5
    finally:
        signal.signal(signal.SIGALRM, before)
