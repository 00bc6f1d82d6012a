"""The Grafana dashboards of the chart, generated from tables of panels."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from release import CHART, page

FOLDER = CHART / "dashboards"
POLICY = "policy, policy_namespace, source_topic, subscription"
NAME = "policy, policy_namespace"
REPLAY = "policy, policy_namespace, replay"
CHOSEN = '{policy_namespace=~"$namespace", policy=~"$policy"}'
RUNBOOKS = page("docs/runbooks")
"""Base of the links to runbooks; the chart replaces it by `prometheusRule.runbookURL`."""
_LEGEND = "{{policy_namespace}}/{{policy}}"
_WIDTH = 24
"""Columns of a dashboard in Grafana."""
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_RED, _GREEN = "red", "green"


class Query(NamedTuple):
    """A query, and the legend of its lines; a table shows it as a column with that title."""

    query: str
    legend: str = ""
    unit: str = "short"
    alert: str = ""
    """The alert whose runbook a column links to."""


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        kind: of Grafana's panels: `timeseries`, `stat` or `table`.
        unit: of its values, in Grafana's words; in a table each query has its own.
        alert: the alert whose runbook the panel links to.
        warn_from: the value from which a `stat` is red; None for no colour.
    """

    title: str
    queries: Sequence[Query]
    kind: str = "timeseries"
    unit: str = "short"
    alert: str = ""
    warn_from: float | None = None
    width: int = 8
    height: int = 8


@dataclass(frozen=True)
class Dashboard:
    """One dashboard: its file is `NAME.json`, and its uid NAME."""

    name: str
    title: str
    panels: Sequence[Panel]
    variables: Sequence[tuple[str, str]] = ()
    """Names of variables, each with the query of its values."""

    @property
    def queries(self) -> list[str]:
        """Return the queries of all panels."""
        return [query.query for panel in self.panels for query in panel.queries]

    def render(self) -> str:
        """Return the JSON that Grafana imports."""
        content = {
            "title": self.title,
            "uid": self.name,
            "tags": ["pulsar", "redrive"],
            "schemaVersion": 39,
            "refresh": "1m",
            "time": {"from": "now-6h", "to": "now"},
            "links": [
                {
                    "type": "dashboards",
                    "title": "redrive",
                    "tags": ["redrive"],
                    "asDropdown": False,
                    "includeVars": True,
                    "keepTime": True,
                }
            ],
            "templating": {
                "list": [
                    {"name": "datasource", "type": "datasource", "query": "prometheus"},
                    *(_variable(*variable) for variable in self.variables),
                ]
            },
            "panels": _placed(self.panels),
        }
        return json.dumps(content, indent=1) + "\n"


def stat(
    title: str, query: str, alert: str = "", unit: str = "short", warn_from: float | None = 1
) -> Panel:
    """Return a panel of one number."""
    return Panel(title, [Query(query, title)], "stat", unit, alert, warn_from, width=6, height=4)


def table(title: str, *queries: Query, height: int = 9) -> Panel:
    """Return a panel with a row for each policy, and a column for each query."""
    return Panel(title, queries, "table", width=_WIDTH, height=height)


def graph(title: str, *queries: Query, unit: str = "short", alert: str = "") -> Panel:
    """Return a panel with lines over time."""
    return Panel(title, queries, unit=unit, alert=alert)


def chosen(**labels: str) -> str:
    """Return the selector of the policies that a user chose, with further *labels*."""
    more = "".join(f'{label}="{value}", ' for label, value in labels.items())
    return CHOSEN.replace("{", f"{{{more}", 1)


def _rate(counter: str, by: str, selector: str = "") -> str:
    return f"sum by ({by}) (rate({counter}{selector}[$__rate_interval]))"


def _quantile(histogram: str, by: str = "", share: float = 0.99) -> str:
    rates = _rate(f"{histogram}_bucket", f"le, {by}" if by else "le")
    return f"histogram_quantile({share}, {rates})"


def _of_policies(metric: str, by: str = POLICY, **labels: str) -> str:
    """Return the series of each policy once: two replicas show them during a takeover."""
    return f"max by ({by}) ({metric}{chosen(**labels)})"


_ARRIVED = f"increase(redrive_dead_letters_total{CHOSEN}[1h])"
_WARNINGS = f"max by ({NAME}, type) (redrive_policy_condition{CHOSEN})"
_UNDER_WAY = f'redrive_replays{CHOSEN[:-1]}, phase=~"Submitted|Running|Suspended"}}'

