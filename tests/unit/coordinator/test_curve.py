"""The picture of a run, and at which step it shows a value."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from fourfold import metrics as m
from fourfold_coordinator.reporting.report import draw_curve, draw_scores, points_of
from fourfold_coordinator.state.eval_results import EvalRow
from fourfold_coordinator.state.ledger import StepRow
from tests.support.eval_results import make_result


def step(number: int, **metrics: Any) -> StepRow:
    return StepRow(
        step=number, policy_version=number, skipped_reason="", data_position=0, seconds=1.0,
        metrics={m.REWARD_MEAN: number / 10, **{name.replace("__", "/"): value for name, value in metrics.items()}},
    )  # fmt: skip


def test_samples_are_shown_at_the_step_that_trains_on_them() -> None:
    steps = [
        step(1),
        step(2, train__policy_lag_mean=0.5),
        step(3, reward__mean=None),
        step(4, train__policy_lag_mean=2),
    ]
    assert points_of(steps, m.REWARD_MEAN) == [(1, 0.1), (2, 0.2), (4, 0.4)]
    assert points_of(steps, m.REFERENCE_KL) == []


def test_bars_reach_to_the_bounds_of_an_interval() -> None:
    axes = Figure().subplots()
    sets = (replace(make_result("math", score=0.9), interval=(0.6, 0.96)),)
    rows = [
        EvalRow(0, 0.9, 0.18, 8, 0, [], sets),
        EvalRow(2, 0.5, 0.25, 8, 0, []),  # an earlier release wrote no interval
        EvalRow(4, 0.5, None, 8, 0, []),
    ]
    draw_scores(axes, [], rows, "toy")
    bars: Any = axes.collections[0]
    ends = [segment[:, 1].tolist() for segment in bars.get_segments()]
    assert ends == [pytest.approx(bounds) for bounds in ([0.6, 0.96], [0.25, 0.75], [0.5, 0.5])]


def test_the_held_out_score_of_rows_is_drawn_as_their_loss() -> None:
    axes = Figure().subplots()
    row = EvalRow(0, -2.0, 0.5, 8, 0, [], (replace(make_result("rows", score=-2.0), interval=(-2.2, -1.5)),))
    draw_scores(axes, [(1, 1.9)], [row], "toy", measure="loss")
    bars: Any = axes.collections[0]
    assert bars.get_segments()[0][:, 1].tolist() == pytest.approx([1.5, 2.2])
    assert axes.get_legend_handles_labels()[1] == ["training loss", "held-out loss, 95 % interval"]


def test_the_x_axis_has_whole_training_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []

    def save(figure: Figure, path: Path, **_: object) -> None:
        drawn.append(figure)
        path.touch()

    monkeypatch.setattr(Figure, "savefig", save)
    steps = [step(number, length__response_mean=2.0, train__policy_lag_mean=0.5) for number in (1, 2, 3)]
    draw_curve(tmp_path / "curve.png", steps, [EvalRow(0, 0.3, None, 8, 0, [])], title="toy")
    scores, panel = drawn[0].axes
    assert scores.get_legend_handles_labels()[1][0] == "training reward"
    pairs = [replace(each, metrics={m.PAIR_ACCURACY: 0.5}) for each in steps]
    draw_curve(tmp_path / "curve.png", pairs, [], title="pairs")
    (only,) = drawn[1].axes
    assert only.get_legend_handles_labels()[1] == ["training accuracy"] and only.get_ylabel() == "accuracy"
    assert scores.get_xlabel() == "training steps"
    for axes, first in ((scores, 0), (panel, 1)):
        ticks = [tick for tick in axes.get_xticks() if first <= tick <= 3]
        assert ticks == list(range(first, 4))


def test_a_picture_has_a_panel_for_each_metric_of_the_run(tmp_path: Path) -> None:
    sets = tuple(make_result(name) for name in ("math", "code"))
    evals = [EvalRow(step=2, score=0.3, half_width=None, answer_count=8, missing_count=0, answers=[], sets=sets)]
    names = ("length__response_mean", "kl__ref", "mismatch__logprob_diff_mean", "time__step")
    heights = []
    for count in (0, 1, 4):
        path = tmp_path / f"{count}.png"
        draw_curve(path, [step(1, **dict.fromkeys(names[:count], 2.0)), step(2)], evals, title="toy")
        picture = path.read_bytes()
        assert picture.startswith(b"\x89PNG")
        heights.append(int.from_bytes(picture[20:24], "big"))
    assert heights[0] < heights[1] == heights[2]
    draw_curve(tmp_path / "empty.png", [], [], title="a run that had nothing to draw")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.png", "1.png", "4.png", "empty.png"]


@pytest.mark.parametrize(("count", "marker"), [(1, "."), (2, "")])
def test_a_single_point_is_seen(count: int, marker: str) -> None:
    axes = Figure().subplots()
    draw_scores(axes, [(number, 0.5) for number in range(count)], [], "toy")
    assert axes.lines[0].get_marker() == marker
