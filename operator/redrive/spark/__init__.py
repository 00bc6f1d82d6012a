"""Pulsar topics as DataFrames, in any notebook or job: the data source `pulsar`.

    from redrive.spark import register

    register(spark)
    orders = spark.read.format("pulsar").option("service.url", "pulsar://pulsar:6650") \
        .option("topic", "persistent://shop/prod/orders").load()

Needs the extra `spark`, on driver and executors. The how-to is docs/howto/spark.md.

`datasource`, the spine, is the class that Spark calls. `options` and `slices`, which cuts a read
into tasks, are pure. `topics` asks the broker, `rows` turns messages into batches of columns.
"""

from __future__ import annotations

from redrive.spark.datasource import register

__all__ = ["register"]
