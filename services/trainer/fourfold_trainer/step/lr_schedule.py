"""Computes the learning rate of a step."""

from __future__ import annotations

import math

from fourfold.config.trainer import CriticConfig, TrainerConfig


def learning_rate(config: TrainerConfig | CriticConfig, step: int, step_count: int) -> float:
    """Return the learning rate of step 1, 2, ...: a linear warm-up, then the schedule.

    With w warm-up steps of n, share f, and x = (step - 1 - w) / (n - w), at most 1, of the rest done:

        step <= w   rate * step / (w + 1)
        constant    rate
        linear      rate * (f + (1 - f) * (1 - x))
        cosine      rate * (f + (1 - f) * (1 + cos(pi * x)) / 2)

    Transformers begins at 0, (step - 1) / w: the first step would be sampled and scored, and learn nothing.
    """
    warmup = config.warmup(step_count) if isinstance(config, TrainerConfig) else config.warmup_steps
    if step <= warmup:
        return config.learning_rate * step / (warmup + 1)
    if config.schedule == "constant":
        return config.learning_rate
    done = min((step - 1 - warmup) / max(step_count - warmup, 1), 1.0)
    left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    final = config.final_learning_rate_share
    return config.learning_rate * (final + (1 - final) * left)
