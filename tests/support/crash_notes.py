"""Notes of a crash log as a killed process leaves them."""

from __future__ import annotations

from pathlib import Path

from redrive import Policy
from redrive.delivery.middleware.poison_guard import CrashLogFile


def leave_notes(folder: Path, policy: Policy, *keys: str) -> None:
    """Write notes of *keys* in flight, added to earlier ones, as a kill leaves them."""
    log_file = CrashLogFile(folder, policy)
    for key in keys:
        log_file.begin(key)
    (file,) = folder.glob("*.notes")
    notes = file.read_text()
    log_file.close()
    file.write_text(notes)
