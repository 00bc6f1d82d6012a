"""Journey 3: dead letters → selected → back to the retry topic, exactly once → acknowledged.

```
operator    controller:  a Replay ─▶ SparkApplication, with `spec` as its argument
driver      job:         contents of the topic ─▶ plan ─▶ a lease for each range ─▶ on record
executors   mover:       a range ─▶ send ─▶ receipt ─▶ acknowledge
```

Modules from the top; each imports from those below it only:

- `controller`, the operator's side: `reconciler`. It imports no part of the job.
- `spark`, the engine, the only module that imports pyspark.
- `job`, a replay from its first to its last message: `run`.
- `mover`, one range to the target, each message once, with `sending`, `transport` and `lookup`.
- `ledger` and `records`: which messages were moved, by which Replay.

Operator and job share `spec`, the argument of a job, and `selection`, which checks and writes the
`where` of a Replay. `python -m redrive.replay` is the job; `python -m redrive.replay.audit`
compares both topics with the ledger, `python -m redrive.replay.refused` lists messages that could
not be moved, and `python -m redrive.replay.harmful` finds entries that end each consumer.
"""
