"""Defines the policy losses, one class each: recipe keys, tensor code and formula. Also the critic's loss.

    k             loss tokens of a micro-batch, all samples one after another
    p             [k]  current log-probability of each token; carries the gradient
    o             [k]  old log-probability, before the step began
    A             [k]  advantage
    ratio         [k]  exp(p - o), the log clamped to +-20
    segments      int64 [k]  trajectory of each token, 0 to s - 1

A loss is computed in the precision of p and is not yet weighted: see aggregation.py and corrections.py. As long as
p = o, every policy loss here has the gradient of REINFORCE, -A; in the sequence form of GSPO, the sample's mean of it.

This module imports no torch and calls only methods of its tensors: `fourfold plan` reads keys and formulas on machines
without torch.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, Self

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from fourfold import metrics
from fourfold.algorithm.ratios import MAX_LOG_RATIO, clamp, segment_mean
from fourfold.algorithm.registry import Definition, Registry
from fourfold.text import is_metric_name

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """Columns of a micro-batch that a policy loss may read.

    The loss tokens of a trajectory, those of all its segments, are in one micro-batch, except where `token_wise` allows
    to split them.
    """

    logprobs: Tensor  # p, [k]; the only one with a gradient
    old_logprobs: Tensor  # o, [k]
    behavior_logprobs: Tensor  # [k]: as reported by the engine that sampled the token
    advantages: Tensor  # A, [k]
    segments: Tensor  # int64 [k]: trajectory of each token, 0 to segment_count - 1
    segment_count: int

    def __post_init__(self) -> None:
        for name in ("old_logprobs", "behavior_logprobs", "advantages"):
            assert not getattr(self, name).requires_grad, f"{name} must be detached: only logprobs has a gradient"

    def ratio(self) -> Tensor:
        """Return exp(p - o), [k]; the gradient is 0 where the log is beyond +-20."""
        return clamp(self.logprobs - self.old_logprobs).exp()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLoss:
    """The loss of every token, and metrics of it."""

    loss: Tensor  # [k]
    means: dict[str, Tensor] = field(default_factory=dict)
    """Metrics of the step that are means over its tokens, by name: detached, [k] each."""

    def __post_init__(self) -> None:
        if wrong := [name for name in self.means if not is_metric_name(name)]:
            raise ValueError(f"a loss has a metric named {wrong[0]!r}; write a name such as my-loss/penalty")


class PolicyLoss(Definition):
    """A loss of the policy: `[algorithm.loss]`."""

    compares_with_old: ClassVar[bool] = True
    """False if the loss does not read the old log-probabilities."""
    token_wise: ClassVar[bool] = False
    """True if the loss of a token depends on that token alone: a trajectory of several segments that is longer than a
    micro-batch may then be split. False is safe for every loss."""
    corrects_lag: ClassVar[bool] = False
    """True if the loss itself weighs tokens by their behavior log-probabilities."""

    @abstractmethod
    def compute(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of every token, [k]."""


LOSSES: Final = Registry("losses", PolicyLoss)  # type: ignore[type-abstract]
AnyPolicyLoss = Annotated[SerializeAsAny[PolicyLoss], BeforeValidator(LOSSES.parse)]


class _ClippedLoss(PolicyLoss):
    """Bounds of PPO and GSPO: the ratio is clipped to [1 - clip_low, 1 + clip_high]."""

    clip_low: float = Field(default=0.2, gt=0, le=1)
    """Distance below 1 at which the ratio is clipped."""
    clip_high: float = Field(default=0.2, gt=0)
    """Distance above 1 at which the ratio is clipped."""

    def _surrogate(self, ratio: Tensor, advantages: Tensor) -> TokenLoss:
        """Return -min(ratio A, clip(ratio) A): no gradient where the ratio is past a bound in the direction of A."""
        low, high = 1 - self.clip_low, 1 + self.clip_high
        below = (advantages < 0) & (ratio.detach() < low)
        above = (advantages > 0) & (ratio.detach() > high)
        return TokenLoss(
            loss=-(ratio * advantages).minimum(ratio.clamp(low, high) * advantages),
            means={
                metrics.CLIP_FRACTION_LOW: below.to(ratio.dtype),
                metrics.CLIP_FRACTION_HIGH: above.to(ratio.dtype),
            },
        )

    def _formula_of(self, ratio: str) -> str:
        return f"-min({ratio} A, clip({ratio}, {1 - self.clip_low:g}, {1 + self.clip_high:g}) A)"


