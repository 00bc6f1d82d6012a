"""The second journey: a message fails → retry topic, later → again → dead-letter topic.

For consumers in Python; `from redrive import RetryConsumer, PolicyFile` is the way in. Reading
order: `consumer` (receive → verdict → settle), `failures`, `settle`, `events`; `run`, `answer`; its
`parts`: `subscribe`, `inbox`, `producers`; and `policy_file`.
"""

from __future__ import annotations

from redrive.delivery.consumer import RetryConsumer
from redrive.delivery.events import Event
from redrive.delivery.policy_file import PolicyFile, load_policy

__all__ = ["Event", "PolicyFile", "RetryConsumer", "load_policy"]
