"""Whether the engine may sample, and how its weights change. All of an engine's states are here.

             begin            receive             commit                     (release)
    READY ----------> PAUSED ---------> RECEIVED ----------> COMMITTED ----------------> READY, new version
      ^                 |  \\ error         |                     |
      |                 |   `--> FAILED    |                     |
      |   clean         v          v       v                     v
      '-------------- abort <--------------'---------------------'   (also on its own when it takes too long)
                        | dirty
                        v
                      DIRTY: serves nothing; an update leads out of it

Sampling holds a lease (`serving`) from before its samples go to the engine until the engine
is done with them. An update closes the door (`door.py`), so that who comes now waits in front
of it, and ends what runs, waits for it, or stops it where it stands (`PauseMode`). The commit
opens the door and lets what stands go on. With a hold, tokens of the new version wait in the
gate (`gate.py`) until the release, or are dropped by an abort: weights that nobody may see
have sampled them. Without one, the release is part of the commit.

Control calls are done one after the other (`turns.py`), each to its end, even when its caller
has gone. The engine's worker cannot be reached while it receives; its deadline is the call's,
and an abort ends it through `Engine.stop_transfers` before its turn comes.

An engine that sleeps (`sleep.py`) keeps the door closed; its weights can be updated once they have memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final

from fourfold.errors import DeadlinePassed, FourfoldError, StaleEpoch, WrongState
from fourfold_rollout.engine import EpochTerms, OpenReport, RolloutEngine
from fourfold_rollout.pause.controller import SamplingController
from fourfold_rollout.pause.hold import TokenHold
from fourfold_rollout.pause.in_flight import RequestLease
from fourfold_rollout.pause.phases import PauseMode, UpdatePhase, WeightUpdate
from fourfold_rollout.update.epochs import WeightEpochs
from fourfold_rollout.update.serial_executor import SerialExecutor
from fourfold_rollout.update.watchdog import Watchdog

_log = logging.getLogger(__name__)

# The coordinator's own limit is `weights.timeout_seconds`; it aborts first when it lives.
_WATCHDOG_EXTRA_SECONDS: Final = 5.0


class WeightController:
    """The weights of one engine. Belongs to one event loop."""

    def __init__(self, engine: RolloutEngine, *, update_timeout: float) -> None:
        """Serve version 0, the weights of the model folder.

        Args:
            engine: runs, and nothing else submits to it.
            update_timeout: seconds that an update may take from begin to commit or, held, to release.
        """
        self._engine = engine
        self._update_timeout = update_timeout
        self._update = WeightUpdate()
        self._sampling = SamplingController(engine)
        self._turns = SerialExecutor()
        self._epochs = WeightEpochs(engine)
        self._watchdog = Watchdog()

    @property
    def policy_version(self) -> int:
        """Version that new samples get, or that was served last."""
        return self._sampling.token_hold.version

    @property
    def token_hold(self) -> TokenHold:
        """What every token passes on its way out."""
        return self._sampling.token_hold

    @property
    def updating(self) -> bool:
        """Whether an update is open, from begin to commit or, held, to release."""
        return self._update.is_open

    @property
    def joining(self) -> bool:
        """Whether the engine joins an epoch; what runs in it stands still until it has."""
        return self._epochs.joining is not None

    @property
    def phase(self) -> tuple[str, float]:
        """What the open update is doing, for people, and for how many seconds; empty when none is."""
        return self._update.phase.value, self._update.seconds

    @property
    def dirty(self) -> bool:
        """Whether the weights may be mixed or are lost, and no update is under way."""
        return self._sampling.dirty and not self.updating

    @property
    def sleeping(self) -> bool:
        """Whether some of the engine's memory is given up."""
        return not self._sampling.sleep_state.awake

    def serving(self, timeout: float) -> AbstractAsyncContextManager[RequestLease]:
        """Hold a lease on the served weights. Waits while an update is open or the engine sleeps.

        Args:
            timeout: seconds to wait at most; no longer than an update may take in any case.

        Raises:
            Unavailable: the weights are dirty, or the update or the sleep did not end in time.
        """
        return self._sampling.serving(min(timeout, self._update_timeout))

    def refuse(self, error: FourfoldError) -> None:
        """Raise an error for all who wait for a lease, and for all who come; for good."""
        self._sampling.refuse(error)

    async def open(self, terms: EpochTerms, *, timeout: float) -> OpenReport:
        """Join an epoch, replacing the open one and giving up its update.

        Raises:
            StaleEpoch: not above the last epoch, or aborted meanwhile.
            InvalidInput, WrongState: it does not fit the model; the open epoch stays open.
            DeadlinePassed, Unavailable: the senders cannot be met; no epoch is open.
        """

        async def step(left: float) -> OpenReport:
            self._epochs.check_new(terms.epoch)
            if self.updating:
                await self._give_up("a new epoch is opened")
            return await self._epochs.join(terms, left)

        self._epochs.check_new(terms.epoch)
        if self.updating:
            self._epochs.stop(self._epochs.open)
        return await self._turns.run(step, timeout)

    async def begin(self, *, epoch: int, policy_version: int, mode: PauseMode, timeout: float) -> None:
        """Close the door and stop sampling. Again, with the same version: does nothing.

        Raises:
            StaleEpoch: not the open epoch.
            WrongState: the version is not above the served one, another update is open, or the weights sleep.
            DeadlinePassed: samples still run; they go on, and the door is open again.
        """

        async def step(left: float) -> None:
            self._epochs.check(epoch)
            update = self._update
            if update.phase in (UpdatePhase.PAUSED, UpdatePhase.RECEIVED) and policy_version == update.version:
                return
            update.check_may_begin(policy_version, served=None if self._sampling.dirty else self.policy_version)
            if self._sampling.sleep_state.weights_asleep:
                raise WrongState('the engine sleeps and has no memory for weights; wake "weights" first')
            update.version = policy_version
            update.enter(UpdatePhase.PAUSING)
            self._sampling.close_door(f"the weights are being updated to version {policy_version}")
            paused = False
            try:
                await self._sampling.stop(PauseMode.ABORT if self._sampling.dirty else mode, left)
                paused = True
            finally:
                if not paused:
                    self._end_update(dirty=self._sampling.dirty)
            self.token_hold.end()
            update.enter(UpdatePhase.PAUSED)
            self._watchdog.start(self._update_timeout + _WATCHDOG_EXTRA_SECONDS, lambda: self._on_watchdog(epoch))

        await self._turns.run(step, timeout)

    async def receive(self, *, epoch: int, policy_version: int, skip_sums: bool = False, timeout: float) -> bytes:
        """Load a version; return its digest (32 bytes). Again after a success: the same digest.

        Raises:
            StaleEpoch: not the open epoch, its sender gave up, or it was aborted meanwhile.
            WrongState: no such update has begun, or it has failed already.
            DeadlinePassed, Unavailable: the transfer failed; abort tells what is left.
        """

        async def step(left: float) -> bytes:
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
                    epoch=epoch, policy_version=policy_version, skip_sums=skip_sums, timeout=left
                )
                end = UpdatePhase.RECEIVED
            finally:
                update.enter(end)
            return update.digest

        return await self._turns.run(step, timeout)

    async def commit(self, *, epoch: int, policy_version: int, hold: bool = False, timeout: float) -> float:
        """Sample with the received version; with `hold`, keep its tokens back until `release`. Again: does nothing.

        Returns the seconds for which sampling stood still; 0 in a repetition.

        Raises:
            StaleEpoch: not the open epoch.
            WrongState: that version was not received, or is held already.
        """

        async def step(_left: float) -> float:
            if self._is_served(epoch, policy_version):
                return 0.0
            self._check_update(epoch, policy_version)
            update, paused = self._update, 0.0
            update.check_may_commit(held=self.token_hold.holding, hold=hold)
            if update.phase is UpdatePhase.RECEIVED:
                update.served_before = self.policy_version
                self._sampling.commit(policy_version)
                if hold:
                    self.token_hold.hold()
                update.enter(UpdatePhase.COMMITTED)
                await self._sampling.go_on()  # whatever can wait comes after this: until here nothing is sampled
                update.end_pause()
                paused = update.pause_seconds
            if not hold:
                await self._serve(epoch)
            return paused

        return await self._turns.run(step, timeout)

    async def release(self, *, epoch: int, policy_version: int, timeout: float) -> None:
        """Give out the tokens that a commit with hold kept back. Again: does nothing.

        Raises:
            StaleEpoch: not the open epoch.
            WrongState: that version was not committed.
        """

        async def step(_left: float) -> None:
            if self._is_served(epoch, policy_version):
                return
            self._check_update(epoch, policy_version)
            if self._update.phase is not UpdatePhase.COMMITTED:
                raise WrongState(f"version {policy_version} is not committed; call CommitWeights first")
            await self._serve(epoch)

        await self._turns.run(step, timeout)

    async def abort(self, *, epoch: int, timeout: float) -> bool:
        """Give up the epoch and its update, a transfer at once; return whether the engine is clean. Idempotent.

        Raises:
            StaleEpoch: another epoch is open.
        """

        async def step(_left: float) -> bool:
            if self._epochs.open is not None:
                self._epochs.check(epoch)
                await self._give_up("aborted")
            elif epoch > self._epochs.last:
                raise StaleEpoch(f"epoch {epoch} was never opened; the last one is {self._epochs.last}")
            return not self._sampling.dirty

        self._epochs.stop(epoch)
        return await self._turns.run(step, timeout)

    async def probe(self, token_ids: Sequence[int], *, timeout: float) -> list[float]:
        """Return the log-probabilities of the given tokens under the loaded weights, committed or not.

        Raises:
            WrongState: the update has failed, samples stand still in the engine, or it sleeps.
            Unavailable: the weights are dirty.
            DeadlinePassed: no answer in time.
        """

        async def step(left: float) -> list[float]:
            self._check_probe()
            try:
                async with asyncio.timeout(left):
                    return await self._engine.prompt_logprobs(token_ids)
            except TimeoutError:
                raise DeadlinePassed(f"the probe of {len(token_ids)} tokens took longer than {left:.1f} s") from None

        return await self._turns.run(step, timeout)

    async def sums(self, *, epoch: int, timeout: float) -> bytes:
        """Return the sums of the tensors that were received last; raises StaleEpoch: not the open epoch."""

        async def step(_left: float) -> bytes:
            self._epochs.check(epoch)
            return await self._engine.weight_sums(epoch=epoch)

        return await self._turns.run(step, timeout)

    async def sleep(self, level: int, *, timeout: float) -> None:
        """Let new samples wait and give memory up. Again, at the same level: does nothing.

        Raises:
            InvalidInput: no such level.
            WrongState: the engine cannot sleep, samples run, an update is open, or it sleeps at another level.
        """

        async def step(left: float) -> None:
            if self.updating:
                raise WrongState(f"an update to version {self._update.version} is open; end it before the sleep")
            await self._sampling.sleep(level, left)

        await self._turns.run(step, timeout)

    async def wake(self, tags: Sequence[str], *, timeout: float) -> None:
        """Take memory, all or what is named, and let samples in when all is there; raises InvalidInput: no such tag."""

        async def step(left: float) -> None:
            await self._sampling.wake(tags, left)
            if self._update.phase in (UpdatePhase.READY, UpdatePhase.COMMITTED):
                self._sampling.open_door()

        await self._turns.run(step, timeout)

    async def close(self) -> None:
        """Stop the watchdog and wait for nothing."""
        self._watchdog.stop()
        self._turns.cancel()

    async def _serve(self, epoch: int) -> None:
        """End a committed update well; what was held goes out."""
        version = self._update.version
        await self._engine.commit_weights(epoch=epoch, policy_version=version)
        self._sampling.sleep_state.lost_weights = False
        self.token_hold.release()
        self._end_update(dirty=False)
        _log.info("policy version %d is served", version)

    async def _give_up(self, why: str) -> None:
        """Close the epoch in the workers and settle what is left, of the weights and of the samples."""
        clean: bool | None = None  # nobody knows
        phase = self._update.phase
        if phase is UpdatePhase.COMMITTED:
            self.token_hold.drop()
        if self.updating:
            self._update.enter(UpdatePhase.ENDING)
        try:
            clean = await self._epochs.leave()
        finally:
            if self.updating or clean is False:
                dirty = self._sampling.dirty or not clean or phase in (UpdatePhase.RECEIVED, UpdatePhase.COMMITTED)
                _log.warning("update to version %d given up: %s", self._update.version, why, extra={"dirty": dirty})
                self._sampling.close_door("an update is being given up")
                try:
                    await self._leave_samples(dirty=dirty)
                finally:
                    self._end_update(dirty=dirty)

    async def _leave_samples(self, *, dirty: bool) -> None:
        """Let what stands still go on with the old version, or end what runs on weights that nobody may use."""
        if not dirty:
            await self._sampling.go_on()
            return
        await self._sampling.end_all()
        if self.token_hold.holding:
            self.token_hold.end()
            self.token_hold.version = self._update.served_before

    def _end_update(self, *, dirty: bool) -> None:
        self._watchdog.stop()
        self._update.enter(UpdatePhase.READY)
        self._update.digest, self._sampling.dirty = b"", dirty
        self._sampling.open_door()

    def _on_watchdog(self, epoch: int) -> None:
        async def step(_left: float) -> None:
            if self.updating and self._epochs.open == epoch:
                what = "release" if self._update.phase is UpdatePhase.COMMITTED else "commit"
                await self._give_up(f"no {what} {self._update_timeout:.0f} s after its begin; is the coordinator dead?")

        if self.updating and self._epochs.open == epoch:
            self._epochs.stop(epoch)
            self._turns.start(step, self._update_timeout)

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
        if sampling.stands_still:  # only the whole engine can go on
            raise WrongState("running samples stand still in the engine; commit with hold before a probe")
        if sampling.dirty and phase not in (UpdatePhase.RECEIVED, UpdatePhase.COMMITTED):
            raise sampling.dirty_error()
