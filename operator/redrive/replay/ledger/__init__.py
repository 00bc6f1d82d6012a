"""What was moved, by which Replay: `ledger`, the spine, a topic beside the dead-letter topic.

`records` is what it holds, `account` what that means for one Replay: one equation.
"""
