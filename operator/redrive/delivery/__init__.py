"""The second journey: a message fails → retry topic, later → again → dead-letter topic.

For consumers in Python, who write `from redrive import RetryConsumer, PolicyFile`. Reading order:

- `processor`, the spine: a message from its reception to its settlement
- `consumers`: the classes that an application uses; `assembly` builds them
- `connection`, `fetcher`, `arrivals`, `in_flight`: subscriptions, one stream of them, its bursts
  and early retries, in-flight messages
- `run`: workers, time-outs, results of handlers
- `decisions`, `forwarder`, `sender`: verdict about a failed message, its copy, the send
- `middleware`: one concern for each file; `chain` is the protocol
- `reporting`: events for log and hook; `retry_producer`: `RetryProducer`, beside the consumers
- `parts` (the protocols of the parts), `policy_file`, `concurrency`, `forking`: shared

Programs import from `redrive`, `redrive.middleware`, `redrive.prometheus` and
`redrive.opentelemetry` only.

This file imports nothing: `redrive` imports each name from its module when it is first used, so
that a program pays for what it uses. Parts that only some consumers need, such as `poison_guard`,
are imported when they are requested.
"""
