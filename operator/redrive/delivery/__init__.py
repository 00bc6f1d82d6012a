"""The second journey: a message fails → retry topic, later → again → dead-letter topic.

For consumers in Python; `from redrive import RetryConsumer, load_policy` is the way in. Reading
order: `consumer` (receive → verdict → settle), `failures`, `settle`, `run`, `answer`; then its
`parts`: `subscribe`, `inbox`, `producers`; and `policy_file`.
"""

from __future__ import annotations

from redrive.delivery.consumer import RetryConsumer
from redrive.delivery.policy_file import PolicyFile, load_policy

__all__ = ["PolicyFile", "RetryConsumer", "load_policy"]
