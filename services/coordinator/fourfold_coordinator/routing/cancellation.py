"""Ends many awaits together. Each costs a timeout that never expires; a task would cost three times as much."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class CancelScopes:
    """Awaits that `cancel` ends. Use it on one event loop."""

    def __init__(self) -> None:
        self._open: set[asyncio.Timeout] = set()

    def __bool__(self) -> bool:
        return bool(self._open)

    async def run(self, work: Awaitable[T]) -> tuple[T] | None:
        """Return the result of `work`; None if `cancel` ended it first. Raises the errors of `work`."""
        try:
            async with asyncio.timeout(None) as scope:
                self._open.add(scope)
                try:
                    return (await work,)
                finally:
                    self._open.discard(scope)
        except TimeoutError:
            if not scope.expired():
                raise
            return None

    def cancel(self) -> None:
        """End the awaits that run now."""
        for scope in self._open:
            if not scope.expired():  # an earlier call cancelled this await, which has not ended yet
                scope.reschedule(0.0)
