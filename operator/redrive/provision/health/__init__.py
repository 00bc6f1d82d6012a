"""How the topics of provisioned policies fare: backlogs, the oldest dead letter, what goes amiss.

Beside the reconciles, which bring about what is asked for, `watch` reads the statistics of all
topics in turn. What it finds goes three ways: backlogs into the status (`backlog` decides when that
is worth a write) and into metrics; what somebody should see to (`symptoms`, `deliveries`) to the
next reconcile, which alone writes conditions. `reader` keeps to what a broker may be asked.
"""
