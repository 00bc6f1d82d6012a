"""Files of records, and the HTML report: complete, escaped and independent."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import re
import signal
import stat
from collections.abc import Sequence
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Self

import pytest
from pyarrow import fs, parquet

from redrive.cli.main import signals_as_exits
from redrive.inspection import export
from redrive.inspection.export import (
    destined_file,
    private_file,
    write_json_lines,
    write_parquet,
)
from redrive.inspection.payloads import KeyHasher, MessageRecord
from redrive.inspection.record import Recorder
from redrive.inspection.report import ReportFacts, render_report
from redrive.inspection.summary import Summary
from redrive.policy.envelope import CAUSE_MESSAGE, CAUSE_TRACE, CONSUMER, REPLAY, REPLAYS
from tests.support.dead_letter_rows import SENT, dead_letter
from tests.support.reasons import raises


@pytest.fixture
def records() -> list[MessageRecord]:
    recorder = Recorder(lambda _: None, hash_key=KeyHasher(b"secret"))
    properties = {"tenant": "acme", CAUSE_TRACE: "at a.b:1"}
    rows = (
        dead_letter(0, "E", key="a", properties=properties),
        dead_letter(1)._replace(publish_time=2**63),
    )
    return list(map(recorder, rows))


def test_parquet_holds_the_same_records_as_json_lines(
    records: list[MessageRecord], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "BATCH_RECORDS", 1)
    lines, table = tmp_path / "a.jsonl", tmp_path / "a.parquet"
    with private_file(lines) as file:
        assert write_json_lines(records, file) == 2
    with private_file(table) as file:
        assert write_parquet(records, file) == 2
    assert [json.loads(line) for line in lines.read_bytes().splitlines()] == records
    rows = parquet.read_table(table).to_pylist()
    assert rows[0]["properties"] == [("tenant", "string(4)")]
    assert (rows[0]["trace"], rows[0]["time"].isoformat()) == (
        ["at a.b:1"],
        "2026-11-26T13:33:20+00:00",
    )
    assert rows[1]["time"] is None
    assert [row["keyHash"] for row in rows] == [record["keyHash"] for record in records]


def test_file_is_private_and_complete_or_absent(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with private_file(target) as file:
        file.write(b"first")
        assert not target.exists()
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    with pytest.raises(ValueError, match="invalid literal"), private_file(target):
        int("x")
    assert target.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [target]
    with raises("NotExported", match="can't be written"), private_file(target / "x"):
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_leaves_no_part_of_a_file(tmp_path: Path, number: signal.Signals) -> None:
    of_pytest = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as ended, signals_as_exits(), private_file(tmp_path / "out"):
            signal.raise_signal(number)
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, of_pytest)
    assert ended.value.code == 128 + number
    assert not list(tmp_path.iterdir())


def test_destined_file_appears_when_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At an object store as on a volume."""
    stores: list[dict[str, object]] = []

    def object_store(**options: object) -> fs.FileSystem:
        stores.append(options)
        return fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())

    monkeypatch.setattr(fs, "S3FileSystem", object_store)
    target = tmp_path / "archive" / "shop" / "orders" / "now.jsonl"
    target.parents[2].mkdir()
    address = "archive/shop/orders/now.jsonl"
    keys = {"access-key-id": "id", "secret-access-key": "secret"}
    of_store = (f"s3://{address}", "http://store:9000", keys)
    for destination in ((f"file://{target}",), of_store):
        with destined_file(*destination) as file:
            file.write(b"first")
            assert not target.exists()
        assert stat.S_IMODE(target.stat().st_mode) == 0o640
        with pytest.raises(ValueError, match="invalid literal"), destined_file(*destination):
            int("x")
        assert list(target.parent.iterdir()) == [target]
        assert target.read_bytes() == b"first"
        target.unlink()
    names = ("access_key", "secret_key", "endpoint_override", "scheme")
    assert [stores[0][name] for name in names] == ["id", "secret", "store:9000", "http"]
    absent = tmp_path / "absent" / "shop" / "orders" / "now.jsonl"
    problem = r"got 'No such file or directory'; check the destination"
    with raises("NotExported", match=problem), destined_file(f"file://{absent}"):
        pass


