"""Output of `causes` and `peek`, from messages that are read already."""

from __future__ import annotations

import io
import json
import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn, cast

import pytest
from jsonschema import Draft202012Validator

from redrive.api import Body
from redrive.api.inspection import InspectedMessages
from redrive.cli import cluster_causes, inspection_run, output
from redrive.cli.cluster import ClusterError, NotPermittedError
from redrive.cli.frame import ClusterFlags
from redrive.cli.inspection_request import InspectionRequest
from redrive.cli.main import main
from redrive.inspection.reader import InspectedTopic, MalformedEntry, TopicReading
from redrive.inspection.record import Recorder
from redrive.inspection.sealing import seal
from redrive.inspection.summary import Summary, count_of
from redrive.kube.resources import INSPECTIONS, POLICIES, ROCKETMQ_POLICIES, Resource
from redrive.policy.envelope import (
    CAUSE_FINGERPRINT,
    CAUSE_MESSAGE,
    CAUSE_TRACE,
    CONSUMER,
    DEAD_REASON,
    REPLAYS,
)
from redrive.reading.positions import EntryId
from redrive.reading.rows import DeadLetterRow
from redrive.replay.spec import Choice
from tests.support.commands import SCHEMAS, check
from tests.support.dead_letter_rows import dead_letter, of_the_page
from tests.support.documented import READ, shows, steps

ROOT = Path(__file__).parents[3]
HOSTILE = "\x1b[2J\x1b]0;title\x07\r\n\u202eevil"
POLICY = """\
apiVersion: redrive.io/v1beta1
kind: RetryPolicy
metadata: {name: orders}
spec:
  connectionRef: {name: main}
  topic: persistent://shop/prod/orders
  subscription: fulfilment
"""
DIRECT = "--direct --service-url pulsar://localhost:6650 --admin-url http://localhost:8080".split()


class Read(TopicReading):
    """A reading of rows in memory."""

    rows: tuple[DeadLetterRow, ...] = ()
    unselected = 0

    def selected(self, _on_read: Callable[[], object]) -> Iterator[DeadLetterRow]:
        self.messages, self.matched = len(self.rows) + self.unselected, len(self.rows)
        return iter(self.rows)


