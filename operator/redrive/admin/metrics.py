"""Number, outcome and duration of calls to brokers; counted by `http`."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

CALLS = Counter(
    "redrive_admin_calls",
    "Calls to brokers' admin APIs, by HTTP method and by what they were answered.",
    ["verb", "status"],
)
SECONDS = Histogram(
    "redrive_admin_call_seconds",
    "How long calls to brokers' admin APIs took, redirects included.",
    ["verb"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
