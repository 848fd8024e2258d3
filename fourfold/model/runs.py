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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

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
    chat_template: str = ""  # as a recipe's `data.chat_template`: its exports have it


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


def expected_template(source: str, key: str) -> str:
    """Return the `data.chat_template` of the exports of an expected run; empty: of every other source, or none."""
    return _expected[parse(source, key)[0]].chat_template if is_expected(source, key) else ""


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
    report = _report(folder)
    if not report and not weights.isdecimal():
        raise ConfigError(
            f"{key} = {source!r}: the run {name} has not ended; wait for its end, or continue it: fourfold run "
            f"--resume {folder}"
        )
    scores = {row["step"]: row["score"] for row in report.get("evals", ()) if math.isfinite(row["score"])}
    wanted = weights or str(report["steps"])
    step, found = find_weights(folder, wanted, scores=scores, what=f"{key} = {source!r}")
    if found is None:
        raise ConfigError(
            f"{key} = {source!r}: the run {name} has no export of step {step}. To make it from its checkpoint: "
            f"fourfold export {folder} --checkpoint {step}; in further runs set checkpoint.export_every_steps"
        )
    return found


def _report(folder: Path) -> dict[str, Any]:
    """Return report.json of a run; empty if it has not ended, or goes on after an earlier end."""
    try:
        report: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        steps = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))["steps"]
        return report if report["steps"] >= steps else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def pin(source: str, key: str) -> str:
    """Return a source in which `best` is replaced by the step, so that a resumed run begins with the same weights."""
    name, weights = parse(source, key)
    if weights != "best" or is_expected(source, key):
        return source
    folder = export_folder(source, key).name
    return f"{PREFIX}{name}" if folder == "model" else f"{PREFIX}{name}@{folder.rpartition('-')[2]}"


class Weights(NamedTuple):
    """Weights of a run."""

    step: int
    folder: Path | None  # folder of the exported model; None: a checkpoint that is not exported yet


def find_weights(folder: Path, wanted: str, *, scores: Mapping[int, float], what: str) -> Weights:
    """Return the weights of a step, the `last` or the `best` ones that a run has on disk; of equal scores, the newer.

    Args:
        folder: of the run.
        wanted: a step, `last` or `best`.
        scores: held-out scores by step.
        what: names the wish in errors.

    Raises:
        ConfigError: there are none, or none of that step.
    """
    known = all_weights(folder)
    steps = "step " + ", ".join(map(str, sorted(known)))
    if wanted == "last" and known:
        return known[max(known)]
    if wanted == "best":
        if not (scored := {step: score for step, score in scores.items() if step in known}):
            raise ConfigError(
                f"{what}: {folder} has no held-out score of the steps whose weights it has: {steps}; give one of "
                f"these steps"
            )
        return known[max(scored, key=lambda step: (scored[step], step))]
    if not wanted.isdecimal() or int(wanted) not in known:
        raise ConfigError(
            f"{what}: {folder} has the weights of {steps if known else 'no step'}; give one of these steps, or `best`"
        )
    return known[int(wanted)]


def all_weights(folder: Path) -> dict[int, Weights]:
    """Return the weights that a run has on disk, by step."""
    found = {step: Weights(step, None) for step, _ in _folders(folder / "checkpoints", "step-")}
    found |= {step: Weights(step, path) for step, path in _folders(folder, "model-step-")}
    try:
        last = json.loads((folder / "report.json").read_text(encoding="utf-8"))["steps"]
    except (OSError, ValueError, KeyError, TypeError):  # not finished
        return found
    if (folder / "model").is_dir() and isinstance(last, int):
        found[last] = Weights(last, folder / "model")
    return found


def _folders(parent: Path, prefix: str) -> list[tuple[int, Path]]:
    names = [(path.name.removeprefix(prefix), path) for path in parent.glob(f"{prefix}*") if path.is_dir()]
    return [(int(number), path) for number, path in names if number.isdecimal()]
