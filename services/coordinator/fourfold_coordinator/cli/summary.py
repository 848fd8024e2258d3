"""Formats report.json as the summary that `fourfold run` prints at the end."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from fourfold import config as configuration
from fourfold.errors import ConfigError
from fourfold.host.program import program
from fourfold.text import format_duration, format_score, printable

from ..data.question import last_message
from ..launch.run_names import REPORT_FILE

_WIDTH: Final = 80
_GAP: Final = "  "
_MAX_FINDINGS: Final = 5
# Widths of the table of answers, in characters.
_FRAME_WIDTH: Final = 200
_QUESTION_WIDTH: Final = 24
_RIGHT_WIDTH: Final = 8
_MAX_LINES: Final = 3  # most lines of a prompt and of an answer
_NO_BREAK: Final = "\N{NO-BREAK SPACE}"  # a no-break space keeps the mark on the answer's last line


def report_lines(run_dir: Path) -> list[str]:
    """Return the summary of a finished run; raise ConfigError when its report cannot be read."""
    try:
        report: dict[str, Any] = json.loads((run_dir / REPORT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{run_dir / REPORT_FILE}: the run ended, but its report cannot be read: {error}") from None
    return summary_lines(report, run_dir)


def as_reward_model(folder: Path, separator: str) -> str:
    """Return the value of `reward.model` for a trained reward model; `separator` of steps, if it scores those."""
    source = configuration.toml_value(str(folder))
    if not separator:
        return source
    return f'{{ kind = "process", source = {source}, steps = {configuration.toml_value(separator)} }}'


def summary_lines(report: dict[str, Any], run_dir: Path) -> list[str]:
    """Return the lines: result, problems, sample answers, files, and the next command."""
    lines = ["", _headline(report)]
    before, after = report.get("eval_before"), report.get("eval_after")
    if before and after:
        lines.append(f"Held-out {_measure(after)}: {_score(before)} before, {_score(after)} after training (95 %).")
        lines += _sets(before, after)
    lines += _asynchrony(report.get("asynchrony") or {})
    lines += _interruptions(report)
    if dropped := report.get("dropped"):
        lines.append("Dropped samples: " + ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items())))
    lines += _diagnosis(report)
    lines += answer_table(report.get("answers_before") or [], report.get("answers_after") or [])
    lines += ["", *_files(run_dir)]
    if report.get("reward_model"):
        value = as_reward_model(run_dir / "model", report.get("step_separator") or "")
        return [*lines, "", f"Score answers with it, in the recipe of another run: [reward] model = {value}"]
    return [*lines, "", f"Chat with the model: {program()} chat {shlex.quote(str(run_dir))}"]


def _headline(report: dict[str, Any]) -> str:
    each = f" ({report['seconds_per_step']:.1f} s each)" if report.get("seconds_per_step") else ""
    memory = f"at most {report['peak_memory_bytes'] / 1e9:.1f} GB of memory"
    if without := report.get("peak_memory_without"):
        memory += f" (without {', '.join(without)}: not on the coordinator's machine)"
    return (
        f"{report['name']} is done: {report['steps']} steps{each} in {format_duration(report['seconds'])}, "
        f"seed {report['seed']}, {memory}."
    )


def _asynchrony(found: dict[str, Any]) -> list[str]:
    """Return lag, waits and stale tokens of an asynchronous run; no lines for other runs."""

    def words(*known: tuple[str, str]) -> str:
        return ", ".join(form.format(found[key]) for key, form in known if found.get(key) is not None)

    lag = words(
        ("token_lag_mean", "{:.1f} on average"), ("token_lag_max", "{:.0f} at most"), ("lag_limit", "limit {:.0f}")
    )
    waits = words(
        ("trainer_wait_fraction", "the trainer waited {:.0%}"), ("rollout_wait_fraction", "engines had room {:.0%}")
    )
    lines = [f"Policy lag: {lag}."] if lag else []
    if waits:
        lines.append(f"Of the time, {waits}.")
    if (found.get("stale_token_fraction") or 0.0) > 0:
        lines.append(f"Stale: {found['stale_token_fraction']:.1%} of the sampled tokens were dropped.")
    if changes := found.get("lag_changes"):
        text = f"The lag limit changed {len(changes)}x, last after step {changes[-1]['step']}: {changes[-1]['text']}"
        lines += textwrap.wrap(text, _WIDTH, subsequent_indent="  ")
    return lines


def _interruptions(report: dict[str, Any]) -> list[str]:
    """Return the numbers of resumes and of restarted services; no lines when both are 0."""
    words = [f"{name} {count}x" for name, count in sorted((report.get("restarts") or {}).items())]
    resumes = report.get("resumes") or 0
    lines = [f"Resumed {resumes} time{'s' if resumes > 1 else ''}."] if resumes else []
    return lines + ([f"Restarted during the run: {', '.join(words)}."] if words else [])


def _diagnosis(report: dict[str, Any]) -> list[str]:
    """Return the findings of the diagnosis, the most frequent first."""
    lines = []
    if skipped := report.get("skipped_steps"):
        lines += ["", f"{skipped} of {report['steps']} steps did not change the weights."]
    if found := report.get("diagnosis"):
        lines += ["", "Findings:"]
        for entry in found[:_MAX_FINDINGS]:
            when = f"{entry['steps']} steps, {entry['first']} to {entry['last']}"
            if entry["steps"] == 1:
                when = f"step {entry['first']}"
            lines += textwrap.wrap(f"{when}: {entry['text']}", _WIDTH, initial_indent="  ", subsequent_indent="    ")
    return lines


def _sets(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return a line for each held-out set, if there are several."""
    pairs = zip(before.get("sets") or [], after.get("sets") or [], strict=False)
    lines = [f"  {each['name']}: {_score(_as_eval(old))} before, {_score(_as_eval(each))} after" for old, each in pairs]
    return lines if len(lines) > 1 else []