@LOSSES.register
class PpoLoss(_ClippedLoss):
    """PPO's clipped surrogate. Unequal bounds: DAPO, arXiv 2503.14476, eq. 10. Dual clip: arXiv 1912.09729."""

    kind: Literal["ppo"] = "ppo"
    dual_clip: float = Field(default=0.0, ge=0)
    """Bounds the loss of a negative advantage at this multiple of it; above 1, or 0: off."""
    source: ClassVar[str] = "arXiv 1707.06347, eq. 7"
    token_wise: ClassVar[bool] = True

    @model_validator(mode="after")
    def _bounds_from_above(self) -> Self:
        if self.dual_clip and self.dual_clip <= 1:
            raise ValueError(f"dual_clip = {self.dual_clip} must be above 1, or 0 for none")
        return self

    def compute(self, inputs: LossInputs) -> TokenLoss:
        """Return -min(ratio A, clip(ratio) A), at most dual_clip |A| where A < 0."""
        clipped = self._surrogate(inputs.ratio(), inputs.advantages)
        if not self.dual_clip:
            return clipped
        bound = -self.dual_clip * inputs.advantages
        beyond = (inputs.advantages < 0) & (clipped.loss.detach() > bound)
        return TokenLoss(
            loss=bound.where(beyond, clipped.loss),
            means={**clipped.means, metrics.DUAL_CLIP_FRACTION: beyond.to(clipped.loss.dtype)},
        )

    def formula(self) -> str:
        bound = f", at most {self.dual_clip:g} |A| where A < 0" if self.dual_clip else ""
        return f"l = {self._formula_of('ratio')}{bound}"


@LOSSES.register
class GspoLoss(_ClippedLoss):
    """PPO's loss with one ratio for the whole trajectory. Its preset clips at 3e-4 and 4e-4: a mean moves less."""

    kind: Literal["gspo"] = "gspo"
    form: Literal["token", "sequence"] = "token"
    """Advantage in the gradient of a token. token: its own (GSPO-token, eq. 13 to 14). sequence: the sample's mean. The
    losses are equal, and so are the gradients if A and the weight are constant over a sample."""
    source: ClassVar[str] = "arXiv 2507.18071, eq. 5 to 7"

    def compute(self, inputs: LossInputs) -> TokenLoss:
        """Return -min(s A, clip(s) A), where s is exp of the sample's mean of p - o, the mean clamped to +-20."""
        p, segments = inputs.logprobs, inputs.segments
        mean = segment_mean(p - inputs.old_logprobs, segments, inputs.segment_count)
        if self.form == "sequence":
            log_ratio = clamp(mean)[segments]
        else:
            within = (mean.detach().abs() <= MAX_LOG_RATIO)[segments]
            slope = (p - p.detach()).masked_fill(~within, 0.0)  # value 0; gradient 1, and 0 outside of the clamp
            log_ratio = clamp(mean.detach())[segments] + slope
        return self._surrogate(log_ratio.exp().to(p.dtype), inputs.advantages)

    def formula(self) -> str:
        carried = "the token's own A" if self.form == "token" else "the sample's mean A"
        return f"l = {self._formula_of('s')}, s = exp(mean of p - o over the sample); its gradient carries {carried}"


