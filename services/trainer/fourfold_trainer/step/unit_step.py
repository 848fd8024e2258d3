"""Runs one training step of a loss of whole answers on rank 0: one optimizer step for each mini-batch and epoch.

There are no advantages: the score of a sample is its label.

    LossUnits        units of the samples, their micro-batches and weights        loss_units.py
    unit_objective   the loss of a micro-batch, on every rank                     unit_objective.py
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fourfold import metrics
from fourfold.algorithm.losses.units import SampleLoss
from fourfold.algorithm.state import AlgorithmState
from fourfold.config.schema import Config
from fourfold_trainer.engine import TrainerEngine, UpdateSettings
from fourfold_trainer.step.advantages import ModelOutputs, TokenTargets
from fourfold_trainer.step.batch import TrainBatch
from fourfold_trainer.step.before_update import NOISE_STEPS
from fourfold_trainer.step.loss_units import LossUnits
from fourfold_trainer.step.lr_schedule import learning_rate
from fourfold_trainer.step.micro_batches import compute_as_updates, mini_batches, unit_of
from fourfold_trainer.step.step_result import NO_ACTION_TOKENS, StepResult
from fourfold_trainer.work import Work


def train_units(
    engine: TrainerEngine, batch: TrainBatch, config: Config, loss: SampleLoss, *, step: int, state: AlgorithmState
) -> StepResult:
    """Train on the units of a batch that `check_samples` accepted; `step` and `state` are those of `train_step`."""
    units = LossUnits(config=config, batch=batch, loss=loss)
    result = StepResult(
        step=step,
        algorithm_state=state,
        batch=batch,
        outcomes=np.array(batch.values("score"), np.float64),  # NaN for a sample without a label
        targets=TokenTargets(advantages=[], returns=None, outputs=ModelOutputs(), kl=None),
        kl_coef=0.0,
        policy_work=Work(),
        critic_work=Work(),
    )
    for mini_batch in mini_batches(batch.group_bounds, config, step=step):
        members = units.to_train(mini_batch)
        if not members:
            continue
        if (
            loss.reads == "pairs"
            and loss.trains == "policy"
            and not result.policy_norms
            and (step - 1) % NOISE_STEPS == 0
        ):
            result.measured[metrics.PAIR_NOISE] = pair_noise(engine, units, members, result.policy_work)
        shares = units.micro_batches(members)
        settings = UpdateSettings(
            learning_rate=learning_rate(config.trainer, step, config.steps),
            router_coef=config.trainer.router_aux_loss_coef,
            token_count=int(batch.samples.lengths[members].sum()),
            distance=units.distance(engine, mini_batch, result.policy_work),
        )
        result.add_update(engine.update_policy(shares, settings), members, shares)
    if not result.policy_norms:
        result.skipped_reason = NO_ACTION_TOKENS
    result.skipped_reason = result.reason_to_skip(trains_policy=True)
    return result


def pair_noise(engine: TrainerEngine, units: LossUnits, members: Sequence[int], work: Work) -> float:
    """Return by how much other samples in its micro-batch change the log-probability of an answer, in nats.

    It is the largest difference over the answers of one pair, summed over their tokens. The passes over the first
    micro-batch of each rank and over the pair alone are added to `work`.
    """
    batch, config = units.batch, units.config
    together = compute_as_updates(engine.compute_logprobs, batch, config, [members], limit=1)
    known, numbers = [i for i in members if len(together[i])], unit_of(batch, config)
    pair = [i for i in known if numbers[i] == numbers[known[0]]]
    alone = compute_as_updates(engine.compute_logprobs, batch, config, [pair])
    for part in (known, pair):
        rows = int(batch.free_lengths[part].sum())
        work.add(batch.samples.lengths[part].tolist(), rows=rows, backward=False)
    return max(abs(float((together[i].astype(np.float64) - alone[i]).sum())) for i in pair)
