"""Files of records."""

from __future__ import annotations

import json
import os
import signal
import stat
from pathlib import Path

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
from redrive.policy.envelope import CAUSE_TRACE
from tests.support.dead_letter_rows import dead_letter
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
