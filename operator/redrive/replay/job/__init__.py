"""Run of a replay job, without Spark. `run` is the spine, from start to end.

`plan` selects the entries of each range, and `dispatch` moves the ranges, each under a lease. An
engine runs the tasks: child processes, or Spark. `progress` reads and writes the status of the
Replay. `outcomes` tracks the replayed messages.
"""
