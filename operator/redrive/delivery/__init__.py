"""The second journey: a message fails → retry topic, later → again → dead-letter topic.

For consumers in Python; `from redrive import RetryConsumer, PolicyFile` is the way in. The folders,
in reading order, are what happens to a message:

- `processor`: the spine; what a consumer does with a message, from its reception to its end
- `consumers`: what an application calls; `assembly` puts them together
- `receiving`: subscriptions; `fetcher` makes one stream of them
- `handling`: workers run handlers within a time, and `answer` reads what they returned
- `retrying`: `decisions` finds the verdict about a failed message, `forwarder` sends it on
- `middleware`: what lies around all this, one concern to a file; `chain` is the protocol
- `producing`: `RetryProducer`, which stands alone beside the consumers
- `telemetry`: events for log and hook

What all of them share lies here: `parts`, of which a consumer is built, `connection`, which makes
them at a broker, `policy_file`, and small tools. Programs import from `redrive`,
`redrive.middleware`, `redrive.prometheus` and `redrive.opentelemetry` only.

Nothing is imported here: `redrive` imports each name from its module when it is first used, so that
a program pays for what it uses. What only some consumers need (`poison_guard`, `crash_log_file`) is
imported when it is asked for.
"""
