"""Defines losses of whole answers: their inputs, their results, and the base of their classes.

    s         samples of a micro-batch: answers with all their loss tokens
    u         units: pairs of samples, or single samples; of labelled steps, each step is a sample of its own
    sums      [s]  sum of the current log-probabilities p over the loss tokens, or the score of a reward model's head;
                   the only column with a gradient
    counts    [s]  n: loss tokens
    labels    [s]  score of the sample: the preferred sample of a pair has the greater one; or the label of a step
    x         [s]  sums less those of the reference

A trained step minimises the mean of the loss over all units of the optimizer step, and `algorithm.sft_coef` times the
mean of -p over the loss tokens of the preferred samples. Both divisors are known before the first pass, so the gradient
does not depend on how the step is split. As in base.py, no module of losses imports torch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from fourfold import metrics
from fourfold.algorithm.losses.base import Loss, Reads
from fourfold.text import is_metric_name

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleInputs:
    """Columns of a micro-batch that a loss of samples may read. With pairs, samples 2j and 2j + 1 are pair j."""

    sums: Tensor  # [s], float64
    counts: Tensor  # int64 [s]
    labels: Tensor  # [s]
    reference_sums: Tensor | None = None  # [s]; None: the loss reads none
    distance: float = 0.0
    """Mean of x over the mismatched answers of the optimizer step; only with `measures_distance`."""

    def __post_init__(self) -> None:
        for name in ("counts", "labels", "reference_sums"):
            column = getattr(self, name)
            assert column is None or not column.requires_grad, f"{name} must be detached: only sums has a gradient"

    def log_ratios(self) -> Tensor:
        """Return x, [s]."""
        assert self.reference_sums is not None, "needs_reference is set"
        return self.sums - self.reference_sums

    def averaged(self, sums: Tensor) -> Tensor:
        """Return sums / n, [s]; a sample without loss tokens, which only a dummy has, counts as one of a token."""
        return sums / self.counts.clamp(min=1)

    def sides(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers of the preferred and of the other samples of all pairs, [u] each, from those of all."""
        first = self.labels[0::2] > self.labels[1::2]
        one, two = values[0::2], values[1::2]
        return one.where(first, two), two.where(first, one)

    def pair_means(self, rewards: Tensor) -> dict[str, Tensor]:
        """Return the metrics of pairs, [u] each, from the reward that the trained model gives each sample, [s]."""
        chosen, rejected = self.sides(rewards.detach())
        return {
            metrics.PAIR_ACCURACY: (chosen > rejected).to(chosen.dtype),
            metrics.PAIR_MARGIN: chosen - rejected,
            metrics.PAIR_CHOSEN_REWARD: chosen,
            metrics.PAIR_REJECTED_REWARD: rejected,
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitLoss:
    """The loss of every unit, and metrics of it."""

    loss: Tensor  # [u]
    means: Mapping[str, Tensor] = field(default_factory=dict)
    """Metrics of the step that are means over its units, by name: detached, [u] each."""

    def __post_init__(self) -> None:
        if wrong := [name for name in self.means if not is_metric_name(name)]:
            raise ValueError(f"a loss has a metric named {wrong[0]!r}; write a name such as my-loss/penalty")


class SampleLoss(Loss):
    """A loss of whole answers: `[algorithm.loss]`."""

    reads: ClassVar[Reads] = "pairs"
    compares_with_old: ClassVar[bool] = False
    reports_entropy: ClassVar[bool] = False

    @abstractmethod
    def compute(self, inputs: SampleInputs) -> UnitLoss:
        """Return the loss of every unit, [u]."""


def log_sigmoid(values: Tensor) -> Tensor:
    """Return log(1 / (1 + exp(-v))) for each v, exact and with a finite gradient for every finite v."""
    # logaddexp(0, -v) = log(1 + exp(-v)); its slope is the sigmoid of -v, without overflow.
    return -(values.new_zeros(values.shape).logaddexp(-values))
