"""Launch of Replays by the operator; `reconciler` is the spine.

`handlers` listens and enqueues. `admission` decides if a Replay may run, and as which job.
`prerequisites` checks the objects that a job needs, and the target. `rights` grants rights at the
target. `launch` builds the application, `spark_operators` the object of each engine. `status`
derives the status of the Replay. No module here imports Spark, Arrow or Pulsar's client.
"""
