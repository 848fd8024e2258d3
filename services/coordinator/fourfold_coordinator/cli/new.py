"""`fourfold new RECIPE.toml`: writes a commented recipe for one's own data, model and GPUs.

On a terminal, the command asks for missing options; the data and the machine suggest the defaults.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from fourfold import config as configuration
from fourfold.cli.numbers import whole
from fourfold.config import DataConfig, DataSourceConfig, parse_template
from fourfold.config.algorithm import ALL_PRESETS, AlgorithmConfig
from fourfold.config.reward import ANSWER_VERIFIERS
from fourfold.config.rows import ROW_PRESETS
from fourfold.errors import ConfigError, InvalidInput
from fourfold.host.hardware import visible_gpus
from fourfold.host.program import program
from fourfold.install import find_entry
from fourfold.model import folder as model_folder
from fourfold.model.chat import read_messages
from fourfold.model.tokenizer import Tokenizer
from fourfold.text import choices, clean

from ..data.load_prompts import RawPrompt, answer_of, read_prompt, tokenize
from ..data.sources import Row, read_rows
from ..rows.normal import Form
from .new_rows import RowAnswers, answers_of, proposed_preset, rows_recipe

_PROMPT_COLUMNS: Final[tuple[str, ...]] = (
    "question", "prompt", "problem", "query", "instruction", "messages", "conversations", "input", "text"
)  # fmt: skip
_CONTEXT_COLUMNS: Final = ("input", "context", "passage")  # the column that a prompt refers to, as in Alpaca
_ANSWER_COLUMNS: Final = (
    "reward_model.ground_truth", "answer", "solution", "label", "ground_truth", "reference_answer", "target",
    "expected", "completion", "response", "output",
)  # fmt: skip
_READ_ROWS: Final = 200
_NUMBER: Final = re.compile(r"\s*[-+]?[\d,]*\.?\d+\s*")
_MARK: Final = "####"  # mark before the final answer of a worked solution, as in GSM8K
_ENDS_WITH_NUMBER: Final = re.compile(r"\d\W*$")
_FEW_WORDS: Final = 5
_PRESETS_SHOWN: Final = "grpo, dapo, gspo, rloo, ppo; others: docs/algorithms.md"
_DISTILL: Final = "on-policy-distill"
_PASSES: Final = 20  # default passes over a small data set
_BRIEF: Final = "Reply with only the final answer."
_LONG: Final = {
    "last_number": "Think step by step. The last number of the reply is the final answer.",
    "math_verify": "Think step by step, and put the final answer within \\boxed{}.",
}
_DEFAULT_MODEL: Final = "builtin:smollm2-135m-instruct"
_FEW_ROWS: Final = 10
_HELD_OUT_SHARE: Final = 0.1

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The values from which the recipe is made."""

    name: str
    model: str
    sources: tuple[DataSourceConfig, ...]
    data: DataConfig  # columns and system message
    reward: str
    preset: str
    teacher: str  # model folder or hf:OWNER/NAME of the preset on-policy-distill, else empty
    max_new_tokens: int
    has_long_answers: bool  # whether the reference answers have more than a few words
    longest_prompt: int  # tokens of the prompts that were read, with the system message
    rows: int  # number of rows that were read, at most _READ_ROWS
    steps: int
    gpus: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "On a terminal, options that are left out are asked for, with a default that Enter takes: --data, "
        "--prompt-field, --answer-field, --model, --reward, --system-prompt, --preset, --max-new-tokens and --steps. "
        "A wrong answer is asked for again. With --yes, or without a terminal, nothing is asked."
    )
    parser.add_argument("recipe", type=Path, help="file to write, such as mine.toml; it must not exist")
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="SOURCE",
        help="JSONL, JSON, CSV, TSV or Parquet file, dataset folder or hf:OWNER/NAME with training prompts, or with "
        "rows to train on; may be repeated",
    )
    parser.add_argument("--split", default="", help="split of the data sets, such as train")
    parser.add_argument("--config", default="", help="configuration (subset) of data sets of the hub")
    parser.add_argument("--model", help=f"Hugging Face model folder or hf:OWNER/NAME; default: {_DEFAULT_MODEL}")
    parser.add_argument(
        "--prompt-field",
        metavar="COLUMN",
        help="column with the prompt, or a template as '{instruction} {input}'; default: found by its name",
    )
    parser.add_argument(
        "--answer-field",
        metavar="COLUMN",
        help="column with the reference answer, or COLUMN.KEY; empty: none, or the assistant's last message; default: "
        "found by its name",
    )
    parser.add_argument("--reward", help="a built-in verifier, or FILE.py:FUNCTION; default: by the answers")
    parser.add_argument(
        "--preset",
        metavar="NAME",
        help=f"algorithm: {', '.join(sorted(ALL_PRESETS))}; default: by the data",
    )
    parser.add_argument(
        "--teacher", metavar="MODEL", help="model that judges the tokens, with --preset on-policy-distill"
    )
    parser.add_argument(
        "--system-prompt",
        metavar="TEXT",
        help="system message before each prompt that is a text; default: by the reward",
    )
    parser.add_argument("--max-new-tokens", type=whole, metavar="N", help="longest answer; default: 64, on GPUs 1024")
    parser.add_argument("--steps", type=whole, metavar="N", help="training steps; default: by the rows, at most 100")
    parser.add_argument("--gpus", type=whole, metavar="N", help="GPUs to use; default: all of this machine")
    parser.add_argument("--yes", action="store_true", help="ask nothing: take the default of each option left out")


