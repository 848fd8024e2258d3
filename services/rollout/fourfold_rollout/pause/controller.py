"""Whether the engine samples: who may go to it, what becomes of what runs, and whether it has its memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

from fourfold.errors import DeadlinePassed, FourfoldError, Unavailable, WrongState
from fourfold_rollout.engine import RolloutEngine
from fourfold_rollout.pause.hold import TokenHold
from fourfold_rollout.pause.in_flight import RequestGate, RequestLease
from fourfold_rollout.pause.phases import PauseMode
from fourfold_rollout.pause.sleep import SleepState

# What arrives in the engine while it is being interrupted is interrupted again after this time.
_INTERRUPT_SECONDS: Final = 0.05
_LEAVE_SECONDS: Final = 10.0
_RETRY_SECONDS: Final = 1.0


class SamplingController:
    """Of one engine; belongs to one event loop. Whoever stops it starts it again."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.token_hold = TokenHold()
        """What every token passes on its way out."""
        self.sleep_state = SleepState()
        self.stands_still = False
        """Whether samples are in the engine and none of them is continued."""
        self.dirty = False
        """Whether the weights may be mixed or are lost."""
        self._commits = 0
        self._closed_for = ""
        self._refusal: FourfoldError | None = None
        self._engine = engine
        self._door = RequestGate()

    @asynccontextmanager
    async def serving(self, timeout: float) -> AsyncIterator[RequestLease]:
        """Hold a lease on the served weights, after a wait of at most `timeout` seconds at the door.

        Raises:
            Unavailable: the weights are dirty, or the door stayed closed.
            FourfoldError: what `refuse` was given.
        """
        is_open = await self._door.wait_open(timeout)
        if self._refusal is not None:
            raise self._refusal
        if not is_open:
            asleep = not self._closed_for
            what = "the engine sleeps" if asleep else self._closed_for
            raise Unavailable(
                f"{what}, for {timeout:.1f} s and more; try again",
                reason="ASLEEP" if asleep else "UPDATING_WEIGHTS",
                retry_after=_RETRY_SECONDS,
            )
        if self.dirty:
            raise self.dirty_error()
        version = self.token_hold.version
        with self._door.lease(version, f"v{version}.{self._commits}") as lease:
            yield lease

    def refuse(self, error: FourfoldError) -> None:
        """Let nobody come any more, those who wait at the door neither; for good."""
        self._refusal = error
        self._door.open_for_good()

    def commit(self, version: int) -> None:
        """Take what is loaded for whole weights of `version`.

        A version that was given up after its commit may come again with other weights. What is cached stays of use only
        to those who come from the same commit.
        """
        self.token_hold.version, self.dirty = version, False
        self._commits += 1

    def close_door(self, why: str) -> None:
        """Let new samples wait; `why` is for those who wait too long."""
        self._closed_for = why
        self._door.close()

    def open_door(self) -> None:
        """Let new samples in, as soon as the engine is awake."""
        self._closed_for = ""
        if self.sleep_state.awake:
            self._door.open()

    async def stop(self, mode: PauseMode, timeout: float) -> None:
        """Return when nothing is sampled. The door must be closed.

        Raises:
            DeadlinePassed: samples still run; they go on.
        """
        if not self.sleep_state.awake:
            return
        try:
            async with asyncio.timeout(timeout):
                if mode is not PauseMode.KEEP:
                    await self._empty(interrupt=mode is PauseMode.ABORT)
                # Who is on the way in would come in the middle of the update, with the old version's cache.
                await self._door.wait_entered()
                if mode is PauseMode.KEEP and self._engine.running_count:
                    await self._engine.pause()
                    self.stands_still = True
                else:
                    await self._engine.settle()
        except TimeoutError:
            raise DeadlinePassed(
                f"{self._engine.running_count} samples still ran after {timeout:.1f} s; they go on with version "
                f'{self.token_hold.version}. Give it more time, or set weights.pause = "keep" or "abort"'
            ) from None

    async def go_on(self) -> None:
        """Continue what stands still, and open the door."""
        if self.stands_still:
            self.stands_still = False
            await self._engine.resume()
        self.open_door()

    async def end_all(self) -> None:
        """End all samples with what the gate lets out of them. The door must be closed.

        Raises:
            DeadlinePassed: the engine did not end them.
        """
        try:
            async with asyncio.timeout(_LEAVE_SECONDS):
                await self._empty(interrupt=True)
        except TimeoutError:
            raise DeadlinePassed(f"samples were still in the engine {_LEAVE_SECONDS:.0f} s after their end") from None
        self.stands_still = False

    async def sleep(self, level: int, timeout: float) -> None:
        """Let new samples wait and those that run finish, then give memory up. At the present level: does nothing.

        An engine that does not answer may sleep, now or in a while: it counts as asleep and dirty, so that nobody
        writes to memory that it has not got, and a wake or a sleep asks it again.

        Raises:
            InvalidInput: no such level.
            WrongState: the engine cannot sleep, samples were in it for half of `timeout` seconds, or it sleeps at
                another level.
        """
        if not self.sleep_state.check(level, self._engine.description):
            return
        self._door.close()
        try:
            await self._finish_running(timeout / 2)
            confirmed = False
            try:
                await self._engine.sleep(level, timeout=timeout)
                confirmed = True
            finally:
                self.sleep_state.fell_asleep(level, confirmed=confirmed)
                self.dirty |= not confirmed or self.sleep_state.lost_weights
        finally:
            self.open_door()

    async def wake(self, tags: Sequence[str], timeout: float) -> None:
        """Take memory again, all or what the tags name; the door stays as it is.

        Raises:
            InvalidInput: no such tag.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        for tag in self.sleep_state.to_wake(tags):
            # One by one: vLLM wakes none of them when one is awake already, by a call whose answer came too late.
            await self._engine.wake((tag,), timeout=deadline - loop.time())
            self.sleep_state.woke((tag,))

    def dirty_error(self) -> Unavailable:
        """Return the error of everybody who wants tokens of dirty weights."""
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
                await self._empty(interrupt=False)
        except TimeoutError:
            raise WrongState(
                f"{self._door.leases} calls have samples in the engine, after {timeout:.1f} s still; end them before "
                "it can sleep"
            ) from None

    async def _empty(self, *, interrupt: bool) -> None:
        """Return when nobody has samples in the engine."""
        while self._door.leases:
            if interrupt:
                await self._engine.interrupt()
            with suppress(TimeoutError):
                async with asyncio.timeout(_INTERRUPT_SECONDS if interrupt else None):
                    await self._door.wait_empty()
