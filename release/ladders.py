"""The plot of the page on ladders: the time until a message is dead, by the number of retries."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from datetime import timedelta

import yaml

from redrive.api.policy_defaults import DelayLadder
from release import CHECKOUT

PAGE = CHECKOUT / "docs" / "howto" / "choose-a-ladder.md"
PLOT = CHECKOUT / "docs" / "assets" / "ladders.svg"
RETRIES = 16
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 440, 50, 410
_DECADES = 5
"""The axis of time goes from one second to 100 000 s, about a day."""
_MARKS = {1: "1 s", 10: "10 s", 60: "1 min", 600: "10 min", 3_600: "1 h", 36_000: "10 h"}
_LABEL_HEIGHT = 21
_COLORS = {  # of light and dark pages
    "#0969da": "#4493f8",
    "#9a6700": "#d29922",
    "#cf222e": "#f85149",
    "#1a7f37": "#3fb950",
    "#8250df": "#ab7df8",
}
_DASHES = ("", "8 4", "2 4", "12 4 2 4", "5 3")
_HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 470" role="img" \
aria-labelledby="title description" font-family="system-ui, sans-serif" font-size="16">
  <title id="title">Time until a message is dead</title>
  <desc id="description">A line for each ladder of the table: the sum of all delays after 1 to 16 \
retries, on a logarithmic scale.</desc>
  <style>
    @media (prefers-color-scheme: dark) {{
      [fill="#f6f8fa"] {{ fill: #161b22 }} [fill="#24292f"] {{ fill: #e6edf3 }}
      [stroke="#d0d7de"] {{ stroke: #30363d }}
      {dark}
    }}
  </style>
  <rect width="640" height="470" rx="12" fill="#f6f8fa"/>
"""


def render() -> str:
    """Return the plot of the ladders in the table of the page."""
    dark = "\n      ".join(
        f'[fill="{light}"] {{ fill: {color} }} [stroke="{light}"] {{ stroke: {color} }}'
        for light, color in _COLORS.items()
    )
    return "".join([_HEAD.format(dark=dark), *_grid(), *_lines(), "</svg>\n"])


def rows() -> list[str]:
    """Return the manifests of ladders in the table of the page."""
    return re.findall(r"^\| `(\{.+?\}+)`", PAGE.read_text("utf-8"), re.MULTILINE)


def seconds_until_dead(manifest: str) -> list[float]:
    """Return the sum of delays after each number of retries."""
    ladder = DelayLadder.model_validate(yaml.safe_load(manifest)).to_ladder()
    total, sums = timedelta(), []
    for retry in range(1, RETRIES + 1):
        total += ladder.delay(retry)
        sums.append(total.total_seconds())
    return sums


def _x(retry: float) -> float:
    return _LEFT + (_RIGHT - _LEFT) * retry / RETRIES


def _y(seconds: float) -> float:
    return _BOTTOM - (_BOTTOM - _TOP) * math.log10(seconds) / _DECADES


def _grid() -> Iterator[str]:
    for seconds, text in _MARKS.items():
        y = _y(seconds)
        yield f'  <path d="M{_LEFT} {y:.0f}H{_RIGHT}" stroke="#d0d7de"/>\n'
        place = f'x="{_LEFT - 10}" y="{y + 5:.0f}" text-anchor="end"'
        yield f'  <text {place} fill="#24292f">{text}</text>\n'
    for retry in (1, *range(2, RETRIES + 1, 2)):
        place = f'x="{_x(retry):.0f}" y="{_BOTTOM + 22}" text-anchor="middle"'
        yield f'  <text {place} fill="#24292f">{retry}</text>\n'
    place = f'x="{(_LEFT + _RIGHT) / 2:.0f}" y="{_BOTTOM + 46}" text-anchor="middle"'
    yield f'  <text {place} fill="#24292f">maxRetries</text>\n'
    yield f'  <text x="{_LEFT - 60}" y="28" fill="#24292f">time until a message is dead</text>\n'


def _lines() -> Iterator[str]:
    ladders = sorted(
        ((seconds_until_dead(row), row) for row in rows()), key=lambda ladder: ladder[0][-1]
    )
    label_y = math.inf
    for (sums, row), color, dash in zip(ladders, _COLORS, _DASHES, strict=True):
        points = " ".join(f"{_x(n + 1):.1f},{_y(seconds):.1f}" for n, seconds in enumerate(sums))
        stroke = f'stroke="{color}" stroke-width="2.5" stroke-dasharray="{dash or "none"}"'
        yield f'  <polyline points="{points}" fill="none" {stroke}/>\n'
        label_y = min(_y(sums[-1]) + 5, label_y - _LABEL_HEIGHT)
        place = f'x="{_RIGHT + 10}" y="{label_y:.0f}"'
        yield f'  <text {place} fill="{color}">{_name(row)}</text>\n'


def _name(row: str) -> str:
    """Return a short name of a ladder: its kind and its first values."""
    [(kind, value)] = yaml.safe_load(row).items()
    match value:
        case dict():
            return f"{kind} {value['initial']} to {value['max']}"
        case list():
            return f"{kind} {', '.join(value)}"
    return f"{kind} {value}"
