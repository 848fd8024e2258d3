"""Lowers and raises the policy lag so that the mismatch stays below `asynchrony.target_mismatch`.

    load = max(mismatch / target_mismatch, (1 - ess) / (1 - 0.5))       medians over a window of steps

    load > 1 over 4 steps        lower:  limit = floor(lag * min(1 / load, 3/4))
    load <= 0.8 over 12 steps    raise:  limit = limit + max(1, limit // 4), at most max_policy_lag

`mismatch` is the mean |old - behavior| of a step. A few tokens with large ratios hardly move it, but lower `ess`, the
effective sample size. `lag` is the largest lag of a token of the step; where engines are too slow to reach the limit,
only a limit below `lag` changes anything.

- The rules assume load = floor + slope * lag. With floor >= 0, 1 / load never lowers the limit too far; the cut to 3/4
  makes the effect larger than the noise. A raise from 4 or more does not exceed the target: 0.8 * 5/4 = 1.
- After a change, max(old limit, new limit) steps are ignored: they train samples that were admitted before it.
- The floor is numerical: engine and trainer differ at any lag. The first window after lowering measures the slope, and
  slope * lag / load, the share of the lag. If the share before lowering was below 1/4, the limit is restored (not if
  the load grew by a half: then the run diverges). If it is below 1/4 now and floor > 1, the limit stays. Either holds
  for `patience` steps, unless the load grows by a half.
- A limit that was too high is not tried again for `patience` steps: 32, doubled (up to 512) when a raise is taken back
  or lowering did not help. So a run between two limits changes ever more rarely.

Steps that trained nothing or lack a finite mismatch or `ess` are ignored.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final, NamedTuple

from fourfold import metrics as m
from fourfold.config.schema import AsynchronyConfig

from ..reporting.diagnosis import SMALL_SAMPLE_SIZE
from ..state.ledger import StepRow

_LOWER_STEPS: Final = 4
_RAISE_STEPS: Final = 12
_LOW_LOAD: Final = 0.8
_CUT: Final = 0.75
_MIN_SHARE: Final = 0.25
_GROWTH: Final = 1.5
_PATIENCE: Final = 32
_MAX_PATIENCE: Final = 512
_MEAN: Final = "mean |old - behavior|"


class _Window(NamedTuple):
    """Medians over the last steps, all at one limit."""

    limit: int
    mismatch: float
    ess: float
    lag: float
    load: float


class LagController:
    """Computes the effective lag limit of a run from the metrics of its steps. The same steps give the same limit."""

    def __init__(self, config: AsynchronyConfig) -> None:
        self._target, self._max = config.target_mismatch, config.max_policy_lag
        self._bound = f"target_mismatch {self._target:g}"
        self._reset()

    def _reset(self) -> None:
        self._limit = self._max
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=_RAISE_STEPS)  # mismatch, ess, lag
        self._settled = self._max  # up to this step, the lag is not that of the limit: at first it grows from 0
        self._top: _Window | None = None  # before the first of the present lowerings
        self._floor = 0.0  # load that lowering did not reduce
        self._too_high = self._max  # the limit that was lowered last
        self._retry, self._patience, self._raised = 0, _PATIENCE, False

    @property
    def limit(self) -> int:
        """Return the largest lag that new groups may reach, in policy versions, in [0, max_policy_lag]."""
        return self._limit

    def follows(self, config: AsynchronyConfig) -> bool:
        """Return whether a controller of this table would compute the same limits."""
        return (self._target, self._max) == (config.target_mismatch, config.max_policy_lag)

    def observe(self, step: int, metrics: Mapping[str, Any]) -> str:
        """Take the metrics of a step that is done; return the reason if the limit changes, else an empty text."""
        values = (metrics.get(name) for name in (m.MISMATCH_MEAN, m.EFFECTIVE_SAMPLE_SIZE, m.TOKEN_LAG_MAX))
        # A value is null in metrics.jsonl if it was not finite.
        mismatch, ess, lag = (v if v is not None and math.isfinite(v) else None for v in values)
        if not self._target or mismatch is None or ess is None or metrics.get(m.UPDATES) == 0 or step <= self._settled:
            return ""
        self._steps.append((mismatch, ess, self._limit if lag is None else min(lag, self._limit)))
        if len(self._steps) < _LOWER_STEPS:
            return ""
        if (now := self._window(_LOWER_STEPS)).load > 1:
            return self._lower(step, now)
        self._top = None
        if len(self._steps) == _RAISE_STEPS and (now := self._window(_RAISE_STEPS)).load <= _LOW_LOAD:
            return self._raise(step, now)
        return ""

    def replay(self, rows: Sequence[StepRow]) -> None:
        """Forget all steps, and observe those of the ledger, as after a restart."""
        self._reset()
        for row in rows:
            self.observe(row.step, row.metrics)

    def _window(self, count: int) -> _Window:
        mismatch, ess, lag = map(median, zip(*list(self._steps)[-count:], strict=True))
        load = max(mismatch / self._target, (1 - ess) / (1 - SMALL_SAMPLE_SIZE))
        return _Window(self._limit, mismatch, ess, lag, load)

    def _lower(self, step: int, now: _Window) -> str:
        if (top := self._top) is not None and len(self._steps) == _LOWER_STEPS:  # the first window after lowering
            slope = (top.load - now.load) / (top.lag - now.lag)
            no_help = slope * top.lag < _MIN_SHARE * top.load
            if no_help or now.load - slope * now.lag > max(1, (1 - _MIN_SHARE) * now.load):
                self._top, self._floor = None, now.load
                self._wait(step, longer=True)
                why = f"the cause is not the lag, as {_MEAN} was {top.mismatch:.2g} and is {now.mismatch:.2g}; compare"
                fix = f"the precisions of engine and trainer, or raise {self._bound}"
                diverges = now.load > _GROWTH * top.load
                return self._change(step, top.limit, f"{why} {fix}") if no_help and not diverges else ""
        limit = int(now.lag * min(1 / now.load, _CUT))
        if not now.lag or limit >= self._limit or (step < self._retry and now.load <= _GROWTH * self._floor):
            return ""
        self._top = top or now
        self._wait(step, longer=self._raised)
        self._too_high, self._raised = self._limit, False
        above = f"{_MEAN} {now.mismatch:.2g} over {_LOWER_STEPS} steps is above {self._bound} (ess {now.ess:.2f})"
        below = f"ess {now.ess:.2f} over {_LOWER_STEPS} steps is below {SMALL_SAMPLE_SIZE} ({_MEAN} {now.mismatch:.2g})"
        return self._change(step, limit, above if now.mismatch > self._target else below)

    def _raise(self, step: int, now: _Window) -> str:
        highest = self._too_high - 1 if step < self._retry else self._max
        limit = min(self._limit + max(1, self._limit // 4), self._max, highest)
        if limit <= self._limit:
            return ""
        self._raised = True
        why = f"{_MEAN} {now.mismatch:.2g} over {_RAISE_STEPS} steps is at most {_LOW_LOAD:.0%} of {self._bound}"
        return self._change(step, limit, f"{why} (ess {now.ess:.2f})")

    def _wait(self, step: int, *, longer: bool) -> None:
        self._patience = min(self._patience * (1 + longer), _MAX_PATIENCE)
        self._retry = step + self._patience

    def _change(self, step: int, limit: int, why: str) -> str:
        text = f"policy lag limit {self._limit} -> {limit}: {why}"
        self._settled, self._limit = step + max(self._limit, limit), limit
        self._steps.clear()
        return text
