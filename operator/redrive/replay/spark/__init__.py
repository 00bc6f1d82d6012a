"""What Spark runs: `query`, the spine, is Spark as the engine of a replay, and builds its session.

`datasource` gives it a topic as rows, for the selection to be evaluated. The only imports of
pyspark are here.
"""