ON_CALL = Dashboard(
    "redrive-on-call",
    "redrive: on call",
    (
        stat(
            "Policies that are not ready",
            f"sum(1 - {_of_policies('redrive_policy_ready')})",
            "RedrivePolicyNotReady",
        ),
        stat("Warnings", f"count({_WARNINGS})"),
        stat(
            "Dead letters that arrived within an hour",
            f"sum({_ARRIVED})",
            "RedriveDeadLettersArrive",
        ),
        stat(
            "Brokers that do not answer",
            "sum(max by (connection_namespace, connection) (redrive_breaker_open))",
            "RedriveBrokerUnreachable",
        ),
        stat(
            "Dead letters",
            f"sum({_of_policies('redrive_backlog_messages', role='dead-letter')})",
            "RedriveDeadLettersForgotten",
            warn_from=None,
        ),
        stat(
            "Age of the oldest dead letter",
            f"max(redrive_oldest_dead_letter_age_seconds{CHOSEN})",
            "RedriveDeadLettersForgotten",
            "s",
            7 * 86_400,
        ),
        stat(
            "Replays that wait for an approval",
            f"sum({_of_policies('redrive_replay_awaits_approval', REPLAY)})",
            "RedriveReplayAwaitsApproval",
        ),
        stat(
            "Age of the oldest statistics",
            f"time() - min({_of_policies('redrive_statistics_timestamp_seconds')})",
            "RedriveStatisticsOutdated",
            "s",
            3_600,
        ),
        table(
            "Policies",
            Query(
                _of_policies("redrive_policy_ready", NAME),
                "Ready",
                "bool_yes_no",
                "RedrivePolicyNotReady",
            ),
            Query(
                _of_policies("redrive_backlog_messages", NAME, role="dead-letter"),
                "Dead letters",
                alert="RedriveDeadLettersForgotten",
            ),
            Query(
                _of_policies("redrive_oldest_dead_letter_age_seconds", NAME),
                "Oldest",
                "s",
                "RedriveDeadLettersForgotten",
            ),
            Query(
                f"sum by ({NAME}) ({_ARRIVED})",
                "Arrived within an hour",
                alert="RedriveDeadLettersArrive",
            ),
            Query(
                _of_policies("redrive_due_messages", NAME, role="retry"),
                "Retries due",
                alert="RedriveRetriesNotDelivered",
            ),
            Query(f"count by ({NAME}) ({_WARNINGS})", "Warnings"),
            Query(
                f"sum by ({NAME}) (max by ({NAME}, phase) ({_UNDER_WAY}))",
                "Replays under way",
                alert="RedriveReplayStuck",
            ),
        ),
        table(
            "Replays under way",
            *(
                Query(_of_policies("redrive_replay_live_messages", REPLAY, outcome=outcome), title)
                for outcome, title in (("moved", "Moved"), ("left", "Left"), ("skipped", "Skipped"))
            ),
            Query(
                _of_policies("redrive_replay_live_messages", REPLAY, outcome="refused"),
                "Refused",
                alert="RedriveReplayRefusedMessages",
            ),
            Query(
                _of_policies("redrive_replay_live_messages_per_second", REPLAY),
                "Messages per second",
                alert="RedriveReplayStuck",
            ),
            Query(_of_policies("redrive_replay_live_remaining_seconds", REPLAY), "Remaining", "s"),
            Query(
                _of_policies("redrive_replay_awaits_approval", REPLAY),
                "Waits for an approval",
                "bool_yes_no",
                "RedriveReplayAwaitsApproval",
            ),
            height=6,
        ),
        table("Warnings", Query(_WARNINGS, "Present", "bool_yes_no"), height=6),
        graph(
            "Dead letters",
            Query(_of_policies("redrive_backlog_messages", role="dead-letter"), _LEGEND),
        ),
        graph(
            "Dead letters that arrived within 15 minutes",
            Query(f"sum by ({NAME}) ({_ARRIVED.replace('[1h]', '[15m]')})", _LEGEND),
            alert="RedriveDeadLettersArrive",
        ),
        graph(
            "Dead letters, share of the quota",
            Query(
                f"{_of_policies('redrive_dead_letter_bytes')}"
                f" / {_of_policies('redrive_dead_letter_quota_bytes')}",
                _LEGEND,
            ),
            unit="percentunit",
            alert="RedriveQuotaNearlyReached",
        ),
        graph(
            "Retries",
            Query(_of_policies("redrive_backlog_messages", role="retry"), f"{_LEGEND} all"),
            Query(_of_policies("redrive_due_messages", role="retry"), f"{_LEGEND} due"),
        ),
        graph(
            "Age of the oldest retry",
            Query(_of_policies("redrive_oldest_retry_age_seconds"), _LEGEND),
            unit="s",
            alert="RedriveRetriesNotDelivered",
        ),
        graph(
            "Deliveries",
            Query(_rate("redrive_deliveries_total", "role", CHOSEN), "{{role}}"),
            unit="ops",
            alert="RedriveRetryStorm",
        ),
        graph(
            "Failed attempts by cause",
            Query(_rate("redrive_consumer_failed_attempts_total", "reason", CHOSEN), "{{reason}}"),
            unit="ops",
            alert="RedriveAttemptsFail",
        ),
        graph(
            "Retried and dead-lettered by consumers",
            Query(
                _rate("redrive_consumer_retried_messages_total", NAME, CHOSEN),
                f"{_LEGEND} retried",
            ),
            Query(
                _rate("redrive_consumer_dead_lettered_messages_total", NAME, CHOSEN),
                f"{_LEGEND} dead-lettered",
            ),
            unit="ops",
        ),
        graph(
            "Messages that consumers could not send",
            Query(_rate("redrive_consumer_unsent_messages_total", NAME, CHOSEN), _LEGEND),
            unit="ops",
            alert="RedriveConsumerCannotSend",
        ),
        graph(
            "Progress of Replays under way",
            Query(
                _of_policies("redrive_replay_progress_messages", REPLAY),
                "{{policy_namespace}}/{{replay}}",
            ),
            alert="RedriveReplayStuck",
        ),
        graph(
            "Messages of Replays that ended within an hour",
            Query(
                f"sum by (outcome) (increase(redrive_replay_messages_total{CHOSEN}[1h]))",
                "{{outcome}}",
            ),
        ),
        graph(
            "Time since the last completed Replay",
            Query(
                f"time() - {_of_policies('redrive_replay_last_success_timestamp_seconds', NAME)}",
                _LEGEND,
            ),
            unit="s",
        ),
    ),
    (
        ("namespace", "label_values(redrive_policy_ready, policy_namespace)"),
        (
            "policy",
            'label_values(redrive_policy_ready{policy_namespace=~"$namespace"}, policy)',
        ),
    ),
)

