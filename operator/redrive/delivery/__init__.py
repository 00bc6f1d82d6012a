"""The second journey: a message fails → retry topic, later → again → dead-letter topic.

For consumers in Python; `from redrive import RetryConsumer, PolicyFile` is the way in. The folders,
in reading order, are what happens to a message:

- `consumers`: what an application calls; `consumer` and its base `receiver` are the spine
- `receiving`: subscriptions; `fetcher` makes one stream of them, `key_ordering` keeps keys in order
- `handling`: workers run handlers within a time and a rate, and `answer` reads what they returned
- `in_flight`: messages that are not acknowledged yet: ack time-outs, poison messages, timers
- `retrying`: `retry_handler` finds the verdict about a failed message, `forwarder` carries it out
- `producing`: `RetryProducer`, which stands alone beside the consumers
- `telemetry`: events for log and hook; where traces are made

What all of them share lies here: `parts`, of which a consumer is built, `policy_file`, and small
tools. Programs import from `redrive`, `redrive.prometheus` and `redrive.opentelemetry` only.

Nothing is imported here: `redrive` imports each name from its module when it is first used, so that
a program pays for what it uses. What only some consumers need (`poison_guard`, `crash_log_file`) is
imported when it is asked for.
"""
