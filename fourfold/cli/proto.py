"""Implements `fourfold proto`: writes the contract for code generators of other languages."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
from pathlib import Path

from fourfold.contract import CONTRACT_VERSION, DESCRIPTOR_SET, PROTO_DIR
from fourfold.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="folder to write into; made when it is absent")


def main(args: argparse.Namespace) -> int:
    """Copy the .proto files, those of error details, and the descriptor set; existing files are replaced."""
    sources = {source.relative_to(PROTO_DIR): source for source in sorted(PROTO_DIR.glob("fourfold/*/v1/*.proto"))}
    sources[Path(DESCRIPTOR_SET)] = PROTO_DIR / DESCRIPTOR_SET
    spec = importlib.util.find_spec("google.rpc.status_pb2")
    if spec is not None and spec.origin:  # the details of errors, which no proto of ours imports
        rpc = Path(spec.origin).parent
        sources |= {Path("google/rpc") / name: rpc / name for name in ("status.proto", "error_details.proto")}
    try:
        for name, source in sources.items():
            target = args.directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    except OSError as error:
        raise ConfigError(f"{args.directory}: the protos cannot be written there: {error}") from None
    print(f"{args.directory}: {len(sources) - 1} .proto files and {DESCRIPTOR_SET}, contract {CONTRACT_VERSION}")
    return 0
