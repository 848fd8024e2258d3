"""`fourfold new RECIPE.toml`: writes a commented recipe for one's own data, model and GPUs.

Options that are missing are asked for on a terminal, with what the data and the machine suggest as the default.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fourfold import config as configuration
from fourfold.config import PRESETS, DataConfig, DataSourceConfig
from fourfold.errors import ConfigError
from fourfold.host.hardware import visible_gpus
from fourfold.host.program import program
from fourfold.model import folder as model_folder
from fourfold.model.tokenizer import Tokenizer

from ..data.prompts import chat_messages
from ..data.sources import Row, read_rows

_PROMPT_COLUMNS: Final = ("question", "prompt", "problem", "query", "instruction", "messages", "input", "text")
_ANSWER_COLUMNS: Final = ("answer", "solution", "label", "ground_truth", "target", "expected", "response", "output")
_READ_ROWS: Final = 200
_NUMBER: Final = re.compile(r"\s*[-+]?[\d,]*\.?\d+\s*")
_DEFAULT_MODEL: Final = "builtin:smollm2-135m-instruct"
_FEW_ROWS: Final = 10
_HELD_OUT_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What the recipe is made from."""

    name: str
    model: str
    data: tuple[DataSourceConfig, ...]
    prompt_field: str
    answer_field: str
    reward: str
    preset: str
    system_prompt: str
    max_new_tokens: int
    longest_prompt: int  # tokens of the prompts that were read, with the system message
    rows: int  # that were read; at most _READ_ROWS
    steps: int
    gpus: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="file to write, such as mine.toml; it must not exist")
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="SOURCE",
        help="JSONL, CSV, TSV or Parquet file, dataset folder or hf:OWNER/NAME with training prompts; may be repeated",
    )
    parser.add_argument("--split", default="", help="split of the data sets, such as train")
    parser.add_argument("--config", default="", help="configuration (subset) of data sets of the hub")
    parser.add_argument("--model", help=f"Hugging Face model folder or hf:OWNER/NAME; default: {_DEFAULT_MODEL}")
    parser.add_argument("--prompt-field", metavar="COLUMN", help="column with the prompt; default: found by its name")
    parser.add_argument("--answer-field", metavar="COLUMN", help="column with the reference answer")
    parser.add_argument("--reward", help="a built-in verifier, or FILE.py:FUNCTION; default: by the answers")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="algorithm, default: grpo")
    parser.add_argument("--system-prompt", metavar="TEXT", help="system message before each prompt")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="longest answer")
    parser.add_argument("--steps", type=int, metavar="N", help="training steps, default: 100")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs to use; default: all of this machine")


def main(args: argparse.Namespace) -> int:
    """Write a recipe, check it, and say what to do next; return the exit code."""
    if args.recipe.exists():
        raise ConfigError(f"{args.recipe} exists already; give another name, or remove it")
    ask = _ask_terminal if sys.stdin.isatty() else _take_default
    text = recipe_text(_collect(args, ask))
    try:
        args.recipe.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{args.recipe}: cannot be written ({error.strerror}); give another name") from None
    try:
        configuration.load(args.recipe)
    except ConfigError:
        args.recipe.unlink()
        raise
    print(f"wrote {args.recipe}. Next: {program()} plan {args.recipe}; {program()} run {args.recipe}")
    return 0


Ask = Callable[[str, str], str]


def _ask_terminal(question: str, default: str) -> str:
    try:
        return input(f"{question} [{default}]: ").strip() or default
    except EOFError:  # Ctrl-D
        raise KeyboardInterrupt from None


def _take_default(question: str, default: str) -> str:
    return default


def _collect(args: argparse.Namespace, ask: Ask) -> Answers:
    """Complete the options by questions, whose defaults come from the data and the machine."""
    data = args.data or [ask("Training data (JSONL, CSV, Parquet, dataset folder or hf:OWNER/NAME)", "")]
    if not all(data):
        raise ConfigError("--data is missing: the file or folder with the training prompts")
    sources = {path: DataSourceConfig(path=path, split=args.split, config=args.config) for path in data}
    found = {path: list(itertools.islice(read_rows(source), _READ_ROWS)) for path, source in sources.items()}
    if empty := next((path for path in data if not found[path]), ""):
        raise ConfigError(f"{empty} has no rows; give a file with at least one prompt")
    rows = [row for path in data for row in found[path]]
    prompt_field = args.prompt_field or _column(rows, _PROMPT_COLUMNS, "prompt", ask)
    answer_field = args.answer_field or _column(rows, _ANSWER_COLUMNS, "answer", ask, required=False)
    for option, column in (("--prompt-field", prompt_field), ("--answer-field", answer_field)):
        for path in data:
            if column and column not in found[path][0]:
                raise ConfigError(f"{option} {column}: no such column in {path}; it has {', '.join(found[path][0])}")
    gpus = args.gpus if args.gpus is not None else len(visible_gpus())
    model = args.model or ask("Model folder", _DEFAULT_MODEL)
    system_prompt = args.system_prompt if args.system_prompt is not None else ask("System message", "")
    return Answers(
        name=re.sub(r"[^A-Za-z0-9_-]", "-", args.recipe.stem)[:64] or "mine",
        model=model,
        data=tuple(sources.values()),
        prompt_field=prompt_field,
        answer_field=answer_field,
        reward=args.reward or ask("Reward: a verifier or FILE.py:FUNCTION", _reward(rows, answer_field)),
        preset=args.preset or ask(f"Algorithm ({', '.join(sorted(PRESETS))})", "grpo"),
        system_prompt=system_prompt,
        max_new_tokens=_number(args.max_new_tokens, "Longest answer in tokens", "1024" if gpus else "64", ask),
        longest_prompt=_longest(rows, prompt_field, system_prompt, model),
        rows=len(rows),
        steps=_number(args.steps, "Training steps", "100", ask),
        gpus=gpus,
    )


