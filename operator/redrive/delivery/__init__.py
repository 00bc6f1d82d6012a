"""The second journey: a message fails → retry topic, later → again → dead-letter topic.

For consumers in Python; `from redrive import RetryConsumer, PolicyFile` is the way in. Reading
order: `consumer` and its base `receiver` (receive → verdict → settle), `failures`, `settle`,
`events`; `run`, `answer`; the `parts`: `subscribe`, `inbox`, `line`, `producers`; and
`policy_file`. Beside it, for those who produce: `retry_producer`, `sends`, `async_retry_producer`.
Imported by those only who want them: `prometheus`, and `opentelemetry` with its place in a
consumer, `tracing`.
"""

from __future__ import annotations

from redrive.delivery.async_retry_producer import AsyncRetryProducer
from redrive.delivery.consumer import RetryConsumer
from redrive.delivery.events import Event
from redrive.delivery.policy_file import PolicyFile, load_policy
from redrive.delivery.retry_producer import RetryProducer

__all__ = [
    "AsyncRetryProducer",
    "Event",
    "PolicyFile",
    "RetryConsumer",
    "RetryProducer",
    "load_policy",
]
