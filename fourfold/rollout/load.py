"""Keeps the load that a rollout service reports: speed, and room in its KV cache.

    WatchLoad --one report a period--> EngineLoad <--calls that begin and end-- router

Reports influence which replica gets a call. A service that never sent a report is used like any other. A service whose
reports stopped may hang, and is chosen after those that report room. Its stream is opened again. A service that reports
samples and no new token for `STALL_SECONDS` loses its calls: its engine hangs behind a front end that answers. (A front
end that hangs loses its lease.) The time of an engine step is fitted to the reports, for `fourfold plan --rates`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Final

from fourfold import metrics as m
from fourfold.errors import FourfoldError, PeerFault
from fourfold.host.clock import Clock
from fourfold.rollout.client import AsyncRolloutClient
from fourfold.rollout.engine_step import EngineStep, EngineStepFit
from fourfold.rollout.v1 import rollout_service_pb2 as rollout

log = logging.getLogger("fourfold.rollout.load")

PERIOD_SECONDS: Final = 1.0
STALE_SECONDS: Final = 3.5 * PERIOD_SECONDS
# Samples decode from the end of their prefill on: no engine computes a single prompt for this long.
STALL_SECONDS: Final = 300.0
# Reports in one period. A service that sends more would keep the coordinator busy.
_MAX_REPORTS: Final = 20
# With more engines than these, each one reports less often.
_FAST_ENGINES: Final = 100
# A change of the period by this factor opens the stream again.
_PERIOD_CHANGE: Final = 1.5
# A measured speed loses half of its weight in this time.
_HALF_LIFE_SECONDS: Final = 60.0
# Weight that each second between two reports leaves to those before it in the fit of the engine's step.
_FIT_MEMORY: Final = 0.998


def report_period(engines: int) -> float:
    """Return the seconds between two reports of one of so many engines: each report costs the coordinator 0.1 ms."""
    return PERIOD_SECONDS * max(1.0, engines / _FAST_ENGINES)


class EngineLoad:
    """Load of one rollout replica. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self.period = PERIOD_SECONDS  # between two reports
        self._arrived = -math.inf
        self._reports = 0
        self._speed = 0.0  # tokens per second
        self._cache = self._free = 0  # tokens
        self._begun = 0  # tokens of the calls since the last report
        self._fullest = 0.0
        self._last = rollout.WatchLoadResponse()
        self._progressed = -math.inf  # when the engine had sampled, or had nothing to sample
        self._updating_since = -math.inf
        self._fit = EngineStepFit(_FIT_MEMORY)

    def take(self, report: rollout.WatchLoadResponse, now: float) -> None:
        """Store the newest report. A field that is 0, negative or not finite counts as unknown."""
        rate = report.token_rate if math.isfinite(report.token_rate) else 0.0
        # Speed under load is the highest recent speed, because an engine with few samples is slow. An idle engine keeps
        # that speed.
        fade = 0.5 ** ((now - self._arrived) / _HALF_LIFE_SECONDS) if report.running_sample_count > 0 else 1.0
        self._speed = max(rate, self._speed * fade)
        self._cache = max(report.kv_cache_token_count, 0)
        self._free = min(max(report.free_kv_cache_token_count, 0), self._cache)
        tokens = report.sampled_token_count - self._last.sampled_token_count
        if not self._reports or tokens or report.running_sample_count <= 0 or report.updating_weights:
            self._progressed = now
        if not self._last.updating_weights:
            self._updating_since = now
        self._add_interval(report, now - self._arrived)
        self._arrived, self._begun = now, 0
        self._reports += 1
        self._fullest = max(self._fullest, self.cache_use(now) or 0.0)

    def _add_interval(self, report: rollout.WatchLoadResponse, seconds: float) -> None:
        """Add the time since the last report to the fit, if the engine sampled all the time."""
        last, self._last = self._last, report
        tokens = report.sampled_token_count - last.sampled_token_count
        busy = all(r.running_sample_count > 0 and not r.updating_weights for r in (last, report))
        if not busy or tokens <= 0 or not 0.5 * self.period <= seconds <= 2 * self.period:
            return
        held = [max(r.kv_cache_token_count - r.free_kv_cache_token_count, 0) for r in (last, report)]
        samples = (last.running_sample_count + report.running_sample_count) / 2
        self._fit.add(seconds=seconds, tokens=tokens, samples=samples, context=sum(held) / 2)

    @property
    def report(self) -> rollout.WatchLoadResponse:
        """Return the newest report; empty before the first."""
        return self._last

    def updating_for(self, now: float) -> float:
        """Return the seconds for which the engine has reported a weight update; 0: it reports none."""
        return now - self._updating_since if self._last.updating_weights and self._fresh(now) else 0.0

    def engine_step(self) -> EngineStep | None:
        """Return the time of an engine step; None if too little was seen to fit it."""
        return self._fit.result()

    def speed(self, now: float) -> float | None:
        """Return the tokens per second that a busy engine samples; None if unknown."""
        return self._speed if self._speed > 0 and self._fresh(now) else None

    def room(self, now: float) -> int | None:
        """Return the tokens that still fit into the KV cache: free at the report, less the calls since then.

        None if no report ever had it. 0 if the reports stopped: the engine may hang.
        """
        if not self._cache:
            return None
        return self._free - self._begun if self._fresh(now) else 0

    def silent(self, now: float) -> bool:
        """Return whether the reports stopped: the engine may hang."""
        return self._reports > 0 and not self._fresh(now)

    def stalled(self, now: float) -> bool:
        """Return whether the engine reports samples and has sampled no token for `STALL_SECONDS`."""
        return self._fresh(now) and now - self._progressed > STALL_SECONDS

    def restart_stall(self, now: float) -> None:
        """Give the engine `STALL_SECONDS` again, for the calls that begin from now on."""
        self._progressed = now

    def cache_use(self, now: float) -> float | None:
        """Return the share of the KV cache that was in use at the report, in [0, 1]; None if unknown."""
        return 1 - self._free / self._cache if self._cache and self._fresh(now) else None

    def take_fullest(self) -> float:
        """Return the largest `cache_use` since the last call of this method, and reset it; 0 if unknown."""
        result, self._fullest = self._fullest, 0.0
        return result

    @contextmanager
    def in_flight(self, tokens: int) -> Iterator[None]:
        """Count a call of so many tokens within the block."""
        self._begun += tokens
        reports = self._reports
        try:
            yield
        finally:
            if reports == self._reports:  # otherwise a report has counted its tokens, and the next one will not
                self._begun -= tokens

    def _fresh(self, now: float) -> bool:
        return now - self._arrived <= STALE_SECONDS * self.period / PERIOD_SECONDS


