"""Defines the loss of distillation from data: the divergence of the policy from a teacher at each token."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from fourfold import metrics
from fourfold.algorithm.losses.base import LOSSES, LossInputs, PolicyLoss, TokenLoss
from fourfold.bounds import MAX_TEACHER_TOKENS

if TYPE_CHECKING:
    from torch import Tensor


@LOSSES.register
class DistillLoss(PolicyLoss):
    """Generalised Jensen-Shannon divergence of the policy p and a teacher q, `reference.source`, at each position.

    With m = (1 - beta) p + beta q it is beta KL(q || m) + (1 - beta) KL(p || m). Divided by beta, it becomes KL(q || p)
    as beta goes to 0; divided by 1 - beta, it becomes KL(p || q) as beta goes to 1. At 0 and 1 it would be 0, so there
    it is these two, as in TRL's `generalized_jsd_loss`.

    The outcomes are the teacher's `top_k` likeliest tokens. A is the weight of the row.
    """

    kind: Literal["distill"] = "distill"
    beta: float = Field(default=0.0, ge=0, le=1)
    """0: forward KL divergence KL(q || p), which covers what the teacher may say. 1: reverse, KL(p || q), which prefers
    what the teacher finds likely. Between: generalised Jensen-Shannon divergence."""
    top_k: int = Field(default=16, ge=1, le=MAX_TEACHER_TOKENS)
    """Number of the teacher's likeliest tokens at each position. Each adds 8 bytes per token to messages."""
    tail: Literal["bucket", "none"] = "bucket"
    """All other tokens. bucket: they are one more outcome, with the rest of the probability. none: they are left out,
    and both distributions are divided by their sums over the teacher's tokens, so that the loss does not say how
    likely others may be."""
    source: ClassVar[str] = "arXiv 2306.13649"
    token_wise: ClassVar[bool] = True
    compares_with_old: ClassVar[bool] = False
    trains_without_advantage: ClassVar[bool] = False
    reports_entropy: ClassVar[bool] = False

    @model_validator(mode="after")
    def _has_outcomes(self) -> Self:
        if self.tail == "none" and self.top_k == 1:
            raise ValueError(
                "top_k = 1 with tail = `none` leaves one outcome, whose probability is always 1; set tail = `bucket`, "
                "or top_k to at least 2"
            )
        return self

    @property
    def teacher_tokens(self) -> int:
        return self.top_k

    def compute(self, inputs: LossInputs) -> TokenLoss:
        """Return A D of each token."""
        assert inputs.top_logprobs is not None and inputs.teacher_logprobs is not None, "the trainer asks for them"
        p, q = inputs.top_logprobs, inputs.teacher_logprobs.to(inputs.top_logprobs.dtype)
        mass = q.exp().sum(1)
        if self.tail == "none":
            divergence = self._divergence(p.log_softmax(1), q.log_softmax(1))
        else:
            rests = (_log_rest(1 - p.exp().sum(1)), _log_rest(1 - mass))
            divergence = self._divergence(p, q) + self._divergence(*(rest[:, None] for rest in rests))
        means = {
            metrics.NLL: -inputs.logprobs.detach(),
            metrics.TEACHER_KL: divergence.detach(),
            metrics.TEACHER_MASS: mass.clamp(max=1.0),
        }
        return TokenLoss(loss=inputs.advantages * divergence, means=means)

    def _divergence(self, p: Tensor, q: Tensor) -> Tensor:
        """Return the terms of some outcomes, summed, [k], from their log-probabilities, [k, n] each."""
        if self.beta == 0:
            return _kl(q, p)
        if self.beta == 1:
            return _kl(p, q)
        m = (p + math.log1p(-self.beta)).logaddexp(q + math.log(self.beta))
        return self.beta * _kl(q, m) + (1 - self.beta) * _kl(p, m)

    def formula(self) -> str:
        b = f"{self.beta:g}"
        between = f"{b} KL(q || m) + (1 - {b}) KL(p || m), m = (1 - {b}) p + {b} q"
        divergence = {0.0: "KL(q || p)", 1.0: "KL(p || q)"}.get(self.beta, between)
        rest = "the rest as one outcome more" if self.tail == "bucket" else "both renormalised over these"
        return f"l = A D, D = {divergence}; over the {self.top_k} likeliest tokens of the teacher q, {rest}"


def _kl(a: Tensor, b: Tensor) -> Tensor:
    """Return the terms of KL(a || b) over some outcomes, summed, [k], from log-probabilities [k, n]."""
    return (a.exp() * (a - b)).sum(1)


def _log_rest(rest: Tensor) -> Tensor:
    """Return the logarithm of the probability of all other tokens, [k].

    A rest below the rounding of 1 cannot be computed as 1 - sum. Both distributions have the same floor, so that a rest
    which neither has adds 0, as when `top_k` is the whole vocabulary.
    """
    return rest.clamp(min=2.0**-52 if rest.element_size() == 8 else 2.0**-23).log()
