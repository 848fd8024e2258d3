"""Defines the built-in verifiers: reward functions that compare a completion with the reference answer.

A verifier returns 1 or 0 (reasoning-gym tasks: any number between), and abstains if the sample has no usable reference
answer. A completion that cannot be parsed is wrong. Some reasoning-gym tasks pass text of the sample to `eval` or to
sympy's `parse_expr` (EVALUATING_TASKS); they need `reward.evaluate_text = true`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from fourfold.answers import find_boxed, find_last_number, find_tagged, without_reasoning, write_out_numbers
from fourfold.install import install_command
from fourfold.reward.function import Abstain, RewardFunction, Score, ScoreInput
from fourfold.text import nearest_name
from fourfold_reward import text_rules
from fourfold_reward.code import verifier as code_verifier
from fourfold_reward.code.verifier import CODE_TESTS
from fourfold_reward.scores import InvalidSample as InvalidSample
from fourfold_reward.text_rules import FORMAT, LENGTH

GYM: Final = "reasoning_gym"
GYM_PREFIX: Final = "reasoning_gym:"
NO_ANSWER: Final = Abstain("NO_ANSWER")

# Options by verifier: of the reasoning-gym tasks that a sample's metadata may name, and of other built-in verifiers.
GymOptions = Mapping[str, Mapping[str, Any]]
GymScorer = Callable[[str | None, dict[str, Any]], float]

# Tasks whose `score_answer` runs text as code. A test compares this list with the source of the installed package.
EVALUATING_TASKS: Final = frozenset(
    {
        *("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"),  # eval(answer)
        *("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24"),  # parse_expr(answer)
        "simple_integration",  # parse_expr(answer)
        "bitwise_arithmetic",  # eval(metadata)
        "number_sorting",  # eval(the reference answer)
    }
)

# Name and description of each built-in verifier.
DESCRIPTIONS: Final[tuple[tuple[str, str], ...]] = (
    ("exact_match", "1 if the completion equals the answer, without surrounding spaces"),
    (
        "last_number",
        "1 if the last number in the completion, outside of its reasoning, equals the last number in the answer. With "
        "options.pattern the whole completion must also match this regular expression",
    ),
    ("math_verify", "1 if the final expression of the completion equals the answer; both are LaTeX or plain text"),
    (FORMAT, "1 if the regular expression options.pattern matches the whole completion"),
    (
        LENGTH,
        "0 up to options.target_tokens sampled tokens, then linear to options.min (default -1) at options.max_tokens",
    ),
    (
        CODE_TESTS,
        "the share of passed tests of the last Python block; the tests are asserts or input and output, in the column "
        "`tests`. It runs the block in a sandbox and needs reward.evaluate_text = true",
    ),
    (GYM, "the score of the reasoning-gym task that `source_dataset` in the sample's metadata names"),
    (
        f"{GYM_PREFIX}TASK",
        "the score of one reasoning-gym task, e.g. reasoning_gym:products. These tasks run text of the sample as code "
        f"and need reward.evaluate_text = true: {', '.join(sorted(EVALUATING_TASKS))}",
    ),
)

_NAMES: Final = frozenset(name for name, _ in DESCRIPTIONS)

_DECIMALS: Final = 6
_JOINT: Final = re.compile(r"\}[\s$]*(?:,(?:\s*(?:and|or)\b)?|(?:and|or)\b)[\s$]*\Z")  # between the boxes of one answer
_NO_FORMULA: Final = re.compile(
    r"[$#*\n]|\\[(\[]|\\boxed|(?<![\\{A-Za-z])[A-Za-z]{3}"
)  # otherwise LaTeX without a sign
_MAX_BOXES: Final = 6  # as math-verify
# Raised by libraries for malformed text. Any other exception is an error of the verifier.
_UNREADABLE: Final = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, SyntaxError, AssertionError)
# These tasks compare tuples, and JSON turned the tuples of their metadata into lists.
_TUPLE_TASKS: Final = frozenset({"arc_agi", "rearc"})


def is_pure(name: str) -> bool:
    """Return whether a built-in verifier gives equal samples equal scores, and depends on nothing else."""
    return name in ("exact_match", "last_number", "math_verify", FORMAT, LENGTH)


def is_builtin(name: str) -> bool:
    """Return whether `name` is a built-in verifier. `load` checks the task of "reasoning_gym:TASK"."""
    return name in _NAMES or name.startswith(GYM_PREFIX)


def find_evaluating(name: str, options: GymOptions) -> str:
    """Return the verifier, or its task as "reasoning_gym:TASK", if it runs text of samples as code; empty if not."""
    if name == CODE_TESTS:
        return name
    tasks = options if name == GYM else [name.removeprefix(GYM_PREFIX)]
    return next((GYM_PREFIX + task for task in tasks if task in EVALUATING_TASKS), "")


def load(name: str, options: GymOptions) -> RewardFunction:
    """Return a built-in verifier and import its libraries. `reasoning_gym` scores only the tasks in `options`.

    Raises:
        LookupError: unknown reasoning-gym task, or a wrong option.
        ImportError: a library is not installed.
    """
    match name:
        case "exact_match":
            return exact_match
        case "last_number":
            return _load_last_number(options.get(name, {}))
        case "math_verify":
            return _load_math_verify()
        case text_rules.FORMAT:
            return text_rules.load_format(options.get(name, {}))
        case text_rules.LENGTH:
            return text_rules.load_length(options.get(name, {}))
        case code_verifier.CODE_TESTS:
            return code_verifier.load(options.get(name, {}))
    return _load_gym("" if name == GYM else name.removeprefix(GYM_PREFIX), options)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint at the most similar known name, to be appended to an error; empty if none is similar."""
    near = nearest_name(name, known)
    return f"; did you mean {near!r}?" if near else ""


