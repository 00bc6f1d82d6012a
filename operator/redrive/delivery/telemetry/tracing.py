"""Where a trace can follow a message through its attempts; called by `consumer` and `forwarder`.

`redrive.opentelemetry` makes the spans, for programs that ask for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import pulsar

from redrive.delivery.handling.answer import Handle, Outcome
from redrive.policy.envelope import Attempt
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName

Settle = Callable[[pulsar.Message, Outcome], None]


class TracedConsumer(Protocol):
    """What is asked of a consumer whose attempts are traced; each kind of ours has it."""

    @property
    def policy(self) -> Policy:
        """Return the policy in force."""

    def attempt_of(self, message: pulsar.Message) -> Attempt:
        """Return which attempt at *message* this is."""


class MessageTracing(Protocol):
    """Follows messages through their attempts."""

    def handling(self, handle: Handle, consumer: TracedConsumer) -> Handle:
        """Return *handle* with each call of it traced."""

    def settling(self, settle: Settle) -> Settle:
        """Return *settle* traced as part of the attempt that it ends."""

    def sending(
        self, topic: TopicName, properties: Mapping[str, str]
    ) -> AbstractContextManager[Mapping[str, str]]:
        """Trace a send to *topic*; give what to send for the trace to go on."""


class _Untraced:
    """No tracing, at no cost."""

    def handling(self, handle: Handle, consumer: TracedConsumer) -> Handle:  # noqa: ARG002 - see Tracing
        """Return *handle* as it is."""
        return handle

    def settling(self, settle: Settle) -> Settle:
        """Return *settle* as it is."""
        return settle

    def sending(
        self,
        topic: TopicName,  # noqa: ARG002 - see Tracing
        properties: Mapping[str, str],
    ) -> AbstractContextManager[Mapping[str, str]]:
        """Give the *properties* as they are."""
        return nullcontext(properties)


UNTRACED: MessageTracing = _Untraced()
