"""Feeds a display with the state of a run."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress

from fourfold.coordinator.client import AsyncCoordinatorClient
from fourfold.errors import FourfoldError
from fourfold.rpc.channel import open_channel
from fourfold.security.access import COORDINATOR, Security

from .dashboard import Dashboard

_RETRY_SECONDS = 0.5


async def follow(
    address: str,
    security: Security | None,
    dashboard: Dashboard,
    *,
    attempts: int | None = None,
    over: asyncio.Event | None = None,
) -> None:
    """Take every state from the coordinator until the run is over; call again when the connection is lost.

    Args:
        address: of the coordinator.
        security: our certificates, or None.
        dashboard: is fed.
        attempts: failures in a row after which to give up; None: never, somebody cancels us.
        over: set when the coordinator has ended: a lost connection is then the end, too.

    Raises:
        FourfoldError: of the last attempt.
    """
    over = over or asyncio.Event()
    channel = open_channel(address, security, server=COORDINATOR)
    client = AsyncCoordinatorClient(channel, peer=f"coordinator at {address}")
    failures = 0
    try:
        while True:
            try:
                async with aclosing(client.watch_run()) as statuses:
                    async for status in statuses:
                        failures = 0
                        dashboard.update(status)
                return  # the coordinator ended the stream: the run is over
            except FourfoldError:
                failures += 1
                if failures == attempts:
                    raise
            with suppress(TimeoutError):
                async with asyncio.timeout(_RETRY_SECONDS):
                    await over.wait()
            if over.is_set():
                return
    finally:
        await channel.close()
