"""Computes the reference log-probabilities of a step's whole answers, before the first step is trained."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fourfold.algorithm.losses.units import SampleLoss
from fourfold.arrays import Float32Array
from fourfold.config.schema import Config
from fourfold.errors import InvalidInput
from fourfold.sample import Sample, check_unique
from fourfold.sample.columns import Samples
from fourfold_trainer.engine import TrainerEngine
from fourfold_trainer.step.batch import TrainBatch
from fourfold_trainer.step.loss_units import LossUnits
from fourfold_trainer.step.micro_batches import compute_as_updates, mini_batches
from fourfold_trainer.step.sample_checks import check_pairs


def compute_reference(
    engine: TrainerEngine, samples: Sequence[Sample], config: Config, *, step: int
) -> list[Float32Array]:
    """Return the log-probabilities under the current weights as the first update on each sample will compute them.

    Args:
        engine: of the trainer.
        samples: of the step; whole pairs, if the loss reads pairs.
        config: the recipe.
        step: their step, which decides the mini-batches.

    Returns:
        float32 [n] per sample of n tokens, in order: the first NaN, and 0 outside the loss.

    Raises:
        InvalidInput: the loss has no reference, or a sample is no part of a unit.
    """
    loss = config.algorithm.loss
    if not isinstance(loss, SampleLoss) or not loss.needs_reference:
        raise InvalidInput(
            f"reference_of_step = {step}, and algorithm.loss.kind = `{loss.kind}` compares no answers with a "
            f"reference; leave it out"
        )
    columns = Samples.of(samples)
    check_unique(columns.values["sample_id"])
    check_pairs(columns, config)
    batch = TrainBatch.of(columns, config.algorithm)
    units = LossUnits(config=config, batch=batch, loss=loss)
    steps = mini_batches(batch.group_bounds, config, step=step)
    updates = [part for members in steps for part in (units.to_train(members), units.measured(members))]
    rows = compute_as_updates(engine.compute_logprobs, batch, config, updates)
    found: dict[str, Float32Array] = {}
    for i, (name, row) in enumerate(zip(batch.samples.values["sample_id"], rows, strict=True)):
        found[name] = np.zeros(int(batch.samples.lengths[i]), np.float32)
        found[name][0] = np.nan
        if len(row):
            found[name][batch.positions(i)[batch.free(i)]] = row
    return [found[sample.sample_id] for sample in samples]
