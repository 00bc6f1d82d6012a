"""The rules of retry, pure: no I/O, no clock, no randomness; standard library only.

The three journeys never import one another; they agree through the values of this package.
Reading order:

1. `durations`, `sizes`: how a length of time, and a number of bytes, is written.
2. `ladder`: retry number → delay; the presets and the delay levels.
3. `naming`: topic and subscription → names of the retry and the dead-letter topic.
4. `model`: `Policy`, all that a consumer or a replay must know.
5. `verdict`: a failed attempt → retry it, after which delay, or dead-letter it.
6. `failure`: an exception → the same, by rules on its class.
7. `text`, `properties`, `cause`, `envelope`: what travels with a message.
8. `codec`: the one written form of a `Policy`.
"""
