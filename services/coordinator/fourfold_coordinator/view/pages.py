"""The pages of runs: list, curves and alarms, comparison, timeline, weight plane, recipe, held-out answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from fourfold import metrics as m
from fourfold.config import flatten
from fourfold.host.program import program

from ..launch.run_folder import describe_stop, log_of
from ..state.eval_results import EvalRow, SetResult
from ..state.ledger import Progress
from .charts import PHASES, Line, gantt, kind_of, line_chart
from .reader import REMOTE, RunFolders, RunReader, cache_folder
from .templates import is_number, render

# Charts that a run shows unless the user chooses others.
_SHOWN: Final = (
    *m.MAIN, m.PAIR_MARGIN, m.KTO_DISTANCE, m.EVAL_SCORE, m.USEFUL_GROUPS, m.RESPONSE_LENGTH, m.REFERENCE_KL,
    m.MISMATCH_MEAN, m.ENTROPY, m.TIME_STEP, m.TOKEN_LAG_MEAN,
)  # fmt: skip
_WEIGHT_CHARTS: Final = ("weights/", m.TIME_PUBLISH, m.TIME_WAKE, m.TIME_SLEEP)
_MAX_CHARTS: Final = 60
_LIVE: Final = ("running", "unreachable")  # states in which a page reloads new data by itself
_MAX_ALARMS: Final = 100
_MAX_MEMBERS: Final = 60  # rows of a timeline
_MAX_RUNS: Final = 8  # of a comparison


RunData = tuple[str, Sequence[Mapping[str, Any]], Sequence[EvalRow]]
"""Name, steps and evaluations of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart with its title."""

    metric: str
    meaning: str
    svg: Markup
    notes: list[str]  # a warning about unreliable values
    last: float | None  # value of the last step; None for several runs, or without a value


def run_of(request: Request, name: str | None = None) -> RunReader:
    """Return the run that the address names; raise HTTPException if there is none."""
    runs: RunFolders = request.app.state.runs
    wanted = request.path_params["run"] if name is None else name
    if (found := runs.get(wanted)) is None:
        raise HTTPException(404, f"no run has the name {wanted!r}; the list of runs has them all")
    return found


def runs(request: Request) -> Response:
    """Show the list of runs."""
    rows, readers = [], request.app.state.runs.all()
    for reader in readers:
        steps, evals = reader.steps(), reader.evaluations()
        rows.append(
            {
                "name": reader.name,
                "state": reader.state(),
                "done": steps[-1]["step"] if steps else 0,
                "steps": reader.recipe().get("steps", 0),
                "reward": steps[-1].get(m.REWARD_MEAN) if steps else None,
                "before": evals[0] if evals else None,
                "after": evals[-1] if len(evals) > 1 else None,
                "end_time": steps[-1]["end_time"] if steps else "",
                "alarms": sum(len(row["alarms"]) for row in steps),
            }
        )
    return render("runs.html", request, runs=rows, **several(readers))


def head(reader: RunReader) -> dict[str, Any]:
    """Return the values that every page of a run shows."""
    state = reader.state()
    return {
        "name": reader.name,
        "state": state,
        "live": state in _LIVE,
        "faults": reader.faults,
        "notice": notice_of(reader),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """The notice on every page of a run that has stopped, failed, does not answer, or was resumed."""

    text: str
    command: str = ""  # command that continues the run
    log: str = ""  # log file that ends with the reason
    is_bad: bool = False


def notice_of(reader: RunReader) -> Notice | None:
    """Return the notice of a run; None for one that was never interrupted."""
    progress, state = reader.progress(), reader.state()
    if state not in ("stopped", "failed", "unreachable"):
        times = progress.resumes if progress else 0
        return Notice(text=f"This run was resumed {times} time{'s' if times > 1 else ''}.") if times else None
    if state == "failed":
        text = "This start failed before its first step was done. Correct what the log says, and start the run again:"
        return Notice(text=text, command=f"{program()} run RECIPE.toml", log=log_of(reader.folder), is_bad=True)
    steps = reader.steps()
    progress = progress or Progress(steps[-1]["step"] if steps else 0, None)
    where = f"after step {progress.step} of {reader.recipe().get('steps', 0)}."
    if reader.peer:  # only the other machine has its ledger and its log
        text = f"This run stopped {where} To continue it on the machine of its coordinator:"
        if state == "unreachable":
            text = (
                f"The coordinator does not answer. The copy ends {where} If the run has stopped, continue it on the "
                f"machine of its coordinator:"
            )
        return Notice(text=text, command=f"fourfold run --resume runs/{reader.folder.name}", is_bad=True)
    if reader.folder.resolve().is_relative_to((cache_folder() / REMOTE).resolve()):
        text = f"This is a copy, which ends {where} If the run has stopped, continue it on its coordinator's machine:"
        return Notice(text=text, command=f"fourfold run --resume runs/{reader.folder.name}", is_bad=True)
    stop = describe_stop(reader.folder, progress)
    return Notice(
        text=f"This run {stop.how} {where} {stop.resumption}:", command=stop.command, log=stop.log, is_bad=True
    )


def several(readers: Sequence[RunReader]) -> dict[str, Any]:
    """Return the values that every page of several runs shows."""

    def faults() -> list[str]:
        return [f"{reader.name}: {text}" for reader in readers for text in reader.faults()]

    return {"live": any(reader.state() in _LIVE for reader in readers), "faults": faults}


def overview(request: Request) -> Response:
    """Show curves and alarms of a run."""
    reader = run_of(request)
    steps, evals, report = reader.steps(), reader.evaluations(), reader.report()
    known = metric_names(steps, evals)
    chosen = [name for name in request.query_params.getlist("m") if name in known][:_MAX_CHARTS]
    shown = chosen or [*(name for name in _SHOWN if name in known), *_set_scores(evals)] or known[:6]
    alarms, last = list(alarms_of(steps)), steps[-1] if steps else {}
    main = m.main_metric(last)
    return render(
        "run.html",
        request,
        **head(reader),
        charts=[make_chart(name, [(reader.name, steps, evals)]) for name in shown],
        known=[(name, _meaning(name)) for name in known],
        shown=shown,
        alarms=alarms[:_MAX_ALARMS],
        alarm_count=len(alarms),
        findings=report.diagnosis,
        last=last,
        main=(m.MAIN[main], last.get(main)),
        step_count=reader.recipe().get("steps", 0),
        evals=evals,
        seconds=report.seconds,
    )


def alarms_of(steps: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, str, str]]:
    """Yield step, problem and advice of each alarm, the newest first."""
    for row in reversed(steps):
        for text in row["alarms"]:
            problem, _, advice = text.partition("; ")
            yield row["step"], problem, advice


def metric_names(steps: Sequence[Mapping[str, Any]], evals: Sequence[EvalRow] = ()) -> list[str]:
    """Return the metrics that have a number in some step or evaluation, in order of their names."""
    names = {name for row in steps for name, value in row.items() if is_number(value) and name != "step"}
    return sorted(names.union(*(row.scores() for row in evals)))


def make_chart(name: str, runs: Sequence[RunData]) -> Chart:
    """Return the chart of a metric over the steps of some runs."""
    lines = list[Line]()
    for run, steps, evals in runs:
        # Evaluations have one before the first step, too, and intervals.
        if found := [(float(e.step), *score) for e in evals if (score := e.scores().get(name)) is not None]:
            points = [(step, score) for step, score, _ in found]
            lines.append(Line(name=run, points=points, bars=[interval for _, _, interval in found]))
        else:
            points = [(float(row["step"]), float(row[name])) for row in steps if is_number(row.get(name))]
            lines.append(Line(name=run, points=points))
    last = lines[0].points[-1][1] if len(lines) == 1 and lines[0].points else None
    notes = list(_missing_scores(name, runs))
    return Chart(metric=name, meaning=_meaning(name), svg=line_chart(lines), notes=notes, last=last)


def _missing_scores(name: str, runs: Sequence[RunData]) -> Iterator[str]:
    """Yield, for each run, the evaluation with the most unscored answers."""
    for run, _, evals in runs:
        found = [(row.step, counted) for row in evals if (counted := _counted(row, name)) and counted.missing_count]
        if found:
            step, worst = max(found, key=lambda each: each[1].missing_count)
            where = f"{run}: " if len(runs) > 1 else ""
            total = worst.answer_count + worst.missing_count
            yield f"{where}step {step}: {worst.missing_count:,} of {total:,} answers without a score"


def _counted(row: EvalRow, name: str) -> EvalRow | SetResult | None:
    """Return the result whose score is a metric."""
    return row if name == m.EVAL_SCORE else next((s for s in row.sets if name == f"eval/{s.name}/score"), None)


def _set_scores(evals: Sequence[EvalRow]) -> list[str]:
    """Return the metrics with the scores of the held-out sets, if there are several."""
    names = list(evals[-1].scores())[1:] if evals else []
    return names if len(names) > 1 else []


def compare(request: Request) -> Response:
    """Show several runs in the same charts, and the differences of their recipes."""
    every: list[RunReader] = request.app.state.runs.all()
    names = list(dict.fromkeys(request.query_params.getlist("run")))[:_MAX_RUNS]
    readers = [run_of(request, name) for name in names]
    data = [(reader.name, reader.steps(), reader.evaluations()) for reader in readers]
    known = sorted({name for _, steps, evals in data for name in metric_names(steps, evals)})
    chosen = [name for name in request.query_params.getlist("m") if name in known][:_MAX_CHARTS]
    shown = chosen or [name for name in _SHOWN if name in known]
    return render(
        "compare.html",
        request,
        every=[reader.name for reader in every],
        names=names,
        charts=[make_chart(name, data) for name in shown],
        known=[(name, _meaning(name)) for name in known],
        shown=shown,
        differences=recipe_differences([reader.recipe() for reader in readers]),
        **several(readers),
    )


def recipe_differences(recipes: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return the keys whose values differ, and the value of each recipe."""
    tables = [shown_keys(recipe) for recipe in recipes]
    keys = sorted({key for table in tables for key in table})
    rows = [(key, [table.get(key, "(absent)") for table in tables]) for key in keys if key != "name"]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def shown_keys(recipe: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of a recipe with their values as texts."""
    return {key: repr(value) for key, value in flatten(recipe).items()}


def recipe(request: Request) -> Response:
    """Show the recipe of a run, and its differences from another run's."""
    reader = run_of(request)
    other = request.query_params.get("other", "")
    differences = []
    if other:
        differences = recipe_differences([reader.recipe(), run_of(request, other).recipe()])
    names = [each.name for each in request.app.state.runs.all() if each.name != reader.name]
    return render(
        "recipe.html",
        request,
        **{**head(reader), "live": False},
        rows=list(shown_keys(reader.recipe()).items()),
        others=names,
        other=other,
        differences=differences,
    )


def timeline(request: Request) -> Response:
    """Show when the coordinator and each member worked in one step."""
    reader = run_of(request)
    steps = reader.steps()
    wanted = whole_number(request, "step")
    last = steps[-1]["step"] if steps else 0
    step = last if wanted is None else wanted
    row = next((row for row in steps if row["step"] == step), {})
    found = reader.timeline(step)
    parts = step_parts(row)
    seconds = max([found.seconds] if found else [], default=0.0)
    length = row.get(m.TIME_STEP)
    offset = max(seconds - length, 0.0) if is_number(length) else 0.0  # the timeline may begin before the step
    rows: list[tuple[str, Mapping[str, Sequence[tuple[float, float]]]]] = []
    if parts:
        rows.append(("training loop", {name: [(b + offset, e + offset)] for name, b, e in parts}))
        seconds = max(seconds, parts[-1][2])
    pattern = request.query_params.get("member", "")
    members = [(name, phases) for name, phases in (found.members if found else {}).items() if pattern in name]
    rows += members[:_MAX_MEMBERS]
    # The line of the first step begins when the coordinator starts, long before there is anything to draw.
    begin = min((first for _, phases in rows for spans in phases.values() for first, _ in spans), default=0.0)
    rows = [(name, {k: [(b - begin, e - begin) for b, e in spans] for k, spans in own.items()}) for name, own in rows]
    return render(
        "timeline.html",
        request,
        **{**head(reader), "live": reader.state() in _LIVE and wanted is None},
        step=step,
        last=last,
        svg=gantt(rows, seconds - begin) if rows else "",
        began=max(offset - begin, 0.0),
        recorded=found is not None,
        hidden=max(len(members) - _MAX_MEMBERS, 0),
        member=pattern,
        parts=[(name, end - begin, (end - begin) / parts[-1][2]) for name, begin, end in parts],
        digits=2 if parts and parts[-1][2] >= 10.0 else 4,
        phases=[phase for phase in PHASES if any(kind_of(own) == phase for _, phases in rows for own in phases)],
    )


def step_parts(row: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """Return name, begin and end of the parts of a step, one after another, in seconds."""
    parts, begin = list[tuple[str, float, float]](), 0.0
    for name in (*m.TIMES_OF_A_STEP, m.TIME_OTHER):
        value = row.get(name, 0.0)
        if is_number(value) and value > 0:
            parts.append((name.removeprefix("time/"), begin, begin + value))
            begin += value
    return parts


def weights(request: Request) -> Response:
    """Show the weight plane: the update that runs now, the state of each engine, and the updates so far."""
    reader = run_of(request)
    steps = reader.steps()
    known = [name for name in metric_names(steps) if name.startswith(_WEIGHT_CHARTS)]
    data = [(reader.name, steps, list[EvalRow]())]
    return render(
        "weights.html",
        request,
        **head(reader),
        plane=reader.weight_plane(),
        charts=[make_chart(name, data) for name in known],
    )


def answers(request: Request) -> Response:
    """Show the answers to the same held-out prompts in two evaluations."""
    reader = run_of(request)
    evals = [each for each in reader.evaluations() if each.answers]
    steps = [each.step for each in evals]
    chosen = []
    for key, default in (("before", 0), ("after", -1)):
        text = request.query_params.get(key, "")
        if text and text not in map(str, steps):
            raise HTTPException(400, f"{key} = {text!r}: no evaluation with answers; there are those of steps {steps}")
        chosen.append(next((e for e in evals if str(e.step) == text), evals[default] if evals else None))
    before, after = chosen
    later = {each["prompt"]: each for each in (after.answers if after else [])}
    rows = [(each, later.get(each["prompt"])) for each in (before.answers if before else [])]
    results = [each.set_metrics() if each else {} for each in chosen]
    return render(
        "answers.html",
        request,
        **head(reader),
        steps=steps,
        before=before,
        after=after,
        of_rows=any(each.measure != "score" for each in reader.evaluations()),
        rows=rows,
        results=[(name, *(found.get(name) for found in results)) for name in dict.fromkeys([*results[0], *results[1]])],
    )


def _meaning(name: str) -> str:
    return m.METRICS.get(name, "")


def whole_number(request: Request, key: str) -> int | None:
    """Return a number of the address, None without it; raise HTTPException for a value that is none."""
    text = request.query_params.get(key, "")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise HTTPException(400, f"{key} = {text!r} is no whole number below 10^9; correct it")
    return int(text)
