"""Defines selections: which answers, or pairs of answers, of a scored group are trained on. `[algorithm.selection]`.

    best         the answer with the greatest score: best of n                     arXiv 2304.06767
    above        answers with a score of `threshold` or more                       arXiv 2308.08998
    top          the `count` answers with the greatest scores
    best-worst   one pair: the answers with the greatest and the smallest score    arXiv 2405.07863
    all-pairs    every pair whose scores differ

Rewards of turns do not count. Of equal scores, that of the earlier sample counts as the greater one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Literal, Self

from pydantic import Field, model_validator

from fourfold.table import Table


class SelectionConfig(Table):
    """The samples of a scored group that are trained on; the others are dropped as NOT_SELECTED."""

    kind: Literal["none", "best", "above", "top", "best-worst", "all-pairs"] = "none"
    """none: all samples. best, above, top: answers, each with the same weight. best-worst, all-pairs: pairs, for a loss
    such as `dpo`. A group without any is replaced by another, as by [algorithm.filter]."""
    threshold: float | None = None
    """Smallest score of an answer that is selected; `above` needs it, best and top may have it."""
    count: int = Field(default=1, ge=1)
    """Answers of a group, with top."""
    min_margin: float = Field(default=0.0, ge=0)
    """Smallest difference of the scores of a pair, which always differ; with best-worst and all-pairs."""

    @model_validator(mode="after")
    def _reads_its_keys(self) -> Self:
        if self.kind == "above" and self.threshold is None:
            raise ValueError("kind = `above` selects answers by their score; set threshold, such as threshold = 1.0")
        unread = {
            "threshold": self.threshold is not None and self.kind not in ("best", "above", "top"),
            "count": self.count != 1 and self.kind != "top",
            "min_margin": self.min_margin > 0 and not self.makes_pairs,
        }
        if found := [key for key, is_set in unread.items() if is_set]:
            key = found[0]
            raise ValueError(f"{key} = {getattr(self, key):g} has no effect on kind = `{self.kind}`; remove it")
        return self

    @property
    def makes_pairs(self) -> bool:
        """True if a unit is a pair."""
        return self.kind in ("best-worst", "all-pairs")

    def select(self, scores: Sequence[float]) -> list[int]:
        """Return the indices of the selected samples of a group, in order; none: the group has nothing to train on."""
        order = sorted(range(len(scores)), key=lambda i: -scores[i])  # stable: the earlier one of equal scores first
        match self.kind:
            case "none":
                return list(range(len(scores)))
            case "best-worst":
                ends = order[:1] + order[-1:]
                return sorted(ends) if pairs_of([scores[i] for i in ends], self.min_margin) else []
            case "all-pairs":
                return sorted({i for pair in pairs_of(scores, self.min_margin) for i in pair})
        chosen = order if self.kind == "above" else order[: self.count]
        return sorted(i for i in chosen if self.threshold is None or scores[i] >= self.threshold)


def pairs_of(scores: Sequence[float], min_margin: float = 0.0) -> list[tuple[int, int]]:
    """Return the pairs of a group as indices, the preferred sample first: scores differ, and by `min_margin` or more.

    The pairs of some samples of a group do not depend on its other samples: the coordinator selects the samples of
    all pairs, and the trainer finds the same pairs in them.
    """
    values = [_decimal(score) for score in scores]
    found = [(i, j) if values[i] > values[j] else (j, i) for i, j in combinations(range(len(values)), 2)]
    found = [(w, o) for w, o in found if values[w] > values[o]]
    return [(w, o) for w, o in found if not min_margin or _decimal(values[w] - values[o]) >= min_margin]


def _decimal(value: float) -> float:
    """Return the shortest decimal number of a float32: the same for a score before and after its way to the trainer."""
    import numpy as np  # here, because the check of a recipe loads this module, and no numpy

    return float(str(np.float32(value)))
