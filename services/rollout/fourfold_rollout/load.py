"""Measures the load of an engine for WatchLoad: running samples, free KV cache, tokens per second."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from fourfold.host.clock import SYSTEM_CLOCK, Clock
from fourfold_rollout.engine import RolloutEngine

_WINDOW_SECONDS: Final = 10.0
# Reports within a shorter time, for example to several watchers, share a measurement.
_INTERVAL_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The fields of WatchLoadResponse that come from the engine."""

    running_samples: int
    sampled_tokens: int  # since the start; never falls
    free_kv_cache_tokens: int
    token_rate: float  # tokens per second over the last ten seconds in which samples ran; 0: none ran yet


class LoadMeter:
    """Measures one engine on demand, in one pass over its samples."""

    def __init__(self, engine: RolloutEngine, clock: Clock = SYSTEM_CLOCK) -> None:
        self._engine = engine
        self._clock = clock
        self._last_count = engine.load().sampled_tokens  # the tokens of the warm-up do not count
        self._sampled = self._counted = 0
        self._since = clock.monotonic()
        self._busy = False
        self._intervals: deque[tuple[float, int]] = deque()  # (seconds, tokens) with running samples, oldest first

    def read(self, *, updating: bool) -> LoadReport:
        """Return the present load.

        `updating`: weights are being replaced or an epoch is being joined; this time does not count for the rate.
        """
        load = self._engine.load()
        # The engine's count falls by the tokens that an abandoned sample had not put.
        self._sampled += max(0, load.sampled_tokens - self._last_count)
        self._last_count = load.sampled_tokens
        now = self._clock.monotonic()
        if now - self._since >= _INTERVAL_SECONDS:
            tokens = self._sampled - self._counted
            # After a long time without a report, most of that time may have passed without samples.
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
