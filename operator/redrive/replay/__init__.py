"""Replay: selected dead letters are moved to the retry topic exactly once, and acknowledged.

```
operator    controller:  a Replay ─▶ SparkApplication or Job, with `spec` as its argument
driver      job:         contents of the topic ─▶ plan ─▶ a lease for each range ─▶ record
executors   mover:       a range ─▶ send ─▶ receipt ─▶ acknowledge
```

Modules from the top. Each imports only modules below it:

- `controller`, with `reconciler` as its spine, launches jobs. It imports no part of the job.
- `spark`, the engine with executors, is the only module that imports pyspark.
- `job`, with `run` as its spine, runs a replay from start to end.
- `mover` moves one range to the target, with `sending`, `transport` and `lookup`.
- `ledger`, `records` and `account` record which Replay has moved which messages, and where a killed
  one may have sent others. Those that it has sent are found in the target, see `lookup`.

Operator and job share `spec`, the argument of a job, and `selection`, which checks the `where` of a
Replay and generates SQL. `python -m redrive.replay` is the job, and `audit` its comparison of both
topics with the ledger; `python -m redrive.replay.refused` lists messages that could not be moved,
and `python -m redrive.replay.harmful` finds entries that end each consumer.
"""
