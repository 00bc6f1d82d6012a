"""`CrashLog`: the setting by which a consumer finds poison messages; read by `poison_guard`.

The setting stands apart from what it needs, `poison_guard` and `crash_log_file`, which a consumer
without a crash log never imports.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from redrive.errors import InvalidSpecError


@dataclass(frozen=True)
class CrashLog:
    """Let a consumer find poison messages: those that kill its process, or end it by `sys.exit`.

    A handler that raises SystemExit counts as a crash of the messages that it was given, whatever
    the exit code. A program that ends otherwise, by another exception or by `close`, has not
    crashed.

    An entry that kills the process while the client decodes it is not handed out, and no part of
    the log; `redrive.replay.harmful` finds it.

    Attributes:
        directory: where it records what it has in hand; it must outlive the process, as an
            `emptyDir` of the pod does. Consumers may share it.
        max_redeliveries: a message that was in hand when processes ended so is delivered again
            so often; then it is dead-lettered, before a handler sees it.

    Raises:
        InvalidSpecError: the number is negative.
    """

    directory: str | os.PathLike[str]
    max_redeliveries: int = 3

    def __post_init__(self) -> None:
        """Refuse what means nothing."""
        if self.max_redeliveries < 0:
            raise InvalidSpecError(
                "a message is delivered again after a crash at least 0 times",
                got=self.max_redeliveries,
                remedy="give 0 or more; 0 dead-letters it after the first crash",
            )
