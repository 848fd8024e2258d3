"""Defines the state of an algorithm between two steps: KL coefficient and running moments of the scores."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from fourfold.arrays import Float64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningMoments:
    """Mean and spread of all scores so far, over steps.

    Batches are merged as in Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
    computing sample variances" (1979), without differences of large squares.
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0  # sum of squared deviations from the mean

    def updated(self, scores: Float64Array) -> RunningMoments:
        """Return the moments of the scores so far together with these, [B]."""
        if not len(scores):
            return self
        # Relative to the first score, so that equal scores have exactly that mean and no spread.
        mean = float(scores[0] + (scores - scores[0]).mean())
        m2 = float(np.square(scores - mean).sum())
        count = self.count + len(scores)
        share = len(scores) / count
        delta = mean - self.mean
        return RunningMoments(
            count=count,
            mean=self.mean + delta * share,
            m2=self.m2 + m2 + delta * delta * self.count * share,
        )

    def normalise(self, scores: Float64Array) -> Float64Array:
        """Return (r - mean) / std, [B], with the unbiased std; where there is no spread, r - mean."""
        std = math.sqrt(self.m2 / (self.count - 1)) if self.count > 1 else 0.0
        centred = scores - self.mean
        return centred / std if std > 0 else centred


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmState:
    """State of an algorithm between two steps."""

    kl_coef: float | None = None  # KL coefficient of the next step; None: the recipe's
    scores: RunningMoments = field(default_factory=RunningMoments)
