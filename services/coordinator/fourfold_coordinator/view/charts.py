"""Draws charts as SVG: lines over steps, and bars over time. No style attributes, which the pages' policy forbids.

Each line chart has its values in the attribute `data-chart`, from which view.js shows the value under the pointer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup, escape

_MAX_POINTS: Final = 400  # most points of a line; of more, the smallest and the largest of each part are drawn
_WIDTH: Final = 400
_HEIGHT: Final = 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 8, 8, 20  # margins of a line chart
_ROW: Final = 18  # height of a bar's row
_LABEL: Final = 170  # width of the labels of rows
_BARS: Final = 760
COLORS: Final = 8
"""Lines have the classes c0 ... c7, in turn; view.css has their colors."""
PHASES: Final = (
    "generate", "score", "reference", "train", "update", "checkpoint", "export", "reward", "publish", "sleep", "wake",
    "evaluate", "other",
)  # fmt: skip
"""A bar has the class of its phase, or `other`."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a chart; `bars` are intervals around its points, or empty."""

    name: str
    points: Sequence[Point]
    bars: Sequence[tuple[float, float] | None] = ()


def line_chart(lines: Sequence[Line]) -> Markup:
    """Return a chart of lines over steps; an empty text if there is no point."""
    drawn = [(index, line, thin_out(line.points)) for index, line in enumerate(lines) if line.points]
    if not drawn:
        return Markup("")
    xs = [x for _, _, points in drawn for x, _ in points]
    ys = [y for _, _, points in drawn for _, y in points]
    ys += [bound for _, line, _ in drawn for _, bar in _intervals(line) for bound in bar]
    x_scale, y_scale = (
        _Scale(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT, room=0.5),
        _Scale(min(ys), max(ys), _HEIGHT - _BOTTOM, _TOP),
    )
    parts = [*_axes(x_scale, y_scale)]
    for index, line, points in drawn:
        color = f"c{index % COLORS}"
        path = " ".join(f"{x_scale(x):.1f},{y_scale(y):.1f}" for x, y in points)
        parts.append(f'<polyline class="line {color}" points="{path}"/>')
        if len(points) <= 40:
            parts += [
                f'<circle class="dot {color}" cx="{x_scale(x):.1f}" cy="{y_scale(y):.1f}" r="2"/>' for x, y in points
            ]
        for x, bar in _intervals(line):
            low, high = map(y_scale, bar)
            ends = f'x1="{x_scale(x):.1f}" x2="{x_scale(x):.1f}" y1="{low:.1f}" y2="{high:.1f}"'
            parts.append(f'<line class="bar {color}" {ends}/>')
    data = json.dumps([{"name": line.name, "points": _places(points, x_scale, y_scale)} for _, line, points in drawn])
    body = "".join(parts)
    return Markup('<svg class="chart" viewBox="0 0 {} {}" data-chart="{}">{}</svg>').format(
        _WIDTH, _HEIGHT, data, Markup(body)
    )