@LOSSES.register
class CispoLoss(PolicyLoss):
    """REINFORCE weighted by the clipped ratio: a clipped token keeps its gradient, with a bounded weight."""

    kind: Literal["cispo"] = "cispo"
    ratio_min: float = Field(default=0.0, ge=0)
    """Bounds of the ratio itself, not of its distance to 1; 0: no lower bound."""
    ratio_max: float = Field(default=5.0, gt=0)
    """Upper bound of the ratio."""
    source: ClassVar[str] = "arXiv 2506.13585, eq. 4 and 5"
    token_wise: ClassVar[bool] = True

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.ratio_min >= self.ratio_max:
            raise ValueError(f"ratio_min = {self.ratio_min} must be below ratio_max = {self.ratio_max}")
        return self

    def compute(self, inputs: LossInputs) -> TokenLoss:
        """Return -clip(ratio) A p, the ratio detached."""
        weight = inputs.ratio().detach().clamp(self.ratio_min, self.ratio_max)
        return TokenLoss(loss=_log_likelihood(inputs.logprobs, weight * inputs.advantages))

    def formula(self) -> str:
        return (
            f"l = -stop(clip(ratio, {self.ratio_min:g}, {self.ratio_max:g})) A p; no gradient through the clipped "
            f"ratio, and every token keeps its own"
        )


@LOSSES.register
class SapoLoss(PolicyLoss):
    """A gradient that fades with the distance of the ratio to 1 instead of a clip."""

    kind: Literal["sapo"] = "sapo"
    tau_positive: float = Field(default=1.0, gt=0)
    """Larger: the gradient fades faster with the distance of the ratio to 1, where A > 0."""
    tau_negative: float = Field(default=1.05, gt=0)
    """The same where A <= 0."""
    source: ClassVar[str] = "arXiv 2511.20347"
    token_wise: ClassVar[bool] = True

    def compute(self, inputs: LossInputs) -> TokenLoss:
        """Return -4 / tau * sigmoid(tau (ratio - 1)) A; gradient -A ratio 4 s (1 - s), s the sigmoid."""
        ratio, advantages = inputs.ratio(), inputs.advantages
        tau = ratio.new_full(ratio.shape, self.tau_negative).masked_fill(advantages > 0, self.tau_positive)
        return TokenLoss(loss=-4 / tau * (tau * (ratio - 1)).sigmoid() * advantages)

    def formula(self) -> str:
        return (
            f"l = -(4 / tau) sigmoid(tau (ratio - 1)) A, tau = {self.tau_positive:g} where A > 0, else "
            f"{self.tau_negative:g}"
        )


@LOSSES.register
class ReinforceLoss(PolicyLoss):
    """The policy gradient itself, for samples of the policy that is updated."""

    kind: Literal["reinforce"] = "reinforce"
    source: ClassVar[str] = "Williams, 1992"
    token_wise: ClassVar[bool] = True
    compares_with_old: ClassVar[bool] = False

    def compute(self, inputs: LossInputs) -> TokenLoss:
        """Return -A p."""
        return TokenLoss(loss=_log_likelihood(inputs.logprobs, inputs.advantages))

    def formula(self) -> str:
        return "l = -A p"


def _log_likelihood(p: Tensor, weight: Tensor) -> Tensor:
    # A token that the policy cannot sample (p = -inf) contributes nothing; -inf * 0 would be NaN.
    return -weight * p.masked_fill(p.isneginf(), 0.0)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> TokenLoss:
    """Return 1/2 max((V - G)^2, (clip(V) - G)^2), [k], with V clipped to the old value +- clip; clip = 0: no clip.

    PPO's loss of the critic as OpenRLHF and verl have it: no gradient where V has already moved by more than `clip`
    towards G.
    """
    old_values, returns = old_values.detach(), returns.detach()
    loss = 0.5 * (values - returns).square()
    if not clip:
        return TokenLoss(loss=loss)
    bounded = 0.5 * (values.clamp(old_values - clip, old_values + clip) - returns).square()
    larger = bounded.detach() > loss.detach()
    return TokenLoss(loss=bounded.where(larger, loss), means={metrics.VALUE_CLIP_FRACTION: larger.to(values.dtype)})
