"""Many awaits that one call ends."""

from __future__ import annotations

import asyncio

from fourfold_coordinator.routing.cancellation import CancelScopes


async def test_an_await_that_unwinds_is_not_cancelled_again() -> None:
    scopes, unwinds, release = CancelScopes(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            unwinds.set()
            await release.wait()

    first = asyncio.create_task(scopes.run(work()))
    await asyncio.sleep(0)
    scopes.cancel()
    scopes.cancel()
    await unwinds.wait()
    second = asyncio.create_task(scopes.run(asyncio.sleep(60)))
    await asyncio.sleep(0)
    scopes.cancel()
    assert await second is None and not first.done()
    release.set()
    assert await first is None and not scopes
