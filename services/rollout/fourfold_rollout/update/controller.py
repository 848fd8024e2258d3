"""Runs weight updates of one engine: each control call checks the phase, does its work and enters the next phase.

    phase      cause                                        next phase
    READY      begin                                        PAUSING
    PAUSING    samples stopped                              PAUSED
    PAUSING    samples still run at the deadline            READY
    PAUSED     receive                                      RECEIVING
    RECEIVING  weights loaded                               RECEIVED
    RECEIVING  error, deadline or abort                     FAILED
    RECEIVED   commit: sampling goes on                     COMMITTED
    COMMITTED  release, part of a commit without hold       READY
    PAUSED     abort, watchdog or a new epoch               ENDING
    RECEIVED   abort, watchdog or a new epoch               ENDING
    COMMITTED  abort, watchdog or a new epoch               ENDING
    FAILED     abort, watchdog or a new epoch               ENDING
    ENDING     workers left the epoch                       READY

Two more states are independent of the phase: `dirty` (the weights may be mixed; nothing is served until an update
succeeds) and sleep (the gate stays closed; weights can be updated once their memory is allocated again). An update
stops sampling as `pause/` describes.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from functools import partial
from typing import Any, Final, TypeVar, cast

from fourfold.errors import DeadlinePassed, FourfoldError, StaleEpoch, WrongState
from fourfold_rollout.engine import EpochTerms, FeedTerms, OpenReport, RolloutEngine
from fourfold_rollout.pause.controller import PauseMode, RequestLease, SamplingController
from fourfold_rollout.pause.hold import TokenHold
from fourfold_rollout.update.state import UpdatePhase, WeightEpochs, WeightUpdate

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

Job = Callable[[float], Awaitable[_T]]  # gets the seconds left until the deadline of its call


class SerialExecutor:
    """Runs jobs in the order of their calls. Belongs to one event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, job: Job[_T], timeout: float) -> _T:
        """Run one job after those before it. The job runs to its end even if the caller is cancelled.

        Raises DeadlinePassed: an earlier job was still running after `timeout` seconds.
        """
        return await asyncio.shield(self._spawn(self._run_in_order(job, timeout), awaited=True))

    def start(self, job: Job[None], timeout: float) -> None:
        """Queue one job and return at once; its error is logged."""
        self._spawn(self._run_in_order(job, timeout), awaited=False)

    def cancel(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()

    async def _run_in_order(self, job: Job[_T], timeout: float) -> _T:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        try:
            async with asyncio.timeout(timeout):
                await self._lock.acquire()
        except TimeoutError:
            raise DeadlinePassed(
                f"another weight call was not done after {timeout:.1f} s; it ends at its own deadline: try again"
            ) from None
        try:
            return await job(deadline - loop.time())
        finally:
            self._lock.release()

    def _spawn(self, work: Coroutine[Any, Any, _T], *, awaited: bool) -> asyncio.Task[_T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._forget, awaited=awaited))
        return task

    def _forget(self, task: asyncio.Task[Any], *, awaited: bool) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, FourfoldError):
            if not awaited:  # otherwise the caller gets the error
                _log.error("Internal weight-update task failed: %s", error)
        elif error is not None:
            _log.error("Weight-update task failed", exc_info=error)


# A live coordinator aborts first: its own limit is `weights.timeout_seconds`.
_WATCHDOG_EXTRA_SECONDS: Final = 5.0


_Method = TypeVar("_Method", bound=Callable[..., Awaitable[Any]])


def _in_order(method: _Method) -> _Method:
    """Queue a method behind earlier calls. It is not cancelled with its caller.

    Its `timeout` is what is left when it begins.
    """

    @functools.wraps(method)
    async def call(self: WeightController, *args: Any, timeout: float, **kwargs: Any) -> Any:
        return await self._calls.run(lambda left: method(self, *args, timeout=left, **kwargs), timeout)

    return cast(_Method, call)


