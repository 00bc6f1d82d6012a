from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

import redrive
from redrive.admin.granting import Batcher
from redrive.errors import Requeue
from redrive.kube import logs
from redrive.kube.controller import Controller
from redrive.kube.resources import Key

logger = logging.getLogger("redrive.test")


def written(message: str, *arguments: object, fault: Exception | None = None) -> dict[str, str]:
    """What the formatter makes of a record, here and now."""
    exc_info = None if fault is None else (type(fault), fault, None)
    record = logger.makeRecord("redrive.test", logging.INFO, "", 0, message, arguments, exc_info)
    line = logs.JsonFormatter().format(record)
    assert "\n" not in line
    found: dict[str, str] = json.loads(line)
    return found


def test_a_line_is_one_object_whatever_it_says() -> None:
    line = written("%s \n\u2028 %d", '"ü', 7, fault=ValueError("two\nlines"))
    assert line["message"] == '"ü \n\u2028 7'
    assert (line["level"], line["logger"]) == ("INFO", "redrive.test")
    assert line["time"].endswith("+00:00")
    assert "ValueError: two\nlines" in line["exception"]
    assert not {"kind", "namespace", "name", "uid"} & line.keys()


async def test_what_a_controller_does_is_about_its_object_and_gathered_calls_are_about_none() -> (
    None
):
    lines: dict[str, dict[str, str]] = {}
    ended = asyncio.Event()

    async def call(_: object) -> None:
        lines["gathered"] = written("call")

    batcher: Batcher[Key, None] = Batcher(call)

    async def reconcile(key: Key) -> Requeue:
        lines["before"] = written("look")
        logs.identify({"metadata": {"uid": "4711"}})
        lines["after"] = written("look")
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
    assert "kind" not in written("another task")


def plain(message: str, *arguments: object, fault: BaseException | None = None) -> str:
    exc_info = None if fault is None else (type(fault), fault, fault.__traceback__)
    record = logger.makeRecord("redrive.test", logging.INFO, "", 0, message, arguments, exc_info)
    return logs.TextFormatter().format(record)


def test_a_line_of_text_holds_what_users_wrote_and_no_more_than_that() -> None:
    forged = "why\n2026-11-22T10:00:00+0000 INFO    forged\r\x1b[2J\x9b1m\u2028\u202e ü\t"
    line = plain("Replay shop/it: %s", forged)
    assert line.isprintable()
    assert line.endswith(
        r"INFO    Replay shop/it: why\n2026-11-22T10:00:00+0000 INFO    forged"
        r"\r\x1b[2J\x9b1m\u2028\u202e ü\t"
    )


def test_a_traceback_has_its_lines_and_none_of_them_passes_for_an_entry() -> None:
    def fail() -> None:
        raise ValueError("two\n2026-11-22T10:00:00+0000 INFO    forged\x1b[2J")

    try:
        fail()
    except ValueError as error:
        first, *rest = plain("failed\nhere", fault=error).split("\n")
    assert first.endswith(r"failed\nhere")
    assert rest[0] == "  Traceback (most recent call last):"
    assert any("in fail" in line for line in rest)
    assert rest[-2:] == ["  ValueError: two", r"  2026-11-22T10:00:00+0000 INFO    forged\x1b[2J"]
    assert all(line.startswith("  ") and line.isprintable() for line in rest)


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
