"""Writes the model card of an exported model, the README.md of a repository of the Hugging Face Hub."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fourfold import config as configuration
from fourfold.config import Config
from fourfold.text import format_answers, format_interval, of_measure

from ..launch.run_names import CONFIG_FILE, EMA_FOLDER, REPORT_FILE, STEP_FOLDER

# Tables without paths of this machine and without addresses.
_TABLES: Final = ("seed", "steps", "batch", "sampling", "algorithm", "asynchrony", "trainer")
_HUB_PREFIX: Final = "hf:"


def model_card(folder: Path) -> str:
    """Return the card of an export: base model, held-out score and recipe, without paths of this machine.

    Returns:
        Markdown with metadata in YAML; empty if the folder is not the export of a run.

    Raises:
        ConfigError: the recipe of the run cannot be read.
    """
    run = folder.parent
    if not (run / CONFIG_FILE).is_file():
        return ""
    config = configuration.load(run / CONFIG_FILE)
    base, on_hub = _base_model(config.model.source)
    metadata: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    way = ("reinforcement-learning", "by reinforcement learning")
    if not config.needs_engines:
        way = (config.algorithm.preset, f"on the answers of a data set (preset `{config.algorithm.preset}`)")
    metadata |= {"tags": ["fourfold", way[0]]} | ({"base_model": base} if on_hub else {})
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in metadata.items()), "---", ""]
    title = config.name if folder.name == "model" else f"{config.name}, {folder.name}"
    version = importlib.metadata.version("fourfold")
    lines += [f"# {title}", "", f"`{base}`, trained {way[1]} with Fourfold {version}.", ""]
    lines += _scores(run / REPORT_FILE, folder.name)
    return "\n".join([*lines, "## Recipe", "", "```toml", *_recipe(config), "```", ""])


def _base_model(source: str) -> tuple[str, bool]:
    """Return the name of a model source without its folder, and whether it is a repository of the hub."""
    if source.startswith(_HUB_PREFIX):
        return source.removeprefix(_HUB_PREFIX).partition("@")[0], True
    return source.rstrip("/").rpartition("/")[2].rpartition(":")[2], False


def _recipe(config: Config) -> list[str]:
    """Return the keys that affect training and differ from their defaults, as lines of TOML."""
    tables = config.model_dump(exclude_defaults=True, exclude_none=True)
    values = configuration.flatten({name: tables[name] for name in _TABLES if name in tables})
    return [f"{key} = {configuration.toml_value(value)}" for key, value in values.items()]


def _scores(report_file: Path, export: str) -> list[str]:
    """Return the held-out scores before and after the training as lines; none if they are not known."""
    try:
        report = json.loads(report_file.read_text(encoding="utf-8"))
        before, after = report["eval_before"], report["eval_after"]
        if export.startswith(STEP_FOLDER):
            step = int(export.removeprefix(STEP_FOLDER))
            after = next((row for row in report["evals"] if row["step"] == step), None)
        if export == EMA_FOLDER or not after:  # the scored model is another one
            return []
        rows = [("after", after)] if not before else [("before", before), ("after", after)]
        measure = next((each.get("measure", "score") for each in after.get("sets") or ()), "score")
        return [f"| | step | held-out {measure} |", "|---|---|---|", *(_row(*row, measure) for row in rows), ""]
    except (OSError, ValueError, KeyError, TypeError):  # no report, or one of another version
        return []


def _row(name: str, row: Mapping[str, Any], measure: str) -> str:
    value, spread = of_measure(row["score"], row.get("interval") or row.get("half_width"), measure)
    score = format_interval(value, spread, 3)
    if missing := row.get("missing"):
        score += f" ({format_answers(row['n'], missing, measure)})"
    return f"| {name} | {row['step']} | {score} |"
