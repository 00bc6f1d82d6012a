"""Base of your own middleware: code around each message of a consumer.

    from redrive.middleware import Middleware

    class Timing(Middleware):
        def handle(self, handle): ...

    with RetryConsumer(client, PolicyFile(), middleware=[Timing()]) as consumer:
        consumer.run(handle)

The stages are documented at `Middleware`; docs/howto/handle.md shows how to use them.
"""

from __future__ import annotations

from redrive.delivery.middleware.chain import (
    Acknowledge,
    BoundConsumer,
    Failure,
    Forward,
    HandBack,
    Handle,
    Hop,
    Middleware,
    Outcome,
    Receive,
    Redeliver,
    RetryInPlace,
    Settle,
    Settlement,
    Take,
)
from redrive.delivery.middleware.outage_breaker import OutageBreaker
from redrive.delivery.middleware.outage_circuit import Outage
from redrive.policy.model import OutageLimits
from redrive.policy.verdict import Dead, DeadReason, Discard, Done, Retry

__all__ = [
    "Acknowledge",
    "BoundConsumer",
    "Dead",
    "DeadReason",
    "Discard",
    "Done",
    "Failure",
    "Forward",
    "HandBack",
    "Handle",
    "Hop",
    "Middleware",
    "Outage",
    "OutageBreaker",
    "OutageLimits",
    "Outcome",
    "Receive",
    "Redeliver",
    "Retry",
    "RetryInPlace",
    "Settle",
    "Settlement",
    "Take",
]
