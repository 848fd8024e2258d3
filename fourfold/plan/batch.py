"""Derives the sizes of a step and the limits of each engine from the batch keys of a recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from fourfold.config import Config, RolloutPool

COORDINATOR_SHARE: Final = 0.75
"""Share of the samples and of the KV cache's tokens that agents never get, so that they cannot stop the run. The
coordinator may use everything that is free. A service without a coordinator reserves nothing."""
_LEAST_SAMPLES: Final = 64
_EVALUATION_SAMPLES: Final = 256
# More samples at once make a step longer, and no faster.
_MOST_SAMPLES: Final = {"cpu": 256, "gpu": 1024}
# Prompts of this size fill the device.
_BATCHED_TOKENS: Final = {"cpu": 8192, "gpu": 16384}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Upper bounds of one step and of the run; most samples are shorter."""

    samples_per_step: int
    """prompts_per_step * group_size."""
    tokens_per_step: int
    """If every sample fills the context."""
    sampled_tokens_per_step: int
    """Tokens to train on, if every completion has max_new_tokens."""
    samples_per_mini_batch: int
    """Most samples of one optimizer step."""
    samples_per_rank: int
    """Most samples of one step on one trainer rank, or on one group of ranks with sequence parallelism."""
    samples_per_micro_batch: int
    """Samples of full length."""
    micro_batches_per_step: int
    """Forward and backward passes of one rank in all epochs, if all samples are of full length."""
    samples_in_run: int
    evaluations: tuple[int, ...]
    """Numbers of finished steps at which the held-out score is measured; empty without held-out data."""
    checkpoints: tuple[int, ...]
    """Steps after which a checkpoint is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits of one engine. They count samples, not memory: samples without room in the KV cache wait in its queue."""

    concurrent_samples: int  # samples in flight; more are refused, and wait in the coordinator
    batched_tokens: int  # tokens that one engine step may process
    agent_samples: int  # samples in flight that all agents together may use


def batch_plan(config: Config) -> BatchPlan:
    """Derive the sizes of a step from a checked recipe."""
    samples = config.batch.samples_per_step * config.samples_per_row
    groups = config.trainer.data_parallel_size
    per_mini_batch = -(-samples // config.batch.mini_batches_per_step)
    per_micro_batch = config.batch.tokens_per_micro_batch // config.model.max_context_tokens
    return BatchPlan(
        samples_per_step=samples,
        tokens_per_step=samples * config.model.max_context_tokens,
        sampled_tokens_per_step=samples * config.sampling.max_new_tokens,
        samples_per_mini_batch=per_mini_batch,
        samples_per_rank=-(-samples // groups),
        samples_per_micro_batch=per_micro_batch,
        micro_batches_per_step=config.batch.updates_per_step * -(-per_mini_batch // (groups * per_micro_batch)),
        samples_in_run=samples * config.steps,
        evaluations=(0, *_every(config.evaluation.every_steps, config.steps)) if config.data.held_out else (),
        checkpoints=_every(config.checkpoint.every_steps, config.steps),
    )


def _every(period: int, steps: int) -> tuple[int, ...]:
    """Return each multiple of `period` up to `steps`, and `steps` itself."""
    return tuple(sorted({*range(period, steps + 1, period), steps}))


def groups_in_flight(config: Config) -> int:
    """Return the most groups from admission to the end of their step: those of `max_policy_lag` + 1 steps."""
    return (config.asynchrony.max_policy_lag + 1) * config.batch.prompts_per_step


def engine_limits(config: Config, pool: RolloutPool) -> EngineLimits:
    """Derive the limits of each engine of a pool from a checked recipe; values that the recipe sets stay.

    concurrent_samples: the largest share of one replica in the groups in flight (`groups_in_flight`) or in an
        evaluation, in whole groups, but at least 64, and at most 256 on CPU or 1024 on GPUs. With a public port, enough
        that it is the coordinator's share.
    agent_samples: the samples that `COORDINATOR_SHARE` leaves.
    batched_tokens: 8192 on CPU, 16384 on GPUs, or one more than the concurrent samples if that is more.
    """
    device = "gpu" if pool.gpus_per_replica else "cpu"
    wanted = _samples_of_one_replica(config)
    if config.rollout.public_listen:
        wanted = math.ceil(wanted / COORDINATOR_SHARE)
    samples = pool.max_concurrent_samples or min(wanted, _MOST_SAMPLES[device])
    # The samples of a prompt travel in one call, so that agents must always leave room for the largest call.
    largest_call = max([config.batch.group_size, *(held_out.samples_per_prompt for held_out in config.eval_sets)])
    reserved = max(math.ceil(samples * COORDINATOR_SHARE), largest_call)
    # vLLM does not split prompts on CPU, so that a step there must hold a whole context.
    least = samples + 1 if device == "gpu" else max(samples + 1, config.model.max_context_tokens)
    return EngineLimits(
        concurrent_samples=samples,
        batched_tokens=max(pool.max_batched_tokens or _BATCHED_TOKENS[device], least),
        agent_samples=max(0, samples - reserved),
    )


def _samples_of_one_replica(config: Config) -> int:
    """Return the most samples that the coordinator sends to one replica at once."""
    replicas = config.rollout_replicas
    group = config.batch.group_size + config.algorithm.advantage.needs_greedy_sample
    share, least = -(-groups_in_flight(config) // replicas) * group, max(group, _LEAST_SAMPLES)
    answers = 0  # to all held-out sets, which are evaluated at the same time
    for held_out in config.eval_sets:
        least = max(least, held_out.samples_per_prompt)
        if prompts := held_out.max_prompts or (held_out.source.size if held_out.source else 0):
            answers += -(-prompts // replicas) * held_out.samples_per_prompt
        else:  # the number of held-out prompts is unknown until the data is read
            least = max(least, _EVALUATION_SAMPLES)
    share = max(share, answers)
    return max(share, least)
