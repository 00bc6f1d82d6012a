"""The operator's side: one Replay → its SparkApplication; `reconciler` is the spine.

`handlers` watches and enqueues. `admission` decides whether a Replay may run, and as which job;
`prerequisites` checks what the job needs, `rights` grants its role rights at the target. `launch`
writes the application, `spark_operators` the object of each Spark operator. No module here imports
Spark, Arrow or Pulsar's client.
"""
