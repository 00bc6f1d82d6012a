"""Metrics of conditions, liveness and log lines."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import RequestInfo
from multidict import CIMultiDict, CIMultiDictProxy
from prometheus_client import REGISTRY
from yarl import URL

import redrive
from redrive.admin.granting import Batcher
from redrive.errors import Requeue
from redrive.kube import logs, resources
from redrive.kube.cache import Cache
from redrive.kube.controller import Controller
from redrive.kube.observability import (
    BEAT_SECONDS,
    EVENT_LOOP,
    LATE_SECONDS,
    STALL_SECONDS,
    Liveness,
    counting_objects,
)
from redrive.kube.resources import Key
from redrive.reasons import Reason

POLICY = {
    "policy": "orders",
    "policy_namespace": "shop",
    "source_topic": "persistent://shop/prod/orders",
    "subscription": "fulfilment",
}
OTHER = {"type": "Reconciling", "status": "True", "reason": Reason.PROGRESSING}


def policy(**more: Any) -> dict[str, Any]:  # noqa: ANN401  of a manifest
    spec = {"topic": POLICY["source_topic"], "subscription": POLICY["subscription"]}
    metadata = {"name": "orders", "namespace": "shop", "uid": "u", "resourceVersion": "1"}
    return {"metadata": metadata, "spec": spec, **more}


def ready_condition(status: str) -> dict[str, str]:
    return {"type": "Ready", "status": status, "reason": "InvalidSpec"}


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ({"status": {"conditions": [ready_condition("True"), OTHER]}}, 1),
        ({"status": {"conditions": [OTHER, ready_condition("False")]}}, 0),
        ({"status": {"conditions": [ready_condition("Unknown")]}}, 0),
        ({"status": {"conditions": [OTHER]}}, 0),
        ({"status": {}}, 0),
        ({}, 0),
    ],
)
def test_policy_metric_shows_ready_or_not(more: dict[str, Any], shown: float) -> None:
    policies = Cache([policy(**more)])
    with counting_objects({resources.POLICIES: policies}):
        assert REGISTRY.get_sample_value("redrive_policy_ready", POLICY) == shown
        policies.on_event({"type": "DELETED", "object": policy(**more)})
        assert REGISTRY.get_sample_value("redrive_policy_ready", POLICY) is None


def test_dead_letters_of_rocketmq_are_shown() -> None:
    body = policy(status={"deadLetters": 7})
    body["spec"]["group"] = body["spec"].pop("subscription")
    policies = Cache([body])
    with counting_objects({resources.ROCKETMQ_POLICIES: policies}):
        assert REGISTRY.get_sample_value("redrive_rocketmq_dead_letters", POLICY) == 7
        policies.on_event({"type": "DELETED", "object": body})
        assert REGISTRY.get_sample_value("redrive_rocketmq_dead_letters", POLICY) is None


def test_policy_conditions_that_warn_are_shown_while_there() -> None:
    def shown() -> set[str]:
        return {
            sample.labels["type"]
            for family in REGISTRY.collect()
            for sample in family.samples
            if sample.name == "redrive_policy_condition"
            and sample.value == 1
            and sample.labels.keys() == {"policy", "policy_namespace", "type"}
        }

    types = ("InvalidSpec", "Reconciling", "Made up", "Up made")
    conditions = [{"type": kind, "status": "True", "reason": kind} for kind in types]
    conditions += [ready_condition("True"), {"type": "NameCollision", "status": "False"}]
    policies = Cache([policy(status={"conditions": conditions})])
    with counting_objects({resources.POLICIES: policies}):
        assert shown() == {"InvalidSpec", "Other"}
    ready = policy(status={"conditions": [ready_condition("True")]})
    with counting_objects({resources.POLICIES: Cache([ready])}):
        assert shown() == set()


def test_objects_are_counted_by_condition() -> None:
    def count(**labels: str) -> float | None:
        return REGISTRY.get_sample_value("redrive_objects", {"kind": "RetryPolicy", **labels})

    bodies = [policy(status={"conditions": [ready_condition("True"), OTHER]}), policy()]
    bodies[1]["metadata"] = {"name": "another", "namespace": "shop"}
    with counting_objects({resources.POLICIES: Cache(bodies)}):
        assert count(condition="Ready", status="True", reason="InvalidSpec") == 1
        assert count(condition="Reconciling", status="True", reason="Progressing") == 1
        assert count(condition="Ready", status="False", reason="InvalidSpec") is None


def test_unknown_conditions_are_counted_as_other() -> None:
    """Whoever may write a status must not make a time series of each text that it holds."""
    forged: list[dict[str, Any]] = [
        {"type": f"type-{n}", "status": "True", "reason": f"reason-{n}"} for n in range(5)
    ]
    forged += [{"type": "Ready", "status": "True", "reason": "Why"}, {}, {"type": "Ready"}]
    bodies = [policy(status={"conditions": forged})]
    with counting_objects({resources.POLICIES: Cache(bodies), resources.REPLAYS: Cache()}):
        families = [f for f in REGISTRY.collect() if f.name == "redrive_objects"]
    shown = {
        (s.labels["condition"], s.labels["status"], s.labels["reason"]): s.value
        for s in families[0].samples
    }
    assert shown == {
        ("Other", "True", "Other"): 5,
        ("Ready", "True", "Other"): 1,
        ("Other", "Other", "Other"): 1,
        ("Ready", "Other", "Other"): 1,
    }


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_component_with_signs_of_life_has_not_stalled() -> None:
    clock = Clock()
    health = Liveness(clock)
    for _ in range(5):
        health.beat("watch")
        clock.now += STALL_SECONDS
        assert not health.has_stalled()


def test_silent_component_stalls_and_may_recover() -> None:
    clock = Clock()
    health = Liveness(clock)
    health.beat("watch of a")
    health.beat("watch of b")
    clock.now += STALL_SECONDS
    health.beat("watch of b")
    clock.now += 1
    assert health.silent_for() == {"watch of a": 61, "watch of b": 1}
    assert health.has_stalled()
    health.beat("watch of a")
    assert not health.has_stalled()


async def test_running_event_loop_gives_signs_of_life() -> None:
    clock = Clock()
    health = Liveness(clock)
    async with health.beating():
        await asyncio.sleep(0)
    clock.now += STALL_SECONDS + 1
    assert health.silent_for() == {EVENT_LOOP: 61}
    assert health.has_stalled()


@pytest.mark.usefixtures("virtual_time")
async def test_late_event_loop_is_measured_and_stalls() -> None:
    clock = Clock()
    health = Liveness(clock)
    begin = REGISTRY.get_sample_value("redrive_event_loop_delay_seconds_sum") or 0.0
    async with health.beating():
        for late in (0, LATE_SECONDS + 5, LATE_SECONDS + 5):
            await asyncio.sleep(0)
            clock.now += BEAT_SECONDS + late
            await asyncio.sleep(BEAT_SECONDS)
    end = REGISTRY.get_sample_value("redrive_event_loop_delay_seconds_sum") or 0.0
    assert end - begin == pytest.approx(2 * (LATE_SECONDS + 5))
    assert health.silent_for() == {EVENT_LOOP: 2 * (LATE_SECONDS + 5 + BEAT_SECONDS)}


logger = logging.getLogger("redrive.test")


def json_line(message: str, *arguments: object, fault: Exception | None = None) -> dict[str, str]:
    """Return the fields of a record that is formatted in this context."""
    exc_info = None if fault is None else (type(fault), fault, None)
    record = logger.makeRecord("redrive.test", logging.INFO, "", 0, message, arguments, exc_info)
    line = logs.JsonFormatter().format(record)
    assert "\n" not in line
    fields: dict[str, str] = json.loads(line)
    return fields


def test_json_line_is_one_object() -> None:
    line = json_line("%s \n\u2028 %d", '"ü', 7, fault=ValueError("two\nlines"))
    assert line["message"] == '"ü \n\u2028 7'
    assert (line["level"], line["logger"]) == ("INFO", "redrive.test")
    assert line["time"].endswith("+00:00")
    assert "ValueError: two\nlines" in line["exception"]
    assert not {"kind", "namespace", "name", "uid"} & line.keys()


async def test_log_context_of_reconcile_ends_with_batched_calls() -> None:
    lines: dict[str, dict[str, str]] = {}
    ended = asyncio.Event()

    async def call(_: object) -> None:
        lines["gathered"] = json_line("call")

    batcher: Batcher[Key, None] = Batcher(call)

    async def reconcile(key: Key) -> Requeue:
        lines["before"] = json_line("look")
        logs.identify({"metadata": {"uid": "4711"}})
        lines["after"] = json_line("look")
        await batcher.submit(key)
        ended.set()
        return Requeue.ON_CHANGE

    controller = Controller("RetryPolicy", reconcile)
    controller.enqueue(Key("shop", "orders"))
    await ended.wait()
    await controller.stop()
    identity = {"kind": "RetryPolicy", "namespace": "shop", "name": "orders"}
    assert identity.items() <= lines["before"].items()
    assert "uid" not in lines["before"]
    assert {**identity, "uid": "4711"}.items() <= lines["after"].items()
    assert "kind" not in lines["gathered"]
    assert "kind" not in json_line("another task")


def text_line(message: str, *arguments: object, fault: BaseException | None = None) -> str:
    exc_info = None if fault is None else (type(fault), fault, fault.__traceback__)
    record = logger.makeRecord("redrive.test", logging.INFO, "", 0, message, arguments, exc_info)
    return logs.TextFormatter().format(record)


def test_text_line_escapes_control_characters() -> None:
    forged = "why\n2026-11-22T10:00:00+0000 INFO    forged\r\x1b[2J\x9b1m\u2028\u202e ü\t"
    line = text_line("Replay shop/it: %s", forged)
    assert line.isprintable()
    assert line.endswith(
        r"INFO    Replay shop/it: why\n2026-11-22T10:00:00+0000 INFO    forged"
        r"\r\x1b[2J\x9b1m\u2028\u202e ü\t"
    )


def test_traceback_lines_are_indented_and_escaped() -> None:
    def fail() -> None:
        raise ValueError("two\n2026-11-22T10:00:00+0000 INFO    forged\x1b[2J")

    try:
        fail()
    except ValueError as error:
        first, *rest = text_line("failed\nhere", fault=error).split("\n")
    assert first.endswith(r"failed\nhere")
    assert rest[0] == "  Traceback (most recent call last):"
    assert any("in fail" in line for line in rest)
    assert rest[-2:] == ["  ValueError: two", r"  2026-11-22T10:00:00+0000 INFO    forged\x1b[2J"]
    assert all(line.startswith("  ") and line.isprintable() for line in rest)


def limited(limit: logs.TracebackLimit, fault: Exception) -> str:
    """Return the entry of *fault* with a limit."""
    try:
        raise fault
    except type(fault) as error:
        raised = type(error), error, error.__traceback__
    record = logger.makeRecord("redrive", logging.ERROR, "", 0, "failed: %s", ("x",), raised)
    assert limit.filter(record)
    return logs.TextFormatter().format(record)


def test_repeated_error_of_a_request_hides_its_headers() -> None:
    url, limit = URL("https://10.0.0.1"), logs.TracebackLimit()
    headers = CIMultiDictProxy(CIMultiDict({"Authorization": "Bearer s3cret"}))
    error = aiohttp.ContentTypeError(RequestInfo(url, "GET", headers, url), (), status=200)
    assert "s3cret" not in limited(limit, error)
    assert limited(limit, error).endswith(f"failed: x: ContentTypeError: {error}")
    assert "s3cret" not in str(error)


def test_repeated_traceback_is_one_line_for_a_minute() -> None:
    now = 0.0
    limit = logs.TracebackLimit(lambda: now)

    def entry(number: int) -> str:
        return limited(limit, [KeyError, ValueError][number]("broken"))

    assert "Traceback" in entry(0)
    assert entry(0).endswith("failed: x: KeyError: 'broken'")
    assert "Traceback" in entry(1)
    now = logs.TRACEBACK_SECONDS
    assert "Traceback" in entry(0)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("debug", ["redrive DEBUG", "redrive WARNING", "library WARNING"]),
        ("info", ["redrive WARNING", "library WARNING"]),
        ("error", []),
    ],
)
def test_log_level_leaves_out_less_severe_entries(level: str, expected: list[str]) -> None:
    """Libraries have no debug entries at any level: they would contain Secrets."""
    program = (
        "import logging\n"
        "from redrive.kube import logs\n"
        f"logs.to_stderr('text', {level!r})\n"
        "for name in ('redrive.kube', 'kubernetes.client.rest'):\n"
        "    for entry in (logging.DEBUG, logging.WARNING):\n"
        "        subject = 'redrive' if name.startswith('redrive') else 'library'\n"
        "        logging.getLogger(name).log(entry, subject)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(Path(redrive.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    entries = [line.split() for line in run.stderr.splitlines()]
    assert [f"{subject} {name}" for _, name, subject in entries] == expected
