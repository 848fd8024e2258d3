"""Defines the advantage estimators, one class each: recipe keys, computation and formula. numpy float64.

    B         samples, in groups of one prompt each; groups may differ in size. A trajectory of several segments is one
    k         action tokens of all samples, packed: one sample after another (packed.py)
    u         turns of all samples (turns.py)
    r         [B]  score of a sample after shaping (rewards.py)
    R         [k]  reward of a token (rewards.py)
    V         [k]  the critic's estimate of the state before the token
    A         [k]  advantage

An estimator has two parts, in this order: `compare` turns the scores into one number per sample, by comparison with
other samples, or `compare_turns` the rewards of turns into one number per turn; `spread` turns rewards into one number
per token. `compare` gets the whole batch, and `spread` about a
million tokens at a time, always whole samples: a token's number may depend on its own sample only. The defaults: scores
are not compared, and A is the sum of the rewards that are still to come.

This module imports no numpy and calls only methods of its arrays: without the import, `fourfold plan` starts 0.1 s
sooner.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny

from fourfold.algorithm.registry import Definition, Registry

if TYPE_CHECKING:
    from fourfold.algorithm.packed import PackedRewards
    from fourfold.algorithm.turns import ScoredTurns
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
    needs_critic: ClassVar[bool] = False
    needs_greedy_sample: ClassVar[bool] = False
    """True: one more answer to each prompt is sampled greedily, scored and not trained on."""
    per_token: ClassVar[bool] = False
    """True: `formula` gives A_t, the advantage of a token, instead of A, that of a sample."""

    def compare(self, batch: ScoredSamples) -> Float64Array:
        """Return the score of each sample relative to others, [B]."""
        return batch.scores

    def compare_turns(self, turns: ScoredTurns) -> Float64Array:
        """Return the advantage of each turn, [u], which all of its tokens have; only called with `compares_turns`."""
        return turns.returns(1.0)

    def spread(self, rewards: PackedRewards) -> tuple[Float64Array, Float64Array | None]:
        """Return advantages, [k], and, with a critic, returns, [k], of some of the samples; neither is whitened."""
        return rewards.sum_to_come(rewards.rewards, 1.0 ** rewards.steps()), None


# Largest relative error of a sum of some terms in float64, with a wide margin.
_ROUNDING: Final = 1e-12

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


@ADVANTAGES.register
class Gae(AdvantageEstimator):
    """Generalised advantage estimation with a critic."""

    kind: Literal["gae"] = "gae"
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per step."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """lambda, from 0 (one step ahead) to 1 (the whole return)."""
    hole_mode: Literal["skip", "decay"] = "skip"
    """Tokens of the environment between two turns. skip: the next action is one step away. decay: gamma and lambda keep
    multiplying, as in OpenRLHF."""
    turn_discount: float = Field(default=1.0, gt=0, le=1)
    """Discount per turn: it multiplies what follows the last token of a turn, beside gamma, which counts tokens."""
    source: ClassVar[str] = "arXiv 1506.02438, eq. 16"
    needs_critic: ClassVar[bool] = True
    per_token: ClassVar[bool] = True

    def spread(self, rewards: PackedRewards) -> tuple[Float64Array, Float64Array | None]:
        """Return A and G = A + V, both [k].

        Where the next action is one step away, A_t = R_t + gamma V_next - V_t + gamma lam A_next. Across a hole of
        g - 1 positions, in which R and V are 0, the recursion runs g - 1 times more:

            A_t = R_t + (gamma lam)^(g-1) gamma V_next - V_t + (gamma lam)^g A_next

        At the end of a turn, V_next and A_next are also multiplied by turn_discount.
        """
        assert rewards.values is not None, "needs_critic is set"
        steps, discount = rewards.steps(across_holes=self.hole_mode == "decay"), self.gamma * self.lam
        turns = rewards.turn_factors(self.turn_discount)
        ahead = discount ** (steps - 1) * self.gamma * turns * rewards.next_values()
        advantages = rewards.sum_to_come(rewards.rewards + ahead - rewards.values, discount**steps * turns)
        return advantages, advantages + rewards.values

    def formula(self) -> str:
        return (
            f"A_t = d_t + {factor(self.gamma * self.lam)}A_next, d_t = R_t + {factor(self.gamma)}V_next - V_t (GAE, "
            f"gamma {self.gamma:g}, lambda {self.lam:g}){_holes(self.hole_mode, self.gamma * self.lam)}"
            f"{_per_turn(self.turn_discount)}"
        )


@ADVANTAGES.register
class Reinforce(AdvantageEstimator):
    """REINFORCE++, and REINFORCE with discount: the return itself, without a baseline."""

    kind: Literal["reinforce"] = "reinforce"
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per step."""
    hole_mode: Literal["skip", "decay"] = "skip"
    """As for gae."""
    turn_discount: float = Field(default=1.0, gt=0, le=1)
    """As for gae."""
    source: ClassVar[str] = "arXiv 2501.03262"
    per_token: ClassVar[bool] = True

    def spread(self, rewards: PackedRewards) -> tuple[Float64Array, Float64Array | None]:
        """Return the discounted sum of the rewards to come, [k]."""
        steps = rewards.steps(across_holes=self.hole_mode == "decay")
        factors = self.gamma**steps * rewards.turn_factors(self.turn_discount)
        return rewards.sum_to_come(rewards.rewards, factors), None

    def formula(self) -> str:
        power = f"{self.gamma:g}^(k - t) " if self.gamma != 1 else ""
        notes = _holes(self.hole_mode, self.gamma) + _per_turn(self.turn_discount)
        return f"A_t = sum of {power}R_k over the tokens k from t on{notes}"


