"""Report what happens to messages under stable names: to the log, and to a hook of the program.

Called by `reporting` and `broadcast`. Each record of the logger `redrive.delivery.events` has
the fields of its `Event` as attributes (`record.event`, `record.origin` …), for formatters of JSON.
The text is for people and may change; names and fields don't.
"""

from __future__ import annotations

import enum
import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from redrive.delivery.handling.interruption import ends_run

_log = logging.getLogger("redrive.delivery.events")  # a public name


class Name(enum.StrEnum):
    """The names of all events."""

    ATTEMPT_FAILED = "redrive.attempt_failed"
    RETRIED = "redrive.retried"
    RETRIED_IN_PLACE = "redrive.retried_in_place"
    NEGATIVELY_ACKNOWLEDGED = "redrive.negatively_acknowledged"
    DEAD_LETTERED = "redrive.dead_lettered"
    DISCARDED = "redrive.discarded"
    UNSENT = "redrive.unsent"
    TAKING_STOPPED = "redrive.taking_stopped"
    TAKING_RESUMED = "redrive.taking_resumed"
    LATE_SUCCESS = "redrive.late_success"
    DROPPED = "redrive.dropped"
    HELD = "redrive.held"
    OUTAGE_BEGAN = "redrive.outage_began"
    OUTAGE_ENDED = "redrive.outage_ended"
    OUTAGE_IGNORED = "redrive.outage_ignored"
    LEFT_UNSETTLED = "redrive.left_unsettled"
    DISCONNECTED = "redrive.disconnected"
    RECONNECTED = "redrive.reconnected"
    RECOVERED = "redrive.recovered"


_LEVELS = {
    Name.ATTEMPT_FAILED: logging.WARNING,
    Name.RETRIED: logging.INFO,
    Name.RETRIED_IN_PLACE: logging.INFO,
    Name.NEGATIVELY_ACKNOWLEDGED: logging.INFO,
    Name.DEAD_LETTERED: logging.INFO,
    Name.DISCARDED: logging.WARNING,
    Name.UNSENT: logging.ERROR,
    Name.TAKING_STOPPED: logging.ERROR,
    Name.TAKING_RESUMED: logging.INFO,
    Name.LATE_SUCCESS: logging.WARNING,
    Name.DROPPED: logging.WARNING,
    Name.HELD: logging.WARNING,
    Name.OUTAGE_BEGAN: logging.ERROR,
    Name.OUTAGE_ENDED: logging.INFO,
    Name.OUTAGE_IGNORED: logging.ERROR,
    Name.LEFT_UNSETTLED: logging.WARNING,
    Name.DISCONNECTED: logging.ERROR,
    Name.RECONNECTED: logging.INFO,
    Name.RECOVERED: logging.WARNING,
}


@dataclass(frozen=True)
class Event:
    """One thing that happened to a message, or to a consumer.

    Attributes:
        origin: the id it was first produced with; the same in all of its events. Empty where it is
            about no single message.
        message_id: the id it had in this attempt; else empty.
        attempt: which attempt that was, from 1; else 0.
        source: the source topic of the policy, which tells consumers apart.
        subscription: the subscription of the policy; empty for a consumer that broadcasts.
        topic: where it has been sent, or whose connection or chunks the event is about; else empty.
        new_id: its id there; empty if an earlier send had stored it: the broker proves that, and
            does not repeat the id.
        reason: why it was dead-lettered, discarded or not sent, the class of the exception, or the
            cause of an outage.
        generation: of the policy in force.
        policy: its name, `namespace/name`; empty if it has none, and for a consumer that
            broadcasts.
        count: how many messages it is about.
    """

    event: Name
    origin: str
    message_id: str
    attempt: int
    generation: int
    source: str
    subscription: str
    topic: str = ""
    new_id: str = ""
    reason: str = ""
    policy: str = ""
    count: int = 1


Hook = Callable[[Event], object]

DISCONNECT_TIMEOUT = timedelta(seconds=30)
"""After so long without a connection a consumer reports that."""

CONNECTION_TEXTS = {
    Name.DISCONNECTED: "no connection to the broker for %s for %.0f s, nothing is received; check "
    "that the broker answers, and that the token or certificate of this consumer is valid",
    Name.RECONNECTED: "connected to the broker again for %s, after %.0f s",
}
"""The text of these events, of all kinds of consumers."""


@dataclass(frozen=True)
class Events:
    """Reports to the log and, if there is one, to a hook.

    Attributes:
        hook: called in the thread where it happened; an exception of it is logged and changes
            nothing about the message.
    """

    hook: Hook | None = None

    def report(self, event: Event, text: str, *values: object) -> None:
        """Report *event*, in the log with *text*, which is formatted with *values*."""
        try:
            _log.log(_LEVELS[event.event], text, *values, extra=vars(event))
        except BaseException as error:  # a filter of the program's, and the log can't show it
            if ends_run(error):
                raise
            traceback.print_exc()
        if self.hook is None:
            return
        try:
            self.hook(event)
        except BaseException as error:  # a message must not be stuck for it
            if ends_run(error):
                raise
            _log.exception("the hook for events failed at %s", event.event)
