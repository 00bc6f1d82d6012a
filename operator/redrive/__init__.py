"""Retry and dead-letter topics for Apache Pulsar: the library for Python consumers.

Names are imported at their first use, so the package itself imports almost nothing: the operator
and the replay job import it, too, and do not need the library.
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
    "NotDoneError",
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
    from redrive.delivery.connection import SubscribeError
    from redrive.delivery.consumers.asynchronous import (
        AsyncBroadcastConsumer,
        AsyncRetryConsumer,
        AsyncRetryProducer,
        AsyncSimpleConsumer,
    )
    from redrive.delivery.consumers.broadcast import BroadcastConsumer
    from redrive.delivery.consumers.consumer import RetryConsumer
    from redrive.delivery.consumers.simple import NotInFlightError, SimpleConsumer
    from redrive.delivery.fetcher import ConsumerStoppedError, SubscriptionLostError
    from redrive.delivery.forking import InheritedError
    from redrive.delivery.middleware.ack_timeouts import AckTimeoutError
    from redrive.delivery.parts import CrashLog, Crypto
    from redrive.delivery.policy_file import PolicyFile, PolicyFileError, load_policy
    from redrive.delivery.reporting import Event
    from redrive.delivery.retry_producer import ProducerClosedError, RetryProducer
    from redrive.delivery.run import NotRunError
    from redrive.errors import InvalidSpecError, RedriveError
    from redrive.messages import NotSentError, TooBigError
    from redrive.policy.envelope import Attempt, Cause, Redaction
    from redrive.policy.ladder import Ladder
    from redrive.policy.model import Policy, SubscriptionType
    from redrive.policy.naming import TopicName
    from redrive.policy.verdict import (
        DeadLetter,
        Done,
        FailureRules,
        HandlerTimeoutError,
        NotDoneError,
        RetryLater,
    )
else:
    _HOMES = {
        "AckTimeoutError": "redrive.delivery.middleware.ack_timeouts",
        "AsyncBroadcastConsumer": "redrive.delivery.consumers.asynchronous",
        "AsyncRetryConsumer": "redrive.delivery.consumers.asynchronous",
        "AsyncRetryProducer": "redrive.delivery.consumers.asynchronous",
        "AsyncSimpleConsumer": "redrive.delivery.consumers.asynchronous",
        "Attempt": "redrive.policy.envelope",
        "BroadcastConsumer": "redrive.delivery.consumers.broadcast",
        "Cause": "redrive.policy.envelope",
        "ConsumerStoppedError": "redrive.delivery.fetcher",
        "CrashLog": "redrive.delivery.parts",
        "Crypto": "redrive.delivery.parts",
        "DeadLetter": "redrive.policy.verdict",
        "Done": "redrive.policy.verdict",
        "Event": "redrive.delivery.reporting",
        "FailureRules": "redrive.policy.verdict",
        "HandlerTimeoutError": "redrive.policy.verdict",
        "InheritedError": "redrive.delivery.forking",
        "InvalidSpecError": "redrive.errors",
        "Ladder": "redrive.policy.ladder",
        "NotDoneError": "redrive.policy.verdict",
        "NotInFlightError": "redrive.delivery.consumers.simple",
        "NotRunError": "redrive.delivery.run",
        "NotSentError": "redrive.messages",
        "Policy": "redrive.policy.model",
        "PolicyFile": "redrive.delivery.policy_file",
        "PolicyFileError": "redrive.delivery.policy_file",
        "ProducerClosedError": "redrive.delivery.retry_producer",
        "Redaction": "redrive.policy.envelope",
        "RedriveError": "redrive.errors",
        "RetryConsumer": "redrive.delivery.consumers.consumer",
        "RetryLater": "redrive.policy.verdict",
        "RetryProducer": "redrive.delivery.retry_producer",
        "SimpleConsumer": "redrive.delivery.consumers.simple",
        "SubscribeError": "redrive.delivery.connection",
        "SubscriptionLostError": "redrive.delivery.fetcher",
        "SubscriptionType": "redrive.policy.model",
        "TooBigError": "redrive.messages",
        "TopicName": "redrive.policy.naming",
        "load_policy": "redrive.delivery.policy_file",
    }

    def __getattr__(name: str) -> object:
        """Import a public name at its first use."""
        if name not in _HOMES:
            msg = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(msg)
        return getattr(importlib.import_module(_HOMES[name]), name)

    def __dir__() -> list[str]:
        """Return the public names, imported or not."""
        return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
