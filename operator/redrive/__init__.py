"""Retry and dead-letter topics for Apache Pulsar: what a consumer in Python needs.

Importing this costs next to nothing until a name is used: the operator and the replay job import
the same package and have no need of what consumers need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__all__ = [
    "AsyncRetryProducer",
    "Attempt",
    "Cause",
    "Done",
    "Event",
    "FailureRules",
    "Policy",
    "PolicyFile",
    "Redaction",
    "RedriveError",
    "RetryConsumer",
    "RetryProducer",
    "load_policy",
]

if TYPE_CHECKING:
    from redrive.delivery import (
        AsyncRetryProducer,
        Event,
        PolicyFile,
        RetryConsumer,
        RetryProducer,
        load_policy,
    )
    from redrive.errors import RedriveError
    from redrive.policy.cause import Cause, Redaction
    from redrive.policy.envelope import Attempt
    from redrive.policy.failure import FailureRules
    from redrive.policy.model import Policy
    from redrive.policy.verdict import Done
else:
    _HOMES = {
        "AsyncRetryProducer": "redrive.delivery",
        "Attempt": "redrive.policy.envelope",
        "Cause": "redrive.policy.cause",
        "Redaction": "redrive.policy.cause",
        "Done": "redrive.policy.verdict",
        "Event": "redrive.delivery",
        "FailureRules": "redrive.policy.failure",
        "Policy": "redrive.policy.model",
        "PolicyFile": "redrive.delivery",
        "RedriveError": "redrive.errors",
        "RetryConsumer": "redrive.delivery",
        "RetryProducer": "redrive.delivery",
        "load_policy": "redrive.delivery",
    }

    def __getattr__(name: str) -> object:
        """Import a public name when it is first used."""
        if name not in _HOMES:
            msg = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(msg)
        return getattr(importlib.import_module(_HOMES[name]), name)
