"""The replay journey: dead letters → selected → back to the retry topic, exactly once → settled.

In the operator: `handlers` (watches) → `reconcile` (one Replay) → `launch` (its SparkApplication).

In the job that it launches, in the order of the data:

1. `run`: the whole run; `spec` is what the operator hands to it, `progress` what it reports.
2. `ledger`: what was moved, by which Replay; `records` is what it says, `account` what that means.
3. `plan`: one scan by `snapshot`, `ranges` and `reading`, with a `selection`; what to move.
4. `dispatch`: range after range, under a lease; an `engine` runs the tasks, `query` is Spark's.
5. `mover`: send (`sending`, `window`), wait for the receipt, acknowledge; `tail` finds what an
   earlier try has stored, `outcome` holds what became of each message.

`position` binds what is sent to where it came from, which is what makes a run repeatable.
"""
