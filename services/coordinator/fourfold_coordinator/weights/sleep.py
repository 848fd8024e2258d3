"""Engines asleep while the trainer trains: on GPUs that they share, their memory makes room for its activations.

What the trainer keeps between steps (weights, gradients, optimizer) stays beside them while they sample.

Sleep is deep (level 2): weights are dropped and not copied to the host, because the update after the step replaces
them. A step that made no new version has its version published again: that is rare, and one transfer; a copy to the
host and back would cost every step two. Who wakes them is the broker, within the update.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from fourfold import metrics as m
from fourfold.config import Config
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import CANNOT_SLEEP, FourfoldError, WrongState

from ..routing.replica import Replica
from ..routing.router import Router
from .probe import ReplicaKey
from .status import ASLEEP, FENCED, WeightPlaneStatus

log = logging.getLogger("fourfold.coordinator")

_LEVEL: Final = 2
_AGAIN_SECONDS: Final = 0.25


class SleepRefused(WrongState):
    """An engine answers and does not give its memory up; the trainer would not find enough of it."""


class EngineSleeper:
    """Puts engines to sleep. Does nothing without `rollout.sleep_mode`."""

    def __init__(self, config: Config, router: Router, plane: WeightPlaneStatus) -> None:
        self._wanted, self._seconds = config.rollout.sleep_mode, config.weights.timeout_seconds
        self._router, self._plane = router, plane
        self._awake: dict[str, str] = {}
        """What people are told of engines that do not fall asleep, by member id."""

    @asynccontextmanager
    async def asleep(self) -> AsyncIterator[dict[str, float]]:
        """Keep every engine asleep within the block, those that join meanwhile, too; yield the time it took.

        An engine that is gone or does not answer is left to the update that follows; one that is falling asleep when
        the block ends is waited for.

        Raises:
            SleepRefused: one cannot sleep, or refused until `weights.timeout_seconds` were over.
        """
        if not self._wanted:
            yield {}
            return
        began = time.monotonic()
        engines = self._engines()
        await self._put_to_sleep(engines)
        late = asyncio.create_task(self._keep({engine.key for engine in engines}))
        try:
            yield {m.TIME_SLEEP: time.monotonic() - began}
        finally:
            late.cancel()
            await asyncio.gather(late, return_exceptions=True)

    def _engines(self) -> list[Replica]:
        return [r for r in self._router.replicas(Role.ROLE_ROLLOUT) if r.present and not r.gone]

    async def _put_to_sleep(self, replicas: Sequence[Replica]) -> None:
        errors = await asyncio.gather(*(self._one(replica) for replica in replicas))
        refused = [error for error in errors if isinstance(error, WrongState)]
        if not refused:
            return
        why = "; ".join(error.message for error in refused)
        if any(error.reason == CANNOT_SLEEP for error in refused):
            raise SleepRefused(f"{why}. The trainer needs its memory; or set rollout.sleep_mode = false for the run")
        raise SleepRefused(
            f"{why}. After {self._seconds:g} s (weights.timeout_seconds) it still has the memory that the trainer "
            f"needs: end what samples there, or set rollout.sleep_mode = false"
        )

    async def _one(self, replica: Replica) -> FourfoldError | None:
        """Put one engine to sleep, and tell people when that takes long; return why it does not fall asleep."""
        try:
            return await self._until_asleep(replica)
        finally:
            self._tell(replica.member.member_id, "")

    async def _until_asleep(self, replica: Replica) -> FourfoldError | None:
        """Ask again while samples of others are in the engine."""
        name, end = replica.member.member_id, time.monotonic() + self._seconds
        replica.version = -1
        self._router.set_unusable_reason(replica, "it sleeps while the trainer trains")
        while True:
            left = max(end - time.monotonic(), _AGAIN_SECONDS)
            try:
                await self._fall_asleep(replica, timeout=left)
                self._plane.state(name, ASLEEP)
                return None
            except FourfoldError as error:
                may_sleep_later = isinstance(error, WrongState) and error.reason != CANNOT_SLEEP
                if may_sleep_later and time.monotonic() < end:
                    self._tell(name, error.message)
                    await self._rouse(replica)
                    await self._router.clock.sleep(_AGAIN_SECONDS)
                    continue
                self._plane.state(name, FENCED, error.message)
                self._router.set_unusable_reason(replica, f"it does not fall asleep: {error}")
                log.warning("%s does not fall asleep: %s", name, error)
                return error

    def _tell(self, name: str, why: str) -> None:
        """Say why an engine is still awake; empty: nobody waits for it any more."""
        before = dict(self._awake)
        self._awake.pop(name, "")
        if why:
            self._awake[name] = f"{name} to fall asleep ({why})"
        if self._awake != before:
            self._router.on_wait("; ".join(self._awake.values()))

    async def _fall_asleep(self, replica: Replica, *, timeout: float) -> None:
        """Have an engine fall asleep; a cancellation waits for its answer.

        It finishes what it has begun, and calls itself awake until then: an update meanwhile would not wake it.
        """
        call = asyncio.ensure_future(replica.call(replica.control.sleep(level=_LEVEL, timeout=timeout)))
        try:
            await asyncio.shield(call)
        except asyncio.CancelledError:
            await asyncio.wait([call])
            raise
        finally:
            call.cancel()

    async def _rouse(self, replica: Replica) -> None:
        """Wake an engine that sleeps in part, as an update that failed leaves it; it can sleep anew then."""
        try:
            await replica.call(replica.control.wake(timeout=self._seconds))
        except FourfoldError as error:
            log.warning("%s does not wake: %s", replica.member.member_id, error)

    async def _keep(self, known: set[ReplicaKey]) -> None:
        """Put engines to sleep that join while the trainer trains; none waits for another."""
        async with asyncio.TaskGroup() as falling_asleep:
            while True:
                await self._router.wait_for_change(timeout=1.0)
                for engine in self._engines():
                    if engine.key not in known:
                        known.add(engine.key)
                        falling_asleep.create_task(self._one(engine))
