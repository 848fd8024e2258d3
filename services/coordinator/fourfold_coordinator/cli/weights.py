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
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from fourfold import config as configuration
from fourfold.coordinator.client import CoordinatorClient
from fourfold.coordinator.v1 import run_service_pb2 as pb
from fourfold.errors import ConfigError
from fourfold.text import align_columns

from ..launch.run_folder import find_run, read_address
from ..launch.run_names import CONFIG_FILE

_TIMEOUT_SECONDS: Final = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "where",
        metavar="RUN_DIR|HOST:PORT",
        help="folder of the run, such as runs/quickstart, or address of its coordinator",
    )
    parser.add_argument("--recipe", type=Path, help="with HOST:PORT of a run with [security]: its TOML file")


def add_actions(parser: argparse.ArgumentParser, actions: Mapping[str, str]) -> dict[str, argparse.ArgumentParser]:
    """Add a subcommand for each action on a running run, with its help text; return the parsers by name."""
    parsers = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, text in actions.items():
        add_arguments(parsers.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}."))
    return parsers.choices


def main(args: argparse.Namespace) -> int:
    """Print the weight plane of a running run."""
    address, certs = find_coordinator(args.where, args.recipe)
    with CoordinatorClient(address, certs=certs) as client:
        print("\n".join(table(client.get_weight_plane(timeout=_TIMEOUT_SECONDS))))
    return 0


def find_coordinator(where: str, recipe: Path | None) -> tuple[str, str]:
    """Return the coordinator's address, and the folder of the run's certificates; empty without TLS."""
    folder = find_run(Path(where))
    if folder.is_dir():
        address, recipe = read_address(folder), folder / CONFIG_FILE
    elif re.fullmatch(r"\S+:\d+", where):
        address = where
    else:
        raise ConfigError(f"{where}: neither a folder of runs/ nor HOST:PORT of a coordinator")
    return address, configuration.load(recipe).security.directory if recipe else ""


def table(plane: pb.GetWeightPlaneResponse) -> list[str]:
    phase = f"{plane.phase} for {plane.phase_seconds:.1f} s" if plane.phase else "no update in progress"
    lines = [f"version {plane.policy_version}, epoch {plane.epoch}: {phase}"]
    if plane.last_update_seconds:
        paused = f"of which engines were paused for {plane.last_pause_seconds:.2f} s"
        lines.append(f"last update: {plane.last_update_seconds:.2f} s, {paused}")
    rows = [("member", "state", "since", "version", "backend", "waits for", "last error")]
    for party in plane.parties:
        version = "-" if party.policy_version < 0 else str(party.policy_version)
        waits_for = ", ".join(party.waits_for) or "-"
        since, backend = f"{party.state_seconds:.1f} s", party.backend or "-"
        rows.append((party.member_id, party.state, since, version, backend, waits_for, party.last_error))
    return [*lines, "", *align_columns(rows, left=(0, 1, 4, 5, 6))]
