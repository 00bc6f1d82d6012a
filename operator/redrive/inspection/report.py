"""Report of a reading as one HTML page, which needs neither a network nor a script.

The page is a tree of elements that the standard library writes: it escapes every text and every
value of an attribute. Its content security policy permits the style of this module and nothing
else, so that no text of a message could be of effect, even if it were not escaped.
"""

from __future__ import annotations

import base64
import bisect
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Self
from xml.etree import ElementTree as ET

from redrive.api.inspection import InspectedMessages
from redrive.inspection.reader import MessageReading
from redrive.inspection.record import Recorder
from redrive.inspection.summary import CauseGroup, Summary
from redrive.policy.values import size_text, time_text

BINS = 48
"""Bars of the plot of arrivals."""
_COLORS = 6
"""Causes with a colour of their own; all others share one."""
_TOP = 10
REPLAY_TITLES = ("Replay", "Mode", "Result", "Moved", "Refused", "Dead again", "Ended")
_REPLAY_KINDS = ("name", "wide", "result", "number", "number wide", "number", "time wide")
_MOST_REPLAYS = 30
_MOST_CAUSES = 50
_LONGEST_TEXT = 200
_HOUR = 3_600_000
_DAY = 24 * _HOUR
_EARLIEST, _LATEST = 3_650 * _DAY, _DAY
"""Ages of messages that are plotted, in milliseconds; a producer may write any time."""
_AGES = (
    (_HOUR, "under 1 hour"),
    (6 * _HOUR, "1 to 6 hours"),
    (_DAY, "6 to 24 hours"),
    (7 * _DAY, "1 to 7 days"),
    (30 * _DAY, "7 to 30 days"),
    (_EARLIEST, "over 30 days"),
)
_SIZES = (
    (2**8, "under 256 B"),
    (2**10, "256 B to 1 KiB"),
    (2**14, "1 to 16 KiB"),
    (2**18, "16 to 256 KiB"),
    (2**20, "256 KiB to 1 MiB"),
    (2**63, "over 1 MiB"),
)
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6675; --line: #d9dee5; --card: #ffffff;
  --page: #f4f6f8; --bar: #0b6bb3; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --soft: #9aa6b4; --line: #333c48;
  --card: #1b212a; --page: #12161c; --bar: #4ba3e3; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.45 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 20px 16px 48px; }
h1 { font-size: 1.35rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin: 0 0 10px; }
p { margin: 4px 0; } .soft { color: var(--soft); overflow-wrap: anywhere; }
section, .tile { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
section { padding: 14px 16px; margin-top: 14px; min-width: 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(120px, 1fr)); gap: 10px;
  margin-top: 14px; }
.tile { padding: 10px 14px; } .tile b { display: block; font-size: 1.4rem; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr));
  gap: 0 14px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: 0.85rem; }
