"""Shows an outage in the broker's statistics, where the operator sees it; called by the breaker.

What a consumer tells of itself when it subscribes can't be changed later. So while a consumer has
paused, it has a producer on the retry topic that sends nothing, and whose metadata tells why. It
goes with the connection: a process that ends shows nothing any more.
"""

from __future__ import annotations

import functools
import logging
import threading

import pulsar

from redrive.delivery.bounded import OPEN_SECONDS, in_background, within
from redrive.policy.model import Policy
from redrive.policy.outage import BEACON

_MAX_SHOWN = 256

_log = logging.getLogger(__name__)


class OutageBeacon:
    """One consumer's producer that tells of an outage, made and closed in a thread of its own.

    Until the broker takes it, it is tried again whenever something is to be shown.
    """

    def __init__(self, client: pulsar.Client, policy: Policy) -> None:
        self._client = client
        self._topic = str(policy.retry_topic)
        self._wanted = ""
        self._shown = ""
        self._producer: pulsar.Producer | None = None
        self._working = False
        self._changing = threading.Lock()

    def show(self, cause: str) -> None:
        """Show *cause*, and no longer what was shown before; nothing if it is empty."""
        with self._changing:
            self._wanted = cause[:_MAX_SHOWN]
            if self._wanted == self._shown or self._working:
                return
            self._working = True
        in_background(self._change)

    def close(self) -> None:
        """Show nothing more."""
        self.show("")

    def _change(self) -> None:
        while True:
            with self._changing:
                wanted, before, self._producer = self._wanted, self._producer, None
            if before is not None:
                _leave(before)
            made = self._make(wanted) if wanted else None
            with self._changing:
                self._producer, self._shown = made, wanted if made or not wanted else ""
                if self._wanted == wanted:
                    self._working = False
                    return

    def _make(self, cause: str) -> pulsar.Producer | None:
        try:
            return within(OPEN_SECONDS, functools.partial(self._open, cause), late=_leave)
        except (pulsar.exceptions.PulsarException, TimeoutError) as error:
            _log.warning(
                "the operator is not shown that this consumer has paused: %s", error or "no answer"
            )
            return None

    def _open(self, cause: str) -> pulsar.Producer:
        # On one partition of several: that is enough to be seen.
        topic = self._client.get_topic_partitions(self._topic)[0]
        return self._client.create_producer(topic, properties={BEACON: cause})


def _leave(producer: pulsar.Producer) -> None:
    try:
        producer.close()
    except pulsar.exceptions.PulsarException as error:  # such as a client that was closed
        _log.debug("closing what shows an outage failed: %s", error)
