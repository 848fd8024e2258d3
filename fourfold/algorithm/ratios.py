"""Bounds ratios of probabilities and averages tokens over trajectories.

k              tokens of a micro-batch; it has all tokens of a trajectory that is averaged
s              trajectories of the micro-batch
segments       int64 [k]  trajectory of each token, 0 to s - 1
log-ratio d    [k]  difference of two log-probabilities of the same token
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor

# exp of a larger log-ratio, or its gradient, would outweigh every other token of a sum.
MAX_LOG_RATIO: Final = 20.0


def clamp(log_ratio: Tensor) -> Tensor:
    """Return d within +-20, with gradient 0 outside."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def segment_sum(values: Tensor, segments: Tensor, segment_count: int, selected: Tensor | None = None) -> Tensor:
    """Return the sum of a trajectory's values, float64 [s], over its `selected` tokens (None: all); 0 without any."""
    # float64: the sum of a thousand float32 differences of 1e-4 has few digits, and GSPO clips at 1 +- 3e-4.
    chosen = (values if selected is None else values.masked_fill(~selected, 0.0)).double()
    return chosen.new_zeros(segment_count).index_add(0, segments, chosen)


def segment_mean(values: Tensor, segments: Tensor, segment_count: int, selected: Tensor | None = None) -> Tensor:
    """Return the mean of a trajectory's values, float64 [s], over its `selected` tokens (None: all); 0 without any."""
    counted = values.new_ones(values.shape) if selected is None else selected
    counts = segment_sum(counted, segments, segment_count).clamp(min=1)
    return segment_sum(values, segments, segment_count, selected) / counts