OPERATOR = Dashboard(
    "redrive-operator",
    "redrive: operator",
    (
        stat("Leaders", "sum(redrive_lease_held)", "RedriveNoLeader", warn_from=None),
        stat(
            "Changes of the leader within a day",
            "max(increase(redrive_lease_transitions_total[1d]))",
            warn_from=10,
        ),
        stat(
            "Unexpected errors within an hour",
            'sum(increase(redrive_reconciles_total{result="error"}[1h]))',
            "RedriveReconcileErrors",
        ),
        stat(
            "Brokers that do not answer",
            "sum(max by (connection_namespace, connection) (redrive_breaker_open))",
            "RedriveBrokerUnreachable",
        ),
        graph(
            "Policies by readiness",
            Query(
                'sum by (reason) (redrive_objects{kind="RetryPolicy", condition="Ready"})',
                "{{reason}}",
            ),
        ),
        graph(
            "Replays by reason",
            Query(
                'sum by (reason) (redrive_objects{kind="Replay", condition="Ready"})', "{{reason}}"
            ),
        ),
        graph(
            "Replays by phase",
            Query(f"sum by (phase) (max by ({NAME}, phase) (redrive_replays))", "{{phase}}"),
        ),
        graph(
            "Reconciles",
            Query(_rate("redrive_reconciles_total", "kind, result"), "{{kind}} {{result}}"),
            unit="ops",
            alert="RedriveReconcileErrors",
        ),
        graph(
            "Duration of reconciles, 99 %",
            Query(_quantile("redrive_reconcile_duration_seconds", "kind"), "{{kind}}"),
            unit="s",
        ),
        graph(
            "Objects in the queue",
            Query("sum by (kind) (redrive_reconcile_queue_depth)", "{{kind}}"),
        ),
        graph(
            "Time in the queue, 99 %",
            Query(_quantile("redrive_reconcile_queue_duration_seconds", "kind"), "{{kind}}"),
            unit="s",
        ),
        graph(
            "Delay of the event loop, 99 %",
            Query(_quantile("redrive_event_loop_delay_seconds"), "delay"),
            unit="s",
        ),
        graph(
            "Calls to brokers",
            Query(_rate("redrive_admin_calls_total", "verb, status"), "{{verb}} {{status}}"),
            unit="ops",
        ),
        graph(
            "Duration of calls to brokers, 99 %",
            Query(_quantile("redrive_admin_call_duration_seconds", "verb"), "{{verb}}"),
            unit="s",
        ),
        graph(
            "Age of the oldest statistics",
            Query(
                f"time() - min(max by ({POLICY}) (redrive_statistics_timestamp_seconds))", "oldest"
            ),
            unit="s",
            alert="RedriveStatisticsOutdated",
        ),
        graph(
            "Repaired drift",
            Query(_rate("redrive_drift_repairs_total", "kind"), "{{kind}}"),
            unit="ops",
        ),
        graph(
            "Duration of nine of ten Replays",
            Query(
                _quantile("redrive_replay_duration_seconds", "outcome", 0.9).replace(
                    "[$__rate_interval]", "[1d]"
                ),
                "{{outcome}}",
            ),
            unit="s",
        ),
        graph("Versions", Query("count by (version) (redrive_build_info)", "{{version}}")),
    ),
)
DASHBOARDS = (ON_CALL, OPERATOR)
FILES: Mapping[Path, Callable[[], str]] = {
    FOLDER / f"{dashboard.name}.json": dashboard.render for dashboard in DASHBOARDS
}


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