class TokenCounts:
    """Tokens of calls that ended early, since the last `take`: those that were kept, and those that were lost."""

    def __init__(self) -> None:
        self._continued = self._lost = 0

    def add(self, *, continued: int, lost: int) -> None:
        """Count tokens that a continuation kept, and tokens that an engine sent and no sample has."""
        self._continued += continued
        self._lost += lost

    def take(self) -> dict[str, float]:
        """Return the metrics, without those that are 0, and start again from 0."""
        counts = {m.CONTINUED_TOKENS: float(self._continued), m.LOST_TOKENS: float(self._lost)}
        self._continued = self._lost = 0
        return {name: count for name, count in counts.items() if count}


def summarize_loads(loads: Sequence[EngineLoad], now: float) -> dict[str, float]:
    """Return the metrics of the engines with these loads, without those that are unknown. Resets `take_fullest`."""
    speeds = [speed for load in loads if (speed := load.speed(now)) is not None]
    result = {m.ENGINE_SPEED_MIN: min(speeds), m.ENGINE_SPEED_MAX: max(speeds)} if speeds else {}
    steps = [step for load in loads if (step := load.engine_step()) is not None]
    for name, values in (
        (m.ENGINE_STEP_BASE, [step.base for step in steps]),
        (m.ENGINE_STEP_SAMPLE, [step.per_sample for step in steps]),
        (m.ENGINE_STEP_CONTEXT, [step.per_context_token for step in steps]),
    ):
        if values:
            result[name] = sum(values) / len(values)
    fullest = max((load.take_fullest() for load in loads), default=0.0)
    return result | ({m.KV_CACHE_USE: fullest} if fullest else {})


async def watch_load(client: AsyncRolloutClient, load: EngineLoad, clock: Clock) -> None:
    """Store a replica's reports in `load`, until cancelled; reopen a stream that ends or stops."""
    while True:
        try:
            period = load.period
            async with aclosing(client.watch_load(period=period)) as reports:
                began = clock.monotonic()
                for count in itertools.count():
                    periods = (clock.monotonic() - began) / PERIOD_SECONDS
                    if count > _MAX_REPORTS * (periods + 1):
                        raise PeerFault(client.peer, "FLOOD", f"WatchLoad: {count} reports in {periods:.1f} s")
                    async with asyncio.timeout(STALE_SECONDS * period / PERIOD_SECONDS):
                        report = await anext(reports, None)
                    if report is None:
                        break
                    if not 1 / _PERIOD_CHANGE < load.period / period < _PERIOD_CHANGE:
                        break
                    load.take(report, clock.monotonic())
        except (FourfoldError, TimeoutError) as error:
            log.debug("no load reports: peer=%s reason=%s", client.peer, error or "none came in time")
        await clock.sleep(PERIOD_SECONDS)
