"""What provisioning counts and measures, for Prometheus; `docs/reference/metrics.md` lists it."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from redrive.kube.metrics import POLICY_LABELS

BACKLOG = Gauge(
    "redrive_backlog_messages",
    "Messages that wait in a policy's retry topic or rest in its dead-letter topic.",
    (*POLICY_LABELS, "role"),
)
OLDEST_DEAD_LETTER = Gauge(
    "redrive_oldest_dead_letter_age_seconds",
    "Age of the oldest message that rests in a policy's dead-letter topic; 0 without any.",
    POLICY_LABELS,
)
DELIVERIES = Counter(
    "redrive_deliveries_total",
    "Messages delivered to the consumers of a policy's subscription, seen while the operator ran.",
    (*POLICY_LABELS, "role"),
)
REPAIRS = Counter(
    "redrive_drift_repairs_total",
    "Actions that repaired drift of a policy that was ready.",
    ("kind",),
)
