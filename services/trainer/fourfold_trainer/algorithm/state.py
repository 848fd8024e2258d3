"""What an algorithm carries from one step to the next."""

from __future__ import annotations

from dataclasses import dataclass, field

from . import rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmState:
    """State of an algorithm between two steps; part of the checkpoint."""

    kl_coef: float | None = None
    """Where the controller has moved the coefficient; None: the recipe's."""
    scores: rewards.RunningMoments = field(default_factory=rewards.RunningMoments)
    """Of all scores so far."""
