"""Which engines get the trainer's weights, and when: all after a step, one that comes late at once.

An engine is routed to only while it serves the current version and the broker vouches for it:
because the broker filled it, or because nothing was published yet and its probe agrees with the
trainer's. One that fails is fenced: not routed to until it was filled. One whose model can never
take the weights is not tried again, and when there is no other the run ends. How an update runs
is in `weight_update.py`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

from fourfold import metrics as m
from fourfold.arrays import Int32Array
from fourfold.config import Config
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import WEIGHTS_REFUSED, FourfoldError, WrongState
from fourfold.rollout.v1 import rollout_control_service_pb2 as control

from ..routing.replica import Replica
from ..routing.router import INFO_SECONDS, Router
from ..routing.trainer_session import TrainerRestarted, TrainerSession
from ..state.files import DiskFull, DiskWriter
from ..state.ledger import Ledger
from .fan_out import DescribedEngine, UpdateFailed, call_all
from .probe import LogprobProbe, ReplicaKey
from .sleep import EngineSleeper
from .status import FENCED, REFUSED, SERVING, WeightPlaneStatus
from .update import WeightUpdater, WeightUpdateResult

log = logging.getLogger("fourfold.coordinator")

_TICK_SECONDS: Final = 0.25
# An engine whose update failed is tried again after this long, twice as long each time.
_FIRST_REST_SECONDS: Final = 0.5
_MAX_REST_SECONDS: Final = 60.0
# An update that takes longer shows on the display.
_SLOW_SECONDS: Final = 2.0
_TELL_SECONDS: Final = 1.0


class WeightsRefused(WrongState):
    """Every engine that is there said that it can never take the trainer's weights; the run cannot go on."""


