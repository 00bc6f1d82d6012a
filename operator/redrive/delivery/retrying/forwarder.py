"""Sends a failed message to the retry or dead-letter topic; called by `retry_handler`.

At least once: send → receipt → acknowledge, in this order. A crash in between duplicates the
message, under the same origin and count, and never loses it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from datetime import timedelta

import pulsar

from redrive.delivery.parts import Incoming, Outgoing, Subscription
from redrive.delivery.receiving import reading
from redrive.delivery.receiving.reading import id_text
from redrive.delivery.retrying.errors import NotSentError, UnreadableError
from redrive.delivery.telemetry.events import Event, Events, Name
from redrive.delivery.telemetry.tracing import UNTRACED, MessageTracing
from redrive.policy import envelope
from redrive.policy.cause import Cause
from redrive.policy.envelope import Attempt
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.policy.verdict import Dead, Discard, Retry

HANDLE_AGAIN_AFTER = timedelta(seconds=5)
"""When a message that could not be sent on its next hop is handed out again by this consumer."""


@dataclass(frozen=True)
class Forwarder:
    """Moves failed messages to where their policy wants them."""

    producers: Outgoing
    incoming: Incoming
    events: Events
    tracing: MessageTracing = UNTRACED

    def settle(  # noqa: PLR0913 - all that a hop depends on
        self,
        message: pulsar.Message,
        attempt: Attempt,
        verdict: Retry | Dead | Discard,
        cause: Cause | None,
        *,
        policy: Policy,
        subscription: Subscription,
    ) -> bool:
        """Send *message* on its next hop, and acknowledge it once the broker has stored it there.

        Without a receipt nothing is acknowledged: the message will be handled again by the same
        consumer after `HANDLE_AGAIN_AFTER`, and if it was stored all the same, it will have been
        duplicated. Should the process end before, the broker delivers it again at once.

        A message to be discarded is acknowledged, and a warning in the log is all that is left.

        Args:
            attempt: the one that failed.
            subscription: where the message came from.

        Returns:
            Whether the message is settled.
        """
        previous = id_text(message.message_id())
        happened = functools.partial(
            Event,
            origin=attempt.origin,
            message_id=previous,
            attempt=attempt.number,
            generation=policy.generation,
            source=str(policy.topic),
            subscription=policy.subscription,
            policy=policy.name,
        )
        if isinstance(verdict, Discard):
            subscription.acknowledge(message)
            self.events.report(
                happened(Name.DISCARDED, reason=verdict.reason),
                "discarded (%s), as the policy asks: origin %s, id %s, failed attempts %d",
                verdict.reason, attempt.origin, previous, verdict.reconsume_times,
            )  # fmt: skip
            return True
        topic, delay = _destination(verdict, policy)
        try:
            properties = envelope.for_hop(
                _properties(message), attempt, policy=policy, verdict=verdict, cause=cause
            )
            with self.tracing.sending(topic, properties) as carried:
                sent = self.producers.send(topic, message, dict(carried), delay)
        except NotSentError as error:
            # Not by the broker: it delivers no chunked message again before its consumer is gone.
            again = HANDLE_AGAIN_AFTER.total_seconds()
            self.incoming.again(message, again)
            self.events.report(
                happened(Name.UNSENT, topic=str(topic), reason=error.reason),
                "%s; origin %s, id %s, to be handled again in %d s",
                error, attempt.origin, previous, again,
            )  # fmt: skip
            return False
        subscription.acknowledge(message)
        new_id = id_text(sent)
        name = Name.RETRIED if isinstance(verdict, Retry) else Name.DEAD_LETTERED
        reason = verdict.reason if isinstance(verdict, Dead) else ""
        self.events.report(
            happened(name, topic=str(topic), new_id=new_id, reason=reason),
            "moved to %s: origin %s, previous id %s, new id %s, failed attempts %d",
            topic, attempt.origin, previous, new_id, verdict.reconsume_times,
        )  # fmt: skip
        return True


def _destination(verdict: Retry | Dead, policy: Policy) -> tuple[TopicName, timedelta | None]:
    """Say where a message goes: the policy does, and never a property of the message."""
    match verdict:
        case Retry(delay=delay):
            return policy.retry_topic, delay
        case Dead():
            return policy.dead_letter_topic, None


def _properties(message: pulsar.Message) -> dict[str, str]:
    found = reading.properties(message)
    if found is None:
        raise UnreadableError(
            "a message can't be copied to its next topic, and stays where it is",
            got="a property that is not UTF-8",
            remedy="have its producer write text, and handle this one without failing, or clear it",
        )
    return found
