"""Retry and dead-letter topics for Apache Pulsar: what a consumer in Python needs.

Importing this costs next to nothing until a name is used: the operator and the replay job import
the same package and have no need of what consumers need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "AckTimeoutError",
    "AsyncBroadcastConsumer",
    "AsyncRetryConsumer",
    "AsyncRetryProducer",
    "AsyncSimpleConsumer",
    "Attempt",
    "BroadcastConsumer",
    "Cause",
    "ConsumerStoppedError",
    "CrashLog",
    "Crypto",
    "DeadLetter",
    "Done",
    "Event",
    "FailureRules",
    "HandlerTimeoutError",
    "InheritedError",
    "InvalidSpecError",
    "Ladder",
    "NotInFlightError",
    "NotRunError",
    "NotSentError",
    "Policy",
    "PolicyFile",
    "PolicyFileError",
    "ProducerClosedError",
    "Redaction",
    "RedriveError",
    "RetryConsumer",
    "RetryLater",
    "RetryProducer",
    "SimpleConsumer",
    "SubscribeError",
    "SubscriptionLostError",
    "SubscriptionType",
    "TooBigError",
    "TopicName",
    "load_policy",
]

if TYPE_CHECKING:
    from redrive.copying.errors import NotSentError, TooBigError
    from redrive.delivery.consumers.async_broadcast import AsyncBroadcastConsumer
    from redrive.delivery.consumers.async_consumer import AsyncRetryConsumer
    from redrive.delivery.consumers.async_simple import AsyncSimpleConsumer
    from redrive.delivery.consumers.broadcast import BroadcastConsumer
    from redrive.delivery.consumers.consumer import RetryConsumer
    from redrive.delivery.consumers.simple import SimpleConsumer
    from redrive.delivery.crypto import Crypto
    from redrive.delivery.forking import InheritedError
    from redrive.delivery.handling.answer import NotRunError
    from redrive.delivery.handling.run import HandlerTimeoutError
    from redrive.delivery.middleware.ack_timeouts import AckTimeoutError
    from redrive.delivery.middleware.crash_log import CrashLog
    from redrive.delivery.policy_file import PolicyFile, PolicyFileError, load_policy
    from redrive.delivery.producing.async_retry_producer import AsyncRetryProducer
    from redrive.delivery.producing.retry_producer import ProducerClosedError, RetryProducer
    from redrive.delivery.receiving.fetcher import ConsumerStoppedError, SubscriptionLostError
    from redrive.delivery.receiving.subscribe import SubscribeError
    from redrive.delivery.telemetry.events import Event
    from redrive.errors import InvalidSpecError, RedriveError
    from redrive.policy.cause import Cause, Redaction
    from redrive.policy.envelope import Attempt
    from redrive.policy.failure import DeadLetter, FailureRules, RetryLater
    from redrive.policy.invisible import NotInFlightError
    from redrive.policy.ladder import Ladder
    from redrive.policy.model import Policy, SubscriptionType
    from redrive.policy.naming import TopicName
    from redrive.policy.verdict import Done
else:
    _HOMES = {
        "AckTimeoutError": "redrive.delivery.middleware.ack_timeouts",
        "AsyncBroadcastConsumer": "redrive.delivery.consumers.async_broadcast",
        "AsyncRetryConsumer": "redrive.delivery.consumers.async_consumer",
        "AsyncRetryProducer": "redrive.delivery.producing.async_retry_producer",
        "AsyncSimpleConsumer": "redrive.delivery.consumers.async_simple",
        "Attempt": "redrive.policy.envelope",
        "BroadcastConsumer": "redrive.delivery.consumers.broadcast",
        "Cause": "redrive.policy.cause",
        "ConsumerStoppedError": "redrive.delivery.receiving.fetcher",
        "CrashLog": "redrive.delivery.middleware.crash_log",
        "Crypto": "redrive.delivery.crypto",
        "DeadLetter": "redrive.policy.failure",
        "Done": "redrive.policy.verdict",
        "Event": "redrive.delivery.telemetry.events",
        "FailureRules": "redrive.policy.failure",
        "HandlerTimeoutError": "redrive.delivery.handling.run",
        "InheritedError": "redrive.delivery.forking",
        "InvalidSpecError": "redrive.errors",
        "Ladder": "redrive.policy.ladder",
        "NotInFlightError": "redrive.policy.invisible",
        "NotRunError": "redrive.delivery.handling.answer",
        "NotSentError": "redrive.copying.errors",
        "Policy": "redrive.policy.model",
        "PolicyFile": "redrive.delivery.policy_file",
        "PolicyFileError": "redrive.delivery.policy_file",
        "ProducerClosedError": "redrive.delivery.producing.retry_producer",
        "Redaction": "redrive.policy.cause",
        "RedriveError": "redrive.errors",
        "RetryConsumer": "redrive.delivery.consumers.consumer",
        "RetryLater": "redrive.policy.failure",
        "RetryProducer": "redrive.delivery.producing.retry_producer",
        "SimpleConsumer": "redrive.delivery.consumers.simple",
        "SubscribeError": "redrive.delivery.receiving.subscribe",
        "SubscriptionLostError": "redrive.delivery.receiving.fetcher",
        "SubscriptionType": "redrive.policy.model",
        "TooBigError": "redrive.copying.errors",
        "TopicName": "redrive.policy.naming",
        "load_policy": "redrive.delivery.policy_file",
    }

    def __getattr__(name: str) -> object:
        """Import a public name when it is first used."""
        if name not in _HOMES:
            msg = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(msg)
        return getattr(importlib.import_module(_HOMES[name]), name)