def main(args: argparse.Namespace) -> int:
    """Write a recipe, check it, and print the next command; return the exit code."""
    _check_place(args.recipe)
    ask = _ask_terminal if sys.stdin.isatty() and not args.yes else _take_default
    read = partial(_read, args)
    question = "Training data (JSONL, JSON, CSV, Parquet, dataset folder or hf:OWNER/NAME)"
    found = [read(path) for path in args.data] or [ask(question, "", read)]
    preset = _row_preset(args, ask, [row for source in found for row in source.rows])
    text = _rows_text(args, ask, found, preset) if preset else recipe_text(_collect(args, ask, found))
    configuration.from_tables(tomllib.loads(text), source="fourfold new")
    try:
        args.recipe.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(args.recipe, error) from None
    name = shlex.quote(str(args.recipe))
    print(f"wrote {args.recipe}. Next: {program()} plan {name}; {program()} run {name}")
    return 0


def _check_place(recipe: Path) -> None:
    """Raise ConfigError if the recipe cannot be written to its path; called before any question."""
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
"""Asks a question, given its default and a function that returns the value of an answer or raises ConfigError."""


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


def _row_preset(args: argparse.Namespace, ask: Ask[Any], rows: Sequence[Row]) -> str:
    """Return the preset of a run that trains on the answers of the data; empty: the data has prompts and a reward."""
    if args.preset or args.reward is not None:
        return args.preset if args.preset in ROW_PRESETS else ""
    form, answers = answers_of(rows)
    if form == Form.COMPLETION and "{" in _likely_prompt(rows):
        return ""  # a prompt of two columns, which a template joins
    # A reward needs answers that a verifier can compare. Longer ones are trained on, as are pairs and labels.
    if form is None or (answers and not (_reward(answers) == "exact_match" and _are_long(answers))):
        return ""
    if proposed := proposed_preset(form):
        question = f"Algorithm ({proposed} trains on the answers of the data; with a reward: {_PRESETS_SHOWN})"
        args.preset = ask(question, proposed, _check_preset)
    return args.preset if args.preset in ROW_PRESETS else ""


def _rows_text(args: argparse.Namespace, ask: Ask[Any], found: Sequence[_Source], preset: str) -> str:
    """Return the recipe of a run of rows."""
    for flag, value in (("--reward", args.reward), ("--max-new-tokens", args.max_new_tokens)):
        if value is not None:
            raise ConfigError(
                f"{flag} {value}: {preset} trains on the answers of the data, and samples none; remove it"
            )
    model = args.model
    fields = {key: getattr(args, key) for key in ("prompt_field", "answer_field", "system_prompt")}
    return rows_recipe(
        RowAnswers(
            name=_name(args.recipe),
            model=ask("Model folder or hf:OWNER/NAME", _DEFAULT_MODEL, _check_model) if model is None else model,
            sources=tuple(source.config for source in found),
            rows=[row for source in found for row in source.rows],
            preset=preset,
            fields={key: value for key, value in fields.items() if value},
            steps=args.steps if args.steps is not None else 0,
            gpus=args.gpus if args.gpus is not None else len(visible_gpus()),
        )
    )


