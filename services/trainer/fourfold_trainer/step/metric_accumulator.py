"""What an optimizer step adds up for its metrics, on one rank.

Everything stays on the device until the step is over: reading a number, or choosing rows by a
mask, waits for all that the device has been given to do, and between micro-batches it would then
stand idle.

Legend: k loss tokens of a micro-batch, s samples of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fourfold import metrics
from fourfold.nn.router import Routed
from fourfold_trainer.algorithm import kl
from fourfold_trainer.algorithm.corrections import Correction
from fourfold_trainer.algorithm.ratios import clamp
from fourfold_trainer.engine import RATIO_SQUARE_SUM, RATIO_SUM, SAMPLE_COUNT, UpdateSums


def distances(current: Tensor, old: Tensor, behavior: Tensor) -> dict[str, Tensor]:
    """Return, token by token, how far the policies are from each other; all [k], detached log-probabilities."""
    moved, mismatch = current - old, old - behavior
    finite = torch.isfinite(mismatch)
    ratio = clamp(mismatch).exp()
    return {
        metrics.APPROX_KL: kl.k3(moved),
        metrics.APPROX_KL_K1: -moved,
        metrics.RATIO_MEAN: clamp(moved).exp(),
        metrics.MISMATCH_PROBABILITY: torch.where(finite, (old.exp() - behavior.exp()).abs(), 0.0),
        metrics.MISMATCH_KL: torch.where(finite, kl.k3(mismatch), 0.0),
        metrics.MISMATCH_KL_K1: torch.where(finite, -mismatch, 0.0),
        metrics.MISMATCH_NONFINITE: ~torch.isfinite(behavior),
        RATIO_SUM: torch.where(finite, ratio, 0.0),
        RATIO_SQUARE_SUM: torch.where(finite, ratio.square(), 0.0),
    }


@dataclass(slots=True)
class Tally:
    """Adds up. Tensors are read once, in `sums`."""

    losses: list[Tensor] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)
    parts: dict[str, list[Tensor]] = field(default_factory=dict)
    """By name, of every micro-batch: what is added up, float64 scalars."""
    lowest: dict[str, list[Tensor]] = field(default_factory=dict)
    highest: dict[str, list[Tensor]] = field(default_factory=dict)
    log_ratios: list[Tensor] = field(default_factory=list)
    mismatches: list[Tensor] = field(default_factory=list)
    reals: list[Tensor] = field(default_factory=list)
    accepted: list[Tensor] = field(default_factory=list)
    """Whether a micro-batch has a token that was not rejected."""
    expert_counts: list[Tensor] = field(default_factory=list)
    all_rejected: bool = False

    def add(self, *, loss: Tensor, real: Tensor, means: dict[str, Tensor]) -> None:
        """Add a micro-batch: its part of the loss, which tokens count, and what is averaged over them."""
        self.losses.append(loss.double())
        self.counts.append(real.sum())
        for name, values in means.items():
            self.total(name, torch.where(real, values, 0).double().sum())

    def total(self, name: str, value: Tensor) -> None:
        """Add a scalar to the sum called `name`."""
        self.parts.setdefault(name, []).append(value.detach().double())

    def note(self, log_ratio: Tensor, mismatch: Tensor, real: Tensor) -> None:
        """Keep what has a distribution of interest, [k] each."""
        self.log_ratios.append(log_ratio)
        self.mismatches.append(mismatch)
        self.reals.append(real)

    def corrected(
        self, correction: Correction, segments: Tensor, segment_count: int, *, real: Tensor
    ) -> dict[str, Tensor]:
        """Note what a correction did to samples; return what is averaged over tokens, [k] each."""
        kept = real & ~correction.rejected
        self.lowest.setdefault(metrics.CORRECTION_WEIGHT_MIN, []).append(
            torch.where(kept, correction.weights, math.inf).min()
        )
        self.highest.setdefault(metrics.CORRECTION_WEIGHT_MAX, []).append(
            torch.where(kept, correction.weights, -math.inf).max()
        )
        empty = segments.new_zeros(segment_count)
        counted = empty.index_add(0, segments, real.to(segments.dtype)) > 0
        alive = empty.index_add(0, segments, kept.to(segments.dtype)) > 0
        self.total(SAMPLE_COUNT, counted.sum())
        self.total(metrics.REJECTED_SAMPLES, (counted & ~alive).sum())
        return {
            metrics.CORRECTION_WEIGHT: correction.weights,
            metrics.REJECTED_TOKENS: correction.rejected,
            metrics.TRUNCATED_WEIGHTS: correction.truncated,
        }

    def routed(self, routed: Routed, share: float) -> None:
        """Note what the routers did in a micro-batch that has this share of the step's tokens; 0: a dummy."""
        self.total(metrics.ROUTER_LOSS, routed.loss * share)
        self.expert_counts.append(routed.counts * (share > 0))

    def any_accepted(self) -> bool:
        """Whether there is a token to learn from on this rank."""
        return bool(torch.stack(self.accepted).any())

    def sums(self, *, grad_norm: float) -> UpdateSums:
        """Read everything."""
        result = UpdateSums(grad_norm=grad_norm, all_rejected=self.all_rejected)
        result.loss = float(torch.stack(self.losses).sum())
        result.token_count = int(torch.stack(self.counts).sum())
        if self.parts:
            values = torch.stack([torch.stack(part).sum() for part in self.parts.values()]).tolist()
            result.sums = dict(zip(self.parts, values, strict=True))
        result.lowest = _finite({name: torch.stack(part).min() for name, part in self.lowest.items()})
        result.highest = _finite({name: torch.stack(part).max() for name, part in self.highest.items()})
        if self.expert_counts:
            result.expert_counts = torch.stack(self.expert_counts).double().sum(0).tolist()
        if self.reals:
            self._describe_ratios(result, torch.cat(self.reals))
        return result

    def _describe_ratios(self, result: UpdateSums, real: Tensor) -> None:
        """Fill in what has a distribution of interest. Choosing rows waits for the device, so it is done once."""
        ratio = torch.cat(self.log_ratios)[real].exp()
        if len(ratio):
            result.lowest[metrics.RATIO_MIN] = float(ratio.min())
            result.highest[metrics.RATIO_MAX] = float(ratio.max())
        mismatch = torch.cat(self.mismatches)[real]
        result.mismatches = mismatch[torch.isfinite(mismatch)].abs().float().cpu().numpy()


def _finite(values: dict[str, Tensor]) -> dict[str, float]:
    """Read numbers; one that is infinite is that of no token."""
    return {name: float(value) for name, value in values.items() if math.isfinite(value)}
