"""Dynamic sampling (DAPO, arXiv 2503.14476): which groups are worth a place in the batch."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

from fourfold.config.algorithm import FilterConfig


def teaches(scores: Sequence[float], rule: FilterConfig) -> bool:
    """Return whether a group is kept.

    Args:
        scores: of the scorer, before any penalty; at least one.
        rule: of the recipe. `mean-inside` is OpenRLHF's: it keeps a group in which every sample scored 0.5.
    """
    match rule.keep:
        case "varied":
            return max(scores) > min(scores)
        case "mean-inside":
            return rule.low < fsum(scores) / len(scores) < rule.high
        case "all":
            return True