def _name(recipe: Path) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", recipe.stem)[:64] or "mine"


def _collect(args: argparse.Namespace, ask: Ask[Any], found: list[_Source]) -> Answers:
    """Ask for the missing options, with defaults from the data and the machine."""

    def option(given: str | None, question: str, default: str, parse: Callable[[str], T]) -> T:
        value: T = parse(given) if given is not None else ask(question, default, parse)
        return value

    rows = [row for source in found for row in source.rows]
    gpus = args.gpus if args.gpus is not None else len(visible_gpus())
    columns = ", ".join(rows[0])
    prompt_field = option(
        args.prompt_field,
        f"Column with the prompt (of {columns}), or a template with {{COLUMN}}",
        _likely_prompt(rows).replace("\n", "\\n"),
        partial(_check_prompt, found),
    )
    answer_field = option(
        args.answer_field, f"Column with the answer (of {columns})", _likely_answer(rows), partial(_check_answer, found)
    )
    model = option(args.model, "Model folder or hf:OWNER/NAME", _DEFAULT_MODEL, _check_model)
    found, data = _source_keys(found, prompt_field, answer_field)
    values = [raw.answer for _, raw in _prompts(found, data)]
    answers = [str(value) for value in values if isinstance(value, str | int | float) and str(value).strip()]
    reward = option(
        args.reward,
        "Reward: a verifier or FILE.py:FUNCTION",
        _reward(answers),
        partial(_check_reward, has_answers=bool(answers)),
    )
    # The system message is put only before plain texts.
    has_texts = "{" in prompt_field or any(isinstance(row.get(prompt_field), str) for row in rows)
    default = _system_prompt(reward, gpus) if has_texts and not data.answer_from_messages else ""
    data = data.model_copy(update={"system_prompt": option(args.system_prompt, "System message", default, str)})
    longest = "1024" if gpus else "64"
    steps = str(_steps(len(rows), gpus))
    preset = option(args.preset, f"Algorithm ({_PRESETS_SHOWN})", "grpo", _check_preset)
    teacher = ""
    if AlgorithmConfig(preset=preset).distills:
        teacher = option(args.teacher, "Teacher, a model with the same vocabulary", "", _check_teacher)
    elif args.teacher:
        raise ConfigError(f"--teacher {args.teacher}: --preset {preset} has no teacher; take {_DISTILL}, or remove it")
    return Answers(
        name=_name(args.recipe),
        model=model,
        sources=tuple(source.config for source in found),
        data=data,
        reward=reward,
        preset=preset,
        teacher=teacher,
        max_new_tokens=args.max_new_tokens
        if args.max_new_tokens is not None
        else ask("Longest answer in tokens", longest, _number),
        has_long_answers=_are_long(answers),
        longest_prompt=_longest(_prompts(found, data), data, model),
        rows=len(rows),
        steps=args.steps if args.steps is not None else ask("Training steps", steps, _number),
        gpus=gpus,
    )