def gantt(rows: Sequence[tuple[str, Mapping[str, Sequence[Point]]]], seconds: float) -> Markup:
    """Return bars over `seconds`: one row for each label, with the intervals of each phase."""
    height = _ROW * len(rows) + _BOTTOM
    scale = _Scale(0.0, max(seconds, 1e-3), _LABEL, _LABEL + _BARS)
    parts = [
        f'<line class="grid" x1="{scale(t):.1f}" x2="{scale(t):.1f}" y1="0" y2="{height - _BOTTOM}"/>'
        f'<text class="tick" x="{scale(t):.1f}" y="{height - 6}" text-anchor="middle">{short_number(t)} s</text>'
        for t in _ticks(0.0, max(seconds, 1e-3), 8)
    ]
    for index, (label, phases) in enumerate(rows):
        top = index * _ROW
        text = escape(label if len(label) <= 26 else f"{label[:25]}\N{HORIZONTAL ELLIPSIS}")
        parts.append(f'<text class="label" x="{_LABEL - 8}" y="{top + 13}" text-anchor="end">{text}</text>')
        for phase, intervals in phases.items():
            kind = kind_of(phase)
            for begin, end in intervals:
                begin, end = max(begin, 0.0), min(end, seconds)
                if end < begin:
                    continue
                width = max(scale(end) - scale(begin), 0.5)
                title = f"{escape(label)}: {escape(phase)}, {begin:.2f} to {end:.2f} s ({end - begin:.2f} s)"
                parts.append(
                    f'<rect class="p-{kind}" x="{scale(begin):.1f}" y="{top + 2}" width="{width:.1f}" '
                    f'height="{_ROW - 4}"><title>{title}</title></rect>'
                )
    body = "".join(parts)
    return Markup('<svg class="gantt" viewBox="0 0 {} {}">{}</svg>').format(_LABEL + _BARS + 24, height, Markup(body))


def kind_of(phase: str) -> str:
    """Return the CSS class of a phase's bars."""
    return phase if phase in PHASES else "other"


def thin_out(points: Sequence[Point]) -> list[Point]:
    """Return at most about 400 points, with the smallest and the largest value of each part of the line."""
    if len(points) <= _MAX_POINTS:
        return list(points)
    size, found = math.ceil(2 * len(points) / _MAX_POINTS), list[Point]()
    for begin in range(0, len(points), size):
        part = points[begin : begin + size]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        found += sorted(ends)
    return found


class _Scale:
    """Maps values to places; equal ends get some room, by default 5 % of the value."""

    def __init__(self, low: float, high: float, first: float, last: float, *, room: float = 0.0) -> None:
        room = (room or abs(high) * 0.05 or 0.5) if high == low else 0.0
        self.low, self.high, self.first, self.last = low - room, high + room, first, last

    def __call__(self, value: float) -> float:
        return self.first + (value - self.low) / (self.high - self.low) * (self.last - self.first)


def _axes(x_scale: _Scale, y_scale: _Scale) -> Iterator[str]:
    for value in _ticks(y_scale.low, y_scale.high, 4):
        place = y_scale(value)
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>'
        yield f'<text class="tick" x="{_LEFT - 4}" y="{place + 3:.1f}" text-anchor="end">{short_number(value)}</text>'
    yield f'<text class="tick" x="{_LEFT - 12}" y="{_HEIGHT - 6}" text-anchor="end">step</text>'
    for value in _ticks(x_scale.low, x_scale.high, 6, least=1.0):
        place = x_scale(value)
        yield f'<text class="tick" x="{place:.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{value:.0f}</text>'


def _ticks(low: float, high: float, count: int, *, least: float = 0.0) -> list[float]:
    """Return round numbers between two values, about `count`; `least` is the smallest distance of two of them."""
    raw = max((high - low) / count, least)
    power = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    step = next((power * factor for factor in (1, 2, 5, 10) if power * factor >= raw), raw)  # below 1e-308: raw
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, first + 2 * count + 2) if number * step <= high + 1e-9 * step]


def short_number(value: float) -> str:
    """Return a number in 4 digits, a large one as thousands (k), millions (M) or billions (G)."""
    for power, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if max(power, 9999.5) <= abs(value) < 1e13:
            return f"{value / power:.4g}{unit}"
    return f"{value:.4g}" if value else "0"


def _intervals(line: Line) -> list[tuple[float, tuple[float, float]]]:
    bars = zip(line.points, line.bars, strict=False)
    return [(x, bar) for (x, _), bar in bars if bar is not None and all(map(math.isfinite, bar))]


def _places(points: Sequence[Point], x_scale: _Scale, y_scale: _Scale) -> list[tuple[float, float, float, str]]:
    return [(round(x_scale(x), 1), round(y_scale(y), 1), x, short_number(y)) for x, y in points]