@ADVANTAGES.register
class DrGrpo(GroupEstimator):
    """GRPO without the division; the paper also sums token losses with a constant length (`aggregation`)."""

    kind: Literal["dr-grpo"] = "dr-grpo"
    source: ClassVar[str] = "arXiv 2503.20783, section 3.2"

    def relative(self, scores: Float64Array, lengths: Int64Array) -> Float64Array:
        """Return r - mean, [n]."""
        return _centred(scores)

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
    source: ClassVar[str] = "arXiv 2402.14740"

    def relative(self, scores: Float64Array, lengths: Int64Array) -> Float64Array:
        """Return r - mean of the others, [n]."""
        return _centred(scores) * (len(scores) / (len(scores) - 1))

    def formula(self) -> str:
        return "r - mean of the others' r, over the samples of a prompt"


@ADVANTAGES.register
class Grpo(GroupEstimator):
    """Scores in units of the unbiased standard deviation of their group."""

    kind: Literal["grpo"] = "grpo"
    epsilon: float = Field(default=1e-6, ge=0)
    """Added to a group's standard deviation."""
    source: ClassVar[str] = "arXiv 2402.03300, section 4.1.2"

    def relative(self, scores: Float64Array, lengths: Int64Array) -> Float64Array:
        """Return (r - mean) / (std + epsilon), [n]."""
        scale = scores.std(ddof=1) + self.epsilon
        # The squares of tiny differences can all be 0.
        return _centred(scores) / scale if scale > 0 else scores - scores

    def formula(self) -> str:
        return (
            f"(r - mean(r)) / (std(r) + {self.epsilon:g}), mean and std over the samples of a prompt; 0 when all "
            f"scored the same"
        )


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
class TurnGrpo(AdvantageEstimator):
    """GRPO on the returns of turns: all tokens of a turn have its advantage."""

    kind: Literal["turn-grpo"] = "turn-grpo"
    turn_discount: float = Field(default=1.0, ge=0, le=1)
    """Discount of the next turn's return, from 0 (the turn's own rewards) to 1 (all rewards that are still to come)."""
    baseline: Literal["turn", "group"] = "turn"
    """turn: a turn is compared with the turns of the same index of the other samples (arXiv 2505.11821, section 3); the
    only sample that has so many turns gets 0 there. group: with all turns of the prompt's samples (arXiv 2507.11948,
    section 3), each sample weighing the same."""
    epsilon: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation."""
    source: ClassVar[str] = "arXiv 2505.11821; 2507.11948"
    compares_samples: ClassVar[bool] = True
    compares_turns: ClassVar[bool] = True

    def compare_turns(self, turns: ScoredTurns) -> Float64Array:
        """Return (G - mean) / (std + epsilon), [u]; exactly 0 where there is nothing to compare, or all are equal."""
        same_turn = self.baseline == "turn"
        return turns.compare(turns.returns(self.turn_discount), same_turn=same_turn, epsilon=self.epsilon)

    def formula(self) -> str:
        peers = (
            "the turns of the same index" if self.baseline == "turn" else "all turns, each sample weighing the same,"
        )
        power = f"{self.turn_discount:g}^(m - j) " if self.turn_discount != 1 else ""
        returns = f"sum of {power}R_m over the turns m from j on" if self.turn_discount else "R_j"
        return (
            f"(G - mean(G)) / (std(G) + {self.epsilon:g}), G_j = {returns}, R the rewards of a turn's tokens, plus r "
            f"in the last turn; mean and std over {peers} of a prompt's samples"
        )


def group_members(groups: Sequence[str]) -> list[list[int]]:
    """Return the indices of each group's samples, groups in the order of their first sample."""
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    return list(members.values())


def factor(value: float) -> str:
    """Return a factor of a formula with a space after it; a factor of 1 is left out."""
    return "" if value == 1 else f"{value:g} "


def _centred(scores: Float64Array) -> Float64Array:
    centred: Float64Array = scores - scores.mean()
    return centred


def _per_turn(discount: float) -> str:
    return f"; what follows a turn is multiplied by {discount:g}" if discount != 1 else ""


def _holes(mode: str, discount: float) -> str:
    return "; tokens between two turns count as steps" if mode == "decay" and discount != 1 else ""
