"""`fourfold weights RUN_DIR` or `fourfold weights HOST:PORT`: how the weights of a run get to its engines, now.

version 12, epoch 7: transfer for 3.2 s
last update: 0.84 s, engines paused for 0.31 s of it

member     state     since  version  backend  waits for  last error
trainer-0  updating  3.2 s       12  -        rollout-1
rollout-0  waiting   0.4 s       11  nccl     rollout-1
rollout-1  updating  3.2 s       11  nccl     trainer-0
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from pathlib import Path
from typing import Final

from fourfold import config as configuration
from fourfold.coordinator.client import AsyncCoordinatorClient
from fourfold.coordinator.v1 import run_service_pb2 as pb
from fourfold.errors import ConfigError
from fourfold.rpc.channel import open_channel
from fourfold.security.access import COORDINATOR, VIEWER, Security

from ..launch.fleet import ADDRESS_FILE

_TIMEOUT_SECONDS: Final = 10.0
_HEAD: Final = ("member", "state", "since", "version", "backend", "waits for", "last error")
_NUMBERS: Final = (2, 3)  # columns that end on the right


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `fourfold weights`."""
    parser.add_argument("where", help="folder of the run, such as runs/quickstart, or its coordinator's HOST:PORT")
    parser.add_argument("--recipe", type=Path, help="with HOST:PORT of a run with [security]: its TOML file")


def main(args: argparse.Namespace) -> int:
    """Print the weight plane of a run that is going on."""
    address, security = find(args.where, args.recipe)
    plane = asyncio.run(_ask(address, security))
    sys.stdout.write("\n".join(table(plane)) + "\n")
    return 0


def find(where: str, recipe: Path | None) -> tuple[str, Security | None]:
    """Return the coordinator's address, and what the run says of TLS.

    Raises:
        ConfigError: neither an address nor the folder of a run that is going on.
    """
    folder = Path(where)
    if folder.is_dir():
        file = folder / ADDRESS_FILE
        if not file.is_file():
            raise ConfigError(f"{folder}: no run is going on here (no {ADDRESS_FILE}); give a folder of runs/")
        address, recipe = file.read_text(encoding="utf-8").strip(), folder / "config.toml"
    elif re.fullmatch(r"\S+:\d+", where):
        address = where
    else:
        raise ConfigError(f"{where}: neither a folder of runs/ nor HOST:PORT of a coordinator")
    return address, Security.load(configuration.load(recipe).security, VIEWER) if recipe else None


async def _ask(address: str, security: Security | None) -> pb.GetWeightPlaneResponse:
    channel = open_channel(address, security, server=COORDINATOR)
    try:
        client = AsyncCoordinatorClient(channel, peer=f"coordinator at {address}")
        return await client.get_weight_plane(timeout=_TIMEOUT_SECONDS)
    finally:
        await channel.close()


def table(plane: pb.GetWeightPlaneResponse) -> list[str]:
    """Return the lines that are printed."""
    doing = f"{plane.phase} for {plane.phase_seconds:.1f} s" if plane.phase else "no update is under way"
    lines = [f"version {plane.policy_version}, epoch {plane.epoch}: {doing}"]
    if plane.last_update_seconds:
        paused = f"engines paused for {plane.last_pause_seconds:.2f} s of it"
        lines.append(f"last update: {plane.last_update_seconds:.2f} s, {paused}")
    rows = [_HEAD, *(_row(party) for party in plane.parties)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines.append("")
    for row in rows:
        cells = [
            cell.rjust(width) if column in _NUMBERS else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _row(party: pb.WeightParty) -> tuple[str, ...]:
    return (
        party.member_id,
        party.state,
        f"{party.state_seconds:.1f} s",
        "-" if party.policy_version < 0 else str(party.policy_version),
        party.backend or "-",
        ", ".join(party.waits_for) or "-",
        party.last_error,
    )
