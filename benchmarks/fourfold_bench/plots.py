"""Draws the plots of results; matplotlib is imported when one is drawn.

python -m fourfold_bench.plots RESULT.json ...    draws each result again, to a PNG file beside it
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SIZE: Final = (7.0, 4.2)
_DPI: Final = 110
_PLOTTED: Final = ("long-tail",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One curve: points by x."""

    label: str
    points: Mapping[float, float]
    style: str = "-"
    marker: str = ""


def draw(path: Path, curves: Sequence[Curve], *, title: str, x: str, y: str, from_zero: bool = False) -> None:
    """Draw curves into one plot, and write it to a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # without pyplot: no display, no global state
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    for curve in curves:
        places, values = list(curve.points), list(curve.points.values())
        axes.plot(places, values, curve.style, marker=curve.marker, label=curve.label)
    axes.set(title=title, xlabel=x, ylabel=y)
    if from_zero:
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    FigureCanvasAgg(figure)
    figure.savefig(path)


def main(files: Sequence[str]) -> int:
    """Draw the plots of result files; return the exit code."""
    from fourfold_bench.command import find

    for file in map(Path, files):
        document = json.loads(file.read_text(encoding="utf-8"))
        name = next((name for name in _PLOTTED if document["benchmark"].startswith(name)), "")
        if not name:
            print(f"{file}: {document['benchmark']} has no plot", file=sys.stderr)
            return 1
        find(name).plot(document, file.with_suffix(".png"))
        print(file.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
