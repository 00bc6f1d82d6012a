"""Output of commands: tables, ages, documents for programs, and lines that are redrawn.

Results go to standard output; progress, prompts and warnings to standard error. A terminal gets
colours and redrawn lines; a pipe, `NO_COLOR` and `TERM=dumb` get neither. Text from objects is
printed without control characters.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any, TextIO, TypeVar

import click

from redrive.api import Body

DOCUMENT_VERSION = "cli.redrive.io/v1"
"""`apiVersion` of the documents that commands which read print."""
WIDTH_WITHOUT_TERMINAL = 10_000
REDRAW_SECONDS = 0.2
"""Shortest time between two redraws."""
REPORT_SECONDS = 10.0
"""Time between two lines of progress without a terminal."""
MISSING = "-"
_ZONE = "redrive.zone"
"""Key of click's context, under which a command has its time zone; absent for the local one."""
FORMATS = frozenset({"json", "yaml", "jsonl", "name"})
"""Formats for programs."""
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))

_Function = TypeVar("_Function", bound=Callable[..., Any])


def output_option(*formats: str) -> Callable[[_Function], _Function]:
    """Add `-o` with *formats* to a command, which gets it as its argument `output`."""
    return click.option("-o", "--output", type=click.Choice(formats), help="Output format.")


def utc_option(function: _Function) -> _Function:
    """Add `--utc` to a command that prints times of day."""

    def choose(ctx: click.Context, _: click.Parameter, is_utc: bool) -> None:  # noqa: FBT001
        if is_utc:
            ctx.meta[_ZONE] = UTC

    return click.option(
        "--utc",
        is_flag=True,
        expose_value=False,
        callback=choose,
        help="Times of day in UTC, with a Z; default: local ones.",
    )(function)


def now() -> datetime:
    """Return the current time in UTC."""
    return datetime.fromtimestamp(time.time(), UTC)


def clean(text: object) -> str:
    """Return *text* in one line, without control characters."""
    return "".join(c if c.isprintable() else " " for c in str(text))


def written(instant: datetime) -> str:
    """Return a time as Kubernetes writes it: in UTC, in whole seconds."""
    # Unlike strftime, it writes all four digits of a year before 1000.
    return f"{instant.astimezone(UTC).replace(tzinfo=None).isoformat(timespec='seconds')}Z"


def age(seconds: float) -> str:
    """Return a length of time in its largest unit: `41m`, `3h`, `12d`."""
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return "0s"


def moment(text: object) -> datetime | None:
    """Read a time of an object; None for anything else."""
    try:
        return datetime.fromisoformat(str(text)) if text else None
    except ValueError:
        return None


def age_of(text: object, at: datetime) -> str:
    """Return the time from a moment of an object to *at*; `-` without a moment."""
    start = moment(text)
    return MISSING if start is None else age(max((at - start).total_seconds(), 0))


def time_until(text: object, at: datetime) -> str:
    """Return the time from *at* to a moment of an object; `-` without a moment."""
    end = moment(text)
    if end is None:
        return MISSING
    return "expired" if end <= at else age_of(written(at), end)


