"""Retry and dead-letter topics for Apache Pulsar: what a consumer in Python needs.

Importing this costs next to nothing until a name is used: the operator and the replay job import
the same package and have no need of what consumers need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "AsyncRetryConsumer",
    "AsyncRetryProducer",
    "Attempt",
    "BroadcastConsumer",
    "Cause",
    "ConsumerStoppedError",
    "CrashNotes",
    "Done",
    "Event",
    "FailureRules",
    "InvalidSpecError",
    "Ladder",
    "NotInFlightError",
    "NotSentError",
    "Policy",
    "PolicyFile",
    "PolicyFileError",
    "ProducerClosedError",
    "Redaction",
    "RedriveError",
    "RetryConsumer",
    "RetryProducer",
    "SimpleConsumer",
    "SubscribeError",
    "SubscriptionLostError",
    "TooBigError",
    "TopicName",
    "load_policy",
]

if TYPE_CHECKING:
    from redrive.delivery.async_consumer import AsyncRetryConsumer
    from redrive.delivery.async_retry_producer import AsyncRetryProducer
    from redrive.delivery.broadcast import BroadcastConsumer
    from redrive.delivery.consumer import RetryConsumer
    from redrive.delivery.crash_notes import CrashNotes
    from redrive.delivery.events import Event
    from redrive.delivery.inbox import ConsumerStoppedError, SubscriptionLostError
    from redrive.delivery.policy_file import PolicyFile, PolicyFileError, load_policy
    from redrive.delivery.producers import NotSentError, TooBigError
    from redrive.delivery.retry_producer import ProducerClosedError, RetryProducer
    from redrive.delivery.simple import SimpleConsumer
    from redrive.delivery.subscribe import SubscribeError
    from redrive.errors import InvalidSpecError, RedriveError
    from redrive.policy.cause import Cause, Redaction
    from redrive.policy.envelope import Attempt
    from redrive.policy.failure import FailureRules
    from redrive.policy.invisible import NotInFlightError
    from redrive.policy.ladder import Ladder
    from redrive.policy.model import Policy
    from redrive.policy.naming import TopicName
    from redrive.policy.verdict import Done
else:
    _HOMES = {
        "AsyncRetryConsumer": "redrive.delivery.async_consumer",
        "AsyncRetryProducer": "redrive.delivery.async_retry_producer",
        "Attempt": "redrive.policy.envelope",
        "BroadcastConsumer": "redrive.delivery.broadcast",
        "Cause": "redrive.policy.cause",
        "ConsumerStoppedError": "redrive.delivery.inbox",
        "CrashNotes": "redrive.delivery.crash_notes",
        "Done": "redrive.policy.verdict",
        "Event": "redrive.delivery.events",
        "FailureRules": "redrive.policy.failure",
        "InvalidSpecError": "redrive.errors",
        "Ladder": "redrive.policy.ladder",
        "NotInFlightError": "redrive.policy.invisible",
        "NotSentError": "redrive.delivery.producers",
        "Policy": "redrive.policy.model",
        "PolicyFile": "redrive.delivery.policy_file",
        "PolicyFileError": "redrive.delivery.policy_file",
        "ProducerClosedError": "redrive.delivery.retry_producer",
        "Redaction": "redrive.policy.cause",
        "RedriveError": "redrive.errors",
        "RetryConsumer": "redrive.delivery.consumer",
        "RetryProducer": "redrive.delivery.retry_producer",
        "SimpleConsumer": "redrive.delivery.simple",
        "SubscribeError": "redrive.delivery.subscribe",
        "SubscriptionLostError": "redrive.delivery.inbox",
        "TooBigError": "redrive.delivery.producers",
        "TopicName": "redrive.policy.naming",
        "load_policy": "redrive.delivery.policy_file",
    }

    def __getattr__(name: str) -> object:
        """Import a public name when it is first used."""
        if name not in _HOMES:
            msg = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(msg)
        return getattr(importlib.import_module(_HOMES[name]), name)
