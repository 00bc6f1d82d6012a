"""The job's side, free of Spark: `run`, the spine, is a replay from its first to its last message.

It makes the `plan`, what to move of each range, and has `dispatch` move range after range, each
under a lease. An `engine` runs the tasks: this process, or Spark. `progress` reads and writes the
status of the Replay.
"""
