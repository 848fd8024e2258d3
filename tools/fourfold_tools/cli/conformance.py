"""Implements `fourfold conformance`: checks a service of one's own against the contract, without a checkout.

Exit codes: 0 the service keeps the contract; 1 it breaks a rule; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import grpc

from fourfold.cli.numbers import number
from fourfold.config import SecurityConfig
from fourfold.contract import CONTRACT_VERSION
from fourfold.errors import ConfigError
from fourfold.model.folder import resolve
from fourfold.model.tokenizer import tokenizer_sha256
from fourfold.reward.v1 import reward_service_pb2 as pb
from fourfold.reward.v1.reward_service_pb2_grpc import RewardServiceStub
from fourfold.rpc.channel import open_channel
from fourfold.security.access import COORDINATOR, Security
from fourfold.security.principal import Principal
from fourfold.security.tokens import read_token
from fourfold.text import align_columns, nearest_name
from fourfold.types.v1.experience_pb2 import Experience
from fourfold_tools.conformance.checks import Finding, Status
from fourfold_tools.conformance.gateway import CHECKS as GATEWAY_CHECKS
from fourfold_tools.conformance.gateway import GatewayProbe
from fourfold_tools.conformance.gateway.http_client import HttpClient
from fourfold_tools.conformance.membership import MEMBERSHIP, REGISTRATION, MembershipProbe, Started
from fourfold_tools.conformance.reward import CHECKS as REWARD_CHECKS
from fourfold_tools.conformance.reward import RewardProbe
from fourfold_tools.conformance.rollout import CHECKS as ROLLOUT_CHECKS
from fourfold_tools.conformance.rollout import RolloutProbe

_SECONDS: Final = 30.0
_MAX_VALUE: Final = 3600.0
"""Of seconds and tolerances."""
_STATUSES: Final[tuple[Status, ...]] = ("ok", "broken", "skipped", "not run")
_FIELDS: Final = ("prompt", "completion", "answer", "metadata")
_HELP: Final = {
    "reward": "check a RewardService",
    "rollout": "check a RolloutService",
    "gateway": "check an AgentService, and its HTTP API with --http",
}
_MEMBERS: Final = {"reward": "coordinator-0", "rollout": "coordinator-0", "gateway": "environment-0"}
_FIRST: Final = "info"
"""The rule whose check reads what the others need."""
_NAME_WIDTH: Final = 28


def add_arguments(parser: argparse.ArgumentParser) -> None:
    services = parser.add_subparsers(
        dest="service", required=True, metavar="SERVICE", help="reward, rollout or gateway"
    )
    for name, text in _HELP.items():
        service = services.add_parser(name, help=text, description=f"{text[:1].upper()}{text[1:]}.")
        _add_common(service, name)
        {"reward": _add_reward, "rollout": _add_rollout, "gateway": _add_gateway}[name](service)


def _add_common(parser: argparse.ArgumentParser, service: str) -> None:
    optional = "?" if service == "reward" else None
    parser.add_argument("target", nargs=optional, metavar="HOST:PORT", help="address of the service, which is running")
    parser.add_argument(
        "--timeout", type=number, default=_SECONDS, metavar="SECONDS", help="limit of a call; default 30"
    )
    parser.add_argument(
        "--certs", type=Path, metavar="DIR", help="folder of `fourfold certs`, for a service with TLS; or its ca.pem"
    )
    member = _MEMBERS[service]
    parser.add_argument(
        "--member", default=member, metavar="ID", help=f"certificate of DIR to call with; default {member}"
    )
    parser.add_argument(
        "--token", default="", metavar="TOKEN", help="bearer token for a public port, or @FILE; needs --certs"
    )
    parser.add_argument(
        "--model", default="", metavar="SOURCE", help="model.source of the run: compare the hash of its tokenizer"
    )
    parser.add_argument("--only", action="append", default=[], metavar="RULE", help="check this rule; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings to FILE")


def _add_reward(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--unscorable",
        type=Path,
        metavar="FILE",
        help="JSONL of samples that your scorer cannot judge, each with prompt, completion, answer and metadata; none "
        "of them may get a score",
    )
    parser.add_argument(
        "--score-tolerance",
        type=number,
        default=0.0,
        metavar="X",
        help="largest difference between scores of equal samples, relative above 1; for models, whose rounding depends "
        "on the batch, such as 0.05 in bfloat16; default 0",
    )
    parser.add_argument(
        "--coordinator-listen",
        default="",
        metavar="HOST:PORT",
        help="play the coordinator here, and check how the service registers; without a target, its address is the one "
        "that it registers",
    )
    parser.add_argument(
        "--start",
        default="",
        metavar="COMMAND",
        help="command that starts the service, with the coordinator's address in it: it is started, drained, started "
        "again, and ended with SIGTERM; without it, start the service yourself",
    )
    parser.add_argument(
        "--ttl", type=number, default=3.0, metavar="SECONDS", help="time to live of a membership; default 3"
    )


def _add_rollout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tolerance",
        type=number,
        default=0.1,
        metavar="NATS",
        help="largest mean difference between log-probabilities of sampling and of ScoreTokens; default 0.1",
    )


def _add_gateway(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--http", default="", metavar="URL", help="base URL of the HTTP API, such as http://HOST:PORT")


def main(args: argparse.Namespace) -> int:
    """Run the checks; return 0 if the service keeps the contract, and 2 for wrong usage."""
    try:
        return _main(args)
    except ConfigError as error:
        print(f"fourfold conformance: {error.message}", file=sys.stderr)
        return 2


def _main(args: argparse.Namespace) -> int:
    _check(args)
    if args.json is not None:
        _write(args.json, "")  # a path that cannot be written fails before the checks, which take a while
    findings = asyncio.run(_run(args))
    counts = Counter(finding.status for finding in findings)
    if args.json is not None:
        document = {
            "service": args.service,
            "target": args.target or "",
            "contract": CONTRACT_VERSION,
            "counts": dict(counts),
            "findings": [asdict(f) for f in findings],
        }
        _write(args.json, json.dumps(document, indent=1) + "\n")
    _print_summary(args, findings, counts)
    return int(counts["broken"] > 0)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written: {error.strerror or error}") from None


def _check(args: argparse.Namespace) -> None:
    """Raise ConfigError for arguments that are malformed or do not fit together."""
    for name in ("timeout", "ttl", "tolerance"):
        if not 0 < (value := getattr(args, name, 1.0)) <= _MAX_VALUE:  # false for NaN, too
            raise ConfigError(f"--{name} {value:g}: it must be above 0 and at most {_MAX_VALUE:g}")
    if not 0 <= (value := getattr(args, "score_tolerance", 0.0)) <= _MAX_VALUE:
        raise ConfigError(f"--score-tolerance {value:g}: it must be 0 to {_MAX_VALUE:g}")
    if args.token and args.certs is None:
        raise ConfigError("--token without --certs: a token never travels without TLS; give --certs DIR or ca.pem")
    listen = getattr(args, "coordinator_listen", "")
    if args.target is None and not listen:
        raise ConfigError("the address HOST:PORT of the service is missing")
    if getattr(args, "start", "") and not listen:
        raise ConfigError("--start without --coordinator-listen: give the address at which the service registers")
    if getattr(args, "http", ""):
        HttpClient(args.http, seconds=args.timeout, authority=_authority(args.certs))
    known = {
        "reward": [*REWARD_CHECKS.names, *(MEMBERSHIP.names if listen else ())],
        "rollout": ROLLOUT_CHECKS.names,
        "gateway": GATEWAY_CHECKS.names,
    }[args.service]
    for name in args.only:
        if name not in known:
            near = nearest_name(name, known)
            hint = f"did you mean {near}?" if near else f"rules: {', '.join(known)}"
            raise ConfigError(f"--only {name}: there is no such rule; {hint}")


async def _run(args: argparse.Namespace) -> Sequence[Finding]:
    if args.service == "reward":
        return await _run_reward(args)
    only = [_FIRST, *args.only] if args.only else []
    async with _open(args, args.target) as channel:
        common: dict[str, Any] = {
            "channel": channel,
            "peer": f"service at {args.target}",
            "seconds": args.timeout,
            "tokenizer_sha256": _tokenizer(args),
            "agent": bool(args.token),
        }
        if args.service == "rollout":
            rollout = RolloutProbe(**common, tolerance=args.tolerance)
            return await ROLLOUT_CHECKS.run(rollout, only=only, on_finding=_print)
        authority = _authority(args.certs)
        gateway = GatewayProbe(**common, http=args.http.rstrip("/"), token=read_token(args.token), authority=authority)
        return await GATEWAY_CHECKS.run(gateway, only=only, on_finding=_print)


async def _run_reward(args: argparse.Namespace) -> Sequence[Finding]:
    fields: dict[str, Any] = {
        "tokenizer_sha256": _tokenizer(args),
        "unscorable": _read_unscorable(args.unscorable) if args.unscorable else (),
    }
    if not args.coordinator_listen:
        return await _score(args, args.target, fields)
    security = _security(args, COORDINATOR.role, "coordinator-0")
    started = Started(_words(args.start)) if args.start else None
    probe = MembershipProbe(
        listen=args.coordinator_listen,
        security=security,
        seconds=args.timeout,
        ttl=args.ttl,
        launcher=started,
        open_target=lambda target: _open(args, target),
    )
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(probe)
        print(f"the coordinator listens on {probe.listen}; waiting for the service to register", flush=True)
        findings = [*await REGISTRATION.run(probe, on_finding=_print)]
        if not probe.target:
            return findings
        args.target = args.target or probe.target
        wanted = [name for name in args.only if name in REWARD_CHECKS.names]
        if wanted or not args.only:
            findings += await _score(args, args.target, fields)
        wanted = [name for name in args.only if name in MEMBERSHIP.names]
        if wanted or not args.only:
            findings += await MEMBERSHIP.run(probe, only=wanted, on_finding=_print)
        return findings


def _words(command: str) -> list[str]:
    """Return the words of --start."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"--start {command!r:.200}: {error}; quote it as for a shell") from None
    if not words:
        raise ConfigError(f"--start {command!r:.200}: give a program with its arguments")
    return words


