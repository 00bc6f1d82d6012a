"""Sends a failed message to the retry or dead-letter topic; called by `processor`."""

from __future__ import annotations

import pulsar

from redrive.copying import reading
from redrive.copying.errors import UnreadableError
from redrive.delivery.middleware.settlement import Failure, Hop
from redrive.delivery.parts import Outgoing
from redrive.policy import envelope
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.policy.verdict import Dead, Retry


def hop_of(message: pulsar.Message, verdict: Retry | Dead, failure: Failure) -> Hop:
    """Return the copy of *message* that carries out *verdict*.

    Raises:
        UnreadableError: the message has properties that can't be copied.
    """
    properties = envelope.for_hop(
        _properties(message), failure.attempt,
        policy=failure.policy, verdict=verdict, cause=failure.cause,
    )  # fmt: skip
    delay = verdict.delay if isinstance(verdict, Retry) else None
    return Hop(message, destination(verdict, failure.policy), properties, delay)


def destination(verdict: object, policy: Policy) -> TopicName:
    """Say where a failed message goes: the policy does, and never a property of the message."""
    return policy.retry_topic if isinstance(verdict, Retry) else policy.dead_letter_topic


def forward(outgoing: Outgoing, hop: Hop) -> pulsar.MessageId | None:
    """Send a copy, and return its id; None if the broker proves that it was stored before.

    Raises:
        NotSentError: no receipt came for it; it may have been stored anyway. The same message keeps
            its identity when it is sent again.
    """
    return outgoing.send(hop.topic, hop.message, dict(hop.properties), hop.deliver_after)


def _properties(message: pulsar.Message) -> dict[str, str]:
    found = reading.properties(message)
    if found is None:
        raise UnreadableError(
            "a message can't be copied to its next topic, and stays where it is",
            got="a property that is not UTF-8",
            remedy="have its producer write text, and handle this one without failing, or clear it",
        )
    return found
