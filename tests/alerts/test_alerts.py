"""Alerts and dashboards, evaluated by Prometheus, and the page of each alert."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import yaml

import redrive
from redrive.provision.health_checks import CHECKS as HEALTH_CHECKS
from release import CHART, dashboard, page
from release.dashboard import DASHBOARDS, Dashboard
from sandbox import builds, chart, installation
from sandbox.errors import SandboxError
from tests.support.documented import CONSUMER_METRICS, METRICS, PROBES, blocks

ROOT = Path(__file__).resolve().parents[2]
RULES = CHART / "alerts.yaml"
TESTS = Path(__file__).with_name("alerts.yaml")
CHECKS = "promql_expr_test"
ALERTS: list[dict[str, Any]] = [
    rule
    for group in yaml.load(RULES.read_text("utf-8"), yaml.CSafeLoader)["groups"]
    for rule in group["rules"]
]
LABELS = (
    '{policy="orders", policy_namespace="shop", source_topic="persistent://shop/prod/orders", '
    'subscription="fulfilment"}'
)
"""The policy in the series of `record`."""
PANEL_QUERIES = [
    (query.query, query.legend)
    for board in DASHBOARDS
    for panel in board.panels
    for query in panel.queries
]
"""Each query of a dashboard, with its legend."""
HEADINGS = ["Meaning", "Diagnosis", "Mitigation"]


def promtool(*arguments: str | Path, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [builds.promtool() / "promtool", *arguments],
        input=text, check=False, text=True, capture_output=True,
    )  # fmt: skip


def cases(alerts: Collection[str]) -> str:
    """Return the tests of *alerts* alone, for a file of rules beside them."""
    tests: dict[str, Any] = yaml.load(TESTS.read_text("utf-8"), yaml.CSafeLoader)
    of_alerts = [
        case
        for case in tests["tests"]
        if any(f'"{name}"' in check["expr"] for name in alerts for check in case[CHECKS])
    ]
    return yaml.safe_dump(tests | {"rule_files": ["alerts.yaml"], "tests": of_alerts})


def test_every_alert_fires_when_it_should_and_only_then() -> None:
    ran = promtool("test", "rules", TESTS)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def installed(**values: Any) -> dict[str, Any]:  # noqa: ANN401  values of a chart
    """Return the groups of rules that the chart installs."""
    rendered = chart.render({"prometheusRule": {"enabled": True, **values}})
    (rule,) = (body for body in rendered if body["kind"] == "PrometheusRule")
    spec: dict[str, Any] = rule["spec"]
    return spec


def test_installed_alerts_pass_the_same_tests(tmp_path: Path) -> None:
    """Alerts that the chart does not change have passed them already."""
    rules = installed()
    (group,) = rules["groups"]
    changed = set()
    for rule, original in zip(group["rules"], ALERTS, strict=True):
        if rule["labels"]["namespace"] == installation.NAMESPACE:  # unknown before an installation
            del rule["labels"]["namespace"]
        texts = {name: original["annotations"][name] for name in ("summary", "description")}
        runbook = {"runbook_url": rule["annotations"]["runbook_url"]}
        if rule != original | {"annotations": texts | runbook}:
            changed.add(rule["alert"])
    assert changed == {"RedriveNoLeader"}
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(rules), "utf-8")
    (tmp_path / "tests.yaml").write_text(cases(changed), "utf-8")
    ran = promtool("test", "rules", tmp_path / "tests.yaml")
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_leader_of_another_installation_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(installed()), "utf-8")
    series = [
        {"series": f'redrive_lease_held{{namespace="{namespace}", pod="{pod}"}}', "values": values}
        for namespace, pod, values in (
            ("redrive-system", "redrive-a", "0x60"),
            ("redrive-system", "other-a", "1x60"),
            ("other", "redrive-a", "1x60"),
        )
    ]
    firing = 'ALERTS{alertname="RedriveNoLeader", alertstate="firing"}'
    check = {"expr": f"count({firing})", "eval_time": "30m"}
    samples = [{"labels": "{}", "value": 1}]
    test = {"input_series": series, CHECKS: [check | {"exp_samples": samples}]}
    cases = {"rule_files": ["alerts.yaml"], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(cases), "utf-8")
    ran = promtool("test", "rules", tmp_path / "tests.yaml")
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_installed_alerts_have_runbooks_and_labels_to_route_by() -> None:
    for base, values in (
        (page("docs/runbooks"), {}),
        ("https://wiki.test/redrive", {"runbookURL": "https://wiki.test/redrive/"}),
    ):
        (group,) = installed(alertLabels={"team": "messaging"}, **values)["groups"]
        assert [rule["alert"] for rule in group["rules"]] == [alert["alert"] for alert in ALERTS]
        for rule in group["rules"]:
            assert rule["annotations"]["runbook_url"] == f"{base}/{rule['alert']}.md"
            assert "runbook" not in rule["annotations"]
            assert rule["labels"]["team"] == "messaging"
            by_object = re.search(r"\b(policy|connection)_namespace\b", rule["expr"])
            namespace = rule["labels"]["namespace"]
            assert (namespace == installation.NAMESPACE) is not bool(by_object)


def test_values_change_and_disable_single_alerts() -> None:
    changes = {
        "RedriveRetryStorm": {"threshold": 0.8, "for": "30m", "severity": "info"},
        "RedriveDeadLettersForgotten": {"threshold": 86400},
        "RedriveConsumersPaused": {"enabled": False},
    }
    (group,) = installed(alerts=changes)["groups"]
    rules = {rule["alert"]: rule for rule in group["rules"]}
    storm = rules["RedriveRetryStorm"]
    assert "[1h])) > 0.8\nand" in storm["expr"].replace(" and", "\nand")
    assert "> 100" in storm["expr"]
    assert (storm["for"], storm["labels"]["severity"]) == ("30m", "info")
    assert rules["RedriveDeadLettersForgotten"]["expr"].endswith(" > 86400")
    assert rules.keys() == {alert["alert"] for alert in ALERTS} - {"RedriveConsumersPaused"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RedriveNoLeader": {"threshold": 2}}, "compares with no number; got 2"),
        ({"RedriveNoLeaders": {}}, "no such alert; got RedriveNoLeaders; use one of Redrive"),
        ({"RedriveNoLeader": {"expr": "1"}}, "properties 'expr' not allowed"),
    ],
)
def test_change_of_an_alert_without_effect_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SandboxError, match=message):
        installed(alerts=changes)


def test_every_alert_is_tested_firing_and_silent() -> None:
    tested: dict[str, set[bool]] = {}
    for case in yaml.load(TESTS.read_text("utf-8"), yaml.CSafeLoader)["tests"]:
        for check in case[CHECKS]:
            (name,) = re.findall('alertname="(\\w+)"', check["expr"])
            tested.setdefault(name, set()).add(bool(check["exp_samples"]))
    assert tested == {alert["alert"]: {True, False} for alert in ALERTS}


def test_a_rule_that_never_fires_fails_its_test(tmp_path: Path) -> None:
    broken = RULES.read_text("utf-8").replace("redrive_policy_ready) == 0", "redrive_policy) == 0")
    (tmp_path / "alerts.yaml").write_text(broken, "utf-8")
    (tmp_path / "tests.yaml").write_text(cases({"RedrivePolicyNotReady"}), "utf-8")
    ran = promtool("test", "rules", tmp_path / "tests.yaml")
    assert ran.returncode != 0
    assert "RedrivePolicyNotReady" in ran.stdout + ran.stderr


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_every_alert_has_a_page_that_says_what_to_do(alert: dict[str, Any]) -> None:
    runbook = ROOT / alert["annotations"]["runbook"]
    assert runbook == ROOT / "docs" / "runbooks" / f"{alert['alert']}.md"
    text = runbook.read_text("utf-8")
    assert text.startswith(f"# {alert['alert']}\n")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == HEADINGS
    index = (ROOT / "docs" / "runbooks" / "index.md").read_text("utf-8")
    assert f"({runbook.name})" in index


def test_every_warning_about_topics_has_an_alert() -> None:
    pattern = re.compile(r'redrive_policy_condition{type="(\w+)"}')
    alerted = {reason for alert in ALERTS for reason in pattern.findall(alert["expr"])}
    by_metric = {"RetryStorm"}
    assert alerted == HEALTH_CHECKS.keys() - by_metric


def test_no_page_is_for_an_alert_that_is_gone() -> None:
    pages = {file.stem for file in (ROOT / "docs" / "runbooks").glob("*.md")} - {"index"}
    assert pages == {alert["alert"] for alert in ALERTS}


def metric_names(query: str) -> set[str]:
    return {name.removesuffix("_bucket") for name in re.findall(r"\bredrive_\w+", query)}


def documented() -> set[str]:
    pages = [ROOT / "docs" / "reference" / f"{name}.md" for name in ("metrics", "consumer-metrics")]
    text = "".join(file.read_text("utf-8") for file in pages)
    return set(re.findall(r"^\| `(redrive_\w+)` \|", text, re.MULTILINE))


def test_alerts_and_panels_ask_for_metrics_that_exist() -> None:
    queries = [alert["expr"] for alert in ALERTS] + [query for query, _ in PANEL_QUERIES]
    asked = set().union(*map(metric_names, queries))
    assert asked <= documented()


@pytest.mark.parametrize("board", dashboard.DASHBOARDS, ids=lambda board: board.name)
def test_dashboard_is_generated_from_its_panels(board: Dashboard) -> None:
    file = dashboard.FOLDER / f"{board.name}.json"
    assert file.read_text("utf-8") == board.render()
    assert {file.stem for file in dashboard.FOLDER.iterdir()} == {b.name for b in DASHBOARDS}
    panels = json.loads(board.render())["panels"]
    assert [target["expr"] for panel in panels for target in panel["targets"]] == board.queries
    places = [panel["gridPos"] for panel in panels]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)), "panels overlap"
    assert max(x for x, _ in cells) < 24


def test_columns_of_tables_are_those_of_their_queries() -> None:
    """Grafana calls the values of several queries `Value #A` and so on, and of one `Value`."""
    for board in dashboard.DASHBOARDS:
        for panel in json.loads(board.render())["panels"]:
            if panel["type"] != "table":
                continue
            references = [target["refId"] for target in panel["targets"]]
            columns = {o["matcher"]["options"] for o in panel["fieldConfig"]["overrides"]}
            values = {f"Value #{reference}" for reference in references}
            assert columns >= (values if len(references) > 1 else {"Value"})


def test_installed_dashboards_link_to_pages_of_alerts() -> None:
    alerts = {alert["alert"] for alert in ALERTS}
    for values, base in (
        ({}, page("docs/runbooks")),
        ({"runbookURL": "https://wiki.test/redrive/"}, "https://wiki.test/redrive"),
    ):
        rendered = chart.render({"prometheusRule": values, "dashboard": {"enabled": True}})
        named = {(body["kind"], body["metadata"]["name"]): body for body in rendered}
        boards = named["ConfigMap", "redrive.redrive-system.dashboards"]["data"]
        assert boards.keys() == {f"{board.name}.json" for board in DASHBOARDS}
        linked = set()
        for text in boards.values():
            json.loads(text)
            linked |= set(re.findall(rf'"{re.escape(base)}/(\w+)\.md"', text))
            assert text.count("docs/runbooks") == text.count(f"{page('docs/runbooks')}/") * (
                not values
            )
        assert linked <= alerts
        assert len(linked) > 10


@functools.cache
def record() -> dict[str, Any]:
    """Return the samples of an operator and a consumer after one of each operation."""
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("record.py"))],
        env={"PYTHONPATH": f"{Path(redrive.__file__).parents[1]}:{ROOT}"},
        check=True, text=True, capture_output=True,
    )  # fmt: skip
    recorded: dict[str, Any] = json.loads(ran.stdout)
    return recorded


def recorded() -> dict[str, float]:
    """Return these samples, by their series."""
    samples: dict[str, float] = record()["series"]
    return samples


def test_queries_of_pages_are_valid(tmp_path: Path) -> None:
    queries = [b.text for b in blocks(CONSUMER_METRICS, METRICS, PROBES, language="promql")]
    assert len(queries) == 3
    assert set().union(*map(metric_names, queries)) <= documented()
    rules = [{"record": f"page:{n}", "expr": query} for n, query in enumerate(queries)]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "pages", "rules": rules}]}), "utf-8")
    ran = promtool("check", "rules", file)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_metrics_follow_the_conventions_of_prometheus() -> None:
    ran = promtool("check", "metrics", text=record()["exposition"])
    assert (ran.returncode, ran.stdout + ran.stderr) == (0, "")


def test_every_metric_of_the_operator_is_documented() -> None:
    names = {series.partition("{")[0] for series in recorded()}
    ours = {name for name in names if not name.startswith("redrive_consumer_")}
    families = {re.sub("_(bucket|count|sum)$", "", name) for name in ours}
    assert len(families) > 30
    assert families <= documented()


def assert_holds(checks: list[dict[str, Any]], folder: Path) -> None:
    """Have Prometheus evaluate *checks* over the recorded series, which grow every minute."""
    series = [{"series": name, "values": f"{value:g}+1x60"} for name, value in recorded().items()]
    test = {"input_series": series, "interval": "1m", CHECKS: checks}
    file = folder / "checks.yaml"
    file.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [test]}), "utf-8")
    ran = promtool("test", "rules", file)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_query_shows_something_of_recorded_metrics(tmp_path: Path) -> None:
    checks = [
        {
            "expr": f"count({chosen_all(query)}) > bool 0",
            "eval_time": "30m",
            "exp_samples": [{"labels": "{}", "value": 1}],
        }
        for query, _ in PANEL_QUERIES
    ]
    assert_holds(checks, tmp_path)


def test_legends_name_labels_of_their_query(tmp_path: Path) -> None:
    """A label that the query does not keep would be an empty legend."""
    checks = [
        {
            "expr": f"group by (x) (label_replace({chosen_all(query)}, 'x', 'y', '{label}', '.+'))",
            "eval_time": "30m",
            "exp_samples": [{"labels": '{x="y"}', "value": 1}],
        }
        for query, legend in PANEL_QUERIES
        for label in re.findall(r"{{(\w+)}}", legend)
    ]
    assert len(checks) > 20
    assert_holds(checks, tmp_path)


def test_series_of_consumers_and_of_the_operator_join(tmp_path: Path) -> None:
    """Both have the same labels of the policy; otherwise Prometheus joins no pair."""
    by_side: dict[bool, set[str]] = {True: set(), False: set()}
    for series in recorded():
        if 'source_topic="' in series:
            name = series.partition("{")[0]
            by_side[name.startswith("redrive_consumer_")].add(name)
    ours, theirs = (sorted(by_side[side]) for side in (True, False))
    assert "redrive_consumer_failed_attempts_total" in ours
    assert {"redrive_policy_ready", "redrive_backlog_messages"} <= set(theirs)
    whose = "policy, policy_namespace, source_topic, subscription"
    checks = [
        {
            "expr": f"sum by ({whose}) ({one}) * 0 + on ({whose}) sum by ({whose}) ({other}) ^ 0",
            "eval_time": "30m",
            "exp_samples": [{"labels": LABELS, "value": 1}],
        }
        for one in ours
        for other in theirs
    ]
    assert_holds(checks, tmp_path)


def chosen_all(query: str) -> str:
    """Return *query* with the dashboard's variables set as by Grafana for *All*."""
    filled = query.replace("$namespace", ".*").replace("$policy", ".*")
    return filled.replace("$__rate_interval", "5m")
