"""The rules of retry, pure: no I/O, no clock, no randomness; standard library only.

The three journeys never import one another; they agree through the values of this package.
Reading order:

1. `values`: text forms of durations, sizes and patterns.
2. `ladder`: retry number → delay; the presets and the delay levels.
3. `naming`: topic and subscription → names of the retry and the dead-letter topic.
4. `model`: `Policy`, everything that a consumer or a replay must know.
5. `verdict`: a failed attempt → retry with a delay, or dead letter; rules on exceptions.
6. `envelope`: properties that travel with a message, and the cause of its failure.
7. `sequences`: dead letters by key.
8. `codec`: the one written form of a `Policy`.
"""
