"""Whether the engine may sample, and how its weights change. All of an engine's states are here.

             begin            receive             commit
    READY ----------> PAUSED ---------> RECEIVED ----------> READY with the new version
      ^                 |  \\ error         |
      |                 |   `--> FAILED    |
      |   clean         v          v       v
      '-------------- abort <--------------'        (also on its own when an update takes too long)
                        | dirty
                        v
                      DIRTY: serves nothing; an update leads out of it

Sampling holds a lease (`serving`) from before its samples go to the engine until the engine
is done with them. An update closes the door, waits until nobody holds a lease or interrupts
the samples, and opens the door at its end; who comes meanwhile waits in front of it. So
nothing is scheduled between begin and commit except a probe, and no answer spans two
versions.

Control calls are done one after the other, each to its end, even when its caller has gone:
the engine's worker cannot be stopped half-way, it has the call's deadline itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from enum import Enum
from typing import Any, Final, TypeVar

from fourfold.errors import DeadlinePassed, FourfoldError, InvalidInput, StaleEpoch, Unavailable, WrongState
from fourfold_rollout.engine import Engine, EpochTerms

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# What arrives in the engine while it is being interrupted is interrupted again after this time.
_INTERRUPT_SECONDS: Final = 0.05
# The coordinator's own limit is `weights.timeout_seconds`; it aborts first when it lives.
_WATCHDOG_EXTRA_SECONDS: Final = 5.0
_RETRY_SECONDS: Final = 1.0


class Phase(Enum):
    """Where an update is."""

    READY = "ready"
    PAUSED = "paused"
    RECEIVED = "received"
    FAILED = "failed"


class EngineWeights:
    """The weights of one engine. Belongs to one event loop."""

    def __init__(self, engine: Engine, *, update_timeout: float) -> None:
        """Serve version 0, the weights of the model folder.

        Args:
            engine: runs, and nothing else submits to it.
            update_timeout: seconds that an update may take from begin to commit.
        """
        self._engine = engine
        self._update_timeout = update_timeout
        self._phase = Phase.READY
        self._dirty = False
        self._version = 0
        self._target = 0
        self._digest = b""
        self._epoch: int | None = None
        self._last_epoch = -1
        self._leases = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._door = asyncio.Event()
        self._door.set()
        self._turn = asyncio.Lock()
        self._watchdog: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def policy_version(self) -> int:
        """Version that new samples get, or that was served last."""
        return self._version

    @property
    def updating(self) -> bool:
        """Whether an update is open."""
        return self._phase is not Phase.READY

    @property
    def dirty(self) -> bool:
        """Whether the weights may be mixed, and no update is under way."""
        return self._dirty and not self.updating

    @asynccontextmanager
    async def serving(self, timeout: float) -> AsyncIterator[int]:
        """Hold a lease on the served weights; gives their version. Waits while an update is open.

        Args:
            timeout: seconds to wait at most; no longer than an update may take in any case.

        Raises:
            Unavailable: the weights are dirty, or the update did not end in time.
        """
        await self._wait_at_door(min(timeout, self._update_timeout))
        self._leases += 1
        self._idle.clear()
        try:
            yield self._version
        finally:
            self._leases -= 1
            if not self._leases:
                self._idle.set()

    async def open(self, terms: EpochTerms, *, timeout: float) -> tuple[int, int]:
        """Join an epoch, replacing the open one and giving up its update; returns (direct, reload) tensor counts.

        Raises:
            StaleEpoch: not above the last epoch.
            InvalidInput, WrongState: it does not fit the model; the open epoch stays open.
            DeadlinePassed, Unavailable: the senders cannot be met; no epoch is open.
        """

        async def step(left: float) -> tuple[int, int]:
            epoch = terms.epoch
            if epoch <= self._last_epoch:
                raise StaleEpoch(f"epoch {epoch} is not above the last one, {self._last_epoch}; use a higher one")
            if self.updating:
                await self._give_up("a new epoch is opened")
            try:
                counts = await self._engine.open_weights(terms, timeout=left)
            except (InvalidInput, WrongState, StaleEpoch):
                raise
            except FourfoldError:
                self._epoch, self._last_epoch = None, epoch
                raise
            self._epoch, self._last_epoch = epoch, epoch
            return counts

        return await self._in_turn(step, timeout)

    async def begin(self, *, epoch: int, policy_version: int, abort_running: bool, timeout: float) -> None:
        """Close the door and empty the engine. Again, with the same version: does nothing.

        Raises:
            StaleEpoch: not the open epoch.
            WrongState: the version is not above the served one, or another update is open.
            DeadlinePassed: samples still run; they go on, and the door is open again.
        """

        async def step(left: float) -> None:
            self._check_epoch(epoch)
            if policy_version < 0:
                raise InvalidInput(f"policy_version is {policy_version}; it must be at least 0")
            if self._phase in (Phase.PAUSED, Phase.RECEIVED) and policy_version == self._target:
                return
            if self.updating:
                raise WrongState(
                    f"an update to version {self._target} is {self._phase.value}; abort it before version "
                    f"{policy_version} can begin"
                )
            if policy_version <= self._version and not self._dirty:
                raise WrongState(
                    f"policy_version {policy_version} is not above the served version {self._version}; versions never "
                    f"go back: publish under a higher one"
                )
            self._phase, self._target = Phase.PAUSED, policy_version
            self._door.clear()
            emptied = False
            try:
                await self._empty(abort_running, left)
                emptied = True
            finally:
                if not emptied:
                    self._end_update(dirty=self._dirty)
            loop = asyncio.get_running_loop()
            self._watchdog = loop.call_later(
                self._update_timeout + _WATCHDOG_EXTRA_SECONDS, self._start_watchdog_abort, epoch
            )

        await self._in_turn(step, timeout)

    async def receive(self, *, epoch: int, policy_version: int, timeout: float) -> bytes:
        """Load a version; return its digest (32 bytes). Again after a success: the same digest.

        Raises:
            StaleEpoch: not the open epoch, or its sender gave up.
            WrongState: no such update has begun, or it has failed already.
            DeadlinePassed, Unavailable: the transfer failed; abort tells what is left.
        """

        async def step(left: float) -> bytes:
            self._check_update(epoch, policy_version)
            if self._phase is Phase.RECEIVED:
                return self._digest
            self._phase = Phase.FAILED  # until it has succeeded
            self._digest = await self._engine.receive_weights(epoch=epoch, policy_version=policy_version, timeout=left)
            self._phase = Phase.RECEIVED
            return self._digest

        return await self._in_turn(step, timeout)

    async def commit(self, *, epoch: int, policy_version: int, timeout: float) -> None:
        """Serve the received version and open the door. Again: does nothing.

        Raises:
            StaleEpoch: not the open epoch.
            WrongState: that version was not received.
        """

        async def step(_left: float) -> None:
            self._check_epoch(epoch)
            if not self.updating and not self._dirty and policy_version == self._version:
                return
            self._check_update(epoch, policy_version)
            if self._phase is not Phase.RECEIVED:
                raise WrongState(f"version {policy_version} has begun but is not received; call ReceiveWeights first")
            await self._engine.commit_weights(epoch=epoch, policy_version=policy_version)
            self._version = policy_version
            self._end_update(dirty=False)
            _log.info("policy version %d is served", policy_version)

        await self._in_turn(step, timeout)

    async def abort(self, *, epoch: int, timeout: float) -> bool:
        """Give up the epoch and its update; return whether the engine is clean. Idempotent.

        It waits for a transfer that is under way: that has a deadline of its own.

        Raises:
            StaleEpoch: another epoch is open.
        """

        async def step(_left: float) -> bool:
            if self._epoch is not None:
                self._check_epoch(epoch)
                await self._give_up("aborted")
            elif epoch > self._last_epoch:
                raise StaleEpoch(f"epoch {epoch} was never opened; the last one is {self._last_epoch}")
            return not self._dirty

        return await self._in_turn(step, timeout)

    async def probe(self, token_ids: Sequence[int], *, timeout: float) -> list[float]:
        """Return the log-probabilities of the given tokens under the loaded weights, committed or not.

        Raises:
            WrongState: the update has failed; its weights are not whole.
            Unavailable: the weights are dirty.
            DeadlinePassed: no answer in time.
        """

        async def step(left: float) -> list[float]:
            if self._phase is Phase.FAILED:
                raise WrongState(f"the update to version {self._target} has failed; abort it before a probe")
            if self._dirty and self._phase is not Phase.RECEIVED:
                raise self._dirty_error()
            try:
                async with asyncio.timeout(left):
                    return await self._engine.prompt_logprobs(token_ids)
            except TimeoutError:
                raise DeadlinePassed(f"the probe of {len(token_ids)} tokens took longer than {left:.1f} s") from None

        return await self._in_turn(step, timeout)

    async def close(self) -> None:
        """Stop the watchdog and wait for nothing."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        for task in tuple(self._tasks):
            task.cancel()

    async def _wait_at_door(self, timeout: float) -> None:
        if self.dirty:
            raise self._dirty_error()
        try:
            async with asyncio.timeout(timeout):
                while not self._door.is_set():
                    await self._door.wait()
        except TimeoutError:
            raise Unavailable(
                f"the weights are being updated to version {self._target}, for {timeout:.1f} s and more; try again",
                reason="UPDATING_WEIGHTS",
                retry_after=_RETRY_SECONDS,
            ) from None
        if self.dirty:
            raise self._dirty_error()

    async def _empty(self, abort_running: bool, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                while self._leases:
                    if abort_running:
                        await self._engine.interrupt()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_INTERRUPT_SECONDS if abort_running else None):
                            await self._idle.wait()
                await self._engine.settle()
        except TimeoutError:
            raise DeadlinePassed(
                f"{self._engine.running_count} samples still ran after {timeout:.1f} s; they go on with version "
                f'{self._version}. Give it more time, or set weights.pause = "abort"'
            ) from None

    async def _give_up(self, why: str) -> None:
        """Close the epoch in the workers and settle what is left."""
        epoch, self._epoch = self._epoch, None
        clean, known = False, False
        try:
            if epoch is not None:
                clean = await self._engine.abort_weights(epoch=epoch)
                known = True
        finally:
            if self.updating:
                dirty = self._dirty or not clean or self._phase is Phase.RECEIVED
                _log.warning("update to version %d given up: %s", self._target, why, extra={"dirty": dirty})
                self._end_update(dirty=dirty)
            elif known:
                self._dirty |= not clean

    def _end_update(self, *, dirty: bool) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        self._phase, self._dirty, self._digest = Phase.READY, dirty, b""
        self._door.set()

    def _start_watchdog_abort(self, epoch: int) -> None:
        async def step(_left: float) -> None:
            if self.updating and self._epoch == epoch:
                await self._give_up(f"no commit {self._update_timeout:.0f} s after its begin; is the coordinator dead?")

        self._watchdog = None
        self._spawn(self._take_turn(step, self._update_timeout))

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise StaleEpoch(
                f"epoch {epoch} is not open; the open one is {'none' if self._epoch is None else self._epoch}"
            )

    def _check_update(self, epoch: int, policy_version: int) -> None:
        self._check_epoch(epoch)
        if not self.updating:
            raise WrongState(f"no update to version {policy_version} has begun; call BeginWeights first")
        if policy_version != self._target:
            raise WrongState(f"the update that has begun is to version {self._target}, not {policy_version}")
        if self._phase is Phase.FAILED:
            raise WrongState(f"the update to version {policy_version} has failed; abort it and open a new epoch")

    def _dirty_error(self) -> Unavailable:
        return Unavailable(
            "the engine holds weights of an update that failed and serves nothing until one succeeds; "
            "use another replica, or publish the weights again",
            reason="WEIGHTS_DIRTY",
            retry_after=_RETRY_SECONDS,
        )

    async def _in_turn(self, step: Callable[[float], Awaitable[_T]], timeout: float) -> _T:
        """Run one step when those before it are done; it goes on to its end when the caller is cancelled."""
        return await asyncio.shield(self._spawn(self._take_turn(step, timeout)))

    async def _take_turn(self, step: Callable[[float], Awaitable[_T]], timeout: float) -> _T:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        try:
            async with asyncio.timeout(timeout):
                await self._turn.acquire()
        except TimeoutError:
            raise DeadlinePassed(
                f"another weight call was not done after {timeout:.1f} s; it ends at its own deadline: try again"
            ) from None
        try:
            return await step(deadline - loop.time())
        finally:
            self._turn.release()

    def _spawn(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, FourfoldError):
            _log.error("a weight call failed", exc_info=error)