class Shell:
    """Commands about one policy in a file, which find the same messages."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.file, self._capsys = folder / "policy.yaml", capsys
        self.file.write_text(POLICY, "utf-8")
        self.rows: tuple[DeadLetterRow, ...] = ()
        self.unselected = 0
        self.total = 3
        self.malformed: list[MalformedEntry] = []

    def plan(self, topic: InspectedTopic, _choice: object, _newest: object) -> TopicReading:
        planned = min(self.total, 3)
        reading = Read(topic, self.total, planned, planned < self.total, malformed=self.malformed)
        reading.malformed_entries = len(self.malformed)
        reading.rows, reading.unselected = self.rows, self.unselected
        return reading

    def run(self, command: str, *arguments: str, code: int = 0) -> tuple[str, str]:
        assert main([command, str(self.file), *DIRECT, *arguments]) == code
        captured = self._capsys.readouterr()
        return captured.out, captured.err


@pytest.fixture
def shell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Shell:
    shell = Shell(tmp_path, capsys)

    def plan(topic: InspectedTopic, choice: object, newest: object) -> TopicReading:
        return shell.plan(topic, choice, newest)

    monkeypatch.setattr(InspectedTopic, "plan", plan)
    return shell


ROWS = (
    dead_letter(
        0, "WarehouseDown", key="a", properties={CAUSE_MESSAGE: "no answer from the warehouse"}
    ),
    dead_letter(1, "WarehouseDown", key="b", value=b'{"items": [1]}'),
    dead_letter(2),
)


@pytest.mark.parametrize(
    ("columns", "titles"),
    [
        (80, "N CAUSE FINGERPRINT FIRST LAST REPLAYED"),
        (160, "N CAUSE FINGERPRINT FIRST LAST REPLAYED CONSUMERS EXAMPLE"),
    ],
)
def test_causes_fit_the_terminal(
    shell: Shell, columns: int, titles: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "width", lambda: columns)
    shell.rows = ROWS
    out, err = shell.run("causes")
    title, *rows = out.splitlines()
    assert title.split() == titles.split()
    assert [row.split()[:3] for row in rows] == [
        ["2", "WarehouseDown", "000000000000000d"],
        ["1", "none", "recorded"],
    ]
    assert all(len(line) <= columns for line in out.splitlines())
    assert 'Map.of("REDRIVE_CAUSE_TYPE", error.getClass().getSimpleName())' in err
    hint = f"Look at one: redrive peek {shell.file} --cause 000000000000000d --limit 1 --direct"
    assert hint in err


MALFORMED = {
    CAUSE_MESSAGE: "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    CAUSE_FINGERPRINT: "02aa71bb00112233",
    CONSUMER: "fulfilment-7d9c4-x2x9k",
}


@pytest.mark.parametrize(("page", "heading"), [(READ, "Count causes"), (READ, "Look at messages")])
def test_output_of_a_direct_reader_is_that_of_the_page(
    shell: Shell, page: str, heading: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "width", lambda: 160)
    [step] = steps(page, heading)
    letters = [of_the_page(n, f"fulfilment-7d9c4-{'xy'[n % 2]}2x9k") for n in range(119)]
    malformed = (dead_letter(n, "JSONDecodeError", properties=MALFORMED) for n in range(12))
    shell.rows = (*letters, of_the_page(3))
    if "--cause" in step.command:
        shell.unselected = 20
    else:
        shell.rows += (*malformed, *map(dead_letter, range(8)))
    words = [word for word in step.command.split()[1:] if word not in {"policy.yaml", "$direct"}]
    screen = io.StringIO()
    with redirect_stdout(screen), redirect_stderr(screen):
        assert main([*words, str(shell.file), *DIRECT]) == 0
    printed = screen.getvalue().replace(str(shell.file), "policy.yaml")
    shown = re.sub(r"\(\d\.\d s\)", "…", step.output).replace("6514df353468", "…")
    assert shows(shown, printed), printed


def test_long_consumer_name_leaves_room_for_others(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "width", lambda: 160)
    shell.rows = (*ROWS, dead_letter(4, "E", properties={CONSUMER: "w" * 256}))
    out, _ = shell.run("causes")
    assert out.splitlines()[0].split()[-2:] == ["CONSUMERS", "EXAMPLE"]
    assert f"{'w' * 39}… (1)" in out


def test_wide_causes_count_followers(shell: Shell) -> None:
    shell.rows = (ROWS[0], dead_letter(3, key="a", properties={DEAD_REASON: "AfterDeadLetter"}))
    out, _ = shell.run("causes", "-o", "wide")
    assert "FOLLOWING" in out
    assert out.splitlines()[1].split()[0] == "2"


def test_peek_shows_masked_messages(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "width", lambda: 80)
    trace = {CAUSE_TRACE: "at fulfil.fetch:9\nat fulfil.run:3\ncaused by OSError: b"}
    shell.rows = (
        *ROWS[:1],
        dead_letter(1, "WarehouseDown", key="b", value=b"[1]", properties=trace),
    )
    out, err = shell.run("peek")
    newest, oldest = out.strip().split("\n\n")
    assert newest.splitlines()[0].startswith("id         7:1:0:0   key ")
    assert newest.splitlines()[1:] == [
        "           attempts 4   replays 0",
        "cause      WarehouseDown: no b",
        "           fulfil.fetch:9 < fulfil.run:3   consumer fulfilment-a",
        "payload    [number]",
    ]
    assert oldest.splitlines()[0].startswith("id         7:0:0:0   key ")
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "Masked. Clear text: --reveal" in err


@pytest.mark.parametrize(
    ("limit", "extent"), [("2", "newest 2 of 3"), ("3", "newest 2 of 3, 8 MiB")]
)
def test_peek_names_the_bound_of_its_size(shell: Shell, limit: str, extent: str) -> None:
    shell.rows = tuple(dead_letter(n, value=b"x" * 3 * 2**20) for n in range(3))
    out, err = shell.run("peek", "--limit", limit)
    assert len(out.strip().split("\n\n")) == 2
    assert f"{extent}{' together' if limit == '3' else ''}; all: redrive export" in err


def test_revealed_peek_shows_clear_text(shell: Shell) -> None:
    shell.rows = (dead_letter(0, "E", key="order-1", value=b"\xff\x00"),)
    out, err = shell.run("peek", "--reveal")
    assert "key order-1 " in out
    assert "payload    /wA= (base64 of 2 bytes, bytes)" in out
    assert "Masked" not in err


def test_output_has_no_control_characters(shell: Shell) -> None:
    hostile = {CAUSE_MESSAGE: HOSTILE, CAUSE_TRACE: f"at {HOSTILE}", DEAD_REASON: HOSTILE}
    row = dead_letter(
        0, HOSTILE, key=HOSTILE, value=HOSTILE.encode(), properties={**hostile, "x": HOSTILE}
    )
    shell.rows = (row,)
    shell.malformed = [MalformedEntry(0, EntryId(7, 9), HOSTILE)]
    for arguments in (["causes"], ["peek"], ["peek", "--reveal"], ["causes", "-o", "wide"]):
        for text in shell.run(*arguments):
            assert all(c.isprintable() or c == "\n" for c in text), repr(text)


@pytest.mark.parametrize("arguments", [["causes"], ["peek"], ["peek", "--reveal"]])
def test_documents_follow_their_published_schema(shell: Shell, arguments: list[str]) -> None:
    schema = json.loads((ROOT / "docs/reference/cli.schema.json").read_text("utf-8"))
    shell.rows = (*ROWS, dead_letter(4, "E", key="k", properties={REPLAYS: "1"}))
    shell.malformed = [MalformedEntry(-1, EntryId(7, 9), "no entry")]
    shown: Any = json.loads(shell.run(*arguments, "-o", "json")[0])
    Draft202012Validator(schema).validate(shown)
    assert shown["malformedEntries"] == [{"id": "7:9:-1", "cause": "no entry"}]
    assert len(shown["items"]) in {3, 4}


def test_names_of_causes_have_no_control_characters(shell: Shell) -> None:
    shell.rows = (dead_letter(0, HOSTILE, key="a"),)
    for output_format in ("name", "yaml"):
        printed, _ = shell.run("causes", "-o", output_format)
        assert not set(printed) & set("\x1b\x07\r\u202e")
    assert len(shell.run("causes", "-o", "name")[0].splitlines()) == 1


def test_last_time_of_the_calendar_is_printed(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        shell.rows = (dead_letter(0, "E")._replace(publish_time=253_402_300_799_000),)
        assert "-" in shell.run("causes")[0]
        assert "died -" in shell.run("peek")[0]
    finally:
        monkeypatch.undo()
        time.tzset()


def test_names_can_be_given_to_selections(shell: Shell) -> None:
    shell.rows = ROWS
    assert shell.run("causes", "-o", "name")[0] == "000000000000000d\nnone recorded\n"
    assert shell.run("peek", "-o", "name")[0] == "7:2:0:0\n7:1:0:0\n7:0:0:0\n"


def test_empty_result_gives_its_reason(shell: Shell) -> None:
    shell.total = 0
    out, err = shell.run("causes")
    assert out == ""
    assert "no dead letters in persistent://shop/prod/orders-fulfilment-DLQ: none came, or" in err
    assert "redrive causes" in err
    assert "--waiting" in err
    _, err = shell.run("peek", "--waiting")
    assert "in persistent://shop/prod/orders-fulfilment-RETRY: none came" in err
    shell.total = 3
    _, err = shell.run("peek", "--id", "1:2")
    assert "no message of these ids is in" in err


def test_truncated_reading_names_its_extent(shell: Shell) -> None:
    shell.total, shell.rows = 12, ROWS
    _, err = shell.run("causes", "-n", "shop")
    assert (
        f"newest 3 of 12 entries; all, about 1s: redrive causes {shell.file} --all --direct" in err
    )
    assert err.strip().endswith("-n shop")


SELECTION = shlex.split(
    """--cause "it's $HOME" --cause 0f4a9c31d2be7755 --id 4711:3 --key 'k 1' """
    "--since 2026-11-20T10:00:00Z --until 2026-11-21T10:00:00Z"
)
"""Options of a selection, in the order of hints."""


def words_after(marker: str, text: str) -> list[str]:
    """Return the words of the command line that follows *marker*."""
    return shlex.split(text.partition(marker)[2].partition("\n")[0])


def test_hints_of_a_direct_reader_keep_the_options(shell: Shell, tmp_path: Path) -> None:
    shell.total, shell.rows, file = 12, ROWS, str(shell.file)
    options = [*SELECTION, "--limit", "2", "--waiting", "--reveal", "-n", "shop"]
    flags = ["--waiting", "--reveal", *DIRECT, "-n", "shop"]
    _, error = shell.run("peek", *options)
    exported = ["--to", "dead-letters.jsonl", *SELECTION]
    assert words_after("; all: ", error) == ["redrive", "export", file, *exported, *flags]
    limited = [*SELECTION, "--limit", "2", "--all"]
    assert words_after(": redrive ", error) == ["peek", file, *limited, *flags]
    target = ["--to", str(tmp_path / "report.html")]
    _, error = shell.run("report", *target, *options)
    assert words_after(": redrive ", error) == ["report", file, *target, *limited, *flags]
    _, error = shell.run("causes", *options, "-o", "json")
    assert words_after(": redrive ", error) == ["causes", file, "-o", "json", *limited, *flags]
    _, error = shell.run("causes", *options)
    one = ["--cause", "000000000000000d", "--limit", "1", *SELECTION[4:]]
    assert words_after("Look at one: redrive ", error) == ["peek", file, *one, *flags]
    shell.rows, shell.unselected = (), 3
    _, error = shell.run("peek", *options)  # it has other messages
    assert words_after("All causes: redrive ", error) == ["causes", file, *flags]


def test_export_replaces_a_file_only_when_it_is_complete(shell: Shell, tmp_path: Path) -> None:
    target = tmp_path / "dead.jsonl"
    target.write_text("before", "utf-8")
    _, error = shell.run("export", "--to", str(target), "--cause", "E", code=1)
    assert "the 3 entries hold no whole message; select others" in error
    assert target.read_text("utf-8") == "before"
    shell.rows = ROWS
    _, error = shell.run("export", "--to", str(target))
    assert f"wrote 3 messages to {target}, masked" in error
    assert [json.loads(line)["id"] for line in target.read_text("utf-8").splitlines()] == [
        "7:0:0:0", "7:1:0:0", "7:2:0:0"
    ]  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dead.jsonl", "policy.yaml"]


def test_report_is_written_for_its_owner(shell: Shell, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    _, error = shell.run("report", "--to", str(target), code=1)
    assert "the 3 entries hold no whole message; select others" in error
    assert not target.exists()
    shell.rows = ROWS
    _, error = shell.run("report", "--to", str(target))
    assert f"wrote a report of 3 messages to {target}" in error
    assert target.stat().st_mode & 0o777 == 0o600
    page = target.read_text("utf-8")
    assert "3 of 3 entries were read, with 3 messages; 3 of them are selected." in page
    assert "Keys and texts are masked." in page
    shell.run("report", "--to", str(target), "--reveal")
    assert "Clear text: do not share." in target.read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["causes", "x.yaml", "--where", "size > 1"], "--where is evaluated by Spark, in a Replay"),
        (["causes", "./absent.yaml", *DIRECT], "absent.yaml"),
        (["peek", "./absent.yaml", "--limit", "501"], "--limit of peek is at most 500"),
        (["peek", "orders", "--where", "size > 1"], "--where is evaluated by Spark, in a Replay"),
        (["peek", "./absent.yaml", "--id", "x"], "the id of a message must be ledger:entry"),
        (["peek", "orders", "other"], "POLICY is not a file: leave NAME out"),
        (["causes", "orders", "other"], "POLICY is not a file: leave NAME out"),
        (["export", "orders", "other", *DIRECT, "--to", "x"], "POLICY is not a file"),
        (
            ["causes", "orders", "--where", "size > 1", "--reveal"],
            "--where is evaluated by Spark, in a Replay",
        ),
        (["causes", "orders", "--limit", "5"], "--limit of causes is for --direct"),
        (["export", "orders", "--to", "x.jsonl"], "--to names a destination of the connection"),
        (["report", "orders", "--to", "archive", "--limit", "1"], "--limit is for files of"),
        (["report", "orders", "--to", "archive", "--where", "size > 1"], "--where is evaluated by"),
        (
            ["export", "orders", *DIRECT, "--to", "x.jsonl", "--format", "Parquet"],
            "the name of FILE decides about its format",
        ),
        (["peek", "orders", *DIRECT[1:3]], "--service-url only with --direct; add it, or leave"),
        (
            ["causes", "orders", "--token-file", __file__],
            "--token-file only with --direct; add it, or leave --token-file out",
        ),
    ],
)
def test_wrong_usage_is_refused(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) in {1, 2}
    assert problem in capsys.readouterr().err


def test_command_without_direct_names_the_remedy(
    shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["causes", str(shell.file)]) == 2
    error = capsys.readouterr().err
    assert "only with --direct" in error
    assert "persistent://shop/prod/orders-fulfilment-DLQ" in error
    assert main(["causes", str(shell.file), "--direct"]) == 2
    assert "--direct needs --service-url and --admin-url" in capsys.readouterr().err


class LostCluster:
    """An API server that stops answering once it has created an Inspection."""

    namespace, user = "shop", "ann"

    def __init__(self, flags: ClusterFlags) -> None:
        self.flags = flags

    def get(self, *_: object) -> Body:
        return {"metadata": {"name": "orders", "namespace": self.namespace, "uid": "u"}}

    def create(self, _resource: Resource, body: Body) -> Body:
        return {**body, "metadata": {**body["metadata"], "name": "orders-x"}}

    def states(self, _resource: Resource, _body: Body, /) -> Iterator[SimpleNamespace]:
        raise ClusterError("the watch was lost", remedy="-")

    def delete(self, *_: object) -> NoReturn:
        raise ClusterError("the API server does not answer", remedy="-")


class InspectingCluster(LostCluster):
    """A cluster in which an Inspection reads `ROWS`, and returns those that fit."""

    fitting = len(ROWS)
    wanted: ClassVar[list[dict[str, Any]]] = []
    """The result that each Inspection has to return."""
    authors: ClassVar[list[str]] = []
    """The user that each Inspection names."""

    def records(self) -> Sequence[object]:
        return list(map(Recorder(lambda _: None), ROWS[::-1]))

    def states(self, _resource: Resource, body: Body, /) -> Iterator[SimpleNamespace]:
        spec = body["spec"]
        wanted = spec.get("export") or spec.get("causes") or spec["messages"]
        self.wanted.append(wanted)
        self.authors.append(body["metadata"]["annotations"]["redrive.io/requested-by"])
        matched = self.fitting and len(ROWS)
        run: dict[str, Any] = {"totalEntries": 3, "readEntries": 3, "messages": 3}
        run["matched"] = matched
        if "recipient" in wanted:
            records = self.records()[: self.fitting][: wanted.get("limit")]
            run["sealed"] = seal(records, wanted["recipient"], "u-x", 2**20)
        elif matched:
            run["file"] = f"s3://letters/shop/orders/orders-x.{wanted['format'].lower()}"
        status = {"phase": "Completed", "run": run}
        metadata = {**body["metadata"], "uid": "u-x"}
        inspection = {**body, "metadata": metadata, "status": status}
        yield SimpleNamespace(objects=(inspection,), error=None)


@pytest.fixture
def _inspects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection_run, "Cluster", InspectingCluster)


@pytest.mark.usefixtures("_inspects")
def test_peek_in_cluster_shows_sealed_messages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peek", "orders", "--limit", "2", "-o", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    check(shown, SCHEMAS["$defs"]["InspectedMessageList"])
    assert [item["id"] for item in shown["items"]] == ["7:2:0:0", "7:1:0:0"]
    assert (shown["inspection"], shown["matched"]) == ("orders-x", 3)

    assert main(["peek", "orders", "--limit", "2"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("id         7:2:0:0   no key")
    assert "newest 2 of 3; more: redrive peek orders --limit 500" in captured.err
    assert "Masked. Clear text: --reveal, by the role redrive-revealer" in captured.err


@pytest.mark.usefixtures("_inspects")
@pytest.mark.parametrize(
    ("command", "form", "result"),
    [
        (["export"], "Parquet", "parquet, masked"),
        (["export", "--format", "JSONLines", "--reveal"], "JSONLines", "jsonlines"),
        (["report"], "HTML", "html, masked"),
    ],
)
def test_file_is_written_at_a_destination(
    command: list[str],
    form: str,
    result: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert main([*command, "orders", "--to", "archive"]) == 0
    wanted = {"destination": "archive", "format": form}
    clear = {"payload": "Clear"} if "--reveal" in command else {}
    assert InspectingCluster.wanted[-1] == wanted | clear
    line = f"wrote 3 messages to s3://letters/shop/orders/orders-x.{result}"
    assert line in capsys.readouterr().err.splitlines()
    monkeypatch.setattr(InspectingCluster, "fitting", 0)
    assert main([*command, "orders", "--to", "archive"]) == 1
    assert "none of the 3 dead letters that were read is selected" in capsys.readouterr().err


@pytest.mark.usefixtures("_inspects")
def test_revealed_peek_in_cluster_asks_for_clear_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peek", "orders", "--reveal"]) == 0
    assert InspectingCluster.wanted[-1]["payload"] == "Clear"
    assert InspectingCluster.authors[-1] == InspectingCluster.user
    assert "Masked" not in capsys.readouterr().err


@pytest.mark.usefixtures("_inspects")
def test_peek_in_cluster_names_messages_that_do_not_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InspectingCluster, "fitting", 1)
    assert main(["peek", "orders"]) == 0
    assert "1 of the newest 3: more do not fit; select fewer" in capsys.readouterr().err


@pytest.mark.usefixtures("_inspects")
def test_hints_in_the_cluster_keep_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    options = [*SELECTION, "--limit", "2", "--all", "--reveal"]
    assert main(["peek", "orders", *options, "-n", "shop"]) == 0
    more = [*SELECTION, "--limit", "500", "--all", "--reveal", "-n", "shop"]
    error = capsys.readouterr().err
    assert words_after("; more: redrive ", error) == ["peek", "orders", *more]
    for command, *target in (["causes"], ["export", "--to", "x.jsonl"]):
        assert main([command, "orders", *target, *options]) == 2
        direct = words_after("\n  redrive ", capsys.readouterr().err)
        assert direct[: direct.index("--direct")] == [command, "orders", *target, *options]


class CountingCluster(InspectingCluster):
    """A cluster in which an Inspection returns the causes of `ROWS`."""

    def records(self) -> Sequence[object]:
        summary = Summary(Recorder(lambda _: None))
        for row in ROWS:
            summary.add(row)
        return list(map(count_of, summary.ordered))


def test_causes_in_cluster_show_consumers_and_examples(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection_run, "Cluster", CountingCluster)
    monkeypatch.setattr(output, "width", lambda: 160)
    assert main(["causes", "orders", "-o", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    check(shown, SCHEMAS["$defs"]["InspectedCauseList"])
    assert main(["causes", "orders"]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[1].endswith("fulfilment-a (1)  no answer from the warehouse")
    assert "Look at one: redrive peek orders --cause 000000000000000d --limit 1" in captured.err
    assert main(["causes", "orders", "--reveal"]) == 0
    assert CountingCluster.wanted[-1]["payload"] == "Clear"
    capsys.readouterr()
    monkeypatch.setattr(CountingCluster, "fitting", 1)
    assert main(["causes", "orders"]) == 0
    assert "1 messages of less frequent causes are not shown" in capsys.readouterr().err


class RocketMQCluster(CountingCluster):
    """A cluster with a RocketMQRetryPolicy, whose dead letters have no cause."""

    created: ClassVar[list[Body]] = []

    def get(self, *arguments: object) -> Body:
        assert arguments[0] is ROCKETMQ_POLICIES
        return super().get(*arguments)

    def create(self, resource: Resource, body: Body) -> Body:
        self.created.append(body)
        return super().create(resource, body)

    def records(self) -> Sequence[object]:
        summary = Summary(Recorder(lambda _: None))
        summary.add(ROWS[0]._replace(properties={}))
        return list(map(count_of, summary.ordered))


def test_causes_of_rocketmq_are_counted_by_an_inspection(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection_run, "Cluster", RocketMQCluster)
    assert main(["causes", "rmqpol/orders", "--all"]) == 0
    captured = capsys.readouterr()
    assert "a client of RocketMQ can't add a cause" in captured.err
    assert "Look at one: redrive peek rmqpol/orders --cause 'none recorded' --" in captured.err
    (body,) = RocketMQCluster.created
    assert body["spec"]["policyRef"] == {"kind": "RocketMQRetryPolicy", "name": "orders"}
    assert body["metadata"]["ownerReferences"][0]["kind"] == "RocketMQRetryPolicy"
    assert main(["peek", "rmqpol/orders", *DIRECT]) == 2
    assert "--direct is for Pulsar" in capsys.readouterr().err


class InspectorsCluster(CountingCluster):
    """A cluster whose caller may create Inspections only."""

    def create(self, resource: Resource, body: Body) -> Body:
        if resource is not INSPECTIONS:
            raise NotPermittedError("not permitted to create replays", remedy="-")
        return super().create(resource, body)


def test_inspection_counts_where_no_replay_can(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (cluster_causes, inspection_run):
        monkeypatch.setattr(module, "Cluster", InspectorsCluster)
    assert main(["causes", "orders", "--all"]) == 0
    error = capsys.readouterr().err
    assert (
        "an Inspection counts instead, of at most 1000000 entries: not permitted to create" in error
    )
    assert main(["causes", "orders", "--where", "size > 1"]) == 1
    assert "not permitted to create replays" in capsys.readouterr().err


class RespondersCluster(CountingCluster):
    """A cluster whose caller may create Replays only, if it has not an Inspection *stalled*."""

    stalled: ClassVar[str] = ""

    def create(self, resource: Resource, body: Body) -> Body:
        if resource is INSPECTIONS and not self.stalled:
            raise NotPermittedError("not permitted to create inspections", remedy="-")
        return super().create(resource, body)

    def delete(self, *_: object) -> None:  # type: ignore[override]  # it succeeds
        return

    def states(self, resource: Resource, body: Body, /) -> Iterator[SimpleNamespace]:
        if resource is INSPECTIONS:
            conditions = [
                {"type": kind, "status": "True", "reason": self.stalled, "message": "-"}
                for kind in ("Ready", "Stalled")
            ]
            status: Body = {"phase": "Pending", "conditions": conditions}
        else:
            causes = [
                {"cause": cause, "messages": messages, "replayed": 0}
                for cause, messages in (("AfterDeadLetter", 3), ("WarehouseDown", 2), ("", 1))
            ]
            counts = {"scanned": 7, "matched": 7, "left": 7}
            status = {
                "phase": "Completed",
                "run": {"counts": counts, "preview": {"causes": causes}},
            }
        yield SimpleNamespace(objects=({**body, "status": status},), error=None)


@pytest.mark.parametrize(
    ("stalled", "problem"),
    [("", "not permitted to create"), ("InspectionIdentityMissing", "InspectionIdentityMissing")],
)
def test_replay_counts_where_no_inspection_can(
    stalled: str, problem: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (cluster_causes, inspection_run):
        monkeypatch.setattr(module, "Cluster", RespondersCluster)
    monkeypatch.setattr(RespondersCluster, "stalled", stalled)
    assert main(["causes", "orders"]) == 0
    captured = capsys.readouterr()
    rows = [row.split()[:2] for row in captured.out.splitlines()[1:]]
    assert rows[1:] == [["2", "WarehouseDown"], ["1", "none"], ["1", "(others)"]]
    assert "\n  Java  consumer.reconsumeLater(" in captured.err
    assert "a Replay counts instead, without consumers and examples: " in captured.err
    assert problem in captured.err
    assert "Look at one: redrive peek orders --cause WarehouseDown --limit 1" in captured.err
    for option in ("--waiting", "--reveal"):  # no Replay can
        assert main(["causes", "orders", option]) == 1
        assert problem in capsys.readouterr().err
    assert main(["causes", "orders", "--all"]) == 0
    error = capsys.readouterr().err
    assert "a Replay counts instead, without" not in error  # it does so anyway
    assert "--cause WarehouseDown --limit 1 --all" in error
    monkeypatch.setattr(RespondersCluster, "stalled", "TooManyRuns")
    assert main(["causes", "orders"]) == 1
    assert "TooManyRuns" in capsys.readouterr().err


def test_reading_in_this_program_is_named_where_neither_can(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise NotPermittedError("not permitted to create it", remedy="-")

    for module in (cluster_causes, inspection_run):
        monkeypatch.setattr(module, "Cluster", RespondersCluster)
    monkeypatch.setattr(RespondersCluster, "create", refuse)
    assert main(["causes", "orders"]) == 1
    assert "\n  redrive causes orders --direct --service-url" in capsys.readouterr().err


def test_inspection_that_is_left_is_named_with_the_cause(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection_run, "Cluster", LostCluster)
    assert main(["causes", "orders", "--waiting"]) == 1
    error = capsys.readouterr().err
    assert "kubectl delete inspection orders-x -n shop" in error
    assert "error: the watch was lost" in error


def test_truncated_inspection_estimates_the_time_of_all() -> None:
    request = cast("InspectionRequest", SimpleNamespace(source=InspectedMessages.DEAD_LETTER))
    run = {"totalEntries": 1_204_332, "truncated": True, "readSeconds": 2}
    run |= dict.fromkeys(("readEntries", "messages", "matched"), 10_000)
    *_, line = inspection_run.summary_of(request, run)
    assert line == "newest 10000 of 1204332 entries; --all reads more, about 3m"


def test_inspection_of_unknown_ids_says_so() -> None:
    choice = Choice(ids=("9:1",))
    words = SimpleNamespace(source=InspectedMessages.DEAD_LETTER, choice=choice)
    run = {"totalEntries": 3, "messages": 0, "matched": 0}
    (line,) = inspection_run.summary_of(cast("InspectionRequest", words), run)
    assert line == "no dead letters with these ids: replayed, expired, or never there"


@pytest.mark.parametrize(
    ("began", "ended", "replays", "is_shown"),
    [
        (50, 10, [], True),
        (50, 10, [55], True),
        (50, 10, [55, 20], False),
        (50, 10, [None], False),
        (100, 70, [], False),
    ],
    ids=["young", "after a Replay", "Replay meanwhile", "Replay runs", "old"],
)
def test_summary_is_shown_again_unless_a_replay_ran_since(
    began: int, ended: int, replays: list[int | None], *, is_shown: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Times are in seconds before now; None for a Replay that has not ended."""
    at = output.now()

    def ago(seconds: int | None) -> str:
        return "" if seconds is None else output.written(at - timedelta(seconds=seconds))

    inspection: Body = {
        "metadata": {"creationTimestamp": ago(began)},
        "spec": {"policyRef": {"name": "orders"}, "from": "DeadLetter"},
        "status": {"completionTime": ago(ended), "run": {"matched": 5}},
    }
    listed: list[Body] = [
        {"spec": {}, "status": {"completionTime": ago(seconds)}} for seconds in replays
    ]

    class Listing:
        namespace = "shop"

        def list(self, kind: Resource, _: str, **__: str) -> list[Body]:
            return [inspection] if kind is INSPECTIONS else listed

    monkeypatch.setattr(inspection_run, "Cluster", lambda _: Listing())
    request: Any = SimpleNamespace(
        flags=None, policy="orders", kind=POLICIES, source=SimpleNamespace(value="DeadLetter"),
        select={}, reads_all=False,
    )  # fmt: skip
    assert (inspection_run.young_summary(request) is inspection) is is_shown


def test_id_of_another_broker_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY, "utf-8")
    assert main(["peek", str(path), *DIRECT, "--id", "broker-a:0:17"]) == 1
    assert "must be ids of the kind of broker of the policy" in capsys.readouterr().err
