"""`redrive replay` at a terminal, with a real operator, Spark and broker."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from redrive.cli.cluster import Cluster
from redrive.cli.frame import ClusterFlags
from redrive.kube.resources import REPLAYS
from sandbox.pulsar import SUPERUSER
from tests.support.commands import SCHEMAS, Terminal, check
from tests.support.replay_shop import SECONDS, Shop, shop
from tests.support.topics import drain

__all__ = ["shop"]


def at_terminal(shop: Shop, *arguments: str) -> Terminal:
    return Terminal(shop.sandbox.cluster.kubeconfig, *arguments, "-n", shop.name)


def audited(shop: Shop, code: int) -> dict[str, int]:
    """Return the numbers of an audit by their findings, without those that a broker may change."""
    audit = at_terminal(shop, "audit", "orders", "-o", "json")
    assert audit.end() == code
    document = json.loads(audit.text[audit.text.index("{") :])
    check(document, SCHEMAS["$defs"]["AuditFindingList"])
    numbers = {item["finding"]: item["count"] for item in document["items"]}
    assert len(document["doubledExamples"]) == numbers["doubled"]
    return {name: number for name, number in numbers.items() if name != "returned"}


def copy_replayed(shop: Shop) -> None:
    """Store a replayed message once more, as a raw client may."""
    topic = shop.policy.retry_topic
    client = shop.client()
    (first, *_) = drain(shop.sandbox.pulsar, client, topic, shop.policy.subscription)
    producer = client.create_producer(str(topic), batching_enabled=False)
    producer.send(first.data(), properties=first.properties())


@pytest.mark.timeout(5 * SECONDS)
def test_causes_are_counted_in_the_cluster(shop: Shop) -> None:
    shop.declare()
    empty = at_terminal(shop, "causes", "orders")
    assert empty.end() == 0
    assert "no dead letters: none came, or all are acknowledged" in empty.text
    shop.bury(3, "WarehouseDown")
    shop.bury(2, "JSONDecodeError")
    causes = at_terminal(shop, "causes", "orders")
    assert causes.end() == 0
    rows = [row.split() for row in causes.text.splitlines()]
    titles = ["CAUSE", "FINGERPRINT", "FIRST", "LAST", "REPLAYED"]
    assert titles in [row[1:] for row in rows]  # N follows the sequence that clears progress
    first, second = (row for row in rows if row[1:2] in (["WarehouseDown"], ["JSONDecodeError"]))
    assert (first[:2], first[-1]) == (["3", "WarehouseDown"], "0")
    assert second[:2] == ["2", "JSONDecodeError"]
    assert "read 5 dead letters; 5 are selected" in causes.text
    selected = at_terminal(shop, "causes", "orders", "--cause", "JSONDecodeError", "-o", "json")
    assert selected.end() == 0
    document = json.loads(selected.text[selected.text.index("{") :])
    check(document, SCHEMAS["$defs"]["PlannedCauseList"])
    assert (document["scanned"], document["matched"]) == (5, 2)
    (item,) = document["items"]
    assert (item["cause"], item["messages"], item["replayed"]) == ("JSONDecodeError", 2, 0)
    assert item["firstTime"] <= item["lastTime"]
    assert shop.replayed() == []


@pytest.mark.timeout(5 * SECONDS)
def test_waiting_causes_are_read_by_an_inspection(shop: Shop) -> None:
    shop.declare_inspection()
    for cause in ("Throttled", "Throttled", "LockTimeout"):
        shop.bury(1, cause, shop.policy.retry_topic)
    command = ("causes", "orders", "--waiting")
    refused = at_terminal(shop, *command)
    assert refused.end() == 1
    assert "RetriesNotInspected" in refused.text
    shop.declare_inspection(retryTopics="Allowed")

    causes = at_terminal(shop, *command)

    assert causes.end() == 0
    rows = [row.split()[:2] for row in causes.text.splitlines()]
    assert rows.index(["2", "Throttled"]) < rows.index(["1", "LockTimeout"])
    assert "read 3 messages that wait for a retry; 3 are selected" in causes.text
    selected = at_terminal(shop, *command, "--cause", "LockTimeout", "-o", "json")
    assert selected.end() == 0
    shown = json.loads(selected.text[selected.text.index("{") :])
    check(shown, SCHEMAS["$defs"]["InspectedCauseList"])
    assert (shown["messages"], shown["matched"], len(shown["items"])) == (3, 1, 1)
    peek = at_terminal(shop, "peek", "orders", "--waiting", "--cause", "LockTimeout")
    assert peek.end() == 0
    assert "cause      LockTimeout" in peek.text
    assert "read 3 messages that wait for a retry; 1 are selected" in peek.text
    names = shop.kubectl("get", "inspections", "-o", "name").split()
    assert len(names) == 3  # the refused one is deleted
    author = "{.items[*].metadata.annotations.redrive\\.io/requested-by}"
    assert shop.kubectl("get", "inspections", "-o", f"jsonpath={author}") == "admin admin admin"


@pytest.mark.timeout(5 * SECONDS)
def test_confirmed_replay_moves_what_its_review_showed(shop: Shop, tmp_path: Path) -> None:
    shop.declare()
    shop.bury(3, "WarehouseDown")
    shop.bury(2, "JSONDecodeError")
    broker, token = shop.sandbox.pulsar, shop.sandbox.pulsar.token_file(SUPERUSER)
    urls = ["--service-url", broker.service_url, "--admin-url", broker.admin_url]
    direct = ["--direct", *urls, "--token-file", str(token)]
    causes = at_terminal(shop, "causes", "orders", *direct)
    assert causes.end() == 0
    assert ["3", "WarehouseDown"] in [row.split()[:2] for row in causes.text.splitlines()]
    assert "Look at one: kubectl redrive peek orders --cause WarehouseDown" in causes.text
    terminal = at_terminal(
        shop, "replay", "orders", "--cause", "WarehouseDown", "--reason", "fixed", "--ticket", "T-1"
    )
    terminal.read_until("[y/N]")
    assert "to move       3   3 WarehouseDown" in terminal.text
    assert "not selected  2" in terminal.text
    assert "Move these 3 messages?" in terminal.text
    shop.bury(4, "WarehouseDown")  # after the plan
    terminal.type("y\n")
    terminal.read_until("moved    3 of 3")
    terminal.interrupt()
    assert terminal.end() == 130
    (name,) = set(re.findall(r"kubectl redrive follow (\S+) -n", terminal.text))
    assert f"replay.redrive.io/{name} created by admin, in review" in terminal.text
    assert f"Cancel it: kubectl redrive cancel {name} -n {shop.name}" in terminal.text
    assert shop.replayed() == ["WarehouseDown"] * 3

    client = Cluster(ClusterFlags(kubeconfig=str(shop.sandbox.cluster.kubeconfig)))
    (replay,) = client.list(REPLAYS, shop.name)
    assert replay["metadata"]["name"] == name
    assert replay["spec"]["select"] == {"causes": ["WarehouseDown"]}
    assert replay["spec"].keys().isdisjoint({"deadline", "ttlAfterFinished"})
    assert replay["metadata"]["annotations"]["redrive.io/requested-by"] == "admin"
    ended = at_terminal(shop, "cancel", name)  # it follows the messages, without a consumer
    assert ended.end() == 0
    follow = at_terminal(shop, "follow", name)
    assert follow.end() == 0
    assert "Complete: 3 moved, 0 refused" in follow.text
    history = at_terminal(shop, "history", "orders")
    assert history.end() == 0
    (row,) = (line for line in history.text.splitlines() if line.startswith(name))
    assert row.split()[3:5] == ["3", "0"]
    assert {"Run", "admin", "T-1", "fixed"} < set(row.split())
    assert audited(shop, 0) == dict.fromkeys(("doubled", "unrecorded", "missing", "open"), 0)
    copy_replayed(shop)
    assert audited(shop, 3)["doubled"] == 1
    page = tmp_path / "report.html"
    written = at_terminal(shop, "report", "orders", "--to", str(page), *direct)
    assert written.end() == 0
    assert f">{name}</td>" in page.read_text("utf-8")
