"""What Python knows of a thread of the client, kept from one call to the next.

A client calls back from a thread of its own. Python makes a state for each such call, maps memory
for its first frame, and gives both back when it returns: half of what a receipt costs.
"""

from __future__ import annotations

import ctypes
import threading


class ThreadState:
    """Keeps the state of whichever thread calls, by Python's own count of what uses it.

    It takes some 16 KiB, for ever if the thread ends before it is released.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def keep(self) -> None:
        """Keep the state of this thread, unless it is kept."""
        if not hasattr(self._of_thread, "kept"):
            self._of_thread.kept = ctypes.pythonapi.PyGILState_Ensure()

    def release(self) -> None:
        """Have it go when this call returns."""
        ctypes.pythonapi.PyGILState_Release(self._of_thread.kept)
        del self._of_thread.kept