class WeightController:
    """The weights of one engine. Belongs to one event loop."""

    def __init__(self, engine: RolloutEngine, *, update_timeout: float) -> None:
        """Serve version 0, the weights of the model folder. The engine must have no other user.

        `update_timeout`: seconds that an update may take from begin to commit or, with hold, to release.
        """
        self._engine = engine
        self._update_timeout = update_timeout
        self._update = WeightUpdate()
        self._sampling = SamplingController(engine)
        self._calls = SerialExecutor()
        self._epochs = WeightEpochs(engine)
        self._watchdog: asyncio.TimerHandle | None = None

    @property
    def policy_version(self) -> int:
        """The version that new samples get, or that was served last."""
        return self._sampling.token_hold.version

    @property
    def token_hold(self) -> TokenHold:
        return self._sampling.token_hold

    @property
    def updating(self) -> bool:
        """Return true from begin to commit or, with hold, to release."""
        return self._update.is_open

    @property
    def joining(self) -> bool:
        """Return true while the engine joins an epoch; its running samples do not advance meanwhile."""
        return self._epochs.joining is not None

    @property
    def phase(self) -> tuple[str, float]:
        """The phase of the open update as text, and its age in seconds; empty without an open update."""
        return self._update.phase.value, self._update.seconds

    @property
    def phase_seconds(self) -> dict[UpdatePhase, float]:
        """The seconds in each phase since the start; READY is the time without an open update."""
        return self._update.phase_seconds.totals()

    @property
    def dirty(self) -> bool:
        """Return true if the weights may be mixed or are lost, and no update is in progress."""
        return self._sampling.dirty and not self.updating

    @property
    def sleeping(self) -> bool:
        """Return true if some of the engine's memory is freed."""
        return not self._sampling.sleep_state.awake

    def serving(self, timeout: float) -> AbstractAsyncContextManager[RequestLease]:
        """Hold a lease on the served weights; waits at most for the longest duration of an update."""
        return self._sampling.serving(min(timeout, self._update_timeout))

    def is_current(self, lease: RequestLease) -> bool:
        """Return true if no weights were committed since the lease began."""
        return self._sampling.is_current(lease)

    def refuse(self, error: FourfoldError) -> None:
        self._sampling.refuse(error)

    async def open(self, terms: EpochTerms, *, timeout: float) -> OpenReport:
        """Join an epoch in place of the open one, and give up the open update.

        Raises:
            StaleEpoch: not above the last epoch, or aborted meanwhile.
            InvalidInput, WrongState: the manifest does not fit the model; the open epoch stays open.
            DeadlinePassed, Unavailable: a sender is unreachable; no epoch is open.
        """
        self._epochs.check_new(terms.epoch)
        if self.updating:
            self._epochs.stop(self._epochs.open)
        return await self._open(terms, timeout=timeout)

    @_in_order
    async def _open(self, terms: EpochTerms, *, timeout: float) -> OpenReport:
        self._epochs.check_new(terms.epoch)  # check again: another epoch may have been opened meanwhile
        if self.updating:
            await self._give_up("a new epoch was opened")
        return await self._epochs.join(terms, timeout)

    @_in_order
    async def begin(self, *, epoch: int, policy_version: int, mode: PauseMode, timeout: float) -> None:
        """Close the gate and stop sampling. A repetition with the same version does nothing.

        Raises:
            WrongState: the version is not above the served one, another update is open, or the weights sleep.
            DeadlinePassed: samples still run; they continue, and the gate is open again.
        """
        self._epochs.check(epoch)
        update = self._update
        if update.phase in (UpdatePhase.PAUSED, UpdatePhase.RECEIVED) and policy_version == update.version:
            return
        update.check_may_begin(policy_version, served=None if self._sampling.dirty else self.policy_version)
        if self._sampling.sleep_state.weights_asleep:
            raise WrongState('the engine sleeps and has no memory for weights; wake "weights" first')
        update.version = policy_version
        update.enter(UpdatePhase.PAUSING)
        self._sampling.close_gate(f"the weights are being updated to version {policy_version}")
        with ExitStack() as on_error:
            on_error.callback(lambda: self._end_update(dirty=self._sampling.dirty))
            await self._sampling.stop(PauseMode.ABORT if self._sampling.dirty else mode, timeout)
            on_error.pop_all()
        self.token_hold.end_drop()
        update.enter(UpdatePhase.PAUSED)
        self._start_watchdog(epoch, self._update_timeout + _WATCHDOG_EXTRA_SECONDS)

    @_in_order
    async def receive(self, *, epoch: int, policy_version: int, skip_sums: bool = False, timeout: float) -> bytes:
        """Load a version; return its digest (32 bytes). A repetition after a success returns the same digest.

        Raises:
            StaleEpoch: not the open epoch, its sender gave up, or it was aborted meanwhile.
            WrongState: no such update has begun, or it has failed already.
            DeadlinePassed, Unavailable: the transfer failed; an abort returns the state of the weights.
        """
        self._check_update(epoch, policy_version)
        update = self._update
        if update.phase is UpdatePhase.COMMITTED:
            raise WrongState(f"version {policy_version} is committed already; release or abort it")
        if update.phase is UpdatePhase.RECEIVED:
            return update.digest
        update.enter(UpdatePhase.RECEIVING)
        end = UpdatePhase.FAILED
        try:
            update.digest = await self._engine.receive_weights(
                epoch=epoch, policy_version=policy_version, skip_sums=skip_sums, timeout=timeout
            )
            end = UpdatePhase.RECEIVED
        finally:
            update.enter(end)
        return update.digest

    @_in_order
    async def commit(self, *, epoch: int, policy_version: int, hold: bool = False, timeout: float) -> float:
        """Sample with the received version; with `hold`, keep its tokens back until `release`.

        The workers learn of the commit when the tokens may leave: with `hold`, only at the release (`_serve`).
        Returns the seconds for which sampling stopped; 0 in a repetition, which does nothing.
        """
        if self._is_served(epoch, policy_version):
            return 0.0
        self._check_update(epoch, policy_version)
        update, paused = self._update, 0.0
        update.check_may_commit(held=self.token_hold.holding, hold=hold)
        if update.phase is UpdatePhase.RECEIVED:
            await self._sampling.forget_old_weights()  # before the commit: if this fails, the version is not committed
            update.served_before = self.policy_version
            self._sampling.commit(policy_version)
            if hold:
                self.token_hold.hold()
            update.enter(UpdatePhase.COMMITTED)
            # Resume now: with hold, the workers learn of the commit only at the release (`_serve`).
            await self._sampling.resume()
            paused = update.pause_seconds
        if not hold:
            await self._serve(epoch)
        return paused

    @_in_order
    async def release(self, *, epoch: int, policy_version: int, timeout: float) -> None:
        """Deliver the tokens that a commit with hold kept back. A repetition does nothing."""
        if self._is_served(epoch, policy_version):
            return
        self._check_update(epoch, policy_version)
        if self._update.phase is not UpdatePhase.COMMITTED:
            raise WrongState(f"version {policy_version} is not committed; call CommitWeights first")
        await self._serve(epoch)

    async def abort(self, *, epoch: int, timeout: float) -> bool:
        """Give up the epoch and its update; return whether the weights are clean. Idempotent."""
        # The workers cannot be called while they receive. Stop the transfer first, or the abort waits for its deadline.
        self._epochs.stop(epoch)
        return await self._abort(epoch, timeout=timeout)

    @_in_order
    async def _abort(self, epoch: int, *, timeout: float) -> bool:
        if self._epochs.open is not None:
            self._epochs.check(epoch)
            await self._give_up("aborted")
        elif epoch > self._epochs.last:
            raise StaleEpoch(f"epoch {epoch} was never opened; the last one is {self._epochs.last}")
        return not self._sampling.dirty

    @_in_order
    async def probe(self, token_ids: Sequence[int], *, timeout: float) -> list[float]:
        """Return the log-probabilities of the given tokens under the loaded weights, committed or not.

        Raises WrongState or Unavailable: see `_check_probe`. Raises DeadlinePassed: no reply in time.
        """
        self._check_probe()
        try:
            async with asyncio.timeout(timeout):
                return await self._engine.prompt_logprobs(token_ids)
        except TimeoutError:
            raise DeadlinePassed(f"the probe of {len(token_ids)} tokens took longer than {timeout:.1f} s") from None

    @_in_order
    async def sums(self, *, epoch: int, timeout: float) -> bytes:
        self._epochs.check(epoch)
        return await self._engine.weight_sums(epoch=epoch)

    @_in_order
    async def feed(self, terms: FeedTerms, *, timeout: float) -> list[bytes]:
        """Begin to send the served weights to late engines, while this one samples; return the offers for them.

        Raises WrongState: an update is open, or the weights are not those of `terms`, whole and as they arrived.
        """
        if self.updating or self._sampling.dirty or terms.policy_version != self.policy_version:
            state = "an update is open" if self.updating else f"it serves version {self.policy_version}"
            raise WrongState(f"this engine cannot send version {terms.policy_version}: {state}")
        return await self._engine.feed_weights(terms, timeout=timeout)

    @_in_order
    async def sleep(self, level: int, *, timeout: float) -> None:
        """Make new requests wait and free memory; see `SamplingController.sleep`. Not during an update."""
        if self.updating:
            raise WrongState(f"an update to version {self._update.version} is open; end it before the sleep")
        await self._sampling.sleep(level, timeout)

    @_in_order
    async def wake(self, tags: Sequence[str], *, timeout: float) -> None:
        """Allocate all memory or the parts in `tags`; admit requests when all is there."""
        await self._sampling.wake(tags, timeout)
        if self._update.phase in (UpdatePhase.READY, UpdatePhase.COMMITTED):
            self._sampling.open_gate()

    async def close(self) -> None:
        """Stop the watchdog and cancel all calls, without waiting."""
        self._stop_watchdog()
        self._calls.cancel()

    async def _serve(self, epoch: int) -> None:
        """End a committed update with success and deliver the held tokens."""
        version = self._update.version
        await self._engine.mark_served(epoch=epoch, policy_version=version)
        self._sampling.sleep_state.lost_weights = False
        self.token_hold.release()
        self._end_update(dirty=False)
        _log.info("Policy version served", extra={"version": version})

    async def _give_up(self, why: str) -> None:
        """Close the epoch in the workers, then end the update and settle the weights and the samples."""
        clean: bool | None = None  # not known
        phase = self._update.phase
        if phase is UpdatePhase.COMMITTED:
            self.token_hold.drop()
        if self.updating:
            self._update.enter(UpdatePhase.ENDING)
        try:
            clean = await self._epochs.leave()
        finally:
            if self.updating or clean is False:
                loaded = phase in (UpdatePhase.RECEIVED, UpdatePhase.COMMITTED)
                dirty = self._sampling.dirty or not clean or loaded
                fields = {"version": self._update.version, "dirty": dirty}
                _log.warning("Weight update given up: %s", why, extra=fields)
                self._sampling.close_gate("an update is being given up")
                try:
                    if dirty:
                        await self._end_samples()
                    else:
                        await self._sampling.resume()
                finally:
                    self._end_update(dirty=dirty)

    async def _end_samples(self) -> None:
        """End the samples that run on weights which must not be used."""
        await self._sampling.end_all()
        if self.token_hold.holding:
            self.token_hold.end_drop()
            self.token_hold.version = self._update.served_before

    def _end_update(self, *, dirty: bool) -> None:
        self._stop_watchdog()
        if self.updating:
            self._update.enter(UpdatePhase.READY)
        self._update.digest, self._sampling.dirty = b"", dirty
        self._sampling.open_gate()

    def _start_watchdog(self, epoch: int, seconds: float) -> None:
        """Give up the update of `epoch` after `seconds`, and again after each further `seconds` until it has ended."""

        async def job(_left: float) -> None:
            if self.updating and self._epochs.open == epoch:
                what = "release" if self._update.phase is UpdatePhase.COMMITTED else "commit"
                await self._give_up(f"no {what} {self._update_timeout:.0f} s after its begin; is the coordinator dead?")

        def expire() -> None:
            # Repeated, because an attempt fails while a hanging worker blocks the queue.
            self._start_watchdog(epoch, seconds)
            if self.updating and self._epochs.open == epoch:
                self._epochs.stop(epoch)
                self._calls.start(job, self._update_timeout)

        self._stop_watchdog()
        self._watchdog = asyncio.get_running_loop().call_later(seconds, expire)

    def _stop_watchdog(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None

    def _is_served(self, epoch: int, version: int) -> bool:
        self._epochs.check(epoch)
        return not self.updating and not self._sampling.dirty and version == self.policy_version

    def _check_update(self, epoch: int, policy_version: int) -> None:
        self._epochs.check(epoch)
        self._update.check_version(policy_version)

    def _check_probe(self) -> None:
        sampling, phase = self._sampling, self._update.phase
        if phase is UpdatePhase.FAILED:
            raise WrongState(f"the update to version {self._update.version} has failed; abort it before a probe")
        if self.sleeping:
            raise WrongState("the engine sleeps; wake it before a probe")
        if sampling.samples_paused:  # vLLM resumes only the whole engine, not one request
            raise WrongState("running samples are paused in the engine; commit with hold before a probe")
        if sampling.dirty and phase not in (UpdatePhase.RECEIVED, UpdatePhase.COMMITTED):
            raise sampling.dirty_error()
