"""`make demo` and `make demo DEMO=rocketmq`: redrive on real components, with a proven result.

Reading order:

1. `story`: the steps with Pulsar, in order; `rocketmq`: those with RocketMQ. `stage`: their parts.
2. `shop`: tenant, topics, roles, and the programs of `examples/01-first-policy`.
3. `orders`: the orders in the programs' logs and at the broker.
4. `account`: the proof that every order is in exactly one place; otherwise the demo fails.
5. `screen`: the output.
"""
