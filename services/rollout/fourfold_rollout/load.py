"""What a router wants to know of an engine: how much runs, how much room is left, how fast it samples."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from fourfold.host.clock import SYSTEM_CLOCK, Clock
from fourfold_rollout.engine import RolloutEngine

_WINDOW_SECONDS: Final = 10.0
# Reports that come faster, of several watchers for example, share an interval.
_INTERVAL_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The fields of WatchLoadResponse that tell of the engine."""

    running_samples: int
    sampled_tokens: int
    """Since the start; never falls."""
    free_kv_cache_tokens: int
    token_rate: float
    """Tokens a second over the last ten seconds in which samples ran; 0: none did yet."""


class LoadMeter:
    """Reads an engine whenever somebody wants a report; one pass over its samples each time."""

    def __init__(self, engine: RolloutEngine, clock: Clock = SYSTEM_CLOCK) -> None:
        self._engine = engine
        self._clock = clock
        self._last_count = engine.load().sampled_tokens  # of the warm-up
        self._sampled = self._counted = 0
        self._since = clock.monotonic()
        self._busy = False
        self._intervals: deque[tuple[float, int]] = deque()
        """Seconds and tokens, oldest first, of intervals in which samples ran."""

    def read(self, *, updating: bool) -> LoadReport:
        """Return the load now.

        Args:
            updating: weights are being replaced, or the engine joins those who send them; nothing is sampled, and that
                says nothing of the speed.
        """
        load = self._engine.load()
        # An abandoned sample takes along what it had not handed over.
        self._sampled += max(0, load.sampled_tokens - self._last_count)
        self._last_count = load.sampled_tokens
        now = self._clock.monotonic()
        if now - self._since >= _INTERVAL_SECONDS:
            tokens = self._sampled - self._counted
            # Nobody asked for long: most of that time nothing may have run.
            unwatched = not self._busy and now - self._since > _WINDOW_SECONDS
            if not unwatched and (tokens or (self._busy and not updating)):
                self._add(now - self._since, tokens)
            self._since, self._counted = now, self._sampled
            self._busy = load.running_samples > 0 and not updating
        return LoadReport(
            running_samples=load.running_samples,
            sampled_tokens=self._sampled,
            free_kv_cache_tokens=max(0, self._engine.description.kv_cache_tokens - load.held_tokens),
            token_rate=self._rate(),
        )

    def _add(self, seconds: float, tokens: int) -> None:
        self._intervals.append((seconds, tokens))
        while sum(seconds for seconds, _ in self._intervals) - self._intervals[0][0] >= _WINDOW_SECONDS:
            self._intervals.popleft()

    def _rate(self) -> float:
        seconds = sum(seconds for seconds, _ in self._intervals)
        return sum(tokens for _, tokens in self._intervals) / seconds if seconds else 0.0
