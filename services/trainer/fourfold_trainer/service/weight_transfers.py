"""Weights on their way: each phase waits for its turn in the engine thread; an abort overtakes whatever runs there.

A phase has the time that its caller gives it, queueing included, and ends a little earlier, so that the caller learns
why. A caller that is gone (a coordinator that was killed) ends nothing any more: its epoch is aborted here, or the
engine would wait for receivers until the deadline while the next coordinator waits for the engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

from fourfold.errors import DeadlinePassed, StaleEpoch, WrongState
from fourfold.weights.manifest import Manifest
from fourfold_trainer.engine import Sent, TrainerEngine
from fourfold_trainer.service.engine_thread import EngineThread, Phase

_log = logging.getLogger("fourfold.trainer")

T = TypeVar("T")

_MARGIN_SECONDS: Final = 0.05


class Transfers:
    """The trainer's side of weight updates. Coroutines run on one event loop."""

    def __init__(
        self, thread: EngineThread, *, engine: Callable[[], TrainerEngine], version: Callable[[], int]
    ) -> None:
        """Prepare.

        Args:
            thread: the one that uses the engine.
            engine: returns it; raises Unavailable while it is loading.
            version: returns that of the present weights.
        """
        self._thread, self._engine, self._version = thread, engine, version
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def device_uuids(self) -> tuple[bytes, ...]:
        """CUDA UUIDs of the policy's ranks, 16 bytes each, in rank order; none on CPU."""
        return self._engine().device_uuids

    @property
    def backends(self) -> tuple[str, ...]:
        """How weights can be sent from where they are, best first."""
        return self._engine().backends

    async def manifest(self, *, timeout: float) -> Manifest:
        """Return the layout of the weights."""
        return await self._thread.run(Phase.WAITING, lambda: self._engine().manifest(), timeout=timeout)

    async def make_offers(
        self, epoch: int, backend: str, receiver_count: int, *, group: int = 0, timeout: float
    ) -> list[bytes]:
        """Start an epoch (group 0), or add the next group of receivers to it; one offer per rank."""
        return await self._run(
            epoch,
            lambda left: self._engine().make_offers(epoch, backend, receiver_count, group=group, timeout=left),
            timeout,
        )

    async def open(self, epoch: int, *, timeout: float) -> None:
        """Meet the receivers of all groups."""
        await self._run(epoch, lambda left: self._engine().open_weights(epoch, timeout=left), timeout)

    async def send(self, epoch: int, policy_version: int, *, skip_sums: bool = False, timeout: float) -> Sent:
        """Send the present weights; WrongState when they have another version."""

        def send(left: float) -> Sent:
            if policy_version != self._version():
                raise WrongState(
                    f"policy version {policy_version} cannot be sent; the present weights are {self._version()}"
                )
            return self._engine().send_weights(epoch, policy_version, skip_sums=skip_sums, timeout=left)

        return await self._run(epoch, send, timeout)

    async def abort(self, epoch: int) -> None:
        """Abort the epoch at once, whatever the engine thread does."""
        await asyncio.to_thread(self._engine().abort_weights, epoch)

    async def _run(self, epoch: int, phase: Callable[[float], T], timeout: float) -> T:
        end = time.monotonic() + timeout - _MARGIN_SECONDS

        def timed() -> T:
            left = end - time.monotonic()
            if left <= 0:
                raise DeadlinePassed("the engine was busy until the deadline; call again")
            return phase(left)

        try:
            return await self._thread.run(Phase.PUBLISHING, timed, timeout=timeout)
        except asyncio.CancelledError:
            task = asyncio.get_running_loop().create_task(self._forsaken(epoch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            raise

    async def _forsaken(self, epoch: int) -> None:
        with suppress(StaleEpoch):  # another one is open: its owner is well
            await self.abort(epoch)
            _log.warning("weight epoch %d is aborted: whoever asked for it is gone", epoch)
