"""What `fourfold run` prints at the end: report.json for people."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from fourfold.config import Config
from fourfold.errors import ConfigError

from .dashboard import clock

_SPECIAL: Final = re.compile(r"<\|[^|<>]*\|>|</?s>|<[a-z_]+_of_turn>")
_ROLES: Final = frozenset({"", "assistant", "model", "user", "system"})
_QUESTION: Final = 44
_ANSWER: Final = 24


def is_finished(run_dir: Path, config: Config) -> bool:
    """Whether the run in `run_dir` has done all steps of `config` and its report is there: nothing is left to do."""
    try:
        done = json.loads((run_dir / "report.json").read_text(encoding="utf-8"))["steps"]
    except (OSError, ValueError, KeyError, TypeError):  # none, or one that must be written again
        return False
    return isinstance(done, int) and done >= config.steps


def report_lines(run_dir: Path) -> list[str]:
    """Return the report of a finished run for people.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        report: dict[str, Any] = json.loads((run_dir / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{run_dir / 'report.json'}: the run ended, but its report cannot be read: {error}") from None
    return summary_lines(report, run_dir)


def summary_lines(report: dict[str, Any], run_dir: Path) -> list[str]:
    """Return the lines: what was learned, sample answers, where things are, and the next command."""
    lines = ["", _headline(report)]
    before, after = report.get("eval_before"), report.get("eval_after")
    if before and after:
        lines.append(f"Held-out accuracy: {_interval(before)} before, {_interval(after)} after training (95 %).")
    if dropped := report.get("dropped"):
        lines.append("Dropped samples: " + ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items())))
    if twin := report.get("distance"):
        lines.append(_distance(twin))
    lines += answer_table(report.get("answers_before") or [], report.get("answers_after") or [])
    lines += ["", *_files(run_dir)]
    lines += ["", f"Talk to it: fourfold chat {run_dir / 'model'}"]
    return lines


def _headline(report: dict[str, Any]) -> str:
    each = f" ({report['seconds_per_step']:.1f} s each)" if report.get("seconds_per_step") else ""
    memory = report["peak_memory_bytes"] / 1e9
    return (
        f"{report['name']} is done: {report['steps']} steps{each} in {clock(report['seconds'])}, seed {report['seed']}"
        f", at most {memory:.1f} GB of memory."
    )


def _interval(evaluation: dict[str, Any]) -> str:
    half = evaluation.get("half_width")
    spread = "" if half is None else f" +- {half:.2f}"
    return f"{evaluation['score']:.2f}{spread} ({evaluation['n']} answers)"


def _distance(twin: dict[str, Any]) -> str:
    same = all(twin.get(f"same_first_step_{part}") for part in ("prompts", "seeds", "samples"))
    first = "the same first step" if same else "another first step"
    gap = twin.get("eval_after_difference")
    accuracy = "" if gap is None else f", accuracy {gap:+.2f}"
    return f"Against {twin['run']}, the same recipe: {first}{accuracy}."


def answer_table(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> list[str]:
    """Return answers to the same prompts side by side; right ones end with *."""
    later = {row["prompt"]: row for row in after}
    pairs = [(row, later[row["prompt"]]) for row in before if row["prompt"] in later]
    if not pairs:
        return []
    questions = _shorten([_question(old["prompt"]) for old, _ in pairs])
    width = min(max(len("held-out prompt"), *map(len, questions)), _QUESTION)
    lines = ["", f"{'held-out prompt':{width}}  {'right':>8}  {'before':{_ANSWER}}  after     (* scored 1)"]
    for question, (old, new) in zip(questions, pairs, strict=True):
        right = _cut(old["answer"], 8)
        lines.append(f"{_cut(question, width):{width}}  {right:>8}  {_answer(old):{_ANSWER}}  {_answer(new)}")
    return lines


def _question(prompt: str) -> str:
    """Return the last line that a person wrote in a rendered prompt."""
    lines = [line.strip() for line in _SPECIAL.sub("\n", prompt).splitlines()]
    return next((line for line in reversed(lines) if line not in _ROLES), "")


def _shorten(texts: list[str]) -> list[str]:
    """Where texts are too long, put dots for the words that all begin or end with: what differs is what matters."""
    if len(texts) < 2 or max(map(len, texts)) <= _QUESTION:
        return texts
    words = [text.split() for text in texts]
    before, after = 0, 0
    shortest = min(map(len, words))
    while before < shortest - 1 and len({line[before] for line in words}) == 1:
        before += 1
    while before + after < shortest - 1 and len({line[-1 - after] for line in words}) == 1:
        after += 1
    head, tail = "... " if before > 1 else "", " ..." if after > 1 else ""
    before, after = before if before > 1 else 0, after if after > 1 else 0
    return [head + " ".join(line[before : len(line) - after]) + tail for line in words]


def _answer(row: dict[str, Any]) -> str:
    mark = " *" if row.get("score") == 1 else ""
    return _cut(printable(" ".join(row["completion"].split())), _ANSWER - len(mark)) + mark


def printable(text: str) -> str:
    """Replace what could steer a terminal: a model writes anything."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def _cut(text: str, width: int) -> str:
    """Cut the middle out of a long text: an answer is often at its end."""
    half = (width - 3) // 2
    return text if len(text) <= width else f"{text[: width - 3 - half]}...{text[-half:]}"


def _files(run_dir: Path) -> list[str]:
    named = (
        ("curve.png", "reward and held-out accuracy over the steps"),
        ("report.json", "these numbers"),
        ("metrics.jsonl", "every metric of every step"),
        ("samples.jsonl", "every trajectory: tokens, log-probabilities, versions, scores"),
        ("model", "the trained model, a Hugging Face folder"),
    )
    return [f"{run_dir / name!s:36}  {what}" for name, what in named if (run_dir / name).exists()]
