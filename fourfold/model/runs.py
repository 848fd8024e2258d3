"""Finds the model that an earlier run has exported: the sources `run:NAME`, `run:NAME@STEP` and `run:NAME@best`.

    run:sft         runs/sft/model, the weights after the last step
    run:sft@40      runs/sft/model-step-40
    run:sft@best    the exported weights with the highest held-out score

`runs` is a folder of the working directory. Before several recipes run in order, later ones are checked while the runs
of earlier ones do not exist: these are expected runs, and have the tokenizer and sizes of the models that they begin
with.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fourfold.errors import ConfigError
from fourfold.text import nearest_name

PREFIX: Final = "run:"
_RUNS: Final = Path("runs")
_SOURCE: Final = re.compile(r"run:([A-Za-z0-9_-]{1,64})(?:@(best|[0-9]{1,9}))?")
_LATEST: Final = "latest"  # a link, which the run that reads the source moves to itself


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedRun:
    """A run that an earlier recipe of the same command makes."""

    source: str  # of the model that it begins with; no expected run
    steps: int  # 0: not known yet
    export_every_steps: int  # 0: it exports its last weights alone
    max_context_tokens: int


_expected: dict[str, ExpectedRun] = {}


@contextmanager
def expect_runs() -> Iterator[Callable[[str, ExpectedRun], None]]:
    """Give a function that adds an expected run by name; the runs are forgotten after the block."""

    def add(name: str, run: ExpectedRun) -> None:
        _expected[name] = run

    try:
        yield add
    finally:
        _expected.clear()


def parse(source: str, key: str) -> tuple[str, str]:
    """Return the name of the run, and a step, `best`, or nothing. Raises ConfigError: the text is no such source."""
    match = _SOURCE.fullmatch(source)
    if match is None or match[1] == _LATEST:
        reason = "runs/latest is a link that each start moves" if match else "not the source of a run"
        raise ConfigError(
            f"{key} = {source!r}: {reason}; write run:NAME, run:NAME@STEP or run:NAME@best, with the name of a folder "
            f"in runs"
        )
    return match[1], match[2] or ""


def begins_with(source: str, key: str) -> str:
    """Return the source whose files stand for an expected run; every other source is returned unchanged.

    Raises ConfigError: the expected run will not export what the source names.
    """
    if not source.startswith(PREFIX):
        return source
    name, weights = parse(source, key)
    if (run := _expected.get(name)) is None:
        return source
    every = run.export_every_steps
    known = not weights or (every and (weights == "best" or int(weights) % every == 0))
    if not known and weights != str(run.steps):
        raise ConfigError(
            f"{key} = {source!r}: the run {name} exports its last weights, run:{name}, and those of every "
            f"checkpoint.export_every_steps = {every}; change one of them"
        )
    return run.source


def is_expected(source: str, key: str) -> bool:
    """Return whether a source is that of an expected run."""
    return source.startswith(PREFIX) and parse(source, key)[0] in _expected


def export_folder(source: str, key: str) -> Path:
    """Return the folder of an export.

    Args:
        source: `run:NAME`, `run:NAME@STEP` or `run:NAME@best`.
        key: of the recipe, for messages.

    Raises:
        ConfigError: there is no such run, it has not ended, or it has no such export.
    """
    name, weights = parse(source, key)
    folder = _RUNS / name
    if not (folder / "config.toml").is_file():
        near = nearest_name(name, [path.parent.name for path in _RUNS.glob("*/config.toml")])
        raise ConfigError(
            f"{key} = {source!r}: no run {name} in {_RUNS.absolute()}"
            + (f"; did you mean run:{near}?" if near and near != _LATEST else ".")
            + f" To make it: fourfold run RECIPE.toml --name {name}, or give its recipe before this one"
        )
    if weights.isdecimal() and (export := folder / f"model-step-{int(weights)}").is_dir():
        return export
    report = _report(folder)
    if report is None:
        raise ConfigError(
            f"{key} = {source!r}: the run {name} has not ended; wait for its end, or continue it: fourfold run "
            f"--resume {folder}"
        )
    step = _best_step(folder, report, f"{key} = {source!r}") if weights == "best" else int(weights or report["steps"])
    found = folder / ("model" if step == report["steps"] else f"model-step-{step}")
    if not found.is_dir():
        exported = ", ".join(sorted(path.parent.name for path in folder.glob("model*/config.json"))) or "none"
        raise ConfigError(
            f"{key} = {source!r}: the run {name} has no export of step {step} (exports: {exported}). To make it from "
            f"its checkpoint: fourfold export {folder} --checkpoint {step}; in further runs set "
            f"checkpoint.export_every_steps"
        )
    return found


def context_tokens(source: str, key: str) -> int:
    """Return the longest sequence on which a run trained, `model.max_context_tokens` of its recipe."""
    name, _ = parse(source, key)
    if (run := _expected.get(name)) is not None:
        return run.max_context_tokens
    file = _RUNS / name / "config.toml"
    try:
        return int(tomllib.loads(file.read_text(encoding="utf-8"))["model"]["max_context_tokens"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{key} = {source!r}: {file} has no model.max_context_tokens; make the run again") from None


def pin(source: str, key: str) -> str:
    """Return a source in which `best` is replaced by the step, so that a resumed run begins with the same weights."""
    name, weights = parse(source, key)
    if weights != "best" or is_expected(source, key):
        return source
    folder = export_folder(source, key).name
    return f"{PREFIX}{name}" if folder == "model" else f"{PREFIX}{name}@{folder.rpartition('-')[2]}"


def _report(folder: Path) -> dict[str, Any] | None:
    """Return report.json of a run; None if it has not ended, or goes on after an earlier end."""
    try:
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        steps = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))["steps"]
        return report if report["steps"] >= steps else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _best_step(folder: Path, report: dict[str, Any], what: str) -> int:
    """Return the step with the highest held-out score whose weights are on the disk; of equal scores, the newest."""
    kept = {path.name.rpartition("-")[2] for path in (*folder.glob("model-step-*"), *folder.glob("checkpoints/step-*"))}
    steps = {int(number) for number in kept if number.isdecimal()} | {report["steps"]}
    evals = [row for row in report.get("evals") or () if isinstance(row, dict) and row.get("step") in steps]
    scores = [(row["score"], row["step"]) for row in evals if isinstance(row.get("score"), int | float)]
    scores = [each for each in scores if math.isfinite(each[0])]
    if not scores:
        raise ConfigError(f"{what}: {folder} has no held-out score of weights that it has; leave out @best")
    return int(max(scores)[1])
