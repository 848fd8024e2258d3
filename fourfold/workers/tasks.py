"""Runs tasks that must not fail, and ends them together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

_log = logging.getLogger(__name__)


class Tasks:
    """Use it from one event loop."""

    def __init__(self, title: str, on_failure: Callable[[str], None]) -> None:
        """`on_failure` gets a message with `title` if a task ends because of a bug."""
        self._title, self._on_failure = title, on_failure
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def add(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task until it ends, or until `close`; after that it does not begin."""
        if self._closed:
            work.close()
            return
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_end)

    async def close(self) -> None:
        """Cancel the tasks and wait for their end."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("task of the %s failed", self._title, exc_info=error)
            self._on_failure(f"the {self._title} failed: {type(error).__name__}: {error}")
