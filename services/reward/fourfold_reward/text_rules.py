"""Defines the built-in verifiers of the form of a completion: `format` and `length`.

Their options come from the recipe, as `options = { ... }` of the table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

from fourfold.reward.function import RewardFunction, Score, ScoreInput
from fourfold_reward.scores import InvalidSample

FORMAT: Final = "format"
LENGTH: Final = "length"


class OptionError(LookupError):
    """An option of a verifier is missing, unknown or wrong. The text has value, rule and fix."""


def load_format(options: Mapping[str, Any]) -> RewardFunction:
    """Return a verifier with the score 1 if `options.pattern` matches the whole completion, else 0.

    `.` matches line ends, too. Raises OptionError: the pattern is missing or invalid.
    """
    check_names(FORMAT, options, {"pattern"})
    text = options.get("pattern")
    if not isinstance(text, str) or not text:
        raise OptionError(f"options.pattern = {text!r:.100}; it must be a regular expression, such as '<a>.*</a>'")
    try:
        pattern = re.compile(text, re.DOTALL)
    except (re.error, RecursionError, OverflowError) as error:
        raise OptionError(f"options.pattern = {text!r:.200} is no regular expression: {error}") from None

    def format_matches(sample: ScoreInput) -> float:
        return float(pattern.fullmatch(sample.completion) is not None)

    return format_matches


def load_length(options: Mapping[str, Any]) -> RewardFunction:
    """Return a verifier that punishes long completions; n is the number of sampled tokens:

        n <= target_tokens                   0
        target_tokens < n < max_tokens       min * (n - target_tokens) / (max_tokens - target_tokens)
        max_tokens <= n                      min

    With min = -1 this is DAPO's soft overlong punishment (arXiv:2503.14476, equation 13), whose cache is max_tokens -
    target_tokens. Raises OptionError: a limit is missing or wrong.
    """
    check_names(LENGTH, options, {"target_tokens", "max_tokens", "min"})
    target, most = (_count(options, name) for name in ("target_tokens", "max_tokens"))
    lowest = options.get("min", -1.0)
    if isinstance(lowest, bool) or not isinstance(lowest, int | float) or not math.isfinite(lowest) or lowest >= 0:
        raise OptionError(f"options.min = {lowest!r:.100}; it must be a number below 0, the score at max_tokens")
    if target >= most:
        raise OptionError(f"options.target_tokens = {target} must be below options.max_tokens = {most}")

    def length(sample: ScoreInput) -> Score:
        count = len(sample.completion_ids)
        if not count and sample.completion:
            raise InvalidSample("BAD_METADATA", "the item has no token arrays, and `length` counts the sampled tokens")
        share = min(max(count - target, 0) / (most - target), 1.0)
        return Score(lowest * share, {"tokens": float(count)})

    return length


def check_names(verifier: str, options: Mapping[str, Any], known: set[str]) -> None:
    """Raise OptionError for an option that the verifier does not have."""
    if unknown := sorted(set(options) - known):
        raise OptionError(f"options.{unknown[0]} is no option of {verifier}; it has {', '.join(sorted(known))}")


def _count(options: Mapping[str, Any], name: str) -> int:
    value = options.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"options.{name} = {value!r:.100}; it must be a number of tokens, at least 1")
    return value
