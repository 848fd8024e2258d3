"""What a rollout service says of its load, as far as it is fresh, and the watch that keeps it so.

    WatchLoad --report every second--> EngineLoad <--given, ended-- router

Reports help to choose and decide nothing. A service that never sends one is used like any other; one whose reports have
stopped may stand still, and comes after those that say that they have room. Both are asked again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from fourfold import metrics as m
from fourfold.errors import FourfoldError, PeerFault
from fourfold.host.clock import Clock
from fourfold.rollout.client import AsyncRolloutClient
from fourfold.rollout.v1 import rollout_service_pb2 as rollout

log = logging.getLogger("fourfold.coordinator")

PERIOD_SECONDS: Final = 1.0
STALE_SECONDS: Final = 3.5 * PERIOD_SECONDS
# In one period: a service that sends more would keep this process busy.
_MOST_REPORTS: Final = 20
# In which half of a speed that was once measured is forgotten.
_HALF_LIFE_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class LoadTicket:
    """One call in a `Load`: its tokens, and the report after which it was given."""

    tokens: int
    report: int


class EngineLoad:
    """What is known of one replica's load. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._arrived = -math.inf
        self._reports = 0
        self._speed = 0.0
        self._cache = self._free = 0
        self._given = 0  # tokens, since the report
        self._fullest = 0.0

    def take(self, report: rollout.WatchLoadResponse, now: float) -> None:
        """Take the newest report. A field that is 0, or makes no sense, is not known."""
        rate = report.token_rate if math.isfinite(report.token_rate) else 0.0
        # An engine samples the fewer tokens a second the fewer samples it has: what it did with many is what it can do.
        # Nothing is forgotten while it has nothing to do.
        fade = 0.5 ** ((now - self._arrived) / _HALF_LIFE_SECONDS) if report.running_sample_count > 0 else 1.0
        self._speed = max(rate, self._speed * fade)
        self._cache = max(report.kv_cache_token_count, 0)
        self._free = min(max(report.free_kv_cache_token_count, 0), self._cache)
        self._arrived, self._given = now, 0
        self._reports += 1
        self._fullest = max(self._fullest, self.cache_use(now) or 0.0)

    def speed(self, now: float) -> float | None:
        """Tokens a second that it samples when it is busy; None: not known."""
        return self._speed if self._speed > 0 and self._fresh(now) else None

    def room(self, now: float) -> int | None:
        """Tokens that its KV cache takes besides what it was given since the report; None: it has never told.

        An engine that tells no more may stand still: it has room again when it says so.
        """
        if not self._cache:
            return None
        return self._free - self._given if self._fresh(now) else 0

    def cache_use(self, now: float) -> float | None:
        """Share of its KV cache that samples took at the report, in [0, 1]; None: not known."""
        return 1 - self._free / self._cache if self._cache and self._fresh(now) else None

    def fullest(self) -> float:
        """Return the largest `cache_use` since this was asked last; 0: none was known."""
        result, self._fullest = self._fullest, 0.0
        return result

    def give(self, tokens: int) -> LoadTicket:
        """Note a call that is on its way."""
        self._given += tokens
        return LoadTicket(tokens, self._reports)

    def end(self, ticket: LoadTicket) -> None:
        """Note that it is over. What a report has counted, the next one counts no more."""
        if ticket.report == self._reports:
            self._given -= ticket.tokens

    def _fresh(self, now: float) -> bool:
        return now - self._arrived <= STALE_SECONDS


def summarize_loads(loads: Sequence[EngineLoad], now: float) -> dict[str, float]:
    """Return the metrics of engines with these loads; what none of them tells is left out. Asks for `fullest`."""
    speeds = [speed for load in loads if (speed := load.speed(now)) is not None]
    result = {m.ENGINE_SPEED_MIN: min(speeds), m.ENGINE_SPEED_MAX: max(speeds)} if speeds else {}
    fullest = max((load.fullest() for load in loads), default=0.0)
    return result | ({m.KV_CACHE_USE: fullest} if fullest else {})


async def watch_load(client: AsyncRolloutClient, load: EngineLoad, clock: Clock) -> None:
    """Bring a replica's reports to `load`, until cancelled; a stream that ends or stands still is opened anew."""
    while True:
        try:
            async with aclosing(client.watch_load(period=PERIOD_SECONDS)) as reports:
                began = clock.monotonic()
                for count in itertools.count():
                    periods = (clock.monotonic() - began) / PERIOD_SECONDS
                    if count > _MOST_REPORTS * (periods + 1):
                        raise PeerFault(client.peer, "FLOOD", f"WatchLoad: {count} reports in {periods:.1f} s")
                    async with asyncio.timeout(STALE_SECONDS):
                        report = await anext(reports, None)
                    if report is None:
                        break
                    load.take(report, clock.monotonic())
        except (FourfoldError, TimeoutError) as error:
            log.debug("%s sends no load reports: %s", client.peer, error or "none came in time")
        await clock.sleep(PERIOD_SECONDS)