async def _score(args: argparse.Namespace, target: str, fields: dict[str, Any]) -> Sequence[Finding]:
    only = [_FIRST, *(name for name in args.only if name in REWARD_CHECKS.names)] if args.only else []
    async with _open(args, target) as channel:
        fields["tolerance"] = args.score_tolerance
        made = RewardProbe(RewardServiceStub(channel), f"service at {target}", args.timeout, **fields)
        return await REWARD_CHECKS.run(made, only=only, on_finding=_print)


def _open(args: argparse.Namespace, target: str) -> grpc.aio.Channel:
    """Open a channel to the service as the caller that the arguments name."""
    server = Principal(args.service)
    if token := read_token(args.token):
        return open_channel(target, Security.for_agent(_authority(args.certs)), server=server, token=token)
    return open_channel(
        target, _security(args, args.member.rpartition("-")[0] or args.member, args.member), server=server
    )


def _security(args: argparse.Namespace, role: str, member: str) -> Security | None:
    if args.certs is None:
        return None
    return Security.load(SecurityConfig(directory=str(args.certs)), Principal(role, member))


def _authority(certs: Path | None) -> Path:
    """Return the file with the CA's certificate."""
    return Path() if certs is None else certs / "ca.pem" if certs.is_dir() else certs


def _tokenizer(args: argparse.Namespace) -> bytes:
    return tokenizer_sha256(resolve(args.model)) if args.model else b""


