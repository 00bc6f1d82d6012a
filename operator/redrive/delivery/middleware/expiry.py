"""Fails messages whose time is over; called by `ack_timeouts` and `simple`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import pulsar

from redrive.copying.reading import id_text
from redrive.delivery.handling.interruption import ends_thread
from redrive.delivery.middleware.settlement import HANDLE_AGAIN_AFTER
from redrive.delivery.parts import Incoming

_log = logging.getLogger(__name__)


def fail_each(
    over: Iterable[pulsar.Message],
    fail: Callable[[pulsar.Message], None],
    incoming: Incoming,
    closing: Callable[[], bool],
) -> None:
    """Have each message *fail*; one with which that goes wrong is handed out again, and logged.

    Once *closing* says so the rest stay unacknowledged: whoever closes would wait for each, which
    can take seconds, and the broker delivers them again.
    """
    for message in over:
        if closing():
            return
        try:
            fail(message)
        except BaseException as error:  # else it and the others would never be settled
            if ends_thread(error):
                raise
            _log.exception("message %s is handed out again", id_text(message.message_id()))
            incoming.again(message, HANDLE_AGAIN_AFTER.total_seconds())
