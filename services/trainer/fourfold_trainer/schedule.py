"""The learning rate of a step."""

from __future__ import annotations

import math
from typing import Protocol


class Schedule(Protocol):
    """The keys of a table that has a learning rate."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def schedule(self) -> str: ...
    @property
    def warmup_steps(self) -> int: ...


def learning_rate(config: Schedule, step: int, step_count: int) -> float:
    """Return the learning rate of step 1, 2, ...: a linear warm-up, then the schedule; it is 0 after the last step."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    done = (step - 1 - config.warmup_steps) / max(step_count - config.warmup_steps, 1)
    left = 1 - min(done, 1.0)
    return config.learning_rate * (left if config.schedule == "linear" else (1 - math.cos(math.pi * left)) / 2)