def _placed(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """Return the panels in rows, from left to right."""
    placed, x, y, height = [], 0, 0, 0
    for number, panel in enumerate(panels):
        if x + panel.width > _WIDTH or (height and panel.height != height):
            x, y = 0, y + height
        place = {"x": x, "y": y, "w": panel.width, "h": panel.height}
        placed.append(_panel(number + 1, panel, place))
        x, height = x + panel.width, panel.height
    return placed


def _panel(number: int, panel: Panel, place: Mapping[str, int]) -> dict[str, Any]:
    parts = {"table": _table, "stat": _stat, "timeseries": _graph}[panel.kind](panel)
    targets = [
        {
            "refId": reference,
            "datasource": _SOURCE,
            "expr": query.query,
            "legendFormat": query.legend,
            "instant": panel.kind != "timeseries",
            "range": panel.kind == "timeseries",
            "format": "table" if panel.kind == "table" else "time_series",
        }
        for reference, query in zip("ABCDEFGHIJ", panel.queries, strict=False)
    ]
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "datasource": _SOURCE,
        "gridPos": place,
        "links": [_link(panel.alert)] if panel.alert else [],
        "targets": targets,
        **parts,
    }


def _link(alert: str) -> dict[str, Any]:
    return {"title": f"Runbook {alert}", "url": f"{RUNBOOKS}/{alert}.md", "targetBlank": True}


def _graph(panel: Panel) -> dict[str, Any]:
    defaults = {"unit": panel.unit, "min": 0, "links": [_link(panel.alert)] if panel.alert else []}
    return {
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
    }


def _stat(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": _GREEN, "value": None}]
    if panel.warn_from is not None:
        steps.append({"color": _RED, "value": panel.warn_from})
    defaults = {
        "unit": panel.unit,
        "noValue": "0",
        "decimals": 0,
        "thresholds": {"mode": "absolute", "steps": steps},
        "links": [_link(panel.alert)] if panel.alert else [],
    }
    return {
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "none" if panel.warn_from is None else "background",
            "graphMode": "none",
        },
    }


def _table(panel: Panel) -> dict[str, Any]:
    """Return a table: one row for all series with the same labels, one column for each query."""
    single = len(panel.queries) == 1
    overrides = [
        _column(f"Value #{reference}" if not single else "Value", query)
        for reference, query in zip("ABCDEFGHIJ", panel.queries, strict=False)
    ]
    of_policy = {
        "title": "Show this policy alone",
        "url": "/d/redrive-on-call?var-namespace=${__data.fields.policy_namespace}"
        "&var-policy=${__data.fields.policy}",
    }
    overrides += [
        _override("policy", displayName="Policy", links=[of_policy]),
        _override("policy_namespace", displayName="Namespace"),
        _override("replay", displayName="Replay"),
        _override(
            "type",
            displayName="Warning",
            links=[
                {
                    "title": "Meaning of ${__value.text}",
                    "url": page("docs/reference/warnings.md"),
                    "targetBlank": True,
                }
            ],
        ),
    ]
    return {
        "fieldConfig": {"defaults": {"noValue": "-"}, "overrides": overrides},
        "options": {"showHeader": True, "cellHeight": "sm"},
        "transformations": [
            {"id": "merge", "options": {}},
            {"id": "organize", "options": {"excludeByName": {"Time": True}}},
        ],
    }


def _column(name: str, query: Query) -> dict[str, Any]:
    links = [_link(query.alert)] if query.alert else []
    return _override(name, displayName=query.legend, unit=query.unit, links=links)


def _override(name: str, **properties: object) -> dict[str, Any]:
    return {
        "matcher": {"id": "byName", "options": name},
        "properties": [{"id": key, "value": value} for key, value in properties.items()],
    }
