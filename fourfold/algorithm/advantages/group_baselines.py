"""Defines estimators that subtract a baseline of the group: Dr. GRPO, RLOO, OPO and others."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from fourfold.algorithm.advantages.base import ADVANTAGES, GroupEstimator, ScoredSamples, centred, group_members

if TYPE_CHECKING:
    from fourfold.arrays import Float64Array, Int64Array


@ADVANTAGES.register
class DrGrpo(GroupEstimator):
    """GRPO without the division; the paper also sums token losses with a constant length (`aggregation`)."""

    kind: Literal["dr-grpo"] = "dr-grpo"
    source: ClassVar[str] = "arXiv 2503.20783, section 3.2"

    def relative(self, scores: Float64Array, lengths: Int64Array) -> Float64Array:
        """Return r - mean, [n]."""
        return centred(scores)

    def formula(self) -> str:
        return "r - mean(r), mean over the samples of a prompt"


@ADVANTAGES.register
class ReinforceBaseline(DrGrpo):
    """REINFORCE++-baseline: the same, usually whitened over the batch afterwards."""

    kind: Literal["reinforce-baseline"] = "reinforce-baseline"  # type: ignore[assignment]
    source: ClassVar[str] = "arXiv 2501.03262"


@ADVANTAGES.register
class Rloo(GroupEstimator):
    """Leave-one-out baseline: with n samples, n / (n - 1) times the distance to the mean of all."""

    kind: Literal["rloo"] = "rloo"
    kl_in_score: bool = True
    """With kl.placement = `reward`: the penalty of a sample's tokens is part of r, and so of the baseline, as in the
    paper and TRL. False: it is subtracted from each token after the comparison, as in OpenRLHF."""
    source: ClassVar[str] = "arXiv 2402.14740"

    @property
    def compares_kl(self) -> bool:
        """See `kl_in_score`."""
        return self.kl_in_score

    def relative(self, scores: Float64Array, lengths: Int64Array) -> Float64Array:
        """Return r - mean of the others, [n]."""
        return centred(scores) * (len(scores) / (len(scores) - 1))

    def formula(self) -> str:
        return "r - mean of the others' r, over the samples of a prompt"


@ADVANTAGES.register
class Opo(GroupEstimator):
    """The baseline of least variance when a token's gradient has the same size everywhere."""

    kind: Literal["opo"] = "opo"
    source: ClassVar[str] = "arXiv 2505.23585"

    def relative(self, scores: Float64Array, lengths: Int64Array) -> Float64Array:
        """Return r - sum of n_j r_j / sum of n_j, [n]; 0 when no sample has tokens."""
        return scores - (lengths * scores).sum() / lengths.sum() if lengths.any() else scores - scores

    def formula(self) -> str:
        return "r - sum(n r) / sum(n), over the samples of a prompt, n their sampled tokens"


@ADVANTAGES.register
class Gpg(DrGrpo):
    """Distances to the mean, enlarged by the share of samples that have one: few useful groups count like many."""

    kind: Literal["gpg"] = "gpg"  # type: ignore[assignment]
    source: ClassVar[str] = "arXiv 2504.02546"

    def compare(self, batch: ScoredSamples) -> Float64Array:
        """Return (B / M) (r - mean), [B], M the samples of groups whose scores differ."""
        advantages = super().compare(batch)
        scores = batch.scores
        useful = sum(
            len(members) for members in group_members(batch.groups) if scores[members].min() != scores[members].max()
        )
        return advantages * (len(scores) / useful) if useful else advantages

    def formula(self) -> str:
        return (
            "(B / M) (r - mean(r)), mean over the samples of a prompt; B samples of the batch, M of them in groups "
            "whose scores differ"
        )


@ADVANTAGES.register
class MaxRl(GroupEstimator):
    """Distances in units of the mean: the gradient of the log of the success rate, for scores from 0 on."""

    kind: Literal["max-rl"] = "max-rl"
    source: ClassVar[str] = "arXiv 2602.02710"

    def relative(self, scores: Float64Array, lengths: Int64Array) -> Float64Array:
        """Return (r - mean) / mean, [n]; 0 where the mean is not above 0."""
        mean = scores.mean()
        return centred(scores) / mean if mean > 0 else scores - scores

    def formula(self) -> str:
        return "(r - mean(r)) / mean(r), mean over the samples of a prompt; 0 when it is not above 0"
