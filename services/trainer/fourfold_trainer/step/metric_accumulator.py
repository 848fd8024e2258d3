"""Accumulates the metrics of an optimizer step on one rank.

Everything stays on the device until the step is over: reading a number, or choosing rows by a mask, waits for all work
that was queued on the device, and the device would then be idle between micro-batches.

    k   loss tokens of a micro-batch
    s   trajectories of a micro-batch
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fourfold import metrics
from fourfold.algorithm import kl
from fourfold.algorithm.corrections import Correction
from fourfold.algorithm.ratios import clamp
from fourfold.arrays import Float32Array
from fourfold_trainer.engine import RATIO_SQUARE_SUM, RATIO_SUM, SAMPLE_COUNT, UpdateSums
from fourfold_trainer.step.batch import TrainBatch

_TensorLists = defaultdict[str, list[Tensor]]  # by metric name


def policy_distances(current: Tensor, old: Tensor) -> dict[str, Tensor]:
    """Compare the current and the old policy by their detached log-probabilities, [k]; return metrics of each token."""
    moved = current - old
    return {metrics.APPROX_KL: kl.k3(moved), metrics.APPROX_KL_K1: -moved, metrics.RATIO_MEAN: clamp(moved).exp()}


def _mismatch_distances(old: Tensor, behavior: Tensor) -> dict[str, Tensor]:
    """Compare the old and the behavior policy; return terms of the metrics for each token, [k].

    The arguments are detached log-probabilities, [k]. Those of `behavior` may be infinite or NaN: the engine's values.
    """
    mismatch = old - behavior
    # One value that is not finite would make the sum of all tokens useless: it adds 0 here, and is counted apart.
    finite = torch.isfinite(mismatch)
    ratio = clamp(mismatch).exp()
    return {
        metrics.MISMATCH_PROBABILITY: torch.where(finite, (old.exp() - behavior.exp()).abs(), 0.0),
        metrics.MISMATCH_KL: torch.where(finite, kl.k3(mismatch), 0.0),
        metrics.MISMATCH_KL_K1: torch.where(finite, -mismatch, 0.0),
        metrics.MISMATCH_NONFINITE: ~torch.isfinite(behavior),
        RATIO_SUM: torch.where(finite, ratio, 0.0),
        RATIO_SQUARE_SUM: torch.where(finite, ratio.square(), 0.0),
    }


def untrained_mismatch(batch: TrainBatch, old: Sequence[Float32Array], trained: Collection[int]) -> UpdateSums:
    """Return the sums of the mismatch over tokens whose old log-probabilities are known, but that no update has read.

    Args:
        old: old log-probabilities of each sample's action tokens; NaN where they were not computed.
        trained: trajectories that were in an update.
    """
    accumulator = MetricAccumulator()
    untrained = ~np.isin(batch.trajectory_of, list(trained)) & (batch.free_lengths > 0)
    for _, members in batch.chunks():
        if chosen := [i for i in members if untrained[i]]:
            logprobs = torch.from_numpy(np.concatenate([old[i] for i in chosen]))
            behavior = torch.from_numpy(batch.pack("behavior_logprobs", chosen))
            accumulator.add_mismatch(logprobs, behavior, real=~logprobs.isnan())
    return accumulator.sums(grad_norm=0.0)


@dataclass(slots=True)
class MetricAccumulator:
    """Collects scalars and columns (a value per token, [k]) of micro-batches; `sums` reads all of them at once."""

    all_rejected: bool = False  # set by the optimizer step
    losses: list[Tensor] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)
    sum_terms: _TensorLists = field(default_factory=lambda: _TensorLists(list))  # float64 scalars
    lowest: _TensorLists = field(default_factory=lambda: _TensorLists(list))
    highest: _TensorLists = field(default_factory=lambda: _TensorLists(list))
    log_ratios: list[Tensor] = field(default_factory=list)
    mismatches: list[Tensor] = field(default_factory=list)  # NaN for the tokens of a dummy
    real_masks: list[Tensor] = field(default_factory=list)  # bool [k]; False for the tokens of a dummy
    accepted: list[Tensor] = field(default_factory=list)  # bool scalars: a token of the micro-batch was not rejected
    expert_counts: list[Tensor] = field(default_factory=list)

    def add_loss(self, loss: Tensor, *, real: Tensor, means: dict[str, Tensor], count: Tensor | None = None) -> None:
        """Add the loss of a micro-batch, and the metrics that are means over the tokens, or the units, of the step.

        Args:
            loss: the micro-batch's part of the step's loss, a scalar.
            real: bool [k]; False for the tokens of a dummy, which count nowhere.
            means: values of each token, [k], by metric name.
            count: loss tokens, where `real` and `means` are of units, [u].
        """
        self.losses.append(loss.double())
        self.counts.append(real.sum() if count is None else count)
        for name, values in means.items():
            self.add_sum(name, torch.where(real, values, 0).double().sum())

    def add_sum(self, name: str, value: Tensor) -> None:
        """Add a scalar to the sum called `name`."""
        self.sum_terms[name].append(value.detach().double())

    def add_mismatch(self, old: Tensor, behavior: Tensor, *, real: Tensor) -> None:
        """Compare old and behavior log-probabilities, [k]; `real` as in `add_loss`."""
        for name, values in _mismatch_distances(old, behavior).items():
            self.add_sum(name, torch.where(real, values, 0).double().sum())
        self.mismatches.append(torch.where(real, old - behavior, math.nan))  # percentiles are no sums

    def add_ratios(self, log_ratio: Tensor, *, real: Tensor, any_accepted: Tensor) -> None:
        """Add the column whose extremes are metrics.

        Args:
            log_ratio: current - old log-probability, [k].
            real: as in `add_loss`.
            any_accepted: bool scalar; the micro-batch has a token that the correction did not reject.
        """
        self.log_ratios.append(log_ratio)
        self.real_masks.append(real)
        self.accepted.append(any_accepted)

    def add_correction(
        self, correction: Correction, segments: Tensor, segment_count: int, *, real: Tensor
    ) -> dict[str, Tensor]:
        """Add the correction's rejected samples and extreme weights; return its metrics for `means` of `add_loss`."""
        kept = real & ~correction.rejected
        self.lowest[metrics.CORRECTION_WEIGHT_MIN].append(torch.where(kept, correction.weights, math.inf).min())
        self.highest[metrics.CORRECTION_WEIGHT_MAX].append(torch.where(kept, correction.weights, -math.inf).max())
        empty = segments.new_zeros(segment_count)
        has_tokens = empty.index_add(0, segments, real.to(segments.dtype)) > 0
        has_kept_tokens = empty.index_add(0, segments, kept.to(segments.dtype)) > 0
        self.add_sum(SAMPLE_COUNT, has_tokens.sum())
        self.add_sum(metrics.REJECTED_SAMPLES, (has_tokens & ~has_kept_tokens).sum())
        return {
            metrics.CORRECTION_WEIGHT: correction.weights,
            metrics.REJECTED_TOKENS: correction.rejected,
            metrics.TRUNCATED_WEIGHTS: correction.truncated,
        }

    def add_routing(self, loss: Tensor, counts: Tensor, share: float) -> None:
        """Add the routing of a micro-batch (`fourfold.nn.router.Routed`) with this share of the step's tokens.

        A dummy has the share 0.
        """
        self.add_sum(metrics.ROUTER_LOSS, loss * share)
        self.expert_counts.append(counts * (share > 0))

    def any_accepted(self) -> bool:
        """Return whether the correction left a token to train on in any micro-batch of this rank. Waits for the GPU."""
        return bool(torch.stack(self.accepted).any())

    def sums(self, *, grad_norm: float) -> UpdateSums:
        """Read all numbers from the device."""
        result = UpdateSums(grad_norm=grad_norm, all_rejected=self.all_rejected)
        if self.losses:
            result.loss = float(torch.stack(self.losses).sum())
            result.token_count = int(torch.stack(self.counts).sum())
        if self.sum_terms:
            values = torch.stack([torch.stack(terms).sum() for terms in self.sum_terms.values()]).tolist()
            result.sums = dict(zip(self.sum_terms, values, strict=True))
        result.lowest = _finite({name: torch.stack(part).min() for name, part in self.lowest.items()})
        result.highest = _finite({name: torch.stack(part).max() for name, part in self.highest.items()})
        if self.expert_counts:
            result.expert_counts = torch.stack(self.expert_counts).double().sum(0).tolist()
        # Choosing rows waits for the device, so it is done once per step.
        if self.real_masks and len(ratio := torch.cat(self.log_ratios)[torch.cat(self.real_masks)].exp()):
            result.lowest[metrics.RATIO_MIN] = float(ratio.min())
            result.highest[metrics.RATIO_MAX] = float(ratio.max())
        if self.mismatches:
            mismatch = torch.cat(self.mismatches)
            result.mismatches = mismatch[torch.isfinite(mismatch)].abs().float().cpu().numpy()
        return result


def _finite(values: dict[str, Tensor]) -> dict[str, float]:
    """Return the finite values. An infinite one is the minimum or maximum over no token."""
    return {name: float(value) for name, value in values.items() if math.isfinite(value)}
