"""Defines the result of a held-out set in one evaluation, as the ledger and evaluation.json store it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from pydantic import TypeAdapter

from .typed_json import Finite, Whole, check, parse


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """An answer to a held-out prompt, as a row of the ledger and report.json have it."""

    prompt: str
    completion: str
    answer: str  # the reference answer
    score: Finite | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AtK:
    """Estimate of pass@k or maj@k."""

    k: Whole
    value: Finite  # in [0, 1]: mean over the prompts with at least k scored answers
    half_width: Finite | None  # of the 95 % interval, clustered by task group; None with a single group
    prompt_count: Whole


@dataclass(frozen=True, slots=True, kw_only=True)
class SetResult:
    """Result of one held-out set in one evaluation."""

    name: str
    score: Finite  # mean over the scored answers
    half_width: Finite | None  # of its 95 % interval, clustered by task group; None with a single group
    answer_count: Whole  # scored answers, at least 1
    missing_count: Whole  # answers without a score
    tokens_per_answer: Finite  # mean over the scored answers
    seconds: Finite  # from the start of the evaluation to the last score of this set
    pass_at: tuple[AtK, ...]  # by k, ascending
    majority_at: tuple[AtK, ...]

    def metrics(self) -> dict[str, float]:
        """Return score, half_width, pass_at_K and maj_at_K; without a half width that is unknown."""
        found = {"score": self.score} | ({} if self.half_width is None else {"half_width": self.half_width})
        found |= {f"pass_at_{each.k}": each.value for each in self.pass_at}
        return found | {f"maj_at_{each.k}": each.value for each in self.majority_at}


_RESULTS: Final = TypeAdapter(tuple[SetResult, ...])
_EXAMPLES: Final = TypeAdapter(list[Example])


def write_results(results: Sequence[SetResult]) -> str:
    """Return results as a JSON array."""
    return json.dumps([asdict(result) for result in results])


def read_results(text: str) -> tuple[SetResult, ...]:
    """Return the results of a JSON array that `write_results` made, of this or a later release; raise ValueError."""
    return parse(_RESULTS, text)


def check_examples(value: object) -> list[dict[str, Any]]:
    """Return the answers of an evaluation that are shown; raise ValueError for a value that is not a list of them."""
    return [asdict(example) for example in check(_EXAMPLES, value)]
