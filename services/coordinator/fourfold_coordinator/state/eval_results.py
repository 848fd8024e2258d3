"""Defines the result of a held-out set in one evaluation, as the ledger and evaluation.json store it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AtK:
    """Estimate of pass@k or maj@k."""

    k: int
    value: float  # in [0, 1]: mean over the prompts with at least k scored answers
    half_width: float | None  # of the 95 % interval, clustered by task group; None with a single group
    prompt_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetResult:
    """Result of one held-out set in one evaluation."""

    name: str
    score: float  # mean over the scored answers
    half_width: float | None  # of its 95 % interval, clustered by task group; None with a single group
    answer_count: int  # scored answers, at least 1
    missing_count: int  # answers without a score
    tokens_per_answer: float  # mean over the scored answers
    seconds: float  # from the start of the evaluation to the last score of this set
    pass_at: tuple[AtK, ...]  # by k, ascending
    majority_at: tuple[AtK, ...]

    def metrics(self) -> dict[str, float]:
        """Return score, half_width, pass_at_K and maj_at_K; without a half width that is unknown."""
        found = {"score": self.score} | ({} if self.half_width is None else {"half_width": self.half_width})
        found |= {f"pass_at_{each.k}": each.value for each in self.pass_at}
        return found | {f"maj_at_{each.k}": each.value for each in self.majority_at}


def write_results(results: Sequence[SetResult]) -> str:
    """Return results as a JSON array."""
    return json.dumps([asdict(result) for result in results])


def read_results(text: str) -> tuple[SetResult, ...]:
    """Return the results of a JSON array that `write_results` made."""
    return tuple(
        SetResult(
            **{
                **row,
                "pass_at": tuple(AtK(**each) for each in row["pass_at"]),
                "majority_at": tuple(AtK(**each) for each in row["majority_at"]),
            }
        )
        for row in json.loads(text)
    )
