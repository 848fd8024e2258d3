"""Models the time of an engine step, and fits the model to measurements.

In one engine step every running sample gets one token. With n samples that have c tokens in the KV cache together it
takes

    base + per_sample n + per_context_token c   seconds

The engine reads its weights once per step (base), computes every sample (per_sample), and reads the whole KV cache
(per_context_token). A 0.43B model on an H200: 1.5 ms, 6.1 us, and 10.4 ns for the 48 KiB of a token, which is the
bandwidth of its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

# Two columns are told apart if the sine of the angle between them is above the root of this.
_INDEPENDENT: Final = 1e-3
# A further term must explain this share of what is left.
_GAIN: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStep:
    """Seconds of one engine step; see the docstring of this module."""

    base: float
    per_sample: float
    per_context_token: float = 0.0

    def seconds(self, samples: float, context: float = 0.0) -> float:
        """Return the time of a step with this many samples, and this many tokens in the KV cache."""
        return self.base + self.per_sample * samples + self.per_context_token * context


class EngineStepFit:
    """Fits an engine step to intervals, by least squares over their seconds. Keeps sums, not the intervals."""

    def __init__(self, memory: float = 1.0) -> None:
        """Create a fit without intervals; each interval multiplies the weight of those before it by `memory`."""
        self._memory = memory
        self._products = [[0.0] * 3 for _ in range(3)]  # of the columns of `add`
        self._targets = [0.0] * 3  # of the columns and the seconds
        self._squares = 0.0  # of the seconds

    def add(self, *, seconds: float, tokens: float, samples: float, context: float = 0.0) -> None:
        """Add an interval in which so many tokens were sampled; `samples` and `context` are means over it."""
        steps = tokens / samples
        columns = (steps, tokens, steps * context)
        for i, first in enumerate(columns):
            for j, second in enumerate(columns):
                self._products[i][j] = self._products[i][j] * self._memory + first * second
            self._targets[i] = self._targets[i] * self._memory + first * seconds
        self._squares = self._squares * self._memory + seconds * seconds

    def result(self) -> EngineStep | None:
        """Return the fit without negative terms; None if the numbers of samples are too similar to tell terms apart.

        A term that explains little is left out.
        """
        if not self._independent(0, 1):
            return None
        best, error = [0.0] * 3, self._squares
        for count in (1, 2, 3):
            for chosen in combinations(range(3), count):
                values = self._solve(chosen)
                if values is None or min(values) < 0:
                    continue
                left = self._squares - sum(v * self._targets[i] for i, v in zip(chosen, values, strict=True))
                if left < error * (1 - _GAIN):
                    best = [0.0] * 3
                    for i, value in zip(chosen, values, strict=True):
                        best[i] = value
                    error = left
        return EngineStep(base=best[0], per_sample=best[1], per_context_token=best[2])

    def _independent(self, i: int, j: int) -> bool:
        product = self._products[i][i] * self._products[j][j]
        return product - self._products[i][j] ** 2 > _INDEPENDENT * product

    def _solve(self, chosen: Sequence[int]) -> list[float] | None:
        """Return the values of the chosen terms, by elimination; None if they cannot be told apart."""
        rows = [[self._products[i][j] for j in chosen] + [self._targets[i]] for i in chosen]
        for k, row in enumerate(rows):
            if row[k] <= _INDEPENDENT * self._products[chosen[k]][chosen[k]]:
                return None
            for other in (r for r in rows if r is not row):
                factor = other[k] / row[k]
                other[:] = [a - factor * b for a, b in zip(other, row, strict=True)]
        return [row[-1] / row[k] for k, row in enumerate(rows)]
