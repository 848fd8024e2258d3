"""Defines the optimal token baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from fourfold.algorithm.advantages.base import ADVANTAGES, AdvantageEstimator

if TYPE_CHECKING:
    from fourfold.algorithm.comparison import ScoredTokens
    from fourfold.arrays import Float64Array


@ADVANTAGES.register
class OptimalTokenBaseline(AdvantageEstimator):
    """The baseline of least variance for each token, if the gradients of tokens do not depend on each other.

    A sample counts by the squared norm of its gradient so far, measured in the logits: the old policy's forward pass
    gives it, with the probabilities of the whole vocabulary.
    """

    kind: Literal["otb"] = "otb"
    source: ClassVar[str] = "arXiv 2602.07078"
    compares_samples: ClassVar[bool] = True
    compares_tokens: ClassVar[bool] = True
    per_token: ClassVar[bool] = True

    def compare_tokens(self, tokens: ScoredTokens) -> Float64Array:
        """Return G - b, [k]; exactly 0 where there is nothing to compare, or all returns are equal."""
        return tokens.compare()

    def formula(self) -> str:
        return (
            "A_t = G_t - sum(W_t G_t) / sum(W_t), sums over the samples of a prompt that have a token t, 0 if there is "
            "one alone; G_t = sum of R_k over the tokens k from t on, W_t = sum of 1 - 2 pi + sum(pi_v^2) over the "
            "tokens up to t, pi the old probability of the token, pi_v of each token v of the vocabulary"
        )
