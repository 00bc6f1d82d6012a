"""What all consumers of a policy show of themselves."""

from __future__ import annotations

from abc import abstractmethod

import pulsar

from redrive.delivery.closing import Closing
from redrive.delivery.middleware.outage_circuit import Outage
from redrive.delivery.processor import Processor
from redrive.policy.envelope import Attempt
from redrive.policy.model import Policy


class PolicyConsumer(Closing):
    """Consumes the source and the retry topic of a policy.

    In a process that was forked since it was made, `stop` and `close` do nothing, and all else
    raises InheritedError.
    """

    _assembled: Processor

    @property
    def _processor(self) -> Processor:
        """Return what does the work.

        Raises:
            InheritedError: this process was forked from the consumer's.
        """
        self._assembled.owner.check()
        return self._assembled

    def attempt_of(self, message: pulsar.Message) -> Attempt:
        """Return which attempt at *message* this is, where it came from, and why it failed before.

        A message of the source topic is at its first attempt, whatever its properties claim.
        """
        return self._processor.decisions.attempts.of(message)

    @abstractmethod
    def acknowledge(self, message: pulsar.Message) -> None:
        """Settle *message* as handled."""

    @abstractmethod
    def hand_back(self, message: pulsar.Message) -> None:
        """Undo the reception of *message*."""

    @abstractmethod
    def stop(self) -> None:
        """Hand out nothing more."""

    @property
    def name(self) -> str:
        """Return the name of this consumer."""
        return self._processor.decisions.consumer

    @property
    def policy(self) -> Policy:
        """Return the policy in force; its `generation` tells which."""
        return self._processor.decisions.policy()

    @property
    def connected(self) -> bool:
        """Return True if the client has a connection for the source and the retry topic.

        For partitioned topics: for each partition. False for the seconds in which the client
        connects again, permanently while the broker refuses this consumer, as with an expired
        token, and after `close`. Cheap, and waits for nothing: made for probes.
        """
        return self._processor.connected

    @property
    def in_hand(self) -> int:
        """Return how many messages were taken and are not settled: handled now, or kept here."""
        return self._processor.in_hand

    @property
    def outages(self) -> tuple[Outage, ...]:
        """Return what this consumer has paused for by itself; see `OutageBreaker`."""
        return self._processor.outages

    @property
    def dead_keys(self) -> int:
        """Return how many keys' messages follow a dead letter, for all consumers of the policy.

        As this one read last, before it was given a message; 0 if the policy is not `sequenced`.
        """
        return self._processor.dead_keys

    def ignore_outages(self) -> None:
        """Go on in spite of all outages, each until a message that needs the same succeeds.

        Failures use up retries again meanwhile.
        """
        self._processor.ignore_outages()
