"""What the batch knobs of a recipe mean: everything that is derived from them, in one place."""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Upper bounds of one step and of the run; real samples are mostly shorter."""

    samples_per_step: int
    """prompts_per_step * group_size."""
    tokens_per_step: int
    """When every sample fills the context."""
    sampled_tokens_per_step: int
    """When every completion fills max_new_tokens: these are trained on."""
    samples_per_mini_batch: int
    """Of one optimizer step, at most."""
    samples_per_rank: int
    """Of one step, on the trainer rank that has the most; with sequence parallelism, on the group of ranks."""
    samples_per_micro_batch: int
    """Of full length; more when they are short."""
    micro_batches_per_step: int
    """Forward and backward passes of one rank, in all epochs, when all samples are of full length."""
    samples_in_run: int
    evaluations: tuple[int, ...]
    """Steps done when held-out accuracy is measured; empty without held-out data."""
    checkpoints: tuple[int, ...]
    """Steps after which a checkpoint is written."""


def batch_plan(config: Config) -> BatchPlan:
    """Derive the plan of a checked recipe."""
    samples = config.batch.samples_per_step
    per_rank = -(-samples // config.trainer.data_parallel_size)
    per_mini_batch = -(-samples // config.batch.mini_batches_per_step)
    per_micro_batch = config.batch.tokens_per_micro_batch // config.model.max_context_tokens
    evaluated = config.data.held_out
    return BatchPlan(
        samples_per_step=samples,
        tokens_per_step=samples * config.model.max_context_tokens,
        sampled_tokens_per_step=samples * config.sampling.max_new_tokens,
        samples_per_mini_batch=per_mini_batch,
        samples_per_rank=per_rank,
        samples_per_micro_batch=per_micro_batch,
        micro_batches_per_step=config.batch.updates_per_step
        * -(-per_mini_batch // (config.trainer.data_parallel_size * per_micro_batch)),
        samples_in_run=samples * config.steps,
        evaluations=(0, *_every(config.evaluation.every_steps, config.steps)) if evaluated else (),
        checkpoints=_every(config.checkpoint.every_steps, config.steps),
    )


def _every(period: int, steps: int) -> tuple[int, ...]:
    """Return each multiple of `period` up to `steps`, and `steps` itself."""
    return tuple(sorted({*range(period, steps + 1, period), steps}))