def _print(finding: Finding) -> None:
    print(f"{finding.status:8} {finding.name:{_NAME_WIDTH}} {finding.rule}")
    if finding.text:
        print(f"{'':8} {'':{_NAME_WIDTH}} {finding.text}")
    sys.stdout.flush()


def _print_summary(args: argparse.Namespace, findings: Sequence[Finding], counts: Counter[Any]) -> None:
    broken = [finding for finding in findings if finding.status == "broken"]
    if broken:
        print("\nbroken rules:")
        for finding in broken:
            print(f"  {finding.name:{_NAME_WIDTH}} {finding.text}")
    seconds = sum(finding.seconds for finding in findings)
    where = args.target or args.coordinator_listen
    print(f"\n{args.service} service at {where}, contract {CONTRACT_VERSION}, {seconds:.0f} s")
    for line in align_columns([("rules", *_STATUSES), ("", *(str(counts[status]) for status in _STATUSES))]):
        print(line.rstrip())


def _read_unscorable(path: Path) -> list[pb.ScoreItem]:
    items = list[pb.ScoreItem]()
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # `splitlines` also splits at U+2028, within a text
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--unscorable {path}: cannot be read: {error}") from None
    for row_number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"--unscorable {path}, line {row_number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not JSON: {error}") from None
        if not isinstance(row, dict) or not row.keys() <= set(_FIELDS):
            raise ConfigError(f"{where}: it must be an object of {', '.join(_FIELDS)}")
        try:
            item = pb.ScoreItem(
                experience=Experience(sample_id=f"unscorable-{row_number}"),
                prompt_text=str(row.get("prompt", "")),
                completion_text=str(row.get("completion", "")),
                answer=str(row.get("answer", "")),
                metadata_json=json.dumps(row["metadata"]) if "metadata" in row else "",
            )
        except UnicodeEncodeError as error:
            raise ConfigError(f"{where}: half of a surrogate pair is no text: {error}") from None
        items.append(item)
    return items
