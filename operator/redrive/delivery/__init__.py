"""The second journey: a message fails → retry topic, later → again → dead-letter topic.

For consumers in Python; `from redrive import RetryConsumer, PolicyFile` is the way in. Reading
order: `consumer` and its base `receiver` (receive → verdict → settle), `failures`, `settle`,
`events`; `run`, `answer`; the `parts`: `subscribe`, `inbox`, `line`, `producers` with `patience`;
and `policy_file`. For those who ask for messages: `simple`, `alarm`; who all want every message:
`broadcast`; with asyncio: `async_consumer`, `bridge`, `opening`. For those who produce:
`retry_producer`, `sends`, `async_retry_producer`. Imported by those only who want them: `suspects`
and `notebook`, by which `crash_notes` are kept; `prometheus`, and `opentelemetry` with its place in
a consumer, `tracing`.

Nothing is imported here: `redrive` imports each name from its module when it is first used, so that
a program pays for what it uses.
"""
