"""Pulsar topics as DataFrames, in any notebook or job: the data source `pulsar`.

    from redrive.spark import register

    register(spark)
    orders = spark.read.format("pulsar").option("service.url", "pulsar://pulsar:6650") \
        .option("topic", "persistent://shop/prod/orders").load()

Needs the extra `spark`, on driver and executors. The how-to is docs/howto/spark.md.

`datasource` has the classes that Spark calls. `options` parses options, and `slices` splits a read
into tasks; both are pure. `topics` reads from the broker, `rows` converts messages and columns.
"""

from __future__ import annotations

from redrive.spark.datasource import register

__all__ = ["register"]
