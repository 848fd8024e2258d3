"""Defines the advantage of ReMax."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from fourfold.algorithm.advantages.base import ADVANTAGES, AdvantageEstimator, ScoredSamples

if TYPE_CHECKING:
    from fourfold.arrays import Float64Array


@ADVANTAGES.register
class Remax(AdvantageEstimator):
    """The score of a greedy completion as the baseline."""

    kind: Literal["remax"] = "remax"
    source: ClassVar[str] = "arXiv 2310.10505"
    needs_greedy_sample: ClassVar[bool] = True

    def compare(self, batch: ScoredSamples) -> Float64Array:
        """Return r - b, [B]."""
        assert batch.greedy_scores is not None, "needs_greedy_sample is set"
        return batch.scores - batch.greedy_scores

    def formula(self) -> str:
        return "r - b, b = score of one more answer to the prompt, sampled greedily and not trained on"