class WeightBroker:
    """Brings every engine to the trainer's weights. `run` keeps it running in a task."""

    def __init__(
        self,
        config: Config,
        router: Router,
        session: TrainerSession,
        ledger: Ledger,
        *,
        disk: DiskWriter,
        probe_ids: Int32Array,
        plane: WeightPlaneStatus,
    ) -> None:
        """Prepare; nothing is filled before `resync`.

        Args:
            config: of the run.
            router: knows the engines.
            session: of the trainer.
            ledger: keeps the published versions.
            disk: makes the writes to it.
            probe_ids: int32 [n], n >= 1: tokens whose log-probabilities are compared after each update.
            plane: told what happens.
        """
        self.lock = asyncio.Lock()
        """Hold it while the trainer's weights change: nobody is filled meanwhile."""
        self.version = -1
        """Version published last; -1 before `resync`."""
        self._router = router
        self._session = session
        self._ledger, self._disk = ledger, disk
        probe = LogprobProbe(probe_ids, tolerance=config.weights.probe_tolerance)
        self._probe = probe
        self._plane = plane
        self._updater = WeightUpdater(config, session, probe, plane)
        self._timeout = config.weights.timeout_seconds
        self.sleeper = EngineSleeper(config, router, plane)
        """Whom an update wakes."""
        self._step = 0
        self._failures: dict[ReplicaKey, tuple[int, float]] = {}  # how many in a row, and when to try again

    async def resync(self, version: int, *, step: int) -> None:
        """Take the trainer's `version` as the current one, and check or fill every engine that is there.

        An engine that failed before may have failed with a trainer that is gone: it is as good as the others again.

        Raises:
            TrainerRestarted: the weights are lost.
            WeightsRefused: no engine can ever take the weights.
            FourfoldError: the trainer cannot send.
        """
        async with self.lock:
            self._failures = {key: failure for key, failure in self._failures.items() if failure[1] == math.inf}
            await self.publish(version, step=step)

    async def publish(self, version: int, *, step: int) -> WeightUpdateResult:
        """Bring all engines to `version`, which the trainer holds. The caller holds `lock`.

        Engines that fail are fenced and left out; sampling waits when none is left.

        Raises:
            TrainerRestarted: the weights are lost.
            WeightsRefused: no engine can ever take the weights.
            FourfoldError: the trainer cannot send.
        """
        await self._note(version, step)
        async with self._telling():
            return await self._fill(self._next())

    def invalidate(self) -> None:
        """Publish nothing until `resync`: the present version died with its trainer."""
        self.version = -1

    async def run(self) -> None:
        """Check or fill engines that come late or failed, until cancelled."""
        while True:
            await self._router.wait_for_change(timeout=_TICK_SECONDS)
            if self.version < 0 or not self._unsettled():
                continue
            async with self.lock:
                if self.version < 0:  # its trainer died while the lock was held
                    continue
                try:
                    await self._fill(self._next())
                except (DiskFull, WeightsRefused):
                    raise  # the run's end: no later try can do better
                except TrainerRestarted:
                    self.invalidate()  # the loop meets it, too, and settles the next version
                except FourfoldError as error:  # the trainer's trouble: the loop meets it with its next call
                    log.warning("engines wait for weights: %s", error)
                    await self._router.clock.sleep(1.0)

    async def _note(self, version: int, step: int) -> None:
        if version > 0:
            await self._disk.write(self._ledger.publishing, version, step)
        self.version, self._step = version, step
        self._plane.policy_version = version

    def _unsettled(self) -> list[Replica]:
        """Return the engines that the broker does not vouch for, and that may be tried now."""
        now = self._router.clock.monotonic()
        return [
            replica
            for replica in self._router.replicas(Role.ROLE_ROLLOUT)
            if replica.vocabulary_size
            and (replica.version != self.version or replica.unusable_reason)
            and self._failures.get(replica.key, (0, now))[1] <= now
        ]

    def _next(self) -> list[Replica]:
        """Return the unsettled engines to be tried together now: the well ones, and each that failed before alone.

        One that hangs takes the others of its group with it, where they all meet (gloo, NCCL), and all of them fail.
        """
        unsettled = self._unsettled()
        well = [replica for replica in unsettled if replica.key not in self._failures]
        return well or sorted(unsettled, key=lambda replica: self._failures[replica.key][1])[:1]

    async def _fill(self, replicas: Sequence[Replica]) -> WeightUpdateResult:
        """Bring replicas to the current version. A failure leaves its engines out and tries the others again.

        Raises:
            TrainerRestarted: the weights are lost.
        """
        trainer_failed = False
        while replicas := [replica for replica in replicas if not replica.gone]:
            try:
                return await self._try(replicas)
            except UpdateFailed as failed:
                if failed.trainer is not None:
                    await self._session.ensure_answering()  # a version that died with its trainer is not tried again
                log.warning("weight update to version %d: %s", self.version, failed)
                if failed.trainer is not None and not trainer_failed:
                    trainer_failed = True  # whose fault it was shows the second time
                    continue
                if not failed.engines:
                    raise failed.trainer or failed from None
                for replica in replicas:
                    if replica.key in failed.engines:
                        self._fence(replica, failed.engines[replica.key])
                replicas = [replica for replica in replicas if replica.key not in failed.engines]
        return WeightUpdateResult()

    async def _try(self, replicas: Sequence[Replica]) -> WeightUpdateResult:
        engines = await self._describe(replicas)
        await self._rise_above(engines)
        trusted = [engine for engine in engines if self._trusted(engine)]
        others = [engine for engine in engines if engine not in trusted]
        woken = await self._wake(trusted, others)
        update = await self._vouch(trusted)
        if others:
            for engine in others:
                self._router.set_unusable_reason(engine.replica, f"weights of version {self.version} on their way")
            filled = await self._updater.run(others, self.version)
            woken += filled.seconds.get(m.TIME_WAKE, 0.0)
            update = replace(filled, probe_diffs=(*update.probe_diffs, *filled.probe_diffs))
        if woken:
            update = replace(update, seconds={**update.seconds, m.TIME_WAKE: woken})
        for engine in engines:
            self._failures.pop(engine.key, None)
            engine.replica.record_success()
            self._router.set_unusable_reason(engine.replica, "")
            self._plane.state(engine.name, SERVING)
        self._router.notify()
        return update

    @asynccontextmanager
    async def _telling(self) -> AsyncIterator[None]:
        """Say who is waited for when the block takes longer than an update should."""
        task = asyncio.create_task(self._tell())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _tell(self) -> None:
        await self._router.clock.sleep(_SLOW_SECONDS)
        try:
            while True:
                self._router.on_wait(self._plane.line())
                await self._router.clock.sleep(_TELL_SECONDS)
        finally:
            self._router.on_wait("")

    async def _describe(self, replicas: Sequence[Replica]) -> list[DescribedEngine]:
        about = await call_all({r.key: r.call(r.control.describe(timeout=INFO_SECONDS)) for r in replicas})
        return [DescribedEngine(replica=replica, about=about[replica.key]) for replica in replicas]

    async def _wake(self, whole: Sequence[DescribedEngine], for_weights: Sequence[DescribedEngine]) -> float:
        """Give engines that sleep their memory again, all of it or that of the weights; return the seconds it took."""
        began = time.monotonic()
        tags: dict[ReplicaKey, tuple[str, ...]] = {e.key: () for e in whole} | {
            e.key: ("weights",) for e in for_weights
        }
        calls = {
            e.key: e.replica.call(e.replica.control.wake(*tags[e.key], timeout=self._timeout))
            for e in (*whole, *for_weights)
            if e.about.sleeping
        }
        if not calls:
            return 0.0
        await call_all(calls)
        return time.monotonic() - began

    def _trusted(self, engine: DescribedEngine) -> bool:
        """Whether the engine serves the current version, and these weights for sure."""
        known = self.version == 0 or self._updater.filled.get(engine.key) == self.version
        clean = engine.about.weight_state == control.WEIGHT_STATE_CLEAN
        return clean and known and engine.about.policy_version == self.version

    async def _rise_above(self, engines: Sequence[DescribedEngine]) -> None:
        """Give the trainer's weights a higher number when an engine, of another run, holds others under theirs."""
        strange = [
            engine.about.policy_version
            for engine in engines
            if not self._trusted(engine)
            and engine.about.policy_version >= self.version
            and engine.about.weight_state != control.WEIGHT_STATE_DIRTY
        ]
        if strange:
            version = max(strange) + 1
            await self._note(await self._session.raise_policy_version(version), self._step)
            log.warning("an engine holds weights that are not this run's; ours go on as version %d", self.version)

    async def _vouch(self, engines: Sequence[DescribedEngine]) -> WeightUpdateResult:
        """Take engines that hold the current version already, after a look at the probe."""
        if not engines:
            return WeightUpdateResult()
        probes = await self._updater.look(engines, self.version, timeout=INFO_SECONDS * 3)
        for engine in engines:
            engine.replica.version = self.version
            self._probe.accept(engine.key, self.version, probes[engine.key][2])
        return WeightUpdateResult(probe_diffs=tuple((mean, largest) for mean, largest, _ in probes.values()))

    def _fence(self, replica: Replica, error: FourfoldError) -> None:
        """Route nothing to an engine until it was filled.

        Raises:
            WeightsRefused: it can never be, and no other engine is left to try.
        """
        self._router.faults.record(replica.member.member_id, error.reason, error.message)
        refused = error.reason in WEIGHTS_REFUSED
        self._plane.state(replica.member.member_id, REFUSED if refused else FENCED, error.message)
        if refused:
            self._failures[replica.key] = (1, math.inf)
            self._router.set_unusable_reason(replica, f"it can never take the trainer's weights: {error}")
            engines = [r for r in self._router.replicas(Role.ROLE_ROLLOUT) if r.vocabulary_size]
            if all(self._failures.get(engine.key, (0, 0.0))[1] == math.inf for engine in engines):
                raise WeightsRefused(f"no engine can take the trainer's weights: {error}", reason=error.reason)
            log.error("%s is left out for good: %s", replica.member.member_id, error)
            return
        count = self._failures.get(replica.key, (0, 0.0))[0] + 1
        rest = min(_FIRST_REST_SECONDS * 2.0 ** (count - 1), _MAX_REST_SECONDS)
        self._failures[replica.key] = (count, self._router.clock.monotonic() + rest)
        again = f" ({count} times in a row)" if count > 1 else ""
        self._router.set_unusable_reason(replica, f"its weight update failed{again}: {error}")
