"""`fourfold watch RUN_DIR`: the display of a run that another terminal, or another machine, started."""

from __future__ import annotations

import argparse
import asyncio
from contextlib import aclosing, suppress
from pathlib import Path

from fourfold import config as configuration
from fourfold.coordinator.client import AsyncCoordinatorClient
from fourfold.errors import ConfigError, FourfoldError, Unavailable
from fourfold.rpc.channel import open_channel
from fourfold.security.access import COORDINATOR, VIEWER, Security

from ..launch.fleet import ADDRESS_FILE
from .dashboard import Dashboard
from .summary import report_lines

_REFRESH_SECONDS = 0.5
_RETRY_SECONDS = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `fourfold watch`."""
    parser.add_argument("run_dir", type=Path, help="folder of the run, such as runs/quickstart")


def main(args: argparse.Namespace) -> int:
    """Show the run until it ends, or until Ctrl-C; of one that has ended, its report."""
    address_file = args.run_dir / ADDRESS_FILE
    if not address_file.is_file():
        raise ConfigError(f"{args.run_dir}: no run is going on here (no {ADDRESS_FILE}); give a folder of runs/")
    config = configuration.load(args.run_dir / "config.toml")
    security = Security.load(config.security, VIEWER)
    dashboard = Dashboard(name=config.name, run_dir=args.run_dir)
    try:
        with dashboard:
            asyncio.run(_show(address_file.read_text(encoding="utf-8").strip(), security, dashboard))
    except Unavailable:  # nobody is there any more
        if not (args.run_dir / "report.json").is_file():
            raise
        print("\n".join(report_lines(args.run_dir)))
    return 0


async def _show(address: str, security: Security | None, dashboard: Dashboard) -> None:
    watching = asyncio.create_task(follow(address, security, dashboard, attempts=3))
    try:
        while not watching.done():
            dashboard.refresh()
            await asyncio.wait({watching}, timeout=_REFRESH_SECONDS)
        await watching
    finally:
        watching.cancel()


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