def _steps(rows: int, gpus: int) -> int:
    """Return the proposed steps: 100, or with few rows those of _PASSES passes, and at least 10."""
    return 100 if rows >= _READ_ROWS else min(100, max(10, -(-_PASSES * rows // _prompts_per_step(gpus))))


def _prompts_per_step(gpus: int) -> int:
    return 64 if gpus else 8


def _system_prompt(reward: str, gpus: int) -> str:
    """Return the proposed system message, which tells the model where the reward looks for the answer."""
    if reward not in ANSWER_VERIFIERS:
        return ""
    return _LONG.get(reward, _BRIEF) if gpus else _BRIEF


@dataclass(frozen=True, slots=True)
class _Source:
    """A source of prompts, and its first rows."""

    config: DataSourceConfig
    rows: list[Row]


def _read(args: argparse.Namespace, path: str) -> _Source:
    if not path:
        raise ConfigError("--data is missing: the file or folder with the training prompts")
    config = DataSourceConfig(path=path, split=args.split, config=args.config)
    rows = list(itertools.islice(read_rows(config), _READ_ROWS))
    if not rows:
        raise ConfigError(f"{path} has no rows; give a file with at least one prompt")
    return _Source(config, rows)


def _source_keys(found: Sequence[_Source], prompt_field: str, answer_field: str) -> tuple[list[_Source], DataConfig]:
    """Return the sources with their template, and the keys that read their rows."""
    template = prompt_field if "{" in prompt_field else ""
    keys = {
        "answer_field": answer_field,
        "answer_from_messages": any(_ends_with_reply(row.get(prompt_field)) for each in found for row in each.rows),
        **({} if template else {"prompt_field": prompt_field}),
    }
    sources = [replace(each, config=each.config.model_copy(update={"template": template})) for each in found]
    return sources, DataConfig.model_validate(keys)


def _ends_with_reply(value: Any) -> bool:
    try:
        return isinstance(value, list) and read_messages(value)[-1]["role"] == "assistant"
    except InvalidInput:
        return False


def _prompts(found: Sequence[_Source], data: DataConfig) -> list[tuple[str, RawPrompt]]:
    """Return the place and the prompt of each row. Raises ConfigError: a prompt is malformed."""
    places = [(f"{each.config.path}, row {n}", each.config, row) for each in found for n, row in enumerate(each.rows)]
    return [(where, read_prompt(row, config, data, where)) for where, config, row in places]


def _longest(prompts: Sequence[tuple[str, RawPrompt]], data: DataConfig, model: str) -> int:
    """Return the tokens of the longest prompt with the chat template."""
    tokenizer = Tokenizer.load(model_folder.resolve(model))
    return max(len(tokenize(raw, data, tokenizer, where)[1]) for where, raw in prompts)


def _likely_prompt(rows: Sequence[Row]) -> str:
    """Return the column with a typical name, or the only one, or a template of two columns; empty if there is none."""
    names = [name for name in _PROMPT_COLUMNS if name in rows[0]] or (list(rows[0]) if len(rows[0]) == 1 else [])
    if not names:
        return ""
    for other in _CONTEXT_COLUMNS:
        texts = [(row.get(names[0]), row.get(other)) for row in rows if other != names[0]]
        if any(isinstance(prompt, str) and isinstance(text, str) and text for prompt, text in texts):
            return f"{{{names[0]}}}\n{{{other}}}"
    return names[0]


def _likely_answer(rows: Sequence[Row]) -> str:
    """Return the column, or COLUMN.KEY, with a typical name; empty if there is none."""
    for name in _ANSWER_COLUMNS:
        column, _, key = name.partition(".")
        values = [row.get(column) for row in rows]
        if any(isinstance(v, dict) and key in v if key else v is not None and not isinstance(v, dict) for v in values):
            return name
    return ""


def _check_prompt(found: Sequence[_Source], prompt: str) -> str:
    """Return the column with the prompts, or a template. Raises ConfigError: a source lacks a column."""
    if not prompt:
        raise ConfigError(
            f"no column is the prompt by its name, of {', '.join(found[0].rows[0])}; give --prompt-field COLUMN"
        )
    if "{" not in prompt:
        return _check_column(found, "prompt", prompt)
    prompt = prompt.replace("\\n", "\n")
    try:
        for _, column in parse_template(prompt):
            _check_column(found, "prompt", column)
    except ValueError as error:
        raise ConfigError(f"--prompt-field: {error}") from None
    return prompt


def _check_answer(found: Sequence[_Source], column: str) -> str:
    """Return the column with the answers; empty: none. Raises ConfigError: a source lacks it."""
    if "." not in column:
        return _check_column(found, "answer", column)
    for source in found:
        answer_of(source.rows[0], column, source.config.path)
    return column


def _check_column(found: Sequence[_Source], what: str, column: str) -> str:
    for source in found:
        if column and column not in source.rows[0]:
            raise ConfigError(
                f"--{what}-field {column}: no such column in {source.config.path}; {choices(column, source.rows[0])}"
            )
    return column


def _check_model(source: str) -> str:
    model_folder.check(source)
    return source


def _check_reward(name: str, *, has_answers: bool) -> str:
    """Return the name of a reward function. Raises ConfigError: there is none of that name; its code is not run."""
    if not has_answers and (not name or name in ANSWER_VERIFIERS):
        raise ConfigError(
            f"--reward {name or 'is missing'}: no row has a text or a number as its reference answer, which "
            f"{', '.join(ANSWER_VERIFIERS)} need; give --answer-field COLUMN, or --reward FILE.py:FUNCTION"
        )
    if check := find_entry("fourfold.verifiers", "check"):
        try:
            check.load()(name, directory=Path.cwd())
        except ConfigError as error:
            raise ConfigError(f"--reward {error.message}") from None
    return name


def _check_preset(name: str) -> str:
    if name not in ALL_PRESETS:
        raise ConfigError(f"--preset {name} is unknown; {choices(name, sorted(ALL_PRESETS))}")
    return name


def _check_teacher(name: str) -> str:
    if not name:
        raise ConfigError(f"--teacher is missing: the model that judges each token, which --preset {_DISTILL} needs")
    return _check_model(name)


def _number(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"{text!r} is no number of at least 1; write digits, such as 100")
    return int(text)


def _reward(answers: Sequence[str]) -> str:
    """Return the verifier that fits the reference answers; empty without answers."""
    if not answers:
        return ""
    marked = all(_MARK in answer for answer in answers)
    finals = [answer.rpartition(_MARK)[2] if marked else answer for answer in answers]
    if all(_NUMBER.fullmatch(final) for final in finals):
        return "last_number"
    if marked or any("\\" in answer or "$" in answer for answer in answers):
        return "math_verify"
    solutions = _are_long(answers) and all(_ENDS_WITH_NUMBER.search(answer) for answer in answers)
    return "last_number" if solutions else "exact_match"


def _are_long(answers: Sequence[str]) -> bool:
    return sum(len(answer.split()) > _FEW_WORDS for answer in answers) > len(answers) / 2


def recipe_text(answers: Answers) -> str:
    """Return the recipe with comments."""
    context = -(-(answers.longest_prompt + answers.max_new_tokens) * 5 // 4 // 64) * 64
    quoted = configuration.toml_value
    longest_unit = context * (2 if AlgorithmConfig(preset=answers.preset).selection.makes_pairs else 1)
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
        *_reward_table(answers),
        "[batch]",
        "# Each prompt is sampled group_size times. More prompts: steadier and slower steps.",
        f"prompts_per_step = {_prompts_per_step(answers.gpus)}",
        "group_size = 8",
        f"tokens_per_micro_batch = {max(longest_unit, 16_384 if answers.gpus else 2048)}",
        "",
        *_algorithm(answers),
        *_placement(answers.gpus),
        "[checkpoint]",
        f"every_steps = {_interval(answers.steps, 4, 20)}",
    ]
    return "\n".join(lines) + "\n"


def _reward_table(answers: Answers) -> list[str]:
    if answers.teacher and answers.rows < _FEW_ROWS:  # nothing is held out, and a teacher takes the place of scores
        return []
    long = answers.reward == "exact_match" and answers.has_long_answers
    comments = ["# It scores equal texts alone. For long answers write a function, or take a judge: docs/rewards.md"]
    comments = comments * long + ["# Of held-out answers; in training the teacher judges."] * bool(answers.teacher)
    return ["[reward]", *comments, f"function = {configuration.toml_value(answers.reward)}", ""]


def _algorithm(answers: Answers) -> list[str]:
    quoted = configuration.toml_value
    lines = ["[algorithm]", f"preset = {quoted(answers.preset)}", ""]
    if answers.preset == "rejection-sampling" and answers.reward in ANSWER_VERIFIERS:
        lines += ["# All right answers. The preset's kind, best, takes one of each group, also where none is right."]
        lines += ["[algorithm.selection]", 'kind = "above"', "threshold = 1.0", ""]
    if answers.teacher:
        lines += [
            "# The teacher. It has the vocabulary of the model.",
            "[reference]",
            f"source = {quoted(answers.teacher)}",
        ]
        lines += ['device = "cuda"', ""] if answers.gpus else [""]
    return lines


def _interval(steps: int, times: int, most: int) -> int:
    """Return the interval of an event that is to happen at least `times` times in a run, as far as it has steps."""
    return max(1, min(most, steps // times))


def _keys(table: DataConfig | DataSourceConfig) -> list[str]:
    """Return the lines of the keys that have a value."""
    values = table.model_dump(exclude_unset=True)
    return [f"{key} = {configuration.toml_value(value)}" for key, value in values.items() if value]


def _data(answers: Answers) -> list[str]:
    lines = ["[data]", *_keys(answers.data)]
    header = "[data.train]" if len(answers.sources) == 1 else "[[data.train]]"
    for source in answers.sources:
        lines += ["", header, *_keys(source)]
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