class FullVolume:
    """A volume that stores the content of a file, and has no room left once it is closed."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir()
        self.delete_file = os.unlink

    def open_output_stream(self, path: str) -> Self:
        Path(path).write_bytes(b"clear text")
        return self

    def close(self) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def test_file_that_cannot_be_closed_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "_volume", FullVolume)
    target = tmp_path / "shop" / "now.jsonl"
    with raises("NotExported", match="got 'Disk quota"), destined_file(f"file://{target}"):
        assert len(list(target.parent.iterdir())) == 1
    assert not list(target.parent.iterdir())


def test_target_that_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    pipe, link, device = tmp_path / "pipe", tmp_path / "link", tmp_path / "stdout"
    os.mkfifo(pipe)
    link.symlink_to("absent")
    device.symlink_to("/dev/null")
    for target in (pipe, link, device):
        before = target.lstat()
        with raises("NotExported", match="regular file"), private_file(target):
            pass
        assert target.lstat() == before
    assert len(list(tmp_path.iterdir())) == 3


HOSTILE = "</td><script>alert(1)</script><img src=//evil onerror=x>\"'&\x1b[2J\x00"


class Page(HTMLParser):
    """The tags, attributes and texts of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def rendered(
    *rows: Any,  # noqa: ANN401  rows of dead letters
    topic: str = "persistent://shop/prod/orders-DLQ",
    replays: Sequence[Sequence[str]] = (),
) -> str:
    recorder = Recorder(lambda _: None)
    summary = Summary(recorder)
    for row in rows:
        summary.add(row)
    at = datetime.fromtimestamp(SENT / 1_000 + 7_200, UTC)
    facts = ReportFacts("dead letters", topic, at, ["2 were read."], recorder.hash_key, replays)
    return render_report(facts, summary)


def test_report_shows_figures_of_the_summary() -> None:
    replayed = {REPLAYS: "1", REPLAY: "shop/after-fix"}
    page = rendered(
        *(dead_letter(n, "WarehouseDown", key="ann@example.com") for n in range(3)),
        dead_letter(3, properties=replayed)._replace(partition=1, value=bytes(2_000)),
    )
    texts = Page(page).texts
    for row in (
        ("Dead letters of persistent://shop/prod/orders-DLQ",),
        ("WarehouseDown", "000000000000000d", "2026-11-26 13:33 UTC"),
        ("none recorded",),
        ("1 to 6 hours", "4"),
        ("1 to 16 KiB", "1"),
        ("(without key)", "1"),
        ("partition 1", "1"),
        ("1 replay", "1"),
        ("shop/after-fix", "1"),
    ):
        start = texts.index(row[0])
        assert tuple(texts[start : start + len(row)]) == row
    assert "ann@example.com" not in page


def test_report_shows_past_replays() -> None:
    row = ("after-fix", "Run", "Completed", "4", "0", "1", "2026-11-26T13:00:00Z")
    texts = Page(rendered(dead_letter(0, "E"), replays=[row] * 40)).texts
    assert texts.count("after-fix") == 30
    start = texts.index("after-fix")
    assert tuple(texts[start : start + len(row)]) == row
    assert "Replays of the policy" not in Page(rendered(dead_letter(0, "E"))).texts


def test_hostile_texts_are_escaped() -> None:
    hostile = {CAUSE_MESSAGE: HOSTILE, CONSUMER: HOSTILE, REPLAYS: "1", REPLAY: HOSTILE}
    page = rendered(dead_letter(0, HOSTILE, key=HOSTILE, properties=hostile), topic=HOSTILE)
    tags = Page(page).tags
    assert {tag for tag, _ in tags}.isdisjoint({"script", "img", "a", "link", "iframe", "base"})
    names = {name for _, attributes in tags for name in attributes}
    assert not any(name.startswith("on") for name in names)
    assert names.isdisjoint({"href", "src", "style", "srcset", "action"})
    assert all(character.isprintable() or character == "\n" for character in page)
    assert sum("alert(1)" in text for text in Page(page).texts) >= 3


def test_policy_permits_the_style_of_the_page_alone() -> None:
    page = rendered(dead_letter(0, "E"))
    (policy,) = (
        str(attributes["content"])
        for tag, attributes in Page(page).tags
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    )
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.split("; ") == [
        "default-src 'none'",
        f"style-src 'sha256-{digest}'",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    assert "url(" not in style
    assert "@import" not in style


@pytest.mark.parametrize("times", [(0,), (0, 2**63), (SENT, 0)])
def test_times_of_any_producer_do_not_end_the_report(times: tuple[int, ...]) -> None:
    page = rendered(*(dead_letter(n)._replace(publish_time=t) for n, t in enumerate(times)))
    words = "1 messages have a time" if SENT in times else "No message has a plausible time."
    assert words in page


def test_plot_has_a_bar_for_each_cause_and_time() -> None:
    rows = [dead_letter(3_600 * n, "x" * (1 + n % 9)) for n in range(18)]
    page = Page(
        rendered(*(row._replace(publish_time=SENT - 3_600_000 * n) for n, row in enumerate(rows)))
    )
    bars = [a for tag, a in page.tags if tag == "rect" and str(a.get("class")).startswith("c")]
    assert len(bars) == 18
    assert {str(bar["class"]) for bar in bars} == {f"c{n}" for n in range(7)}
    assert sum(float(str(bar["height"])) for bar in bars) == 18
    assert "other causes" in page.texts
