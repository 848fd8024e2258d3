"""Computes the objective of whole answers for a micro-batch, on one rank.

    sum over units of  c * loss(sums)  +  sft_coef * sum over samples of  d * (-sum of p)

c is 1 / units of the optimizer step, and d is 1 / their preferred tokens for preferred samples, else 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fourfold import metrics
from fourfold.algorithm.losses.units import SampleInputs, SampleLoss
from fourfold.config.algorithm import AlgorithmConfig
from fourfold.nn.sequence import to_device
from fourfold_trainer.batches import UnitBatch
from fourfold_trainer.engine import SCORE_SQUARES, UNIT_COUNT, UpdateSettings
from fourfold_trainer.step.metric_accumulator import MetricAccumulator


def unit_objective(
    logprobs: Tensor,
    batch: UnitBatch,
    algorithm: AlgorithmConfig,
    settings: UpdateSettings,
    accumulator: MetricAccumulator,
) -> Tensor:
    """Return a micro-batch's part of the step's loss, a scalar, and add its metrics to the accumulator."""
    device, loss = logprobs.device, algorithm.loss
    assert isinstance(loss, SampleLoss), "the micro-batches of other losses have another class"
    counts, weights = (to_device(a, device) for a in (batch.counts, batch.unit_weights))
    order, sums = _order(batch, device), sample_sums(logprobs, counts)
    inputs = loss_inputs(logprobs, batch, distance=settings.distance)
    found = loss.compute(inputs)
    real = weights > 0
    total = (weights * torch.where(real, found.loss, 0.0)).sum()
    means = dict(found.means)
    if loss.trains == "scores":
        scores = sums.detach()[order].view(len(weights), -1)  # of the samples of each unit
        means |= {metrics.SCORE_MEAN: scores.mean(1), SCORE_SQUARES: scores.square().mean(1)}
    elif loss.reads == "pairs":
        chosen, rejected = inputs.sides(sums.detach()[order])
        one, two = inputs.sides(inputs.counts)
        means |= {metrics.PAIR_CHOSEN_LOGPROB: chosen, metrics.PAIR_REJECTED_LOGPROB: rejected}
        means[metrics.PAIR_LENGTH_DIFFERENCE] = one - two
    accumulator.add_loss(total.detach(), real=real, means=means, count=counts.sum() * real.any())
    accumulator.add_sum(UNIT_COUNT, real.sum())
    if algorithm.sft_coef:
        nll = -(to_device(batch.nll_weights, device) * sums).sum()
        accumulator.add_sum(metrics.PAIR_NLL, nll)
        total = total + algorithm.sft_coef * nll
    return total.to(logprobs.dtype)


def loss_inputs(logprobs: Tensor, batch: UnitBatch, *, distance: float) -> SampleInputs:
    """Return what the loss reads of a micro-batch with these log-probabilities of its loss tokens, [k]."""
    device, order = logprobs.device, _order(batch, logprobs.device)
    counts, factors = (to_device(a, device) for a in (batch.counts, batch.factors))
    reference = to_device(batch.reference_logprobs, device) if len(batch.reference_logprobs) else None
    if len(factors):
        logprobs = factors * logprobs
        reference = None if reference is None else factors * reference
    return SampleInputs(
        sums=sample_sums(logprobs, counts)[order],
        counts=counts[order],
        labels=to_device(batch.labels, device)[order],
        reference_sums=None if reference is None else sample_sums(reference, counts)[order],
        distance=distance,
    )


def _order(batch: UnitBatch, device: torch.device) -> Tensor | slice:
    # Indexing by a tensor adds up its gradient in a fixed order, also on GPUs, where `index_select` does not.
    return to_device(batch.pairs, device) if len(batch.pairs) else slice(None)


def sample_sums(values: Tensor, counts: Tensor) -> Tensor:
    """Return the sum of the values of each sample's tokens, float64 [s]; `counts` are their numbers, int64 [s].

    A sum depends on the sample's own tokens alone and has the same bits when it is repeated: `index_add` adds in no
    fixed order on GPUs, and a difference of cumulative sums has the rounding of the samples before.
    """
    # `unsafe`: the check of the lengths would wait for the device.
    result: Tensor = torch.segment_reduce(values.double(), "sum", lengths=counts, unsafe=True)
    return result
