"""Measures the queue of groups between the engines and the trainer: speed, waiting time, length bias, stale tokens."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from fourfold import metrics as m

from ..state.ledger import STALE
from ..state.samples import StepBatch, Trajectory


class QueueMeter:
    """Sums since the last batch; the lengths since the start. Times are those of `time.monotonic`."""

    def __init__(self) -> None:
        self._window_began = time.monotonic()
        self._sampling_since = 0.0  # 0 while no group is in generation
        self._sampling_seconds = 0.0  # in this window
        self.last_completion = 0.0
        self._sampled_tokens = 0  # in this window
        self._blocked_since = 0.0  # 0 while admission is not blocked
        self._blocked_seconds = 0.0
        self._scored, self._trained = _Lengths(), _Lengths()

    def set_sampling(self, sampling: bool) -> None:
        """Note whether groups are in generation."""
        if sampling:
            self._sampling_since = self._sampling_since or time.monotonic()
        elif self._sampling_since:  # sampling ended with the last completion, before scores and log-probabilities came
            self._sampling_seconds += max(self.last_completion - self._sampling_since, 0.0)
            self._sampling_since = 0.0

    def add_sampled(self, trajectories: Sequence[Trajectory], ended: float) -> None:
        """Count the trajectories of a group whose last completion came at `ended`; 0 if none came."""
        self._sampled_tokens += sum(t.token_count for t in trajectories)
        self.last_completion = max(self.last_completion, ended)
        self._scored.add(t for t in trajectories if t.sample.score is not None)

    def set_blocked(self, blocked: bool) -> None:
        """Note whether the lag limit admits no prompt while engines have room."""
        now = time.monotonic()
        if self._blocked_since:
            self._blocked_seconds += now - self._blocked_since
        self._blocked_since = now if blocked else 0.0

    def close_window(self, batch: StepBatch) -> dict[str, float]:
        """Return the metrics of the window that `batch` ends."""
        now = time.monotonic()
        if self._sampling_since:
            self._sampling_seconds += now - self._sampling_since
            self._sampling_since = now
        self.set_blocked(bool(self._blocked_since))
        self._trained.add(t for group in batch.groups for t in group.trajectories if not t.dropped)
        stale = sum(t.token_count for t in batch.lost if t.dropped == STALE)
        result = {
            m.ROLLOUT_SPEED: self._sampled_tokens / self._sampling_seconds if self._sampling_seconds else 0.0,
            m.ROLLOUT_WAIT: min(self._blocked_seconds / max(now - self._window_began, 1e-9), 1.0),
            m.STALE_TOKENS: stale / max(self._sampled_tokens, stale, 1),
        }
        if self._trained.count and self._scored.count:
            result[m.LENGTH_BIAS] = self._trained.mean / self._scored.mean - 1
        self._window_began, self._sampled_tokens, self._blocked_seconds, self._sampling_seconds = now, 0, 0.0, 0.0
        return result


class _Lengths:
    """Number and mean length of completions, in tokens."""

    def __init__(self) -> None:
        self.count = self._tokens = 0

    def add(self, trajectories: Iterable[Trajectory]) -> None:
        for trajectory in trajectories:
            self.count += 1
            self._tokens += trajectory.token_count

    @property
    def mean(self) -> float:
        return self._tokens / self.count