def local_time(text: object, at: datetime) -> str:
    """Return the local time of day of a moment, with the date where it is not that of *at*.

    In a command with `--utc` it is the time in UTC, with a `Z`.
    """
    instant, context = moment(text), click.get_current_context(silent=True)
    if instant is None:
        return MISSING
    zone = None if context is None else context.meta.get(_ZONE)
    try:
        local = instant.astimezone(zone)
    except OverflowError:  # after the year 9999 in this time zone
        return MISSING
    is_today = local.date() == at.astimezone(zone).date()
    shown = local.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M")
    return shown if zone is None else f"{shown}Z"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as ``2 files``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def has_terminal(stream: TextIO) -> bool:
    """Return True if lines of *stream* can be redrawn."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def style(text: str, color: str, stream: TextIO | None = None) -> str:
    """Return *text* in a colour, where *stream*, standard output by default, shows colours."""
    shows = has_terminal(stream or sys.stdout) and "NO_COLOR" not in os.environ
    return click.style(text, fg=color) if shows else text


def say(text: str) -> None:
    """Print progress, a hint or a warning on standard error."""
    click.echo(text, err=True)


def width() -> int:
    """Return the columns of the terminal; without a terminal lines have any length."""
    if not sys.stdout.isatty():
        return WIDTH_WITHOUT_TERMINAL
    return shutil.get_terminal_size((80, 24)).columns


@dataclass(frozen=True)
class TableColumn:
    """A column of a table.

    Attributes:
        title: its heading.
        right: True for numbers.
        dropped: rank in which columns are left out where the terminal is narrow, the highest
            first; 0 for a column that stays.
        wide: True if it is shown with `-o wide` alone.
        wrapped: True for a last column that continues on further lines where it does not fit.
    """

    title: str
    right: bool = False
    dropped: int = 0
    wide: bool = False
    wrapped: bool = False


def table(
    columns: Sequence[TableColumn],
    rows: Sequence[Sequence[object]],
    wide: bool = False,  # noqa: FBT001, FBT002  named by its callers' variables
) -> list[str]:
    """Return the lines of a table.

    None is shown as `MISSING`. Where the table is wider than the terminal, columns are left out,
    and the last one is wrapped or cut.
    """
    texts = [[MISSING if cell is None else clean(cell) for cell in row] for row in rows]
    shown = [index for index, column in enumerate(columns) if wide or not column.wide]
    sizes = [
        max(map(columns_of, [column.title, *(row[index] for row in texts)]))
        for index, column in enumerate(columns)
    ]
    space = WIDTH_WITHOUT_TERMINAL if wide else width()

    def needed() -> int:
        return sum(sizes[i] + 2 for i in shown[:-1]) + min(sizes[shown[-1]], _LAST_COLUMN)

    for index in sorted(shown, key=lambda index: -columns[index].dropped):
        if needed() > space and columns[index].dropped:
            shown.remove(index)
    *fixed, last = shown
    lines: list[str] = []
    for row in [[column.title for column in columns], *texts]:
        cells = [_filled(row[index], sizes[index], columns[index]) for index in fixed]
        end = _filled(row[last], sizes[last], columns[last]) if columns[last].right else row[last]
        head = "".join(f"{cell}  " for cell in cells)
        if columns[last].wrapped and columns_of(head) + columns_of(end) > space:
            lines += _wrapped(head, end, space)
        else:
            lines.append(cut(f"{head}{end}".rstrip(), space))
    return lines


def _filled(text: str, size: int, column: TableColumn) -> str:
    """Return a cell with the width of its column."""
    gap = " " * (size - columns_of(text))
    return f"{gap}{text}" if column.right else f"{text}{gap}"


_LAST_COLUMN = 24
"""Width of the last column that is left to it if other columns can be left out."""


def _wrapped(head: str, end: str, space: int) -> Iterator[str]:
    """Yield a row with its last cell on several lines: below each other, or below the row."""
    indent = columns_of(head)
    room = space - indent
    if room >= max([_LAST_COLUMN, *map(columns_of, end.split())]):  # no word is too long
        first, *others = _lines_of(end, room) or [""]
        yield f"{head}{first}"
        yield from (f"{' ' * indent}{line}" for line in others)
        return
    yield cut(head.rstrip(), space)
    room = max(_LAST_COLUMN, space - 4)
    yield from (f"    {line}" for line in _lines_of(end, room))


def _lines_of(text: str, room: int) -> list[str]:
    """Divide *text* between its words into lines of so many columns; divide only longer words.

    The standard library's `textwrap` counts characters.
    """
    lines: list[str] = []
    for whole in text.split():
        word = whole
        while columns_of(word) > room:
            lines.append(word[: _fitting(word, room)])
            word = word[len(lines[-1]) :]
        if lines and columns_of(lines[-1]) + 1 + columns_of(word) <= room:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def cut(line: str, space: int | None = None) -> str:
    """Return *line*, cut to the width of the terminal."""
    limit = width() if space is None else space
    if columns_of(line) <= limit:
        return line
    return f"{line[: _fitting(line, limit - 1)]}…"


def _fitting(text: str, room: int) -> int:
    """Return the number of characters that fit into so many columns."""
    return sum(end <= room for end in accumulate(map(_columns_of_one, text)))


def columns_of(text: str) -> int:
    """Return the number of columns in a terminal: wide characters of East Asia have two."""
    return len(text) if text.isascii() else sum(map(_columns_of_one, text))


def _columns_of_one(character: str) -> int:
    if unicodedata.category(character) in {"Mn", "Me", "Cf"}:  # marks and joiners
        return 0
    return 2 if unicodedata.east_asian_width(character) in {"F", "W"} else 1


def document(kind: str, items: Sequence[Mapping[str, Any]], **fields: object) -> dict[str, Any]:
    """Return a document for programs."""
    return {"apiVersion": DOCUMENT_VERSION, "kind": kind, **fields, "items": list(items)}


def print_document(body: Mapping[str, Any], output: str | None, names: Sequence[str] = ()) -> None:
    """Print a document, or an object of the API: as JSON, YAML, lines of JSON, or *names*."""
    if output == "name":
        text = "\n".join(names)
    elif output == "yaml":
        import yaml  # noqa: PLC0415  a twentieth of a second of each start

        text = yaml.safe_dump(dict(body), sort_keys=False, allow_unicode=True)
        if not all(line.isprintable() for line in text.split("\n")):  # such as U+202E
            text = yaml.safe_dump(dict(body), sort_keys=False)
        text = text.rstrip()
    elif output == "jsonl":
        text = "\n".join(map(json.dumps, body.get("items", [body])))
    else:
        text = json.dumps(body, indent=2)
    if text:
        click.echo(text)


def print_object(body: Body, output: str | None, done: str, dry_run: str | None = None) -> None:
    """Print an object that a command changed: in the format, else as `kind.group/name done`."""
    group = body["apiVersion"].partition("/")[0]
    name = f"{body['kind'].lower()}.{group}/{body['metadata'].get('name', '')}"
    if output is not None or dry_run is not None:
        metadata = {n: value for n, value in body["metadata"].items() if n != "managedFields"}
        print_document({**body, "metadata": metadata}, output or "yaml", [name])
    else:
        click.echo(f"{name} {done}")


@dataclass
class Live:
    """Lines that are redrawn on a terminal; elsewhere lines that changed are appended.

    Args:
        stream: standard error for progress, standard output for results.
        report_seconds: shortest time between two reports without a terminal.
    """

    stream: TextIO
    report_seconds: float = REPORT_SECONDS
    _drawn: int = field(default=0, init=False)
    _latest: tuple[str, ...] = field(default=(), init=False)
    _time: float = field(default=0.0, init=False)

    def show(self, lines: Iterable[str], *, final: bool = False) -> None:
        """Show *lines* in place of those before; the final ones are always printed."""
        text = tuple(lines)
        passed = time.monotonic() - self._time
        if has_terminal(self.stream):
            if text == self._latest or (passed < REDRAW_SECONDS and not final):
                return
            self.stream.write(f"\x1b[{self._drawn}F\x1b[J" if self._drawn else "")
            self.stream.writelines(f"{cut(line)}\n" for line in text)
            self._drawn = len(text)
        else:
            if text == self._latest or (passed < self.report_seconds and not final):
                return
            self.stream.writelines(f"{line}\n" for line in text if line not in self._latest)
        self.stream.flush()
        self._latest, self._time = text, time.monotonic()

    def clear(self) -> None:
        """Remove the lines from a terminal."""
        if has_terminal(self.stream) and self._drawn:
            self.stream.write(f"\x1b[{self._drawn}F\x1b[J")
            self.stream.flush()
        self._drawn, self._latest = 0, ()


def pairs(fields: Iterable[tuple[str, object]]) -> Iterator[str]:
    """Yield a line for each name and value of *fields*, the names in one column."""
    rows = [(name, clean(value)) for name, value in fields if value not in {None, ""}]
    size = max((len(name) for name, _ in rows), default=0)
    return (f"  {name:{size}}  {value}" for name, value in rows)
