"""`fourfold watch RUN_DIR`: shows a run that another terminal or machine started."""

from __future__ import annotations

import argparse
import asyncio
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Final

from fourfold import config as configuration
from fourfold.config import Config
from fourfold.coordinator.client import AsyncCoordinatorClient
from fourfold.coordinator.v1 import run_service_pb2 as pb
from fourfold.errors import FourfoldError, Unavailable
from fourfold.rpc.channel import open_channel
from fourfold.security.access import COORDINATOR, VIEWER, Security

from ..launch.run_folder import describe_stop, find_run, is_finished, is_locked, last_progress, read_address
from ..launch.run_names import CONFIG_FILE, COORDINATOR_LOCK, FAILED_SUFFIX
from .dashboard import Dashboard, Schedule
from .summary import report_lines

_REFRESH_SECONDS: Final = 0.5
_RETRY_SECONDS: Final = 0.5
_MAX_FAILURES: Final = 3
# More attempts after a connection that worked, because `fourfold run` restarts a dead coordinator within seconds.
_MAX_RECONNECTS: Final = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, help="folder of the run, such as runs/quickstart or runs/latest")


def main(args: argparse.Namespace) -> int:
    """Show the run until it ends or Ctrl-C, then its report or the step at which it stopped; return the exit code."""
    run_dir = find_run(args.run_dir)
    address = read_address(run_dir)
    config = configuration.load(run_dir / CONFIG_FILE)
    security = Security.load(config.security, VIEWER)
    dashboard = Dashboard(name=config.name, run_dir=run_dir, schedule=Schedule.from_config(config))
    try:
        with dashboard:
            asyncio.run(_show(address, security, dashboard))
    except Unavailable:
        if is_locked(run_dir / COORDINATOR_LOCK):  # the coordinator lives, and does not respond
            raise
    return _print_end(run_dir, config, dashboard.status)


def _print_end(run_dir: Path, config: Config, status: pb.RunStatus) -> int:
    """Print the end of a run with this last status; return the exit code."""
    if is_finished(run_dir, config):
        print("\n".join(report_lines(run_dir)))
        return 0
    if status.phase == pb.RUN_PHASE_DONE:  # the report is in another folder
        return 0
    if status.phase == pb.RUN_PHASE_FAILED and not last_progress(run_dir).step:
        where = f"{run_dir}/logs, or in {run_dir}{FAILED_SUFFIX}/logs if `fourfold run` started it"
        print(f"{status.failure}\nNo step was done. Its logs are in {where}; correct the cause, and start it again.")
        return 1
    failure = [status.failure] if status.phase == pb.RUN_PHASE_FAILED else []
    print("\n".join([*failure, *stopped_lines(run_dir, config)]))
    return 1


def stopped_lines(run_dir: Path, config: Config) -> list[str]:
    """Return the step at which a run has stopped, and the command that continues it."""
    progress = last_progress(run_dir)
    stop = describe_stop(run_dir, progress)
    lines = [f"{run_dir} does not run: it {stop.how} after step {progress.step} of {config.steps}."]
    lines += [f"{stop.resumption}:", f"  {stop.command}"]
    return lines + ([f"Why it stopped is at the end of {stop.log}"] if stop.log else [])


async def _show(address: str, security: Security | None, dashboard: Dashboard) -> None:
    following = asyncio.create_task(follow(address, security, dashboard, max_failures=_MAX_FAILURES))
    try:
        while not following.done():
            dashboard.refresh()
            await asyncio.wait({following}, timeout=_REFRESH_SECONDS)
        await following
    finally:
        following.cancel()


async def follow(
    address: str,
    security: Security | None,
    dashboard: Dashboard,
    *,
    max_failures: int | None = None,
    ended: asyncio.Event | None = None,
) -> None:
    """Pass every status of the run to the dashboard until the run is over; reconnect when the connection is lost.

    Raises the error of the last of `max_failures` attempts in a row; with None it retries until it is cancelled. A lost
    connection gets more attempts, because the coordinator may be restarted. A launcher sets `ended` when the run has
    ended; until then it restarts a stopped coordinator.
    """
    restarts, ended = ended is not None, ended or asyncio.Event()
    failures, phase = 0, pb.RUN_PHASE_UNSPECIFIED
    async with open_channel(address, security, server=COORDINATOR) as channel:
        client = AsyncCoordinatorClient(channel, peer=f"coordinator at {address}")
        while True:
            try:
                async with aclosing(client.watch_run()) as statuses:
                    async for status in statuses:
                        failures, max_failures = 0, max_failures and _MAX_RECONNECTS
                        dashboard.update(status)
                        phase = status.phase
                if not restarts or phase != pb.RUN_PHASE_STOPPED:
                    return  # the coordinator ended the stream: the run is over
            except FourfoldError:
                failures += 1
                if failures == max_failures:
                    raise
            with suppress(TimeoutError):
                async with asyncio.timeout(_RETRY_SECONDS):
                    await ended.wait()
            if ended.is_set():
                return
