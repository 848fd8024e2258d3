"""Compares the answers of two evaluations prompt by prompt, for `fourfold eval --against`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from fourfold.errors import ConfigError

from ..launch.run_names import ANSWERS_FILE, EVALUATION_FILE
from .estimators import clustered_interval

_Key = tuple[str, int, str, str]  # set, index of the prompt, its text, its task group


def win_rates(folder: Path, earlier: Path) -> dict[str, Any]:
    """Return how often the answers in `folder` score higher than those in `earlier` to the same prompts.

    The win rate of a prompt is the share of pairs, of an answer here and one there, whose answer here has the higher
    score; equal scores count half. The win rate of a set is the mean over its prompts with scored answers in both, and
    its 95 % interval is clustered by task group.

    Returns:
        {"evaluation": path of the earlier folder, "model": of its answers, "sets": [{"name", "win_rate", "interval",
        "prompts"}]}.

    Raises:
        ConfigError: a file is missing or malformed, or the evaluations have other scorers or no prompt in common.
    """
    (new, here), (old, there) = (read_evaluation(each) for each in (folder, earlier))
    if new["scorers"] != old["scorers"]:
        raise ConfigError(
            f"--against {earlier}: its answers were scored by {old['scorers']}, and these by {new['scorers']}; "
            f"evaluate both models with the same --recipe"
        )
    sets: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)
    for (name, index, prompt, group), scores in here.items():
        if scores and (others := there.get((name, index, prompt, group))):
            wins = fmean((a > b) + (a == b) / 2 for a in scores for b in others)
            sets[name].append((wins, group))
    if not sets:
        raise ConfigError(
            f"--against {earlier}: no prompt has scored answers in both evaluations; evaluate both models with the "
            f"same --recipe, so that they have the same held-out sets"
        )
    rows = []
    for name, found in sets.items():
        rate, interval = clustered_interval([wins for wins, _ in found], [group for _, group in found])
        rows.append({"name": name, "win_rate": rate, "interval": interval, "prompts": len(found)})
    return {"evaluation": str(earlier), "model": old["model"], "sets": rows}


def read_evaluation(folder: Path) -> tuple[dict[str, Any], Mapping[_Key, list[float]]]:
    """Return scorers and model of an evaluation, and its scores by prompt. Raises ConfigError: its files are bad."""
    scores: defaultdict[_Key, list[float]] = defaultdict(list)
    try:
        facts = json.loads((folder / EVALUATION_FILE).read_text(encoding="utf-8"))
        facts = {"scorers": facts["scorers"], "model": facts.get("model")}
        with (folder / ANSWERS_FILE).open(encoding="utf-8") as file:
            for row in map(json.loads, file):
                key = (row["set"], row["prompt_index"], row["prompt"], row["task_group"])
                scores[key] += [] if row["score"] is None else [float(row["score"])]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"--against {folder}: not the folder of an evaluation, with {EVALUATION_FILE} and {ANSWERS_FILE} "
            f"({type(error).__name__}: {error}); `fourfold eval` prints it at its end"
        ) from None
    return facts, scores
