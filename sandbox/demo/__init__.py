"""`make demo`: redrive does its job on real parts, and an account proves it.

Reading order:

1. `story`: the acts, in order.
2. `shop`: the stage: who owns which topic, and the programs of `examples/01-first-policy`.
3. `orders`: what the programs log, and what rests at the broker.
4. `account`: every order in exactly one place, or an exit status that is not zero.
5. `screen`: what is shown meanwhile.
"""
