"""Decides which engines receive the trainer's weights and when: all engines after a step, late and failed ones at once.

The router uses an engine only while it serves the current version and the broker trusts it: the broker updated it, or
nothing was published yet and its probe agrees with the trainer's. An engine whose update failed is fenced: it gets no
requests until an update of it succeeds. `update.py` runs the updates.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

from fourfold import metrics as m
from fourfold.arrays import Int32Array
from fourfold.config.schema import Config, PauseMode
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import WEIGHTS_REFUSED, FourfoldError, WrongState
from fourfold.rollout.v1 import rollout_control_service_pb2 as control

from ..routing.replica import INFO_SECONDS, Replica, ReplicaKey
from ..routing.router import Router, rest_after
from ..routing.trainer_session import TrainerRestarted, TrainerSession
from ..state.files import DiskFull, DiskWriter
from ..state.ledger import Ledger
from .fan_out import DescribedEngine, UpdateFailed, call_all
from .probe import LogprobProbe
from .sleep import EngineSleeper
from .status import FENCED, REFUSED, SERVING, WeightPlaneStatus
from .update import WeightUpdater
from .update_result import WeightUpdateResult

log = logging.getLogger("fourfold.coordinator")

_TICK_SECONDS: Final = 0.25
# Back-off of an engine whose update failed; it doubles with each failure in a row.
_FIRST_BACKOFF_SECONDS: Final = 0.5
_MAX_BACKOFF_SECONDS: Final = 60.0
# A longer update is shown in the run's status.
_SLOW_SECONDS: Final = 2.0
_SHOW_SECONDS: Final = 1.0
# Key in the ledger: [member id, incarnation, version] of the engines that hold a version of this run.
_ENGINES_KEY: Final = "verified_engines"


class WeightsRefused(WrongState):
    """No engine can ever accept the trainer's weights; the run cannot continue."""


