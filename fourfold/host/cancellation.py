"""Completes work that a cancellation must not stop half-way: the disk would have a change, and its caller not."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def completed(work: Coroutine[Any, Any, T]) -> T:
    """Await work that must not stop half-way: a cancellation is raised after the end of the work."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):  # the first one is raised below
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # asyncio logs an exception that no code retrieves
        raise
