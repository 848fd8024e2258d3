"""`fourfold new RECIPE.toml`: writes a commented recipe for one's own data, model and GPUs.

Options that are missing are asked for on a terminal, with what the data and the machine suggest as the default.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import itertools
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from fourfold import config as configuration
from fourfold.cli.numbers import whole
from fourfold.config import PRESETS, DataConfig, DataSourceConfig
from fourfold.errors import ConfigError
from fourfold.host.hardware import visible_gpus
from fourfold.host.program import program
from fourfold.model import folder as model_folder
from fourfold.model.tokenizer import Tokenizer
from fourfold.text import choices, clean

from ..data.prompts import answer_of, chat_messages
from ..data.sources import Row, read_rows

_PROMPT_COLUMNS: Final = ("question", "prompt", "problem", "query", "instruction", "messages", "input", "text")
_ANSWER_COLUMNS: Final = ("answer", "solution", "label", "ground_truth", "target", "expected", "response", "output")
_READ_ROWS: Final = 200
_NUMBER: Final = re.compile(r"\s*[-+]?[\d,]*\.?\d+\s*")
_DEFAULT_MODEL: Final = "builtin:smollm2-135m-instruct"
_FEW_ROWS: Final = 10
_HELD_OUT_SHARE: Final = 0.1

T = TypeVar("T")


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
    parser.epilog = (
        "On a terminal, options that are left out are asked for, with a default that Enter takes: --data, "
        "--prompt-field, --answer-field, --model, --system-prompt, --reward, --preset, --max-new-tokens and --steps. "
        "A wrong answer is asked for again. With --yes, or without a terminal, nothing is asked."
    )
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
    parser.add_argument(
        "--answer-field",
        metavar="COLUMN",
        help="column with the reference answer; empty: none; default: found by its name",
    )
    parser.add_argument("--reward", help="a built-in verifier, or FILE.py:FUNCTION; default: by the answers")
    parser.add_argument("--preset", metavar="NAME", help=f"algorithm: {', '.join(sorted(PRESETS))}; default: grpo")
    parser.add_argument("--system-prompt", metavar="TEXT", help="system message before each prompt; default: none")
    parser.add_argument("--max-new-tokens", type=whole, metavar="N", help="longest answer; default: 64, on GPUs 1024")
    parser.add_argument("--steps", type=whole, metavar="N", help="training steps, default: 100")
    parser.add_argument("--gpus", type=whole, metavar="N", help="GPUs to use; default: all of this machine")
    parser.add_argument("--yes", action="store_true", help="ask nothing: take the default of each option left out")


def main(args: argparse.Namespace) -> int:
    """Write a recipe, check it, and say what to do next; return the exit code."""
    _check_place(args.recipe)
    ask = _ask_terminal if sys.stdin.isatty() and not args.yes else _take_default
    text = recipe_text(_collect(args, ask))
    configuration.from_tables(tomllib.loads(text), source="fourfold new")
    try:
        args.recipe.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(args.recipe, error) from None
    name = shlex.quote(str(args.recipe))
    print(f"wrote {args.recipe}. Next: {program()} plan {name}; {program()} run {name}")
    return 0


def _check_place(recipe: Path) -> None:
    """Raise ConfigError if the recipe cannot be written there, before anything is asked."""
    try:
        if recipe.exists():
            raise ConfigError(f"{recipe} exists already; give another name, or remove it")
        if not recipe.parent.is_dir():
            raise ConfigError(f"{recipe}: {recipe.parent} is no folder; make it, or give another name")
    except OSError as error:
        raise _unwritable(recipe, error) from None


def _unwritable(recipe: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{clean(str(recipe), 80)}: cannot be written ({error.strerror}); give another name")


Ask = Callable[[str, str, Callable[[str], T]], T]
"""Takes a question, its default, and a function that returns the value of an answer, or raises ConfigError."""


def _ask_terminal(question: str, default: str, parse: Callable[[str], T]) -> T:
    """Ask until the answer is valid."""
    while True:
        try:
            return parse(input(f"{question} [{default}]: ").strip() or default)
        except ConfigError as error:
            print(f"  {error.message}")
        except EOFError:  # Ctrl-D
            raise KeyboardInterrupt from None


def _take_default(question: str, default: str, parse: Callable[[str], T]) -> T:
    return parse(default)


def _collect(args: argparse.Namespace, ask: Ask[Any]) -> Answers:
    """Complete the options by questions, whose defaults come from the data and the machine."""

    def option(given: str | None, question: str, default: str, parse: Callable[[str], T]) -> T:
        value: T = parse(given) if given is not None else ask(question, default, parse)
        return value

    def read(path: str) -> _Source:
        return _read(path, args)

    found = [read(path) for path in args.data]
    if not found:
        found = [option(None, "Training data (JSONL, CSV, Parquet, dataset folder or hf:OWNER/NAME)", "", read)]
    rows = [row for source in found for row in source.rows]
    gpus = args.gpus if args.gpus is not None else len(visible_gpus())
    prompt_field, answer_field = (
        option(
            given,
            f"Column with the {what} (of {', '.join(rows[0])})",
            _likely_column(rows, names, only=what == "prompt"),
            partial(_check_column, found, what),
        )
        for given, what, names in (
            (args.prompt_field, "prompt", _PROMPT_COLUMNS),
            (args.answer_field, "answer", _ANSWER_COLUMNS),
        )
    )
    model = option(args.model, "Model folder", _DEFAULT_MODEL, _check_model)
    system_prompt = option(args.system_prompt, "System message", "", str)
    reward = _reward(rows, answer_field)
    longest = "1024" if gpus else "64"
    return Answers(
        name=re.sub(r"[^A-Za-z0-9_-]", "-", args.recipe.stem)[:64] or "mine",
        model=model,
        data=tuple(source.config for source in found),
        prompt_field=prompt_field,
        answer_field=answer_field,
        reward=option(args.reward, "Reward: a verifier or FILE.py:FUNCTION", reward, _check_reward),
        preset=option(args.preset, f"Algorithm ({', '.join(sorted(PRESETS))})", "grpo", _check_preset),
        system_prompt=system_prompt,
        max_new_tokens=args.max_new_tokens
        if args.max_new_tokens is not None
        else ask("Longest answer in tokens", longest, _number),
        longest_prompt=_longest(rows, prompt_field, system_prompt, model),
        rows=len(rows),
        steps=args.steps if args.steps is not None else ask("Training steps", "100", _number),
        gpus=gpus,
    )


@dataclass(frozen=True, slots=True)
class _Source:
    """A source of prompts, and its first rows."""

    config: DataSourceConfig
    rows: list[Row]


def _read(path: str, args: argparse.Namespace) -> _Source:
    if not path:
        raise ConfigError("--data is missing: the file or folder with the training prompts")
    config = DataSourceConfig(path=path, split=args.split, config=args.config)
    rows = list(itertools.islice(read_rows(config), _READ_ROWS))
    if not rows:
        raise ConfigError(f"{path} has no rows; give a file with at least one prompt")
    return _Source(config, rows)


def _likely_column(rows: Sequence[Row], names: Sequence[str], *, only: bool) -> str:
    """Return the column that its name tells, or the only one if `only`; empty if there is none."""
    columns = list(rows[0])
    found = next((name for name in names if name in columns), "")
    return columns[0] if only and not found and len(columns) == 1 else found


def _check_column(found: Sequence[_Source], what: str, column: str) -> str:
    """Return the column with prompts or answers. Raises ConfigError: a source lacks it."""
    if not column and what == "prompt":
        raise ConfigError(
            f"no column is the {what} by its name, of {', '.join(found[0].rows[0])}; give --{what}-field COLUMN"
        )
    for source in found:
        if what == "answer" and "." in column:
            answer_of(source.rows[0], column, source.config.path)
        elif column and column not in source.rows[0]:
            raise ConfigError(
                f"--{what}-field {column}: no such column in {source.config.path}; {choices(column, source.rows[0])}"
            )
    return column


def _check_model(source: str) -> str:
    model_folder.check(source)
    return source


def _check_reward(name: str) -> str:
    """Return the name of a reward function. Raises ConfigError: there is none of that name; its code is not run."""
    for entry in importlib.metadata.entry_points(group="fourfold.checks", name="reward"):
        loader = importlib.import_module(f"{entry.module.rpartition('.')[0]}.loader")
        try:
            found = loader.find(name, directory=Path.cwd())
        except loader.VerifierError as error:
            raise ConfigError(f"--reward {error}") from None
        if found.file and not re.search(rf"\b{found.function}\b", found.source):
            raise ConfigError(f"--reward {name}: {found.file} has no {found.function}; name a function of that file")
    return name


def _check_preset(name: str) -> str:
    if name not in PRESETS:
        raise ConfigError(f"--preset {name} is unknown; {choices(name, sorted(PRESETS))}")
    return name


def _number(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"{text!r} is no number of at least 1; write digits, such as 100")
    return int(text)


def _reward(rows: Sequence[Row], answer_field: str) -> str:
    """Return the verifier that fits the reference answers."""
    found = [answer_of(row, answer_field, "--data") for row in rows] if answer_field else []
    answers = [str(answer) for answer in found if answer is not None]
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
        f"prompts_per_step = {64 if answers.gpus else 8}",
        "group_size = 8",
        f"tokens_per_micro_batch = {max(context, 16_384 if answers.gpus else 2048)}",
        "",
        "[algorithm]",
        f"preset = {quoted(answers.preset)}",
        "",
        *_placement(answers.gpus),
        "[checkpoint]",
        f"every_steps = {_interval(answers.steps, 4, 20)}",
    ]
    return "\n".join(lines) + "\n"


def _interval(steps: int, times: int, most: int) -> int:
    """Return the steps between two events that happen at least so many times in a run, as far as it has steps."""
    return max(1, min(most, steps // times))


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
        f"every_steps = {_interval(answers.steps, 2, 10)}",
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
