"""The names of all properties that a retried or dead-lettered message carries.

Those in capitals without prefix are of Pulsar's Java client, so that Java and Python consumers can
share a subscription; `REDRIVE_…` are ours. docs/reference/properties.md tells users of them.
"""

from __future__ import annotations

# Where it is on its way.
RECONSUMETIMES = "RECONSUMETIMES"
"""Retries so far; on a dead letter failed attempts, which is one more."""
DELAY_TIME = "DELAY_TIME"
"""The delay asked for, in milliseconds."""
DEAD_REASON = "REDRIVE_DEAD_REASON"
"""Why it is a dead letter: one of `verdict.DeadReason`."""

# Where it comes from.
REAL_TOPIC = "REAL_TOPIC"
REAL_SUBSCRIPTION = "REAL_SUBSCRIPTION"
RETRY_TOPIC = "RETRY_TOPIC"
ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID"
"""The id it was first produced with; each hop gives it a new one."""
FIRST_ID = "REDRIVE_FIRST_ID"
"""The id it had when a consumer in Python failed it first: tells apart messages that share an
origin, as those of one batch do for Go's client, and those to which an application has copied the
properties of another."""
SCHEMA_VERSION = "REDRIVE_SCHEMA_VERSION"
"""The version of the source topic's schema it was produced with, a number from 0."""

# Of a dead letter that no copy of its message could be: see `copying.encoding`.
NOT_COPIED = "REDRIVE_NOT_COPIED"
"""Why not: reasons of `NotCopyableError`, separated by commas."""
SOURCE_MESSAGE_ID = "REDRIVE_SOURCE_MESSAGE_ID"
"""The id that it had where it was consumed."""
ENCODED = "REDRIVE_ENCODED"
"""The parts that are no text, as JSON with base64."""
PAYLOAD_PREFIX = "REDRIVE_PAYLOAD_PREFIX"
"""So many bytes of JSON precede the payload, in place of `ENCODED`."""

# Why its last attempt failed; replaced at each hop.
CAUSE_TYPE = "REDRIVE_CAUSE_TYPE"
"""The name of the exception's class."""
CAUSE_MESSAGE = "REDRIVE_CAUSE_MESSAGE"
"""The exception's text."""
CAUSE_FINGERPRINT = "REDRIVE_CAUSE_FINGERPRINT"
"""The same for failures of one kind: 16 hexadecimal digits."""
CAUSE_TRACE = "REDRIVE_CAUSE_TRACE"
"""Where it was raised, the innermost call first, and what it was caused by."""
FAILED_AT = "REDRIVE_FAILED_AT"
"""When, in ISO 8601 with a time zone."""
FIRST_FAILED_AT = "REDRIVE_FIRST_FAILED_AT"
"""When the first attempt failed; the only one of these that stays."""
CONSUMER = "REDRIVE_CONSUMER"
"""The name of the consumer that saw it fail."""
ATTEMPT = "REDRIVE_ATTEMPT"
"""Which attempt it was, from 1."""

# What replays have done to it.
REPLAYS = "REDRIVE_REPLAYS"
"""How often it has been replayed."""
REPLAY = "REDRIVE_REPLAY"
"""The Replay that moved it last, as `namespace/name`."""
REPLAY_SOURCE = "REDRIVE_REPLAY_SOURCE"
"""From where it was moved, as `uid@partition:ledger:entry:index` with the uid of that Replay: the
evidence that it was. A hop drops it."""
