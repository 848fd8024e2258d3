"""Puts engines to sleep while the trainer trains on the same GPUs, so that its activations find memory.

The trainer's weights, gradients and optimizer stay in memory while the engines sample. The broker wakes the engines
within the weight update that follows the step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from fourfold import metrics as m
from fourfold.config.schema import Config
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import CANNOT_SLEEP, FourfoldError, WrongState

from ..routing.replica import Replica, ReplicaKey
from ..routing.router import Router
from .status import ASLEEP, FENCED, WeightPlaneStatus

log = logging.getLogger("fourfold.coordinator")

# Level 2 drops the weights, because the update after the step replaces them. A step without a new version publishes
# the old one again. That is rare and costs one transfer; level 1 would copy to the host and back in every step.
_LEVEL: Final = 2
_RETRY_SECONDS: Final = 0.25


class SleepRefused(WrongState):
    """An engine refused to sleep and keeps the memory that the trainer needs."""


class EngineSleeper:
    """Puts engines to sleep; does nothing without `rollout.sleep_mode`."""

    def __init__(self, config: Config, router: Router, status: WeightPlaneStatus) -> None:
        self._enabled, self._timeout = config.rollout.sleep_mode, config.weights.timeout_seconds
        self._router, self._status = router, status
        self._awake: dict[str, str] = {}  # member id -> the displayed reason of the wait

    @asynccontextmanager
    async def asleep(self) -> AsyncIterator[dict[str, float]]:
        """Keep every engine asleep within the block, including new ones; yield the duration by metric name.

        The update after the block deals with engines that left or did not answer. The end of the block waits for
        engines that are falling asleep. Raises SleepRefused when an engine cannot sleep, or refused for too long.
        """
        if not self._enabled:
            yield {}
            return
        began = time.monotonic()
        engines = self._engines()
        await self._put_to_sleep(engines)
        joining = asyncio.create_task(self._put_new_engines_to_sleep({engine.key for engine in engines}))
        try:
            yield {m.TIME_SLEEP: time.monotonic() - began}
        finally:
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)

    def _engines(self) -> list[Replica]:
        return [r for r in self._router.replicas(Role.ROLE_ROLLOUT) if r.present and not r.gone]

    async def _put_to_sleep(self, replicas: Sequence[Replica]) -> None:
        errors = await asyncio.gather(*(self._sleep_or_explain(replica) for replica in replicas))
        refused = [error for error in errors if isinstance(error, WrongState)]
        if not refused:
            return
        reasons = "; ".join(error.message for error in refused)
        if any(error.reason == CANNOT_SLEEP for error in refused):
            raise SleepRefused(f"{reasons}. The trainer needs this memory; set rollout.sleep_mode = false")
        raise SleepRefused(
            f"{reasons}. After {self._timeout:g} s (weights.timeout_seconds) the engine still holds the memory that "
            f"the trainer needs: end the requests on it, or set rollout.sleep_mode = false"
        )

    async def _sleep_or_explain(self, replica: Replica) -> FourfoldError | None:
        """Put one engine to sleep, and retry while it has samples of other clients; return its last error."""
        name, end = replica.member.member_id, time.monotonic() + self._timeout
        replica.version = -1
        self._router.set_unusable_reason(replica, "it sleeps while the trainer trains")
        try:
            while True:
                try:
                    await self._sleep(replica, timeout=max(end - time.monotonic(), _RETRY_SECONDS))
                    self._status.set_state(name, ASLEEP)
                    return None
                except FourfoldError as error:
                    may_sleep_later = isinstance(error, WrongState) and error.reason != CANNOT_SLEEP
                    if not may_sleep_later or time.monotonic() >= end:
                        self._status.set_state(name, FENCED, error.message)
                        self._router.set_unusable_reason(replica, f"it did not go to sleep: {error}")
                        log.warning("engine did not go to sleep engine=%s error=%s", name, error)
                        return error
                    self._show_wait(name, error.message)
                    await self._wake(replica)
                    await self._router.clock.sleep(_RETRY_SECONDS)
        finally:
            self._show_wait(name, "")

    def _show_wait(self, name: str, reason: str) -> None:
        """Show why an engine is still awake; an empty reason ends the wait."""
        before = dict(self._awake)
        self._awake.pop(name, "")
        if reason:
            self._awake[name] = f"{name} to fall asleep ({reason})"
        if self._awake != before:
            self._router.on_wait("; ".join(self._awake.values()))

    async def _sleep(self, replica: Replica, *, timeout: float) -> None:
        """Call `SleepEngine`; a cancellation waits for its answer."""
        call = asyncio.ensure_future(replica.call(replica.engine_control.sleep(level=_LEVEL, timeout=timeout)))
        try:
            await asyncio.shield(call)
        except asyncio.CancelledError:
            # The engine completes a sleep that it has begun, and reports itself awake until then. An update during this
            # time would not wake it.
            await asyncio.wait([call])
            raise
        finally:
            call.cancel()

    async def _wake(self, replica: Replica) -> None:
        """Wake an engine that a failed update left half asleep: only an awake engine can go to sleep."""
        try:
            await replica.call(replica.engine_control.wake(timeout=self._timeout))
        except FourfoldError as error:
            log.warning("engine did not wake engine=%s error=%s", replica.member.member_id, error)

    async def _put_new_engines_to_sleep(self, known: set[ReplicaKey]) -> None:
        """Put engines that join to sleep, concurrently, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._router.wait_for_change(timeout=1.0)
                for engine in self._engines():
                    if engine.key not in known:
                        known.add(engine.key)
                        tasks.create_task(self._sleep_or_explain(engine))
