"""How much an engine does at once: what a recipe does not set is derived here.

With G prompts of a step, E of an evaluation, and R replicas:

    concurrent samples   of ceil(G / R) or ceil(E / R) prompts, whichever are more: what one replica gets when all are
                         alike, in whole groups; at least one group, and 64 for agents; at most 1024 on GPUs, where
                         more make a step longer and no faster, 256 on CPU. Where nobody knows E before the data is
                         read, at least 256. With a public port, so many that they are the coordinator's share.
    agents' samples      of these, what the coordinator's share (`rollout.agents`) leaves; a prompt's samples, which
                         travel in one call, stay reserved in any case.
    batched tokens       16384 on GPUs, 8192 on CPU: prompts of that size fill the device. At least a token of each
                         concurrent sample, and one more; on CPU, where prompts are not split, at least the context.

The limit counts samples, not memory: those that the KV cache has no room for wait in the engine's queue, and the
service promises no more tokens than twice what the cache holds. When a replica is gone, the others get its share; what
is above their limit is refused and waits in the coordinator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from fourfold.config import Config

_LEAST_SAMPLES: Final = 64
_EVALUATION_SAMPLES: Final = 256
_MOST_SAMPLES: Final = {"cpu": 256, "gpu": 1024}
_BATCHED_TOKENS: Final = {"cpu": 8192, "gpu": 16384}


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """Limits of one engine."""

    concurrent_samples: int
    """Samples in flight; more are refused."""
    batched_tokens: int
    """Tokens that one engine step may process."""
    agent_samples: int
    """Of the samples in flight, what agents together may use."""


def rollout_plan(config: Config) -> RolloutPlan:
    """Derive the limits of a checked recipe; what it sets stays, but that a step has room for every sample."""
    rollout = config.rollout
    device = "gpu" if rollout.gpus_per_replica else "cpu"
    asked, share = _asked_of_one(config), rollout.agents.coordinator_share
    if rollout.public_listen and share:
        asked = math.ceil(asked / share)
    samples = rollout.max_concurrent_samples or min(asked, _MOST_SAMPLES[device])
    reserved = max(math.ceil(samples * share), _largest_call(config)) if share else 0
    tokens = rollout.max_batched_tokens or _BATCHED_TOKENS[device]
    least = samples + 1 if device == "gpu" else max(samples + 1, config.model.max_context_tokens)
    return RolloutPlan(
        concurrent_samples=samples, batched_tokens=max(tokens, least), agent_samples=max(0, samples - reserved)
    )


def _largest_call(config: Config) -> int:
    """Return the most samples of one call of the coordinator."""
    held_out = config.evaluation.samples_per_prompt if config.data.held_out else 0
    return max(config.batch.group_size, held_out)


def _asked_of_one(config: Config) -> int:
    """Return the most samples that one of the replicas is asked for at once."""
    evaluation, replicas = config.evaluation, max(config.rollout.replicas, 1)
    group = config.batch.group_size + (config.algorithm.advantage == "remax")  # whose greedy answer comes besides
    share, least = -(-config.batch.prompts_per_step // replicas) * group, max(group, _LEAST_SAMPLES)
    if config.data.held_out:
        least = max(least, evaluation.samples_per_prompt)
        if prompts := evaluation.max_prompts or (config.data.eval.size if config.data.eval else 0):
            share = max(share, -(-prompts // replicas) * evaluation.samples_per_prompt)
        else:
            least = max(least, _EVALUATION_SAMPLES)
    return max(share, least)
