"""The built-in verifiers, by name. Each is a reward function; heavy libraries are imported when one is loaded.

A verifier answers 1 or 0 (reasoning-gym tasks: anything between), and abstains when the
sample carries nothing to compare with. An answer that cannot be read as what it should be is
a wrong answer; a comparison that does not end is stopped by the pool and is an error.

Some reasoning-gym tasks give text of the answer, or of the sample, to `eval` or to sympy's
`parse_expr`: TEXT_TASKS. The service offers them only where the recipe says so.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import logging
import re
import warnings
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Final

from fourfold_reward.sample import Abstain, RewardFunction, Score, ScoreInput

GYM: Final = "reasoning_gym"
GYM_PREFIX: Final = "reasoning_gym:"
NO_ANSWER: Final = Abstain("NO_ANSWER")

# The reasoning-gym tasks that a sample's metadata may name, each with its options.
GymOptions = Mapping[str, Mapping[str, Any]]
GymScorer = Callable[[str | None, dict[str, Any]], float]

# Tasks whose `score_answer` runs text as code. A test compares this list with the installed package's source.
TEXT_TASKS: Final = frozenset(
    {
        *("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"),  # eval(answer)
        *("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24"),  # parse_expr(answer)
        "simple_integration",  # parse_expr(answer)
        "bitwise_arithmetic",  # eval(metadata)
        "number_sorting",  # eval(the reference answer)
    }
)

_DESCRIPTIONS: Final[tuple[tuple[str, str], ...]] = (
    ("exact_match", "1 when the completion is the answer, spaces around both left aside"),
    ("last_number", "1 when the last number in the completion equals the last number in the answer"),
    ("math_verify", "1 when the completion's final expression equals the answer, both LaTeX or plain text"),
    (GYM, "the score of the sample's own reasoning-gym task, named by `source_dataset` in its metadata"),
    (
        f"{GYM_PREFIX}TASK",
        "the score of one reasoning-gym task, e.g. reasoning_gym:products. These run text of the sample as code, and "
        f"need reward.evaluate_text = true: {', '.join(sorted(TEXT_TASKS))}",
    ),
)

# A minus that follows a letter, a digit or a bracket is an operator. Commas may group thousands.
_NUMBER: Final = re.compile(
    r"(?:(?<![A-Za-z0-9_.)\]])[-\u2212])?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)
_ANSWER_TAG: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
# What malformed text makes a library raise; anything else is not the text's fault.
_UNREADABLE: Final = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, SyntaxError, AssertionError)
# Metadata that has been JSON has lists where these tasks compare tuples.
_TUPLE_TASKS: Final = frozenset({"arc_agi", "rearc"})


class BadMetadata(ValueError):
    """A sample's metadata lacks what the verifier needs."""


class NotOffered(LookupError):
    """A sample's metadata names a task that the recipe does not offer."""


def describe() -> list[tuple[str, str]]:
    """Return (name, one line) of each built-in verifier."""
    return list(_DESCRIPTIONS)


def is_builtin(name: str) -> bool:
    """Whether `name` is a built-in verifier. The task of "reasoning_gym:TASK" is checked when it is loaded."""
    return name in _LOADERS or name.startswith(GYM_PREFIX)


def evaluates_text(name: str) -> bool:
    """Whether a verifier is a built-in that runs text of a sample as code."""
    return name.startswith(GYM_PREFIX) and name.removeprefix(GYM_PREFIX) in TEXT_TASKS


def may_evaluate_text(name: str, options: GymOptions) -> bool:
    """Whether a verifier runs text of some sample as code: of any sample, or of those that name such a task."""
    return evaluates_text(name) or (name == GYM and not TEXT_TASKS.isdisjoint(options))


def load(name: str, options: GymOptions) -> RewardFunction:
    """Return the built-in verifier `name`, importing what it needs.

    Args:
        name: its name.
        options: of reasoning-gym tasks; `reasoning_gym` alone scores these tasks and no others.

    Raises:
        LookupError: no such reasoning-gym task.
        ImportError: its library is not installed.
    """
    if name.startswith(GYM_PREFIX):
        return _load_gym(name.removeprefix(GYM_PREFIX), options)
    return _LOADERS[name](options)


def exact_match(sample: ScoreInput) -> float | Abstain:
    """Compare the texts, spaces around both left aside."""
    if not sample.answer.strip():
        return NO_ANSWER
    return float(sample.completion.strip() == sample.answer.strip())