def _as_eval(held_out: dict[str, Any]) -> dict[str, Any]:
    """Return a held-out set of the report with the keys of an evaluation."""
    return {**held_out, "n": held_out["answer_count"], "missing": held_out.get("missing_count", 0), "sets": [held_out]}


def _measure(evaluation: dict[str, Any]) -> str:
    """Return what the score of an evaluation is, as `SetResult.measure`."""
    return next((each.get("measure", "score") for each in evaluation.get("sets") or []), "score")


def _score(evaluation: dict[str, Any]) -> str:
    spread = evaluation.get("interval") or evaluation.get("half_width")
    missing, measure = evaluation.get("missing") or 0, _measure(evaluation)
    return format_score(evaluation["score"], spread, evaluation["n"], missing, measure=measure)


def answer_table(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of answers to the same prompts before and after training, at most 80 columns wide."""
    later = {row["prompt"]: row for row in after}
    pairs = [(row, later[row["prompt"]]) for row in before if row["prompt"] in later]
    if not pairs:
        return []
    messages = [last_message(old["prompt"]) for old, _ in pairs]
    last_lines = [message.rpartition("\n")[2].strip() for message in messages]
    # With a template, all prompts may have the same last line.
    frame, questions = _split(last_lines if len(set(last_lines)) > 1 else [" ".join(m.split()) for m in messages])
    title = f'Answers to the held-out prompts "{_cut(frame, _FRAME_WIDTH)}"' if frame else "Answers to held-out prompts"
    rights = [_cut(printable(old["answer"]), _RIGHT_WIDTH) for old, _ in pairs]
    question_width = min(max(len("prompt"), *map(len, questions)), _QUESTION_WIDTH)
    right_width = max(len("right"), *map(len, rights))
    answer_width = (_WIDTH - question_width - right_width - 3 * len(_GAP)) // 2
    widths = (question_width, right_width, answer_width, answer_width)
    lines = ["", *textwrap.wrap(f"{title} (* scored 1):", _WIDTH), ""]
    lines.append(_row(["prompt", "right", "before", "after"], widths))
    for question, right, (old, new) in zip(questions, rights, pairs, strict=True):
        answers = [_wrapped(_answer(row), answer_width) for row in (old, new)]
        cells = zip_longest(_wrapped(question, question_width), [right], *answers, fillvalue="")
        lines += [_row(line, widths) for line in cells]
    return lines


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    question, right, before, after = cells
    columns = question.ljust(widths[0]), right.rjust(widths[1]), before.ljust(widths[2]), after
    return _GAP.join(columns).rstrip()


def _wrapped(text: str, width: int) -> list[str]:
    """Return a text as at most three lines. A long text keeps its end, because the result is often there."""
    lines = textwrap.wrap(text, width, break_on_hyphens=False)
    if len(lines) > _MAX_LINES:
        end = text[-(width - len("... ")) :]
        lines = [*lines[: _MAX_LINES - 1], f"... {end.partition(' ')[2] or end}"]
    return [line.replace(_NO_BREAK, " ") for line in lines]


def _split(texts: list[str]) -> tuple[str, list[str]]:
    """Return the words that all texts begin and end with, and the remaining words of each text."""
    texts = [printable(text) for text in texts]
    if len(texts) < 2 or max(map(len, texts)) <= _QUESTION_WIDTH:
        return "", texts
    words = [text.split() for text in texts]
    before, after = 0, 0
    shortest = min(map(len, words))
    while before < shortest - 1 and len({line[before] for line in words}) == 1:
        before += 1
    while before + after < shortest - 1 and len({line[-1 - after] for line in words}) == 1:
        after += 1
    if before + after < 2:  # a single common word is not printed separately
        return "", texts
    first = words[0]
    frame = " ".join([*first[:before], "...", *first[len(first) - after :]])
    return frame, [" ".join(line[before : len(line) - after]) for line in words]


def _answer(row: dict[str, Any]) -> str:
    mark = f"{_NO_BREAK}*" if row.get("score") == 1 else ""
    return printable(" ".join(row["completion"].split())) + mark


def _cut(text: str, width: int) -> str:
    """Cut the middle out of a long text."""
    half = (width - 3) // 2
    return text if len(text) <= width else f"{text[: width - 3 - half]}...{text[-half:]}"


def _files(run_dir: Path) -> list[str]:
    named = (
        ("curve.png", "scores, length, KL, mismatch and time"),
        ("report.json", "the numbers above"),
        ("metrics.jsonl", "every metric of every step"),
        ("samples.jsonl", "every trajectory: texts, lengths, versions, scores"),
        ("model", "the trained model, a Hugging Face folder"),
        ("model-ema", "the same model with the moving average of the weights"),
        ("critic", "the critic, a classifier with one label"),
    )
    return [f"{run_dir / name!s:36}  {what}" for name, what in named if (run_dir / name).exists()]
