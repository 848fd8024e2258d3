"""Implements `fourfold conformance`: checks a service of one's own against the contract, without a checkout."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from fourfold.config import SecurityConfig
from fourfold.conformance.checks import Finding
from fourfold.conformance.reward import CHECKS, RewardProbe
from fourfold.contract import CONTRACT_VERSION
from fourfold.errors import ConfigError
from fourfold.model.folder import resolve
from fourfold.model.tokenizer import tokenizer_sha256
from fourfold.reward.v1 import reward_service_pb2 as pb
from fourfold.reward.v1.reward_service_pb2_grpc import RewardServiceStub
from fourfold.rpc.channel import open_channel
from fourfold.security.access import Security
from fourfold.security.principal import Principal
from fourfold.types.v1.experience_pb2 import Experience

_SECONDS: Final = 30.0
_FIELDS: Final = ("prompt", "completion", "answer", "metadata")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("service", choices=("reward",), help="kind of the service")
    parser.add_argument("target", metavar="HOST:PORT", help="address of the service, which is running")
    parser.add_argument(
        "--timeout", type=float, default=_SECONDS, metavar="SECONDS", help="limit of a call; default 30"
    )
    parser.add_argument("--certs", type=Path, metavar="DIR", help="folder of `fourfold certs`, for a service with TLS")
    parser.add_argument(
        "--member", default="coordinator-0", metavar="ID", help="certificate to call with; default coordinator-0"
    )
    parser.add_argument(
        "--model", default="", metavar="SOURCE", help="model.source of the run, for a service that reads tokens"
    )
    parser.add_argument(
        "--unscorable",
        type=Path,
        metavar="FILE",
        help="JSONL of samples that your scorer cannot judge, each with prompt, completion, answer and metadata; none "
        "of them may get a score",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings to FILE")


def main(args: argparse.Namespace) -> int:
    """Run the checks; return 0 if the service keeps the contract."""
    if args.timeout <= 0:
        raise ConfigError(f"--timeout {args.timeout:g}: it must be above 0")
    probe: dict[str, Any] = {
        "tokenizer_sha256": tokenizer_sha256(resolve(args.model)) if args.model else b"",
        "unscorable": _read_unscorable(args.unscorable) if args.unscorable else (),
    }
    findings = asyncio.run(_run(args, probe))
    if args.json is not None:
        document = {"target": args.target, "contract": CONTRACT_VERSION, "findings": [asdict(f) for f in findings]}
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    counts = Counter(finding.status for finding in findings)
    print(f"{args.target}: " + ", ".join(f"{count} {status}" for status, count in counts.items()))
    return int(counts["broken"] > 0)


async def _run(args: argparse.Namespace, probe: dict[str, Any]) -> Sequence[Finding]:
    security = None
    if args.certs is not None:
        member = Principal(args.member.rpartition("-")[0] or args.member, args.member)
        security = Security.load(SecurityConfig(directory=str(args.certs)), member)
    async with open_channel(args.target, security, server=Principal("reward")) as channel:
        made = RewardProbe(RewardServiceStub(channel), f"service at {args.target}", args.timeout, **probe)
        return await CHECKS.run(made, on_finding=_print)


def _print(finding: Finding) -> None:
    print(f"{finding.status:8} {finding.name:21} {finding.rule}")
    if finding.text:
        print(f"{'':8} {'':21} {finding.text}")
    sys.stdout.flush()


def _read_unscorable(path: Path) -> list[pb.ScoreItem]:
    items = list[pb.ScoreItem]()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--unscorable {path}: cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"--unscorable {path}, line {number}: not JSON: {error}") from None
        if not isinstance(row, dict) or not row.keys() <= set(_FIELDS):
            raise ConfigError(f"--unscorable {path}, line {number}: it must be an object of {', '.join(_FIELDS)}")
        items.append(
            pb.ScoreItem(
                experience=Experience(sample_id=f"unscorable-{number}"),
                prompt_text=str(row.get("prompt", "")),
                completion_text=str(row.get("completion", "")),
                answer=str(row.get("answer", "")),
                metadata_json=json.dumps(row["metadata"]) if "metadata" in row else "",
            )
        )
    return items
