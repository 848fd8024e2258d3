"""Defines an evaluation and the results of its held-out sets, as stored in the ledger and evaluation.json."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from pydantic import TypeAdapter

from fourfold import metrics as m

from .typed_json import Finite, Whole, check, parse


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """An answer to a held-out prompt, as stored in the ledger and report.json."""

    prompt: str
    completion: str
    answer: str  # the reference answer
    score: Finite | None


Interval = tuple[Finite, Finite]
"""Bounds of a 95 % interval, clustered by task group."""
Measure = Literal["score", "loss", "accuracy", "step accuracy", "pair loss", "label accuracy", "label loss"]
"""What a score is. score: mean of the scorers. loss: minus the loss in nats per token. accuracy: share of pairs in the
order of the data. step accuracy, label accuracy: share of labelled steps or answers on the side of their label. pair
loss, label loss: minus their mean loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtK:
    """Estimate of pass@k or maj@k."""

    k: Whole
    value: Finite  # in [0, 1]: mean over the prompts with at least k scored answers
    half_width: Finite | None  # of the 95 % interval, clustered by task group; None with a single group
    prompt_count: Whole
    interval: Interval | None = None  # None also where an earlier release wrote it


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
    interval: Interval | None = None  # None also where an earlier release wrote it
    measure: Measure = "score"
    loss: Finite | None = None  # mean over pairs, labelled answers or steps; None: the score is all that is measured
    accuracy: Finite | None = None  # share of them that the model orders as the data does; equal ones count half

    @property
    def bounds(self) -> Interval | None:
        """The 95 % interval of the score; also works for results of an earlier release."""
        return _bounds(self.score, self.half_width, self.interval)

    def metrics(self) -> dict[str, float]:
        """Return score, half_width, loss and accuracy (if known), pass_at_K and maj_at_K."""
        known = {"half_width": self.half_width, "loss": self.loss, "accuracy": self.accuracy}
        found = {"score": self.score} | {key: value for key, value in known.items() if value is not None}
        found |= {f"pass_at_{each.k}": each.value for each in self.pass_at}
        return found | {f"maj_at_{each.k}": each.value for each in self.majority_at}


def half_width(interval: Interval | None) -> float | None:
    """Return half of the length of an interval."""
    return None if interval is None else (interval[1] - interval[0]) / 2


def _bounds(score: float, half_width: float | None, interval: Interval | None) -> Interval | None:
    """Return `interval`, or compute it for a result of an earlier release, which has only the half width."""
    return interval or (None if half_width is None else (score - half_width, score + half_width))


def mean_of_sets(sets: Sequence[SetResult]) -> tuple[float, Interval | None]:
    """Return the unweighted mean of the scores of independent sets, and its interval; None if a set has none.

    The distance of a bound from the mean is sqrt(sum of d^2) / n, where d is the distance of a set's bound from its
    score and n the number of sets.
    """
    mean = math.fsum(each.score for each in sets) / len(sets)
    distances = [(r.score - r.interval[0], r.interval[1] - r.score) for r in sets if r.interval is not None]
    if len(distances) < len(sets):
        return mean, None
    below, above = (math.hypot(*side) / len(sets) for side in zip(*distances, strict=True))
    return mean, (mean - below, mean + above)


@dataclass(frozen=True, slots=True)
class EvalRow:
    """One evaluation on the held-out sets."""

    step: Whole
    score: Finite  # of several sets: the unweighted mean
    half_width: Finite | None  # of the 95 % interval; None when a single task group of a set was evaluated
    answer_count: Whole
    missing_count: Whole  # answers without a score
    answers: list[dict[str, Any]]  # a few examples of each set
    sets: tuple[SetResult, ...] = ()  # empty in rows of an earlier release

    @property
    def bounds(self) -> Interval | None:
        """The 95 % interval of the score."""
        return _bounds(self.score, self.half_width, mean_of_sets(self.sets)[1] if self.sets else None)

    @property
    def measure(self) -> Measure:
        """What the score is; see `SetResult.measure`."""
        return self.sets[0].measure if self.sets else "score"

    def scores(self) -> dict[str, tuple[float, Interval | None]]:
        """Return score and interval by metric: `eval/score`, then `eval/NAME/score` of each set."""
        sets = {f"eval/{r.name}/score": (r.score, r.bounds) for r in self.sets}
        return {m.EVAL_SCORE: (self.score, self.bounds)} | sets

    def set_metrics(self) -> dict[str, float]:
        """Return the metrics of each held-out set, such as `eval/NAME/score`."""
        return {f"eval/{result.name}/{key}": value for result in self.sets for key, value in result.metrics().items()}


_RESULTS: Final = TypeAdapter(tuple[SetResult, ...])
_EXAMPLES: Final = TypeAdapter(list[Example])


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result of an evaluation, and the policy versions that sampled its answers."""

    row: EvalRow
    oldest_version: int
    newest_version: int


def write_results(results: Sequence[SetResult]) -> str:
    """Return results as a JSON array."""
    return json.dumps([asdict(result) for result in results])


def read_results(text: str) -> tuple[SetResult, ...]:
    """Return the results of a JSON array that `write_results` made, of this or a later release; raise ValueError."""
    return parse(_RESULTS, text)


def check_examples(value: object) -> list[dict[str, Any]]:
    """Return the answers of an evaluation that are shown; raise ValueError for a value that is not a list of them."""
    return [asdict(example) for example in check(_EXAMPLES, value)]
