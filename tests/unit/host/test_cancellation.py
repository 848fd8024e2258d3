"""Work that a cancellation does not stop half-way."""

from __future__ import annotations

import asyncio

import pytest

from fourfold.host.cancellation import completed


async def test_work_is_completed_however_often_its_caller_is_cancelled() -> None:
    go_on, done = asyncio.Event(), list[int]()

    async def work() -> None:
        await go_on.wait()
        done.append(1)

    caller = asyncio.create_task(completed(work()))
    for _ in range(3):
        await asyncio.sleep(0)
        caller.cancel()
    await asyncio.sleep(0)
    assert not caller.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert done
