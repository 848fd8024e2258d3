"""Defines the losses of tokens that data has, not samples of the policy: supervised fine-tuning."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

from fourfold import metrics
from fourfold.algorithm.losses.base import LOSSES, LossInputs, PolicyLoss, TokenLoss, log_likelihood_loss

if TYPE_CHECKING:
    from torch import Tensor


class _LikelihoodLoss(PolicyLoss):
    """Base of the losses that read the current log-probability of a token and its weight alone."""

    token_wise: ClassVar[bool] = True
    compares_with_old: ClassVar[bool] = False
    trains_without_advantage: ClassVar[bool] = False
    reports_entropy: ClassVar[bool] = False

    def compute(self, inputs: LossInputs) -> TokenLoss:
        """Return -w A p with the factor w of `factors`."""
        current = inputs.logprobs.detach()
        weights = self.factors(current) * inputs.advantages
        return TokenLoss(loss=log_likelihood_loss(inputs.logprobs, weights), means={metrics.NLL: -current})

    @abstractmethod
    def factors(self, p: Tensor) -> Tensor:
        """Return the factor of each token's loss from its detached log-probability, [k]."""


@LOSSES.register
class NllLoss(_LikelihoodLoss):
    """Negative log-likelihood, of supervised fine-tuning and of pretraining; A is the weight of the row."""

    kind: Literal["nll"] = "nll"
    source: ClassVar[str] = "cross-entropy of the next token"

    def factors(self, p: Tensor) -> Tensor:
        return p.new_ones(p.shape)

    def formula(self) -> str:
        return "l = -A p"


@LOSSES.register
class DftLoss(_LikelihoodLoss):
    """Dynamic fine-tuning: a token weighs its own probability, so that unlikely tokens of the data pull less."""

    kind: Literal["dft"] = "dft"
    source: ClassVar[str] = "arXiv 2508.05629"

    def factors(self, p: Tensor) -> Tensor:
        return p.exp()

    def formula(self) -> str:
        return "l = -stop(exp(p)) A p"
