"""Journey 3: dead letters → selected → back to the retry topic, exactly once → acknowledged.

```
operator    controller:  a Replay ─▶ SparkApplication, with `spec` as its argument
driver      job:         what rests in the topic ─▶ plan ─▶ a lease for each range ─▶ on record
executors   moving:      a range ─▶ send ─▶ receipt ─▶ acknowledge
```

The folders, each with its spine, and each importing from those below it only:

- `controller`, the operator's side: `reconcile`. It imports no other folder.
- `spark`, the engine, the only folder that imports pyspark: `query`.
- `job`, a replay from its first to its last message: `run`.
- `moving`, one range to the target, each message once: `mover`.
- `ledger`, which messages were moved, by which Replay: `ledger`.
- `topic`, what rests in a topic, where, and how it is read: `reading`.

Operator and job share `spec`, what the one hands to the other, and `selection`, which checks and
writes the `where` of a Replay. `python -m redrive.replay` is the job; `python -m
redrive.replay.audit` compares both topics with the ledger, `python -m redrive.replay.refused`
lists what it has of messages that could not be moved, and `python -m redrive.replay.harmful` finds
entries that end each consumer.
"""