def last_number(sample: ScoreInput) -> float | Abstain:
    """Compare the last numbers of completion and answer; "12", "12.0" and "-1,200.50" are numbers."""
    expected = find_last_number(sample.answer)
    if expected is None:
        return NO_ANSWER
    return float(find_last_number(sample.completion) == expected)


def find_last_number(text: str) -> Decimal | None:
    """Return the last integer or decimal of a text, or None."""
    found = None
    for found in _NUMBER.finditer(text):  # noqa: B007 - only the last one counts
        pass
    return Decimal(found[0].replace(",", "").replace("\u2212", "-")) if found else None


def _load_math_verify(_: GymOptions) -> RewardFunction:
    try:
        from math_verify import parse, verify
    except ImportError:
        raise ImportError("verifier math_verify needs the package math-verify: pip install math-verify") from None
    # The library's own time limits swallow a timeout and call the answer wrong. The pool's limit does not.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def math_verify(sample: ScoreInput) -> float | Abstain:
        answer = sample.answer.strip()
        if not answer:
            return NO_ANSWER
        delimited = "$" in answer or "\\boxed" in answer or "\\(" in answer or "\\[" in answer
        gold = parse(answer if delimited else f"${answer}$", parsing_timeout=None)
        if not gold:
            return Abstain("ANSWER_NOT_READABLE")
        given = parse(sample.completion, parsing_timeout=None)
        return float(verify(gold, given, timeout_seconds=None))

    return math_verify


def _load_gym(task: str, options: GymOptions) -> RewardFunction:
    """Return the scorer of one task, or of each sample's own when `task` is empty."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's own syntax warnings
        try:
            from reasoning_gym.factory import DATASETS, create_dataset
        except ImportError:
            raise ImportError(
                f"verifier {GYM} needs the package reasoning-gym: pip install 'fourfold-reward[reasoning-gym]'"
            ) from None
    scorers: dict[str, GymScorer] = {}

    def scorer(name: str) -> GymScorer:
        if name not in scorers:
            if name not in DATASETS or name == "composite":  # a composite's entries name their real task
                close = difflib.get_close_matches(name, DATASETS, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise LookupError(f"{name!r} is not one of the {len(DATASETS)} reasoning-gym tasks{hint}")
            scorers[name] = create_dataset(name, **options.get(name, {})).score_answer
        return scorers[name]

    for name in [task] if task else TEXT_TASKS.intersection(options):
        scorer(name)  # these are scored in processes that end after one sample

    def reasoning_gym(sample: ScoreInput) -> Score:
        name = task or sample.metadata.get("source_dataset")
        if not isinstance(name, str) or not name:
            raise BadMetadata("the metadata has no `source_dataset`; add it, or use the verifier reasoning_gym:TASK")
        if not task and name not in options:
            offered = ", ".join(sorted(options)) or "none"
            raise NotOffered(
                f"source_dataset = {name!r:.100} is not offered here; offered: {offered}. "
                f'Add "reasoning_gym:TASK" to reward.allowed_verifiers'
            )
        try:
            score = scorer(name)
        except LookupError as error:
            raise BadMetadata(f"source_dataset: {error.args[0]}") from None
        return _score_gym(score, name, sample)

    return reasoning_gym


def _score_gym(score: GymScorer, task: str, sample: ScoreInput) -> Score:
    metadata = dict(sample.metadata)
    if task in _TUPLE_TASKS and "output" in metadata:
        metadata["output"] = tuple(tuple(row) for row in metadata["output"])
    # The tasks without a reference answer have None there; on the wire that is an empty text.
    entry = {"question": sample.prompt, "answer": sample.answer or None, "metadata": metadata}
    tagged = _ANSWER_TAG.findall(sample.completion)
    given = (tagged[-1] if tagged else sample.completion).strip()
    with contextlib.redirect_stdout(io.StringIO()):  # some tasks print what they dislike in an answer
        try:
            return Score(score(given, entry))
        except _UNREADABLE:
            # Some tasks raise on what is no answer at all. An entry that can score its own answer is not to blame.
            score(sample.answer or None, entry)
            return Score(0.0, {"unreadable": 1.0})


_LOADERS: Final[dict[str, Callable[[GymOptions], RewardFunction]]] = {
    "exact_match": lambda _: exact_match,
    "last_number": lambda _: last_number,
    "math_verify": _load_math_verify,
    GYM: lambda options: _load_gym("", options),
}
