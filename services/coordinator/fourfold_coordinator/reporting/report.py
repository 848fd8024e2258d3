"""Writes report.json and curve.png.

report.json (times in seconds, sizes in bytes):

    name, seed, steps            of the recipe; steps done
    seconds                      of the whole run over all coordinator processes, lost work included; the last 5 s of a
                                 coordinator that was killed are missing
    resumes                      coordinator processes that resumed the run (`fourfold run --resume`)
    restarts                     {service: times}: processes that replaced a dead one during the run
    recoveries                   {"time", "step", "reason", "trainer_kept"} each, the newest 100: the run continued
                                 after `step`; with trainer_kept = false the trainer loaded the checkpoint of that step
    seconds_per_step             mean, from the first prompt of a step to its published weights
    peak_memory_bytes            largest sum of the PSS of the run's processes on the coordinator's machine
    peak_memory_without          services that are not in that sum: on other machines, or in other containers
    eval_before, eval_after      {"step", "score", "half_width", "interval", "n", "missing", "sets"} or null; intervals
                                 of 95 %, clustered by task group; each of the sets as in `state/eval_results.py`
    evals                        all of them
    began_from                   models that the run began with: {part: {"source", "sha256", "run", "began_from"}}; the
                                 last two if a run exported the model (`reporting/lineage.py`)
    answers_before, answers_after  ten sampled answers to the same held-out prompts
    asynchrony                   null if asynchrony.max_policy_lag was always 0, else: max_policy_lag at the end;
                                 lag_limit of the last step; token_lag_mean, token_lag_max; trainer_wait_fraction,
                                 rollout_wait_fraction of the time of all steps; stale_token_fraction, mean over the
                                 steps; length_bias of the run; lag_changes: {"step", "text"} each, with their reasons
    skipped_steps, dropped       steps that did not change the weights; dropped samples by reason
    faults                       errors of services: {"peer", "kind", "count", "first"} each: member, reason in
                                 UPPER_SNAKE_CASE, number of failed calls and samples, text of the first
    scorers                      changes: {"time", "scorer", "change", "services"} each, those of `fourfold reward`;
                                 steps: {"first", "last", "scorers"} each: the steps in a row that the same scorers
                                 scored, with the scored samples by [[reward]] and name@version
    diagnosis                    findings: {"text", "steps", "first", "last"} each, the most frequent first
    policy_version, model        of the last weights; folder of the export
    model_ema                    folder of the export of their moving average, or null
    critic                       folder of the export of the critic, or null
    reward_model                 true if the model scores texts and writes none
    step_separator               text after each step that a process reward model scores; empty for other models
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from fourfold import metrics as m
from fourfold.config.schema import Config

from ..launch.run_names import REPORT_FILE
from ..state.eval_results import EvalRow
from ..state.files import replace_file
from ..state.ledger import Ledger, StepRow
from .diagnosis import summarize_findings
from .run_totals import RunTotals

BEGAN_FROM = "began_from"

# Title and metric of each small panel. Panels without values are left out.
_PANELS: Final = (
    ("accuracy on pairs", m.PAIR_ACCURACY),
    ("margin of pairs", m.PAIR_MARGIN),
    ("accuracy on labels", m.KTO_ACCURACY),
    ("distance to the reference, nats", m.KTO_DISTANCE),
    ("KL to the teacher, nats", m.TEACHER_KL),
    ("tokens of a completion", m.RESPONSE_LENGTH),
    ("KL to the reference, nats", m.REFERENCE_KL),
    ("|trainer - engine|, nats", m.MISMATCH_MEAN),
    ("seconds of a step", m.TIME_STEP),
)
# Training metric that the curve shows beside each held-out measure. Without evaluations, the first one with values.
_TRAINING: Final = (
    ("score", m.REWARD_MEAN),
    ("loss", m.NLL),
    ("accuracy", m.PAIR_ACCURACY),
    ("accuracy", m.SCORE_ACCURACY),
    ("step accuracy", m.SCORE_ACCURACY),
    ("label accuracy", m.KTO_ACCURACY),
    ("pair loss", m.POLICY_LOSS),
    ("label loss", m.POLICY_LOSS),
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

    main = dict[str, str]()
    for each, name in _TRAINING:
        if points_of(steps, name):
            main.setdefault(each, name)
    measure = evals[-1].measure if evals else next(iter(main), "score")
    shown = main.get(measure, "")
    panels = [(text, points) for text, name in _PANELS if name != shown and (points := points_of(steps, name))]
    height = _INCHES[1] + (_PANEL_INCHES if panels else 0)
    figure = Figure(figsize=(_INCHES[0], height), dpi=120, layout="constrained")
    rows: Any = figure.subfigures(2, 1, height_ratios=[_INCHES[1], _PANEL_INCHES]) if panels else [figure]
    draw_scores(rows[0].subplots(), points_of(steps, shown), evals, title, measure=measure)
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


def draw_scores(
    axes: Any, training: Sequence[tuple[int, float]], evals: Sequence[EvalRow], title: str, *, measure: str = "score"
) -> None:
    """Draw the rewards of the training steps and the held-out scores; with another `measure`, what both have of it."""
    is_loss = measure.endswith("loss")
    if training:
        label = "training reward" if measure == "score" else f"training {measure}"
        axes.plot(*zip(*training, strict=True), color="tab:blue", alpha=0.7, label=label, marker=_marker(training))
    if evals:
        distances = [_distances(row)[:: -1 if is_loss else 1] for row in evals]
        axes.errorbar(
            [row.step for row in evals],
            [-row.score if is_loss else row.score for row in evals],
            yerr=list(zip(*distances, strict=True)),
            color="tab:orange",
            marker="o",
            capsize=4,
            label=f"held-out {measure}, 95 % interval",
        )
    names = dict.fromkeys(result.name for row in evals for result in row.sets)
    for name in names if len(names) > 1 else ():
        found = [(row.step, result.score) for row in evals for result in row.sets if result.name == name]
        points = [(step, -score if is_loss else score) for step, score in found]
        axes.plot(*zip(*points, strict=True), marker=".", linewidth=1, alpha=0.7, label=name)
    ylabel = {"loss": "loss, nats per token", "score": "mean score"}.get(measure, measure)
    axes.set(title=title, xlabel="training steps", ylabel=ylabel)
    axes.grid(alpha=0.3)
    if training or evals:
        axes.legend(loc="upper right" if is_loss else "lower right")


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


def build(
    config: Config,
    ledger: Ledger,
    totals: RunTotals,
    *,
    model: str,
    model_ema: str | None = None,
    critic: str | None = None,
    faults: Sequence[Mapping[str, Any]] = (),
    scorer_changes: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return the report; the module's docstring explains its keys and the arguments of the same names."""
    steps, evals = ledger.steps(), ledger.evals()
    before = next((row for row in evals if row.step == 0), None)
    after = next((row for row in evals if row.step == len(steps)), None)
    return {
        "name": config.name,
        "seed": config.seed,
        "steps": len(steps),
        "seconds": round(totals.seconds, 3),
        "resumes": totals.resumes,
        "restarts": dict(sorted(totals.restarts.items())),
        "recoveries": totals.recoveries,
        "seconds_per_step": round(math.fsum(s.seconds for s in steps) / len(steps), 3) if steps else None,
        "peak_memory_bytes": totals.memory.peak_bytes,
        "peak_memory_without": totals.memory.uncounted,
        "eval_before": _eval(before),
        "eval_after": _eval(after),
        "evals": [_eval(row) for row in evals],
        "began_from": json.loads(ledger.get(BEGAN_FROM) or "{}"),
        "asynchrony": _asynchrony(config, steps),
        "skipped_steps": sum(bool(step.skipped_reason) for step in steps),
        "dropped": ledger.dropped(),
        "faults": list(faults),
        "scorers": {"changes": list(scorer_changes), "steps": _scorers_by_step(steps)},
        "diagnosis": summarize_findings(config, steps),
        "policy_version": steps[-1].policy_version if steps else 0,
        "model": model,
        "model_ema": model_ema,
        "critic": critic,
        "reward_model": config.algorithm.loss.trains == "scores",
        "step_separator": config.data.separator if config.algorithm.loss.reads == "steps" else "",
        "answers_before": before.answers if before else [],
        "answers_after": after.answers if after else [],
    }


