"""Starts and stops sampling in one engine: admits requests, ends or pauses running samples, frees memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from enum import Enum
from typing import Final

from fourfold.errors import CANNOT_SLEEP, DeadlinePassed, FourfoldError, InvalidInput, Unavailable, WrongState
from fourfold_rollout.engine import EngineDescription, RolloutEngine
from fourfold_rollout.pause.hold import TokenHold

# An interrupt misses samples that reach the engine during it, so it is repeated at this interval.
_INTERRUPT_INTERVAL_SECONDS: Final = 0.05
_END_SECONDS: Final = 10.0
_RETRY_SECONDS: Final = 1.0
_WEIGHTS: Final = "weights"
_TAGS: Final = (_WEIGHTS, "kv_cache")
_LEVELS: Final = (1, 2)


class RequestLease:
    """The right of one request to have samples in the engine."""

    def __init__(self, gate: RequestGate, version: int, cache_salt: str) -> None:
        self._gate = gate
        self._submitting = True
        self.version = version  # of the weights when the lease began
        self.cache_salt = cache_salt  # unique to one commit of weights, even when a version number is reused

    def mark_in_flight(self) -> None:
        """Note that the samples of the request are in the engine now. Idempotent."""
        if self._submitting:
            self._submitting = False
            self._gate.count(submitting=-1)


class RequestGate:
    """Blocks new requests during a weight update and counts the requests in flight.

    wait_open --> lease: submitting --------------> in flight -----------------> released
                  samples on the way to the engine  samples inside the engine

    Open at first. Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._open, self._no_leases, self._none_submitting = (asyncio.Event() for _ in range(3))
        for event in (self._open, self._no_leases, self._none_submitting):
            event.set()
        self._can_close = True
        self._leases, self._submitting = 0, 0

    @property
    def lease_count(self) -> int:
        return self._leases

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        if self._can_close:
            self._open.clear()

    def open_for_good(self) -> None:
        """Open and ignore every later `close`."""
        self._can_close = False
        self._open.set()

    async def wait_open(self, timeout: float) -> bool:
        """Wait until the gate is open; return False if it stays closed for `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                while not self._open.is_set():  # the gate may close again before this task runs
                    await self._open.wait()
        except TimeoutError:
            return False
        return True

    async def wait_submitted(self) -> None:
        """Return when no request with a lease is still on its way to the engine."""
        await self._none_submitting.wait()

    async def wait_empty(self) -> None:
        await self._no_leases.wait()

    @contextmanager
    def lease(self, version: int, cache_salt: str) -> Iterator[RequestLease]:
        """Hold a lease. Call it right after `wait_open`, because the gate may close during an await in between."""
        lease = RequestLease(self, version, cache_salt)
        self.count(leases=1, submitting=1)
        try:
            yield lease
        finally:
            lease.mark_in_flight()
            self.count(leases=-1)

    def count(self, *, leases: int = 0, submitting: int = 0) -> None:
        """Add to the counts and wake the tasks that wait for zero."""
        self._leases += leases
        self._submitting += submitting
        for number, event in ((self._leases, self._no_leases), (self._submitting, self._none_submitting)):
            if number:
                event.clear()
            else:
                event.set()


class SleepState:
    """The freed memory of one engine; none at first. vLLM frees all at once, and allocates it whole or in parts."""

    def __init__(self) -> None:
        self._asleep: tuple[str, ...] = ()
        self._level = 0
        self._confirmed = True
        self.lost_weights = False  # a sleep of level 2 dropped the weights, and no update has replaced them

    @property
    def awake(self) -> bool:
        return not self._asleep

    @property
    def weights_asleep(self) -> bool:
        return _WEIGHTS in self._asleep

    def check(self, level: int, description: EngineDescription) -> bool:
        """Return whether the engine must be asked to sleep; False if it confirmed a sleep of this level.

        Raises InvalidInput: no such level. Raises WrongState: the engine cannot sleep, or sleeps at another level.
        """
        if level not in _LEVELS:
            raise InvalidInput(f"level is {level}; it must be 1 (weights wait in the host's memory) or 2 (dropped)")
        if description.device_type == "cpu":
            raise WrongState(
                "this engine runs on CPU and has no GPU memory to free; call SleepEngine only on GPU engines",
                reason=CANNOT_SLEEP,
            )
        if not description.sleep_mode:
            raise WrongState("this engine cannot sleep; start it with rollout.sleep_mode = true", reason=CANNOT_SLEEP)
        if self._asleep == _TAGS and self._level == level:
            return not self._confirmed
        if self._asleep:
            raise WrongState(
                f"the engine sleeps at level {self._level} ({', '.join(self._asleep)}); wake it before it can sleep "
                f"at level {level}"
            )
        return True

    def fell_asleep(self, level: int, *, confirmed: bool) -> None:
        """Record a sleep. An unconfirmed sleep may have happened or may still happen."""
        self._asleep, self._level, self._confirmed = _TAGS, level, confirmed
        self.lost_weights |= level > 1

    def to_wake(self, tags: Sequence[str]) -> tuple[str, ...]:
        """Return those of `tags` that are asleep; without tags, all that are. Raises InvalidInput: no such tag."""
        unknown = [tag for tag in tags if tag not in _TAGS]
        if unknown:
            raise InvalidInput(f"tag {unknown[0][:40]!r} is unknown; tags are {', '.join(_TAGS)}, or none for all")
        return tuple(tag for tag in self._asleep if not tags or tag in tags)

    def woke(self, tag: str) -> None:
        self._asleep = tuple(other for other in self._asleep if other != tag)


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
