"""The replay journey: dead letters → selected → back to the retry topic, exactly once → settled.

In the operator: `handlers` (watches) → `reconcile` (one Replay) → `launch` (its SparkApplication).

In the job that it launches, in the order of the data:

1. `job`: the whole run; `spec` is what the operator tells it, `progress` what it tells back.
2. `snapshot`: where the run ends, and what is acknowledged already.
3. `source`: dead letters as rows.
4. `selection`: which of them.
5. `sink`: send, wait for the receipt, acknowledge.

`position` binds what is sent to where it came from, which is what makes a run repeatable.
"""
