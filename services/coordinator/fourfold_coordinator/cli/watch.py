"""`fourfold watch RUN_DIR`: the display of a run that another terminal, or another machine, started."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from fourfold import config as configuration
from fourfold.errors import ConfigError, Unavailable
from fourfold.security.access import VIEWER, Security

from ..launch.fleet import ADDRESS_FILE
from .dashboard import Dashboard
from .follow import follow
from .summary import report_lines

_REFRESH_SECONDS = 0.5


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
