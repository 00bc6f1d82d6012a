"""The operator's side: one Replay → its SparkApplication; `reconcile` is the spine.

`handlers` watches and enqueues. `admission` decides whether a Replay may run, and as what job;
`errors` are the reasons why it may not. `launch` writes the SparkApplication. Nothing here imports
Spark, Arrow or Pulsar's client.
"""
