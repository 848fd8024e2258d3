"""Compares the scores of a shadow with the live scores of the same samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np

from fourfold.arrays import Float64Array
from fourfold.coordinator.v1 import scorer_service_pb2 as pb

_WINDOW: Final = 16_384  # number of latest samples that are compared


class AgreementMeter:
    """The latest pairs of scores: of the live services, and of the shadow."""

    def __init__(self) -> None:
        self._pairs: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self._flips: deque[bool] = deque(maxlen=_WINDOW)
        self.gradient_cosine: float | None = None
        self.missing = 0  # samples without a score of the shadow
        self.skipped = 0  # samples that were not sent to the shadow, because it was too slow

    @property
    def count(self) -> int:
        """Number of compared samples in the window."""
        return len(self._pairs)

    def add_group(self, live: Sequence[float], shadow: Sequence[float]) -> None:
        """Add the scores of samples of one group, in the same order."""
        one, other = np.array(live, np.float64), np.array(shadow, np.float64)
        self._pairs.extend(zip(live, shadow, strict=True))
        # The advantage has the sign of the difference to the mean of the group.
        self._flips.extend((np.sign(_centred(one)) != np.sign(_centred(other))).tolist())

    def rank_correlation(self) -> float | None:
        """Return Spearman's rank correlation, with mean ranks for equal scores; None if one side is constant."""
        if self.count < 2:
            return None
        one, other = (_ranks(np.array(side)) for side in zip(*self._pairs, strict=True))
        spread = float(one.std() * other.std())
        if not spread:
            return None
        return float(np.clip(np.mean(_centred(one) * _centred(other)) / spread, -1.0, 1.0))

    def flip_share(self) -> float:
        """Return the share of the samples whose advantage would have another sign."""
        return sum(self._flips) / max(len(self._flips), 1)

    def mean_shift(self) -> float:
        """Return the mean of the shadow's scores minus that of the live ones."""
        return float(np.mean([other - one for one, other in self._pairs])) if self._pairs else 0.0

    def to_proto(self) -> pb.Agreement | None:
        """Return the comparison as clients see it; None if there is none yet."""
        if not self.count:
            return None
        return pb.Agreement(
            samples=self.count,
            rank_correlation=self.rank_correlation(),
            flip_share=self.flip_share(),
            mean_shift=self.mean_shift(),
            gradient_cosine=self.gradient_cosine,
        )


def _centred(values: Float64Array) -> Float64Array:
    # Rounding may make the mean of equal numbers differ from them, which would give the difference a sign.
    return values - values.mean() if values.min() != values.max() else values - values


def _ranks(values: Float64Array) -> Float64Array:
    """Return the rank of each value from 1; equal values have the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2)[inverse], np.float64)