def _number(given: int | None, question: str, default: str, ask: Ask) -> int:
    if given is not None:
        return given
    text = ask(question, default)
    if not text.isdecimal():
        raise ConfigError(f"{text!r} is no number; write digits, such as 100")
    return int(text)


def _column(rows: Sequence[Row], names: Sequence[str], what: str, ask: Ask, *, required: bool = True) -> str:
    """Return the column with prompts or answers: by its name, or as the user says."""
    columns = list(rows[0])
    found = next((name for name in names if name in columns), "")
    if not found and required and len(columns) == 1:
        found = columns[0]
    chosen = ask(f"Column with the {what} (of {', '.join(columns)})", found)
    if not chosen and required:
        raise ConfigError(f"no column is the {what} by its name, of {', '.join(columns)}; give --{what}-field COLUMN")
    return chosen


def _reward(rows: Sequence[Row], answer_field: str) -> str:
    """Return the verifier that fits the reference answers."""
    answers = [str(row[answer_field]) for row in rows if row.get(answer_field) is not None] if answer_field else []
    if answers and all(_NUMBER.fullmatch(answer) for answer in answers):
        return "last_number"
    if any("\\" in answer or "$" in answer for answer in answers):
        return "math_verify"
    return "exact_match"


def _longest(rows: Sequence[Row], prompt_field: str, system_prompt: str, model: str) -> int:
    """Return the tokens of the longest prompt with the chat template."""
    tokenizer, data = Tokenizer.load(model_folder.resolve(model)), DataConfig(system_prompt=system_prompt)

    def count(value: Any) -> int:
        messages = chat_messages(value, data, f"column {prompt_field!r}")
        return len(tokenizer.encode(tokenizer.render_chat(messages)))

    return max(count(row[prompt_field]) for row in rows if prompt_field in row)


def recipe_text(answers: Answers) -> str:
    """Return the recipe with comments."""
    context = -(-(answers.longest_prompt + answers.max_new_tokens) * 5 // 4 // 64) * 64
    quoted = configuration.toml_value
    lines = [
        "# Check it: fourfold plan RECIPE. Run it: fourfold run RECIPE. All keys: docs/reference/recipe.md",
        f"name = {quoted(answers.name)}",
        "seed = 17",
        f"steps = {answers.steps}",
        "",
        "[model]",
        f"source = {quoted(answers.model)}",
        f"# Prompt and answer; the longest of the first {answers.rows} prompts has {answers.longest_prompt} tokens.",
        f"max_context_tokens = {context}",
        *([] if answers.gpus else ["# CPUs multiply float32 fast, and no small change is lost.", 'dtype = "float32"']),
        "",
        *_data(answers),
        "[sampling]",
        f"max_new_tokens = {answers.max_new_tokens}",
        "",
        "[reward]",
        f"function = {quoted(answers.reward)}",
        "",
        "[batch]",
        "# Each prompt is sampled group_size times. More prompts: steadier and slower steps.",
        *(["prompts_per_step = 64", "group_size = 8"] if answers.gpus else ["prompts_per_step = 8", "group_size = 4"]),
        f"tokens_per_micro_batch = {max(context, 16_384 if answers.gpus else 2048)}",
        "",
        "[algorithm]",
        f"preset = {quoted(answers.preset)}",
        "",
        *_placement(answers.gpus),
        "[checkpoint]",
        "every_steps = 20",
    ]
    return "\n".join(lines) + "\n"


def _data(answers: Answers) -> list[str]:
    quoted = configuration.toml_value
    lines = ["[data]", f"prompt_field = {quoted(answers.prompt_field)}"]
    if answers.answer_field:
        lines.append(f"answer_field = {quoted(answers.answer_field)}")
    if answers.system_prompt:
        lines.append(f"system_prompt = {quoted(answers.system_prompt)}")
    header = "[data.train]" if len(answers.data) == 1 else "[[data.train]]"
    for source in answers.data:
        keys = {"path": source.path, "split": source.split, "config": source.config}
        lines += ["", header, *(f"{key} = {quoted(value)}" for key, value in keys.items() if value)]
    lines.append("")
    if answers.rows < _FEW_ROWS:
        return lines
    return [
        *lines,
        "# Prompts that are never trained on, to measure what the model has learned.",
        "[data.holdout]",
        'field = ""',
        f"groups = {int(answers.rows * _HELD_OUT_SHARE)}",
        "",
        "[evaluation]",
        "every_steps = 10",
        "",
    ]


def _placement(gpus: int) -> list[str]:
    if not gpus:
        return ["[trainer]", "learning_rate = 1e-5", ""]
    return [
        "# Engines and trainer share all GPUs: the engines sleep while the trainer trains.",
        "[placement]",
        "colocated = true",
        "",
        "[rollout]",
        f"replicas = {gpus}",
        "gpus_per_replica = 1",
        "sleep_mode = true",
        "kv_cache_gib = 8  # asked for, not measured: others come and go on the GPU",
        "",
        "[trainer]",
        'device = "cuda"',
        f"ranks = {gpus}",
        "learning_rate = 1e-6",
        "",
    ]
