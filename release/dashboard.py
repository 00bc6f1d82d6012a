"""The Grafana dashboard of the chart, generated from a table of panels."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from release import CHART

DASHBOARD = CHART / "dashboard.json"
POLICY = "policy, policy_namespace, source_topic, subscription"
CHOSEN = '{policy_namespace=~"$namespace", policy=~"$policy"}'
_LEGEND = "{{policy_namespace}}/{{policy}}"
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3


class Panel(NamedTuple):
    """One graph: its title, its query, the legend of its lines, and their unit."""

    title: str
    query: str
    legend: str
    unit: str = "short"


def _rate(counter: str, by: str, chosen: str = "") -> str:
    return f"sum by ({by}) (rate({counter}{chosen}[$__rate_interval]))"


def _of_role(role: str) -> str:
    return CHOSEN.replace("{", f'{{role="{role}", ', 1)


PANELS: Sequence[Panel] = (
    Panel(
        "Policies by readiness",
        'sum by (reason) (redrive_objects{kind="RetryPolicy", condition="Ready"})',
        "{{reason}}",
    ),
    Panel(
        "Replays by reason",
        'sum by (reason) (redrive_objects{kind="Replay", condition="Ready"})',
        "{{reason}}",
    ),
    Panel("Replicas that hold the lease", "sum(redrive_lease_held)", "leaders"),
    Panel(
        "Dead letters",
        f"max by ({POLICY}) (redrive_backlog_messages{_of_role('dead-letter')})",
        _LEGEND,
    ),
    Panel(
        "Age of the oldest dead letter",
        f"max by ({POLICY}) (redrive_oldest_dead_letter_age_seconds{CHOSEN})",
        _LEGEND,
        "s",
    ),
    Panel(
        "Retries that wait",
        f"max by ({POLICY}) (redrive_backlog_messages{_of_role('retry')})",
        _LEGEND,
    ),
    Panel(
        "Deliveries",
        _rate("redrive_deliveries_total", "role", CHOSEN),
        "{{role}}",
        "ops",
    ),
    Panel(
        "Failed attempts by cause",
        _rate("redrive_consumer_failed_attempts_total", "reason", CHOSEN),
        "{{reason}}",
        "ops",
    ),
    Panel(
        "Retried and dead-lettered by consumers",
        _rate("redrive_consumer_retried_messages_total", "policy, policy_namespace", CHOSEN),
        f"{_LEGEND} retried",
        "ops",
    ),
    Panel(
        "Messages that consumers could not send",
        _rate("redrive_consumer_unsent_messages_total", "policy, policy_namespace", CHOSEN),
        _LEGEND,
        "ops",
    ),
    Panel(
        "Replays by phase",
        f"sum by (phase) (max by (policy, policy_namespace, phase) (redrive_replays{CHOSEN}))",
        "{{phase}}",
    ),
    Panel(
        "Progress of Replays under way",
        f"max by (policy, policy_namespace) (redrive_replay_progress_messages{CHOSEN})",
        _LEGEND,
    ),
    Panel(
        "Messages of Replays that ended within an hour",
        f"sum by (outcome) (increase(redrive_replay_messages_total{CHOSEN}[1h]))",
        "{{outcome}}",
    ),
    Panel(
        "Since the last Replay that was completed",
        "time() - max by (policy, policy_namespace) "
        f"(redrive_replay_last_success_timestamp_seconds{CHOSEN})",
        _LEGEND,
        "s",
    ),
    Panel(
        "Nine of ten Replays took less than",
        "histogram_quantile(0.9, sum by (le, outcome) "
        "(rate(redrive_replay_duration_seconds_bucket[1d])))",
        "{{outcome}}",
        "s",
    ),
    Panel(
        "Reconciles",
        _rate("redrive_reconciles_total", "kind, result"),
        "{{kind}} {{result}}",
        "ops",
    ),
    Panel(
        "Objects that wait to be reconciled",
        "sum by (kind) (redrive_reconcile_queue_depth)",
        "{{kind}}",
    ),
    Panel(
        "Calls to brokers",
        _rate("redrive_admin_calls_total", "verb, status"),
        "{{verb}} {{status}}",
        "ops",
    ),
    Panel(
        "Brokers that do not answer",
        "max by (connection_namespace, connection) (redrive_breaker_open)",
        "{{connection_namespace}}/{{connection}}",
    ),
    Panel("Drift repaired", _rate("redrive_drift_repairs_total", "kind"), "{{kind}}", "ops"),
)


def render() -> str:
    """Return the dashboard in the JSON that Grafana imports."""
    dashboard = {
        "title": "redrive",
        "uid": "redrive",
        "tags": ["pulsar", "redrive"],
        "schemaVersion": 39,
        "refresh": "1m",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                _variable("namespace", "label_values(redrive_policy_ready, policy_namespace)"),
                _variable(
                    "policy",
                    'label_values(redrive_policy_ready{policy_namespace=~"$namespace"}, policy)',
                ),
            ]
        },
        "panels": [_panel(number, panel) for number, panel in enumerate(PANELS)],
    }
    return json.dumps(dashboard, indent=1) + "\n"


_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": query,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "refresh": 2,
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, _COLUMNS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": _SOURCE,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [{"refId": "A", "expr": panel.query, "legendFormat": panel.legend}],
    }
