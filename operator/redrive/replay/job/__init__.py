"""The job's side, free of Spark: `run`, the spine, is a replay from start to end.

It makes the `plan`, the entries to move of each range, and `dispatch` moves range after range, each
under a lease. An engine runs the tasks: this process, or Spark. `progress` reads and writes the
status of the Replay; `aftermath` follows the replayed messages.
"""
