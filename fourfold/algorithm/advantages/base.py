"""Defines advantage estimators: their inputs, their results, and the registry. numpy float64.

    B         samples, in groups of one prompt each; groups may differ in size. A trajectory of several segments is one
    k         action tokens of all samples, packed: one sample after another (packed.py)
    u         turns of all samples (comparison.py)
    r         [B]  score of a sample after shaping (rewards.py)
    R         [k]  reward of a token (rewards.py)
    V         [k]  the critic's estimate of the state before the token
    A         [k]  advantage

An estimator has two parts, in this order: `compare` turns the scores into one number per sample, by comparison with
other samples, or `compare_turns` the rewards of turns into one number per turn; `spread` turns rewards into one number
per token, which `compare_tokens` may compare with those of other samples. `compare` gets the whole batch, and `spread`
about a million tokens at a time, always whole samples: a token's number may depend on its own sample only. The
defaults: scores are not compared, and A is the sum of the rewards that are still to come.

The modules of this package import no numpy and call only methods of its arrays: without the import,
`fourfold plan` starts 0.1 s sooner.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

from pydantic import BeforeValidator, SerializeAsAny

from fourfold.algorithm.registry import Definition, Registry

if TYPE_CHECKING:
    from fourfold.algorithm.comparison import ScoredTokens, ScoredTurns
    from fourfold.algorithm.packed import PackedRewards
    from fourfold.arrays import Float64Array, Int64Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredSamples:
    """The scores of a batch, with the groups and scores that they are compared with."""

    scores: Float64Array  # r, [B]
    groups: Sequence[str]  # group of each sample, [B]
    lengths: Int64Array  # action tokens of each sample, [B]; may be 0
    greedy_scores: Float64Array | None = None
    """Score of a greedy completion to the same prompt, [B]; only with `needs_greedy_sample`."""
    terms: Float64Array | None = None
    """The K terms that a score is the sum of, without their weights, [B, K]; only with `compares_terms`. NaN: the
    sample has no such term."""
    weights: Float64Array | None = None
    """Weight of each term, [B, K]. 0: the term does not count for the sample, which may have no score there."""


class AdvantageEstimator(Definition):
    """An estimator of the advantages: `[algorithm.advantage]`."""

    compares_samples: ClassVar[bool] = False
    """True: it compares the samples of a prompt, needs at least two, and token rewards count by their sum."""
    compares_turns: ClassVar[bool] = False
    """True: `compare_turns` is called in place of `compare`; `spread` gets the rewards of the KL penalty alone."""
    compares_terms: ClassVar[bool] = False
    """True: `compare` gets the terms of the scores, and no shaping may have changed the scores."""
    compares_tokens: ClassVar[bool] = False
    """True: `compare_tokens` is called after `spread`; the old log-probabilities are computed before, in a pass of
    their own even if a step has one update, and token rewards count by themselves."""
    reads_reference: ClassVar[bool] = False
    """True: `spread` gets, as the reward of a token, f - o, where f is its log-probability under the reference and o
    the old one, clamped to +-20 and 0 for a token that a grammar forced; no score is read."""
    needs_critic: ClassVar[bool] = False
    needs_greedy_sample: ClassVar[bool] = False
    """True: one more answer to each prompt is sampled greedily, scored and not trained on."""
    per_token: ClassVar[bool] = False
    """True: `formula` gives A_t, the advantage of a token, instead of A, that of a sample."""

    @property
    def compares_kl(self) -> bool:
        """True: a KL penalty in the reward is part of the score that `compare` gets, by its sum over the sample."""
        return False

    def compare(self, batch: ScoredSamples) -> Float64Array:
        """Return the score of each sample relative to others, [B]."""
        return batch.scores

    def compare_turns(self, turns: ScoredTurns) -> Float64Array:
        """Return the advantage of each turn, [u], which all of its tokens have; only called with `compares_turns`."""
        return turns.returns(1.0)

    def compare_tokens(self, tokens: ScoredTokens) -> Float64Array:
        """Return the advantage of each token, [k], from the returns of `spread`; only called with `compares_tokens`."""
        return tokens.returns

    def spread(self, rewards: PackedRewards) -> tuple[Float64Array, Float64Array | None]:
        """Return advantages, [k], and, with a critic, returns, [k], of some of the samples; neither is whitened."""
        return rewards.sum_to_come(rewards.rewards, 1.0 ** rewards.steps()), None


ADVANTAGES: Final = Registry("advantages", AdvantageEstimator)  # type: ignore[type-abstract]
AnyAdvantage = Annotated[SerializeAsAny[AdvantageEstimator], BeforeValidator(ADVANTAGES.parse)]


class GroupEstimator(AdvantageEstimator):
    """Base of estimators that compare the samples of a prompt."""

    compares_samples: ClassVar[bool] = True

    def compare(self, batch: ScoredSamples) -> Float64Array:
        """Return `relative` of each group, [B]; exactly 0 for a group of one, or of equal scores.

        Dividing would blow rounding errors of the mean up to full size: the mean of three scores of 0.1 is not 0.1.
        """
        advantages = batch.scores - batch.scores  # zeros; 0 * a negative score would be -0
        for members in group_members(batch.groups):
            scores = batch.scores[members]
            if scores.min() != scores.max():
                advantages[members] = self.relative(scores, batch.lengths[members])
        return advantages

    @abstractmethod
    def relative(self, scores: Float64Array, lengths: Int64Array) -> Float64Array:
        """Return the advantage of each sample of a group, [n].

        Args:
            scores: [n], not all equal.
            lengths: action tokens of each sample, [n].
        """


def group_members(groups: Sequence[str]) -> list[list[int]]:
    """Return the indices of each group's samples, groups in the order of their first sample."""
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    return list(members.values())


def factor(value: float) -> str:
    """Return a factor of a formula with a space after it; a factor of 1 is left out."""
    return "" if value == 1 else f"{value:g} "


def centred(scores: Float64Array) -> Float64Array:
    """Return r - mean(r), [n]."""
    result: Float64Array = scores - scores.mean()
    return result


def turns_note(discount: float) -> str:
    """Return the end of a formula with a discount per turn."""
    return f"; what follows a turn is multiplied by {discount:g}" if discount != 1 else ""


def holes_note(mode: str, discount: float) -> str:
    """Return the end of a formula whose discount may count tokens between two turns."""
    return "; tokens between two turns count as steps" if mode == "decay" and discount != 1 else ""
