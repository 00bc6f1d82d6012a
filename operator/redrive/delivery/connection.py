"""The parts of a consumer at a broker: subscriptions, one stream of them, and producers."""

from __future__ import annotations

import logging

import pulsar

from redrive.delivery.bounded import release_at_exit
from redrive.delivery.handling.run import Run
from redrive.delivery.middleware.timer import Timer
from redrive.delivery.parts import (
    BrokerConnection,
    Parts,
    SequenceLog,
    Subscribing,
    SystemClock,
)
from redrive.delivery.receiving.fetcher import Fetcher
from redrive.delivery.receiving.subscribe import subscribe
from redrive.delivery.retrying.producers import Producers
from redrive.delivery.telemetry.outage_beacon import OutageBeacon
from redrive.policy.model import Policy
from redrive.policy.naming import DEAD_LETTER_SUBSCRIPTION

_log = logging.getLogger(__name__)

_LINGER_SECONDS = 0.1
"""How long further messages may be on their way when a first one has come."""


class ClientConnection(BrokerConnection):
    """A connection of *client*, which it leaves open."""

    def __init__(self, client: pulsar.Client) -> None:
        self.clock = SystemClock()
        self._client = client
        release_at_exit(client)

    def open(self, policy: Policy, subscribing: Subscribing) -> Parts:
        """Subscribe both topics of *policy*, or neither; warn where dead letters may be lost."""
        if policy.dead_letters and not policy.name:  # made by hand: there is no operator for it
            _log.warning(
                "%s keeps dead letters only if it has a subscription, which a client can't find "
                "out: create one (pulsar-admin topics create-subscription -s %s …), or use the "
                "policy of a RetryPolicy",
                policy.dead_letter_topic, DEAD_LETTER_SUBSCRIPTION,
            )  # fmt: skip
        subscribed = subscribe(self._client, policy, subscribing)
        return Parts(
            self.clock,
            subscribed.consumers,
            Fetcher(list(subscribed.consumers.values())),
            Producers(self._client, name=subscribing.name, crypto=subscribing.crypto),
            Timer,
            Run.until_stopped,
            _LINGER_SECONDS,
            OutageBeacon(self._client, policy),
            subscribing.nack_delay.total_seconds(),
            subscribing.max_in_flight_bytes,
            self._letters(policy),
            subscribed.behind,
        )

    def _letters(self, policy: Policy) -> SequenceLog | None:
        if not policy.sequenced:
            return None
        # What it needs takes long to import, and few policies ask for it.
        from redrive.delivery.retrying.sequence_topic import SequenceTopic  # noqa: PLC0415

        return SequenceTopic(self._client, policy.sequences_topic)
