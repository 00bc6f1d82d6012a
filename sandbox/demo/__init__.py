"""`make demo`: redrive on real components, and an account that proves the result.

Reading order:

1. `story`: the steps, in order.
2. `shop`: tenant, topics, roles, and the programs of `examples/01-first-policy`.
3. `orders`: the orders in the programs' logs and at the broker.
4. `account`: the proof that every order is in exactly one place; otherwise the demo fails.
5. `screen`: the output.
"""
