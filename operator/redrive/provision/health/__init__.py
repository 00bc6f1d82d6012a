"""The state of the topics of ready policies: backlogs, the oldest dead letter, what needs a fix.

Beside the reconciles, which bring about what is asked for, `watch` reads the statistics of all
topics in turn. What it finds goes three ways: backlogs into the status (`backlog` decides when that
is worth a write) and into metrics (`gauges`); warnings (`findings`, by `checks`) to the next
reconcile, which alone writes conditions. `reader` limits how often a broker is asked.
"""
