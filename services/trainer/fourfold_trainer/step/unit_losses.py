"""Computes the loss of each unit of held-out samples under the current weights, which stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fourfold import metrics
from fourfold.algorithm.losses.units import SampleLoss
from fourfold.config.schema import Config
from fourfold.errors import InvalidInput
from fourfold.sample import Sample
from fourfold_trainer.engine import TrainerEngine
from fourfold_trainer.step.batch import TrainBatch
from fourfold_trainer.step.loss_units import LossUnits
from fourfold_trainer.step.micro_batches import compute_as_updates, mini_batches
from fourfold_trainer.step.sample_checks import check_samples
from fourfold_trainer.step.unit_objective import loss_inputs
from fourfold_trainer.work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLosses:
    """The units of some samples, in the order of the first sample of each."""

    losses: list[float]
    margins: list[float]  # empty for a loss that reports none


def compute_unit_losses(
    engine: TrainerEngine, samples: Sequence[Sample], config: Config, *, step: int, policy_version: int = 0
) -> UnitLosses:
    """Return the loss of every unit, as a step of these samples would find it before its first update.

    The micro-batches are those in which `compute_reference` makes the reference of the same samples and step.

    Args:
        engine: of the trainer.
        samples: pairs or labelled answers, as a step has them.
        config: the recipe.
        step: their step, which decides the mini-batches.
        policy_version: of the weights.

    Raises:
        InvalidInput: the loss compares no answers of a policy, or a sample is malformed.
    """
    loss, selection = config.algorithm.loss, config.algorithm.selection
    if not isinstance(loss, SampleLoss) or loss.trains != "policy" or selection.kind == "all-pairs":
        raise InvalidInput(
            f"losses_of_step = {step}, and algorithm.loss.kind = `{loss.kind}`, selection.kind = `{selection.kind}` "
            f"have no single loss for each pair or labelled answer of a policy; leave it out"
        )
    check_samples(samples, config, policy_version=policy_version)
    batch = TrainBatch.of(samples, config.algorithm)
    units = LossUnits(config=config, batch=batch, loss=loss)
    names = batch.samples.values["group_id"] if loss.reads == "pairs" else batch.samples.trajectories
    asked = [names[i] for i in range(len(names)) if batch.samples.values["score"][i] is not None]
    found: dict[str, tuple[float, float | None]] = {}
    for members in mini_batches(batch.group_bounds, config, step=step):
        if trained := units.to_train(members):
            rows = compute_as_updates(engine.compute_logprobs, batch, config, [trained])
            logprobs = torch.from_numpy(np.concatenate([rows[i] for i in trained]))
            distance = units.distance(engine, members, Work())
            result = loss.compute(loss_inputs(logprobs, units.together(trained), distance=distance))
            margins = result.means.get(metrics.PAIR_MARGIN, result.means.get(metrics.KTO_MARGIN))
            values = [None] * len(result.loss) if margins is None else margins.tolist()
            order = dict.fromkeys(names[i] for i in trained)
            found |= zip(order, zip(result.loss.tolist(), values, strict=True), strict=True)
    if empty := next((name for name in asked if name not in found), None):
        raise InvalidInput(f"{empty} has no token in the loss, and so no loss; leave it out")
    result_rows = [found[name] for name in dict.fromkeys(asked)]
    return UnitLosses(
        losses=[one for one, _ in result_rows], margins=[margin for _, margin in result_rows if margin is not None]
    )