def exact_match(sample: ScoreInput) -> float | Abstain:
    """Compare the texts without surrounding spaces."""
    if not sample.answer.strip():
        return NO_ANSWER
    return float(sample.completion.strip() == sample.answer.strip())


def last_number(sample: ScoreInput) -> float | Abstain:
    """Compare the last numbers of completion and answer, such as "12", "12.0" or "-1,200.50", by value."""
    expected = find_last_number(sample.answer)
    if expected is None:
        return NO_ANSWER
    return float(find_last_number(without_reasoning(sample.completion, sample.prompt)) == expected)


def _load_last_number(options: Mapping[str, Any]) -> RewardFunction:
    """Return `last_number`; with `options.pattern`, a completion that does not match it as a whole scores 0."""
    text_rules.check_names("last_number", options, {"pattern"})
    if not options:
        return last_number
    matches = text_rules.load_format(options)

    def last_number_of_form(sample: ScoreInput) -> float | Abstain:
        score = last_number(sample)
        return score if isinstance(score, Abstain) or matches(sample) else 0.0

    return last_number_of_form


def _load_math_verify() -> RewardFunction:
    try:
        from math_verify import parse, verify
    except ImportError:
        raise ImportError(
            f"verifier math_verify needs the package math-verify: {install_command('math-verify')}"
        ) from None
    # The library scores an answer 0 when its own time limits expire, so they are off. The pool's limit is an error.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def math_verify(sample: ScoreInput) -> float | Abstain:
        answer = write_out_numbers(sample.answer.strip())
        if not answer:
            return NO_ANSWER
        delimited = "$" in answer or "\\boxed" in answer or "\\(" in answer or "\\[" in answer
        gold = parse(answer if delimited else f"${answer}$", parsing_timeout=None)
        if not gold:
            return Abstain("ANSWER_NOT_READABLE")
        # "first_match": the library would otherwise take an earlier expression where the last one cannot be parsed.
        given = parse(_final_expression(sample), parsing_timeout=None, extraction_mode="first_match")
        return float(verify(gold, given, float_rounding=_decimals(gold[0]), timeout_seconds=None))

    return math_verify


