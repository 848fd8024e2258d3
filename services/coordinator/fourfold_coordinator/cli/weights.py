"""`fourfold weights RUN_DIR|HOST:PORT`: shows the current weight update of a run and the state of each engine.

version 12, epoch 7: transfer for 3.2 s
last update: 0.84 s, of which engines were paused for 0.31 s

member     state     since  version  backend  waits for  last error
trainer-0  updating  3.2 s       12  -        rollout-1
rollout-0  waiting   0.4 s       11  nccl     rollout-1
rollout-1  updating  3.2 s       11  nccl     trainer-0
"""

from __future__ import annotations

import argparse
import asyncio
import re
from pathlib import Path
from typing import Final

from fourfold import config as configuration
from fourfold.coordinator.client import AsyncCoordinatorClient
from fourfold.coordinator.v1 import run_service_pb2 as pb
from fourfold.errors import ConfigError
from fourfold.rpc.channel import open_channel
from fourfold.security.access import COORDINATOR, VIEWER, Security

from ..launch.run_folder import CONFIG_FILE, read_address

_TIMEOUT_SECONDS: Final = 10.0
_HEAD: Final = ("member", "state", "since", "version", "backend", "waits for", "last error")
_RIGHT_ALIGNED: Final = (2, 3)  # columns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("where", help="folder of the run, such as runs/quickstart, or its coordinator's HOST:PORT")
    parser.add_argument("--recipe", type=Path, help="with HOST:PORT of a run with [security]: its TOML file")


def main(args: argparse.Namespace) -> int:
    """Print the weight plane of a running run."""
    address, security = find_coordinator(args.where, args.recipe)
    print("\n".join(table(asyncio.run(_get_weight_plane(address, security)))))
    return 0


def find_coordinator(where: str, recipe: Path | None) -> tuple[str, Security | None]:
    """Return the coordinator's address, and the TLS files of the run.

    Raises:
        ConfigError: `where` is neither an address nor the folder of a run that was started.
    """
    folder = Path(where)
    if folder.is_dir():
        address, recipe = read_address(folder), folder / CONFIG_FILE
    elif re.fullmatch(r"\S+:\d+", where):
        address = where
    else:
        raise ConfigError(f"{where}: neither a folder of runs/ nor HOST:PORT of a coordinator")
    return address, Security.load(configuration.load(recipe).security, VIEWER) if recipe else None


async def _get_weight_plane(address: str, security: Security | None) -> pb.GetWeightPlaneResponse:
    channel = open_channel(address, security, server=COORDINATOR)
    try:
        client = AsyncCoordinatorClient(channel, peer=f"coordinator at {address}")
        return await client.get_weight_plane(timeout=_TIMEOUT_SECONDS)
    finally:
        await channel.close()


def table(plane: pb.GetWeightPlaneResponse) -> list[str]:
    phase = f"{plane.phase} for {plane.phase_seconds:.1f} s" if plane.phase else "no update in progress"
    lines = [f"version {plane.policy_version}, epoch {plane.epoch}: {phase}"]
    if plane.last_update_seconds:
        paused = f"of which engines were paused for {plane.last_pause_seconds:.2f} s"
        lines.append(f"last update: {plane.last_update_seconds:.2f} s, {paused}")
    lines.append("")
    rows = [_HEAD, *(_row(party) for party in plane.parties)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.rjust(width) if column in _RIGHT_ALIGNED else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
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
