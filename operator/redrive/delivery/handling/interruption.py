"""Exceptions that end the process or a call of `run`; all others fail no more than one message.

Consumers call code of the program: handlers, middleware around them, rules, hooks. It may raise
exceptions that are no `Exception`: a panic in Rust (PyO3), `asyncio.CancelledError`, a
`gevent.Timeout`. A consumer that ended with these would get the same message first after each
restart.

A group concerns the process if one of its parts does, however many others are failures.
"""

from __future__ import annotations

import pulsar

from redrive.errors import PROCESS_ERRORS
from redrive.policy.matching import parts


class RunCancelled(BaseException):
    """The call of `run` was cancelled and its handlers with it, which settles no message."""


# The client raises Interrupted in place of KeyboardInterrupt.
_ENDINGS = (*PROCESS_ERRORS, pulsar.Interrupted, RunCancelled)


def ends_run(error: BaseException) -> bool:
    """Return True if *error* is no failure of a message, and has to be raised again."""
    return any(isinstance(part, _ENDINGS) for part in parts(error))


def exits(error: BaseException) -> bool:
    """Return True if the program has asked for its own end, as `sys.exit` does."""
    return any(isinstance(part, SystemExit) for part in parts(error))


def ends_thread(error: BaseException) -> bool:
    """Return True if *error* ends a thread of the consumer's own, where SystemExit is a failure.

    Python ignores a SystemExit in any thread but the main one: such a thread would end silently,
    and with it what it does for all messages.
    """
    return ends_run(error) and not exits(error)