def _final_expression(sample: ScoreInput) -> str:
    """Return the part of a completion with its final answer: that which is marked, or all outside of its reasoning."""
    text = without_reasoning(sample.completion, sample.prompt)
    tagged = find_tagged(text)
    if tagged is not None:
        formula = tagged.removesuffix(".")
        text = f"${formula}$" if formula and not _NO_FORMULA.search(formula) else tagged
    if (boxed := find_boxed(text)) is not None:
        text = f"\\boxed{{{','.join(_joined_boxes(text, boxed))}}}" if boxed else ""
    return write_out_numbers(text)


def _joined_boxes(text: str, last: str) -> list[str]:
    r"""Return the content of the last box, after those that are joined to it, as in `\boxed{1} and \boxed{2}`."""
    boxes = [last]
    while len(boxes) < _MAX_BOXES and (joint := _JOINT.search(text, 0, text.rindex("\\boxed"))):
        text = text[: joint.start()]
        boxed = find_boxed(text + "}")
        if not boxed or not text.rstrip().endswith(boxed):  # the brace does not end a box
            break
        boxes.insert(0, boxed)
    return boxes


def _decimals(gold: Any) -> int:
    """Return the decimals by which math-verify compares floats. Its default, 6, makes all numbers below 5e-7 equal."""
    try:
        size = abs(float(gold))
    except (TypeError, ValueError, ArithmeticError, AttributeError):  # no single real number
        return _DECIMALS
    return max(_DECIMALS, 3 - math.floor(math.log10(size))) if 0 < size < 1 else _DECIMALS


def _load_gym(task: str, options: GymOptions) -> RewardFunction:
    """Return the verifier of one task; if `task` is empty, of the task that each sample names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # syntax warnings of the library itself
        try:
            from reasoning_gym.factory import DATASETS, create_dataset
        except ImportError:
            raise ImportError(
                f"verifier {GYM} needs the package reasoning-gym: {install_command('fourfold-reward[reasoning-gym]')}"
            ) from None
    scorers: dict[str, GymScorer] = {}

    def scorer(name: str) -> GymScorer:
        if name not in scorers:
            if name not in DATASETS or name == "composite":  # entries of a composite name their real task
                hint = did_you_mean(name, DATASETS)
                raise LookupError(f"{name!r} is not one of the {len(DATASETS)} reasoning-gym tasks{hint}")
            scorers[name] = create_dataset(name, **options.get(name, {})).score_answer
        return scorers[name]

    # Evaluating tasks are scored in a fork per sample, which would create the scorer anew each time.
    for name in [task] if task else EVALUATING_TASKS.intersection(options):
        scorer(name)

    def reasoning_gym(sample: ScoreInput) -> Score:
        name = task or sample.metadata.get("source_dataset")
        if not isinstance(name, str) or not name:
            raise InvalidSample(
                "BAD_METADATA", "the metadata has no `source_dataset`; add it, or use the verifier reasoning_gym:TASK"
            )
        if not task and name not in options:
            allowed = ", ".join(sorted(options)) or "none"
            raise InvalidSample(
                "NOT_FOUND",
                f"source_dataset = {name!r:.100} is not allowed here; allowed: {allowed} (the tasks of [data]). "
                f"Add it there",
            )
        try:
            score = scorer(name)
        except LookupError as error:
            raise InvalidSample("BAD_METADATA", f"source_dataset: {error.args[0]}") from None
        return _score_gym(score, name, sample)

    return reasoning_gym


def _score_gym(score: GymScorer, task: str, sample: ScoreInput) -> Score:
    metadata = dict(sample.metadata)
    if task in _TUPLE_TASKS and "output" in metadata:
        metadata["output"] = tuple(tuple(row) for row in metadata["output"])
    # A task without a reference answer expects None, which is an empty string in a request.
    entry = {"question": sample.prompt, "answer": sample.answer or None, "metadata": metadata}
    completion = without_reasoning(sample.completion, sample.prompt)
    tagged = find_tagged(completion)
    given = completion.strip() if tagged is None else tagged
    with contextlib.redirect_stdout(io.StringIO()):  # some tasks print errors of an answer
        try:
            return Score(score(given, entry))
        except _UNREADABLE:
            # Some tasks raise on malformed answers. If the reference answer raises as well, the sample is at fault.
            score(sample.answer or None, entry)
            return Score(0.0, {"unreadable": 1.0})
