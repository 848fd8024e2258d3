"""Starts and stops sampling in one engine: admits requests, ends or pauses running samples, frees memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from enum import Enum
from typing import Final

from fourfold.errors import DeadlinePassed, FourfoldError, Unavailable, WrongState
from fourfold_rollout.engine import RolloutEngine
from fourfold_rollout.pause.hold import TokenHold
from fourfold_rollout.pause.in_flight import RequestGate, RequestLease
from fourfold_rollout.pause.sleep import SleepState

# An interrupt misses samples that reach the engine during it, so it is repeated at this interval.
_INTERRUPT_INTERVAL_SECONDS: Final = 0.05
_END_SECONDS: Final = 10.0
_RETRY_SECONDS: Final = 1.0


class PauseMode(Enum):
    """The treatment of running samples in a weight update."""

    WAIT = "wait"  # they finish first
    ABORT = "abort"  # they end with the tokens that they have
    KEEP = "keep"  # they pause, and continue under the new weights with the keys and values of the old ones
    RECOMPUTE = "recompute"  # they pause, and continue under the new weights, which compute their tokens again


class SamplingController:
    """Controls the sampling of one engine. Belongs to one event loop."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.token_hold = TokenHold()
        self.sleep_state = SleepState()
        self.samples_paused = False  # samples are in the engine and none of them advances
        self.dirty = False  # the weights may be mixed, or are lost
        self._recompute = False  # paused samples lose their keys and values when the weights change
        self._commits = 0
        self._closed_reason = ""  # empty while the gate is open, or closed only because the engine sleeps
        self._refusal: FourfoldError | None = None
        self._engine = engine
        self._gate = RequestGate()

    @asynccontextmanager
    async def serving(self, timeout: float) -> AsyncIterator[RequestLease]:
        """Hold a lease on the served weights, after waiting at most `timeout` seconds for the gate.

        Raises Unavailable: the weights are dirty, or the gate stayed closed; or the error given to `refuse`.
        """
        is_open = await self._gate.wait_open(timeout)
        if self._refusal is not None:
            raise self._refusal
        if not is_open:
            asleep = not self._closed_reason
            what = "the engine sleeps" if asleep else self._closed_reason
            raise Unavailable(
                f"{what}, for {timeout:.1f} s and more; try again",
                reason="ASLEEP" if asleep else "UPDATING_WEIGHTS",
                retry_after=_RETRY_SECONDS,
            )
        if self.dirty:
            raise self.dirty_error()
        with self._gate.lease(self.token_hold.version, self._cache_salt) as lease:
            yield lease

    def is_current(self, lease: RequestLease) -> bool:
        """Return true if no weights were committed since the lease began."""
        return lease.cache_salt == self._cache_salt

    @property
    def _cache_salt(self) -> str:
        return f"v{self.token_hold.version}.{self._commits}"

    def refuse(self, error: FourfoldError) -> None:
        """Raise `error` in every present and future call of `serving`."""
        self._refusal = error
        self._gate.open_for_good()

    def commit(self, version: int) -> None:
        self.token_hold.version, self.dirty = version, False
        # An update that is aborted after its commit may be repeated with other weights under the same version. The
        # cache salt therefore contains the commit's number: prefixes computed with the aborted weights are never read.
        self._commits += 1

    def close_gate(self, why: str) -> None:
        """Make new requests wait; `why` is the error text of requests that wait too long."""
        self._closed_reason = why
        self._gate.close()

    def open_gate(self) -> None:
        """Admit new requests, now or when the engine is awake."""
        self._closed_reason = ""
        if self.sleep_state.awake:
            self._gate.open()

    async def stop(self, mode: PauseMode, timeout: float) -> None:
        """Return when nothing is sampled. The gate must be closed. After DeadlinePassed, running samples continue."""
        if not self.sleep_state.awake:
            return
        stay = mode in (PauseMode.KEEP, PauseMode.RECOMPUTE)
        try:
            async with asyncio.timeout(timeout):
                if not stay:
                    await self._drain(interrupt=mode is PauseMode.ABORT)
                # Otherwise a request on its way could start during the update, with the old version's cache.
                await self._gate.wait_submitted()
                if stay and self._engine.running_count:
                    await self._engine.pause()
                    self.samples_paused, self._recompute = True, mode is PauseMode.RECOMPUTE
                else:
                    await self._engine.settle()
        except TimeoutError:
            raise DeadlinePassed(
                f"{self._engine.running_count} samples still ran after {timeout:.1f} s; they go on with version "
                f'{self.token_hold.version}. Give it more time, or set weights.pause = "keep", "recompute" or "abort"'
            ) from None

    async def forget_old_weights(self) -> None:
        """Drop the keys and values of the old weights that no sample may read; see `PauseMode`. Repeatable.

        Call it before `commit`. Without paused samples, the cache salt of new samples is enough.
        """
        if self.samples_paused:
            await self._engine.forget_prefixes(recompute=self._recompute)

    async def resume(self) -> None:
        if self.samples_paused:
            self.samples_paused = False
            await self._engine.resume()
        self.open_gate()

    async def end_all(self) -> None:
        """End all samples with the tokens that the hold lets pass. The gate must be closed. Raises DeadlinePassed."""
        try:
            async with asyncio.timeout(_END_SECONDS):
                await self._drain(interrupt=True)
        except TimeoutError:
            raise DeadlinePassed(f"samples were still in the engine {_END_SECONDS:.0f} s after their end") from None
        self.samples_paused = False

    async def sleep(self, level: int, timeout: float) -> None:
        """Make new requests wait, let running samples finish, then free memory. A confirmed sleep is not repeated.

        Raises WrongState: see `SleepState.check`, or samples were in the engine for half of `timeout` seconds.
        """
        if not self.sleep_state.check(level, self._engine.description):
            return
        self._gate.close()
        try:
            await self._finish_running(timeout / 2)  # the engine needs the rest of the time to free its memory
            confirmed = False
            try:
                await self._engine.sleep(level, timeout=timeout)
                confirmed = True
            finally:
                # Without an answer, the engine may sleep now or later. It counts as asleep and dirty, so that nothing
                # is written to freed memory. The next sleep or wake calls it again.
                self.sleep_state.fell_asleep(level, confirmed=confirmed)
                self.dirty |= not confirmed or self.sleep_state.lost_weights
        finally:
            self.open_gate()

    async def wake(self, tags: Sequence[str], timeout: float) -> None:
        """Allocate all memory again, or the parts in `tags`. Does not open the gate; call `open_gate` afterwards."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        for tag in self.sleep_state.to_wake(tags):
            # One call per tag: vLLM wakes none of several tags if one of them is awake, and a call whose answer came
            # too late may have woken one.
            await self._engine.wake((tag,), timeout=deadline - loop.time())
            self.sleep_state.woke(tag)

    def dirty_error(self) -> Unavailable:
        if self.sleep_state.lost_weights:
            what = "the engine's sleep dropped its weights; it serves nothing until an update succeeds"
        else:
            what = (
                "an update or a sleep failed and the weights may be mixed; it serves nothing until an update succeeds"
            )
        return Unavailable(
            f"{what}; use another replica, or publish the weights again",
            reason="WEIGHTS_DIRTY",
            retry_after=_RETRY_SECONDS,
        )

    async def _finish_running(self, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await self._drain(interrupt=False)
        except TimeoutError:
            raise WrongState(
                f"{self._gate.lease_count} calls still have samples in the engine after {timeout:.1f} s; end them "
                "before it can sleep"
            ) from None

    async def _drain(self, *, interrupt: bool) -> None:
        while self._gate.lease_count:
            if interrupt:
                await self._engine.interrupt()
            with suppress(TimeoutError):
                async with asyncio.timeout(_INTERRUPT_INTERVAL_SECONDS if interrupt else None):
                    await self._gate.wait_empty()