th, td { padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td { overflow-wrap: anywhere; } tr:last-child td { border-bottom: 0; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 0.85rem; }
.cause { min-width: 190px; } .name { min-width: 110px; } .result { min-width: 118px; }
th.number { white-space: normal; }
.time { white-space: nowrap; } .label { width: 42%; } .bar { width: 44%; padding-top: 9px; }
svg { display: block; width: 100%; } .bar svg { height: 12px; } .plot { height: 200px; }
.plot, .axis { border-bottom: 1px solid var(--line); }
.axis { display: flex; justify-content: space-between; border: 0; font-size: 0.85rem; }
.chip { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 7px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; margin-top: 8px; font-size: 0.9rem;
  overflow-wrap: anywhere; }
rect { fill: var(--bar); }
.c0 { fill: #0b6bb3; background: #0b6bb3; } .c1 { fill: #e08a00; background: #e08a00; }
.c2 { fill: #00916b; background: #00916b; } .c3 { fill: #c35c97; background: #c35c97; }
.c4 { fill: #45aee0; background: #45aee0; } .c5 { fill: #cf4d17; background: #cf4d17; }
.c6 { fill: #8b95a1; background: #8b95a1; }
@media (max-width: 720px) { .wide { display: none; } .cause { min-width: 150px; }
  .time { white-space: normal; min-width: 92px; } main { padding: 14px 10px 32px; } }
@media print { body { background: none; } section { break-inside: avoid; } }
"""


@dataclass(frozen=True)
class ReportFacts:
    """Facts of a reading that its summary does not have.

    Attributes:
        title: words for the messages, such as `dead letters`.
        topic: name of the topic.
        at: time of the report.
        lines: sentences about the extent of the reading.
        show_key: returns a key as it may be shown.
        replays: past Replays of the policy, as rows of `REPLAY_TITLES`.
    """

    title: str
    topic: str
    at: datetime
    lines: Sequence[str]
    show_key: Callable[[str], str]
    replays: Sequence[Sequence[str]] = ()

    @classmethod
    def of(
        cls,
        reading: MessageReading,
        source: InspectedMessages,
        recorder: Recorder,
        at: datetime,
        replays: Sequence[Sequence[str]] = (),
    ) -> Self:
        """Return the facts of a reading that has ended."""
        extent = f"{reading.planned} of {reading.total} entries were read, with {reading.messages}"
        return cls(
            source.words,
            str(reading.topic.name),
            at,
            [
                f"{extent} messages; {reading.matched} of them are selected.",
                f"{reading.malformed_entries} entries can be shown by no client.",
                "Clear text: do not share." if recorder.reveals else "Keys and texts are masked.",
            ],
            str if recorder.reveals else recorder.hash_key,
            replays,
        )


def render_report(facts: ReportFacts, summary: Summary) -> str:
    """Return the page."""
    groups = summary.ordered
    root = ET.Element("html", lang="en")
    head = ET.SubElement(root, "head")
    ET.SubElement(head, "meta", charset="utf-8")
    _meta(head, "http-equiv", "Content-Security-Policy", _content_security_policy())
    _meta(head, "name", "viewport", "width=device-width, initial-scale=1")
    _meta(head, "name", "referrer", "no-referrer")
    _add(head, "title", f"{facts.title} of {facts.topic}")
    ET.SubElement(head, "style").text = _STYLE
    main = ET.SubElement(ET.SubElement(root, "body"), "main")
    _add(main, "h1", f"{facts.title.capitalize()} of {facts.topic}")
    for line in (f"Read at {_minute(_milliseconds(facts.at))}.", *facts.lines):
        _add(main, "p", line, "soft")
    _add_tiles(main, summary, len(groups))
    _add_causes(main, groups)
    _add_arrivals(main, summary, _milliseconds(facts.at))
    if facts.replays:
        rows = facts.replays[:_MOST_REPLAYS]
        _add_table(_section(main, "Replays of the policy"), REPLAY_TITLES, _REPLAY_KINDS, rows)
    grid = ET.SubElement(main, "div", {"class": "grid"})
    _add_figures(grid, facts, summary, _milliseconds(facts.at))
    return f"<!DOCTYPE html>\n{ET.tostring(root, encoding='unicode', method='html')}\n"


def _content_security_policy() -> str:
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def _add_tiles(main: ET.Element, summary: Summary, causes: int) -> None:
    tiles = ET.SubElement(main, "div", {"class": "tiles"})
    messages = summary.messages
    for number, words in (
        (str(messages), "messages"),
        (str(causes), "causes"),
        (str(len(summary.keys)), "different keys"),
        (str(messages - summary.replays[0]), "replayed, and back"),
        (size_text(summary.payload_bytes // messages) if messages else "-", "average size"),
    ):
        tile = ET.SubElement(tiles, "div", {"class": "tile"})
        _add(tile, "b", number)
        _add(tile, "span", words, "soft")


def _add_causes(main: ET.Element, groups: Sequence[CauseGroup]) -> None:
    section = _section(main, "Causes")
    titles = ("Messages", "Cause", "First", "Last", "Replayed", "Consumers", "Example")
    kinds = ("number", "cause", "time wide", "time", "number wide", "wide", "wide")
    shown = groups[:_MOST_CAUSES]
    rows = [
        (
            str(group.messages),
            "",
            _minute(group.first),
            _minute(group.last),
            str(group.replayed),
            ", ".join(name for name, _ in group.consumers.most_common(3)),
            group.example,
        )
        for group in shown
    ]
    body = _add_table(section, titles, kinds, rows)
    for rank, (group, row) in enumerate(zip(shown, body, strict=True)):
        cause = row[1]
        ET.SubElement(cause, "span", {"class": f"chip c{min(rank, _COLORS)}"})
        _add(cause, "span", group.name)
        if group.fingerprint:
            _add(cause, "div", group.fingerprint, "soft code")
    if len(groups) > _MOST_CAUSES:
        _add(section, "p", f"and {len(groups) - _MOST_CAUSES} more causes", "soft")


def _add_arrivals(main: ET.Element, summary: Summary, at: int) -> None:
    """Add bars of messages over time; colours are those of the table of causes."""
    section, groups = _section(main, "Arrivals over time"), summary.ordered
    series = [_plausible(group, summary.interval, at) for group in groups]
    starts = [time for times in series for time in times]
    if not starts:
        _add(section, "p", "No message has a plausible time.", "soft")
        return
    first, last = min(starts), max(starts)
    width = max(1, (last - first + BINS) // BINS)
    counts = [[0] * (_COLORS + 1) for _ in range(BINS)]
    for rank, times in enumerate(series):
        for time, count in times.items():
            counts[(time - first) // width][min(rank, _COLORS)] += count
    highest = max(map(sum, counts))
    _add(section, "p", f"At most {highest} messages in {_duration(width)}.", "soft")
    plot = _svg(section, f"0 0 {BINS} {highest}", "plot", "Messages over time by cause")
    for number, stack in enumerate(counts):
        if any(stack):
            bar, height = ET.SubElement(plot, "g"), highest
            _add(bar, "title", f"{_minute(first + number * width)}: {sum(stack)} messages")
            for rank, count in enumerate(stack):
                height -= count
                if count:
                    _rect(bar, number + 0.08, height, 0.84, count, f"c{rank}")
    axis = ET.SubElement(section, "div", {"class": "axis soft"})
    _add(axis, "span", _minute(first))
    _add(axis, "span", _minute(last))
    legend = ET.SubElement(section, "div", {"class": "legend"})
    for rank, group in enumerate(groups[: _COLORS + 1]):
        item = ET.SubElement(legend, "span")
        ET.SubElement(item, "span", {"class": f"chip c{rank}"})
        _add(item, "span", group.name if rank < _COLORS else "other causes")
    missing = summary.messages - sum(count for times in series for count in times.values())
    if missing:
        _add(section, "p", f"{missing} messages have a time that can't be theirs.", "soft")


def _add_figures(grid: ET.Element, facts: ReportFacts, summary: Summary, at: int) -> None:
    ages = [
        (at - time, count)
        for group in summary.groups.values()
        for time, count in _plausible(group, summary.interval, at).items()
    ]
    _add_bars(grid, "Age", _histogram(ages, _AGES))
    sizes = [(2**bits - 1, count) for bits, count in summary.sizes.items()]
    _add_bars(grid, "Sizes of payloads", _histogram(sizes, _SIZES))
    keys = [(facts.show_key(key), count) for key, count in summary.keys.most_common(_TOP)]
    without = [("(without key)", summary.without_key)] if summary.without_key else []
    _add_bars(grid, f"Keys with most messages, of {len(summary.keys)}", [*keys, *without])
    partitions = sorted(summary.partitions.items())
    _add_bars(
        grid,
        "Partitions",
        [(f"partition {n}" if n >= 0 else "no partitions", count) for n, count in partitions],
    )
    replays = sorted(summary.replays.items())[:_TOP]
    _add_bars(
        grid,
        "Replays so far",
        [(f"{n} replay{'s' * (n > 1)}" if n else "never replayed", count) for n, count in replays],
    )
    _add_bars(grid, "Back after the Replay", summary.died_again.most_common(_TOP))


def _add_bars(grid: ET.Element, title: str, rows: Sequence[tuple[str, int]]) -> None:
    section = _section(grid, title)
    if not rows:
        _add(section, "p", "none", "soft")
        return
    highest = max(1, *(count for _, count in rows))
    body = ET.SubElement(ET.SubElement(section, "table"), "tbody")
    for label, count in rows:
        row = ET.SubElement(body, "tr")
        _add(row, "td", label, "label")
        cell = ET.SubElement(row, "td", {"class": "bar"})
        _rect(_svg(cell, "0 0 100 1", "", f"{label}: {count}"), 0, 0, 100 * count / highest, 1, "")
        _add(row, "td", str(count), "number")


def _add_table(
    section: ET.Element, titles: Sequence[str], kinds: Sequence[str], rows: Iterable[Sequence[str]]
) -> ET.Element:
    """Add a table; return its body. Cells have the classes of their column."""
    table = ET.SubElement(ET.SubElement(section, "div", {"class": "scroll"}), "table")
    head = ET.SubElement(ET.SubElement(table, "thead"), "tr")
    for title, kind in zip(titles, kinds, strict=True):
        _add(head, "th", title, kind)
    body = ET.SubElement(table, "tbody")
    for cells in rows:
        row = ET.SubElement(body, "tr")
        for cell, kind in zip(cells, kinds, strict=True):
            _add(row, "td", cell, kind)
    return body


def _section(parent: ET.Element, title: str) -> ET.Element:
    section = ET.SubElement(parent, "section")
    _add(section, "h2", title)
    return section


def _add(parent: ET.Element, tag: str, text: str, kind: str = "") -> None:
    """Add an element with a text, without control characters."""
    element = ET.SubElement(parent, tag, {"class": kind} if kind else {})
    element.text = _printable(text)


def _meta(head: ET.Element, kind: str, name: str, content: str) -> None:
    ET.SubElement(head, "meta", {kind: name, "content": content})


def _svg(parent: ET.Element, box: str, kind: str, label: str) -> ET.Element:
    attributes = {"viewBox": box, "preserveAspectRatio": "none", "role": "img"}
    label = _printable(label)
    return ET.SubElement(parent, "svg", attributes | {"class": kind, "aria-label": label})


def _rect(  # noqa: PLR0913, PLR0917  a rectangle and its colour
    parent: ET.Element, x: float, y: float, width: float, height: float, kind: str
) -> None:
    numbers = {"x": x, "y": y, "width": width, "height": height}
    attributes = {name: f"{number:g}" for name, number in numbers.items()}
    ET.SubElement(parent, "rect", attributes | ({"class": kind} if kind else {}))


def _printable(text: str) -> str:
    shown = "".join(c if c.isprintable() else " " for c in text[: _LONGEST_TEXT + 1])
    return shown if len(shown) <= _LONGEST_TEXT else f"{shown[: _LONGEST_TEXT - 1]}…"


def _histogram(
    values: Iterable[tuple[int, int]], buckets: Sequence[tuple[int, str]]
) -> list[tuple[str, int]]:
    """Sum numbers of values by the first bucket that is above the value."""
    bounds = [bound for bound, _ in buckets]
    counts = [0] * len(buckets)
    for value, number in values:
        counts[min(bisect.bisect_right(bounds, value), len(buckets) - 1)] += number
    return [(label, count) for (_, label), count in zip(buckets, counts, strict=True)]


def _plausible(group: CauseGroup, interval: int, at: int) -> dict[int, int]:
    """Return the number of messages by plausible time, the start of each interval."""
    times = {max(group.first, n * interval): count for n, count in group.times.items()}
    return {t: count for t, count in times.items() if at - _EARLIEST <= t <= at + _LATEST}


def _milliseconds(instant: datetime) -> int:
    return round(instant.astimezone(UTC).timestamp() * 1_000)


def _minute(milliseconds: int) -> str:
    text = time_text(milliseconds)
    return "-" if text is None else f"{text[:10]} {text[11:16]} UTC"


def _duration(milliseconds: int) -> str:
    seconds = max(1, round(milliseconds / 1_000))
    for size, unit in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds} seconds" if seconds > 1 else "1 second or less"
