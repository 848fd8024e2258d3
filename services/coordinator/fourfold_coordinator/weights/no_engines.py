"""Keeps the version of the trainer's weights in a run without engines, which get none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fourfold.config.schema import PauseMode

from ..routing.replica import ReplicaKey
from .update_result import WeightUpdateResult


class NoEngines:
    """A `WeightPublisher` that sends nothing."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()  # held while the trainer works
        self.version = -1
        self.held: ReplicaKey | None = None

    @property
    def sleeper(self) -> NoEngines:
        """Itself: no engine has to sleep."""
        return self

    def asleep(self) -> AbstractAsyncContextManager[dict[str, float]]:
        """Return a context in which no engine sleeps; it has no metric."""
        return _nothing()

    async def resync(self, version: int, *, step: int) -> None:
        """Take the trainer's `version` as the current one."""
        self.version = version

    async def publish(
        self, version: int, *, step: int, on_sampling: Callable[[], None] = lambda: None
    ) -> WeightUpdateResult:
        """Take the trainer's `version` as the current one."""
        self.version = version
        on_sampling()
        return WeightUpdateResult()

    def hold(self, key: ReplicaKey | None) -> None:
        """Do nothing: no engine is updated."""

    def invalidate(self) -> None:
        """Forget the version: it was lost with its trainer."""
        self.version = -1

    def set_pause_mode(self, mode: PauseMode) -> None:
        """Do nothing: no sample is running."""


@asynccontextmanager
async def _nothing() -> AsyncIterator[dict[str, float]]:
    yield {}
