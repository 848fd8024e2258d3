"""Implements `fourfold health`: asks a service whether it is ready, for probes of containers and of Kubernetes.

The call uses the certificate of the service itself, because the health service is open to every member.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any, Final

from fourfold.cli.numbers import positive
from fourfold.errors import Unavailable

_SERVICES: Final = {
    "coordinator": "fourfold.coordinator.v1.MembershipService",
    "rollout": "fourfold.rollout.v1.RolloutService",
    "trainer": "fourfold.trainer.v1.TrainerService",
    "reward": "fourfold.reward.v1.RewardService",
    "reference": "fourfold.reference.v1.ReferenceService",
    "gateway": "",
    "environment": "",
}
"""The gRPC service of each role whose health tells that it is ready; empty: the server listens."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("role", choices=list(_SERVICES), help="role of the service")
    parser.add_argument("recipe", type=Path, help="recipe of the run, for its certificates")
    parser.add_argument("target", metavar="HOST:PORT", help="address of the service")
    parser.add_argument("--member-id", default="", help="member whose certificate is used; default: ROLE-0")
    parser.add_argument("--live", action="store_true", help="ask only whether the server listens, ready or not")
    parser.add_argument("--timeout", type=positive, default=5.0, metavar="SECONDS", help="default: 5")


def main(args: argparse.Namespace) -> int:
    """Print the state; return 0 if the service is ready, and raise Unavailable if it is not."""
    asyncio.run(_check(args))
    print(f"{args.role} at {args.target}: {'live' if args.live else 'ready'}")
    return 0


async def _check(args: argparse.Namespace) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from fourfold import config
    from fourfold.rpc.channel import call, open_channel
    from fourfold.security.access import Security
    from fourfold.security.principal import Principal

    security = Security.load(
        config.load(args.recipe).security, Principal(args.role, args.member_id or f"{args.role}-0")
    )
    async with open_channel(args.target, security, server=Principal(args.role)) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="" if args.live else _SERVICES[args.role])
        peer = f"{args.role} at {args.target}"
        response = await call(stub.Check, request, timeout=args.timeout, peer=peer)
    if response.status != health_pb2.HealthCheckResponse.SERVING:
        state = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
        raise Unavailable(f"{args.role} at {args.target} is {state}; it is ready when it has loaded its model")
