"""Draws curve.png: scores, length, KL, mismatch and time over training steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from fourfold import metrics as m

from ..state.eval_results import EvalRow
from ..state.ledger import StepRow

# Title and metric of each small panel. Panels without values are left out.
_PANELS: Final = (
    ("tokens of a completion", m.RESPONSE_LENGTH),
    ("KL to the reference, nats", m.REFERENCE_KL),
    ("|trainer - engine|, nats", m.MISMATCH_MEAN),
    ("seconds of a step", m.TIME_STEP),
)
_INCHES: Final = 7.0, 4.0
_PANEL_INCHES: Final = 1.8


def draw_curve(path: Path, steps: Sequence[StepRow], evals: Sequence[EvalRow], *, title: str) -> None:
    """Draw the run, and replace the file `path` by the picture.

    The x axis has the training steps of metrics.jsonl. At step n are the samples that it trains on, and the evaluation
    of the weights that it makes. The evaluation before the first step is at 0.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # pyplot would need a display and has global state
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    panels = [(text, points) for text, name in _PANELS if (points := points_of(steps, name))]
    height = _INCHES[1] + (_PANEL_INCHES if panels else 0)
    figure = Figure(figsize=(_INCHES[0], height), dpi=120, layout="constrained")
    rows: Any = figure.subfigures(2, 1, height_ratios=[_INCHES[1], _PANEL_INCHES]) if panels else [figure]
    draw_scores(rows[0].subplots(), points_of(steps, m.REWARD_MEAN), evals, title)
    if panels:
        for axes, (text, points) in zip(rows[1].subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            axes.plot(*zip(*points, strict=True), color="tab:gray", marker=_marker(points))
            axes.set_title(text, fontsize=7)
            axes.tick_params(labelsize=6)
            axes.grid(alpha=0.3)
    for axes in figure.axes:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    FigureCanvasAgg(figure)
    fresh = path.with_name(path.name + ".new")
    figure.savefig(fresh, format="png")
    fresh.replace(path)


def draw_scores(axes: Any, reward: Sequence[tuple[int, float]], evals: Sequence[EvalRow], title: str) -> None:
    if reward:
        axes.plot(
            *zip(*reward, strict=True), color="tab:blue", alpha=0.7, label="training reward", marker=_marker(reward)
        )
    if evals:
        axes.errorbar(
            [row.step for row in evals],
            [row.score for row in evals],
            yerr=list(zip(*(_distances(row) for row in evals), strict=True)),
            color="tab:orange",
            marker="o",
            capsize=4,
            label="held-out score, 95 % interval",
        )
    names = dict.fromkeys(result.name for row in evals for result in row.sets)
    for name in names if len(names) > 1 else ():
        points = [(row.step, result.score) for row in evals for result in row.sets if result.name == name]
        axes.plot(*zip(*points, strict=True), marker=".", linewidth=1, alpha=0.7, label=name)
    axes.set(title=title, xlabel="training steps", ylabel="mean score")
    axes.grid(alpha=0.3)
    if reward or evals:
        axes.legend(loc="lower right")


def _marker(points: Sequence[object]) -> str:
    """Return the marker of a line; without a marker, a single point is invisible."""
    return "." if len(points) == 1 else ""


def _distances(row: EvalRow) -> tuple[float, float]:
    """Return the distances of a score to the bounds of its interval."""
    low, high = row.bounds or (row.score, row.score)
    return row.score - low, high - row.score


def points_of(steps: Sequence[StepRow], name: str) -> list[tuple[int, float]]:
    """Return the steps that have a metric, with its values."""
    return [(row.step, float(value)) for row in steps if (value := row.metrics.get(name)) is not None]