class WeightBroker:
    """Implements `WeightPublisher` (training/ports.py). `run` handles late and failed engines."""

    def __init__(
        self,
        config: Config,
        router: Router,
        session: TrainerSession,
        ledger: Ledger,
        *,
        disk: DiskWriter,
        probe_ids: Int32Array,
        status: WeightPlaneStatus,
    ) -> None:
        """Create the broker; it updates no engine before `resync`.

        `probe_ids`, int32 [n] with n >= 1, are the tokens whose log-probabilities are compared after each update.
        """
        self.lock = asyncio.Lock()  # held while the trainer computes or its weights change, because it cannot send then
        self._updates = asyncio.Lock()  # held during an update of engines; acquired after `lock`
        self.version = -1  # last published version; -1: none, or its trainer died
        self.held: ReplicaKey | None = None  # engine that is left out of updates
        self.sleeper = EngineSleeper(config, router, status)
        self._router, self._session, self._ledger, self._disk = router, session, ledger, disk
        self._status = status
        probe = LogprobProbe(probe_ids, tolerance=config.weights.probe_tolerance)
        self._updater = WeightUpdater(config, session, probe, status)
        # Engines that an earlier coordinator updated keep their weights, if these are still the trainer's.
        for name, incarnation, version in json.loads(ledger.get(_ENGINES_KEY) or "[]"):
            self._updater.verified[name, incarnation] = version
        self._timeout = config.weights.timeout_seconds
        self._sleeps = bool(config.placement.colocated)  # whether engines free their memory for the trainer
        self._step = 0
        self._failures: dict[ReplicaKey, tuple[int, float]] = {}  # failures in a row and monotonic time of the next try

    async def resync(self, version: int, *, step: int) -> None:
        async with self.lock:
            # Back-offs end here, because the trainer that is gone may have caused the failures. Engines that refused
            # the model stay out.
            self._failures = {key: failure for key, failure in self._failures.items() if failure[1] == math.inf}
            await self.publish(version, step=step)

    async def publish(
        self, version: int, *, step: int, on_sampling: Callable[[], None] = lambda: None
    ) -> WeightUpdateResult:
        async with self._updates, self._show_slow_update():
            await self._set_version(version, step)
            return await self._update_or_fence(self._next_engines(), on_sampling)

    def hold(self, key: ReplicaKey | None) -> None:
        self.held = key
        self._router.notify()

    def invalidate(self) -> None:
        self.version = -1

    def set_pause_mode(self, mode: PauseMode) -> None:
        self._updater.pause_mode = mode

    async def run(self) -> None:
        """Update engines that join late or failed, until cancelled."""
        while True:
            await self._router.wait_for_change(timeout=_TICK_SECONDS)
            began = time.perf_counter()
            if self.version < 0 or not self._outdated_engines():
                await rest_after(began)
                continue
            if await self._update_from_peer():
                continue
            async with self.lock:
                if self.version < 0:  # invalidated while this task waited for the lock
                    continue
                async with self._updates:
                    try:
                        # After a restart of the trainer, the loop releases the lock before it invalidates the version.
                        self._session.check_process()
                        await self._update_or_fence(self._next_engines())
                    except (DiskFull, WeightsRefused):
                        raise  # no later update can succeed
                    except TrainerRestarted:
                        self.invalidate()  # the loop gets the same error, and calls `resync`
                    except FourfoldError as error:  # the loop gets the trainer's error with its next call
                        log.warning("weight update postponed error=%s", error)
                        await self._router.clock.sleep(1.0)

    async def _update_from_peer(self) -> bool:
        """Let an engine that serves the current version send it to late engines, while the trainer may train.

        Return whether they serve it now; otherwise the trainer sends it as soon as it can.
        """
        async with self._updates:
            late = [r for r in self._outdated_engines() if r.key not in self._failures]
            feeder = next((r for r in self._router.replicas(Role.ROLE_ROLLOUT) if self._can_feed(r)), None)
            if self._sleeps or not late or feeder is None:
                return False
            try:
                await self._update(late, feeder=feeder)
            except (DiskFull, WeightsRefused):
                raise
            except (UpdateFailed, FourfoldError) as failed:
                log.warning("late engines were not updated by a peer peer=%s error=%s", feeder.member.member_id, failed)
                return False
        return True

    def _can_feed(self, replica: Replica) -> bool:
        serves = replica.version == self.version and not replica.unusable_reason and not replica.gone
        return serves and self._updater.can_feed(replica.key, self.version)

    async def _set_version(self, version: int, step: int) -> None:
        if version > 0:
            await self._disk.write(self._ledger.publishing, version, step)
        self.version, self._step = version, step
        self._status.policy_version = version

    def _outdated_engines(self) -> list[Replica]:
        """Return the engines without the current version whose back-off is over."""
        now = self._router.clock.monotonic()
        return [
            replica
            for replica in self._router.replicas(Role.ROLE_ROLLOUT)
            if replica.vocabulary_size
            and replica.key != self.held
            and (replica.version != self.version or replica.unusable_reason)
            and self._failures.get(replica.key, (0, now))[1] <= now
        ]

    def _next_engines(self) -> list[Replica]:
        """Return the engines of the next update: all that have not failed, otherwise one that has."""
        # With gloo and NCCL a hanging engine makes its whole group fail, so failed engines are tried alone.
        outdated = self._outdated_engines()
        healthy = [replica for replica in outdated if replica.key not in self._failures]
        return healthy or sorted(outdated, key=lambda replica: self._failures[replica.key][1])[:1]

    async def _update_or_fence(
        self, replicas: Sequence[Replica], on_sampling: Callable[[], None] = lambda: None
    ) -> WeightUpdateResult:
        """Update replicas; fence those that fail and repeat the update without them."""
        trainer_failed = False
        while replicas := [replica for replica in replicas if not replica.gone]:
            try:
                return await self._update(replicas, on_sampling)
            except UpdateFailed as failed:
                if failed.trainer is not None:
                    await self._session.ensure_answering()  # raises if the version was lost with its trainer
                log.warning("weight update failed version=%d error=%s", self.version, failed)
                if failed.trainer is not None and not trainer_failed:
                    trainer_failed = True  # the second attempt shows whether the trainer or an engine is to blame
                    continue
                if not failed.engines:
                    raise failed.trainer or failed from None
                for replica in replicas:
                    if replica.key in failed.engines:
                        self._fence(replica, failed.engines[replica.key])
                replicas = [replica for replica in replicas if replica.key not in failed.engines]
        return WeightUpdateResult()

    async def _update(
        self,
        replicas: Sequence[Replica],
        on_sampling: Callable[[], None] = lambda: None,
        *,
        feeder: Replica | None = None,
    ) -> WeightUpdateResult:
        """Send weights to the replicas that need them, probe the others, and make all of them usable.

        With `feeder`, this engine sends them, and the trainer is not called.
        """
        asked = [*replicas, *([feeder] if feeder else [])]
        about = await call_all({r.key: r.call(r.engine_control.describe(timeout=INFO_SECONDS)) for r in asked})
        engines = [DescribedEngine(replica=replica, about=about[replica.key]) for replica in replicas]
        source = DescribedEngine(replica=feeder, about=about[feeder.key]) if feeder else None
        if source is None:
            await self._outnumber_foreign_versions(engines)
        elif foreign := [engine.name for engine in engines if self._is_foreign(engine)]:
            raise UpdateFailed({}, WrongState(f"{', '.join(foreign)} had weights of another run"))
        current = [engine for engine in engines if self._is_current(engine)]
        holders_now = {engine.key for engine in current}
        outdated = [engine for engine in engines if engine.key not in holders_now]
        wake_seconds = await self._wake(current, outdated)
        result = await self._updater.accept_current(current, self.version)
        if outdated:
            sent = await self._send(outdated, on_sampling, source)
            holders = [(*key, version) for key, version in self._updater.verified.items() if version == self.version]
            await self._disk.write(self._ledger.put, {_ENGINES_KEY: json.dumps(holders)})
            wake_seconds += sent.seconds.get(m.TIME_WAKE, 0.0)
            result = replace(sent, probe_diffs=(*result.probe_diffs, *sent.probe_diffs))
        if wake_seconds:
            result = replace(result, seconds={**result.seconds, m.TIME_WAKE: wake_seconds})
        for engine in engines:
            self._failures.pop(engine.key, None)
            engine.replica.record_success()
            self._router.set_unusable_reason(engine.replica, "")
            self._status.set_state(engine.name, SERVING)
        self._router.notify()
        return result

    async def _send(
        self, engines: Sequence[DescribedEngine], on_sampling: Callable[[], None], feeder: DescribedEngine | None
    ) -> WeightUpdateResult:
        """Update engines. Each gets requests as soon as it samples, before its tokens are released.

        An engine whose last update failed gets no requests before its probe agrees. Otherwise its groups would use up
        their tries before the engine recovers or another one joins.
        """
        reason = f"weights of version {self.version} on their way"
        for engine in engines:
            self._router.set_unusable_reason(engine.replica, reason)
        waiting = {engine.key for engine in engines}

        def admit(engine: DescribedEngine) -> None:
            if engine.key not in self._failures:
                self._router.set_unusable_reason(engine.replica, "")
            waiting.discard(engine.key)
            if not waiting:
                on_sampling()

        try:
            return await self._updater.run(engines, self.version, on_sampling=admit, feeder=feeder)
        finally:
            for engine in engines:
                if engine.replica.version != self.version:
                    self._router.set_unusable_reason(engine.replica, reason)

    @asynccontextmanager
    async def _show_slow_update(self) -> AsyncIterator[None]:
        """Show the update in the run's status when the block takes longer than an update should."""

        async def show() -> None:
            await self._router.clock.sleep(_SLOW_SECONDS)
            try:
                while True:
                    self._router.on_wait(self._status.describe())
                    await self._router.clock.sleep(_SHOW_SECONDS)
            finally:
                self._router.on_wait("")

        task = asyncio.create_task(show())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _wake(self, current: Sequence[DescribedEngine], outdated: Sequence[DescribedEngine]) -> float:
        """Wake sleeping engines: all memory of current ones, only the weights of others; return the seconds."""
        # An outdated engine allocates its KV cache after the commit, when it has weights to sample with.
        began = time.monotonic()
        calls = {
            engine.key: engine.replica.call(engine.replica.engine_control.wake(*tags, timeout=self._timeout))
            for engines, tags in ((current, ()), (outdated, ("weights",)))
            for engine in engines
            if engine.about.sleeping
        }
        if not calls:
            return 0.0
        await call_all(calls)
        return time.monotonic() - began

    def _is_current(self, engine: DescribedEngine) -> bool:
        """Return whether the engine serves the current version, with this run's weights."""
        known = self.version == 0 or self._updater.verified.get(engine.key) == self.version
        clean = engine.about.weight_state == control.WEIGHT_STATE_CLEAN
        return clean and known and engine.about.policy_version == self.version

    async def _outnumber_foreign_versions(self, engines: Sequence[DescribedEngine]) -> None:
        """Raise the trainer's version above those of engines that hold weights of another run."""
        # The version of an engine never decreases, so the engine would refuse ours under its own number or a lower one.
        if foreign := [engine.about.policy_version for engine in engines if self._is_foreign(engine)]:
            version = await self._session.raise_policy_version(max(foreign) + 1)
            await self._set_version(version, self._step)
            log.warning("Engine holds weights of another run; republishing ours as version %d", self.version)

    def _is_foreign(self, engine: DescribedEngine) -> bool:
        newer = engine.about.policy_version >= self.version
        return not self._is_current(engine) and newer and engine.about.weight_state != control.WEIGHT_STATE_DIRTY

    def _fence(self, replica: Replica, error: FourfoldError) -> None:
        """Route no call to an engine until its update succeeds.

        Raises WeightsRefused when it can never accept the weights and no other engine is left to try.
        """
        name = replica.member.member_id
        self._router.faults.record(name, error.reason, error.message)
        refused = error.reason in WEIGHTS_REFUSED
        self._status.set_state(name, REFUSED if refused else FENCED, error.message)
        if refused:
            self._failures[replica.key] = (1, math.inf)
            self._router.set_unusable_reason(replica, f"it can never accept the trainer's weights: {error}")
            engines = [r for r in self._router.replicas(Role.ROLE_ROLLOUT) if r.vocabulary_size]
            if all(self._failures.get(engine.key, (0, 0.0))[1] == math.inf for engine in engines):
                raise WeightsRefused(f"no engine can accept the trainer's weights: {error}", reason=error.reason)
            log.error("engine excluded for the rest of the run engine=%s error=%s", name, error)
            return
        count = self._failures.get(replica.key, (0, 0.0))[0] + 1
        backoff = min(_FIRST_BACKOFF_SECONDS * 2.0 ** (count - 1), _MAX_BACKOFF_SECONDS)
        self._failures[replica.key] = (count, self._router.clock.monotonic() + backoff)
        again = f" ({count} times in a row)" if count > 1 else ""
        self._router.set_unusable_reason(replica, f"its weight update failed{again}: {error}")
