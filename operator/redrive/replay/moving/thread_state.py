"""What Python knows of a thread of the client, kept from one call to the next.

A client calls back from a thread of its own. Python makes a state for each such call, maps memory
for its first frame, and gives both back when it returns: half of what a receipt costs.
"""

from __future__ import annotations

import ctypes
import threading


class ThreadState:
    """Keeps the state of the thread that calls until its last call, by Python's count of its users.

    It takes some 16 KiB, for ever if that thread is not the one that makes the last call, as where
    a producer is closed before all of its receipts have come.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self._expected = self._made = 0

    def expect_call(self) -> None:
        """Take note that there will be one more call."""
        self._expected += 1

    def called(self) -> None:
        """Take note of a call, from within it."""
        self.keep()
        self._made += 1
        if self._made == self._expected:
            self.release()

    def keep(self) -> None:
        """Keep the state of this thread, unless it is kept."""
        if not hasattr(self._of_thread, "kept"):
            self._of_thread.kept = ctypes.pythonapi.PyGILState_Ensure()

    def release(self) -> None:
        """Have it go when this call returns."""
        ctypes.pythonapi.PyGILState_Release(self._of_thread.kept)
        del self._of_thread.kept