def write(folder: Path, report: dict[str, Any], steps: Sequence[StepRow], evals: Sequence[EvalRow]) -> None:
    """Write curve.png and then report.json, each atomically. Takes seconds: call it in a thread."""
    draw_curve(folder / "curve.png", steps, evals, title=report["name"])
    replace_file(folder / REPORT_FILE, [json.dumps(report, indent=2, ensure_ascii=False) + "\n"])


def _eval(row: EvalRow | None) -> dict[str, Any] | None:
    if row is None:
        return None
    return {
        "step": row.step,
        "score": row.score,
        "half_width": row.half_width,
        "interval": row.bounds,
        "n": row.answer_count,
        "missing": row.missing_count,
        "sets": [asdict(result) for result in row.sets],
    }


def _scorers_by_step(steps: Sequence[StepRow]) -> list[dict[str, Any]]:
    """Return the scorers of each step; consecutive steps with the same scorers share an entry."""
    rows: list[dict[str, Any]] = []
    for step in steps:
        found: dict[str, dict[str, int]] = step.metrics.get("scorers") or {}
        last = rows[-1] if rows else None
        if last is None or {n: set(c) for n, c in found.items()} != {n: set(c) for n, c in last["scorers"].items()}:
            rows.append({"first": step.step, "last": step.step, "scorers": {n: dict(c) for n, c in found.items()}})
            continue
        last["last"] = step.step
        for name, counts in found.items():
            for scorer, count in counts.items():
                last["scorers"][name][scorer] += count
    return rows


def _asynchrony(config: Config, steps: Sequence[StepRow]) -> dict[str, Any] | None:
    def values(name: str) -> list[float]:
        return [value for step in steps if (value := step.metrics.get(name)) is not None]

    if not config.asynchrony.max_policy_lag and not any(values(m.LAG_LIMIT)):
        return None

    def share_of_time(name: str) -> float | None:
        found = [row.metrics for row in steps if row.metrics.get(name) is not None and row.metrics.get(m.TIME_STEP)]
        seconds = math.fsum(row[m.TIME_STEP] for row in found)
        return math.fsum(row[name] * row[m.TIME_STEP] for row in found) / seconds if found else None

    lags, stale = values(m.TOKEN_LAG_MEAN), values(m.STALE_TOKENS)
    return {
        "max_policy_lag": config.asynchrony.max_policy_lag,
        "lag_limit": next(reversed(values(m.LAG_LIMIT)), None),
        "token_lag_mean": math.fsum(lags) / len(lags) if lags else None,
        "token_lag_max": max(values(m.TOKEN_LAG_MAX), default=None),
        "trainer_wait_fraction": share_of_time(m.TRAINER_WAIT),
        "rollout_wait_fraction": share_of_time(m.ROLLOUT_WAIT),
        "stale_token_fraction": math.fsum(stale) / len(stale) if stale else None,
        "length_bias": next(reversed(values(m.LENGTH_BIAS)), None),
        "lag_changes": [
            {"step": step.step, "text": text} for step in steps if (text := step.metrics.get("lag_change"))
        ],
    }
