"""Computes what ComputeLogprobs answers: outputs of the models for every token, or scores of whole samples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from fourfold.arrays import Float32Array, Int64Array
from fourfold.config.schema import Config
from fourfold.errors import InvalidInput
from fourfold.sample.columns import Samples
from fourfold_trainer.engine import TrainerEngine
from fourfold_trainer.step.micro_batches import compute_per_token

_NAN: Final = np.full(1, np.nan, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forward:
    """Outputs of the models for every token, float32 [n] per sample; the first is NaN. Empty: there are none."""

    logprobs: list[Float32Array]
    entropies: list[Float32Array]
    values: list[Float32Array]


def forward_all(engine: TrainerEngine, samples: Samples, config: Config, *, entropies: bool, values: bool) -> Forward:
    """Compute the log-probability of every token and, where asked for, entropies and values.

    The values of a reward model are the scores of the samples, float32 [1] each, and it has no log-probabilities. Those
    of a process reward model are the scores after every token.

    Raises:
        InvalidInput: values are asked for, but there is no critic; or others of a reward model.
    """
    if config.algorithm.loss.trains == "scores":
        if entropies or not values:
            raise InvalidInput(
                "log-probabilities or entropies are asked for, but the recipe trains a reward model; set "
                "include_values alone, which asks for scores"
            )
        return Forward(logprobs=[], entropies=[], values=score_all(engine, samples, config))
    if values and not config.algorithm.needs_critic:
        raise InvalidInput(
            "values are asked for, but the recipe has no critic; leave include_values out, or train one: "
            "algorithm.advantage.kind = `gae`"
        )
    counts = samples.lengths - 1

    def every(index: int) -> Int64Array:
        return np.arange(1, counts[index] + 1, dtype=np.int64)

    compute = partial(engine.compute_logprobs, entropies=entropies)
    found = compute_per_token(compute, samples, every, counts, config)
    ranks = config.critic_data_parallel_size
    valued = compute_per_token(engine.compute_values, samples, every, counts, config, ranks=ranks) if values else []
    return Forward(
        logprobs=[_after_nan(row[:, 0] if entropies else row) for row in found],
        entropies=[_after_nan(row[:, 1]) for row in found] if entropies else [],
        values=[_after_nan(row) for row in valued],
    )


def score_all(engine: TrainerEngine, samples: Samples, config: Config) -> list[Float32Array]:
    """Return the score of each sample, float32 [1], from the reward model that is trained.

    A process reward model has a score after every token, float32 [n]; the first is NaN.
    """
    last = samples.lengths - 1
    if config.algorithm.loss.reads == "steps":
        rows = compute_per_token(
            engine.compute_logprobs, samples, lambda i: np.arange(1, last[i] + 1, dtype=np.int64), last, config
        )
        return [_after_nan(row) for row in rows]
    return compute_per_token(
        engine.compute_logprobs, samples, lambda i: last[i : i + 1], np.ones(len(last), np.int64), config
    )


def _after_nan(row: Float32Array) -> Float32Array:
    return np.concatenate([_NAN, row])
