"""Defines the advantage of GDPO: each term of the score is compared on its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final, Literal

from fourfold.algorithm.advantages.base import ADVANTAGES, ScoredSamples
from fourfold.algorithm.advantages.grpo import Grpo

if TYPE_CHECKING:
    from fourfold.arrays import Float64Array

# Largest relative error of a sum of some terms in float64, with a wide margin.
_ROUNDING: Final = 1e-12


@ADVANTAGES.register
class Gdpo(Grpo):
    """GRPO on each term of the score, then their weighted sum in units of its deviation over the batch."""

    kind: Literal["gdpo"] = "gdpo"  # type: ignore[assignment]
    normalize_batch: bool = True
    """Divide by the standard deviation of the sums over the samples of the batch, so that the size of the advantages
    does not grow with the number of terms. False: leave the sums as they are, or whiten them over tokens (`whiten`)."""
    source: ClassVar[str] = "arXiv 2601.05242, section 3"
    compares_terms: ClassVar[bool] = True

    def compare(self, batch: ScoredSamples) -> Float64Array:
        """Return the normalised sums, [B]; exactly 0 where no term differs within its group.

        A term is compared among the samples of a group for which its weight is not 0. A term that a gate has switched
        off was not scored: a 0 in its place would be the best score of a penalty, and would move the mean of the
        others. Without terms, the score is the only one.
        """
        if batch.terms is None or batch.weights is None:
            terms, weights = batch.scores[:, None], (batch.scores - batch.scores)[:, None] + 1
        else:
            terms, weights = batch.terms, batch.weights
        sums = batch.scores - batch.scores
        sizes = sums.copy()
        for term, weight in zip(terms.T, weights.T, strict=True):
            (alive,) = weight.nonzero()
            part = ScoredSamples(
                scores=term[alive], groups=[batch.groups[i] for i in alive.tolist()], lengths=batch.lengths[alive]
            )
            weighted = weight[alive] * super().compare(part)
            sums[alive] += weighted
            sizes[alive] += abs(weighted)
        sums[abs(sums) <= _ROUNDING * sizes] = 0.0  # terms that cancel; a division could enlarge what is left
        if not self.normalize_batch or len(sums) < 2:
            return sums
        # The mean over the batch is not subtracted, as in the paper: it is 0 but for rounding, which would give a tiny
        # advantage to every sample that has none.
        scale = sums.std(ddof=1) + self.epsilon
        return sums / scale if scale > 0 else sums

    def formula(self) -> str:
        result = f"S / (std(S) + {self.epsilon:g}), std over the batch, S = " if self.normalize_batch else ""
        return (
            f"{result}sum over the terms k of the score of w_k (r_k - mean(r_k)) / (std(r_k) + {self.epsilon:g}), mean "
            f"and std over the samples of a prompt in which the term counts; 0 for a term in which all scored the same"
        )
